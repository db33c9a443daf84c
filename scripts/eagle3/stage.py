"""The frame of every stage: parse, run, and end with one line on failure.

In: a stage's `main`. Out: exit code 0, or 1 with one line on standard error. A job whose Snakemake has died ends itself.
"""

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from pydantic import BaseModel, ValidationError

from scripts.eagle3.errors import StageError

SectionT = TypeVar("SectionT", bound=BaseModel)
WATCH_INTERVAL_S = 1.0


def section(model: type[SectionT]) -> Callable[[str], SectionT]:
    """An argparse type that reads one section of the configuration from JSON."""

    def parse(text: str) -> SectionT:
        try:
            return model.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise argparse.ArgumentTypeError(f"{model.__name__} {key}: {first['msg']}") from None

    return parse


def run_stage(main: Callable[[Sequence[str] | None], None]) -> NoReturn:
    """Runs `main(None)`; a StageError becomes one line and exit code 1. Other exceptions keep their trace."""
    name = Path(sys.argv[0]).stem
    end_with_snakemake()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main(None)
    except StageError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(0)


def end_with_snakemake() -> None:
    """Kills this process's children and itself within seconds once the Snakemake that started it is gone.

    The direct parent is only a shell, which outlives a killed Snakemake; so the nearest ancestor whose command line names
    snakemake is watched. Without such an ancestor (a stage typed by hand) nothing is watched.
    """
    pid = _snakemake_ancestor()
    if pid is None:
        return
    born = _start_time(pid)

    def watch() -> None:
        while _start_time(pid) == born:
            time.sleep(WATCH_INTERVAL_S)
        print("snakemake is gone: this job ends itself; finished rows are kept", file=sys.stderr, flush=True)
        for child in _descendants(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_snakemake", daemon=True).start()


def _snakemake_ancestor() -> int | None:
    pid = os.getppid()
    while pid > 1:
        try:
            arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        except OSError:
            return None
        # the program itself, not a shell whose script text contains the word
        if any(os.path.basename(argument) == b"snakemake" for argument in arguments[:3]):
            return pid
        pid = _parent(pid)
    return None


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else fields


def _parent(pid: int) -> int:
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def _start_time(pid: int) -> str | None:
    fields = _stat_fields(pid)
    return fields[19] if fields else None


def _descendants(pid: int) -> list[int]:
    parents = {int(entry.name): _parent(int(entry.name)) for entry in Path("/proc").iterdir() if entry.name.isdigit()}
    found, frontier = [], [pid]
    while frontier:
        children = [child for child, parent in parents.items() if parent in frontier]
        found += children
        frontier = children
    return found
