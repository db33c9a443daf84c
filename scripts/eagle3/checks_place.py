"""Where a run writes, and the production server that makes room for it.

In: the run's and the states' folder, plan.json where `plan` has been run; `production:` of the config. Out: lines of
preflight's table. Nothing is started or stopped, and nothing stays written.
"""

import errno
import os
import shlex
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.eagle3.checks import Fault, Line, Skipped, check
from scripts.eagle3.config import Production
from scripts.eagle3.files import existing_parent, read_json
from scripts.eagle3.production import is_healthy, is_here

# without a plan: less than this is no place for any run (the demo writes 1.5 GB)
LEAST_BYTES = 2e9
# what only a shell knows
SHELL_WORDS = ("cd", "if", "for", "while", "until", "source", ".", "exec", "eval", "set", "export", "trap", "ulimit", "umask")
PLAN = "snakemake ... plan"


def disk_lines(run: Path, storage: Path) -> list[Line]:
    """The run's folder, and that of the hidden states: writable, with room for what the plan says."""
    return [
        check("disk", "run folder", lambda: check_folder(run, run)),
        check("disk", "hidden states", lambda: check_folder(storage, run)),
    ]


def check_folder(folder: Path, run: Path) -> str:
    """The folder (or the nearest above it that exists) can be written to, and its disk holds what the plan needs there."""
    place = existing_parent(folder)
    if not place.is_dir():
        raise Fault(f"{place} is a file, {folder} should be a folder", "move it, or name another folder")
    try:
        with tempfile.NamedTemporaryFile(prefix=".preflight-", dir=place):
            pass
    except OSError as error:
        if error.errno == errno.EROFS:
            raise Fault(f"{place} lies on a disk that is mounted read-only", "mount it writable, or name another") from error
        raise Fault(
            f"{place} cannot be written to ({error.strerror})",
            f"let {_user()} write there (chown, chmod), or name another folder",
        ) from error
    free = shutil.disk_usage(place).free
    needed = planned_bytes(place, run)
    said = f"{place}: writable, {free / 1e9:.1f} GB free"
    if needed is None and free < LEAST_BYTES:
        raise Fault(f"{said}, at least {LEAST_BYTES / 1e9:.0f} GB are wanted", f"make room; `{PLAN}` says how much a run needs")
    if needed is None:
        return f"{said}; not held against a plan (`{PLAN}` makes one)"
    if free < needed:
        raise Fault(f"{said}, plan.json says that {needed / 1e9:.1f} GB more are needed", "make room, or plan a smaller run")
    return f"{said}, {needed / 1e9:.1f} GB are needed by plan.json"


def planned_bytes(place: Path, run: Path) -> float | None:
    """What plan.json still needs on the disk of `place`; None without a plan for it."""
    path = run / "plan.json"
    if not path.is_file():
        return None
    device = os.stat(place).st_dev
    disks = read_json(path).get("disks", [])
    needed = [disk["needed"] for disk in disks if os.stat(existing_parent(Path(disk["path"]))).st_dev == device]
    return sum(needed) if needed else None


def production_lines(production: Production | None) -> list[Line]:
    """Its commands can be found, and whether it is up."""

    def absent() -> str:
        raise Skipped("none in the config")

    if production is None:
        return [check("production", "server", absent)]
    return [
        check("production", "stop command", _command(production, "stop", production.stop)),
        check("production", "start command", _command(production, "start", production.start)),
        check("production", "server", lambda: server_state(production)),
    ]


def server_state(production: Production) -> str:
    """Up or down: both are in order before a run."""
    up = is_healthy(production.health)
    return f"{production.health} {'answers: it is stopped before the first GPU job' if up else 'does not answer: it is down'}"


def _command(production: Production, name: str, command: str) -> Callable[[], str]:
    def ask() -> str:
        if not is_here(production.host):
            raise Skipped(f"for {production.host}, which is not this machine")
        word = first_word(command)
        if word is None:
            raise Skipped(f"a shell expression, not looked into: {command}")
        if shutil.which(word) is None:
            raise Fault(f"{word} is no command here ({command})", f"mend production.{name} in the config")
        return command

    return ask


def first_word(command: str) -> str | None:
    """The program that a shell command starts with, where that is a plain word."""
    try:
        words = shlex.split(command, comments=True)
    except ValueError:
        raise Fault(f"the shell cannot read it: {command}", "mend its quotes") from None
    if not words:
        raise Fault("it is empty", "name the command")
    plain = all(character.isalnum() or character in "._-+/~" for character in words[0])
    shell_word = words[0] in (
        "cd",
        "if",
        "for",
        "while",
        "source",
        ".",
        "exec",
        "true",
        "test",
        "exit",
        "kill",
        "set",
        "export",
    )
    return os.path.expanduser(words[0]) if plain and not shell_word else None


def _user() -> str:
    return os.environ.get("USER") or f"user {os.getuid()}"
