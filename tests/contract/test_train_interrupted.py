"""Training that is killed or told to end, anywhere: the continued run has the undisturbed one's loss curve and bits."""

import copy
import os
import random
import re
import resource
import shutil
import signal
import socket
import time

import pytest
import torch

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.metrics import MetricsLog
from tests.training_case import TrainingCase, largest_difference, metrics_lines, training, weights

DEADLINE_S = 240
# what a metrics line says about the machine
TIMES = {"tokens_per_s", "mfu", "loader_wait", "peak_memory_bytes"}


def settings(**changes):
    """One or two rows per step, and no state in a test's time."""
    return training(**{"gradient_accumulation": 1, "batch_tokens": 40, **changes})


# a state after each step
SETTINGS = settings(checkpoint_minutes=0)
STOP_AT = 3  # the step of segment 1 after which a stopped job is told to end


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory, tiny_llama):
    """Two segments that saved nothing on their way; tests leave the files as they are."""
    case = TrainingCase(tmp_path_factory.mktemp("undisturbed"), tiny_llama)
    for number in range(2):
        case.train(number, settings())
    return case


def beside(case, folder, segments):
    """The same run with checkpoints and metrics of its own, which hold the first `segments` segments."""
    own = copy.copy(case)
    own.checkpoints, own.metrics = folder / "checkpoints", folder / "metrics"
    own.checkpoints.mkdir(parents=True)
    for number in range(segments):
        shutil.copytree(case.checkpoints / str(number), own.checkpoints / str(number))
        shutil.copy(case.checkpoints / f"{number}.json", own.checkpoints)
    return own


@pytest.fixture
def case(undisturbed, tmp_path):
    """Segment 0 is trained, segment 1 can be interrupted."""
    return beside(undisturbed, tmp_path, 1)


def curve(case, number=1):
    """What the metrics lines say about the training."""
    lines = metrics_lines(case.metrics, number)
    return [{key: value for key, value in line.items() if key not in TIMES} for line in lines]


def resume_state(case, number):
    """All files of a checkpoint's resume state, loaded: equal content need not be equal pickles."""
    folder = case.checkpoints / str(number)
    return {str(path.relative_to(folder)): torch.load(path, weights_only=False) for path in folder.rglob("*.pt")}


def same(left, right):
    """Whether nested containers and objects hold the same values, tensors to the bit."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return same(vars(left), vars(right)) if hasattr(left, "__dict__") and not isinstance(left, type) else left == right


def assert_same(case, expected, number=1):
    """Weights and resume state to the bit, the record's means, every line; nothing is left of the interruption."""
    assert largest_difference(weights(case.checkpoints, number), weights(expected.checkpoints, number)) == 0
    states = [resume_state(run, number) for run in (case, expected)]
    assert states[0] and same(*states)
    found, record = (read_json(run.checkpoints / f"{number}.json") for run in (case, expected))
    of_this_job = {name: found[name] for name in ("continued_from", "state_sha256")}
    assert found == {**record, **of_this_job} and record["continued_from"] == 0
    assert curve(case, number) == curve(expected, number)
    assert not list(case.checkpoints.glob(".*"))


def states(case, number=1):
    return sorted(path.name for path in (case.checkpoints / f".segment-{number}").glob("step-*"))


def writing_a_state(case):
    return (case.checkpoints / ".segment-1/.unfinished").exists() and bool(states(case))


def writing_the_first_state(case):
    return (case.checkpoints / ".segment-1/.unfinished").exists() and not states(case)


def writing_the_checkpoint(case):
    return (case.checkpoints / ".unfinished-segment-1").exists()


def all_steps_made(case):
    return states(case) == [f"step-{steps_of(case)}"]


def steps_of(case):
    """Steps of segment 1: as many as segment 0 had."""
    return read_json(case.checkpoints / "0.json")["step"]


def kill_when(processes, happens):
    """Stops the first process where it is looked at, so that it is killed at the very moment that was waited for."""
    first, deadline = processes[0], time.monotonic() + DEADLINE_S
    while True:
        assert first.poll() is None, f"ended too early: {first.stderr.read()}"
        assert time.monotonic() < deadline, "the moment never came"
        if happens():
            os.kill(first.pid, signal.SIGSTOP)
            os.waitid(os.P_PID, first.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
            if happens():
                break
            os.kill(first.pid, signal.SIGCONT)
        time.sleep(0.001)
    for process in processes:
        os.kill(process.pid, signal.SIGKILL)
    for process in processes:
        process.communicate()


def stop_at(monkeypatch, step):
    """This process is told to end while it trains `step`, once."""
    write, stopped = MetricsLog.write, []

    def stopping(log, record, kind="train"):
        write(log, record, kind)
        if record["step"] == step and not stopped:
            stopped.append(step)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(MetricsLog, "write", stopping)


@pytest.fixture
def stopped(case, monkeypatch, capsys):
    """Segment 1 was told to end in the middle, and saves no other states than that; `said`: its last line."""
    stop_at(monkeypatch, steps_of(case) + STOP_AT - 1)
    with pytest.raises(SystemExit) as ended:
        case.train(1, settings())
    assert ended.value.code == 128 + signal.SIGTERM
    assert states(case) == [f"step-{STOP_AT}"]
    case.said = capsys.readouterr().err.splitlines()[-1]
    return case


def test_training_killed_while_it_writes_a_state_gives_the_same_bits(case, undisturbed):
    for moment in (writing_the_first_state, writing_a_state):
        kill_when([case.start(1, SETTINGS)], lambda moment=moment: moment(case))
        assert not (case.checkpoints / "1.json").exists()
    case.train(1, SETTINGS)
    assert_same(case, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("moment", [all_steps_made, writing_the_checkpoint])
def test_training_killed_at_its_end_gives_the_same_bits(case, undisturbed, moment):
    kill_when([case.start(1, SETTINGS)], lambda: moment(case))
    done = states(case)
    case.train(1, SETTINGS)
    assert done == [f"step-{steps_of(case)}"] and read_json(case.checkpoints / "1.json")["continued_from"] == steps_of(case)
    assert_same(case, undisturbed)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_training_killed_again_and_again_at_random_gives_the_same_bits(undisturbed, tmp_path, seed):
    case, random_number = beside(undisturbed, tmp_path, 0), random.Random(seed).random
    for kill in range(3):
        before, process, deadline = states(case, 0), case.start(0, SETTINGS), time.monotonic() + DEADLINE_S
        while process.poll() is None and (states(case, 0) == before or random_number() < 0.9):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        process.kill()  # in a step, a save, the validation or the last checkpoint
        process.communicate()
        if (case.checkpoints / "0.json").exists():  # the later ones may come too late
            assert kill
            break
    case.train(0, SETTINGS)
    assert_same(case, undisturbed, 0)


def test_training_told_to_end_saves_says_where_and_goes_on(stopped, undisturbed, capsys):
    steps = steps_of(stopped)
    assert stopped.said == f"train_draft: segment 1 stopped at step {STOP_AT} of {steps} after SIGTERM; run again to go on"
    stopped.train(1, SETTINGS)
    assert f"{STOP_AT}/{steps} steps were finished by an earlier run" in capsys.readouterr().err
    assert read_json(stopped.checkpoints / "1.json")["continued_from"] == STOP_AT
    assert_same(stopped, undisturbed)


def test_first_segment_of_training_told_to_end_gives_the_same_bits(undisturbed, tmp_path, monkeypatch):
    case = beside(undisturbed, tmp_path, 0)
    stop_at(monkeypatch, STOP_AT)
    with pytest.raises(SystemExit):
        case.train(0, settings())
    case.train(0, SETTINGS)
    assert_same(case, undisturbed, 0)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"zero_stage": 0}, {"zero_stage": 1, "dtype": "bfloat16"}], ids=["float32", "bfloat16"])
def test_muon_training_told_to_end_gives_the_same_bits(undisturbed, tmp_path, monkeypatch, changes):
    chosen = settings(optimizer="muon", **changes)
    whole, case = beside(undisturbed, tmp_path / "whole", 0), beside(undisturbed, tmp_path / "interrupted", 0)
    for number in range(2):
        whole.train(number, chosen)
    case.train(0, chosen)
    stop_at(monkeypatch, steps_of(case) + STOP_AT)
    with pytest.raises(SystemExit):
        case.train(1, chosen)
    case.train(1, chosen)
    assert read_json(case.checkpoints / "1.json")["continued_from"] == STOP_AT + 1
    for number in range(2):
        assert_same(case, whole, number)


def test_training_told_to_end_in_a_process_of_its_own_exits_with_the_signal(case):
    process = case.start(1, SETTINGS)
    deadline = time.monotonic() + DEADLINE_S
    while not states(case):
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.001)
    process.send_signal(signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # Snakemake's hooks repeat it
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGTERM
    assert "after SIGTERM; run again to go on" in errors.splitlines()[-1]
    assert len(states(case)) == 1 and not (case.checkpoints / "1.json").exists()


def test_training_told_to_end_during_validation_trains_no_step_again(case, undisturbed, monkeypatch, capsys):
    steps = steps_of(case)
    stop_at(monkeypatch, 2 * steps - 1)
    with pytest.raises(SystemExit):
        case.train(1, settings())
    assert states(case) == [f"step-{steps}"]
    case.train(1, SETTINGS)
    assert f"{steps}/{steps} steps were finished by an earlier run" in capsys.readouterr().err
    assert_same(case, undisturbed)


def test_interrupted_training_takes_the_newest_of_two_states(stopped, undisturbed):
    folder = stopped.checkpoints / ".segment-1"
    older = folder / f"step-{STOP_AT - 1}"
    older.mkdir()  # killed between the new state's rename and the deletion of this one
    stopped.train(1, SETTINGS)
    assert_same(stopped, undisturbed)


def test_interrupted_training_refuses_other_settings_processes_or_weights(stopped, monkeypatch):
    where = r"\.segment-1/step-3/position.json \(an interrupted segment; delete .*\.segment-1 to start it over\)"
    with pytest.raises(StageError, match=rf"{where}: training.learning_rate is 0.001, expected 0.0005"):
        stopped.train(1, settings(learning_rate=5e-4))
    with pytest.raises(StageError, match=rf"{where}: engine.zero_stage is 0, expected 1"):
        stopped.train(1, settings(zero_stage=1))
    record = read_json(stopped.checkpoints / "0.json")
    write_json(stopped.checkpoints / "0.json", {**record, "weights_sha256": "others"})
    with pytest.raises(StageError, match=rf"{where}: start is .*, expected others"):
        stopped.train(1, SETTINGS)


def test_interrupted_training_refuses_another_number_of_processes(undisturbed, tmp_path, monkeypatch):
    case = beside(undisturbed, tmp_path, 0)
    stop_at(monkeypatch, 1)
    with pytest.raises(SystemExit):
        case.train(0, settings(gradient_accumulation=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(StageError, match=r"step-2/position.json .*: engine.processes is 1, expected 2"):
        case.train(0, settings(gradient_accumulation=2))


def test_interrupted_training_refuses_a_damaged_state(stopped):
    for path in (stopped.checkpoints / ".segment-1").rglob("*.pt"):
        os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(StageError, match=r"step-3: damaged \(.*\); delete .*\.segment-1 to start the segment over"):
        stopped.train(1, SETTINGS)


@pytest.mark.slow
def test_training_whose_state_finds_no_room_says_so_and_leaves_nothing_half(case, undisturbed):
    process = case.start(1, SETTINGS)
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (100_000, 100_000))  # no file of it may be larger
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 1
    assert re.search(r"\.segment-1/step-1: cannot write: .*; make room", errors.splitlines()[-1])
    assert not list((case.checkpoints / ".segment-1").iterdir())
    case.train(1, SETTINGS)
    assert_same(case, undisturbed)


def start_ranks(case, chosen):
    """Two ranks of segment 0, as a launcher starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
    return [case.start(0, chosen, RANK=str(rank), LOCAL_RANK=str(rank), **launcher) for rank in range(2)]


def exit_codes(ranks):
    for process in ranks:
        process.communicate(timeout=DEADLINE_S)
    return [process.returncode for process in ranks]


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage", [1, 3])
def test_two_ranks_killed_and_told_to_end_train_the_same_bits(undisturbed, tmp_path, zero_stage):
    chosen = settings(zero_stage=zero_stage, gradient_accumulation=2, checkpoint_minutes=0)
    whole, case = beside(undisturbed, tmp_path / "whole", 0), beside(undisturbed, tmp_path / "interrupted", 0)
    assert exit_codes(start_ranks(whole, chosen)) == [0, 0]

    kill_when(start_ranks(case, chosen), lambda: (case.checkpoints / ".segment-0/.unfinished").exists() and states(case, 0))
    before = states(case, 0)
    ranks = start_ranks(case, chosen)
    deadline = time.monotonic() + DEADLINE_S
    while states(case, 0) == before:
        assert time.monotonic() < deadline and ranks[0].poll() is None
        time.sleep(0.001)
    ranks[1].send_signal(signal.SIGTERM)  # one of them is enough
    assert exit_codes(ranks) == [128 + signal.SIGTERM] * 2
    assert exit_codes(start_ranks(case, chosen)) == [0, 0]
    assert_same(case, whole, 0)


def test_finished_training_prunes_its_old_checkpoints(undisturbed, tmp_path):
    case = beside(undisturbed, tmp_path, 0)
    for number in range(4):
        case.train(number, training(segments=4, keep_checkpoints=1))
    records = [read_json(case.checkpoints / f"{number}.json") for number in range(4)]
    best = max(records, key=lambda record: record["metrics"]["validation"]["acceptance_length"])["segment"]
    assert {int(path.parent.name) for path in case.checkpoints.glob("*/model.safetensors")} == {best, 2, 3}
    assert {int(path.parent.name) for path in case.checkpoints.glob("*/deepspeed")} == {2, 3}
