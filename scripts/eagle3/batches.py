"""Which rows go through the engine together: planned once per part, kept in its store, and the unit of redo.

In: a part's token shards. Out: batches of row keys. A batch takes rows of a few shards whose files grow side by side. The plan
is a file, so that a job that goes on computes each remaining row in the company in which an undisturbed job would have:
equal bytes.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sha256_json, write_json
from scripts.eagle3.rows import TOKENS, read_rows, row_key

# a row of one token cannot be told from padding, and teaches nothing
MIN_ROW_TOKENS = 2
# shards that grow at the same time: Linux lets one write at a time into a file, and an engine outruns that (measured on a
# tmpfs and on ext4: two files take twice as much)
TOGETHER = 4


@dataclass(frozen=True)
class TokenRow:
    """One row of a token shard: `input_ids` [tokens] int32, `loss_mask` [tokens] bool."""

    key: str
    input_ids: np.ndarray[Any, np.dtype[np.int32]]
    loss_mask: np.ndarray[Any, np.dtype[np.bool_]]

    def __len__(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class Batch:
    """Row keys of some shards that are computed together."""

    shards: tuple[int, ...]
    keys: tuple[str, ...]

    @property
    def file_name(self) -> str:
        """Of its states in the store: named by content, so that another plan cannot overwrite it."""
        return f"{sha256_json(self.keys)[:24]}.pt"


def make_row(input_ids: Sequence[int], loss_mask: Sequence[bool] | None = None) -> TokenRow:
    """A row from plain lists; without a mask nothing is masked out."""
    ids = np.asarray(input_ids, dtype=np.int32)
    mask = np.ones(len(ids), dtype=np.bool_) if loss_mask is None else np.asarray(loss_mask, dtype=np.bool_)
    return TokenRow(row_key(ids), ids, mask)


def read_token_shard(path: Path, vocab_size: int) -> list[TokenRow]:
    """The rows of one token shard, checked; StageError names the first row that is wrong."""
    rows = []
    for index, found in enumerate(read_rows(path, TOKENS)):
        row = make_row(found["input_ids"], found["loss_mask"])
        if row.key != found["row_key"]:
            raise StageError(f"{path}: row {index}: row_key is {found['row_key']}, its ids give {row.key}; remake the file")
        if len(row) < MIN_ROW_TOKENS or len(row.loss_mask) != len(row):
            raise StageError(
                f"{path}: row {index} has {len(row)} ids and {len(row.loss_mask)} mask entries; expected {MIN_ROW_TOKENS} or "
                "more, and as many of both; remake the file"
            )
        if row.input_ids.min() < 0 or row.input_ids.max() >= vocab_size:
            raise StageError(
                f"{path}: row {index} holds a token id outside 0..{vocab_size - 1}: of another target's tokenizer?"
            )
        rows.append(row)
    return rows


def plan_batches(shards: Sequence[Sequence[TokenRow]], batch_tokens: int, max_rows: int) -> list[Batch]:
    """Rows of TOGETHER shards at a time, packed up to `batch_tokens` tokens and `max_rows` rows.

    Of each batch the longest row comes first, then what fits best. A row longer than the budget is a batch of its own. Equal
    input gives an equal plan.
    """
    batches: list[Batch] = []
    for first in range(0, len(shards), TOGETHER):
        numbers = tuple(range(first, min(first + TOGETHER, len(shards))))
        pool = {row.key: row for number in numbers for row in shards[number]}
        rows = sorted(pool.values(), key=lambda row: (len(row), row.key))
        lengths = [len(row) for row in rows]
        while rows:
            batch: list[str] = []
            left, place = batch_tokens, len(rows)
            while place and len(batch) < max_rows:
                left -= lengths.pop(place - 1)
                batch.append(rows.pop(place - 1).key)
                place = bisect_right(lengths, left)  # rows before it fit, the one just before it best
            batches.append(Batch(numbers, tuple(batch)))
    return batches


def resume_plan(
    path: Path, shards: Sequence[Sequence[TokenRow]], missing: set[str], batch_tokens: int, max_rows: int
) -> list[Batch]:
    """The plan at `path`, made or extended so that it covers every row of `missing`; whole batches that are still to do.

    A plan of other rows (the part was dealt anew) is replaced. Hardware may have changed since: the plan stays.
    """
    rows = sha256_json([[row.key for row in shard] for shard in shards])
    batches: list[Batch] = []
    if path.is_file():
        found = read_json(path)
        if found.get("rows") == rows and found.get("together") == TOGETHER:
            batches = [Batch(tuple(entry["shards"]), tuple(entry["keys"])) for entry in found["batches"]]
    planned = {(number, key) for batch in batches for number in batch.shards for key in batch.keys}
    uncovered = [
        [row for row in shard if row.key in missing and (number, row.key) not in planned] for number, shard in enumerate(shards)
    ]
    added = plan_batches(uncovered, batch_tokens, max_rows)
    if added:
        batches += added
        write_json(path, {"rows": rows, "together": TOGETHER, "batches": [asdict(batch) for batch in batches]})
    return [batch for batch in batches if not missing.isdisjoint(batch.keys)]
