"""Training in one process per GPU, as the rule starts it, here two with gloo: killed, told to end, going on."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest

from scripts.eagle3.processes import arguments, descendants
from tests.training_case import TrainingCase, largest_difference, training, weights

DEADLINE_S = 180
# how long the others may go on after one process was killed
ENDED_S = 60
LAUNCHER = ["scripts.per_gpu", "--processes", "2"]
SETTINGS = training(zero_stage=1, checkpoint_minutes=0)


def test_a_stage_that_fails_in_one_process_fails_with_a_line_that_names_it():
    ended = subprocess.run([sys.executable, "-m", *LAUNCHER, "scripts.train_draft"], capture_output=True, text=True)
    assert ended.returncode == 1
    assert re.fullmatch(
        r"per_gpu: error: scripts.train_draft: process [01] of 2 ended first, with exit code 2; the others were ended",
        ended.stderr.splitlines()[-1],
    )


def test_one_process_needs_no_launcher():
    ended = subprocess.run([sys.executable, "-m", "scripts.per_gpu", "scripts.train_draft"], capture_output=True, text=True)
    assert ended.returncode == 2 and ended.stderr.startswith("usage: train_draft.py")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_llama):
    """Segment 0, trained by two processes."""
    case = TrainingCase(tmp_path_factory.mktemp("ranks"), tiny_llama)
    assert end_of(case.start(0, SETTINGS, launcher=LAUNCHER))[0] == 0
    return case


@pytest.mark.slow
def test_two_processes_train_what_one_does(undisturbed, tmp_path):
    undisturbed.train(0, SETTINGS, tmp_path)
    assert largest_difference(weights(tmp_path, 0), weights(undisturbed.checkpoints, 0)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_killed_ends_all_within_a_minute_and_the_next_run_goes_on(undisturbed, tmp_path, rank):
    process = undisturbed.start(0, SETTINGS, tmp_path, LAUNCHER)
    ranks = wait_for_a_state(process, tmp_path)
    os.kill(ranks[rank], signal.SIGKILL)
    killed = time.monotonic()
    code, said = end_of(process)
    assert time.monotonic() - killed < ENDED_S
    assert code == 1 and f"process {rank} of 2 ended first, with signal 9" in said.splitlines()[-1]
    assert not any(os.path.exists(f"/proc/{pid}") for pid in ranks.values())
    assert end_of(undisturbed.start(0, SETTINGS, tmp_path, LAUNCHER))[0] == 0
    assert largest_difference(weights(tmp_path, 0), weights(undisturbed.checkpoints, 0)) == 0


@pytest.mark.slow
def test_told_to_end_all_save_and_the_next_run_goes_on(undisturbed, tmp_path):
    process = undisturbed.start(0, SETTINGS, tmp_path, LAUNCHER)
    wait_for_a_state(process, tmp_path)
    process.send_signal(signal.SIGTERM)
    code, said = end_of(process)
    assert code == 128 + signal.SIGTERM and "stopped at step" in said
    assert end_of(undisturbed.start(0, SETTINGS, tmp_path, LAUNCHER))[0] == 0
    assert largest_difference(weights(tmp_path, 0), weights(undisturbed.checkpoints, 0)) == 0


def wait_for_a_state(process, checkpoints):
    """Until the first state is saved; returns the process id of each rank."""
    deadline = time.monotonic() + DEADLINE_S
    while not list(checkpoints.glob(".segment-0/step-*")):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    found = {}
    for pid in descendants(process.pid):
        if "scripts.train_draft" in arguments(pid):
            with open(f"/proc/{pid}/environ", "rb") as file:
                variables = dict(item.split(b"=", 1) for item in file.read().split(b"\0") if b"=" in item)
            found[int(variables[b"RANK"])] = pid
    return found


def end_of(process):
    """Exit code and standard error."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    return process.returncode, errors
