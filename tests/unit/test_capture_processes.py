"""The processes that write states: one that is killed ends the capture in one line, and none outlives who started it."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.eagle3.batches import make_row
from scripts.eagle3.capture_writer import MAX_SLOTS, CaptureWriter
from scripts.eagle3.part import shard_tokens
from scripts.eagle3.processes import arguments, descendants, start_time
from scripts.eagle3.shards import Shard, create_shard
from tests.production_case import wait_until

ROWS = [[8, 9, number] for number in range(10)]


def writers(pid: int) -> list[int]:
    return [child for child in descendants(pid) if any("capture_process import" in word for word in arguments(child))]


def start(folder: Path) -> CaptureWriter:
    """A capture of rows of one layer of 4 numbers, that has written the first of them."""
    create_shard(folder / "shard-0.pt", [shard_tokens(make_row(ids)) for ids in ROWS], [2], 4, torch.float32, {})
    writer = CaptureWriter(16, 1, 16)
    compute(writer, folder, 0)
    assert writer.results(wait=True)[0]["rejected"] == []
    return writer


def compute(writer: CaptureWriter, folder: Path, row: int) -> None:
    writer.expect({folder / "shard-0.pt": [row]}, [2])
    writer.take(torch.tensor(ROWS[row]), torch.arange(3), [torch.zeros(3, 4)])


@pytest.mark.parametrize("killed", ["idle", "with work", "behind"])
def test_a_killed_writing_process_is_one_line_wherever_the_engine_is(tmp_path: Path, killed: str) -> None:
    writer = start(tmp_path)
    (pid, *_) = writers(os.getpid())
    os.kill(pid, signal.SIGSTOP if killed == "with work" else signal.SIGKILL)
    if killed == "idle":
        wait_until(lambda: start_time(pid) is None, "its end")  # a zombie counts as ended
        compute(writer, tmp_path, 1)
    elif killed == "with work":
        compute(writer, tmp_path, 1)
        os.kill(pid, signal.SIGKILL)
    else:  # the engine would wait for room in the ring
        for row in range(1, MAX_SLOTS + 2):
            compute(writer, tmp_path, row)
    line = "a process that writes states ended with exit code -9; if it was killed for memory, lower batch_tokens"
    assert line in writer.results(wait=True)[0]["error"]
    compute(writer, tmp_path, 9)  # an engine that computes on in another process is not held up
    assert line in writer.results(wait=False)[0]["error"]
    writer.close()
    assert writers(os.getpid()) == []
    assert Shard(tmp_path / "shard-0.pt").written(0)


JOB = """
import os, signal, sys
from pathlib import Path
from scripts.eagle3.capture_writer import CaptureWriter
from tests.unit.test_capture_processes import start
writer = start(Path(sys.argv[1]))
os.fork() or signal.pause()  # a child that holds all descriptors, as compilers and data loaders do
print("ready", flush=True)
signal.pause()
"""


def test_writing_processes_are_killed_with_the_process_that_started_them(tmp_path: Path) -> None:
    job = subprocess.Popen([sys.executable, "-c", JOB, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert job.stdout is not None and job.stdout.readline() == "ready\n"
    started = writers(job.pid)
    children = set(descendants(job.pid)) - set(started)
    for pid in started:
        os.kill(pid, signal.SIGTERM)  # a terminal's or a scheduler's signal to all: they write on
    job.kill()
    job.wait()
    try:
        wait_until(lambda: all(start_time(pid) is None for pid in started), "the end of the writing processes", 5)
        assert started and len(children) == 1
    finally:
        for pid in children:
            os.kill(pid, signal.SIGKILL)
