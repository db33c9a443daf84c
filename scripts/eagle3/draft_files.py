"""The files around a draft: the four that it is built from, and the checkpoints that training leaves.

In: draft/config.json, target/head.safetensors, vocab/d2t.npy, vocab/t2d.npy; checkpoints/{segment}.json with `segment`,
`step`, `weights_sha256`, `folder` (name beside it) and `metrics`. Out: their paths from the command line; the distinct
checkpoints; the path of a weight file whose hash was compared.
"""

import argparse
from pathlib import Path
from typing import Any, NamedTuple

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, sha256_file, sha256_json
from scripts.eagle3.provenance import PROVENANCE_KEY

WEIGHTS = "model.safetensors"
OTHER_STATES = "the head was trained on other states: restore target.aux_layer_ids, or train and export again"


class DraftFiles(NamedTuple):
    """What a draft is built from, in the order of `build_draft`."""

    config: Path
    head: Path
    d2t: Path
    t2d: Path

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Adds --draft-config, --head and --vocab."""
        parser.add_argument("--draft-config", type=Path, required=True, help="draft/config.json")
        parser.add_argument("--head", type=Path, required=True, help="target/head.safetensors")
        parser.add_argument("--vocab", type=Path, required=True, help="folder of d2t.npy, t2d.npy and coverage.json")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "DraftFiles":
        """Reads what `add_options` added."""
        return cls(options.draft_config, options.head, options.vocab / "d2t.npy", options.vocab / "t2d.npy")

    def identity(self) -> dict[str, str]:
        """What stands for config and vocabulary in the provenance of weights; a path is never compared."""
        config = read_json(self.config)
        config["speculators_config"]["verifier"].pop("name_or_path")
        config.pop(PROVENANCE_KEY, None)
        return {"draft_config": sha256_json(config), "vocabulary": sha256_file(self.d2t)}


def check_layers(config: Path, target: Target, advice: str) -> None:
    """StageError unless a draft's config names the auxiliary states of this target section; no model notices a difference."""
    key = "eagle_aux_hidden_state_layer_ids"
    expect(target.aux_layer_ids, read_json(config).get(key), f"{config}: {key}", advice)


def read_records(checkpoints: Path, segments: int) -> list[dict[str, Any]]:
    """Records 0 .. segments - 1 in order, repeated ones (after an early stop) only once."""
    records: dict[str, dict[str, Any]] = {}
    for segment in range(segments):
        record = read_json(checkpoints / f"{segment}.json")
        records.setdefault(record["weights_sha256"], record)
    return list(records.values())


def weights_path(checkpoints: Path, record: dict[str, Any]) -> Path | None:
    """The record's weight file, None where it was pruned; StageError where it is not the file that the record names."""
    path = checkpoints / record["folder"] / WEIGHTS
    if not path.is_file():
        return None
    expect(record["weights_sha256"], sha256_file(path), f"{path}: sha256", "the file was changed; train this segment again")
    return path


def require_weights(checkpoints: Path, record: dict[str, Any]) -> Path:
    """As `weights_path`, but pruned weights are a StageError."""
    path = weights_path(checkpoints, record)
    if path is None:
        raise StageError(f"{checkpoints / record['folder'] / WEIGHTS}: no such file; it was pruned: train this segment again")
    return path
