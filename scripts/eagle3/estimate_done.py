"""What a run has finished already, in files, bytes and seconds; nothing that was made with other settings counts.

In: the configuration, the run's folder, the root of the states' store. Out: per part, segment and method whether it is
finished; bytes on disk; seconds from Snakemake's benchmark files.
"""

import math
import os
import zipfile
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Config
from scripts.eagle3.estimate_data import PartData, finished_file, tokens_made
from scripts.eagle3.files import read_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.released import is_released
from scripts.train_draft import NOT_SCIENCE

STATES_STAGE = "extract_hidden_states"


@dataclass(frozen=True)
class Finished:
    """Looks into one run's folder and its store of states."""

    config: Config
    run: Path
    states: Path

    @property
    def layers(self) -> list[int]:
        """Of the states that the configuration asks for."""
        return captured_layer_ids(self.config.target.aux_layer_ids, self.config.target.num_hidden_layers)

    def extracted(self, part: PartData) -> bool:
        """Whether all state shards of the part are there, for these layers and the rows of its token shards.

        In rolling mode it counts too when they were deleted after a segment with these settings was trained on them.
        """
        folder = self.run / "hidden" / part.name
        if not tokens_made(self.config, self.run, part.name) or not (folder / "manifest.json").is_file():
            return False
        released = self.released(part)
        if not released and not all(path.is_file() for path in self._shards(part)):
            return False
        with finished_file(folder / "manifest.json"):
            manifest = read_json(folder / "manifest.json")
            rows = sum(entry["rows_in"] for entry in manifest["shards"])
            if not self._asked_for(manifest["provenance"]) or rows != part.rows.value:
                return False
        if released:
            return self.trained(int(part.name.removeprefix("part-")))
        for path in self._shards(part):
            with finished_file(path):
                if not zipfile.is_zipfile(path):  # the list of an archive's contents stands at its end
                    raise ValueError(f"cut short at {path.stat().st_size} bytes")
        return True

    def released(self, part: PartData) -> bool:
        """Whether the states of the part were deleted after training."""
        return self.config.training.rolling is not None and is_released(self.run / "hidden" / part.name)

    def _shards(self, part: PartData) -> list[Path]:
        folder = self.run / "hidden" / part.name
        return [folder / f"shard-{shard}.pt" for shard in range(self.config.scatter.shards_per_part)]

    def states_bytes(self, part: PartData) -> int:
        """Bytes of the part's states: the delivered ones, or else what the store holds for these layers."""
        if self.released(part):
            return 0
        if self.extracted(part):
            return unique_bytes([self.run / "hidden" / part.name], follow=True)
        stores = [store for store in self.states.glob(f"{STATES_STAGE}/*/{part.name}") if self._of_these_layers(store)]
        # a growing shard has its full length from the beginning, and room on the disk for what is written
        growing = sum(path.stat().st_blocks * 512 for store in stores for path in store.glob("growing/*.pt"))
        return growing + unique_bytes(store / "shards" for store in stores)

    def _of_these_layers(self, store: Path) -> bool:
        path = store / "provenance.json"
        with finished_file(path):
            return path.is_file() and self._asked_for(read_json(path))

    def _asked_for(self, provenance: Mapping[str, Any]) -> bool:
        """Whether states are of these layers and tokens."""
        stored = provenance.get("layer_ids"), provenance.get("final_states", "all")
        return stored == (self.layers, self.config.extraction.final_states)

    def trained(self, segment: int) -> bool:
        """Whether the segment's checkpoint is there and was trained with these settings."""
        path = self.run / f"checkpoints/{segment}.json"
        settings = self.config.training.model_dump(exclude=NOT_SCIENCE)
        with finished_file(path):
            return path.is_file() and bool(read_json(path)["provenance"]["training"] == settings)

    def continued(self, segment: int) -> bool:
        """Whether the job that finished the segment was not the first: its seconds are not those of the whole segment."""
        path = self.run / f"checkpoints/{segment}.json"
        with finished_file(path):
            return read_json(path).get("continued_from", 0) > 0

    def evaluated(self, method: str) -> bool:
        """Whether the method's results of every suite are there, with this answer length."""
        for suite in self.config.conversations.evaluation:
            path = self.run / f"evaluation/{method}/{suite}.json"
            with finished_file(path):
                if not path.is_file() or read_json(path)["settings"]["max_tokens"] != self.config.evaluation.max_tokens:
                    return False
        return True

    def undisturbed(self, stage: str, part: str) -> bool:
        """Whether one job has made the part from beginning to end, so that its seconds are those of the whole part."""
        root = self.states if stage == STATES_STAGE else self.run / "store"
        count = 0
        for path in (root / stage).glob(f"*/{part}/attempts.jsonl"):
            with finished_file(path):
                # an attempt is recorded when it starts and once more when it ends
                count += sum('"ended"' not in line for line in path.read_text(encoding="utf-8").splitlines())
        return count == 1


def benchmark_seconds(path: Path) -> float | None:
    """Seconds of a job, from its Snakemake benchmark file; None without one."""
    if not path.is_file():
        return None
    with finished_file(path):
        lines = path.read_text(encoding="utf-8").splitlines()
        seconds = float(lines[1].split("\t")[0]) if len(lines) > 1 else None
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ValueError(f"{seconds} seconds")
        return seconds


def unique_bytes(paths: Iterable[Path], follow: bool = False) -> int:
    """Bytes of all files below `paths`, hard links once; symbolic links count only with `follow`."""
    seen: dict[tuple[int, int], int] = {}
    look: Callable[[Path], os.stat_result] = os.stat if follow else os.lstat
    for path in paths:
        for file in path.rglob("*") if path.is_dir() else [path]:
            if (file.is_symlink() and not follow) or not file.is_file():
                continue
            found = look(file)
            seen[found.st_dev, found.st_ino] = found.st_size
    return sum(seen.values())
