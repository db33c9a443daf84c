"""Runs one command on GPUs of its own and leaves no process behind: what `bin/on-gpus` starts in GPU jobs.

In: how many GPUs the job reserves, how many the target needs, the command. Out: the command's exit code (128 + n after
signal n). Before it, in this order: GPUs are granted, the production server is stopped, the GPUs' memory is free.
"""

import argparse
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scripts.eagle3.gpus import granted, wait_for_memory
from scripts.eagle3.processes import kill_descendants
from scripts.eagle3.production import room_for_job
from scripts.eagle3.stage import ENDING_SIGNALS, run_stage

MEMORY_TIMEOUT_S = 600.0
PR_SET_CHILD_SUBREAPER = 36


def run(gpus: int, min_gpus: int, command: Sequence[str]) -> int:
    """Runs `command` on `gpus` GPUs (0: whatever is visible, nothing reserved) and returns its exit code.

    Raises StageError, and starts nothing, when fewer GPUs than `min_gpus` are granted, when the production server does not
    stop, or when other processes keep the memory of the GPUs.
    """
    with granted(gpus, min_gpus) as devices, room_for_job(Path.cwd()) as server:
        environment = dict(os.environ)
        if devices:
            print(f"GPUs {','.join(devices)}: {len(devices)} of {socket.gethostname()}", flush=True)
        if gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ",".join(devices)
            environment["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"  # as the driver numbers them
        if (gpus or server) and not environment.get("EAGLE3_ENV", "cpu").startswith("cpu"):
            wait_for_memory(devices, server.timeout if server else MEMORY_TIMEOUT_S)
        return supervise(command, environment)


def supervise(command: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the command, passes ending signals on to it as SIGTERM, and kills what it leaves behind, however it ends."""
    # orphans of the command become children of this process, whatever session they are in
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # inherited: Ctrl-C reaches the command once, and from here
        child = subprocess.Popen(command, env=environment)

        def pass_on(*_: object) -> None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGTERM)

        for each in ENDING_SIGNALS:
            signal.signal(each, pass_on)
        code = child.wait()
        return code if code >= 0 else 128 - code
    finally:
        left = kill_descendants(os.getpid())
        if left:
            print(f"on_gpus: processes {left} cannot be killed; see `ps`", file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of bin/on-gpus."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gpus",
        type=int,
        required=True,
        help="GPUs to reserve; 0: those that Slurm gave this job here, else what is visible, reserved from nobody",
    )
    parser.add_argument("--min-gpus", type=int, required=True, help="fewer than this many are refused")
    parser.add_argument("command", nargs="+", help="after --: what to run")
    options = parser.parse_args(argv)
    # a job over several nodes asks Slurm for GPUs of each node (gres), not for a number (gpu)
    gpus = options.gpus or int(os.environ.get("SLURM_GPUS_ON_NODE", "0"))
    sys.exit(run(gpus, options.min_gpus, options.command))


if __name__ == "__main__":
    run_stage(main)
