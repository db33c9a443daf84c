"""What of a run's stored hidden states is superseded: made from something else, or dealt anew since.

In: the stage's folder in the store, the run's folder, the provenance and the counts of now. Out: files that no job will take
rows from and that nothing in the run links to. A row of the run's token shards that is not delivered yet is never among them.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from scripts.eagle3.errors import StageError
from scripts.eagle3.provenance import digest
from scripts.eagle3.shards import Shard, whole_provenance
from scripts.eagle3.store import LOCK


class Superseded(NamedTuple):
    """One file: rows that are written in it, and bytes on the disk."""

    path: Path
    rows: int
    bytes: int

    @property
    def part(self) -> Path:
        """The store's folder of the part that it belongs to."""
        return self.path.parents[1]


def superseded(store: Path, run: Path, provenance: Mapping[str, Any], parts: int, shards: int) -> list[Superseded]:
    """`store` is {storage}/extract_hidden_states; parts and shards are those of the configuration."""
    delivered = [path for path in run.glob("hidden/*/*.pt") if path.exists()]
    linked = {(path.stat().st_dev, path.stat().st_ino) for path in delivered}
    wanted = _wanted(run, parts, shards)
    served = {key for path in delivered for key in _rows_of(path, provenance)}
    found = []
    for lock in sorted(store.glob(f"*/*/{LOCK}")):
        for path in sorted([*lock.parent.glob("growing/*.pt"), *lock.parent.glob("shards/*.pt")]):
            status, rows = path.stat(), _rows_of(path)
            current = lock.parent.parent.name == digest(provenance)
            needed = current and (wanted is None or not served.issuperset(rows & wanted))
            if (status.st_dev, status.st_ino) not in linked and not needed:
                found.append(Superseded(path, len(rows), status.st_blocks * 512))
    return found


def _wanted(run: Path, parts: int, shards: int) -> set[str] | None:
    """Keys of the rows that the run trains and validates on; None where a token shard is not there: it may want any row."""
    names = [*(f"part-{part}" for part in range(parts)), "val"]
    keys: set[str] = set()
    for path in (run / f"tokens/{name}/shard-{shard}.parquet" for name in names for shard in range(shards)):
        try:
            keys.update(pq.read_table(path, columns=["row_key"])["row_key"].to_pylist())  # the ids are a hundred times as large
        except (OSError, KeyError, pa.ArrowInvalid):
            return None
    return keys


def _rows_of(path: Path, provenance: Mapping[str, Any] | None = None) -> set[str]:
    """Keys of the rows that are written; none of a damaged file, or of another provenance."""
    try:
        shard = Shard(path, None if provenance is None else whole_provenance(provenance))
    except StageError:
        return set()
    return {key for index, key in enumerate(shard.row_keys) if shard.written(index)}
