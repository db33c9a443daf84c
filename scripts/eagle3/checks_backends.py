"""Which kernels vLLM will choose for the target and its draft on this machine, asked of vLLM itself; no weights are read.

In: the target and how many GPUs a job gets. Out: lines of preflight's table, red where vLLM has no kernel. What a version of
vLLM (0.22 to 0.32) does not let us ask is skipped with the reason. Runs in preflight's own process only: vLLM may start CUDA.
"""

import contextlib
import importlib
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.eagle3.checks import Fault, Line, Skipped, check, first_line
from scripts.eagle3.config import Config, Target
from scripts.eagle3.files import read_json
from scripts.eagle3.target import resolve_folder, text_config

# the CPU build's latent attention takes one width of the cache only
CPU_MLA = "on CPUs vLLM's latent attention takes kv_lora_rank 512 with qk_rope_head_dim 64 only: use a GPU"
NO_KERNEL = "take another GPU, or a version of vLLM with a kernel for it"
EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")


def backend_lines(target: Target, config: Config, gpus: int, draft_head_dim: int) -> list[Line]:
    """vLLM's verdict on the engine's settings, then attention of target and draft, experts, quantisation."""
    made: list[Any] = []

    def settings() -> str:
        made.append(engine_config(target, config.rows.max_length + 1, max(1, gpus)))
        return f"accepted by vLLM: {made[0].model_config.architecture}, {device()}"

    lines = [check("machine", "engine settings", settings)]
    if not made:
        return lines
    vllm_config = made[0]

    def probe(name: str, question: Callable[[], str]) -> Line:
        return check("machine", name, lambda: _within(vllm_config, question))

    return [
        *lines,
        probe("attention of the target", lambda: target_attention(vllm_config, text_config(target))),
        probe("attention of the draft", lambda: attention(vllm_config, draft_head_dim, latent=False)),
        probe("experts", lambda: experts(vllm_config, target, max(1, gpus))),
        probe("quantisation", lambda: quantisation(vllm_config)),
    ]


def engine_config(target: Target, max_model_len: int, gpus: int) -> Any:
    """vLLM's whole configuration for the target, with all its own checks (dtype, division, quantisation, context)."""
    from vllm.engine.arg_utils import EngineArgs

    folder = resolve_folder(target)
    settings: dict[str, Any] = {
        "model": str(folder),
        "dtype": target.dtype,
        "trust_remote_code": target.trust_remote_code,
        "max_model_len": max_model_len,
        "max_num_batched_tokens": max(4096, max_model_len),
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "tensor_parallel_size": gpus,
    }
    if "vision_config" in read_json(folder / "config.json"):
        settings["language_model_only"] = True
    _spare_an_import(folder)
    try:
        return EngineArgs(**settings).create_engine_config()
    except Exception as error:  # pydantic's ValidationError, ValueError, and what the platform raises
        reasons = [line.strip() for line in str(error).splitlines() if line.strip()]
        told = next((line for line in reasons if "Value error" in line), reasons[0] if reasons else "")
        raise Fault(
            f"vLLM refuses the target's configuration: {type(error).__name__}: {told[:400]}",
            "mend what it names in the config or the profile, or take another version of vLLM",
        ) from error


def _spare_an_import(folder: Path) -> None:
    """vLLM looks at a class that it has not seen yet in a process of its own, which imports all of vLLM again: half a minute
    on two cores. In this process, which runs no engine, the class may just as well be imported here."""
    from vllm.model_executor.models import ModelRegistry

    for architecture in read_json(folder / "config.json").get("architectures") or []:
        with contextlib.suppress(Exception):  # then vLLM does it its own way
            ModelRegistry.register_model(architecture, ModelRegistry._try_load_model_cls(architecture))


def device() -> str:
    """What vLLM runs on, with its compute capability."""
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability()
    if capability is None:
        return str(current_platform.device_name)
    return f"{current_platform.get_device_name()}, SM{capability.major}{capability.minor}"


def target_attention(vllm_config: Any, text: Mapping[str, Any]) -> str:
    """The backend of the target's own layers; for latent attention that of its prefill too."""
    model = vllm_config.model_config
    found = attention(vllm_config, model.get_head_size(), latent=bool(model.use_mla))
    if not model.use_mla:
        return found
    cache = f"latent, cache of {text.get('kv_lora_rank')} + {text.get('qk_rope_head_dim')}"
    return f"{found} ({cache}); prefill {prefill(vllm_config)}"


def attention(vllm_config: Any, head_size: int, latent: bool) -> str:
    """Name of the backend that vLLM chooses; Fault where none takes this head."""
    select = find("vllm.v1.attention.selector", "get_attn_backend")
    model = vllm_config.model_config
    asked = {
        "head_size": head_size,
        "dtype": model.dtype,
        "kv_cache_dtype": vllm_config.cache_config.cache_dtype,
        "use_mla": latent,
        "num_heads": model.get_num_attention_heads(vllm_config.parallel_config),
    }
    what = f"{'latent ' if latent else ''}attention with heads of {head_size}"
    try:
        backend = select(**_accepted(select, asked))
    except (ValueError, NotImplementedError) as error:
        raise Fault(f"vLLM has no kernel on {device()} for {what}: {first_line(error)[:400]}", NO_KERNEL) from error
    sizes = list(backend.get_supported_head_sizes())
    if sizes and head_size not in sizes:
        # the CPU build does not ask its backend, and fails when it loads: "Head dimension ... not supported"
        raise Fault(f"{backend.get_name()} takes heads of {sizes}, not {head_size}", CPU_MLA if latent else NO_KERNEL)
    return str(backend.get_name())


def prefill(vllm_config: Any) -> str:
    """Backend of latent attention's prefill; a version without this choice is no fault."""
    try:
        select = find("vllm.v1.attention.backends.mla.prefill.selector", "get_mla_prefill_backend")
        return str(select(vllm_config).get_name())
    except Skipped as reason:
        return f"unknown ({reason})"
    except ValueError as error:
        raise Fault(f"vLLM has no prefill kernel on {device()}: {first_line(error)[:400]}", NO_KERNEL) from error


def experts(vllm_config: Any, target: Target, gpus: int) -> str:
    """The kernel of a mixture-of-experts layer, through vLLM's own choice for a layer of the target's sizes."""
    text = text_config(target)
    count = next((text[name] for name in EXPERTS if text.get(name)), None)
    if count is None:
        raise Skipped("the target has no experts")
    try:
        method = _expert_method(vllm_config, target, int(count), gpus)
    except NotImplementedError as error:
        raise Fault(f"vLLM has no kernel on {device()} for the experts: {first_line(error)[:400]}", NO_KERNEL) from error
    except Skipped:
        raise
    except Exception as error:  # the layer here is a stand-in, and not every version asks it the same things
        raise Skipped(f"this vLLM cannot be asked ({first_line(error)[:200]}); it chooses when it loads") from error
    # an enumeration, or a plain word before 0.23
    chosen = [getattr(value, "value", value) for name, value in sorted(vars(method).items()) if name.endswith("_backend")]
    named = [value for value in chosen if isinstance(value, str)]
    kernel = getattr(getattr(method, "experts_cls", None), "__name__", None)
    details = ", ".join([*named, *([kernel] if kernel else [])])
    return f"{count} experts: {type(method).__name__}" + (f" ({details})" if details else "")


def _expert_method(vllm_config: Any, target: Target, count: int, gpus: int) -> Any:
    """vLLM's method for a stand-in layer: of the real class and sizes, without weights."""
    import torch

    text = text_config(target)
    layer_class = find("vllm.model_executor.layers.fused_moe", "RoutedExperts")
    sizes = _moe_config(vllm_config, text, count, gpus)
    layer = layer_class.__new__(layer_class)
    torch.nn.Module.__init__(layer)
    # past the class's own properties: what the choice reads of a layer
    layer.__dict__.update(
        moe_config=sizes,
        hidden_size=text["hidden_size"],
        intermediate_size_per_partition=expert_width(text) // gpus,
        apply_router_weight_on_input=False,
        ckpt_gate_proj_name="gate_proj",
        ckpt_up_proj_name="up_proj",
        ckpt_down_proj_name="down_proj",
    )
    method = None
    if vllm_config.quant_config is not None:
        wrapper = "language_model." if "text_config" in read_json(resolve_folder(target) / "config.json") else ""
        prefix = f"{wrapper}model.layers.{text.get('first_k_dense_replace', 0)}.mlp.experts"
        method = vllm_config.quant_config.get_quant_method(layer, prefix)
    return method or find("vllm.model_executor.layers.fused_moe", "UnquantizedFusedMoEMethod")(sizes)


def expert_width(text: Mapping[str, Any]) -> int:
    """Inner size of one expert."""
    return int(text.get("moe_intermediate_size") or text["intermediate_size"])


def _moe_config(vllm_config: Any, text: Mapping[str, Any], count: int, gpus: int) -> Any:
    config = importlib.import_module("vllm.model_executor.layers.fused_moe.config")
    activation = find("vllm.model_executor.layers.fused_moe.activation", "MoEActivation").SILU
    alone = dict.fromkeys(("pcp_size", "dp_size", "ep_size", "sp_size"), 1)
    ranks = dict.fromkeys(("tp_rank", "pcp_rank", "dp_rank", "ep_rank"), 0)
    parallel = config.FusedMoEParallelConfig(
        tp_size=gpus,
        **alone,
        **ranks,
        use_ep=False,
        all2all_backend=vllm_config.parallel_config.all2all_backend,
        enable_eplb=False,
    )
    routing = config.RoutingMethodType
    grouped = text.get("topk_method") == "noaux_tc"
    asked = {
        "num_experts": count,
        "num_local_experts": count,
        "num_logical_experts": count,
        "experts_per_token": text["num_experts_per_tok"],
        "hidden_dim": text["hidden_size"],
        "intermediate_size": expert_width(text),
        "intermediate_size_per_partition": expert_width(text) // gpus,
        "activation": activation,
        "device": importlib.import_module("vllm.platforms").current_platform.device_type,
        "routing_method": routing.DeepSeekV3 if grouped else routing.Renormalize,
        "moe_parallel_config": parallel,
        "in_dtype": vllm_config.model_config.dtype,
    }
    return config.FusedMoEConfig(**_accepted(config.FusedMoEConfig, asked))


def quantisation(vllm_config: Any) -> str:
    """How the weights are stored. That this device and this number format go with it is asked by `engine_config`."""
    scheme = vllm_config.quant_config
    if scheme is None:
        raise Skipped("the target is not quantised")
    groups = getattr(scheme, "target_scheme_map", None) or {}
    weights = {_weights(group) for group in groups.values() if group and group.get("weights")}
    stored = f" ({', '.join(sorted(weights))})" if weights else ""
    return f"{scheme.get_name()}{stored}, on {device()}"


def _weights(group: Mapping[str, Any]) -> str:
    weights = group["weights"]
    kind = getattr(weights.type, "value", weights.type)
    return f"{kind}{weights.num_bits}" + (f" in groups of {weights.group_size}" if weights.group_size else "")


def _within(vllm_config: Any, question: Callable[[], str]) -> str:
    """Asks inside vLLM's configuration, which its selectors read from a global."""
    enter = find("vllm.config", "set_current_vllm_config")
    try:
        with enter(vllm_config):
            return question()
    except (ImportError, AttributeError, TypeError, KeyError) as error:
        raise Skipped(f"this vLLM cannot be asked ({first_line(error)[:200]})") from error


def find(module: str, name: str) -> Any:
    """A part of vLLM that may have moved."""
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Skipped(f"this vLLM cannot be asked ({first_line(error)[:200]})") from error


def _accepted(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this version takes."""
    known = inspect.signature(function).parameters
    return {name: value for name, value in arguments.items() if name in known}
