"""Checks everything that can be checked before the target is loaded, and prints one table: green, red or skipped.

In: the whole configuration, where the run writes, and what hardware a job gets. Out: the table on standard output; below
each red line what to do; exit 1 when there is a red one. Takes well under a minute, loads no model, leaves nothing behind.
"""

import argparse
import contextlib
import fcntl
import logging
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from scripts.draft_config import NORM_FLAGS, attention_shape, check_norms, compare_with_target, decoder_config
from scripts.eagle3.checks import Fault, Line, Skipped, check, refuse_red, table
from scripts.eagle3.checks_backends import backend_lines
from scripts.eagle3.checks_files import check_small_files
from scripts.eagle3.checks_gpus import MIB, Asked, check_division, check_scheduler, gpu_lines, list_gpus
from scripts.eagle3.checks_place import disk_lines, production_lines
from scripts.eagle3.checks_rendering import SAME_IDS, rendering_lines
from scripts.eagle3.checks_software import check_eagle3_interface, feature_lines, version_lines
from scripts.eagle3.checks_target import here, target_lines
from scripts.eagle3.checks_tokenizer import tokenizer_lines
from scripts.eagle3.config import Config, Draft, Method, Production, Target
from scripts.eagle3.conversations import check_source
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.gpus import LEASES
from scripts.eagle3.initial_head import check_initial_head
from scripts.eagle3.plain_head import check_plain_head
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import resolve_folder, text_config
from scripts.eagle3.training_cost import DraftShape, check_memory
from scripts.evaluate_method import read_third_party

ROOT = Path(__file__).parents[1]
SECTIONS = ("machine", "versions", "features", "target", "tokenizer", "draft", "conversations", "disk", "production")


def run(
    config: Config,
    run_folder: Path,
    storage: Path,
    asked: Asked,
    production: Production | None = None,
) -> list[Line]:
    """All lines, in the order of SECTIONS."""
    environment = os.environ.get("EAGLE3_ENV", "cpu")
    on_cpu = environment.startswith("cpu")
    files = small_files_line(config.target)
    target, lines = (None, [files]) if files.state == "red" else target_lines(config)
    machine = gpu_lines(target, asked)
    if asked.elsewhere:
        lines.append(check("machine", "scheduler", check_scheduler))
    lines += machine[:1] if on_cpu else machine  # devices that are only pretended, or not used, are counted
    lines += version_lines(environment, ROOT)
    blind = not on_cpu and not _sees_gpu()
    lines += feature_lines(environment, ROOT, blind)
    lines.append(check("conversations", "sources", lambda: check_sources(config)))
    lines += disk_lines(run_folder, storage)
    lines += production_lines(production)
    if target is None:
        reason = f"needs the target: {lines[0].found}"
        absent = (("tokenizer", "tokenizer"), ("draft", "draft"), ("machine", "kernels"), ("features", "EAGLE-3 interface"))
        lines += [Line(where, name, "skipped", reason) for where, name in absent]
    else:
        lines += tokenizer_lines(target, config)
        width = 1 if on_cpu else asked.gpus  # of the engine's tensor parallelism
        lines += draft_lines(target, config, width)
        lines += engine_lines(target, config, run_folder, width, blind)
        lines.append(check("draft", "training memory", lambda: check_training_memory(target, config, asked.elsewhere)))
        lines.insert(1, files)
    return sorted(lines, key=lambda line: SECTIONS.index(line.section))


def small_files_line(target: Target) -> Line:
    """Configuration, index and template of the target have their form: where not, nothing else can be asked about it."""

    def question() -> str:
        try:
            folder = resolve_folder(here(target))
        except StageError as error:
            raise Skipped("told by `folder`") from error
        return check_small_files(folder)

    return check("target", "small files", question)


def draft_lines(target: Target, config: Config, gpus: int) -> list[Line]:
    """The draft's architecture against the target's, and both against the GPUs that they are divided over."""
    return [
        check("target", "logits", lambda: check_logits(target)),
        check("draft", "architecture", lambda: check_architecture(target, config)),
        check("draft", "vocabulary", lambda: check_vocabulary(target, config)),
        check("draft", "tensor parallel", lambda: check_tensor_parallel(target, config, gpus)),
        *head_lines(target, config),
    ]


def head_lines(target: Target, config: Config) -> list[Line]:
    """Heads from elsewhere that the configuration names: what training starts from, what is measured beside ours."""
    lines = []
    if config.training.initial_head is not None:
        lines.append(check("draft", "initial head", lambda: check_start(target, config)))
    for name, method in config.evaluation.methods.items():
        if method.kind == "eagle3" and method.model is not None:
            lines.append(check("draft", f"head of {name}", partial(check_listed, target, method)))
    return lines


def check_start(target: Target, config: Config) -> str:
    """The head that training starts from has the draft's shape, and reads the same states."""
    path, layer = str(config.training.initial_head), decoder_config(text_config(target), config.draft)
    _, adapted = check_initial_head(path, target, layer, config.draft.model_dump())
    return f"{path}{': training adapts ' + ', '.join(adapted) if adapted else ''}"


def check_listed(target: Target, method: Method) -> str:
    """A third-party head fits the target, and it is known which states it reads."""
    found = read_third_party(target, method)
    assert found is not None
    head, ids = found
    return f"{head.folder}: {head.kind}, {head.draft_vocab_size} tokens, states {ids}"


def engine_lines(target: Target, config: Config, run_folder: Path, gpus: int, blind: bool) -> list[Line]:
    """What only vLLM can say about this target on this machine."""
    if blind:
        reason = "vLLM for CUDA, and no GPU here: it chooses when it loads"
        absent = (("machine", "kernels"), ("features", "EAGLE-3 interface"), ("draft", "norms"), ("tokenizer", SAME_IDS))
        return [Line(where, name, "skipped", reason) for where, name in absent]
    architecture = (read_json(resolve_folder(target) / "config.json").get("architectures") or [""])[0]
    try:
        head_dim = attention_shape(text_config(target), config.draft)[2]
    except Exception:  # whatever a wrong value leads to
        head_dim = 128  # the draft's own line is red
    return [
        check("features", "EAGLE-3 interface", lambda: check_eagle3_interface(architecture)),
        check("draft", "norms", lambda: check_served_norms(config.draft)),
        *backend_lines(target, config, gpus, head_dim),
        *rendering_lines(target, config, run_folder / "conversations"),
    ]


def check_logits(target: Target) -> str:
    """The target's logits are a plain RMSNorm and a linear head, which the draft's loss rebuilds."""
    text = text_config(target)
    check_plain_head(text, resolve_folder(target) / "config.json")
    return f"RMSNorm (epsilon {text['rms_norm_eps']:.3g}) and a linear head"


def check_architecture(target: Target, config: Config) -> str:
    """The decoder that `draft_config` will write."""
    try:
        compare_with_target(text_config(target), config.draft)
        layer = decoder_config(text_config(target), config.draft)
    except KeyError as error:
        raise Fault(f"the target's config.json has no {error.args[0]}", "this family is not supported as a target") from error
    return (
        f"{layer['num_hidden_layers']} layer of width {layer['hidden_size']}, {layer['num_attention_heads']} heads of "
        f"{layer['head_dim']} over {layer['num_key_value_heads']}, from states {target.aux_layer_ids}"
    )


def check_vocabulary(target: Target, config: Config) -> str:
    """The draft's vocabulary is a part of the target's."""
    whole, part = text_config(target)["vocab_size"], config.vocabulary.draft_vocab_size
    if part > whole:
        raise Fault(
            f"vocabulary.draft_vocab_size is {part}, the target's vocab_size {whole}", "lower vocabulary.draft_vocab_size"
        )
    return f"{part} of {whole} tokens"


def check_tensor_parallel(target: Target, config: Config, gpus: int) -> str:
    """The heads of target and draft can be divided over the GPUs of a job."""
    if gpus < 2:
        raise Skipped("the engine runs on one device")
    text = text_config(target)
    layer = decoder_config(text, config.draft)
    return f"{check_division(text, gpus, 'target')}, {check_division(layer, gpus, 'draft')}"


def check_training_memory(target: Target, config: Config, elsewhere: bool) -> str:
    """A training step fits on the smallest of the GPUs here, if the job gets them all: it then checks what it got."""
    gpus = list_gpus()
    if not gpus or elsewhere or os.environ.get("EAGLE3_ENV", "cpu").startswith("cpu"):
        raise Skipped("trained without a GPU of this machine: each training job checks its own")
    shape = DraftShape.of(
        {
            "transformer_layer_config": decoder_config(text_config(target), config.draft),
            "eagle_aux_hidden_state_layer_ids": target.aux_layer_ids,
            "draft_vocab_size": config.vocabulary.draft_vocab_size,
        }
    )
    return check_memory(shape, config.training, len(gpus), min(gpu.total_mib for gpu in gpus) * MIB)


def check_served_norms(draft: Draft) -> str:
    """The installed vLLM serves the draft's norms as they are trained."""
    check_norms(draft)
    return ", ".join(flag for flag in NORM_FLAGS if getattr(draft, flag)) or "none of the variants"


def check_sources(config: Config) -> str:
    """Files and folders of conversations are there; ids of data sets are fetched by the job that reads them."""
    sources = [*config.conversations.train, *config.conversations.evaluation.values()]
    for source in sources:
        check_source(source)
    return f"{len(sources)} sources"


def leased_gpus(folder: Path = LEASES) -> frozenset[str]:
    """Indices of the GPUs that jobs of this workflow hold on this machine (`bin/on-gpus`)."""
    held = set()
    for path in folder.glob("gpu-*"):
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                held.add(path.name.removeprefix("gpu-"))
    return frozenset(held)


def _sees_gpu() -> bool:
    try:
        return bool(list_gpus())
    except (StageError, Skipped):
        return False


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=section(Config), required=True, help="the whole configuration as JSON")
    parser.add_argument("--run", type=Path, required=True, help="results/NAME")
    parser.add_argument("--storage", type=Path, required=True, help="folder of the hidden states")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that a job of the target gets; 0: none is reserved")
    parser.add_argument("--min-gpus", type=int, default=0, help="target.min_gpus")
    parser.add_argument("--gpu-memory-percent", type=int, default=90, help="share of each GPU that the engine gets")
    parser.add_argument("--production", type=section(Production), help="section `production:` as JSON")
    parser.add_argument("--elsewhere", action="store_true", help="GPU jobs run on other machines (Slurm)")
    options = parser.parse_args(argv)
    # before any library is imported
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    logging.disable(logging.WARNING)  # of the libraries while they are imported: they would stand between the lines
    asked = Asked(
        options.gpus,
        options.min_gpus,
        options.gpu_memory_percent,
        options.elsewhere,
        options.production is not None,
        leased_gpus(),
    )
    lines = run(options.config, options.run, options.storage, asked, options.production)
    print(table(lines, colour=sys.stdout.isatty()))
    counts = {state: sum(line.state == state for line in lines) for state in ("green", "red", "skipped")}
    said = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    print(f"{options.config.run}: {said}", flush=True)
    refuse_red(f"preflight of {options.config.run}", lines)


if __name__ == "__main__":
    run_stage(main)
