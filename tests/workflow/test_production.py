"""Whole runs beside a production server: it makes room once and comes back, whatever ends the run; no process is left.

The server is vLLM on the CPU with a tiny target; GPU jobs are the engine's jobs, with no GPU granted. Each case makes the
validation answers once more, one answer at a time, so that a signal meets a job that has done a part of its work.
"""

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Target
from scripts.eagle3.processes import arguments, parent, stages
from tests.production_case import ServerCase, health_server, processes_in, wait_until
from tests.workflow.conftest import ROOT
from tests.workflow.test_tiny_run import tiny_config

ANSWERS = "results/tiny/responses/val/shard-0.parquet"
STARTS_WITHIN_S = 240
ENDS_WITHIN_S = 240


@pytest.fixture(scope="module")
def server(tmp_path_factory, tiny_llama) -> Iterator[ServerCase]:
    def vllm(port: int) -> list[str]:
        options = ["--port", str(port), "--max-model-len", "256", "--max-num-seqs", "2", "--enforce-eager"]
        python = ["env", "EAGLE3_ENV=cpu", "VLLM_CPU_KVCACHE_SPACE=1", f"{ROOT}/bin/in-env", "python"]
        serve = ["-m", "vllm.entrypoints.openai.api_server", "--model", tiny_llama.path, "--host", "127.0.0.1"]
        return [*python, *serve, "--dtype", "float32", *options]

    case = ServerCase(tmp_path_factory.mktemp("server"), vllm, STARTS_WITHIN_S)
    yield case
    case.end()


@pytest.fixture(scope="module")
def light_server(tmp_path_factory) -> Iterator[ServerCase]:
    """One without a model, for what does not depend on how long a server takes to stop and to start."""
    case = ServerCase(tmp_path_factory.mktemp("light-server"), health_server, STARTS_WITHIN_S)
    yield case
    case.end()


def configuration(target: Target, **changes: Any) -> dict[str, Any]:
    config = tiny_config(target)
    return {**config, "responses": {"max_tokens": 200}, "grace_s": 30, **changes}


class RunCase:
    """A checkout and what runs in it."""

    def __init__(self, checkout, target: Target) -> None:
        self.checkout = checkout
        self.root: Path = checkout.root
        self.target = target
        shutil.copy2(ROOT / "Makefile", self.root)

    def command(self, config: dict[str, Any], *options: str) -> list[str]:
        (self.root / "case.yaml").write_text(yaml.safe_dump(config))
        one_at_a_time = ["--set-resources", "regenerate_responses:max_num_seqs=1"]
        chosen = ["--cores", "all", "--rerun-incomplete", *one_at_a_time, "--configfile", "case.yaml", *options]
        return self.checkout.command(ANSWERS, *chosen)

    def start(self, config: dict[str, Any], *options: str, **environment: str) -> subprocess.Popen:
        """Starts Snakemake as a terminal would: in a process group of its own."""
        (self.root / "printed").unlink(missing_ok=True)
        with open(self.root / "printed", "wb") as printed:
            return subprocess.Popen(
                self.command(config, *options),
                cwd=self.root,
                env={**self.checkout.environment(), **environment},
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    def printed(self) -> str:
        return (self.root / "printed").read_text()

    def end_of(self, snakemake: subprocess.Popen, succeeds: bool) -> str:
        snakemake.wait(ENDS_WITHIN_S)
        assert (snakemake.returncode == 0) is succeeds, self.printed()
        return self.printed()

    def stored(self) -> int:
        return sum(path.read_bytes().count(b"\n") for path in self.root.glob("results/tiny/store/**/answers.jsonl"))

    def outcomes(self) -> list[str]:
        attempts = list(self.root.glob("results/tiny/store/**/attempts.jsonl"))
        lines = [json.loads(line) for path in attempts for line in path.read_text().splitlines()]
        return [line["outcome"] for line in lines if "outcome" in line]

    def wait_for_answers(self, snakemake: subprocess.Popen) -> None:
        wait_until(lambda: self.stored() or snakemake.poll() is not None, "the first answer", STARTS_WITHIN_S)
        assert snakemake.poll() is None, self.printed()

    def stage(self, snakemake: subprocess.Popen) -> int:
        """The process that runs the engine: below its supervisor."""
        (supervisor,) = stages(snakemake.pid)
        (engine,) = stages(supervisor)
        return engine

    def wait_until_empty(self) -> None:
        left = lambda: {pid: arguments(pid)[:4] for pid in processes_in(self.root)}  # noqa: E731
        wait_until(lambda: not left(), f"the end of {left()}", 20)

    def restore(self, succeeds: bool = True) -> str:
        done = subprocess.run(
            ["make", "restore-production"], cwd=self.root, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        assert (done.returncode == 0) is succeeds, done.stdout
        return done.stdout


@pytest.fixture(scope="module")
def module_case(checkout, tiny_llama) -> RunCase:
    return RunCase(checkout, tiny_llama)


@pytest.fixture
def case(module_case) -> Iterator[RunCase]:
    """Conversations of earlier cases are kept, answers are not."""
    for name in ("responses", "store"):
        shutil.rmtree(module_case.root / "results/tiny" / name, ignore_errors=True)
    yield module_case
    for pid in processes_in(module_case.root):  # only after a failing case
        os.kill(pid, signal.SIGKILL)
    shutil.rmtree(module_case.root / ".snakemake/locks", ignore_errors=True)
    (module_case.root / ".run-state.json").unlink(missing_ok=True)


@pytest.fixture
def config(server, case) -> dict[str, Any]:
    """The tiny configuration beside the server, which is up and has not been called yet."""
    server.up()
    return configuration(case.target, production=server.section)


@pytest.fixture
def light_config(light_server, case) -> dict[str, Any]:
    light_server.up()
    return configuration(case.target, production=light_server.section)


def test_fewer_gpus_than_the_target_needs_are_refused_before_any_job(case):
    config = configuration(case.target)
    config["target"]["min_gpus"] = 8
    for options, found in (([], "there is no GPU budget"), (["--resources", "gpu=4"], "the GPU budget is 4")):
        printed = case.end_of(case.start(config, *options), succeeds=False)
        assert f"target.min_gpus is 8, {found}; use --profile local-rtx6000" in printed
        assert "Traceback" not in printed
    assert not (case.root / ANSWERS).exists()


def test_under_slurm_a_server_without_a_host_is_refused(case):
    section = {"stop": "true", "start": "true", "health": "http://127.0.0.1:9/health"}
    config = configuration(case.target, production=section)
    printed = case.end_of(case.start(config, "--executor", "slurm", "--jobs", "2"), succeeds=False)
    assert "production.host is needed under Slurm" in printed and "Traceback" not in printed


def test_a_dry_run_and_a_run_of_cpu_jobs_leave_the_server_alone(case):
    section = {
        "stop": f"touch {case.root}/stopped",
        "start": f"touch {case.root}/started",
        "health": "http://127.0.0.1:9/health",
    }
    config = configuration(case.target, production=section)
    case.end_of(case.start(config, "-n"), succeeds=True)
    command = ["results/tiny/conversations/ledger.json" if part == ANSWERS else part for part in case.command(config)]
    done = subprocess.run(command, cwd=case.root, env=case.checkout.environment(), text=True, stderr=subprocess.PIPE)
    assert done.returncode == 0, done.stderr
    assert "production" not in done.stderr
    assert not {"stopped", "started", ".run-state.json"} & {path.name for path in case.root.iterdir()}


@pytest.mark.slow
def test_it_comes_back_after_success(case, config, server):
    snakemake = case.start(config)
    case.wait_for_answers(snakemake)
    assert not server.healthy() and server.calls() == ["stop"]
    assert "is alive" in case.restore(succeeds=False)
    case.end_of(snakemake, succeeds=True)
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert not (case.root / ".run-state.json").exists()
    case.end_of(case.start(config), succeeds=True)  # nothing to be done
    assert server.calls() == ["stop", "start"]
    assert "nothing to restore" in case.restore()


@pytest.mark.slow
def test_it_comes_back_after_a_failing_job(case, config, server):
    config["rows"] = {"max_length": 16}  # no prompt is as short: the job rejects all conversations
    printed = case.end_of(case.start(config), succeeds=False)
    assert "regenerate_responses: error: " in printed and "3 of 3 conversations were rejected" in printed
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert not (case.root / ".run-state.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "to_group", "exit_code"),
    [(signal.SIGINT, True, (130, 143)), (signal.SIGTERM, True, (143,)), (signal.SIGTERM, False, (143,))],
    ids=["ctrl-c", "sigterm-to-group", "sigterm-to-snakemake"],
)
def test_asked_to_end_jobs_save_and_it_comes_back(case, config, server, number, to_group, exit_code):
    snakemake = case.start(config)
    case.wait_for_answers(snakemake)
    if to_group:
        os.killpg(snakemake.pid, number)
    else:
        snakemake.send_signal(number)
    wait_until(case.outcomes, "the end of the job", 30)  # config.grace_s
    case.end_of(snakemake, succeeds=False)
    assert case.outcomes()[0] in [f"SystemExit: {code}" for code in exit_code]
    assert case.stored() and not (case.root / ANSWERS).exists()
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert not (case.root / ".run-state.json").exists()
    case.wait_until_empty()


@pytest.mark.slow
def test_an_impatient_second_ctrl_c_does_not_keep_it_down(case, light_config, light_server):
    snakemake = case.start(light_config)
    case.wait_for_answers(snakemake)
    engine = case.stage(snakemake)
    os.kill(engine, signal.SIGSTOP)  # a job that takes its time to save
    snakemake.send_signal(signal.SIGINT)
    wait_until(lambda: "Terminating processes" in case.printed(), "Snakemake's answer")
    snakemake.send_signal(signal.SIGINT)  # Snakemake leaves its scheduler, and calls no hook
    os.kill(engine, signal.SIGCONT)
    case.end_of(snakemake, succeeds=False)
    assert light_server.healthy() and light_server.calls() == ["stop", "start"]
    assert not (case.root / ".run-state.json").exists()
    case.wait_until_empty()


@pytest.mark.slow
def test_a_job_that_does_not_end_in_time_is_killed(case, light_config, light_server):
    light_config["grace_s"] = 2
    snakemake = case.start(light_config)
    case.wait_for_answers(snakemake)
    os.kill(case.stage(snakemake), signal.SIGSTOP)
    snakemake.send_signal(signal.SIGTERM)
    case.end_of(snakemake, succeeds=False)
    assert light_server.healthy() and light_server.calls() == ["stop", "start"]
    assert case.outcomes() == []
    case.wait_until_empty()


@pytest.mark.slow
def test_after_sigkill_the_next_run_names_the_command_that_brings_it_back(case, config, server):
    snakemake = case.start(config)
    case.wait_for_answers(snakemake)
    snakemake.kill()
    snakemake.wait()
    case.wait_until_empty()
    assert not server.healthy() and server.calls() == ["stop"]
    locked = case.end_of(case.start(config), succeeds=False)
    assert "cannot be locked" in locked and locked.count("make restore-production") == 1
    restored = case.restore()
    assert "the production server is back, Snakemake's lock is cleared" in restored
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert "nothing to restore" in case.restore()
    assert server.calls() == ["stop", "start"]
    assert "cannot be locked" not in case.end_of(case.start(config, "-n"), succeeds=True)


@pytest.mark.slow
def test_unlocked_by_hand_the_next_run_brings_it_back(case, light_config, light_server):
    snakemake = case.start(light_config)
    case.wait_for_answers(snakemake)
    snakemake.kill()
    snakemake.wait()
    case.wait_until_empty()
    case.end_of(case.start(light_config, "--unlock"), succeeds=True)
    case.end_of(case.start(light_config), succeeds=True)
    assert light_server.healthy() and light_server.calls() == ["stop", "start"]
    assert not (case.root / ".run-state.json").exists()


@pytest.mark.slow
def test_a_stop_that_fails_ends_the_job_before_the_engine_is_loaded(case, config, server):
    config["production"] = {**config["production"], "stop": "echo no such unit; exit 5"}
    printed = case.end_of(case.start(config), succeeds=False)
    assert "on_gpus: error: production.stop failed with exit code 5: no such unit" in printed
    assert case.outcomes() == []
    assert server.healthy() and server.calls() == ["start"]


@pytest.mark.slow
def test_a_start_that_fails_is_loud_and_can_be_made_up_for(case, light_config, light_server):
    broken = {**light_config["production"], "start": "echo no GPU left; exit 6"}
    printed = case.end_of(case.start({**light_config, "production": broken}), succeeds=False)
    assert "The production server is NOT back: production.start failed with exit code 6: no GPU left" in printed
    assert "make restore-production" in printed
    assert (case.root / ANSWERS).exists()
    state = json.loads((case.root / ".run-state.json").read_text())
    (case.root / ".run-state.json").write_text(json.dumps({**state, "production": {**light_server.section, "host": None}}))
    assert "the production server is back" in case.restore()
    assert light_server.healthy() and light_server.calls() == ["stop", "start"]


def supervisor(pid: int) -> int:
    return parent(pid)


def shell(pid: int) -> int:
    return parent(parent(pid))


def itself(pid: int) -> int:
    return pid


@pytest.mark.slow
@pytest.mark.parametrize("killed", [itself, supervisor, shell, "snakemake"], ids=["job", "supervisor", "shell", "snakemake"])
def test_sigkill_leaves_no_engine_process(case, killed):
    # an engine with processes of its own, as on GPUs; they live in other sessions
    snakemake = case.start(configuration(case.target), VLLM_ENABLE_V1_MULTIPROCESSING="1")
    case.wait_for_answers(snakemake)
    engine = case.stage(snakemake)
    assert len(stages(snakemake.pid)) == 1 and processes_in(case.root)
    os.kill(snakemake.pid if killed == "snakemake" else killed(engine), signal.SIGKILL)
    case.end_of(snakemake, succeeds=False)
    case.wait_until_empty()
    assert case.stored() and not (case.root / ANSWERS).exists()  # ended, not finished
