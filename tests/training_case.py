"""A training run on a tiny target with synthetic states, as files: for the tests of packing and training."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from scripts import train_draft
from scripts.eagle3.config import Draft, Target, Training
from scripts.eagle3.draft import read_head
from scripts.eagle3.draft_files import WEIGHTS, DraftFiles
from scripts.eagle3.files import read_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import StateRow, write_shard
from scripts.eagle3.target import fingerprint, text_config
from tests.draft_case import TTT_STEPS, draft_vocabulary, make_draft_files, random_row

PARTS, SHARDS = 2, 1


def training(**changes: Any) -> Training:
    """Settings small enough for seconds on a CPU."""
    settings = {
        "segments": 2,
        "ttt_steps": TTT_STEPS,
        "batch_tokens": 64,
        "gradient_accumulation": 2,
        "dtype": "float32",
        "zero_stage": 0,
        "loggers": [],
    }
    return Training(**{**settings, **changes})


def synthetic_rows(target: Target, count: int = 6, first_seed: int = 0) -> list[StateRow]:
    """Rows of different lengths, a third of each a prompt."""
    seeds = range(first_seed, first_seed + count)
    return [random_row(target, 20 + 5 * (seed % 4), 7 + seed % 3, seed) for seed in seeds]


def learnable_rows(target: Target, files: DraftFiles, count: int = 3) -> list[StateRow]:
    """Rows of draft-vocabulary tokens whose final states make the target's head predict the row's next token."""
    head = read_head(files.head)["lm_head.weight"].float()
    vocabulary = draft_vocabulary(text_config(target)["vocab_size"])
    rows = []
    for row in synthetic_rows(target, count):
        ids = vocabulary[row.token_ids.long() % len(vocabulary)]
        states = row.hidden_states.clone()
        states[:-1, -1] = head[ids[1:]]
        ids = ids.to(torch.int32)
        rows.append(StateRow(row_key(ids.numpy()), ids, row.loss_mask, states))
    return rows


def write_states(path: Path, target: Target, rows: list[StateRow], provenance: dict[str, Any] | None = None) -> Path:
    """A shard as extraction writes it; `provenance` replaces or adds keys."""
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    write_shard(path, rows, layer_ids, {"target": fingerprint(target), **(provenance or {})})
    return path


def metrics_lines(folder: Path, number: int) -> list[dict[str, Any]]:
    """The lines that segment `number` left in `folder`."""
    return [json.loads(line) for line in (folder / f"{number}.jsonl").read_text().splitlines()]


class TrainingCase:
    """The files of one run below `folder`: two parts of one shard, and validation rows."""

    def __init__(self, folder: Path, target: Target, draft: Draft | None = None) -> None:
        self.folder, self.target = folder, target
        self.files = make_draft_files(folder, target, draft)
        self.hidden, self.checkpoints, self.metrics = folder / "hidden", folder / "checkpoints", folder / "metrics"
        for part in range(PARTS):
            write_states(self.shard(f"part-{part}"), target, synthetic_rows(target, first_seed=10 * part))
        write_states(self.shard("val"), target, synthetic_rows(target, 3, first_seed=100))

    def shard(self, part: str) -> Path:
        """The only shard of one part."""
        return self.hidden / part / "shard-0.pt"

    def inputs(self) -> train_draft.Inputs:
        """As the command line gives them."""
        return train_draft.Inputs(self.files, self.hidden, PARTS, SHARDS)

    def train(self, number: int, settings: Training | None = None, checkpoints: Path | None = None) -> None:
        """Runs the stage in this process."""
        folder = checkpoints or self.checkpoints
        train_draft.run(self.target, settings or training(), self.inputs(), number, folder, self.metrics)

    def start(
        self,
        number: int,
        settings: Training | None = None,
        checkpoints: Path | None = None,
        launcher: Sequence[str] = (),
        **environment: str,
    ) -> subprocess.Popen[str]:
        """Starts the stage in a process of its own, or with a launcher (module, options) in several."""
        settings = settings or training()
        options = {
            "target": self.target.model_dump_json(),
            "training": settings.model_dump_json(),
            "checkpoint-minutes": settings.checkpoint_minutes,
            "keep-checkpoints": settings.keep_checkpoints,
            "draft-config": self.files.config,
            "head": self.files.head,
            "vocab": self.files.d2t.parent,
            "hidden": self.hidden,
            "parts": PARTS,
            "shards": SHARDS,
            "segment": number,
            "checkpoints": checkpoints or self.checkpoints,
            "metrics": self.metrics,
        }
        arguments = [text for name, value in options.items() for text in (f"--{name}", str(value))]
        return subprocess.Popen(
            [sys.executable, "-m", *launcher, "scripts.train_draft", *arguments],
            env={**os.environ, **environment},
            stderr=subprocess.PIPE,
            text=True,
        )


def weights(checkpoints: Path, number: int) -> dict[str, torch.Tensor]:
    """The trained weights of one segment."""
    from safetensors.torch import load_file

    return load_file(checkpoints / read_json(checkpoints / f"{number}.json")["folder"] / WEIGHTS)


def largest_difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Over all weights; names must agree."""
    assert left.keys() == right.keys()
    return max((left[name] - right[name]).abs().max().item() for name in left)
