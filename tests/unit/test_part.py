"""What of a part is missing: nothing of a finished shard, and no rejected row, whatever grows beside them."""

from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.batches import make_row
from scripts.eagle3.part import Part
from scripts.eagle3.shards import Shard, ShardWriter
from scripts.eagle3.store import open_store

PROVENANCE: dict[str, Any] = {"layer_ids": [2, 8], "dtype": "float32"}
FIRST, SECOND, THIRD = ([make_row([place, 6, number]) for number in range(3)] for place in (1, 2, 3))
SHARDS = [FIRST, [*SECOND, FIRST[0]], THIRD]


def test_a_resumed_part_misses_nothing_of_a_finished_shard_and_grows_no_rejected_row(tmp_path: Path) -> None:
    with open_store(tmp_path, "extract_hidden_states", PROVENANCE) as store:
        part = Part(store, SHARDS, PROVENANCE, 4)
        path, lacking = part.grow(0)
        for (index,) in lacking.values():
            ShardWriter(path).put(index, torch.ones(3, 2, 4))
        part.take({"paths": [str(path)], "keys": list(lacking), "rejected": []})
        part.finish(0)
        part.take({"paths": [], "keys": [], "rejected": [[THIRD[1].key, 8, "not finite"]]})
    with open_store(tmp_path, "extract_hidden_states", PROVENANCE) as store:
        resumed = Part(store, SHARDS, PROVENANCE, 4)
        assert resumed.open_shards() == [1, 2]
        assert resumed.missing(0) == set()
        assert resumed.missing(1) == {row.key for row in SECOND}  # the row of the finished one is copied
        path, lacking = resumed.grow(2)
        assert set(lacking) == resumed.missing(2) == {THIRD[0].key, THIRD[2].key}
        assert not any(Shard(path).written(index) for index in range(3))
