"""A disk that fills up while states are written, and memory and time that do not depend on the number of rows.

The disk is a small one in memory, mounted in a namespace of its own, so that no other process sees it.
"""

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from scripts.eagle3.batches import TOGETHER
from scripts.eagle3.config import Target
from scripts.eagle3.processes import descendants
from scripts.eagle3.shards import Shard
from tests.extract_case import ENDS_WITHIN_S, TOUCH, Extraction, token_rows
from tests.production_case import wait_until

MB = 1 << 20


class SmallDisk:
    """A file system of some megabytes at `path`, for the processes that are started with `enter`."""

    def __init__(self, path: Path, megabytes: int) -> None:
        path.mkdir()
        mount = f"mount -t tmpfs -o size={megabytes}m disk {path} && echo mounted && exec cat"
        command = ["unshare", "--map-root-user", "--mount", "sh", "-c", mount]
        self.holder = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert self.holder.stdout is not None and self.holder.stderr is not None
        if self.holder.stdout.readline() != "mounted\n":
            pytest.skip(f"needs the right to mount in a namespace of its own: {self.holder.stderr.read().strip()}")
        self.inside = path
        self.enter = ["nsenter", "--target", str(self.holder.pid), "--user", "--mount", "--preserve-credentials"]
        self.seen = Path(f"/proc/{self.holder.pid}/root{path}")

    def fill(self) -> None:
        """Takes all the room that is free."""
        with contextlib.suppress(OSError), open(self.seen / "filler", "wb", buffering=0) as file:
            while file.write(bytes(MB)):
                pass

    def resize(self, megabytes: int) -> None:
        self.call("mount", "-o", f"remount,size={megabytes}m", str(self.inside))

    def call(self, *command: str) -> str:
        return subprocess.run([*self.enter, *command], check=True, stdout=subprocess.PIPE, text=True).stdout

    def end(self) -> None:
        self.holder.kill()
        self.holder.communicate()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    made = SmallDisk(tmp_path / "disk", 64)
    yield made
    made.end()


@pytest.mark.slow
def test_a_full_disk_is_named_and_extraction_goes_on_after_room_is_made(
    tiny_llama: Target, tmp_path: Path, disk: SmallDisk
) -> None:
    shards = [token_rows(number, 8) for number in range(TOGETHER)] + [token_rows(TOGETHER, 300)]
    run = Extraction(tmp_path, tiny_llama, shards, store=disk.seen / "store")
    place = {"store": disk.inside / "store"}  # as the job sees it
    job = run.start(*disk.enter, **place)
    wait_until(lambda: len(run.stored("shards/*.pt")) == TOGETHER or job.poll() is not None, "the first shards", ENDS_WITHIN_S)
    assert job.poll() is None, run.printed()
    disk.fill()
    assert job.wait(ENDS_WITHIN_S) == 1
    last = run.printed().splitlines()[-1]
    assert "error: " in last and f"{disk.inside}/store/extract_hidden_states/" in last
    assert "cannot write: No space left on device; make room" in last
    assert run.printed().count("Traceback") == 0
    run.wait_until_empty()
    finished = {path: path.read_bytes() for path in run.stored("shards/*.pt")}
    assert all(row.key for path in finished for row in Shard(path))
    written, started, total = run.written(), len(run.started()), sum(map(len, shards))
    assert total - 300 <= written < total

    disk.resize(128)
    run.finish(*disk.enter, **place)
    assert f"{written}/{total} rows were finished by an earlier run" in run.printed()
    assert len(run.started()) - started <= total - written + 1  # of a batch that was half written
    assert all(path.read_bytes() == before for path, before in finished.items())
    rows = [row["row_key"] for row in shards[-1]]
    (last_shard,) = (path for path in run.stored("shards/*.pt") if path not in finished)
    assert [row.key for row in Shard(last_shard)] == rows


def own_memory(pid: int) -> int:
    """Bytes that belong to a process alone or that it shares in memory: all but what is mapped from files."""
    try:
        fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    except OSError:
        return 0
    return sum(int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("RssAnon", "RssShmem"))


def measured(run: Extraction) -> tuple[int, float]:
    """The peak of the memory of the job and its writers, and the seconds from the first row that is written to the end."""
    job, peak, first = run.start(**{"batch-tokens": 2048, "max-num-seqs": 64}), 0, None
    while job.poll() is None:
        peak = max(peak, sum(map(own_memory, [job.pid, *descendants(job.pid)])))
        first = first or (time.monotonic() if run.started() else None)
        time.sleep(0.05)
    assert job.returncode == 0 and first is not None, run.printed()
    return peak, time.monotonic() - first


# On the CPU the engine itself takes more memory with each new number of tokens that it computes: the mixed lengths are those of
# which batches of 2,048 tokens can be made without a gap.
@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[200], [32, 64, 128, 256, 512]], ids=["equal", "mixed"])
def test_ten_times_the_rows_take_no_more_memory_and_ten_times_the_time(
    tiny_llama: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    monkeypatch.setenv(TOUCH, "1")
    runs = {}
    for times in (1, 10):
        (tmp_path / str(times)).mkdir()
        rows = token_rows(times, 100 * times, lengths)
        runs[times] = Extraction(tmp_path / str(times), tiny_llama, [rows])
    (small, seconds), (large, more_seconds) = (measured(runs[times]) for times in (1, 10))
    shards = {times: run.folder / "hidden/part-0/shard-0.pt" for times, run in runs.items()}
    more_bytes = shards[10].stat().st_size - shards[1].stat().st_size
    peaks = f"peaks of {small / MB:.0f} and {large / MB:.0f} MB"
    print(f"{peaks}, {more_bytes / MB:.0f} MB more states, {seconds:.1f} and {more_seconds:.1f} s")
    assert large - small < 32 * MB < more_bytes / 4
    assert more_seconds < 15 * seconds

    opened = []
    for _ in range(3):
        began = time.monotonic()
        torch.load(shards[10], mmap=True, weights_only=True)
        opened.append(time.monotonic() - began)
    print(f"opened in {min(opened) * 1000:.1f} ms")
    assert min(opened) < 0.1
