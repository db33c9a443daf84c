"""How a stage ends: by itself, when it is asked to, and when what started it is gone; with real processes and signals."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.eagle3.processes import start_time
from tests.production_case import wait_until

ROOT = Path(__file__).parents[2]

# Works until it is asked to end, then saves in two steps and prints between them. It has a worker in another session.
STAGE = """
import subprocess, sys, time
from pathlib import Path
from scripts.eagle3.errors import StageError
from scripts.eagle3.stage import run_stage
folder = Path(sys.argv[1])
def main(argv):
    worker = subprocess.Popen(["sleep", "600"], start_new_session=True)
    (folder / "pids").write_text(f"{__import__('os').getpid()} {worker.pid}")
    (folder / "ready").touch()
    try:
        while True:
            time.sleep(0.05)
    finally:
        (folder / "saving").touch()
        time.sleep(0.5)
        print("saved", flush=True)
        print("really", file=sys.stderr, flush=True)
        worker.kill()
        (folder / "saved").touch()
run_stage(main)
"""


@pytest.fixture
def stage(tmp_path) -> Path:
    (tmp_path / "stage.py").write_text(STAGE)
    return tmp_path


def shell(stage: Path, script: str) -> subprocess.Popen:
    text = script.format(stage=f"{sys.executable} {stage}/stage.py {stage}")
    process = subprocess.Popen(
        ["bash", "-c", text],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    wait_until((stage / "ready").exists, "the stage")
    return process


def pids(stage: Path) -> list[int]:
    return [int(pid) for pid in (stage / "pids").read_text().split()]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_the_first_signal_ends_it_without_a_trace_and_later_ones_do_not_break_the_saving(stage, number):
    process = shell(stage, "exec {stage}")
    process.send_signal(number)
    wait_until((stage / "saving").exists, "the saving")
    for again in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(again)
    printed, _ = process.communicate(timeout=30)
    assert printed == "saved\nreally\n"
    assert process.returncode == 128 + number
    assert (stage / "saved").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_saves_although_the_reader_of_its_output_died_of_the_same_signal(stage, number):
    process = shell(stage, f"{{stage}} 2>&1 | tee {stage}/log")
    os.killpg(process.pid, number)
    wait_until((stage / "saved").exists, "the saving")
    process.communicate(timeout=30)
    wait_until(lambda: not any(map(start_time, pids(stage))), "the end of stage and worker")


def test_it_waits_in_the_shell_of_a_rule_and_the_log_is_whole(stage):
    (prefix,) = re.findall(r'^shell\.prefix\("(.*)"\)', (ROOT / "Snakefile").read_text(), re.MULTILINE)
    process = shell(stage, f"{prefix}{{stage}} 2>&1 | tee {stage}/log")
    os.killpg(process.pid, signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "saved\nreally\n"
    assert process.returncode == 143
    assert (stage / "log").read_text() == "saved\nreally\n"


def as_snakemake(stage: Path) -> str:
    """A parent that the stage takes for Snakemake: a shell of that name."""
    (stage / "snakemake").symlink_to("/bin/bash")
    return f"{stage}/snakemake"


@pytest.mark.parametrize("gone", ["snakemake", "shell"])
def test_it_ends_with_its_worker_when_what_started_it_is_killed(stage, gone):
    name = as_snakemake(stage)
    (stage / "inner.sh").write_text(f"echo $$ > {stage}/inner; {sys.executable} {stage}/stage.py {stage}; true")
    process = shell(stage, f"exec {name} -c 'bash {stage}/inner.sh; true'")
    started = pids(stage)
    assert all(map(start_time, started))
    os.kill(process.pid if gone == "snakemake" else int((stage / "inner").read_text()), signal.SIGKILL)
    wait_until(lambda: not any(map(start_time, started)), "the end of stage and worker", 10)
    assert not (stage / "saved").exists()
    process.communicate(timeout=30)


def test_it_ends_when_its_supervisor_is_killed(stage):
    process = shell(stage, f"exec {sys.executable} -m scripts.on_gpus --gpus 0 --min-gpus 0 -- {{stage}}")
    started = pids(stage)
    process.kill()
    wait_until(lambda: not any(map(start_time, started)), "the end of stage and worker", 10)
    process.communicate(timeout=30)
