"""The GPUs of this machine: count, kind, memory against the target's weights, who uses them, driver.

In: what nvidia-smi says, filtered by CUDA_VISIBLE_DEVICES; the target's config.json and files. Out: lines of preflight's
table; `check_gpus` for the head of a GPU job. Nothing here starts CUDA in this process.
"""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from scripts.eagle3.checks import Fault, Line, Skipped, check
from scripts.eagle3.config import Target
from scripts.eagle3.gpus import FREE_MIB, ask_driver, visible_devices
from scripts.eagle3.target import text_config, weight_bytes

MIB = 1 << 20
# beside its share of the weights each GPU needs activations and a cache of a few rows: a rule of thumb
BESIDE_WEIGHTS_BYTES = 2e9
# oldest driver for a major version of CUDA, by NVIDIA's table of minor version compatibility
OLDEST_DRIVER = {12: 525, 13: 580}
FIELDS = ("index", "uuid", "name", "memory.total", "memory.used", "driver_version", "compute_cap")


@dataclass(frozen=True)
class Gpu:
    """One device as the driver names it; memory in MiB."""

    index: str
    uuid: str
    name: str
    total_mib: int
    used_mib: int
    driver: str
    capability: str


def list_gpus() -> list[Gpu]:
    """The GPUs that this process may use; none where there is no driver. StageError where the driver does not answer."""
    if shutil.which("nvidia-smi") is None:
        return []
    gpus = []
    for row in ask_driver(f"--query-gpu={','.join(FIELDS)}"):
        index, uuid, name, total, used, driver, capability = row
        if not total.isdigit() or not used.isdigit():
            raise Skipped(f"the driver tells no memory of GPU {index} ({name})")
        gpus.append(Gpu(index, uuid, name, int(total), int(used), driver, capability))
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        return gpus
    wanted = visible_devices()
    if any(device.startswith("MIG-") for device in wanted):
        raise Skipped("CUDA_VISIBLE_DEVICES names slices of a GPU (MIG)")
    return [gpu for gpu in gpus if any(device == gpu.index or gpu.uuid.startswith(device) for device in wanted)]


class Asked(NamedTuple):
    """What jobs of the target get, and who else may hold the GPUs.

    elsewhere: the jobs run on other machines, where `check_gpus` asks. production: there is a server that makes room.
    leased: indices of GPUs that jobs of this workflow hold now.
    """

    gpus: int
    min_gpus: int = 0
    memory_percent: int = 90
    elsewhere: bool = False
    production: bool = False
    leased: frozenset[str] = frozenset()


def gpu_lines(target: Target | None, asked: Asked) -> list[Line]:
    """All lines about the GPUs. `target` is None where its files are not here yet."""
    found: list[Gpu] = []

    def count() -> str:
        check_budget(asked)
        found.extend(list_gpus())
        if not found:
            check_named_devices(asked)
        return check_count(found, asked.gpus)

    lines = [check("machine", "GPUs", count)]
    if not found:
        return lines
    used = found[: asked.gpus]
    return [
        *lines,
        check("machine", "GPU memory", lambda: check_memory(target, used, asked.memory_percent)),
        check("machine", "GPUs in use", lambda: check_use(used, asked)),
        check("machine", "driver", lambda: check_driver(used)),
    ]


def check_gpus(target: Target, memory_percent: int = 90) -> None:
    """For the head of a GPU job: StageError where the GPUs granted to it cannot hold the target. Takes about a second.

    Who uses them is not asked: `bin/on-gpus` has waited for their memory.
    """
    try:
        found = list_gpus()
        if not found:
            return  # no nvidia-smi: the engine will say what is wrong
        check_kind(found)
        check_division(text_config(target), len(found), "target")
        check_memory(target, found, memory_percent)
        check_driver(found)
    except Skipped:
        return


def check_scheduler() -> str:
    """Slurm's commands are here, where the jobs are submitted from."""
    missing = [command for command in ("sbatch", "squeue", "sacct", "scancel") if shutil.which(command) is None]
    if missing:
        raise Fault(f"{', '.join(missing)} not on PATH", "start the run where Slurm's commands are, or take another profile")
    return "Slurm's commands are on PATH"


def check_budget(asked: Asked) -> None:
    """Jobs of the target get as many GPUs as the config wants."""
    if asked.gpus < asked.min_gpus:
        raise Fault(
            f"a job of the target gets {asked.gpus} GPUs, target.min_gpus is {asked.min_gpus}",
            "use a profile that grants as many, or lower target.min_gpus",
        )
    if asked.gpus == 0:
        raise Skipped("none is asked for")


def check_named_devices(asked: Asked) -> None:
    """Without a driver here: skipped where the jobs run elsewhere, or where enough devices are named nevertheless."""
    named = visible_devices()
    if asked.elsewhere:
        raise Skipped("none here: checked at the head of each GPU job")
    if len(named) >= asked.gpus:
        raise Skipped(f"CUDA_VISIBLE_DEVICES names {len(named)}, and there is no nvidia-smi to ask about them")


def check_count(found: Sequence[Gpu], gpus: int) -> str:
    """Enough GPUs, of one kind."""
    if len(found) < gpus:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible})"
        raise Fault(
            f"{len(found)} GPUs{shown}, a job of the target gets {gpus}",
            "see `nvidia-smi -L`: mend the driver or CUDA_VISIBLE_DEVICES, or lower `gpu` in the profile",
        )
    check_kind(found[:gpus])
    first = found[0]
    return f"{len(found)} x {first.name}, {first.total_mib} MiB each, compute capability {first.capability}"


def check_kind(gpus: Sequence[Gpu]) -> None:
    """Tensor parallelism waits for the slowest: all GPUs of a job are of one kind."""
    kinds = sorted({f"{gpu.name} of {gpu.total_mib} MiB" for gpu in gpus})
    if len(kinds) > 1:
        raise Fault(f"GPUs of several kinds: {', '.join(kinds)}", "grant GPUs of one kind, through CUDA_VISIBLE_DEVICES")


def check_division(text: Mapping[str, Any], gpus: int, whose: str) -> str:
    """vLLM divides the attention heads over the GPUs."""
    heads = text.get("num_attention_heads")
    if heads is None:
        raise Skipped(f"the {whose}'s config.json has no num_attention_heads")
    if heads % gpus:
        fitting = [count for count in range(gpus, 0, -1) if heads % count == 0]
        raise Fault(
            f"the {heads} attention heads of the {whose} cannot be divided over {gpus} GPUs", f"give its jobs {fitting[0]}"
        )
    return f"{heads} heads of the {whose} over {gpus}"


def check_memory(target: Target | None, gpus: Sequence[Gpu], memory_percent: int) -> str:
    """The engine's share of each GPU holds the GPU's share of the weights, and something beside it."""
    if target is None:
        raise Skipped("the target is not here yet")
    weights = weight_bytes(target)
    share = weights / len(gpus) + BESIDE_WEIGHTS_BYTES
    offered = min(gpu.total_mib for gpu in gpus) * MIB * memory_percent / 100
    said = (
        f"{weights / 1e9:.1f} GB of weights are {share / 1e9:.1f} GB on each of {len(gpus)} GPUs with what is beside them; the "
        f"engine gets {offered / 1e9:.1f} GB ({memory_percent} %)"
    )
    if share > offered:
        raise Fault(said, "give jobs of the target more GPUs or larger ones, or raise gpu_memory_percent in the profile")
    return said


def check_use(gpus: Sequence[Gpu], asked: Asked) -> str:
    """Nothing else holds the GPUs, but for a production server, which is stopped, and other jobs, which are waited for."""
    busy = [gpu for gpu in gpus if gpu.used_mib > FREE_MIB]
    if not busy:
        return f"free (at most {max(gpu.used_mib for gpu in gpus)} MiB in use)"
    used = ", ".join(f"GPU {gpu.index}: {gpu.used_mib} MiB" for gpu in busy)
    if all(gpu.index in asked.leased for gpu in busy):
        return f"{used} in use by jobs of this workflow: new ones wait for them"
    listed = ask_driver("--query-compute-apps=pid,process_name,used_memory")
    said = f"{used} in use (pid, name, MiB: {', '.join(' '.join(row) for row in listed) or 'no process is listed'})"
    if asked.production:
        return f"{said}: the production server is stopped before the first job"
    raise Fault(said, "end what holds them, or name it as `production:` in the config")


def check_driver(gpus: Sequence[Gpu]) -> str:
    """The driver is new enough for the CUDA that torch was built for."""
    import torch

    driver, cuda = gpus[0].driver, torch.version.cuda
    if cuda is None:
        raise Skipped(f"driver {driver}; torch {torch.__version__} is built without CUDA")
    oldest = OLDEST_DRIVER.get(int(cuda.split(".")[0]))
    if oldest is None:
        raise Skipped(f"driver {driver}; which one CUDA {cuda} needs is not known here")
    if int(driver.split(".")[0]) < oldest:
        raise Fault(f"driver {driver}, torch is built for CUDA {cuda}", f"install a driver of {oldest} or later")
    return f"{driver}, new enough for CUDA {cuda}"
