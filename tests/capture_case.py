"""Rows and comparisons for tests of captured states."""

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.engine import Hardware
from scripts.eagle3.extraction import Extractor
from scripts.eagle3.shards import Shard, StateRow

LAYERS = [2, 4, 5, 8]
HARDWARE = Hardware(batch_tokens=256, max_num_seqs=8, kv_cache_gb=1)
LENGTHS = (5, 40, 2, 99, 17, 250, 3, 128, 64, 7)


def make_rows(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> list[TokenRow]:
    numbers = random.Random(seed)
    ids = [[numbers.randrange(1000) for _ in range(length)] for length in lengths]
    return [make_row(row, [numbers.random() < 0.5 for _ in row]) for row in ids]


def captured(extractor: Extractor, rows: list[TokenRow], path: Path, **sampling: Any) -> tuple[list[StateRow], list[Any]]:
    outputs = extractor.write(rows, path, **sampling)
    return list(Shard(path, extractor.provenance, LAYERS)), outputs


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """[tokens, hidden] twice -> [tokens]."""
    return (found.float() - expected).norm(dim=-1) / expected.norm(dim=-1)


def assert_neighbours_differ(states: list[torch.Tensor]) -> None:
    """A test of layer numbers can only fail if the neighbouring layers' states are far away."""
    for before, after in pairwise(states):
        assert relative_error(before, after).median() > 0.2
