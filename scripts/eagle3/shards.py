"""Hidden-state shards (`.pt`): rows packed back to back, no padding, checked when they are read.

`torch.load(path, mmap=True, weights_only=True)` gives
    hidden_states [tokens, layers, hidden]   the states of `meta.layer_ids`, final one last
    token_ids     [tokens] int32
    loss_mask     [tokens] bool
    row_offsets   [rows + 1] int64
    row_keys      list of str                `rows.row_key` of each row's ids
    row_crc32     [rows] int64               over the row's ids, mask and states
    meta          JSON text: layer_ids, dtype, hidden_size, provenance, format_version; no times, no paths
Equal rows give equal bytes.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import write_atomically
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.rows import row_key

FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
KEYS = ("hidden_states", "token_ids", "loss_mask", "row_offsets", "row_keys", "row_crc32", "meta")


@dataclass(frozen=True)
class StateRow:
    """One row: `hidden_states` [tokens, layers, hidden], `token_ids` [tokens] int32, `loss_mask` [tokens] bool."""

    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor

    def crc32(self) -> int:
        """Checksum over ids, mask and states as stored."""
        checksum = 0
        for tensor in (self.token_ids, self.loss_mask, self.hidden_states):
            # numpy has no bfloat16: the bytes are read through uint8
            checksum = zlib.crc32(tensor.contiguous().view(torch.uint8).numpy().reshape(-1).data, checksum)
        return checksum


def write_shard(path: Path, rows: Sequence[StateRow], layer_ids: Sequence[int], provenance: dict[str, Any]) -> None:
    """Writes `rows` as one shard, atomically."""
    if not rows:
        raise StageError(f"{path}: no rows for this shard; lower scatter.parts or scatter.shards_per_part")
    states = rows[0].hidden_states
    meta = {
        "format_version": FORMAT_VERSION,
        "layer_ids": list(layer_ids),
        "dtype": str(states.dtype).removeprefix("torch."),
        "hidden_size": states.shape[-1],
        "provenance": provenance,
    }
    content = {
        "hidden_states": torch.cat([row.hidden_states for row in rows]),
        "token_ids": torch.cat([row.token_ids for row in rows]),
        "loss_mask": torch.cat([row.loss_mask for row in rows]),
        "row_offsets": torch.tensor([0, *(len(row.token_ids) for row in rows)]).cumsum(0),
        "row_keys": [row.key for row in rows],
        "row_crc32": torch.tensor([row.crc32() for row in rows], dtype=torch.int64),
        "meta": json.dumps(meta, sort_keys=True),
    }

    def save(unfinished: Path) -> None:
        try:
            torch.save(content, unfinished)
        except RuntimeError as error:  # torch's writer reports a full disk so
            raise OSError(_first_line(error)) from error

    write_atomically(path, save)


class Shard:
    """An open shard: memory-mapped, rows are checked as they are read."""

    def __init__(self, path: Path, provenance: dict[str, Any] | None = None, layer_ids: Sequence[int] | None = None) -> None:
        """Opens `path`; raises StageError if it is damaged, inconsistent, or not of `provenance` and `layer_ids`."""
        self.path = Path(path)
        try:
            content = torch.load(self.path, mmap=True, weights_only=True, map_location="cpu")
            missing = [key for key in KEYS if key not in content]
            if missing:
                raise KeyError(f"{missing[0]} is missing")
            self.meta: dict[str, Any] = json.loads(content["meta"])
        except FileNotFoundError as error:
            raise StageError(f"{path}: no such file") from error
        except Exception as error:  # torch.load raises RuntimeError, UnpicklingError, EOFError, ... on damaged files
            raise StageError(
                f"{path}: not a readable shard, cut short or damaged ({_first_line(error)}); delete and remake it"
            ) from error
        self.layer_ids: list[int] = self.meta["layer_ids"]
        self.row_keys: list[str] = content["row_keys"]
        self._states, self._ids, self._mask = (content[key] for key in KEYS[:3])
        self._offsets, self._checksums = content["row_offsets"].tolist(), content["row_crc32"].tolist()
        self._check_shape()
        if layer_ids is not None:
            expect(list(layer_ids), self.layer_ids, f"{path}: layer_ids", "extract again with these layers")
        if provenance is not None:
            check_provenance(provenance, self.meta["provenance"], self.path)

    def __len__(self) -> int:
        return len(self.row_keys)

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [end - start for start, end in zip(self._offsets, self._offsets[1:], strict=False)]

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask [tokens] of row `index` alone, unverified: no state is read."""
        return self._mask[self._offsets[index] : self._offsets[index + 1]]

    def row(self, index: int) -> StateRow:
        """Row `index` as views of the mapped file, its checksum and key verified."""
        start, end = self._offsets[index], self._offsets[index + 1]
        row = StateRow(self.row_keys[index], self._ids[start:end], self._mask[start:end], self._states[start:end])
        if row.crc32() != self._checksums[index] or row_key(row.token_ids.numpy()) != row.key:
            raise StageError(
                f"{self.path}: row {index} ({row.key}) is damaged: checksum differs; delete this shard and remake it"
            )
        return row

    def __iter__(self) -> Iterator[StateRow]:
        return (self.row(index) for index in range(len(self)))

    def _check_shape(self) -> None:
        tokens, rows = self._offsets[-1], len(self.row_keys)
        shape = [tokens, len(self.layer_ids), self.meta["hidden_size"]]
        expect(shape, list(self._states.shape), f"{self.path}: hidden_states", "delete and remake it")
        expect(
            str(self._states.dtype).removeprefix("torch."),
            self.meta["dtype"],
            f"{self.path}: dtype",
            "delete and remake it",
        )
        for name, tensor in (("token_ids", self._ids), ("loss_mask", self._mask)):
            expect([tokens], list(tensor.shape), f"{self.path}: {name}", "delete and remake it")
        expect((rows + 1, rows), (len(self._offsets), len(self._checksums)), f"{self.path}: rows", "delete and remake it")


def _first_line(error: Exception) -> str:
    # up to the first sentence: libraries add advice that does not apply here
    return str(error).split("\n")[0].split(". ")[0].split(" (")[0] or type(error).__name__
