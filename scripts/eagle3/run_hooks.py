"""What Snakemake's own process does at the start and the end of a run: refuse, end jobs on signals, bring the server back.

In: Snakemake's `workflow` object (nothing of Snakemake is imported) and the config. Out: a StageError before any job, or the
state file that `production.py` describes. Called from the Snakefile's hooks, which do not exist in dry-runs and spawned jobs.
"""

import atexit
import contextlib
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from scripts.eagle3.config import Config
from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import kill_descendants, stages
from scripts.eagle3.production import (
    ADVICE,
    STATE,
    Run,
    RunState,
    bring_back,
    hold_server,
    is_healthy,
    is_here,
    read_state,
    write_state,
)
from scripts.eagle3.stage import keep_printing

SUPERVISED = "bin/on-gpus"
RESEND_S = 1.0


class _ThisRun:
    """What this process has to clean up: the folder whose server it manages, and the lock that says so."""

    folder: Path | None = None
    grace_s: int = 0
    server_lock: IO[str] | None = None


def outlive_screen() -> None:
    """Sends output to nowhere once its reader has gone (`snakemake ... | head`).

    Snakemake's threads wait for each other for ever when a write to the screen fails, and the server would stay down. The
    jobs' own writes still fail, so that the run ends.
    """
    readers = select.poll()
    for stream in (1, 2):
        readers.register(stream, 0)  # errors and hang-ups are always reported

    def watch() -> None:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        while True:
            for stream, _ in readers.poll():
                os.dup2(nowhere, stream)

    threading.Thread(target=watch, name="outlive_screen", daemon=True).start()


def note_dead_run(folder: Path) -> None:
    """One line where the state file names a run that was killed: Snakemake's own words only name its lock."""
    with contextlib.suppress(StageError):  # a damaged file is refused at the start of a run
        state = read_state(folder)
        if state is not None and state.run.status() == "dead":
            server = "the production server is down since then" if state.stopped else "it has not touched the production server"
            print(f"{state.run} was killed; {server}. Clean up with: {ADVICE}", file=sys.stderr, flush=True)


def begin_run(workflow: Any, config: Config, folder: Path, preflight: list[str]) -> None:
    """Refuses what cannot work, then makes sure that the server comes back and that signals end jobs in time.

    preflight: what scripts.preflight is asked, but for the hardware, which the planned jobs know.
    """
    if workflow.touch:
        return
    jobs = [job for job in workflow.dag.needrun_jobs() if SUPERVISED in (job.rule.shellcmd or "")]
    if jobs:
        _check_gpu_budget(workflow, jobs)
        _take_over_server(workflow, config, folder)
    _end_jobs_on_signals(workflow, config.grace_s)
    if jobs:
        _check_all(jobs, preflight)


def end_run() -> bool:
    """Brings the server back where this run has stopped it. False, after saying what to do, when it does not come."""
    folder, _ThisRun.folder = _ThisRun.folder, None  # once: not again when Python exits
    if folder is None:
        return True
    keep_printing()
    signal.signal(signal.SIGINT, _wait_for_server)
    try:
        bring_back(folder, _ThisRun.grace_s)
        return True
    except Exception as error:
        line = f"{error}" if isinstance(error, StageError) else f"{type(error).__name__}: {error}"
        print(f"\nThe production server is NOT back: {line}\nBring it back with: {ADVICE}\n", file=sys.stderr, flush=True)
        return False


def _wait_for_server(*_: object) -> None:
    print("the production server is being started: wait, or leave it to itself with kill -9", file=sys.stderr, flush=True)


def _check_gpu_budget(workflow: Any, jobs: list[Any]) -> None:
    required = max(int(job.resources.get("min_gpus", 0)) for job in jobs)
    if not workflow.local_exec or required == 0:
        return
    budget = workflow.global_resources["gpu"].value if "gpu" in workflow.global_resources else None
    if budget is None or budget < required:
        found = "there is no GPU budget" if budget is None else f"the GPU budget is {budget}"
        raise StageError(
            f"target.min_gpus is {required}, {found}; use --profile local-rtx6000, or --resources gpu={required}"
            " with set-resources for the GPU rules"
        )


def _check_all(jobs: list[Any], preflight: list[str]) -> None:
    """Runs preflight where a job loads the target; its table is shown when a line is red."""
    loading = [job for job in jobs if job.resources.get("min_gpus") is not None]
    if not loading:
        return
    hardware = [f"--gpus={max(_count(job, 'gpu', 0) for job in loading)}"]
    hardware += [f"--gpu-memory-percent={max(_count(job, 'gpu_memory_percent', 90) for job in loading)}"]
    print("preflight: checks what can be checked before the target is loaded", file=sys.stderr, flush=True)
    command = ["bin/in-env", "python", "-m", "scripts.preflight", *preflight, *hardware]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    lines = done.stdout.strip().splitlines() or [f"exit code {done.returncode}"]
    if done.returncode:
        print(*lines[:-1], sep="\n", file=sys.stderr)
        raise StageError(lines[-1])
    print(f"preflight of {lines[-1]}", file=sys.stderr, flush=True)


def _count(job: Any, resource: str, default: int) -> int:
    found = job.resources.get(resource, default)
    if not isinstance(found, int) or found < 0:
        raise StageError(f"{resource} of rule {job.rule.name} is {found!r}, expected a whole number; mend the profile")
    return found


def _take_over_server(workflow: Any, config: Config, folder: Path) -> None:
    production, former = config.production, read_state(folder)
    if production is not None and production.host is None and not workflow.local_exec:
        raise StageError("production.host is needed under Slurm: the name of the node that serves; or set production: null")
    if former is not None and (status := former.run.status()) != "dead":
        raise StageError(
            f"{folder / STATE}: {former.run} manages the production server from this folder"
            + ("; wait for its end" if status == "alive" else f"; wait for its end, or, if it was killed, there: {ADVICE}")
        )
    if production is not None and workflow.local_exec and not is_here(production.host):
        production = None
    if former is not None and former.stopped:
        if production is not None and production.health != former.production.health:
            raise StageError(
                f"{former.run} was killed after it had stopped the production server {former.production.health}; this"
                f" configuration names {production.health}; bring the first one back: {ADVICE}"
            )
        production = production or former.production
    if production is None:
        (folder / STATE).unlink(missing_ok=True)  # of a dead run that has stopped nothing
        return
    _ThisRun.server_lock = hold_server(production)
    stopped = former is not None and former.stopped
    down = stopped and not is_healthy(production.health)
    write_state(folder, RunState(run=Run.this(config.run), production=production, stopped=stopped, down=down))
    _ThisRun.folder, _ThisRun.grace_s = folder, config.grace_s
    atexit.register(end_run)  # Snakemake calls no hook when its scheduler fails


def _end_jobs_on_signals(workflow: Any, grace_s: int) -> None:
    """Wraps Snakemake's own handlers, which wait for running jobs to finish: here jobs are asked to save and end."""
    finish: Callable[..., object] = signal.getsignal(signal.SIGTERM)  # type: ignore[assignment]
    asked = threading.Event()

    def end(number: int, frame: object) -> None:
        if not asked.is_set():
            asked.set()
            threading.Thread(target=_end_stages, args=(grace_s,), daemon=True).start()
        if number == signal.SIGINT or not workflow.local_exec:
            raise KeyboardInterrupt  # Snakemake cancels its Slurm jobs only on this path
        # in a thread: it takes a lock that the interrupted code may hold
        threading.Thread(target=finish, args=(number, frame), daemon=True).start()

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a background job of a shell
            signal.signal(number, end)


def _end_stages(grace_s: int) -> None:
    """Asks all stages below this process to end, also those that are only just starting; kills them after `grace_s`."""
    deadline = time.monotonic() + grace_s
    while True:
        for pid in stages(os.getpid()):
            if time.monotonic() > deadline:
                kill_descendants(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL if time.monotonic() > deadline else signal.SIGTERM)
        time.sleep(RESEND_S)
