"""What Linux says about processes: who started whom, since when, and how to end all that one has started.

In: process ids. Out: ancestors, descendants, identities that outlast the reuse of an id. Read from /proc, no dependency.
"""

import contextlib
import os
import signal
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

KILL_DEADLINE_S = 10.0
POLL_S = 0.05


def start_time(pid: int) -> str | None:
    """When the process started, in the kernel's ticks; None where there is none, or only its unread exit code."""
    fields = _stat_fields(pid)
    return fields[19] if fields else None


def parent(pid: int) -> int:
    """The parent's id; 0 for a process that is gone."""
    fields = _stat_fields(pid)
    return int(fields[1]) if fields else 0


def arguments(pid: int) -> list[str]:
    """The command line; empty for a process that is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def ancestors(pid: int) -> list[int]:
    """The parent, its parent and so on; without init."""
    found = []
    while (pid := parent(pid)) > 1:
        found.append(pid)
    return found


def is_snakemake(pid: int) -> bool:
    """Whether the program is Snakemake itself, and not a shell whose script text contains the word."""
    return any(os.path.basename(argument) == "snakemake" for argument in arguments(pid)[:3])


def is_stage(pid: int) -> bool:
    """Whether it runs a script of this project (`python -m scripts.NAME`)."""
    command = arguments(pid)
    return any(flag == "-m" and name.startswith("scripts.") for flag, name in pairwise(command))


def descendants(pid: int) -> list[int]:
    """All living processes below `pid`, nearest first."""
    children = _children()
    found, frontier = [], [pid]
    while frontier:
        frontier = [child for above in frontier for child in children[above]]
        found += frontier
    return found


def stages(pid: int) -> list[int]:
    """The stages that run below `pid`: of each branch only the topmost, which ends what it has started."""
    children = _children()
    found, frontier = [], [pid]
    while frontier:
        below = [child for above in frontier for child in children[above]]
        found += [child for child in below if is_stage(child)]
        frontier = [child for child in below if child not in found]
    return found


def kill_descendants(pid: int) -> list[int]:
    """SIGKILL for all below `pid` until none is left; returns those that even that has not ended in time."""
    deadline = time.monotonic() + KILL_DEADLINE_S
    while (left := descendants(pid)) and time.monotonic() < deadline:
        for each in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        time.sleep(POLL_S)
    return left


def _children() -> dict[int, list[int]]:
    children: dict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            children[parent(int(entry.name))].append(int(entry.name))
    return children


def _stat_fields(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # the name in parentheses may hold anything; Z: it has ended, and only its exit code waits to be read
    fields = text.rsplit(")", 1)[1].split()
    return None if fields[0] == "Z" else fields
