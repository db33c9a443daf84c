"""Warm start: training begins with the weights of a head that is there already, ours or another tool's.

In: `training.initial_head`, the draft's config, the vocabulary map. Out: the draft with the head's weights, and a line that
says what was taken; or a StageError where head and draft contradict each other, before a model is built.

The head's own `lm_head` comes along, row by row by target id; tokens that it does not know get the target's row. Where these
rows are not the target's, they stay frozen like the target's and travel with the checkpoints into the export.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.presets import SHAPE
from scripts.eagle3.third_party import (
    FIRST,
    HEAD,
    IDS,
    NORM_FLAGS,
    ONLY,
    WEIGHTS,
    ForeignHead,
    canonical_ids,
    check_fits,
    drafted_ids,
    read_foreign_head,
)

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

# what the target decides in our draft and a head may have otherwise: its weights still fit, and training adapts them
ADAPTED = ("rms_norm_eps", "rope_parameters", "max_position_embeddings")


def check_initial_head(
    path: str, target: Target, layer: Mapping[str, Any], flags: Mapping[str, bool]
) -> tuple[ForeignHead, list[str]]:
    """The head, and what training has to adapt; StageError where head and draft have not the same shape.

    layer: the draft's decoder config. flags: its norm flags.
    """
    head = read_foreign_head(Path(path))
    where = f"training.initial_head {path}"
    if head.kind == "latent":
        raise StageError(f"{where}: a head with latent attention; expected a Llama head, as the draft is one")
    check_fits(head, target)
    ids = canonical_ids(head, target, advice=f"write the ids of `vllm serve` into its config.json, under {IDS}")
    if ids != target.aux_layer_ids:
        raise StageError(
            f"{where}: trained on states {ids}, this run's draft reads {target.aux_layer_ids}; set target.aux_layer_ids to "
            "the head's, or start without it"
        )
    for key in SHAPE:
        if head.layer[key] != layer[key]:
            raise StageError(f"{where}: {key} is {head.layer[key]}, the draft's is {layer[key]}; set draft.{key} to the head's")
    for flag in NORM_FLAGS:
        if head.flags[flag] != flags.get(flag, False):
            advice = "start without it" if flag == "fc_norm" else f"set draft.{flag} to the head's"
            raise StageError(f"{where}: {flag} is {head.flags[flag]}, the draft's is {flags.get(flag, False)}; {advice}")
    changed = [f"{key} {head.layer.get(key)} -> {layer[key]}" for key in ADAPTED if head.layer.get(key) != layer[key]]
    return head, changed


def start_from(model: "Eagle3DraftModel", head: ForeignHead) -> str:
    """Loads the head into a draft that `build_draft` made; returns what was taken, for the log."""
    import torch
    from safetensors.torch import load_file

    from scripts.eagle3.draft import check_finite, target_ids, trainable_state

    tensors = {name.replace(ONLY, FIRST): tensor for name, tensor in load_file(head.folder / WEIGHTS).items()}
    own = trainable_state(model)
    with torch.no_grad():
        for name, weight in own.items():
            weight.copy_(tensors[name])
        known = drafted_ids(head)
        place = torch.full((head.layer["vocab_size"],), -1)
        place[known] = torch.arange(len(known))
        asked = torch.arange(model.draft_vocab_size) if model.d2t is None else target_ids(model.d2t.cpu())
        taken = place[asked] >= 0
        rows = tensors[HEAD][place[asked][taken]]
        model.lm_head.weight[taken] = rows.to(model.lm_head.weight)
    check_finite(model)
    same = "the map is the same" if torch.equal(known, asked) else "another map"
    kept = int(taken.sum())
    return (
        f"{head.folder}: {len(own)} tensors; {same}: {kept} rows of lm_head by target id, {len(asked) - kept} new from the "
        f"target's head, {len(known) - kept} of the head's tokens dropped"
    )
