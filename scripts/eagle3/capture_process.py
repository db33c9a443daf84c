"""Writes captured states into shards, in a process of its own: checksums and writes never hold up the engine's thread.

In: jobs through a connection, one forward pass each, whose arrays lie in shared memory. Out: for each job what was found.
A row is recognised by content: positions restart at 0 at each row, and a segment is written only where its token ids equal
a row that was asked for. It imports no torch, so it starts at once; it ends when the process that started it does.
"""

import ctypes
import mmap
import os
import pickle
import signal
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from scripts.eagle3.row_key import final_positions, row_key

PAGE = 4096
ID_BYTES = 4
# tokens of a row that are checksummed and written at once, where its states are copied for that
TOKENS_AT_ONCE = 512
# of Linux's prctl: the signal that a process gets when the one that started it has died
PR_SET_PDEATHSIG = 1
Array = np.ndarray[Any, Any]


class Finals(NamedTuple):
    """Where a row's final states lie that are stored apart, and the bytes of one."""

    states: int
    scales: int
    state_bytes: int


class Place(NamedTuple):
    """A row's shard file, and where its parts lie there, in bytes.

    finals: None where the final states of all tokens are stored, with the others.
    """

    path: str
    token_ids: int
    loss_mask: int
    states: int
    scales: int
    checksum: int
    finals: Finals | None = None


class Wanted(NamedTuple):
    """A row that is asked for: its length in tokens, and its places (several where it stands in the shard twice)."""

    tokens: int
    places: list[Place]


class Job(NamedTuple):
    """A forward pass: its slot in the memory, tokens, bytes of a token's states in the file.

    writers: numbers of those that share it, see `share`. wanted: rows that are asked for, a message of `pack` for each batch.
    """

    slot: int
    writers: list[int]
    tokens: int
    state_bytes: int
    scaled: bool
    wanted: list[bytes]


class Done(NamedTuple):
    """A writer's share of a pass: keys of rows that were written; rejected ones with the index of the first bad layer.

    error: the file that cannot be written, and why.
    """

    slot: int
    written: list[str]
    rejected: list[tuple[str, int]]
    error: tuple[str, str] | None = None


@dataclass(frozen=True)
class SlotLayout:
    """The arrays of one forward pass in the shared memory: [max_tokens, ...] each, on whole pages."""

    max_tokens: int
    layers: int
    state_bytes: int

    def places(self) -> dict[str, tuple[int, str, int]]:
        """name -> (first byte in the slot, numpy dtype, columns)."""
        columns = {
            "token_ids": ("int32", 1),
            "positions": ("int32", 1),
            "finite": ("bool", self.layers),
            "scales": ("float32", self.layers),
            "states": ("uint8", self.state_bytes),
        }
        found, start = {}, 0
        for name, (dtype, width) in columns.items():
            found[name] = (start, dtype, width)
            start += -(-self.max_tokens * width * np.dtype(dtype).itemsize // PAGE) * PAGE
        return found

    def slot_bytes(self) -> int:
        """Size of one slot."""
        start, _, width = self.places()["states"]
        return start + -(-self.max_tokens * width // PAGE) * PAGE

    def arrays(self, memory: mmap.mmap, slot: int) -> dict[str, Array]:
        """Views of the slot's arrays, [max_tokens, columns]."""
        base = slot * self.slot_bytes()
        return {
            name: np.frombuffer(memory, dtype, self.max_tokens * width, base + start).reshape(self.max_tokens, width)
            for name, (start, dtype, width) in self.places().items()
        }


def pack(wanted: Mapping[str, Wanted]) -> bytes:
    """The rows of a batch by their keys, for messages: once for all of its passes and all writers."""
    return pickle.dumps(wanted)


def unpack(batches: Sequence[bytes]) -> dict[str, Wanted]:
    """The rows of several batches. One that two of them ask for, in two shards, has the places of both."""
    found: dict[str, Wanted] = {}
    for batch in batches:
        for key, row in pickle.loads(batch).items():
            found[key] = Wanted(row.tokens, [*found[key].places, *row.places]) if key in found else row
    return found


def find_rows(token_ids: Array, positions: Array, wanted: Mapping[str, Wanted]) -> list[tuple[str, int, int]]:
    """Rows in one forward pass: (row key, first token, one after the last); ids and positions [tokens].

    A row's segment begins at a position 0 and counts up without a gap. The segment may be longer than the row where padding
    follows.
    """
    lengths, found = sorted({row.tokens for row in wanted.values()}, reverse=True), []
    # a boundary is wherever the position does not continue the one before
    breaks = np.flatnonzero(np.diff(positions) != 1) + 1
    for start, end in pairwise([0, *breaks.tolist(), len(token_ids)]):
        if start == end or positions[start] != 0:
            continue
        for length in (n for n in lengths if n <= end - start):
            if length < end - start and end < len(token_ids):
                continue  # only the last segment can run into padding
            key = row_key(token_ids[start : start + length])
            if key in wanted:
                found.append((key, start, start + length))
                break
    return found


def share(rows: Sequence[tuple[str, int, int]], number: int, writers: int) -> list[tuple[str, int, int]]:
    """The rows of a pass that the writer at place `number` of `writers` writes.

    The longest row comes first, and each goes to the writer that has the fewest tokens so far. Every writer comes to the same
    division by itself.
    """
    loads, mine = [0] * writers, []
    for row in sorted(rows, key=lambda row: row[1] - row[2]):
        least = loads.index(min(loads))
        loads[least] += row[2] - row[1]
        if least == number:
            mine.append(row)
    return mine


def write_at(descriptor: int, content: Any, place: int) -> None:
    """All bytes of `content` from `place` on; one write takes 2 GB at most. Raises OSError."""
    view = memoryview(content).cast("B")
    while view:
        written = os.pwrite(descriptor, view, place)
        view, place = view[written:], place + written


def write_row(descriptor: int, place: Place, states: Array, scales: Array | None) -> None:
    """Writes one row's states [tokens, bytes] and scales [tokens, layers], C-contiguous, and then its checksum.

    A row whose checksum is there is there. Its ids and mask are in the file already; the checksum begins with them.
    """
    ids = os.pread(descriptor, len(states) * ID_BYTES, place.token_ids)
    mask = os.pread(descriptor, len(states), place.loss_mask)
    checksum = zlib.crc32(mask, zlib.crc32(ids))
    for content, start in _parts(place, mask, states, scales):
        checksum = zlib.crc32(content, checksum)
        write_at(descriptor, content, start)
    write_at(descriptor, np.int64(checksum).tobytes(), place.checksum)


def _parts(place: Place, loss_mask: bytes, states: Array, scales: Array | None) -> Iterator[tuple[Any, int]]:
    """What is written of a row, and where; the checksum takes it in this order.

    Final states that are stored apart are those of the tokens alone where the loss mask needs them.
    """
    finals = place.finals
    if finals is None:
        if scales is not None:
            yield scales, place.scales
        yield states, place.states
        return
    needed = final_positions(np.frombuffer(loss_mask, np.bool_))
    for content, start, finals_start, width in (
        (scales, place.scales, finals.scales, 1),
        (states, place.states, finals.states, finals.state_bytes),
    ):
        if content is None:
            continue
        for part, at in ((content[:, :-width], start), (content[needed, -width:], finals_start)):
            for first in range(0, len(part), TOKENS_AT_ONCE):
                block = np.ascontiguousarray(part[first : first + TOKENS_AT_ONCE])
                yield block, at
                at += block.nbytes


def write_pass(job: Job, number: int, arrays: dict[str, Array]) -> Done:
    """Writes this writer's share of the rows of one forward pass that are asked for."""
    ids, positions = (arrays[name][: job.tokens, 0] for name in ("token_ids", "positions"))
    states = arrays["states"].reshape(-1)[: job.tokens * job.state_bytes].reshape(job.tokens, job.state_bytes)
    written: list[str] = []
    rejected: list[tuple[str, int]] = []
    files: dict[str, int] = {}
    wanted = unpack(job.wanted)
    mine = share(find_rows(ids, positions, wanted), job.writers.index(number), len(job.writers))
    try:
        for key, start, end in mine:
            finite = arrays["finite"][start:end]
            if not finite.all():
                rejected.append((key, int(np.flatnonzero(~finite.all(axis=0))[0])))
                continue
            scales = arrays["scales"][start:end] if job.scaled else None
            for place in wanted[key].places:
                try:
                    if place.path not in files:
                        files[place.path] = os.open(place.path, os.O_RDWR)
                    write_row(files[place.path], place, states[start:end], scales)
                except OSError as error:
                    return Done(job.slot, written, rejected, (place.path, error.strerror or str(error)))
            written.append(key)
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    return Done(job.slot, written, rejected)


def serve(number: int, connection: Connection, memory: mmap.mmap, layout: SlotLayout) -> None:
    """Does its share of jobs until the other side closes the connection or dies."""
    arrays: dict[int, dict[str, Array]] = {}
    while True:
        try:
            job: Job = connection.recv()
        except (EOFError, ConnectionError):
            return
        if job.slot not in arrays:
            arrays[job.slot] = layout.arrays(memory, job.slot)
        try:
            connection.send(write_pass(job, number, arrays[job.slot]))
        except ConnectionError:
            return


def end_with(parent: int) -> None:
    """Has this process killed as soon as `parent` is gone, in the middle of a row too: the next job writes the same places.

    Linux looks at the thread that started it, which must be one that lasts: the engine's.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked for
        sys.exit()


def main() -> None:
    """The process. Arguments: its parent, its number, descriptors of its connection and of the memory, the layout's numbers."""
    # a terminal's Ctrl-C reaches the whole group; what is being written ends with the engine's process
    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)
    parent, number, connection, memory, *sizes = map(int, sys.argv[1:])
    end_with(parent)
    serve(number, Connection(connection), mmap.mmap(memory, 0), SlotLayout(*sizes))
