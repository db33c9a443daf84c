"""From the device into shards: forward passes go through a ring of host buffers, and threads write the rows in them.

In: a `Batch`, the rows of one shard file that are computed next, and the forward passes of the engine, one by one. Out: the
states of each row in its place in the file. Host memory is bounded by the ring: when the disk is slower than the engine,
the engine waits. A row is recognised by content: positions restart at 0 at each row, and a segment is written only where
its token ids equal a row that was asked for.
"""

import threading
from collections import deque
from collections.abc import Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import cannot_write
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import DTYPES, ShardWriter, to_fp8

# Forward passes on their way: one that is copied from the device, and those that threads write. A checksum and a write take
# about as long as the engine needs for the same tokens, so two writers keep up with it; the third is for the disk's moods.
WRITERS = 3
SLOTS = WRITERS + 1


@dataclass
class Step:
    """One forward pass: ids and positions [tokens], states [tokens, layers, hidden], finite [tokens, layers].

    scales: [tokens, layers] of float8 states.
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    states: torch.Tensor
    finite: torch.Tensor
    scales: torch.Tensor | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Those that there are, by name."""
        return {name: tensor for name, tensor in vars(self).items() if tensor is not None}


@dataclass
class _Slot:
    """Host memory for one forward pass, pinned where it comes from a GPU; made when it is first needed, then kept."""

    memory: dict[str, torch.Tensor] = field(default_factory=dict)

    def fit(self, name: str, like: torch.Tensor, tokens: int) -> torch.Tensor:
        """Pinned memory of `like`'s shape, as part of memory for `tokens` tokens or more."""
        held = self.memory.get(name)
        if held is None or held.dtype != like.dtype or held.shape[1:] != like.shape[1:] or len(held) < len(like):
            shape = (max(tokens, len(like)), *like.shape[1:])
            held = self.memory[name] = torch.empty(shape, dtype=like.dtype, pin_memory=True)
        return held[: len(like)]


class Batch:
    """Rows of one shard file that are computed together: what is asked for, and what has been written of it."""

    def __init__(self, file: ShardWriter, indices: Sequence[int], layer_ids: Sequence[int]) -> None:
        """indices: the rows' places in the file."""
        self._file, self.layer_ids = file, layer_ids
        self.problem: str | None = None
        self.tasks: list[Future[None]] = []
        shard = file.shard
        self.dtype: torch.dtype = shard.content["hidden_states"].dtype
        self._wanted: dict[str, list[int]] = {}
        for index in indices:
            self._wanted.setdefault(shard.row_keys[index], []).append(index)
        self._lengths = sorted({shard.offsets[index + 1] - shard.offsets[index] for index in indices}, reverse=True)
        self._found: set[str] = set()
        self._rejected: list[tuple[str, int, str]] = []
        self._lock = threading.Lock()

    def write(self, step: Step) -> None:
        """Writes the rows of one forward pass that are asked for; in a thread of its own."""
        for key, start, end in find_rows(step.token_ids, step.positions, self._wanted, self._lengths):
            with self._lock:
                if key in self._found:
                    continue
                self._found.add(key)
            part = slice(start, end)
            finite = step.finite[part]
            if not bool(finite.all()):
                layer = self.layer_ids[int((~finite).any(dim=0).nonzero()[0])]
                self._rejected.append((key, layer, "not finite"))
                continue
            for index in self._wanted[key]:
                self._file.put(index, step.states[part], None if step.scales is None else step.scales[part])

    def done(self) -> bool:
        """Whether every forward pass has been written."""
        return all(task.done() for task in self.tasks)

    def result(self) -> dict[str, Any]:
        """Waits for the writers: {"path", "keys", "rejected": [[row_key, layer, reason]]} or {"error": one line}."""
        path = self._file.shard.path
        try:
            for task in self.tasks:
                task.result()
            if self.problem:
                raise StageError(self.problem)
            self._check_complete()
        except OSError as error:
            return {"error": str(cannot_write(path, error))}
        except StageError as error:
            return {"error": str(error)}
        rejected = sorted(self._rejected)
        keys = self._found - {key for key, _, _ in rejected}
        return {"path": str(path), "keys": sorted(keys), "rejected": [list(entry) for entry in rejected]}

    def _check_complete(self) -> None:
        missing = [key for key in self._wanted if key not in self._found]
        if missing:
            tokens = len(self._file.shard.tokens(self._wanted[missing[0]][0]).token_ids)
            raise StageError(
                f"capture: {len(missing)} of {len(self._wanted)} rows were not computed in one piece, e.g. {missing[0]} of "
                f"{tokens} tokens; the engine cut or cached a row: run again, and report it if it stays"
            )


class CaptureWriter:
    """Takes forward passes from the engine's thread and has them written; batches end in the order of their beginning."""

    def __init__(self, max_tokens: int) -> None:
        """max_tokens: of one forward pass; buffers are made for as many."""
        self._max_tokens = max_tokens
        self._slots: SimpleQueue[_Slot] = SimpleQueue()
        for _ in range(SLOTS):
            self._slots.put(_Slot())
        self._writers = ThreadPoolExecutor(WRITERS, thread_name_prefix="capture_writer")
        self._file: ShardWriter | None = None
        self._batch: Batch | None = None
        self._running: deque[Batch] = deque()
        self._stream: Any = None

    def expect(self, path: Path, indices: Sequence[int], layer_ids: Sequence[int]) -> None:
        """The forward passes from now on are those of these rows of the shard file at `path`."""
        self._end_batch()
        if self._file is None or not self._file.same_file(path):
            self._file = ShardWriter(path)
        self._batch = Batch(self._file, indices, layer_ids)

    def fail(self, problem: str) -> None:
        """Something is wrong with the batch that runs; its result says so."""
        if self._batch is not None:
            self._batch.problem = self._batch.problem or problem

    def take(self, token_ids: torch.Tensor, positions: torch.Tensor, states: list[torch.Tensor]) -> None:
        """One forward pass: ids and positions [tokens], one state [tokens, hidden] per layer; waits for a free buffer."""
        batch = self._batch
        if batch is None:  # a warm-up of the engine
            return
        stacked = torch.stack(states, dim=1)
        finite = torch.linalg.vector_norm(stacked, float("inf"), dim=-1).isfinite()
        numbers, scales = to_fp8(stacked) if batch.dtype == DTYPES["fp8"] else (stacked.to(batch.dtype), None)
        # ids and positions are the runner's buffers and change with the next step
        step = Step(token_ids.clone(), positions.clone(), numbers, finite, scales)
        slot = self._slots.get()
        copied: list[Any] = []
        if numbers.is_cuda:
            step, copied = self._to_host(step, slot)
        batch.tasks.append(self._writers.submit(self._write, batch, step, slot, copied))

    def results(self, wait: bool) -> list[dict[str, Any]]:
        """Ends the batch that runs; results of the oldest batches, of those that are written or of all."""
        self._end_batch()
        found = []
        while self._running and (wait or self._running[0].done()):
            found.append(self._running.popleft().result())
        return found

    def _end_batch(self) -> None:
        if self._batch is not None:
            self._running.append(self._batch)
        self._batch = None

    def _to_host(self, step: Step, slot: _Slot) -> tuple[Step, list[Any]]:
        """Starts the copy on a stream of its own; returns the host's step, and what is held until the copy is done."""
        if self._stream is None:
            self._stream = torch.cuda.Stream()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            host = {}
            for name, source in step.tensors().items():
                host[name] = slot.fit(name, source, self._max_tokens)
                host[name].copy_(source, non_blocking=True)
            event = torch.cuda.Event()
            event.record(self._stream)
        return Step(**host), [event, step]

    def _write(self, batch: Batch, step: Step, slot: _Slot, copied: list[Any]) -> None:
        try:
            if copied:
                copied[0].synchronize()
                copied.clear()  # the device's memory is free for the next step
            batch.write(step)
        finally:
            self._slots.put(slot)


def find_rows(
    token_ids: torch.Tensor, positions: torch.Tensor, wanted: Collection[str], lengths: Sequence[int]
) -> list[tuple[str, int, int]]:
    """Rows in one forward pass: (row key, first token, one after the last).

    A row's segment begins at a position 0 and counts up without a gap. The segment may be longer than the row where padding
    follows. lengths: of the wanted rows, descending.
    """
    ids, found = token_ids.to(torch.int32), []
    # a boundary is wherever the position does not continue the one before
    breaks = ((positions[1:] - positions[:-1]) != 1).nonzero().flatten() + 1
    for start, end in pairwise([0, *breaks.tolist(), len(ids)]):
        if start == end or int(positions[start]) != 0:
            continue
        for length in (n for n in lengths if n <= end - start):
            if length < end - start and end < len(ids):
                continue  # only the last segment can run into padding
            key = row_key(ids[start : start + length].numpy())
            if key in wanted:
                found.append((key, start, start + length))
                break
    return found
