"""Hidden-state shards (`.pt`): rows packed back to back, no padding, checked when they are read.

`torch.load(path, mmap=True, weights_only=True)` gives
    hidden_states [tokens, layers, hidden]   the states of `meta.layer_ids`, final one last
    scales        [tokens, layers] float32   only with dtype fp8: a state is its float8 numbers times its scale
    final_states  [needed, hidden]           only with provenance.final_states supervised: the final states of the tokens that
    final_scales  [needed] float32           `row_key.final_positions` names; the two above are then without the final layer
    token_ids     [tokens] int32
    loss_mask     [tokens] bool
    row_offsets   [rows + 1] int64
    row_keys      list of str                `rows.row_key` of each row's ids
    row_crc32     [rows] int64               over the row's ids, mask, scales and states; -1 where it is not written yet
    meta          JSON text: layer_ids, dtype, hidden_size, provenance, format_version; no times, no paths
Equal rows give equal bytes. A shard is made with its rows' ids and room for their states, which then arrive in any order
(`ShardWriter`): each byte is written once, and a job that is killed leaves what is written.
"""

import hashlib
import json
import os
import struct
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from scripts.eagle3.capture_process import ID_BYTES, Finals, Place, write_at, write_row
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import write_atomically
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.row_key import final_positions, row_key

FORMAT_VERSION = 1
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "fp8": torch.float8_e4m3fn}
FP8_MAX = torch.finfo(torch.float8_e4m3fn).max
UNWRITTEN = -1
SUPERVISED = "supervised"
STATES = ("scales", "final_scales", "hidden_states", "final_states")  # in the order of a row's checksum
KEYS = ("hidden_states", "token_ids", "loss_mask", "row_offsets", "row_keys", "row_crc32", "meta")
SCALES = {"hidden_states": "scales", "final_states": "final_scales"}
# of zip's local file header: its length, and where the lengths of name and extra field stand
LOCAL_HEADER, NAME_LENGTHS = 30, 26


@dataclass(frozen=True)
class StateRow:
    """One row: `hidden_states` [tokens, layers, hidden], `token_ids` [tokens] int32, `loss_mask` [tokens] bool.

    scales: [tokens, layers] float32 of float8 states. has_final: [tokens] bool, which final states are known, None where all
    are; the others are NaN, so that whoever uses one by mistake sees it.
    """

    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor
    hidden_states: torch.Tensor
    scales: torch.Tensor | None = None
    has_final: torch.Tensor | None = None

    def crc32(self) -> int:
        """Checksum over ids, mask, scales and states, as it is stored where all final states are."""
        scales = [] if self.scales is None else [self.scales]
        return _crc32([self.token_ids, self.loss_mask, *scales, self.hidden_states])


class RowTokens(NamedTuple):
    """A row before its states are known: `token_ids` [tokens] int32, `loss_mask` [tokens] bool."""

    key: str
    token_ids: torch.Tensor
    loss_mask: torch.Tensor


def whole_provenance(provenance: Mapping[str, Any]) -> dict[str, Any]:
    """That of a store or an extraction with the layout of final states, which it does not name where all are stored."""
    return {"final_states": "all", **provenance}


def bytes_per_state(hidden_size: int, dtype: str) -> int:
    """Of one state of one token, with its scale where it has one."""
    return hidden_size * DTYPES[dtype].itemsize + (4 if dtype == "fp8" else 0)


def to_fp8(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[tokens, layers, hidden] -> float8 numbers of that shape and scales [tokens, layers] float32."""
    scales = torch.linalg.vector_norm(states, float("inf"), dim=-1).float() / FP8_MAX
    scales = torch.where(scales == 0, 1.0, scales)
    numbers = torch.empty(states.shape, dtype=torch.float8_e4m3fn, device=states.device)
    for layer in range(states.shape[1]):  # layer by layer: the division is in float32
        numbers[:, layer] = (states[:, layer] / scales[:, layer, None]).to(torch.float8_e4m3fn)
    return numbers, scales


def from_fp8(numbers: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """What `to_fp8` was given, rounded, in bfloat16."""
    return (numbers.float() * scales[..., None]).bfloat16()


def create_shard(
    path: Path,
    rows: Sequence[RowTokens],
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    provenance: dict[str, Any],
) -> None:
    """Makes the file of a shard with everything but its states, atomically; they take no room on the disk yet.

    Final states are stored of all tokens, or as `provenance.final_states` says.
    """
    content = _content(path, rows, layer_ids, hidden_size, dtype, provenance)
    write_atomically(path, lambda unfinished: _lay_out(unfinished, content))


def _content(
    path: Path,
    rows: Sequence[RowTokens],
    layer_ids: Sequence[int],
    hidden_size: int,
    dtype: torch.dtype,
    provenance: dict[str, Any],
) -> dict[str, Any]:
    """What a shard file holds; its states are memory that nobody touches."""
    if not rows:
        raise StageError(f"{path}: no rows for this shard; lower scatter.parts or scatter.shards_per_part")
    meta = {
        "format_version": FORMAT_VERSION,
        "layer_ids": list(layer_ids),
        "dtype": str(dtype).removeprefix("torch."),
        "hidden_size": hidden_size,
        "provenance": provenance,
    }
    offsets = torch.tensor([0, *(len(row.token_ids) for row in rows)]).cumsum(0)
    loss_mask = torch.cat([row.loss_mask for row in rows])
    tokens, layers = int(offsets[-1]), len(layer_ids)
    shapes: dict[str, tuple[int, ...]] = {"hidden_states": (tokens, layers)}
    if provenance.get("final_states") == SUPERVISED:
        needed = int(final_positions(loss_mask.numpy(), offsets[:-1].tolist()).sum())
        shapes = {"hidden_states": (tokens, layers - 1), "final_states": (needed,)}
    states = {name: torch.empty(*shape, hidden_size, dtype=dtype) for name, shape in shapes.items()}
    if dtype == DTYPES["fp8"]:
        states |= {SCALES[name]: torch.empty(shape) for name, shape in shapes.items()}
    return {
        **states,
        "token_ids": torch.cat([row.token_ids for row in rows]),
        "loss_mask": loss_mask,
        "row_offsets": offsets,
        "row_crc32": torch.full((len(rows),), UNWRITTEN, dtype=torch.int64),
        "row_keys": [row.key for row in rows],
        "meta": json.dumps(meta, sort_keys=True),
    }


def _lay_out(path: Path, content: dict[str, Any]) -> None:
    """Writes `content` with room for the states instead of them. Raises OSError."""
    try:
        with torch.serialization.skip_data():
            torch.save(content, path)
    except RuntimeError as error:  # torch's writer reports a full disk so
        raise OSError(_first_line(error)) from error
    places = _places(path, content)
    descriptor = os.open(path, os.O_WRONLY)
    try:
        for name, tensor in content.items():
            if isinstance(tensor, torch.Tensor) and name not in STATES:
                write_at(descriptor, _bytes(tensor), places[name])
    finally:
        os.close(descriptor)


class ShardWriter:
    """A shard whose states are being written: rows in any order, from several threads.

    What was put can be read by others at once, and is on the disk after a sync.
    """

    def __init__(self, path: Path) -> None:
        """Opens a file that `create_shard` made."""
        self.shard = Shard(path)
        self.indices: dict[str, list[int]] = {}
        for index, key in enumerate(self.shard.row_keys):
            self.indices.setdefault(key, []).append(index)
        self._places = _places(path, self.shard.content)
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115 - open as long as rows come
        self._token_bytes = {
            name: tensor.shape[1:].numel() * tensor.element_size()
            for name, tensor in self.shard.content.items()
            if name in STATES
        }

    def place(self, index: int) -> Place:
        """Where row `index` lies in the file."""
        start, finals = self.shard.offsets[index], None
        scales, states = (self._at(name, start) for name in ("scales", "hidden_states"))
        ids, mask, checksums = (self._places[name] for name in ("token_ids", "loss_mask", "row_crc32"))
        if self.shard.final_states == SUPERVISED:
            first = self.shard.final_offsets[index]
            final_states, final_scales = (self._at(name, first) for name in ("final_states", "final_scales"))
            finals = Finals(final_states, final_scales, self._token_bytes["final_states"])
        at = ids + ID_BYTES * start, mask + start, states, scales, checksums + 8 * index
        return Place(str(self.shard.path), *at, finals)

    def _at(self, name: str, number: int) -> int:
        """Where entry `number` of a tensor lies; 0 where the file has no such tensor."""
        return self._places[name] + number * self._token_bytes[name] if name in self._places else 0

    def put(self, index: int, states: torch.Tensor, scales: torch.Tensor | None = None) -> None:
        """Writes the states [tokens, layers, hidden] of row `index`; from then on it counts as written. Raises OSError."""
        content = np.asarray(_bytes(states)).reshape(len(states), -1)
        write_row(self._file.fileno(), self.place(index), content, None if scales is None else scales.contiguous().numpy())

    def same_file(self, path: Path) -> bool:
        """Whether `path` is the file that is open here, and not a new one in its place."""
        return os.path.samestat(os.fstat(self._file.fileno()), os.stat(path))


def write_shard(path: Path, rows: Sequence[StateRow], layer_ids: Sequence[int], provenance: dict[str, Any]) -> None:
    """Writes `rows` as one shard, atomically."""
    tokens = [RowTokens(row.key, row.token_ids, row.loss_mask) for row in rows]
    hidden, dtype = (rows[0].hidden_states.shape[-1], rows[0].hidden_states.dtype) if rows else (0, torch.float32)

    content = _content(path, tokens, layer_ids, hidden, dtype, provenance)

    def save(unfinished: Path) -> None:
        _lay_out(unfinished, content)
        writer = ShardWriter(unfinished)
        for index, row in enumerate(rows):
            writer.put(index, row.hidden_states, row.scales)

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
        self.content: dict[str, Any] = content
        self.layer_ids: list[int] = self.meta["layer_ids"]
        self.row_keys: list[str] = content["row_keys"]
        self.offsets: list[int] = content["row_offsets"].tolist()
        self.final_states = SUPERVISED if "final_states" in content else "all"
        self._check_shape()
        if self.final_states == SUPERVISED:
            needed = final_positions(content["loss_mask"].numpy(), self.offsets[:-1])
            # [rows + 1]: where each row's final states begin
            self.final_offsets: list[int] = np.concatenate([[0], needed.cumsum()])[self.offsets].tolist()
            self._check_finals()
        if layer_ids is not None:
            expect(list(layer_ids), self.layer_ids, f"{path}: layer_ids", "extract again with these layers")
        if provenance is not None:
            check_provenance(provenance, {"final_states": self.final_states, **self.meta["provenance"]}, self.path)

    def __len__(self) -> int:
        return len(self.row_keys)

    @property
    def state_bytes(self) -> int:
        """Of one token's states of all layers, as they come from the engine."""
        return len(self.layer_ids) * int(self.meta["hidden_size"]) * int(self.content["hidden_states"].element_size())

    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [end - start for start, end in pairwise(self.offsets)]

    def written(self, index: int) -> bool:
        """Whether the states of row `index` are there; in a finished shard all are."""
        return int(self.content["row_crc32"][index]) != UNWRITTEN

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask [tokens] of row `index` alone, unverified: no state is read."""
        return self.tokens(index).loss_mask

    def tokens(self, index: int) -> RowTokens:
        """Row `index` without its states, unverified."""
        part = slice(self.offsets[index], self.offsets[index + 1])
        return RowTokens(self.row_keys[index], self.content["token_ids"][part], self.content["loss_mask"][part])

    def stored_row(self, index: int) -> StateRow:
        """Row `index` in the dtype that is stored, its checksum and key verified; views of the file where all is stored."""
        tokens, part = self.tokens(index), slice(self.offsets[index], self.offsets[index + 1])
        slices = dict.fromkeys(("hidden_states", "scales"), part)
        if self.final_states == SUPERVISED:
            slices |= dict.fromkeys(("final_states", "final_scales"), slice(*self.final_offsets[index : index + 2]))
        stored = {name: self.content[name][slices[name]] for name in STATES if name in self.content}
        checksum = _crc32([tokens.token_ids, tokens.loss_mask, *stored.values()])
        if checksum != int(self.content["row_crc32"][index]) or row_key(tokens.token_ids.numpy()) != tokens.key:
            raise StageError(
                f"{self.path}: row {index} ({tokens.key}) is damaged: checksum differs; delete this shard and remake it"
            )
        if self.final_states != SUPERVISED:
            return StateRow(*tokens, stored["hidden_states"], stored.get("scales"))
        needed = torch.from_numpy(final_positions(tokens.loss_mask.numpy()))
        states = _with_finals(stored["hidden_states"], stored["final_states"], needed)
        scales = _with_finals(stored["scales"], stored["final_scales"], needed) if "scales" in stored else None
        return StateRow(*tokens, states, scales, needed)

    def row(self, index: int) -> StateRow:
        """Row `index`, verified: as stored, or bfloat16 made from float8."""
        row = self.stored_row(index)
        if row.scales is None:
            return row
        return replace(row, hidden_states=from_fp8(row.hidden_states, row.scales), scales=None)

    def __iter__(self) -> Iterator[StateRow]:
        return (self.row(index) for index in range(len(self)))

    def digest(self) -> str:
        """sha256 over all but the states, which the rows' checksums stand for: no state is read."""
        digest = hashlib.sha256(json.dumps([self.row_keys, self.content["meta"]]).encode())
        for name in ("token_ids", "loss_mask", "row_offsets", "row_crc32"):
            digest.update(_bytes(self.content[name]))
        return digest.hexdigest()

    def _check_shape(self) -> None:
        tokens, rows, advice = self.offsets[-1], len(self.row_keys), "delete and remake it"
        states = self.content["hidden_states"]
        layers = len(self.layer_ids) - (self.final_states == SUPERVISED)
        expect([tokens, layers, self.meta["hidden_size"]], list(states.shape), f"{self.path}: hidden_states", advice)
        expect(str(states.dtype).removeprefix("torch."), self.meta["dtype"], f"{self.path}: dtype", advice)
        for name in ("token_ids", "loss_mask"):
            expect([tokens], list(self.content[name].shape), f"{self.path}: {name}", advice)
        expect((rows + 1, rows), (len(self.offsets), len(self.content["row_crc32"])), f"{self.path}: rows", advice)
        scales = [tokens, layers] if states.dtype == DTYPES["fp8"] else None
        found = list(self.content["scales"].shape) if "scales" in self.content else None
        expect(scales, found, f"{self.path}: scales", advice)

    def _check_finals(self) -> None:
        needed, advice = self.final_offsets[-1], "delete and remake it"
        found = list(self.content["final_states"].shape)
        expect([needed, self.meta["hidden_size"]], found, f"{self.path}: final_states", advice)
        if "scales" in self.content:
            expect([needed], list(self.content["final_scales"].shape), f"{self.path}: final_scales", advice)


def _places(path: Path, content: dict[str, Any]) -> dict[str, int]:
    """Where the bytes of each tensor begin: torch.save stores them uncompressed, numbered in the order of the content."""
    names = [name for name, value in content.items() if isinstance(value, torch.Tensor)]
    with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
        headers = {entry.filename.partition("/")[2]: entry.header_offset for entry in archive.infolist()}
        places = {}
        for number, name in enumerate(names):
            start = headers[f"data/{number}"]
            file.seek(start + NAME_LENGTHS)
            places[name] = start + LOCAL_HEADER + sum(struct.unpack("<HH", file.read(4)))
    return places


def _with_finals(others: torch.Tensor, finals: torch.Tensor, needed: torch.Tensor) -> torch.Tensor:
    """[tokens, layers, ...] of all layers from the others' and the final layer's where `needed` [tokens]; NaN elsewhere."""
    whole = others.new_empty(len(others), others.shape[1] + 1, *others.shape[2:])
    absent = others.new_full((1, *others.shape[2:]), float("nan"))
    # copied by numpy: it is called in reading threads, and torch's own threads would wait for each other on busy cores
    size, known = others.shape[2:].numel() * others.element_size(), needed.numpy()
    to, rest = (np.asarray(_bytes(each)).reshape(len(each), each.shape[1], size) for each in (whole, others))
    to[:, :-1] = rest
    to[known, -1], to[~known, -1] = (np.asarray(_bytes(each)).reshape(len(each), size) for each in (finals, absent))
    return whole


def _crc32(tensors: Iterable[torch.Tensor]) -> int:
    checksum = 0
    for tensor in tensors:
        checksum = zlib.crc32(_bytes(tensor), checksum)
    return checksum


def _bytes(tensor: torch.Tensor) -> memoryview:
    # numpy has no bfloat16: the bytes are read through uint8
    return memoryview(tensor.contiguous().view(torch.uint8).numpy().reshape(-1))


def _first_line(error: Exception) -> str:
    # up to the first sentence: libraries add advice that does not apply here
    return str(error).split("\n")[0].split(". ")[0].split(" (")[0] or type(error).__name__
