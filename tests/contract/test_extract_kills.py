"""SIGKILL at any moment of an extraction on tiny-llama: the same bytes in the end, nothing lost but what was in flight.

Killed are the job, one of the processes that write for it, or all of them at once; test_extract_workflow kills Snakemake.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.eagle3.capture_writer import MAX_SLOTS
from scripts.eagle3.config import Target
from scripts.eagle3.shards import Shard
from tests.extract_case import ENDS_WITHIN_S, ROWS_PER_BATCH, Extraction, token_rows

SHARDS = [token_rows(1, 100), token_rows(2, 100)]
# rows that a kill may cost: a batch that is computed, one for each place of the ring, one that is half written
IN_FLIGHT = ROWS_PER_BATCH * (MAX_SLOTS + 2)


@pytest.fixture(scope="module")
def undisturbed(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    run = Extraction(tmp_path_factory.mktemp("undisturbed"), tiny_llama, SHARDS)
    run.finish()
    (plan,) = run.stored("plan.json")
    assert len(json.loads(plan.read_text())["batches"]) >= 40
    assert len(run.started()) == len(set(run.started())) == run.rows  # no row was computed twice
    return run


class Kills:
    """One extraction that is killed again and again."""

    def __init__(self, run: Extraction) -> None:
        self.run, self.in_the_middle = run, 0

    def kill(self, victim: str, reached: Callable[[], bool]) -> None:
        """Starts the job and kills with SIGKILL as soon as `reached`; checks what is left."""
        run, before = self.run, len(self.run.started())
        job = run.start()
        deadline = time.monotonic() + ENDS_WITHIN_S
        while not reached():
            assert job.poll() is None and time.monotonic() < deadline, run.printed()
            time.sleep(0.002)
        if victim == "writer":
            os.kill(run.writers(job.pid)[0], signal.SIGKILL)
            assert job.wait(30) == 1, run.printed()
            assert "error: a process that writes states ended with exit code -9" in run.printed().splitlines()[-1]
        elif victim == "job":
            os.kill(job.pid, signal.SIGKILL)
            job.wait()
        else:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()
        run.wait_until_empty()  # no orphan
        written, started = run.written(), run.started()[before:]
        self.in_the_middle += bool(started) and 0 < written < run.rows
        for path in run.stored("shards/*.pt"):
            assert all(row.key for row in Shard(path))  # each row is whole
        assert not (run.folder / "hidden").exists()

    def after(self, rows: int) -> Callable[[], bool]:
        """Reached once the store has this many rows more than now."""
        goal = self.run.written() + rows
        return lambda: self.run.written() >= goal

    def check(self, undisturbed: Extraction, kills: int) -> None:
        """Finishes undisturbed, and compares."""
        self.run.finish()
        assert self.run.files() == undisturbed.files()
        started = self.run.started()
        assert set(started) == set(undisturbed.started())
        assert len(started) - len(set(started)) <= kills * IN_FLIGHT
        assert not list(self.run.folder.rglob(".unfinished-*")) and self.run.stored("growing/*") == []


@pytest.mark.slow
def test_sigkill_of_a_writer_of_the_job_and_of_all_loses_nothing_written(undisturbed: Extraction, tmp_path: Path) -> None:
    kills = Kills(Extraction(tmp_path, undisturbed.target, SHARDS))
    kills.kill("all", lambda: bool(kills.run.stored("plan.json")))  # before an engine is there
    for victim in ("writer", "job", "all"):
        kills.kill(victim, kills.after(30))
    assert kills.in_the_middle == 3
    kills.check(undisturbed, 3)


@pytest.mark.slow
def test_twenty_sigkills_over_one_extraction_lose_nothing_written(undisturbed: Extraction, tmp_path: Path) -> None:
    kills = Kills(Extraction(tmp_path, undisturbed.target, SHARDS))
    run = kills.run
    kills.kill("job", lambda: bool(run.stored("lock")))
    kills.kill("all", lambda: bool(run.stored("plan.json")))
    kills.kill("job", lambda: bool(run.stored("proof/proof.pt")))
    kills.kill("all", lambda: bool(run.stored("proof.jsonl")) and run.stored("proof.jsonl")[0].stat().st_size > 0)
    for number in range(15):
        kills.kill(("writer", "job", "all")[number % 3], kills.after(6))
    kills.kill("job", lambda: len(run.stored("shards/*.pt")) == 2)  # the last shard is finished, nothing is delivered
    assert kills.in_the_middle >= 12
    kills.check(undisturbed, 16)
