"""`snakemake --profile b300-cluster` on a real Slurm: whole runs, failing jobs, interrupts, and the cluster itself.

The GPUs are pretended, the stages are real and run on CPU. Two runs: `tiny` is the whole workflow; `given` has answers
of its own and many rows, so that only its extraction loads an engine.
"""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Target
from scripts.eagle3.shards import Shard
from tests.slurm.slurm import GPUS, NODES, Slurm, SlurmError, SlurmJob, wait_for
from tests.workflow.conftest import ROOT, Checkout
from tests.workflow.test_plan import jobs as planned_jobs
from tests.workflow.test_tiny_run import tiny_config

PROFILE = ("--profile", "b300-cluster", "--configfile")
# of no effect but that ended jobs are noticed at once
POLLING = ("--slurm-init-seconds-before-status-checks", "2", "--seconds-between-status-checks", "1")
GPU_RULES = {
    *("regenerate_responses", "extract_hidden_states", "train_draft"),
    *("select_checkpoint", "evaluate_method", "simulate_acceptance"),
}
EXTRACTION = "extract_hidden_states"
STATES = "results/given/hidden/part-0/shard-0.pt"
ROWS, SHARDS = 240, 8
# Snakemake asks Slurm more and more rarely, in the end every three minutes: so late it may notice that a job has ended
START_S, END_S, RUN_S = 180, 120, 900

pytestmark = pytest.mark.slurm


# -------------------------------------------------------------------------------------------------- helpers and fixtures


def given_config(target: Target) -> dict[str, Any]:
    """Many rows in many batches (one per shard), answered already."""
    return {
        **tiny_config(target),
        "run": "given",
        "responses": "given",
        "conversations": {
            "train": [{"path": "answered.jsonl"}],
            "evaluation": {"everyday": {"path": "config/data/eval/everyday.jsonl", "limit": 4}},
            "validation_fraction": 0.1,
        },
        "scatter": {"parts": 1, "shards_per_part": SHARDS},
    }


def write_conversations(path: Path) -> None:
    words = ["river", "stone", "cloud", "paper", "engine", "garden", "winter", "bridge", "candle", "harbour"]
    with path.open("w") as file:
        for number in range(ROWS):
            answer = " ".join(words[(number * 7 + place * place) % len(words)] for place in range(40 + number % 30))
            question = f"What has number {number} to do with a {words[number % len(words)]}?"
            messages = [{"role": "user", "content": question}, {"role": "assistant", "content": f"{number}: {answer}"}]
            file.write(json.dumps({"messages": messages}) + "\n")


class ClusterRun:
    """A checkout whose runs go to the cluster."""

    def __init__(self, checkout: Checkout, slurm: Slurm) -> None:
        self.checkout, self.slurm, self.root = checkout, slurm, checkout.root

    def snakemake(self, config: str, *arguments: str, succeeds: bool = True) -> str:
        return self.checkout.snakemake(*PROFILE, config, *POLLING, *arguments, succeeds=succeeds, timeout_s=1500)

    @contextmanager
    def started(self, config: str, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """A run that goes on while the test looks at it; what it prints lands in screen.txt."""
        with (self.root / "screen.txt").open("wb") as screen:
            process = subprocess.Popen(
                self.checkout.command(*PROFILE, config, *POLLING, *arguments),
                cwd=self.root,
                env=self.checkout.environment(),
                stdin=subprocess.DEVNULL,
                stdout=screen,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # a child of a background shell ignores Ctrl-C, and passes that on
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
                for job in self.slurm.jobs():
                    if job.state in ("PENDING", "RUNNING"):
                        self.slurm.cancel(job)

    def screen(self) -> str:
        return (self.root / "screen.txt").read_text()[-6000:]

    def wait_for_stage(self, stage: str) -> int:
        """The process id of a stage that has begun to run as a Slurm job."""
        wait_for(lambda: self.stage(stage) is not None, START_S, self.screen)
        pid = self.stage(stage)
        assert pid is not None
        return pid

    def stage(self, stage: str) -> int | None:
        for pid in self.processes():
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            except OSError:
                continue
            if arguments[1:3] == ["-m", f"scripts.{stage}"]:
                return pid
        return None

    def processes(self) -> list[int]:
        """All processes that work in this checkout, other than zombies."""
        found = []
        for entry in Path("/proc").iterdir():
            try:
                if (
                    entry.name.isdigit()
                    and (entry / "cwd").resolve(strict=True) == self.root
                    and (entry / "cmdline").read_text()
                ):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def extraction_jobs(self, after: int) -> list[SlurmJob]:
        return [job for job in self.slurm.jobs(after) if job.rule == EXTRACTION]

    def stored(self, pattern: str) -> list[Path]:
        return sorted((self.root / "results/given/store" / EXTRACTION).glob(f"*/part-0/{pattern}"))

    def stored_rows(self) -> int:
        shards = map(Shard, [*self.stored("growing/*.pt"), *self.stored("shards/*.pt")])
        return sum(shard.written(index) for shard in shards for index in range(len(shard)))

    def forget_extraction(self) -> None:
        """As if the extraction had never run."""
        for folder in ("hidden", f"store/{EXTRACTION}"):
            subprocess.run(["rm", "-rf", str(self.root / "results/given" / folder)], check=True)


@pytest.fixture(scope="module")
def cluster(slurm: Slurm, tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> ClusterRun:
    run = ClusterRun(Checkout(tmp_path_factory.mktemp("cluster").resolve()), slurm)
    (run.root / "tiny.yaml").write_text(yaml.safe_dump(tiny_config(tiny_llama)))
    (run.root / "given.yaml").write_text(yaml.safe_dump(given_config(tiny_llama)))
    write_conversations(run.root / "answered.jsonl")
    return run


@pytest.fixture
def given(cluster: ClusterRun) -> ClusterRun:
    """The run `given` up to its tokens, nothing extracted."""
    cluster.snakemake("given.yaml", "results/given/tokens/part-0/shard-0.parquet")
    cluster.forget_extraction()
    return cluster


# ------------------------------------------------------------------------------------------------------ the cluster itself


def test_a_configuration_of_somebody_else_is_not_touched(tmp_path):
    etc = tmp_path / "etc"
    etc.mkdir()
    (etc / "slurm.conf").write_text("ClusterName=theirs\n")
    with pytest.raises(SlurmError, match=r"slurm.conf: expected no Slurm configuration, found one .*nothing was changed"):
        Slurm(etc, tmp_path / "state").start()
    assert [path.name for path in tmp_path.rglob("*")] == ["etc", "slurm.conf"]
    assert (etc / "slurm.conf").read_text() == "ClusterName=theirs\n"


def test_without_root_the_tests_say_so():
    code = "import os, tests.slurm.conftest as c; os.geteuid() or os.setuid(65534); c.skip_without_root()"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert "SKIPPED: needs root" in done.stderr.splitlines()[-1]


@pytest.mark.slow
def test_a_second_session_is_refused_while_the_cluster_runs(slurm):
    with pytest.raises(SlurmError, match="another session of these tests"):
        Slurm().start()
    assert slurm.queue() == []  # it still answers


# ---------------------------------------------------------------------------------------------------------- the whole run


@pytest.mark.slow
def test_nothing_of_the_profiles_own_configuration_leaks_in(cluster):
    (cluster.root / "other.yaml").write_text((cluster.root / "tiny.yaml").read_text().replace("run: tiny", "run: other"))
    printed = cluster.snakemake("other.yaml", "-n")
    assert planned_jobs(printed)[EXTRACTION] == 3  # two parts and the validation rows
    assert "results/other/" in printed
    assert "kimi" not in printed.split("Job stats:")[1].lower()


@pytest.fixture(scope="module")
def whole_run(cluster: ClusterRun) -> list[SlurmJob]:
    """The jobs of the run `tiny`, as Slurm recorded them.

    Its tokens are asked for first: only then are all parts ready to be extracted, and start, at the same time.
    """
    before = cluster.slurm.last_job()
    parts = [f"results/tiny/tokens/{part}/shard-0.parquet" for part in ("part-0", "part-1", "val")]
    cluster.snakemake("tiny.yaml", *parts)
    cluster.snakemake("tiny.yaml", *(f"results/tiny/hidden/{part}/shard-0.pt" for part in ("part-0", "part-1")))
    cluster.snakemake("tiny.yaml")
    return cluster.slurm.jobs(before)


@pytest.mark.slow
def test_all_stages_run_as_slurm_jobs(cluster, whole_run):
    assert (cluster.root / "results/tiny/gate.passed").is_file()
    assert {job.state for job in whole_run} == {"COMPLETED"}
    counts: dict[str, int] = {}
    for job in whole_run:
        counts[job.rule] = counts.get(job.rule, 0) + 1
    (cluster.root / "other.yaml").write_text((cluster.root / "tiny.yaml").read_text().replace("run: tiny", "run: other"))
    planned = planned_jobs(cluster.snakemake("other.yaml", "-n"))
    assert counts == {rule: count for rule, count in planned.items() if rule != "all"}


@pytest.mark.slow
def test_two_parts_are_extracted_on_two_nodes_at_the_same_time(whole_run):
    first, second = (job for job in whole_run if job.rule == EXTRACTION and "part-" in job.name)
    assert {first.node, second.node} == set(NODES)
    assert first.overlaps(second)


@pytest.mark.slow
def test_gpu_jobs_see_eight_devices_and_no_node_holds_two_of_them(cluster, whole_run):
    gpu_jobs = [job for job in whole_run if job.gpus]
    assert {job.rule for job in gpu_jobs} == GPU_RULES
    for job in gpu_jobs:
        assert job.gpus == GPUS
        assert f"GPUs {','.join(map(str, range(GPUS)))}: {GPUS} of " in (cluster.root / job.output).read_text(), job
    for one, other in combinations(gpu_jobs, 2):
        assert one.node != other.node or not one.overlaps(other), (one, other)


@pytest.mark.slow
def test_the_local_profile_finds_nothing_to_do(cluster, whole_run):
    printed = cluster.checkout.snakemake("--profile", "local-rtx6000", "-n", "--configfile", "tiny.yaml")
    assert "Nothing to be done" in printed


# ------------------------------------------------------------------------------------------------------ when things go wrong


@pytest.mark.slow
def test_a_job_that_fails_once_is_resubmitted_with_more_memory(given):
    before = given.slurm.last_job()
    with given.started("given.yaml", STATES) as run:
        os.kill(given.wait_for_stage(EXTRACTION), signal.SIGKILL)  # as the kernel does when memory runs out
        assert run.wait(timeout=RUN_S) == 0, given.screen()
    first, second = given.extraction_jobs(before)
    assert (first.state, second.state) == ("FAILED", "COMPLETED")
    assert second.memory_mb == 2 * first.memory_mb > 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ending_snakemake_cancels_the_jobs_and_leaves_no_process(given, number):
    before = given.slurm.last_job()
    with given.started("given.yaml", STATES) as run:
        given.wait_for_stage(EXTRACTION)
        wait_for(lambda: given.stored("attempts.jsonl") != [], START_S, given.screen)  # at work: it loads its engine now
        run.send_signal(number)
        assert run.wait(timeout=END_S) != 0
    wait_for(lambda: not given.slurm.queue(), END_S, lambda: str(given.slurm.queue()))
    wait_for(lambda: not given.processes(), END_S, lambda: str(given.processes()))
    assert [job.state for job in given.extraction_jobs(before)] == ["CANCELLED"]


@pytest.mark.slow
def test_a_cancelled_extraction_is_continued_and_nothing_is_computed_again(given):
    before = given.slurm.last_job()
    with given.started("given.yaml", STATES, "--retries", "0") as run:
        pid = given.wait_for_stage(EXTRACTION)
        wait_for(lambda: given.stored_rows() > 0, START_S, given.screen, interval_s=0.01)
        os.kill(pid, signal.SIGSTOP)  # or it might end before scancel reaches it, which wakes it up
        given.slurm.cancel(given.extraction_jobs(before)[0])
        assert run.wait(timeout=RUN_S) != 0
    wait_for(lambda: not given.processes(), END_S, lambda: str(given.processes()))
    assert not (given.root / STATES).exists()
    finished = given.stored_rows()

    given.snakemake("given.yaml", STATES)
    log = (given.root / f"results/given/logs/{EXTRACTION}/part-0.log").read_text()
    manifest = json.loads((given.root / "results/given/hidden/part-0/manifest.json").read_text())
    total = sum(shard["rows"] for shard in manifest["shards"])
    assert 0 < finished < total
    assert f"{finished}/{total} rows were finished by an earlier run" in log
    assert [job.state for job in given.extraction_jobs(before)] == ["CANCELLED", "COMPLETED"]
    attempts = [json.loads(line) for line in given.stored("attempts.jsonl")[0].read_text().splitlines()]
    assert len({attempt["pid"] for attempt in attempts}) == 2 and attempts[-1]["outcome"] == "finished"


@pytest.mark.slow
def test_an_impossible_request_is_told_in_slurms_own_words(given):
    before = given.slurm.last_job()
    printed = given.snakemake("given.yaml", STATES, "--set-resources", f"{EXTRACTION}:gpu=16", succeeds=False)
    assert "Batch job submission failed: Requested node configuration is not available" in printed
    assert {(job.state, job.node) for job in given.extraction_jobs(before)} == {("FAILED", "")}  # none ever ran
