"""The production server makes room once and comes back, with a real server process and counted commands."""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from scripts import restore_production
from scripts.eagle3 import production, run_hooks
from scripts.eagle3.config import Production
from scripts.eagle3.errors import StageError
from scripts.eagle3.production import STATE, Run, RunState, bring_back, hold_server, read_state, room_for_job, write_state
from tests.production_case import ServerCase, health_server, processes_in, wait_until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path):
    case = ServerCase(tmp_path / "server", health_server, timeout_s=20)
    case.up()
    yield case
    case.end()


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "run").mkdir()
    return tmp_path / "run"


def begin(folder: Path, server: ServerCase, **changes) -> RunState:
    """The state file as a run writes it; its Snakemake is this process."""
    state = RunState(run=Run.this("demo"), production=Production(**{**server.section, **changes}))
    write_state(folder, state)
    return state


def killed(state: RunState) -> RunState:
    """The same state of a run that is dead: its process has ended."""
    ended = subprocess.Popen(["true"])
    run = Run(**{**state.run.model_dump(), "pid": ended.pid, "start_time": "1"})
    ended.wait()
    return state.model_copy(update={"run": run})


def test_the_first_job_stops_it_the_later_ones_do_not_and_the_end_starts_it(server, folder):
    begin(folder, server)
    for _ in range(3):
        with room_for_job(folder) as section:
            assert section is not None and not server.healthy()
    assert server.calls() == ["stop"]
    assert bring_back(folder, 5)
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert read_state(folder) is None
    assert not bring_back(folder, 5)
    assert server.calls() == ["stop", "start"]


def test_jobs_that_start_together_stop_it_once_and_none_goes_on_before_it_is_down(server, folder):
    begin(folder, server)
    seen = []

    def job():
        with room_for_job(folder):
            seen.append(server.healthy())

    threads = [threading.Thread(target=job) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert seen == [False] * 4
    assert server.calls() == ["stop"]


def test_a_run_without_gpu_jobs_touches_nothing(server, folder):
    begin(folder, server)
    assert not bring_back(folder, 5)
    assert server.healthy() and server.calls() == [] and read_state(folder) is None


def test_without_a_server_there_is_nothing_to_do(folder, capsys):
    with room_for_job(folder) as section:
        assert section is None
    assert list(folder.iterdir()) == [] and capsys.readouterr().out == ""


def test_a_server_on_another_machine_is_left_alone(server, folder):
    begin(folder, server, host="another-node")
    with room_for_job(folder) as section:
        assert section is None
    assert server.healthy() and server.calls() == []


def test_a_server_is_here_under_its_long_name_and_under_slurms(monkeypatch):
    monkeypatch.setattr(production.socket, "gethostname", lambda: "node7.cluster.local")
    monkeypatch.setenv("SLURMD_NODENAME", "b300-node01")
    assert all(production.is_here(host) for host in (None, "node7", "node7.cluster.local", "b300-node01"))
    assert not production.is_here("node70")


@pytest.mark.parametrize(
    ("stop", "line"),
    [
        ("echo cannot reach it; exit 3", "production.stop failed with exit code 3: cannot reach it"),
        ("sleep 600", "production.stop has not returned within 1 s"),
        ("true", "still answers after 1 s"),
    ],
)
def test_a_stop_that_fails_ends_the_job_and_is_not_taken_for_done(server, folder, stop, line):
    begin(folder, server, stop=stop, timeout=1)
    for _ in range(2):
        with pytest.raises(StageError, match=line), room_for_job(folder):
            pytest.fail("the job went on")
    state = read_state(folder)
    assert state is not None and state.stopped and not state.down
    assert bring_back(folder, 5)
    assert server.calls() == ["start"]


@pytest.mark.parametrize(
    ("start", "line"), [("exit 4", "production.start failed with exit code 4"), ("true", "does not answer 1 s after")]
)
def test_a_start_that_fails_keeps_the_state(server, folder, start, line):
    begin(folder, server, start=start)
    with room_for_job(folder):
        pass
    state = read_state(folder)
    assert state is not None
    write_state(folder, state.model_copy(update={"production": Production(**{**server.section, "start": start, "timeout": 1})}))
    with pytest.raises(StageError, match=line):
        bring_back(folder, 5)
    assert read_state(folder) is not None


def test_it_does_not_come_back_while_a_job_runs(server, folder):
    begin(folder, server)
    with room_for_job(folder), pytest.raises(StageError, match="still run after 0 s"):
        bring_back(folder, 0)
    assert server.calls() == ["stop"]
    assert bring_back(folder, 5)


def test_commands_run_in_the_users_environment(folder, server, monkeypatch):
    monkeypatch.setenv("PATH", f"{ROOT}/.venvs/cpu/bin:{ROOT}/.venvs/workflow/bin:/usr/bin:/bin")
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:/opt/theirs")
    monkeypatch.setenv("LD_PRELOAD", f"{ROOT}/.venvs/cpu/lib/libiomp5.so")
    begin(folder, server, stop=f'echo "$PATH,$PYTHONPATH,${{LD_PRELOAD-none}}"; {server.section["stop"]}')
    with room_for_job(folder):
        pass
    assert (folder / production.LOG).read_text() == "/usr/bin:/bin,/opt/theirs,none\n"


def test_a_run_is_told_from_a_later_process_with_its_id():
    run = Run.this("demo")
    assert run.status() == "alive"
    assert run.model_copy(update={"start_time": "1"}).status() == "dead"
    assert run.model_copy(update={"boot_id": "before the power loss"}).status() == "dead"
    assert run.model_copy(update={"host": "another"}).status() == "elsewhere"


def test_restore_after_a_kill_starts_it_clears_the_lock_and_may_be_called_twice(server, folder):
    begin(folder, server)
    with room_for_job(folder):
        pass
    left = read_state(folder)
    assert left is not None
    write_state(folder, killed(left))
    (folder / ".snakemake/locks").mkdir(parents=True)
    for name in ("0.input.lock", "0.output.lock"):
        (folder / ".snakemake/locks" / name).touch()
    done = restore_production.run(folder)
    assert done.endswith("was killed: the production server is back, Snakemake's lock is cleared")
    assert server.healthy() and server.calls() == ["stop", "start"]
    assert list((folder / ".snakemake/locks").iterdir()) == []
    assert restore_production.run(folder).startswith("nothing to restore")
    assert server.calls() == ["stop", "start"]


def test_restore_is_refused_while_the_run_lives_or_was_elsewhere(server, folder):
    state = begin(folder, server)
    with pytest.raises(StageError, match="is alive"):
        restore_production.run(folder)
    write_state(folder, state.model_copy(update={"run": state.run.model_copy(update={"host": "another-node"})}))
    with pytest.raises(StageError, match="another machine"):
        restore_production.run(folder)
    assert read_state(folder) is not None and server.calls() == []


def test_jobs_of_a_dead_run_stop_nothing(server, folder):
    write_state(folder, killed(begin(folder, server)))
    with room_for_job(folder) as section:
        assert section is None
    assert server.calls() == []


def test_a_damaged_state_file_says_what_to_do(folder):
    (folder / STATE).write_text(json.dumps({"run": "x"}))
    with pytest.raises(StageError, match="start the server, then delete it"):
        read_state(folder)


def test_a_job_that_is_ended_while_it_stops_the_server_ends_the_stop_too(server, folder, tmp_path):
    begin(folder, server, stop=f"touch {tmp_path}/stopping; sleep 600; touch {tmp_path}/late")
    command = [sys.executable, "-m", "scripts.on_gpus", "--gpus", "0", "--min-gpus", "0", "--", "true"]

    with subprocess.Popen(command, cwd=folder, env={**production._outer_environment(), "PYTHONPATH": str(ROOT)}) as job:
        wait_until((tmp_path / "stopping").exists, "the stop")
        job.terminate()
    assert job.returncode == 143
    assert processes_in(folder) == []


def test_a_stop_whose_job_was_killed_is_waited_for_before_the_start(server, folder):
    begin(folder, server, stop=f"touch {folder}/stopping; sleep 3; {server.section['stop']}", timeout=60)
    job = "from pathlib import Path; from scripts.eagle3.production import room_for_job\nwith room_for_job(Path()): pass"
    process = subprocess.Popen([sys.executable, "-c", job], cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)})
    wait_until((folder / "stopping").exists, "the stop")
    process.kill()
    process.wait()
    assert bring_back(folder, 5)
    assert server.calls() == ["stop", "start"] and server.healthy()


def test_a_server_has_one_lock_under_all_its_names(server):
    one = Production(**server.section)
    other = Production(**{**server.section, "health": one.health.replace("127.0.0.1", "localhost") + "/"})
    with hold_server(one), pytest.raises(StageError, match="another run manages this production server"):
        hold_server(other)


def test_restore_leaves_a_server_to_the_run_of_another_folder(server, folder):
    write_state(folder, killed(begin(folder, server)))
    with (
        hold_server(Production(**server.section)),
        pytest.raises(StageError, match="another run manages this production server"),
    ):
        restore_production.run(folder)
    assert server.calls() == [] and read_state(folder) is not None


def test_commands_run_without_their_log(server, folder):
    begin(folder, server)
    (folder / "logs").write_text("a file where the folder should be")
    with room_for_job(folder):
        assert not server.healthy()
    assert bring_back(folder, 5) and server.healthy()


@pytest.mark.parametrize("content", [b"\xff\xfe", b"{}", b"", None])
def test_a_state_file_that_cannot_be_read_is_one_line(folder, content):
    if content is None:
        (folder / STATE).mkdir()
    else:
        (folder / STATE).write_bytes(content)
    with pytest.raises(StageError, match=r"not a state file .*start the server, then delete it"):
        read_state(folder)


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a b", "http://127.0.0.1:port/health", "http://[::1/health"])
def test_an_odd_url_is_not_healthy(url):
    assert not production.is_healthy(url)


def test_a_start_that_stays_in_the_foreground_is_done_when_the_server_answers(server, folder):
    begin(folder, server, start=f"{server.section['start']}; sleep 600", timeout=60)
    with room_for_job(folder):
        pass
    began = time.monotonic()
    assert bring_back(folder, 5) and server.healthy()
    assert time.monotonic() - began < 30


def test_restore_clears_a_lock_that_is_left_though_there_is_no_server(folder):
    lock = folder / ".snakemake/locks/0.input.lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert "nothing to restore" in restore_production.run(folder)
    assert not lock.exists()


def test_a_server_that_a_killed_run_has_stopped_is_not_forgotten_for_another_one(server, folder):
    state = killed(begin(folder, server))
    write_state(folder, state.model_copy(update={"stopped": True}))
    other = {**server.section, "health": "http://127.0.0.1:1/health"}
    config = SimpleNamespace(run="demo", grace_s=5, production=Production(**other))
    with pytest.raises(StageError, match=r"killed after it had stopped .*make restore-production"):
        run_hooks._take_over_server(SimpleNamespace(local_exec=True), config, folder)
    assert read_state(folder) is not None


def test_restore_works_though_its_screen_is_a_full_disk(server, folder):
    state = begin(folder, server)
    with room_for_job(folder):
        assert not server.healthy()
    write_state(folder, killed(state).model_copy(update={"stopped": True, "down": True}))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "scripts.restore_production"]
        subprocess.run(command, cwd=folder, env=environment, stdout=full, stderr=full, timeout=60)
    assert server.healthy() and read_state(folder) is None
