"""Training over two nodes of a real Slurm: `TRAINING_NODES=2 snakemake --profile b300-cluster`, undisturbed and cancelled."""

import json
import os
import signal

import pytest
import yaml

from scripts.eagle3.config import Target
from scripts.eagle3.processes import arguments
from tests.slurm.slurm import GPUS, NODES, Slurm, wait_for
from tests.slurm.test_slurm import END_S, RUN_S, START_S, ClusterRun
from tests.workflow.conftest import Checkout
from tests.workflow.test_tiny_run import tiny_config

SEGMENT = "results/tiny/checkpoints/0.json"

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


class TrainingRun(ClusterRun):
    """A run whose training spans two nodes."""

    def launchers(self) -> list[int]:
        """The launchers that run: one for each node."""
        return [pid for pid in self.processes() if arguments(pid)[1:3] == ["-m", "scripts.per_gpu"]]

    def ranks(self) -> list[int]:
        """The processes that train."""
        return [pid for pid in self.processes() if arguments(pid)[1:3] == ["-m", "scripts.train_draft"]]

    def states(self) -> list[str]:
        """The states inside the segment that are whole."""
        return [path.name for path in (self.root / "results/tiny/checkpoints").glob(".segment-0/step-*")]

    def forget_training(self) -> None:
        """As if nothing had been trained."""
        for path in sorted((self.root / "results/tiny/checkpoints").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()


@pytest.fixture(scope="module")
def run(slurm: Slurm, tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> TrainingRun:
    """Everything that a segment is trained from; the steps are many, and each leaves a state."""
    config = tiny_config(tiny_llama)
    config["training"] |= {"batch_tokens": 128, "gradient_accumulation": 2, "checkpoint_minutes": 0}
    cluster = TrainingRun(Checkout(tmp_path_factory.mktemp("cluster").resolve()), slurm)
    (cluster.root / "tiny.yaml").write_text(yaml.safe_dump(config))
    cluster.snakemake(
        "tiny.yaml", SEGMENT, "--until", "extract_hidden_states", "draft_config", "build_vocab_mapping", "extract_target_head"
    )
    return cluster


@pytest.fixture
def two_nodes(run: TrainingRun, monkeypatch: pytest.MonkeyPatch) -> TrainingRun:
    monkeypatch.setenv("TRAINING_NODES", "2")
    run.forget_training()
    return run


def test_one_job_trains_on_two_nodes(two_nodes):
    before = two_nodes.slurm.last_job()
    two_nodes.snakemake("tiny.yaml", SEGMENT)
    (job,) = two_nodes.slurm.jobs(before)
    assert (job.rule, job.state, job.node, job.gpus) == ("train_draft", "COMPLETED", "b300-node[01-02]", GPUS)
    printed = (two_nodes.root / job.output).read_text()
    assert printed.count(f"GPUs {','.join(map(str, range(GPUS)))}: {GPUS} of ") == len(NODES)
    assert json.loads((two_nodes.root / SEGMENT).read_text())["engine"]["processes"] == len(NODES)


def test_cancelled_both_nodes_save_leave_no_process_and_the_next_run_goes_on(two_nodes):
    before = two_nodes.slurm.last_job()
    with two_nodes.started("tiny.yaml", SEGMENT, "--retries", "0") as snakemake:
        wait_for(lambda: two_nodes.states() != [], START_S, two_nodes.screen, interval_s=0.01)
        two_nodes.slurm.cancel(two_nodes.slurm.jobs(before)[0])
        assert snakemake.wait(timeout=RUN_S) != 0
    wait_for(lambda: not two_nodes.processes(), END_S, lambda: str(two_nodes.processes()))
    (job,) = two_nodes.slurm.jobs(before)
    assert job.state == "CANCELLED"
    assert "stopped at step" in (two_nodes.root / job.output).read_text()
    (state,) = two_nodes.states()
    two_nodes.snakemake("tiny.yaml", SEGMENT)
    assert f"step-{json.loads((two_nodes.root / SEGMENT).read_text())['continued_from']}" == state


@pytest.mark.parametrize("victim", ["ranks", "launchers"])
def test_one_process_killed_fails_the_job_on_both_nodes_and_the_retry_goes_on(two_nodes, victim):
    before = two_nodes.slurm.last_job()
    with two_nodes.started("tiny.yaml", SEGMENT) as snakemake:
        wait_for(lambda: two_nodes.states() != [], START_S, two_nodes.screen, interval_s=0.01)
        first = set(two_nodes.launchers()) | set(two_nodes.ranks())
        os.kill(getattr(two_nodes, victim)()[0], signal.SIGKILL)
        wait_for(lambda: not first & set(two_nodes.processes()), 60, lambda: str(first))
        assert snakemake.wait(timeout=RUN_S) == 0, two_nodes.screen()
    assert [job.state for job in two_nodes.slurm.jobs(before)] == ["FAILED", "COMPLETED"]
    assert json.loads((two_nodes.root / SEGMENT).read_text())["continued_from"] > 0
