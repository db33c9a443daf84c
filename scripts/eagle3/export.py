"""The exported draft: the folder that vLLM serves, its checks, and its way back into memory.

In: trained weights, the target's head, the vocabulary map, draft/config.json. Out: config.json, model.safetensors,
README.md, provenance.json and manifest.json (sha256 of the others, written last); or a StageError that names the check
that failed.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from scripts.eagle3.config import Target
from scripts.eagle3.draft import (
    check_finite,
    check_same_target,
    provenance_of,
    read_draft_config,
    read_head,
    read_vocabulary,
    target_ids,
    trainable_state,
)
from scripts.eagle3.draft_files import WEIGHTS, DraftFiles
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sha256_file, write_atomically, write_json, write_text
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.target import fingerprint

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
CONFIG, CARD, PROVENANCE, MANIFEST = "config.json", "README.md", "provenance.json", "manifest.json"
WRITTEN = (CARD, CONFIG, WEIGHTS, PROVENANCE)
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
EMBEDDING, HEAD = "embed_tokens.weight", "lm_head.weight"


def export_config(target: Target, files: DraftFiles) -> dict[str, Any]:
    """draft/config.json with the target's present path: a results folder may have moved since."""
    config: dict[str, Any] = read_json(files.config)
    config["speculators_config"]["verifier"]["name_or_path"] = target.path
    return config


def export_tensors(weights: Path, files: DraftFiles) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors: trained ones, embedding and sliced head in the config's dtype; d2t and t2d.

    Without a smaller vocabulary there is no map: vLLM has no place for one then. A head that came with the weights (from an
    initial head) takes the place of the target's rows.
    """
    from safetensors.torch import load_file

    check_same_target(files.config, files.head, files.d2t)
    config = read_draft_config(files.config, "sdpa")
    d2t, t2d = read_vocabulary(files.d2t, files.t2d, config.draft_vocab_size, config.target_vocab_size)
    head = read_head(files.head)
    tensors = {EMBEDDING: head[EMBEDDING], HEAD: head[HEAD][t2d], **load_file(weights)}
    dtype = DTYPES[read_json(files.config)["dtype"]]
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in tensors.items()}
    if config.draft_vocab_size != config.target_vocab_size:
        tensors |= {"d2t": d2t, "t2d": t2d}
    return tensors


def write_export(
    folder: Path,
    tensors: Mapping[str, torch.Tensor],
    config: Mapping[str, Any],
    card: str,
    provenance: Mapping[str, Any],
) -> None:
    """Writes all but the manifest; what an earlier export left there and this one has not is removed."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.iterdir():
        if stale.is_file() and stale.name not in WRITTEN:
            stale.unlink()
    write_json(folder / CONFIG, config)
    write_json(folder / PROVENANCE, provenance)
    write_text(folder / CARD, card)
    write_atomically(folder / WEIGHTS, lambda path: save_file(dict(tensors), path, metadata={"format": "pt"}))


def write_manifest(folder: Path) -> None:
    """Writes manifest.json: the export is finished and checked."""
    write_json(folder / MANIFEST, {"files": {name: sha256_file(folder / name) for name in WRITTEN}})


def load_export(folder: Path, attention: str = "sdpa") -> "Eagle3DraftModel":
    """The exported draft in its own dtype, from nothing but the folder, as the server loads it; for inference."""
    from safetensors.torch import load_file
    from speculators.models.eagle3 import Eagle3DraftModel

    check_manifest(folder)
    config = read_draft_config(folder / CONFIG, "sdpa" if attention == "sdpa" else "flex")
    tensors = load_file(folder / WEIGHTS)
    model = Eagle3DraftModel(config)
    # these two only rebuild the target's logits for a loss; an export has none
    model.verifier_lm_head.weight.data.copy_(tensors[HEAD])
    unset = model.load_state_dict(tensors, strict=False)
    missing = [name for name in unset.missing_keys if not name.startswith("verifier_")]
    if missing or unset.unexpected_keys:
        raise StageError(f"{folder / WEIGHTS}: missing {missing}, unexpected {unset.unexpected_keys}; export again")
    check_finite(model)
    return model.to(DTYPES[read_json(folder / CONFIG)["dtype"]]).requires_grad_(False).eval()


def check_manifest(folder: Path) -> None:
    """StageError unless each file has the hash that manifest.json gives."""
    for name, expected in read_json(folder / MANIFEST)["files"].items():
        path = folder / name
        if not path.is_file():
            raise StageError(f"{path}: no such file, but {MANIFEST} names it; export again")
        if sha256_file(path) != expected:
            raise StageError(f"{path}: sha256 differs from {MANIFEST}; the file was changed: export again")


def own_head(weights: Path) -> torch.Tensor | None:
    """`lm_head.weight` of trained weights that started from a head with rows of its own; else None: it is the target's."""
    from safetensors import safe_open

    with safe_open(weights, "pt") as file:
        return file.get_tensor(HEAD) if HEAD in set(file.keys()) else None


def check_export(folder: Path, target: Target, files: DraftFiles, weights: Path | None = None) -> None:
    """Compares an export with what it was made from; the first check that fails is named: `check NAME: ...`.

    origin: config and head are of this target. layers: auxiliary ids are the target section's, in order. norms and
    config: as in draft/config.json. tensors: names, shapes, dtypes. finite. vocabulary: d2t offsets, in range, equal to
    t2d. embedding, head: the target's own rows; the head those of `weights` where they have one.
    """
    from safetensors.torch import load_file

    exported, wanted, tensors = read_json(folder / CONFIG), export_config(target, files), load_file(folder / WEIGHTS)
    sizes = exported["draft_vocab_size"], exported["transformer_layer_config"]["vocab_size"]
    checks: dict[str, Callable[[], str | None]] = {
        "origin": lambda: _check_origin(target, files, folder),
        "layers": lambda: _differs(exported, {"eagle_aux_hidden_state_layer_ids": target.aux_layer_ids}),
        "norms": lambda: _differs(exported, {flag: wanted[flag] for flag in NORM_FLAGS}),
        "config": lambda: _differs(exported, wanted),
        "tensors": lambda: _check_tensors(tensors, files.config),
        "finite": lambda: _check_finite(tensors),
        "vocabulary": lambda: _check_vocabulary(tensors, files, sizes),
        "embedding": lambda: _differs_from_target(tensors[EMBEDDING], read_head(files.head)[EMBEDDING], files.head),
        "head": lambda: _check_head(tensors[HEAD], files, sizes, weights),
    }
    for name, check in checks.items():
        problem = check()
        if problem is not None:
            raise StageError(f"{folder}: check {name}: {problem}; export again from this run's files")


def _check_origin(target: Target, files: DraftFiles, folder: Path) -> None:
    expected = {"target": fingerprint(target)}
    for path in (files.config, files.head, folder / CONFIG):
        check_provenance(expected, provenance_of(path), f"{folder}: check origin: {path}")


def _differs(found: Mapping[str, Any], expected: Mapping[str, Any]) -> str | None:
    for key, value in expected.items():
        if found.get(key) != value:
            return f"{key} is {found.get(key)}, expected {value}"
    return None


def expected_tensors(config: Path) -> dict[str, tuple[list[int], torch.dtype]]:
    """Name -> (shape, dtype) of every tensor of model.safetensors."""
    from speculators.models.eagle3 import Eagle3DraftModel

    model_config = read_draft_config(config, "sdpa")
    dtype = DTYPES[read_json(config)["dtype"]]
    with torch.device("meta"):
        model = Eagle3DraftModel(model_config)
    floats = {**trainable_state(model), EMBEDDING: model.embed_tokens.weight, HEAD: model.lm_head.weight}
    expected = {name: (list(tensor.shape), dtype) for name, tensor in floats.items()}
    if model.use_draft_vocab:
        expected["d2t"] = ([model.draft_vocab_size], torch.int64)
        expected["t2d"] = ([model.verifier_vocab_size], torch.bool)
    return expected


def _check_tensors(tensors: Mapping[str, torch.Tensor], config: Path) -> str | None:
    expected = expected_tensors(config)
    missing, unexpected = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        return f"missing {missing}, unexpected {unexpected}"
    for name, (shape, dtype) in expected.items():
        found = (list(tensors[name].shape), tensors[name].dtype)
        if found != (shape, dtype):
            return f"{name} is {found}, expected {(shape, dtype)}"
    return None


def _check_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    bad = [name for name, tensor in tensors.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    return f"values that are not finite in {', '.join(bad)}" if bad else None


def _check_vocabulary(tensors: Mapping[str, torch.Tensor], files: DraftFiles, sizes: tuple[int, int]) -> str | None:
    if "d2t" not in tensors:
        return None
    d2t, t2d = tensors["d2t"], tensors["t2d"]
    if (d2t.diff() < 0).any():
        return "d2t falls somewhere: offsets (target id - draft id) never do"
    ids = target_ids(d2t)
    if ids.min() < 0 or ids.max() >= sizes[1]:
        return f"draft id + d2t reaches {int(ids.max())} of {sizes[1]} target ids: d2t holds ids, not offsets?"
    if not torch.equal(ids, t2d.nonzero().flatten()):
        return "draft id + d2t differs from the true positions of t2d"
    return None if torch.equal(d2t, read_vocabulary(files.d2t, files.t2d, *sizes)[0]) else f"d2t differs from {files.d2t}"


def _check_head(exported: torch.Tensor, files: DraftFiles, sizes: tuple[int, int], weights: Path | None) -> str | None:
    own = own_head(weights) if weights else None
    if weights is None or own is None:
        rows = read_head(files.head)[HEAD][read_vocabulary(files.d2t, files.t2d, *sizes)[1]]
        return _differs_from_target(exported, rows, files.head)
    return None if torch.equal(exported, own.to(exported.dtype)) else f"the exported rows differ from those in {weights}"


def _differs_from_target(exported: torch.Tensor, own: torch.Tensor, head: Path) -> str | None:
    return None if torch.equal(exported, own.to(exported.dtype)) else f"the exported rows differ from the target's in {head}"
