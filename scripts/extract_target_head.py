"""Takes the target's embedding, final norm and head out of its checkpoint: all that the draft shares with the target.

In: the target's folder; only the files that hold the three tensors are opened. Out: target/head.safetensors with
`embed_tokens.weight` [vocabulary, hidden], `norm.weight` [hidden] and `lm_head.weight` [vocabulary, hidden] in the
checkpoint's dtype; the metadata carries the provenance and the norm's epsilon.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import write_atomically
from scripts.eagle3.plain_head import check_plain_head
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import (
    EMBEDDING_NAMES,
    HEAD_NAMES,
    NORM_NAMES,
    check_names,
    fingerprint,
    read_tensor,
    resolve_folder,
    text_config,
    ties_head,
    weight_bytes,
)


def run(target: Target, output: Path) -> None:
    """Writes the three tensors; StageError where the head is not `lm_head(RMSNorm(state))`, or sizes disagree."""
    text = text_config(target)
    check_plain_head(text, resolve_folder(target) / "config.json")
    check_names(target)
    tensors = read_head_tensors(target, text)

    from safetensors.torch import save_file

    metadata = {
        "provenance": json.dumps({"target": fingerprint(target)}, sort_keys=True),
        "rms_norm_eps": repr(text["rms_norm_eps"]),
    }
    write_atomically(output, lambda unfinished: save_file(tensors, unfinished, metadata))
    read = sum(tensor.nbytes for tensor in tensors.values())
    print(f"extract_target_head: {read:,} bytes of {weight_bytes(target):,} in the checkpoint", flush=True)


def read_head_tensors(target: Target, text: Mapping[str, Any]) -> dict[str, Any]:
    """The three tensors; a tied head is a copy of the embedding."""
    folder = resolve_folder(target)
    embedding = _require(read_tensor(target, EMBEDDING_NAMES), EMBEDDING_NAMES, folder)
    norm = _require(read_tensor(target, NORM_NAMES), NORM_NAMES, folder)
    tied = ties_head(target)
    head = None if tied else read_tensor(target, HEAD_NAMES)
    if head is None:
        if tied is False:
            _require(None, HEAD_NAMES, folder)
        head = embedding.clone()
    biases = tuple(name.replace(".weight", ".bias") for name in (*HEAD_NAMES, *NORM_NAMES))
    if read_tensor(target, biases) is not None:
        raise StageError(f"{folder}: the head or the final norm has a bias; expected none; not supported as a target")
    hidden, vocabulary = text["hidden_size"], text["vocab_size"]
    tensors = {"embed_tokens.weight": embedding, "norm.weight": norm, "lm_head.weight": head}
    for name, shape in zip(tensors, ([vocabulary, hidden], [hidden], [vocabulary, hidden]), strict=True):
        tensor = tensors[name]
        expect(
            shape,
            list(tensor.shape),
            f"{folder}: {name}",
            "config.json and the weights disagree; fetch the target again",
        )
        if tensor.element_size() < 2 or not tensor.is_floating_point():
            raise StageError(f"{folder}: {name} is stored as {tensor.dtype}; expected an unquantised tensor of 16 or 32 bits")
        if not tensor.isfinite().all():
            raise StageError(f"{folder}: {name} holds values that are not finite; the file is damaged: fetch the target again")
    return tensors


def _require(tensor: Any | None, names: Sequence[str], folder: Path) -> Any:
    if tensor is None:
        raise StageError(f"{folder}: no tensor {' or '.join(names)}; expected in the target's safetensors files")
    return tensor


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    parser.add_argument("--output", type=Path, required=True, help="target/head.safetensors")
    options = parser.parse_args(argv)
    run(options.target, options.output)


if __name__ == "__main__":
    run_stage(main)
