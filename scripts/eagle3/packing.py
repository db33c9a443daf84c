"""Rows of hidden-state shards -> packed micro-batches, read from the mapped files one micro-batch at a time.

In: open shards of one split. Out: `TrainingRows` (how long each row is and what it supervises), packs of row numbers in
a seeded order, and the tensors of one pack: rows back to back, each with a document id of its own, padding (-1) at the
end only. Lengths are in draft positions: a row of T tokens has T - 1.
"""

from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scripts.eagle3.draft import draft_inputs, draft_loss_mask
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.shards import Shard, StateRow

# numbers of the rows of one micro-batch
Pack = list[int]
# packs that wait for a row that fits: more of them fill better
OPEN_PACKS = 16
# micro-batches read ahead, each by a thread of its own (checksums release the interpreter)
READ_AHEAD = 2


@dataclass(frozen=True)
class PackedBatch:
    """One micro-batch: the model's inputs, each [1, T, ...], and its rows by document id."""

    inputs: dict[str, torch.Tensor]
    rows: list[StateRow]


class TrainingRows:
    """The rows of one split that teach something.

    `positions` [rows]: draft positions of each row. `supervised` [rows, K]: how many of them take a loss at each TTT
    step.
    """

    def __init__(self, shards: Sequence[Shard], ttt_steps: int, batch_tokens: int) -> None:
        """Cuts rows at `batch_tokens` positions and leaves out those without a supervised one; both are counted."""
        self.shards, self.batch_tokens = shards, batch_tokens
        self.cut = self.unsupervised = 0
        self._where: list[tuple[int, int]] = []
        positions, supervised = [], []
        for number, shard in enumerate(shards):
            for index in range(len(shard)):
                tokens = shard.loss_mask(index)
                mask = draft_loss_mask(tokens[: batch_tokens + 1])
                if not mask.any():
                    self.unsupervised += 1
                    continue
                self.cut += len(tokens) - 1 > batch_tokens
                self._where.append((number, index))
                positions.append(len(mask))
                supervised.append([int(mask[step:].sum()) for step in range(ttt_steps)])
        if not positions:
            raise StageError(
                f"{shards[0].path.parent}: none of {self.unsupervised} rows has two answer tokens in a row to learn "
                "from: the loss masks are empty, or training.batch_tokens cuts them off"
            )
        self.positions, self.supervised = np.array(positions), np.array(supervised)

    def __len__(self) -> int:
        return len(self._where)

    def row(self, number: int) -> StateRow:
        """Row `number`, its checksum verified, cut to what is trained."""
        shard, index = self._where[number]
        row, end = self.shards[shard].row(index), int(self.positions[number]) + 1
        has_final = None if row.has_final is None else row.has_final[:end]
        return StateRow(row.key, row.token_ids[:end], row.loss_mask[:end], row.hidden_states[:end], has_final=has_final)

    def key(self, number: int) -> str:
        """The key of row `number`."""
        shard, index = self._where[number]
        return self.shards[shard].row_keys[index]

    def counts(self) -> dict[str, int]:
        """Rows and positions, for the record."""
        return {
            "rows": len(self),
            "rows_cut": self.cut,
            "rows_without_supervision": self.unsupervised,
            "positions": int(self.positions.sum()),
            "supervised_positions": int(self.supervised[:, 0].sum()),
        }


def open_shards(paths: Iterable[Path], layer_ids: Sequence[int], reference: Shard | None = None) -> list[Shard]:
    """Opens shards of one origin; StageError where `layer_ids` are not theirs, or where one differs from `reference`.

    reference: None means the first of them.
    """
    shards: list[Shard] = []
    for path in paths:
        shard = Shard(path, layer_ids=layer_ids)
        reference = reference or shard
        where = f"{path} (compared with {reference.path})"
        check_provenance(reference.meta["provenance"], shard.meta["provenance"], where)
        for key in ("hidden_size", "dtype"):
            expect(reference.meta[key], shard.meta[key], f"{where}: {key}", "extract one of them again")
        expect(reference.final_states, shard.final_states, f"{where}: final_states", "extract one of them again")
        shards.append(shard)
    return shards


def pack_rows(rows: TrainingRows, seed: Sequence[int]) -> list[Pack]:
    """All rows, in an order drawn from `seed`, first fit into packs of at most `batch_tokens` positions."""
    finished: list[Pack] = []
    waiting: list[Pack] = []
    room: list[int] = []
    for number in np.random.default_rng(list(seed)).permutation(len(rows)).tolist():
        size = int(rows.positions[number])
        place = next((place for place, left in enumerate(room) if size <= left), None)
        if place is None:
            if len(waiting) == OPEN_PACKS:
                fullest = room.index(min(room))
                finished.append(waiting.pop(fullest))
                room.pop(fullest)
            waiting.append([])
            room.append(rows.batch_tokens)
            place = len(waiting) - 1
        waiting[place].append(number)
        room[place] -= size
    return [*finished, *waiting]


def load_pack(rows: TrainingRows, pack: Pack, multiple_of: int = 1) -> PackedBatch:
    """Reads the rows of one pack; pads with zeros (document id -1) to a multiple of `multiple_of`."""
    read = [rows.row(number) for number in pack]
    parts = [draft_inputs(row) for row in read]
    lengths = torch.tensor([len(part["input_ids"]) for part in parts])
    inputs = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    inputs["document_ids"] = torch.repeat_interleave(torch.arange(len(pack)), lengths)
    padding = -int(lengths.sum()) % multiple_of
    if padding:
        inputs = {name: _pad(tensor, padding, -1 if name == "document_ids" else 0) for name, tensor in inputs.items()}
    return PackedBatch({name: tensor[None] for name, tensor in inputs.items()}, read)


def read_ahead(rows: TrainingRows, packs: Iterable[Pack], multiple_of: int = 1) -> Iterator[PackedBatch]:
    """`load_pack` for each of `packs`, in order; the next ones are read while one is used."""
    with ThreadPoolExecutor(READ_AHEAD, thread_name_prefix="read_ahead") as pool:
        waiting: list[Future[PackedBatch]] = []
        try:
            for pack in packs:
                waiting.append(pool.submit(load_pack, rows, pack, multiple_of))
                if len(waiting) > READ_AHEAD:
                    yield waiting.pop(0).result()
            while waiting:
                yield waiting.pop(0).result()
        finally:
            for future in waiting:
                future.cancel()


def _pad(tensor: torch.Tensor, padding: int, value: int) -> torch.Tensor:
    return torch.cat([tensor, tensor.new_full((padding, *tensor.shape[1:]), value)])
