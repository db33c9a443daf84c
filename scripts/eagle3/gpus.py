"""GPUs of one job: which it may use, that no other job uses them, and that their memory is free.

In: how many are wanted, and what the scheduler or the driver shows. Out: a list of devices, as CUDA_VISIBLE_DEVICES takes
them, held under one flock file per device in a folder that all users and all clones on the machine share.
"""

import fcntl
import os
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO

from scripts.eagle3.errors import StageError

# not $TMPDIR, which differs between users and jobs
LEASES = Path("/tmp/eagle3-flow-gpus")
NO_DEVICES = ("", "-1", "NoDevFiles")
# an index, a UUID (GPU-, MIG-; older drivers write MIG-GPU-UUID/1/0), or a plain word for a pretended device
DEVICE = re.compile(r"0|[1-9][0-9]{0,3}|MIG-[A-Za-z0-9-]{1,80}(/[0-9]{1,3}){0,2}|(?=.*[A-Za-z])[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
NO_WORDS = ("all", "none", "void")  # they mean something to container runtimes only
FREE_MIB = 1024  # drivers and desktops keep a few hundred MiB
POLL_S = 0.2
MEMORY_POLL_S = 1.0


def visible_devices() -> list[str]:
    """What CUDA_VISIBLE_DEVICES names, else the indices that the driver lists; empty without a GPU.

    StageError where it names something that is no device, or a device twice.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        devices = [] if given.strip() in NO_DEVICES else [device.strip() for device in given.split(",")]
        for device in devices:
            if not DEVICE.fullmatch(device) or device.lower() in NO_WORDS:
                raise _no_device(f"{device[:40]!r} is no device")
            if devices.count(device) > 1:
                raise _no_device(f"device {device} is named {devices.count(device)} times")
        return devices
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True).stdout
    return re.findall(r"^GPU (\d+):", listed, re.MULTILINE)


def _no_device(found: str) -> StageError:
    return StageError(
        f"CUDA_VISIBLE_DEVICES on {socket.gethostname()}: {found}; expected different indices, GPU- or MIG- names, e.g. 0,1,2"
        " (`nvidia-smi -L` lists them)"
    )


@contextmanager
def granted(wanted: int, required: int, folder: Path = LEASES) -> Iterator[list[str]]:
    """Holds `wanted` GPUs while the block runs; StageError when there are fewer, or fewer than `required`.

    0 wanted means no reservation: whatever is visible. Under Slurm the job's own devices are taken as they are: there
    they may be numbered from 0 in each job, so that a number says nothing about the machine's GPUs.
    """
    pool = visible_devices()
    shown = f"{socket.gethostname()} shows {'GPUs ' + ','.join(pool) if pool else 'no GPU'}"
    if wanted > len(pool):
        raise StageError(f"{wanted} GPUs are asked for, {shown}; mend `gpu` in the profile or CUDA_VISIBLE_DEVICES")
    count = wanted or len(pool)
    if count < required:
        raise StageError(
            f"{count} GPUs were granted ({shown}), target.min_gpus is {required};"
            " raise `gpu` in the profile, or take a machine with more"
        )
    if wanted == 0 or ("SLURM_JOB_ID" in os.environ and wanted == len(pool)):
        yield pool
        return
    with lease(pool, wanted, folder) as devices:
        yield devices


@contextmanager
def lease(pool: Sequence[str], count: int, folder: Path = LEASES) -> Iterator[list[str]]:
    """Holds `count` devices of `pool` that no other process on this machine holds; waits for them, first come first served."""
    names = _lock_names(pool)
    if len(set(names.values())) < len(pool):
        raise _no_device(f"{','.join(pool)} name a device twice")
    held: dict[str, IO[str]] = {}
    with ExitStack() as files:
        # only who holds the order collects devices: two that each hold a half would wait for ever
        with open_shared(folder, "order") as order:
            told = False
            while not (take(order) and _collect(names, count, held, files, folder) == count):
                if not told:
                    print(f"waiting for {count} of the GPUs {','.join(pool)}: other jobs hold them ({folder}/*)", flush=True)
                told = True
                time.sleep(POLL_S)
        yield [device for device in pool if device in held]


def open_shared(folder: Path, name: str) -> IO[str]:
    """Opens a lock file that every user of the machine can lock; StageError where the file system does not let us."""
    path = folder / name
    try:
        if not folder.is_dir():
            folder.mkdir(exist_ok=True)
            folder.chmod(0o1777)
        if not path.exists():
            path.touch()
            path.chmod(0o666)
        return open(path, "r+", encoding="utf-8")  # without O_CREAT: Linux refuses it for another user's file there
    except PermissionError as error:
        raise StageError(f"{path}: cannot open the lock ({error.strerror}); its owner runs: chmod 666 {path}") from error
    except OSError as error:
        raise StageError(
            f"{path}: cannot open the lock ({error.strerror}); {folder} must be a folder with room on a writable disk"
        ) from error


def take(file: IO[str]) -> bool:
    """Locks the file unless another process has it; the lock ends with the file or the process."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    with suppress(OSError):  # for people to read: on a full disk the lock holds without it
        os.ftruncate(file.fileno(), 0)
        os.pwrite(file.fileno(), f"pid {os.getpid()} in {Path.cwd()}\n".encode(), 0)
    return True


def _collect(names: dict[str, str], count: int, held: dict[str, IO[str]], files: ExitStack, folder: Path) -> int:
    for device, name in names.items():
        if len(held) < count and device not in held:
            file = open_shared(folder, name)
            if take(file):
                held[device] = files.enter_context(file)
            else:
                file.close()
    return len(held)


def _lock_names(pool: Sequence[str]) -> dict[str, str]:
    """Device -> lock file. A GPU may be named by its index or its UUID: both are one lock."""
    by_uuid: dict[str, str] = {}
    if any(device.startswith("GPU-") for device in pool) and shutil.which("nvidia-smi"):
        rows = ask_driver("--query-gpu=uuid,index")
        by_uuid = {row[0]: row[1] for row in rows}
    full = {device: next((uuid for uuid in by_uuid if uuid.startswith(device)), device) for device in pool}
    return {device: f"gpu-{by_uuid.get(full[device], device).replace('/', '-')}" for device in pool}


def wait_for_memory(devices: Sequence[str], timeout_s: float) -> None:
    """Waits until next to nothing of the devices' memory is in use; StageError with the holders after `timeout_s`.

    Without a driver on this machine (pretended devices) there is nothing to ask. Slices of a GPU (MIG) are not asked about.
    """
    whole = [device for device in devices if not device.startswith("MIG-")]
    if not whole or shutil.which("nvidia-smi") is None:
        return
    selected = f"--id={','.join(whole)}"
    deadline = time.monotonic() + timeout_s
    told = False
    while busy := _memory_in_use(whole, selected):
        used = ", ".join(f"GPU {device}: {mib} MiB" for device, mib in busy.items())
        if time.monotonic() > deadline:
            rows = ask_driver("--query-compute-apps=pid,process_name,used_memory", selected)
            holders = ", ".join(" ".join(row) for row in rows) or "no process is listed"
            raise StageError(
                f"{used} in use on {socket.gethostname()} after {timeout_s:.0f} s, at most {FREE_MIB} MiB may be"
                f" (pid, name, MiB: {holders}); end what holds it, then run again"
            )
        if not told:
            print(f"waiting for memory: {used} in use", flush=True)
            told = True
        time.sleep(MEMORY_POLL_S)


def _memory_in_use(devices: Sequence[str], selected: str) -> dict[str, int]:
    rows = ask_driver("--query-gpu=memory.used", selected)
    used = {device: row[0] for device, row in zip(devices, rows, strict=False)}
    return {device: int(mib) for device, mib in used.items() if mib.isdigit() and int(mib) > FREE_MIB}


def ask_driver(*query: str) -> list[list[str]]:
    """Rows of fields that nvidia-smi answers; StageError where it fails."""
    done = subprocess.run(["nvidia-smi", *query, "--format=csv,noheader,nounits"], capture_output=True, text=True)
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())
        raise StageError(f"nvidia-smi failed: {said}; mend the driver, then run again")
    return [[field.strip() for field in line.split(",")] for line in done.stdout.splitlines() if line.strip()]
