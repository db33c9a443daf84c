"""DeepSpeed around the draft: process group, engine, whole weights, and the state that the next segment resumes from.

In: the training modules and the `training:` section. Out: an engine whose step is AdamW or Muon on float32 masters, sharded as
`zero_stage` says. One process needs no launcher; several come from one (torchrun) with its usual variables.
"""

import contextlib
import io
import logging
import os
import socket
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from scripts.eagle3.config import Training
from scripts.eagle3.errors import StageError

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

# folder of the resume state in a checkpoint, and DeepSpeed's tag below it
STATE = "deepspeed"
TAG = "state"
# key of a parameter group: its learning rate is this times the scheduled one
RATE_FACTOR = "rate_factor"
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def processes() -> int:
    """How many processes the launcher started; 1 without one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def check_settings(settings: Training) -> None:
    """StageError where nodes have different numbers of processes, or the processes cannot share the micro-batches of a step."""
    nodes, here = (int(os.environ.get(name, "1")) for name in ("GROUP_WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if nodes > 1 and nodes * here != processes():
        raise StageError(
            f"{socket.gethostname()} has {here} GPUs, {nodes} nodes have {processes()}: expected as many on each; "
            "mend `gres` of train_draft in the profile, or leave that node out"
        )
    if settings.gradient_accumulation % processes():
        raise StageError(
            f"training.gradient_accumulation is {settings.gradient_accumulation}: expected a multiple of "
            f"{processes()}, the processes that share the micro-batches of one step; set it, or grant other GPUs"
        )


def start_process_group() -> torch.device:
    """Joins the launcher's process group, or makes one of this process alone; returns this process's device."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if dist.is_initialized():
        return device
    backend = "nccl" if cuda else "gloo"
    if "MASTER_ADDR" in os.environ and "WORLD_SIZE" in os.environ:
        dist.init_process_group(backend)
        return device
    # alone: no port that somebody else could take, no host name to look up
    if not cuda:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    return device


def start_engine(model: torch.nn.Module, settings: Training) -> "DeepSpeedEngine":
    """A DeepSpeed engine that trains every parameter of `model`, which is loaded already (never under `zero.Init`)."""
    # nothing is compiled at run time, and an accelerator that is named is not searched for
    os.environ.setdefault("DS_BUILD_OPS", "0")
    os.environ.setdefault("DS_ACCELERATOR", "cuda" if torch.cuda.is_available() else "cpu")
    import deepspeed

    # DeepSpeed 0.19.8 compiles a shared-memory all-reduce at the start of every CPU process; gloo has one
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    parameters, config = list(model.parameters()), engine_config(settings)
    optimizer = make_optimizer(parameters, settings)
    with contextlib.redirect_stdout(io.StringIO()):  # its optimisers print tables of memory
        engine, *_ = deepspeed.initialize(model=model, model_parameters=parameters, optimizer=optimizer, config=config)
    return engine


def make_optimizer(parameters: list[torch.nn.Parameter], settings: Training) -> torch.optim.Optimizer:
    """AdamW; with `optimizer: muon` DeepSpeed's Muon for the matrices and AdamW for the rest.

    As in speculators (`muon_adjust_lr_fn: match_rms_adamw`) Muon's updates get the size of AdamW's, 0.2 a weight whatever the
    shape. DeepSpeed scales them by sqrt(rows / columns) where that is above 1; what is missing, 0.2 sqrt(columns), multiplies
    the learning rate of a group for each number of columns.
    """
    adamw = {"lr": settings.learning_rate, "weight_decay": settings.weight_decay}
    if settings.optimizer == "adamw":
        return torch.optim.AdamW(parameters, **adamw)
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    matrices = [parameter for parameter in parameters if parameter.ndim == 2]
    groups: list[dict[str, Any]] = []
    for columns in sorted({matrix.shape[1] for matrix in matrices}):
        size = 0.2 * columns**0.5
        share = (settings.muon_learning_rate or settings.learning_rate) / settings.learning_rate
        groups.append(
            {
                "use_muon": True,
                "params": [matrix for matrix in matrices if matrix.shape[1] == columns],
                "weight_decay": settings.weight_decay / size,  # DeepSpeed multiplies it with the group's learning rate
                RATE_FACTOR: size * share,
            }
        )
    rest = [parameter for parameter in parameters if parameter.ndim != 2]
    groups.append({"use_muon": False, "params": rest, "betas": (0.9, 0.999), "eps": 1e-8, **adamw})
    return MuonWithAuxAdam(groups, adam_optimizer=torch.optim.AdamW)


def engine_config(settings: Training) -> dict[str, Any]:
    """DeepSpeed's configuration. Learning rate and accumulation boundaries are the loop's business."""
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.gradient_accumulation // processes(),
        "gradient_clipping": settings.max_grad_norm,
        "zero_optimization": {"stage": settings.zero_stage},
        "bf16": {"enabled": settings.dtype == "bfloat16"},
        "steps_per_print": 10**9,
    }
    if settings.dtype == "bfloat16":
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config


def set_learning_rate(engine: "DeepSpeedEngine", learning_rate: float) -> None:
    """For the next optimiser step."""
    for group in engine.optimizer.param_groups:
        group["lr"] = learning_rate * group.get(RATE_FACTOR, 1.0)


def step_optimizer(engine: "DeepSpeedEngine") -> float:
    """Clips, steps and clears the gradients; returns their norm before clipping, infinite where no step was made."""
    norm = None
    if not engine.zero_optimization():  # DeepSpeed clips there without telling the norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in engine.module.parameters() if p.grad is not None])
    muon = any(group.get("use_muon") for group in engine.optimizer.param_groups)
    # DeepSpeed would compile Muon, for each shape of a matrix, and nearly all of it is matrix products
    with torch.compiler.set_stance("force_eager") if muon else contextlib.nullcontext():
        engine.step()
    if not engine.was_step_applied():
        return float("inf")
    return float(engine.get_global_grad_norm() if norm is None else norm)


def full_weights(engine: "DeepSpeedEngine") -> dict[str, torch.Tensor]:
    """Name -> whole float32 master weight on the CPU; all ranks must call it."""
    from deepspeed.utils import safe_get_full_fp32_param

    weights = {}
    for name, parameter in engine.module.named_parameters():
        master = safe_get_full_fp32_param(parameter)
        weights[name] = (parameter if master is None else master).detach().to("cpu", torch.float32, copy=True)
    return weights


def save_state(engine: "DeepSpeedEngine", checkpoint: Path, position: dict[str, Any]) -> None:
    """Masters, optimiser state and `position` are below `checkpoint`/deepspeed when it returns; all ranks must call it."""
    engine.save_checkpoint(str(checkpoint / STATE), tag=TAG, client_state={"position": position}, save_latest=False)
    dist.barrier()


def load_state(engine: "DeepSpeedEngine", checkpoint: Path) -> dict[str, Any]:
    """Restores what `save_state` wrote; returns its position."""
    with contextlib.redirect_stdout(io.StringIO()):
        path, client_state = engine.load_checkpoint(str(checkpoint / STATE), tag=TAG)
    if path is None:
        raise StageError(f"{checkpoint / STATE}: DeepSpeed finds no state here; train this segment again")
    return client_state["position"]
