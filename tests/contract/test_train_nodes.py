"""Training over several nodes: two launchers on this machine as two nodes, as bin/on-nodes starts them, with gloo."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from scripts.eagle3.processes import descendants
from tests.contract.test_train_ranks import DEADLINE_S, ENDED_S, SETTINGS, end_of
from tests.training_case import TrainingCase, largest_difference, metrics_lines, weights

ROOT = Path(__file__).parents[2]
SUPERVISOR = ["scripts.on_gpus", "--gpus", "0", "--min-gpus", "0", "--", "python", "-m", "scripts.per_gpu"]


def start(case, checkpoints, processes=(1, 1)):
    """The launchers of nodes a, b, ..., each under its supervisor."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        meeting = f"127.0.0.1:{free.getsockname()[1]}"
    environment = {"EAGLE3_NODES": str(len(processes)), "EAGLE3_RENDEZVOUS": meeting}
    return [
        case.start(0, SETTINGS, checkpoints, [*SUPERVISOR, "--processes", str(count)], **environment, SLURMD_NODENAME=name)
        for name, count in zip("abc", processes, strict=False)
    ]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_llama):
    """Segment 0, trained on two nodes."""
    case = TrainingCase(tmp_path_factory.mktemp("nodes"), tiny_llama)
    assert [end_of(node)[0] for node in start(case, case.checkpoints)] == [0, 0]
    return case


def wait_for_a_state(nodes, checkpoints):
    """Until the first state is saved: all nodes are at work."""
    deadline = time.monotonic() + DEADLINE_S
    while not list(checkpoints.glob(".segment-0/step-*")):
        assert [node.poll() for node in nodes] == [None] * len(nodes) and time.monotonic() < deadline
        time.sleep(0.01)


def goes_on(case, checkpoints):
    """The next run ends well, with the weights of one that nothing disturbed."""
    assert [end_of(node)[0] for node in start(case, checkpoints)] == [0, 0]
    assert largest_difference(weights(checkpoints, 0), weights(case.checkpoints, 0)) == 0


@pytest.mark.slow
def test_two_nodes_train_what_one_process_does(undisturbed, tmp_path):
    two = [line["loss"] for line in metrics_lines(undisturbed.metrics, 0)]
    undisturbed.train(0, SETTINGS, tmp_path)
    one = [line["loss"] for line in metrics_lines(undisturbed.metrics, 0)]
    assert len(two) > 1 and two == pytest.approx(one, abs=1e-5)
    assert largest_difference(weights(tmp_path, 0), weights(undisturbed.checkpoints, 0)) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "launcher", "supervisor"])
def test_one_node_killed_ends_the_other_within_a_minute_and_the_next_run_goes_on(undisturbed, tmp_path, victim):
    nodes = start(undisturbed, tmp_path)
    wait_for_a_state(nodes, tmp_path)
    left = [each for node in nodes for each in descendants(node.pid)]
    launcher, *_, rank = descendants(nodes[1].pid)
    os.kill({"rank": rank, "launcher": launcher, "supervisor": nodes[1].pid}[victim], signal.SIGKILL)
    killed = time.monotonic()
    (other, _), (code, said) = map(end_of, nodes)
    assert other == 1 and code in (1, 128 + signal.SIGKILL, -signal.SIGKILL)
    if victim == "rank":
        expected = r".*: process [01] of 2, on b, ended first, with signal 9; the others were ended"
        assert re.fullmatch(expected, said.splitlines()[-1])
    while any(os.path.exists(f"/proc/{each}") for each in left):
        assert time.monotonic() - killed < ENDED_S
        time.sleep(0.1)
    goes_on(undisturbed, tmp_path)


@pytest.mark.slow
def test_told_to_end_both_nodes_save_and_the_next_run_goes_on(undisturbed, tmp_path):
    nodes = start(undisturbed, tmp_path)
    wait_for_a_state(nodes, tmp_path)
    for node in nodes:
        node.send_signal(signal.SIGTERM)
    ended = [end_of(node) for node in nodes]
    assert {code for code, _ in ended} == {128 + signal.SIGTERM}
    assert sum("stopped at step" in said for _, said in ended) == 1
    goes_on(undisturbed, tmp_path)


@pytest.mark.slow
def test_a_node_with_another_number_of_gpus_is_refused(undisturbed, tmp_path):
    ended = [end_of(node) for node in start(undisturbed, tmp_path, (1, 2))]
    assert [code for code, _ in ended] == [1, 1]
    assert any("has 2 GPUs, 2 nodes have 3: expected as many on each" in said for _, said in ended)


def test_on_one_node_the_command_just_runs():
    ended = subprocess.run([ROOT / "bin/on-nodes", "1", "echo", "here"], capture_output=True, text=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (0, "here\n")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["2", "true"], 1, "bin/on-nodes: 2 nodes are asked for, but this is no Slurm job"),
        (["many", "true"], 2, "usage: bin/on-nodes NODES CMD ARGS..."),
    ],
)
def test_several_nodes_need_slurm_and_a_number(arguments, code, said):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    ended = subprocess.run([ROOT / "bin/on-nodes", *arguments], capture_output=True, text=True, env=environment)
    assert ended.returncode == code and said in ended.stderr
