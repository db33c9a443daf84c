"""EAGLE-3 heads that other tools trained: read, compared with the target, brought into our format, and back.

In: a folder with config.json and safetensors, of one of three kinds: `speculators` (our own exports among them), `llama`
(SpecForge, AQ-MedAI: LlamaForCausalLMEagle3, tensors `midlayer.*`) and `latent` (Eagle3DeepseekV2ForCausalLM, which only
vLLM runs). Out: facts that were compared, a folder that vLLM serves with the right auxiliary states, or a StageError.

Tensors are never changed, only renamed. What the config of a `llama` head does not say is as that family computes it: no
norm before `fc`, and the residual is the auxiliary projection before its norm. d2t holds offsets in all three kinds.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from scripts.eagle3.config import Target
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_atomically, write_json
from scripts.eagle3.layers import check_aux_layer_ids, default_aux_layer_ids, from_layer_indices, to_layer_indices
from scripts.eagle3.provenance import PROVENANCE_KEY
from scripts.eagle3.target import fingerprint, resolve_folder, text_config

if TYPE_CHECKING:
    import torch

Kind = Literal["speculators", "llama", "latent"]
ARCHITECTURES: dict[str, Kind] = {
    "LlamaForCausalLMEagle3": "llama",
    "Eagle3LlamaForCausalLM": "llama",
    "Eagle3DeepseekV2ForCausalLM": "latent",
    "Eagle3DeepseekV3ForCausalLM": "latent",
}
# vLLM 0.32's SpeculativeConfig.hf_config_override
READ_AS_MTP = ("deepseek_v3", "deepseek_v32")
IDS = "eagle_aux_hidden_state_layer_ids"
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"
FIRST, ONLY = "layers.0.", "midlayer."
ORIGINAL = "third_party"
LAYER_DEFAULTS = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "mlp_bias": False,
    "initializer_range": 0.02,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
DTYPES = {"BF16": "bfloat16", "F32": "float32", "F16": "float16"}


@dataclass(frozen=True)
class ForeignHead:
    """A head's folder: config.json, and the shapes [..] and dtypes of its tensors from the header; no tensor is read."""

    folder: Path
    kind: Kind
    config: dict[str, Any]
    tensors: dict[str, tuple[list[int], str]]

    @cached_property
    def layer(self) -> dict[str, Any]:
        """The decoder's config with LlamaConfig's names, all of them written out."""
        if self.kind == "speculators":
            return dict(self.config["transformer_layer_config"])
        if self.kind == "latent":
            return self.config
        found = self.config
        missing = [key for key in (*SIZES, "max_position_embeddings") if found.get(key) is None]
        if missing:
            raise StageError(f"{self.folder}/config.json: no {', '.join(missing)}; fetch the head again")
        heads = found["num_attention_heads"]
        return {
            "model_type": "llama",
            **{key: found[key] for key in (*SIZES, "max_position_embeddings")},
            "num_key_value_heads": found.get("num_key_value_heads") or heads,
            "head_dim": found.get("head_dim") or found["hidden_size"] // heads,
            "rope_parameters": _rope(found),
            "tie_word_embeddings": False,
            **{key: found.get(key, default) for key, default in LAYER_DEFAULTS.items()},
        }

    @cached_property
    def flags(self) -> dict[str, bool]:
        """Norm variants, as vLLM reads them."""
        default = self.kind == "speculators"  # of norm_before_residual, in vLLM's reading of that format
        flags = {flag: self.config.get(flag, default and flag == "norm_before_residual") for flag in NORM_FLAGS}
        inner = self.config.get("eagle_config") or {}
        return {**flags, "norm_before_fc": inner.get("norm_before_fc", flags["norm_before_fc"])}

    @property
    def draft_vocab_size(self) -> int:
        """Tokens that it can propose; without the key: all."""
        return int(self.config.get("draft_vocab_size") or self.layer["vocab_size"])

    @property
    def written_ids(self) -> list[int] | None:
        """The auxiliary ids as the config has them, of either numbering."""
        found = self.config.get(IDS) or (self.config.get("eagle_config") or {}).get(IDS)
        return list(found) if found else None


def read_foreign_head(folder: Path) -> ForeignHead:
    """Reads config.json and the header; StageError where it is not an EAGLE-3 head of a known kind, in safetensors."""
    if not (folder / "config.json").is_file():
        raise StageError(f"{folder}: no head there (no config.json); expected a folder with config.json and {WEIGHTS}")
    config = read_json(folder / "config.json")
    names = config.get("architectures") or []
    kind = ARCHITECTURES.get(names[0]) if names else None
    if config.get("speculators_model_type") == "eagle3":
        kind = "speculators"
    if kind is None:
        raise StageError(
            f"{folder}/config.json: architectures is {names}: expected an EAGLE-3 head: speculators' format, or one of "
            f"{', '.join(ARCHITECTURES)}"
        )
    if (config.get("eagle_config") or {}).get("use_aux_hidden_state") is False:
        raise StageError(f"{folder}/config.json: use_aux_hidden_state is false: an EAGLE-1 head; expected EAGLE-3")
    files = sorted(folder.glob("*.safetensors"))
    if not files or (kind != "latent" and [path.name for path in files] != [WEIGHTS]):
        found = ", ".join(path.name for path in files) or "none"
        raise StageError(f"{folder}: safetensors files: {found}; expected {WEIGHTS}: save the head as one safetensors file")
    return ForeignHead(folder, kind, config, {name: entry for path in files for name, entry in _header(path).items()})


def check_fits(head: ForeignHead, target: Target) -> None:
    """StageError where the head cannot be one of this target: width, vocabulary, or tensors that its config denies."""
    text, where = text_config(target), f"{head.folder}/config.json"
    for key, found in (
        ("hidden_size", head.layer.get("hidden_size")),
        ("vocab_size", head.layer.get("vocab_size")),
    ):
        if found != text[key]:
            raise StageError(f"{where}: {key} is {found}, the target's is {text[key]}: a head of another target; take its own")
    if head.kind == "latent" and head.config.get("model_type") in READ_AS_MTP:
        raise StageError(
            f"{where}: model_type is {head.config['model_type']}, which vLLM takes for that model's own MTP layers; write "
            "kimi_k2 there, as the published heads have it"
        )
    expected = _expected_shapes(head)
    missing = sorted(expected.keys() - head.tensors.keys())
    known = {*expected, "d2t", "t2d", EMBEDDING}
    unknown = sorted(name for name in head.tensors if head.kind != "latent" and name not in known)
    if missing or unknown:
        raise StageError(f"{head.folder}: tensors missing: {missing}, unknown: {unknown}; fetch the head again")
    shapes = {**expected, "d2t": [head.draft_vocab_size], "t2d": [text["vocab_size"]]}
    shapes[EMBEDDING] = [text["vocab_size"], head.layer["hidden_size"]]
    for name, shape in shapes.items():
        if name in head.tensors and head.tensors[name][0] != shape:
            raise StageError(f"{head.folder}: {name} is {head.tensors[name][0]}, config.json says {shape}; fetch it again")
    if head.draft_vocab_size != text["vocab_size"] and "d2t" not in head.tensors:
        raise StageError(f"{head.folder}: no d2t, though {head.draft_vocab_size} of {text['vocab_size']} tokens are drafted")
    drafted_ids(head)


def drafted_ids(head: ForeignHead) -> "torch.Tensor":
    """[draft] target id of each draft id; StageError where d2t holds no offsets, or differs from t2d."""
    import torch
    from safetensors import safe_open

    whole = torch.arange(head.layer["vocab_size"])
    if "d2t" not in head.tensors:
        return whole
    (path,) = [path for path in head.folder.glob("*.safetensors") if "d2t" in _header(path)]
    with safe_open(path, "pt") as file:
        offsets = file.get_tensor("d2t").long()
        mask = file.get_tensor("t2d").bool() if "t2d" in _header(path) else None
    ids = torch.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= len(whole) or (ids.diff() <= 0).any():
        raise StageError(f"{head.folder}: draft id + d2t is no rising list of target ids; expected offsets in d2t")
    if mask is not None and not torch.equal(ids, mask.nonzero().flatten()):
        raise StageError(f"{head.folder}: draft id + d2t differs from the true positions of t2d; fetch the head again")
    return ids


def canonical_ids(
    head: ForeignHead,
    target: Target,
    given: Sequence[int] | None = None,
    advice: str = "set aux_layer_ids of the method in evaluation.methods, in the numbering of target.aux_layer_ids",
) -> list[int]:
    """The auxiliary ids in our numbering: as given, or from the config.

    Two numberings are in use and a config does not say which is its own. A config of speculators has ours. Else the ids
    are read as those of the default layers or of target.aux_layer_ids, whichever numbering makes them so; ids that are
    neither, or both, are a StageError: nothing but acceptance would show a wrong guess. A config without ids means the
    default layers, in every tool of that family.
    """
    layers, where, written = target.num_hidden_layers, f"{head.folder}/config.json", head.written_ids
    if given:
        ids = list(given)
        if written is not None and (ids != written and (head.kind == "speculators" or to_layer_indices(ids) != written)):
            raise StageError(f"{where}: {IDS} is {written}, which is not aux_layer_ids {ids} in either numbering; mend one")
    elif head.kind == "speculators" and written is not None:
        ids = written
    elif written is None:
        ids = default_aux_layer_ids(layers)
    else:
        known = [target.aux_layer_ids, *([default_aux_layer_ids(layers)] if layers >= 7 else [])]
        readings = {tuple(ids) for ids in known if written in (ids, to_layer_indices(ids))}
        if len(readings) != 1:
            raise StageError(
                f"{where}: {IDS} is {written}: states {written} or, counted from the layer's index, "
                f"{from_layer_indices(written)}? Both numberings are in use; {advice}"
            )
        ids = list(readings.pop())
    check_aux_layer_ids(ids, layers)
    width, states = text_config(target)["hidden_size"], head.tensors["fc.weight"][0][1]
    if states != len(ids) * width:
        raise StageError(f"{head.folder}: fc reads {states / width:g} states of {width}, {IDS} names {len(ids)}; {advice}")
    return ids


def own_format(head: ForeignHead, target: Target, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, "torch.Tensor"]]:
    """(config.json, tensors) of a `llama` head in our format. Its own config stays in it, for the way back."""
    from safetensors.torch import load_file

    whole = read_json(resolve_folder(target) / "config.json")
    layer = dict(head.layer)
    if len(ids) != 3:
        layer["num_aux_hidden_states"] = len(ids)  # vLLM sizes `fc` for three states otherwise
    layer["dtype"] = head.config.get("dtype") or head.config.get("torch_dtype") or DTYPES[head.tensors["fc.weight"][1]]
    config = {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": head.draft_vocab_size,
        IDS: list(ids),
        **head.flags,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": layer["dtype"],
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.path, "architectures": whole.get("architectures") or []},
        },
        PROVENANCE_KEY: {"provenance": {"target": fingerprint(target)}, ORIGINAL: head.config},
    }
    tensors = load_file(head.folder / WEIGHTS)
    return config, {name.replace(ONLY, FIRST): tensor for name, tensor in tensors.items()}


def foreign_format(head: ForeignHead, ids: Sequence[int]) -> tuple[dict[str, Any], dict[str, "torch.Tensor"]]:
    """(config.json, tensors) of a head in our format as SpecForge and SGLang read it, with their layer indices.

    An imported head gets its own config back. StageError for what that family has no place for.
    """
    from safetensors.torch import load_file

    layer, flags = head.layer, head.flags
    if layer["num_hidden_layers"] != 1 or any(flags.values()):
        on = [flag for flag, value in flags.items() if value]
        raise StageError(
            f"{head.folder}: {layer['num_hidden_layers']} layers, norms {on}: this family has one layer and no such norms; "
            "train with draft.num_hidden_layers 1 and draft.norm_before_residual false for it"
        )
    original = head.config.get(PROVENANCE_KEY, {}).get(ORIGINAL)
    rope = dict(layer["rope_parameters"])
    theta, kind = rope.pop("rope_theta"), rope.get("rope_type", "default")
    config = original or {
        **{key: value for key, value in layer.items() if key not in ("rope_parameters", "dtype", "num_aux_hidden_states")},
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.draft_vocab_size,
        "rope_theta": theta,
        "rope_scaling": None if kind == "default" else rope,
        "torch_dtype": layer.get("dtype") or head.config["dtype"],
        "eagle_config": {IDS: to_layer_indices(ids), "use_aux_hidden_state": True},
    }
    tensors = load_file(head.folder / WEIGHTS)
    return config, {name.replace(FIRST, ONLY): tensor for name, tensor in tensors.items()}


def write_head(output: Path, config: Mapping[str, Any], tensors: Mapping[str, "torch.Tensor"]) -> None:
    """Writes model.safetensors, then config.json: with it the folder counts as a head."""
    from safetensors.torch import save_file

    output.mkdir(parents=True, exist_ok=True)
    (output / "config.json").unlink(missing_ok=True)
    write_atomically(output / WEIGHTS, lambda path: save_file(dict(tensors), path, metadata={"format": "pt"}))
    write_json(output / "config.json", config)


def served_folder(head: ForeignHead, target: Target, ids: Sequence[int], place: Path) -> Path:
    """The folder that vLLM gets: the head's own where vLLM would read `ids` from it, else a copy in `place` that says so.

    vLLM takes the written ids for ours, and without any the default layers: a head whose config has the other numbering
    would read states one layer too early, which costs acceptance and nothing else shows it.
    """
    if head.written_ids == list(ids):
        return head.folder
    shutil.rmtree(place, ignore_errors=True)
    if head.kind == "llama":
        write_head(place, *own_format(head, target, ids))
        return place
    place.mkdir(parents=True)
    for path in head.folder.glob("*.safetensors*"):
        os.symlink(path.absolute(), place / path.name)
    config = {**head.config, IDS: list(ids)}
    if "eagle_config" in config:
        config["eagle_config"] = {**(config["eagle_config"] or {}), IDS: list(ids)}
    write_json(place / "config.json", config)
    return place


def _rope(config: Mapping[str, Any]) -> dict[str, Any]:
    """`rope_parameters` as they are; or made of `rope_theta` and `rope_scaling`, nothing left out."""
    if config.get("rope_parameters"):
        return dict(config["rope_parameters"])
    scaling = dict(config.get("rope_scaling") or {})
    kind = scaling.pop("type", None)
    return {"rope_type": kind or "default", **scaling, "rope_theta": float(config.get("rope_theta") or 10000.0)}


def _expected_shapes(head: ForeignHead) -> dict[str, list[int]]:
    """Name, as in the file, -> shape of the tensors that the kind must have; of a `latent` head only the outer ones."""
    layer, tensors = head.layer, head.tensors
    hidden = layer["hidden_size"]
    states = tensors.get("fc.weight", ([0, 0], ""))[0][1]
    expected = {"fc.weight": [hidden, states], "norm.weight": [hidden], HEAD: [head.draft_vocab_size, hidden]}
    if head.kind == "latent":
        return {name: shape for name, shape in expected.items() if name in ("fc.weight", HEAD)}
    inner, width = layer["intermediate_size"], layer["head_dim"]
    queries, keys = layer["num_attention_heads"] * width, layer["num_key_value_heads"] * width
    only = any(name.startswith(ONLY) for name in tensors)
    for index in range(layer["num_hidden_layers"]):
        prefix = ONLY if only and index == 0 else f"layers.{index}."
        read = 2 * hidden if index == 0 else hidden
        block = {
            **{f"self_attn.{name}_proj": [size, read] for name, size in (("q", queries), ("k", keys), ("v", keys))},
            "self_attn.o_proj": [hidden, queries],
            **{f"mlp.{name}_proj": [inner, hidden] for name in ("gate", "up")},
            "mlp.down_proj": [hidden, inner],
            "input_layernorm": [hidden],
            "post_attention_layernorm": [hidden],
            **({"hidden_norm": [hidden]} if index == 0 else {}),
        }
        expected |= {f"{prefix}{name}.weight": shape for name, shape in block.items()}
    if head.flags["norm_before_fc"]:
        expected["input_norm.weight"] = [states]
    if head.flags["fc_norm"]:
        expected |= {f"fc_norm.{index}.weight": [hidden] for index in range(states // hidden)}
    return expected


def _header(path: Path) -> dict[str, tuple[list[int], str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            return {name: (list(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise StageError(f"{path}: not a readable safetensors file ({error}); fetch the head again") from error
