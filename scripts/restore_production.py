"""Brings the production server back after a run was killed: `make restore-production`.

In: the state file in the working directory; no config, no lock of Snakemake. Out: the server as it was before the run,
Snakemake's stale lock and the state file removed. Does nothing where there is nothing to restore; refuses while the run lives.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import is_snakemake
from scripts.eagle3.production import STATE, bring_back, hold_server, read_state
from scripts.eagle3.stage import keep_printing, run_stage

# Jobs of a killed run end themselves within seconds.
JOBS_TIMEOUT_S = 60.0


def run(folder: Path) -> str:
    """Restores what a killed run has left in `folder`; returns what was done, as one line."""
    state = read_state(folder)
    if state is None:
        return f"nothing to restore: no run that was killed has left its state here; {_clear_lock(folder)}"
    status = state.run.status()
    if status == "alive":
        raise StageError(f"{state.run} is alive: it brings the server back when it ends; end it with: kill {state.run.pid}")
    if status == "elsewhere":
        raise StageError(
            f"{state.run} was started on another machine; run this there, or, where that machine is gone, start the"
            f" server and delete {folder / STATE}"
        )
    keep_printing()
    with hold_server(state.production):
        started = bring_back(folder, JOBS_TIMEOUT_S)
    server = "the production server is back" if started else "the production server had not been stopped"
    return f"{state.run} was killed: {server}, {_clear_lock(folder)}"


def _clear_lock(folder: Path) -> str:
    if any(is_snakemake(pid) and _folder_of(pid) == folder.resolve() for pid in _processes()):
        return "another Snakemake runs in this folder and keeps its lock"
    locks = list((folder / ".snakemake/locks").glob("*.lock"))
    for lock in locks:
        lock.unlink(missing_ok=True)
    return "Snakemake's lock is cleared" if locks else "Snakemake had left no lock"


def _processes() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _folder_of(pid: int) -> Path | None:
    try:
        return Path(os.readlink(f"/proc/{pid}/cwd"))
    except OSError:
        return None


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of `make restore-production`."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args(argv)
    print(run(Path.cwd()))


if __name__ == "__main__":
    run_stage(main)
