"""Old checkpoints go, where `training.keep_checkpoints` says so: the best stay, and what the next job may resume from.

In: checkpoints/{segment}.json with `folder` and `metrics`, up to the segment that was trained last. Out: weight folders
deleted, the resume state out of older ones that stay. Records stay: later stages list a pruned checkpoint without figures.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.eagle3.files import read_json
from scripts.eagle3.zero import STATE

# with the last one, whose job Snakemake may call unfinished and repeat, goes the one that it resumed from
WHOLE = 2


def prune(checkpoints: Path, last: int, keep: int, needed: Callable[[int], bool]) -> None:
    """Keeps the last two checkpoints up to segment `last` whole and the weights of the `keep` best; 0 keeps all.

    needed: whether something else still has to see this segment's checkpoint as its record describes it.
    """
    if not keep:
        return
    records = [read_json(checkpoints / f"{segment}.json") for segment in range(last + 1)]
    best = sorted(records, key=_acceptance_length, reverse=True)[:keep]
    for record in records[: last + 1 - WHOLE]:
        if not needed(record["segment"]):
            folder = checkpoints / record["folder"]
            shutil.rmtree(folder / STATE if record in best else folder, ignore_errors=True)


def _acceptance_length(record: dict[str, Any]) -> float:
    return float(record["metrics"]["validation"]["acceptance_length"])
