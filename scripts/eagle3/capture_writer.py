"""From the device into shards: forward passes go through a ring of shared host memory to processes that write them.

In: the rows of shard files that are computed next, and the engine's forward passes, one by one. Out: the states of each
row in its place in its file (capture_process). The engine's thread only starts copies and passes messages. Host memory is
bounded by the ring: when the disk is slower than the engine, the engine waits.
"""

import mmap
import os
import select
import subprocess
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from multiprocessing import Pipe
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import torch

from scripts.eagle3.capture_process import Done, Job, SlotLayout, Wanted, pack
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import cannot_write
from scripts.eagle3.shards import DTYPES, ShardWriter, to_fp8

ROOT = Path(__file__).resolve().parents[2]
# They share each forward pass: the checksums and writes of one are slower than an engine.
MAX_WRITERS = 8
# of a forward pass, at least, for each writer that it is given to: with less to do, messages to many cost the engine's thread
# more than it gains (SmolLM2 on an H200, 75 MB in 20 ms a pass: 0.84 of prefill with three writers, 0.82 with eight)
SHARE_BYTES = 24 << 20
# Forward passes in the ring: one that is written, one that waits for it, one that is copied from the device. More where they
# are small, since what has been copied or written is noticed once a pass only.
MIN_SLOTS, MAX_SLOTS, RING_BYTES = 3, 6, 1 << 30


class Batch:
    """Rows of some shard files that are computed together: what is asked for, and what has been written of it."""

    def __init__(self, files: Sequence[tuple[ShardWriter, Sequence[int]]], layer_ids: Sequence[int]) -> None:
        """files: with the rows' places in them."""
        self.paths, self.layer_ids = [file.shard.path for file, _ in files], layer_ids
        self.dtype: torch.dtype = files[0][0].shard.content["hidden_states"].dtype
        self.state_bytes = files[0][0].shard.state_bytes
        self.wanted: dict[str, Wanted] = {}
        for file, indices in files:
            for index in indices:
                key, tokens = file.shard.row_keys[index], file.shard.offsets[index + 1] - file.shard.offsets[index]
                self.wanted.setdefault(key, Wanted(tokens, [])).places.append(file.place(index))
        self.message = pack(self.wanted)
        self.problem: str | None = None
        # the engine has computed all of it; forward passes that may hold rows of it and are not written yet
        self.computed, self.passes = False, 0
        self._written: set[str] = set()
        self._rejected: dict[str, int] = {}

    def add(self, done: Done) -> None:
        """A part of a forward pass has been written, with rows of this batch and of its neighbours."""
        self._written |= self.wanted.keys() & set(done.written)
        self._rejected |= {key: layer for key, layer in done.rejected if key in self.wanted}
        if done.error:
            path, reason = done.error
            self.problem = self.problem or str(cannot_write(Path(path), OSError(reason)))

    def result(self) -> dict[str, Any]:
        """{"paths", "keys", "rejected": [[row_key, layer, reason]]} or {"error": one line}, all passes being written."""
        missing = [key for key in self.wanted if key not in self._written and key not in self._rejected]
        if missing and not self.problem:
            self.problem = (
                f"capture: {len(missing)} of {len(self.wanted)} rows were not computed in one piece, e.g. {missing[0]} of "
                f"{self.wanted[missing[0]].tokens} tokens; the engine cut or cached a row: run again, and report it if it stays"
            )
        if self.problem:
            return {"error": self.problem}
        rejected = [[key, self.layer_ids[index], "not finite"] for key, index in sorted(self._rejected.items())]
        return {"paths": list(map(str, self.paths)), "keys": sorted(self._written), "rejected": rejected}


class _Copy(NamedTuple):
    """A forward pass on its way to the host; the device's tensors are held until the event has happened."""

    batches: list[Batch]
    slot: int
    tokens: int
    held: list[torch.Tensor]
    event: Any


class _Writer:
    """One writing process."""

    def __init__(self, number: int, memory: int, layout: SlotLayout) -> None:
        self.connection, theirs = Pipe()
        # imported, not run by name: what it sends is then of the same classes here and there
        command = [sys.executable, "-c", "from scripts.eagle3.capture_process import main; main()"]
        numbers = [os.getpid(), number, theirs.fileno(), memory, layout.max_tokens, layout.layers, layout.state_bytes]
        command += map(str, numbers)
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1"}
        self.process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno(), memory])
        theirs.close()
        self.running = 0

    def send(self, job: memoryview) -> None:
        """StageError where the process is gone."""
        try:
            self.connection.send_bytes(job)
        except ConnectionError as error:
            raise self._ended() from error
        self.running += 1

    def take(self) -> Done:
        """The answer to the oldest job; StageError where the process is gone."""
        try:
            done: Done = self.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._ended() from error
        self.running -= 1
        return done

    def _ended(self) -> StageError:
        code = self.process.wait()
        return StageError(
            f"a process that writes states ended with exit code {code}; if it was killed for memory, lower batch_tokens; "
            "run again, what is written stays"
        )


class CaptureWriter:
    """Takes forward passes from the engine's thread and has them written; batches end in the order of their beginning."""

    def __init__(self, max_tokens: int, layers: int, state_bytes: int) -> None:
        """max_tokens: of one forward pass. state_bytes: of one token's states, at most."""
        self._layout = SlotLayout(max_tokens, layers, state_bytes)
        self.slots = max(MIN_SLOTS, min(MAX_SLOTS, RING_BYTES // self._layout.slot_bytes()))
        descriptor = os.memfd_create("captured_states")  # has no name that a killed job could leave behind
        os.ftruncate(descriptor, self.slots * self._layout.slot_bytes())
        self._memory = mmap.mmap(descriptor, 0)
        writers = max(1, min(MAX_WRITERS, (os.cpu_count() or 1) // 2))
        self._writers = [_Writer(number, descriptor, self._layout) for number in range(writers)]
        os.close(descriptor)
        self._answers = select.poll()
        for writer in self._writers:
            self._answers.register(writer.connection, select.POLLIN)
        self._by_descriptor = {writer.connection.fileno(): writer for writer in self._writers}
        self.pinned = torch.cuda.is_available() and _pin(self._memory)
        arrays = [self._layout.arrays(self._memory, slot) for slot in range(self.slots)]
        self._slots = [{name: torch.from_numpy(array) for name, array in slot.items()} for slot in arrays]
        self._free = list(range(self.slots))
        self._next_writer = 0
        self._written: dict[int, tuple[list[Batch], int]] = {}  # slot -> whose pass it is, and how many writers are at it
        self._copies: deque[_Copy] = deque()
        self._running: deque[Batch] = deque()
        self._files: dict[Path, ShardWriter] = {}  # of the batch that came last
        self._stream: Any = None
        self._broken: str | None = None  # why nothing can be written any more: a writing process is gone

    def expect(self, rows: Mapping[Path, Sequence[int]], layer_ids: Sequence[int]) -> None:
        """The forward passes from now on may hold these rows of some shard files too: a batch."""
        known = {path: file for path, file in self._files.items() if path in rows and file.same_file(path)}
        self._files = {path: known.get(path) or ShardWriter(path) for path in rows}
        self._running.append(Batch([(self._files[path], indices) for path, indices in rows.items()], layer_ids))

    def fail(self, problem: str) -> None:
        """Something is wrong with the batches that run; their results say so."""
        for batch in self._computing():
            batch.problem = batch.problem or problem

    def _computing(self) -> list[Batch]:
        return [batch for batch in self._running if not batch.computed]

    def take(self, token_ids: torch.Tensor, positions: torch.Tensor, states: list[torch.Tensor]) -> None:
        """One forward pass: ids and positions [tokens], one state [tokens, hidden] per layer; waits for room in the ring."""
        batches, tokens = self._computing(), len(token_ids)
        if not batches or self._broken:  # a warm-up of the engine; or it is told with the results, outside of the engine
            return
        batch = batches[0]
        width = sum(state.shape[1] for state in states) * batch.dtype.itemsize
        if tokens > self._layout.max_tokens or any(width != each.state_bytes for each in batches):
            given, expected = (tokens, width), (self._layout.max_tokens, batch.state_bytes)
            self.fail(f"capture: a forward pass of {given} tokens and bytes a token, expected at most {expected}")
            return
        stacked = torch.stack(states, dim=1)
        finite = torch.linalg.vector_norm(stacked, float("inf"), dim=-1).isfinite()
        numbers, scales = to_fp8(stacked) if batch.dtype == DTYPES["fp8"] else (stacked.to(batch.dtype), None)
        # ids and positions are the runner's buffers and change with the next pass: these are copies
        found = {"token_ids": token_ids.to(torch.int32, copy=True), "positions": positions.to(torch.int32, copy=True)}
        found |= {"finite": finite} | ({} if scales is None else {"scales": scales})
        try:
            self._pump(wait_for_room=True)
            self._start_copy(batches, self._free.pop(), {**found, "states": numbers})
        except StageError as error:
            self._broken = str(error)

    def results(self, wait: bool, computing: int = 0) -> list[dict[str, Any]]:
        """Results of the oldest batches: of those that are written, or of all. The newest `computing` are not computed yet."""
        for batch in list(self._running)[: len(self._running) - computing]:
            batch.computed = True
        try:
            found = [] if self._broken else self._ended_batches(wait)
        except StageError as error:
            self._broken = str(error)
        return [{"error": self._broken}] if self._broken else found

    def _ended_batches(self, wait: bool) -> list[dict[str, Any]]:
        self._pump()
        found = []
        while self._running and self._running[0].computed and (wait or not self._running[0].passes):
            while self._running[0].passes:
                self._wait()
            found.append(self._running.popleft().result())
        return found

    def close(self) -> None:
        """Ends the writing processes and gives the ring back."""
        for writer in self._writers:
            writer.connection.close()
        for writer in self._writers:
            writer.process.wait()
        if self.pinned:  # else CUDA goes on knowing addresses that belong to others by then, and fails in some later engine
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaHostUnregister(_address(self._memory))

    def _start_copy(self, batches: list[Batch], slot: int, found: dict[str, torch.Tensor]) -> None:
        """Copies on a stream of its own: the engine's next kernels do not wait for it."""
        tokens, event, state_bytes = len(found["states"]), None, batches[0].state_bytes
        targets = {name: array[:tokens] for name, array in self._slots[slot].items() if name in found}
        # a file's states may be narrower than the ring is made for
        targets["states"] = self._slots[slot]["states"].view(-1)[: tokens * state_bytes].view(tokens, state_bytes)
        found["states"] = found["states"].view(tokens, -1).view(torch.uint8)
        if found["states"].is_cuda:
            self._stream = self._stream or torch.cuda.Stream()
            self._stream.wait_stream(torch.cuda.current_stream())
            event = torch.cuda.Event()
        with torch.cuda.stream(self._stream):  # None: the CPU's
            for name, source in found.items():
                targets[name].copy_(source.view(tokens, -1), non_blocking=True)
            if event:
                event.record()
        for batch in batches:
            batch.passes += 1
        self._copies.append(_Copy(batches, slot, tokens, list(found.values()), event))
        self._pump()

    def _pump(self, wait_for_room: bool = False) -> None:
        """Sends what is copied and takes what is written; waits until a slot is free if asked."""
        while self._copies and (self._copies[0].event is None or self._copies[0].event.query()):
            self._send(self._copies.popleft())
        while self._poll(0):
            pass
        while wait_for_room and not self._free:
            self._wait()

    def _wait(self) -> None:
        """Until the next part of a forward pass is written."""
        if not any(writer.running for writer in self._writers) and self._copies:
            copy = self._copies.popleft()
            if copy.event is not None:
                copy.event.synchronize()
            self._send(copy)
        self._poll(None)
        self._pump()

    def _poll(self, timeout: int | None) -> bool:
        """Takes the answers that are there, or waits for one (None) where one is to come; returns whether there was one."""
        if not any(writer.running for writer in self._writers):
            return False
        ready = self._answers.poll(timeout)
        for descriptor, _ in ready:
            done = self._by_descriptor[descriptor].take()
            batches, left = self._written[done.slot]
            self._written[done.slot] = batches, left - 1
            for batch in batches:
                batch.add(done)
                batch.passes -= left == 1
            if left == 1:
                self._free.append(done.slot)
        return bool(ready)

    def _send(self, copy: _Copy) -> None:
        first, wanted = copy.batches[0], [batch.message for batch in copy.batches]
        count = max(1, min(len(self._writers), copy.tokens * first.state_bytes // SHARE_BYTES))
        chosen = [(self._next_writer + number) % len(self._writers) for number in range(count)]
        self._next_writer += count
        job = Job(copy.slot, chosen, copy.tokens, first.state_bytes, first.dtype == DTYPES["fp8"], wanted)
        self._written[copy.slot] = copy.batches, count
        pickled = ForkingPickler.dumps(job)
        for number in chosen:
            self._writers[number].send(pickled)


def _pin(memory: mmap.mmap) -> bool:
    """Lets the GPU copy into the memory by itself; where that is forbidden (False), copies are only slower."""
    return int(torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)) == 0


def _address(memory: mmap.mmap) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
