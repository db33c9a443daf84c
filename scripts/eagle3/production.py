"""The production server makes room once in a run and comes back when it ends.

In: `production:` of the config. Out: `.run-state.json` in the working directory, from the start of a run that uses GPUs to its
proper end: who runs, how the server is stopped and started, whether that has been done. GPU jobs read it there.
"""

import fcntl
import http.client
import os
import signal
import socket
import subprocess
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import IO, Literal

from pydantic import BaseModel, ValidationError

from scripts.eagle3.config import Production
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_text
from scripts.eagle3.gpus import LEASES, open_shared, take
from scripts.eagle3.processes import start_time

STATE = ".run-state.json"
LOG = "logs/production.log"
ADVICE = "make restore-production"
STOP_LOCK = "eagle3-flow.stop.lock"
JOBS_LOCK = "eagle3-flow.jobs.lock"
POLL_S = 0.5
HEALTH_TIMEOUT_S = 5


class Run(BaseModel):
    """One Snakemake process, told apart from later ones with the same id."""

    name: str
    host: str
    boot_id: str
    pid: int
    start_time: str

    @classmethod
    def this(cls, name: str) -> "Run":
        """The run whose Snakemake is this process."""
        pid = os.getpid()
        return cls(name=name, host=socket.gethostname(), boot_id=_boot_id(), pid=pid, start_time=start_time(pid) or "")

    def status(self) -> Literal["alive", "dead", "elsewhere"]:
        """Elsewhere: on another machine, so that nothing is known."""
        if self.host != socket.gethostname():
            return "elsewhere"
        alive = self.boot_id == _boot_id() and self.start_time == start_time(self.pid)
        return "alive" if alive else "dead"

    def __str__(self) -> str:
        return f"run {self.name} (pid {self.pid} on {self.host})"


class RunState(BaseModel):
    """The content of the state file."""

    run: Run
    production: Production
    stopped: bool = False  # written before `stop` runs: from then on the server has to be started
    down: bool = False  # `stop` has ended well and the server does not answer any more


def read_state(folder: Path) -> RunState | None:
    """The state file of a working directory; None where there is none."""
    path = folder / STATE
    try:
        return RunState.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (ValidationError, UnicodeDecodeError, OSError) as error:
        said = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
        raise StageError(f"{path}: not a state file ({said}); start the server, then delete it") from None


def write_state(folder: Path, state: RunState) -> None:
    """Writes the state file; it is on disk when this returns."""
    write_text(folder / STATE, state.model_dump_json(indent=2) + "\n")


def is_here(host: str | None) -> bool:
    """Whether the server runs on this machine (Slurm may know it by a name of its own)."""
    names = {socket.gethostname(), os.environ.get("SLURMD_NODENAME", "")}
    return host is None or host in names or host.split(".")[0] in {name.split(".")[0] for name in names if name}


def hold_server(production: Production) -> IO[str]:
    """The lock that says who manages this server on this machine, held until it is closed; StageError where another does."""
    url = urllib.parse.urlsplit(production.health)
    host = (url.hostname or "").lower()
    if host in ("localhost", "::1", socket.gethostname().lower()) or host.startswith("127."):
        host = "localhost"  # one server under several names
    name = f"{host}:{url.port or (443 if url.scheme == 'https' else 80)}"
    lock = open_shared(LEASES, f"production-{sha256(name.encode()).hexdigest()[:16]}")
    if not take(lock):
        holder = lock.read().strip()
        lock.close()
        raise StageError(f"{production.health}: another run manages this production server ({holder}); wait for its end")
    return lock


@contextmanager
def room_for_job(folder: Path) -> Iterator[Production | None]:
    """While the block runs, the server is down and does not come back; stops it if this is the run's first GPU job.

    Yields None, and does nothing, without a server on this machine. A stop that fails is a StageError.
    """
    state = read_state(folder)
    if state is None or state.run.status() == "dead" or not is_here(state.production.host):
        yield None
        return
    with _lock(folder, JOBS_LOCK) as job:
        with suppress(OSError):  # a file system without locks: what starts the server then trusts Snakemake alone
            fcntl.flock(job, fcntl.LOCK_SH)
        with _lock(folder, STOP_LOCK) as only_one:
            fcntl.flock(only_one, fcntl.LOCK_EX)
            state = read_state(folder)
            if state is not None and not state.down:
                _stop(folder, state, only_one)
        yield state.production if state else None


def _stop(folder: Path, state: RunState, only_one: IO[bytes]) -> None:
    production = state.production
    write_state(folder, state.model_copy(update={"stopped": True}))
    print(f"stopping the production server: {production.stop}", flush=True)
    deadline = time.monotonic() + production.timeout
    # the command holds the lock too: should this job be killed now, the server is not started before the command has ended
    _call("stop", production, deadline, folder, only_one.fileno())
    while is_healthy(production.health):
        if time.monotonic() > deadline:
            raise StageError(
                f"production.stop ended well, but {production.health} still answers after {production.timeout} s;"
                " it must stop the server and whatever restarts it"
            )
        time.sleep(POLL_S)
    write_state(folder, state.model_copy(update={"stopped": True, "down": True}))


def bring_back(folder: Path, jobs_timeout_s: float) -> bool:
    """Starts the server if the run has stopped it, waits until it is healthy, removes the state file.

    Returns whether it was started. First waits up to `jobs_timeout_s` for what is left of the run's GPU jobs.
    """
    state = read_state(folder)
    if state is None:
        return False
    with _lock(folder, JOBS_LOCK) as jobs:
        if not _locked(jobs, jobs_timeout_s):
            raise StageError(
                f"GPU jobs of the run still run after {jobs_timeout_s:.0f} s (scripts.on_gpus in `ps ax`);"
                f" end them, then: {ADVICE}"
            )
    with _lock(folder, STOP_LOCK) as only_one:
        if not _locked(only_one, state.production.timeout):
            raise StageError(f"production.stop still runs: {state.production.stop}; end it, then: {ADVICE}")
        state = read_state(folder)
        if state is None:
            return False
        if state.stopped:
            _start(folder, state.production)
        (folder / STATE).unlink()
        return state.stopped


def _start(folder: Path, production: Production) -> None:
    print(
        f"starting the production server: {production.start} (until {production.health} answers, at most"
        f" {production.timeout} s)",
        flush=True,
    )
    deadline = time.monotonic() + production.timeout
    _call("start", production, deadline, folder)
    while not is_healthy(production.health):
        if time.monotonic() > deadline:
            raise StageError(f"{production.health} does not answer {production.timeout} s after production.start")
        time.sleep(POLL_S)
    print(f"the production server is back: {production.health}", flush=True)


def is_healthy(url: str) -> bool:
    """Whether the URL answers 200. Asked directly: a proxy would answer for a server that is down."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(url, timeout=HEALTH_TIMEOUT_S) as answer:
            return bool(answer.status == 200)
    except (OSError, ValueError, http.client.HTTPException):
        return False


def _call(name: Literal["stop", "start"], production: Production, deadline: float, folder: Path, *inherited: int) -> None:
    """Runs a command of the config in a session of its own: what it starts outlives the run and its terminal.

    Without its log (a full disk, a file where the folder should be) it runs all the same: the server matters more.
    """
    command, timeout_s, health = getattr(production, name), production.timeout, production.health
    log = folder / LOG
    try:
        log.parent.mkdir(exist_ok=True)
        log.touch()
    except OSError:
        log = Path(os.devnull)
    with open(log, "ab") as output:
        # to a file, not to our own output: a server that held that pipe would keep its reader waiting for ever
        begin = output.tell()
        process = subprocess.Popen(
            ["bash", "-c", command],
            cwd=folder,
            env=_outer_environment(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            pass_fds=inherited,
        )
    try:
        while (code := _exit_code(process)) is None:
            if name == "start" and is_healthy(health):
                return  # a server in the foreground
            if time.monotonic() > deadline:
                raise StageError(f"production.{name} has not returned within {timeout_s} s: {command}; see {LOG}")
    except (StageError, SystemExit):
        if name == "stop":  # one that went on would end the server after its next start
            _end(process)
        raise
    if code:
        said = log.read_bytes()[begin:].decode(errors="replace").strip().splitlines()
        raise StageError(
            f"production.{name} failed with exit code {code}: {said[-1] if said else command}; see {LOG}, mend the server"
        )


def _exit_code(process: subprocess.Popen[bytes]) -> int | None:
    with suppress(subprocess.TimeoutExpired):
        return process.wait(POLL_S)
    return None


def _end(process: subprocess.Popen[bytes]) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _outer_environment() -> dict[str, str]:
    """The user's environment, without what `bin/in-env` and `make` have put in front of it."""
    venvs = f"{Path(__file__).parents[2]}/.venvs/"
    cleaned = dict(os.environ)
    for name in ("PATH", "PYTHONPATH", "LD_PRELOAD"):
        kept = [part for part in cleaned.pop(name, "").split(":") if part and not (part + "/").startswith(venvs)]
        kept = [part for part in kept if name != "PYTHONPATH" or part != str(Path(__file__).parents[2])]
        if kept:
            cleaned[name] = ":".join(kept)
    return cleaned


@contextmanager
def _lock(folder: Path, name: str) -> Iterator[IO[bytes]]:
    path = folder / ".snakemake" / name
    path.parent.mkdir(exist_ok=True)
    with open(path, "ab") as file:
        yield file


def _locked(file: IO[bytes], timeout_s: float) -> bool:
    """Whether the lock could be taken in time; also on a file system without locks."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
        except OSError:
            return True
        time.sleep(POLL_S)


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
