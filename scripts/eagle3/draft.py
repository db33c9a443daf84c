"""The draft head: speculators' `Eagle3DraftModel`, built from our own files and run on rows of a hidden-state shard.

In: draft/config.json, target/head.safetensors, vocab/d2t.npy and t2d.npy; rows with states. Out: a model whose frozen
tensors are the target's, the inputs of its forward, and its trainable weights as a file.

Draft position t takes the auxiliary states of token t and the token x[t+1], and predicts x[t+2]. TTT step k > 0 from
the same position takes the draft's own state and x[t+1+k], and predicts x[t+2+k].
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, sha256_file, write_atomically
from scripts.eagle3.provenance import PROVENANCE_KEY, check_provenance
from scripts.eagle3.row_key import final_positions
from scripts.eagle3.shards import StateRow

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

Attention = Literal["sdpa", "flex"]
ATTENTION_NAMES = {"sdpa": "sdpa", "flex": "simple_flex_attention"}
HEAD_TENSORS = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
OWN_HEAD = "lm_head.weight"
FROZEN = ("embed_tokens.", "lm_head.", "verifier_lm_head.", "verifier_norm.")
# flex attention extends its block mask by whole blocks of 128 per TTT step: its batches must be a multiple of that long
FLEX_BLOCK = 128


def build_draft(
    config: Path,
    head: Path,
    d2t: Path,
    t2d: Path,
    *,
    attention: Attention | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> "Eagle3DraftModel":
    """A draft on the CPU with random trainable weights (from `seed`) and the target's embedding, norm and head, frozen.

    attention: None means flex where CUDA is available, else sdpa. Only speculators' model class is used, never its own
    loading by verifier path. Raises StageError where head, config and vocabulary map were made from different targets,
    where sizes disagree, or where a tensor stayed unset.
    """
    model_config = read_draft_config(config, attention)
    check_same_target(config, head, d2t)
    vocabulary = read_vocabulary(d2t, t2d, model_config.draft_vocab_size, model_config.target_vocab_size)
    tensors = read_head(head)
    hidden, vocab = model_config.transformer_layer_config.hidden_size, model_config.target_vocab_size
    for name, shape in zip(HEAD_TENSORS, ([vocab, hidden], [hidden], [vocab, hidden]), strict=True):
        expect(
            shape,
            list(tensors[name].shape),
            f"{head}: {name}",
            f"remake it, or {config}: they are of different targets",
        )

    from speculators.models.eagle3 import Eagle3DraftModel

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Eagle3DraftModel(model_config)
    model.load_vocab_mappings(vocabulary[1], vocabulary[0])
    set_frozen(model, tensors, vocabulary[1])
    # the weights only: `model.to` would round the rotary frequencies too, a phase error of radians at long positions
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    check_finite(model)
    return model


def set_frozen(model: "Eagle3DraftModel", head: Mapping[str, torch.Tensor], t2d: torch.Tensor) -> None:
    """Copies the target's embedding, norm and the rows of its head that `t2d` [target vocabulary] selects, frozen."""
    sliced = head["lm_head.weight"][t2d]
    frozen = (
        (model.embed_tokens, head["embed_tokens.weight"]),
        (model.verifier_norm, head["norm.weight"]),
        (model.lm_head, sliced),
        (model.verifier_lm_head, sliced),
    )
    with torch.no_grad():
        for module, weight in frozen:
            module.weight.copy_(weight)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(FROZEN))


def check_finite(model: torch.nn.Module) -> None:
    """StageError where a weight is NaN or infinite: speculators marks tensors that were never loaded with NaN."""
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise StageError(f"draft: {name} holds values that are not finite; it was never loaded, or training diverged")


def read_draft_config(path: Path, attention: Attention | None = None) -> Any:
    """Eagle3SpeculatorConfig of draft/config.json, with the attention implementation set (it is not stored)."""
    values = read_json(path)
    if values.get("speculators_model_type") != "eagle3":
        raise StageError(
            f"{path}: speculators_model_type is {values.get('speculators_model_type')}, expected eagle3; remake it"
        )
    if attention is None:
        attention = "flex" if torch.cuda.is_available() else "sdpa"
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    config = Eagle3SpeculatorConfig.from_dict(values)
    config.transformer_layer_config._attn_implementation = ATTENTION_NAMES[attention]
    return config


def read_head(path: Path) -> dict[str, torch.Tensor]:
    """The target's `embed_tokens.weight`, `lm_head.weight` [vocabulary, hidden] and `norm.weight` [hidden]."""
    from safetensors.torch import load_file

    _require(path)
    tensors = load_file(path)
    expect(sorted(HEAD_TENSORS), sorted(tensors), f"{path}: tensors", "remake it with extract_target_head")
    return tensors


def head_metadata(path: Path) -> dict[str, str]:
    """Metadata of head.safetensors: `provenance` (JSON) and `rms_norm_eps`."""
    from safetensors import SafetensorError, safe_open

    _require(path)
    try:
        with safe_open(path, "pt") as file:
            return dict(file.metadata() or {})
    except SafetensorError as error:
        raise StageError(f"{path}: not a readable safetensors file ({error}); remake it") from error


def read_vocabulary(d2t: Path, t2d: Path, draft_vocab_size: int, target_vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(d2t [draft] int64 offsets, t2d [target] bool), checked against each other and against both sizes."""
    _require(d2t)
    _require(t2d)
    offsets, mask = torch.from_numpy(np.load(d2t)), torch.from_numpy(np.load(t2d))
    advice = "remake it with build_vocab_mapping"
    expect(([draft_vocab_size], torch.int64), (list(offsets.shape), offsets.dtype), f"{d2t}: shape and dtype", advice)
    expect(([target_vocab_size], torch.bool), (list(mask.shape), mask.dtype), f"{t2d}: shape and dtype", advice)
    expect(draft_vocab_size, int(mask.sum()), f"{t2d}: true values", advice)
    if not torch.equal(target_ids(offsets), mask.nonzero().flatten()):
        raise StageError(f"{d2t}: draft id + offset differs from the true positions of {t2d}; {advice}")
    return offsets, mask


def target_ids(d2t: torch.Tensor) -> torch.Tensor:
    """[draft] target id of each draft id, from the offsets."""
    return torch.arange(len(d2t)) + d2t


def check_same_target(config: Path, head: Path, d2t: Path) -> None:
    """StageError unless head and vocabulary map were made from the target that the draft's config names.

    A vocabulary map knows the tokens of a target, not its weights: tokenizer and chat template are compared.
    """
    target = provenance_of(config)["target"]
    check_provenance({"target": target}, provenance_of(head), head)
    coverage = Path(d2t).with_name("coverage.json")
    record = read_json(coverage)
    tokens = {name: target[name] for name in ("tokenizer", "chat_template")}
    check_provenance({"target": tokens}, record["provenance"], coverage)
    _require(d2t)
    expect(record["sha256"][d2t.name], sha256_file(d2t), f"{d2t}: sha256", "remake it with build_vocab_mapping")


def provenance_of(path: Path) -> dict[str, Any]:
    """Provenance of draft/config.json, of an export's config.json, or of head.safetensors."""
    path = Path(path)
    if path.suffix == ".safetensors":
        text = head_metadata(path).get("provenance")
        found = json.loads(text) if text else None
    else:
        found = read_json(path).get(PROVENANCE_KEY, {}).get("provenance")
    if not found:
        raise StageError(f"{path}: no provenance in it; it was not made by this workflow; remake it")
    return found


def trainable_state(model: "Eagle3DraftModel") -> dict[str, torch.Tensor]:
    """Name -> weight of everything that is trained: fc, layers, norm, input_norm. No copies."""
    return {name: tensor for name, tensor in model.state_dict().items() if _is_trainable(name)}


def save_trainable(state: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes trainable weights in float32, atomically."""
    from safetensors.torch import save_file

    masters = {name: tensor.detach().to("cpu", torch.float32).contiguous() for name, tensor in state.items()}
    write_atomically(path, lambda unfinished: save_file(masters, unfinished))


def load_trainable(model: "Eagle3DraftModel", path: Path) -> None:
    """Loads weights written by `save_trainable`; StageError unless names and shapes are exactly those of the model.

    The weights may bring an `lm_head` of their own (from an initial head); without one it is the target's.
    """
    from safetensors.torch import load_file

    _require(path)
    state, own = load_file(path), trainable_state(model)
    head = {OWN_HEAD: state.pop(OWN_HEAD, model.verifier_lm_head.weight)}
    expect(list(model.lm_head.weight.shape), list(head[OWN_HEAD].shape), f"{path}: {OWN_HEAD}", "train again")
    expect(_shapes(own), _shapes(state), f"{path}: tensors", "the draft: section changed since; train again")
    model.load_state_dict(state | head, strict=False)
    check_finite(model)


def draft_inputs(row: StateRow) -> dict[str, torch.Tensor]:
    """What the draft sees of one row of T tokens, unbatched, T - 1 positions:

    hidden_states [T-1, aux * hidden] (auxiliary states of tokens 0 .. T-2), input_ids [T-1] int64 (tokens 1 .. T-1),
    verifier_last_hidden_states [T-1, hidden] (final states of tokens 1 .. T-1), loss_mask [T-1] bool, position_ids
    [T-1] from 1. loss_mask is `draft_loss_mask`. StageError where it needs a final state that the shard does not hold.
    """
    ids = row.token_ids.long()
    if len(ids) < 2:
        raise StageError(f"row {row.key}: {len(ids)} tokens; a draft needs at least 2")
    loss_mask = draft_loss_mask(row.loss_mask)
    if row.has_final is not None and (loss_mask & ~row.has_final[1:]).any():
        absent = int((loss_mask & ~row.has_final[1:]).sum())
        raise StageError(
            f"row {row.key}: the loss mask asks for {int(loss_mask.sum())} final states, {absent} of them are not stored; "
            "extract again with this mask, or with extraction.final_states all"
        )
    return {
        "hidden_states": row.hidden_states[:-1, :-1].flatten(1),
        "input_ids": ids[1:],
        "verifier_last_hidden_states": row.hidden_states[1:, -1],
        "loss_mask": loss_mask,
        "position_ids": torch.arange(1, len(ids)),
    }


def draft_loss_mask(loss_mask: torch.Tensor) -> torch.Tensor:
    """Mask [T] of a row's tokens -> mask [T-1] of the draft positions that are supervised.

    Position t says that both x[t+1] and x[t+2] are the target's own answer. x[t+1] alone, which is speculators' mask,
    also supervises what follows the last token of an answer: a user's turn, or nothing at all. And a draft from before
    the first answer token never happens in serving. After the row's last token nothing is known, so the last value is
    False. At TTT step k the loss reads this mask k places further on (`compute_metrics`), which is right for x[t+2+k].
    """
    return torch.from_numpy(final_positions(loss_mask.numpy()))[1:]


def single_row_batch(inputs: Mapping[str, torch.Tensor], multiple_of: int = FLEX_BLOCK) -> dict[str, torch.Tensor]:
    """`draft_inputs` of one row as the model's batch [1, length, ...]: zero-padded, padding has document id -1."""
    length = len(inputs["input_ids"])
    padding = -length % multiple_of
    batch = {name: _pad(tensor, padding).unsqueeze(0) for name, tensor in inputs.items()}
    document_ids = torch.zeros(length, dtype=torch.int64)
    batch["document_ids"] = torch.nn.functional.pad(document_ids, (0, padding), value=-1).unsqueeze(0)
    return batch


def forward(
    model: "Eagle3DraftModel",
    batch: Mapping[str, torch.Tensor],
    ttt_steps: int,
    *,
    loss: str | None = None,
    step_loss_decay: float = 1.0,
) -> tuple[list[torch.Tensor], torch.Tensor | None, dict[str, torch.Tensor]]:
    """Teacher-forced forward: (draft ids per TTT step, each [1, length]; loss; metrics of speculators).

    Moves the batch to the model's device and the states to its dtype. Without `loss` (a name as in training.loss) no
    target distribution is computed: the loss is None and there are no metrics. Losses are eager on CPU, fused on CUDA.
    """
    device, dtype = model.fc.weight.device, model.fc.weight.dtype
    moved = {name: tensor.to(device, dtype if tensor.is_floating_point() else None) for name, tensor in batch.items()}
    if loss is None:
        del moved["verifier_last_hidden_states"], moved["loss_mask"]
        return model(**moved, ttt_steps=ttt_steps), None, {}
    from speculators.losses import resolve_loss_config

    loss_config = resolve_loss_config(loss, "fused" if device.type == "cuda" else "eager")
    return model(**moved, ttt_steps=ttt_steps, ttt_step_loss_decay=step_loss_decay, loss_config=loss_config)


def _is_trainable(name: str) -> bool:
    return not name.startswith(FROZEN) and name not in ("d2t", "t2d")


def _shapes(state: Mapping[str, torch.Tensor]) -> dict[str, list[int]]:
    return {name: list(state[name].shape) for name in sorted(state)}


def _pad(tensor: torch.Tensor, padding: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_zeros(padding, *tensor.shape[1:])]) if padding else tensor


def _require(path: Path) -> None:
    if not Path(path).is_file():
        raise StageError(f"{path}: no such file")
