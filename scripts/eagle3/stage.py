"""The frame of every stage: parse, run, and end with one line on failure.

In: a stage's `main`. Out: exit code 0; 1 with one line on standard error; 128 + n after signal n, when `main` has saved what
it had. A job whose Snakemake, shell or supervisor has died ends itself.
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
from typing import Any, NoReturn, TextIO, TypeVar

from pydantic import BaseModel, ValidationError

from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import ancestors, arguments, is_snakemake, kill_descendants, start_time

SectionT = TypeVar("SectionT", bound=BaseModel)
WATCH_INTERVAL_S = 1.0
LAST_WORDS_S = 2
ENDING_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
SUPERVISOR = "scripts.on_gpus"


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
    end_with_ancestors()
    end_on_signals()
    try:
        main(None)
    except StageError as error:
        print(f"{name}: error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    sys.exit(0)


def end_on_signals() -> None:
    """The first SIGTERM, SIGINT or SIGHUP ends the stage through SystemExit, so that it saves; later ones are ignored."""

    def end(number: int, frame: object) -> NoReturn:
        for each in ENDING_SIGNALS:
            signal.signal(each, lambda *_: None)  # SIG_IGN makes Python complain about a signal that is on its way
        keep_printing()
        sys.exit(128 + number)

    for each in ENDING_SIGNALS:
        signal.signal(each, end)


def keep_printing() -> None:
    """From here on a print that fails (a full disk, a reader that is gone) ends nothing: there is something to save."""
    sys.stdout, sys.stderr = _Unbreakable(sys.stdout), _Unbreakable(sys.stderr)


class _Unbreakable:
    """A stream that swallows failures."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def end_with_ancestors() -> None:
    """Kills this process's children and itself within seconds once one of those that started it is gone.

    Watched are all ancestors up to Snakemake: a killed shell or supervisor leaves nobody who waits for this job, and a
    killed Snakemake leaves a shell that does. A stage typed by hand watches at most its supervisor.
    """
    watched = {pid: start_time(pid) for pid in _chain()}
    if not watched:
        return

    def watch() -> None:
        while all(start_time(pid) == born for pid, born in watched.items()):
            time.sleep(WATCH_INTERVAL_S)
        kill_descendants(os.getpid())
        signal.alarm(LAST_WORDS_S)  # whoever should read them may be gone, or stuck
        with contextlib.suppress(OSError, ValueError):
            print("what started this job is gone: it ends itself; finished rows are kept", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="end_with_ancestors", daemon=True).start()


def _chain() -> list[int]:
    above = ancestors(os.getpid())
    for last in (is_snakemake, lambda pid: SUPERVISOR in arguments(pid)):
        for index, pid in enumerate(above):
            if last(pid):
                return above[: index + 1]
    return []
