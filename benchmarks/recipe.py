"""Which training recipe gives the longest acceptance: the same rows and token budget, a table of changed settings.

In: a target, prompts and the ids to take of them, evaluation suites. Out: `{output}/results.jsonl`, a JSON line for each
step, `{output}/recipes.md` with the ablation table and `{output}/summary.json` with simulated against served acceptance.
Every pass of a recipe leaves a checkpoint, walked over validation rows, which choose one, and over the suites, which do not.
Finished steps are kept below `work`: the same command goes on where it ended.

    python -m benchmarks.recipe --target FOLDER --prompts a.jsonl b.jsonl.gz --ids ids.txt --suites eval_mt_bench.jsonl \\
        --work /dev/shm/recipe --output results --parallel 4
"""

import argparse
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import answered_prompts
from benchmarks.answered_prompts import shards_of, unfinished
from benchmarks.extraction_speed import target_of
from benchmarks.harness import Step, make_parser, run_one, run_steps
from scripts.eagle3.config import Draft, Target, Training, Vocabulary
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import on_cpu, visible_gpus
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json, write_text
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.target import text_config

# as `speculators train` was run for the baseline
BASE: dict[str, dict[str, Any]] = {
    "training": {
        **{"ttt_steps": 3, "learning_rate": 1e-3, "schedule": "linear", "warmup_fraction": 0.01, "loss": "kl_div"},
        **{"batch_tokens": 8192, "zero_stage": 1, "loggers": []},
    },
    "draft": {},
    "vocabulary": {"draft_vocab_size": 8192, "min_coverage": 0.0},
}
# name -> what is changed of BASE
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "baseline": {},
    "ttt5": {"training": {"ttt_steps": 5}},
    "ttt7": {"training": {"ttt_steps": 7}},
    "decay-0.8": {"training": {"step_loss_decay": 0.8}},
    "decay-0.9": {"training": {"step_loss_decay": 0.9}},
    "lk_hybrid": {"training": {"loss": "lk_hybrid"}},
    "ce": {"training": {"loss": "ce"}},
    "tv": {"training": {"loss": "tv"}},
    "lr-5e-4": {"training": {"learning_rate": 5e-4}},
    "lr-2e-3": {"training": {"learning_rate": 2e-3}},
    "lr-3e-3": {"training": {"learning_rate": 3e-3}},
    "cosine": {"training": {"schedule": "cosine"}},
    "wsd": {"training": {"schedule": "wsd"}},
    "batch-4096": {"training": {"batch_tokens": 4096}},
    "batch-2048": {"training": {"batch_tokens": 2048}},
    "batch-1024": {"training": {"batch_tokens": 1024}},
    "vocab-16384": {"vocabulary": {"draft_vocab_size": 16384}},
    "vocab-32000": {"vocabulary": {"draft_vocab_size": 32000}},
    "norm_before_fc": {"draft": {"norm_before_fc": True}},
    "plain-residual": {"draft": {"norm_before_residual": False}},
    "muon": {"training": {"optimizer": "muon"}},
}
COMBINED = "ttt5+lr-2e-3+cosine+batch-2048+lk_hybrid+norm_before_fc+vocab-16384"
# tokens that the draft is served with
SERVED_STEPS = 3
# the baseline's: six passes over 90 % of 1,502,854 tokens
TOKEN_BUDGET = 8_115_411
SERVED_FIRST, SERVED_BEST = "baseline", 3
# one H200, a guess to plan by: start and compilation; an optimiser step; tokens a second of a TTT step; a served checkpoint
START_S, OPTIMISER_S, STEP_TOKENS_PER_S, SERVED_S = 45, 0.03, 400_000, 75
LIMIT_FACTOR = 4


def changed(name: str, passes: int, vocab_size: int) -> dict[str, dict[str, Any]]:
    """BASE with the changes of the recipes that `name` joins by +: the sections that it is trained with.

    vocab_size: the target's, which no draft vocabulary exceeds.
    """
    sections = {section: dict(values) for section, values in BASE.items()}
    for part in name.split("+"):
        if part not in RECIPES:
            raise StageError(f"--recipes {name}: no recipe {part}; expected some of {' '.join(RECIPES)}, joined by +")
        for section, values in RECIPES[part].items():
            sections[section] |= values
    place = {"dtype": "float32", "zero_stage": 0} if on_cpu() else {"dtype": "bfloat16", "zero_stage": 1}
    sections["training"] |= {"segments": passes, **place}
    sections["vocabulary"]["draft_vocab_size"] = min(vocab_size, sections["vocabulary"]["draft_vocab_size"])
    return sections


def make_files(work: Path, folder: Path, target: Target, draft: Draft, vocabulary: Vocabulary, ttt_steps: int) -> DraftFiles:
    """The files that a draft is built from, by the stages themselves."""
    from scripts import build_vocab_mapping, draft_config

    files = DraftFiles(folder / "config.json", work / "head.safetensors", folder / "vocab/d2t.npy", folder / "vocab/t2d.npy")
    draft_config.run(target, draft, vocabulary, ttt_steps, files.config)
    build_vocab_mapping.run(vocabulary, target, work / "tokens", 1, answered_prompts.SHARDS, folder / "vocab")
    return files


def train(
    work: Path, recipe: str, training: dict[str, Any], draft: dict[str, Any], vocabulary: dict[str, Any], suites: list[str]
) -> dict[str, Any]:
    """Trains one recipe in one process; a checkpoint after each pass, and its simulated acceptance length."""
    from scripts.eagle3 import training as loop
    from scripts.eagle3 import zero
    from scripts.eagle3.draft import save_trainable
    from scripts.eagle3.packing import TrainingRows, open_shards
    from scripts.train_draft import start_draft

    target, folder, settings = target_of(work), work / "recipes" / recipe, Training(**training)
    files = make_files(work, folder, target, Draft(**draft), Vocabulary(**vocabulary), settings.ttt_steps)
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)

    def rows_of(kind: str, ttt_steps: int) -> TrainingRows:
        return TrainingRows(open_shards(shards_of(work, kind), layer_ids), ttt_steps, settings.batch_tokens)

    rows = rows_of("train", settings.ttt_steps)
    trained_tokens = settings.segments * int(rows.positions.sum())
    if trained_tokens > TOKEN_BUDGET:
        raise StageError(f"recipe {recipe}: {trained_tokens} training tokens, expected at most {TOKEN_BUDGET}: lower --passes")
    walked = {kind: rows_of(kind, SERVED_STEPS) for kind in ("val", *suites)}
    engine = start_draft(files, settings, zero.start_process_group())
    checkpoints, seconds, steps = [], 0.0, 0
    for number in range(settings.segments):
        segment = loop.plan_segment(rows, settings, number)
        began = time.perf_counter()
        figures = loop.train_segment(engine, rows, segment, settings, None)
        seconds, steps = seconds + time.perf_counter() - began, steps + len(segment.steps)
        save_trainable(zero.full_weights(engine) | engine.module.own_head(), folder / str(number) / "model.safetensors")
        simulated = {kind: simulate(engine, walked[kind], settings) for kind in walked}
        checkpoints.append({"segment": number, "loss": figures["loss"], "simulated": simulated})
        print(json.dumps(checkpoints[-1]), flush=True)
    best = max(checkpoints, key=lambda checkpoint: checkpoint["simulated"]["val"]["acceptance_length"])
    return {
        **{"trained_tokens": trained_tokens, "optimizer_steps": steps, "train_s": seconds},
        **{"coverage": read_json(folder / "vocab/coverage.json")["coverage"]["val"], "cut_rows": rows.cut},
        **{"checkpoints": checkpoints, "selected": best["segment"]},
    }


def simulate(engine: Any, rows: Any, settings: Training) -> dict[str, Any]:
    """The walk of the engine's draft over `rows` with as many tokens as are served, whatever it was trained with."""
    from scripts.eagle3 import training as loop

    trained_steps, engine.module.ttt_steps = engine.module.ttt_steps, SERVED_STEPS
    try:
        figures = loop.validate(engine, rows, settings.model_copy(update={"ttt_steps": SERVED_STEPS}))
    finally:
        engine.module.ttt_steps = trained_steps
    return {name: figures[name] for name in ("acceptance_length", "acceptance_by_position", "drafts")}


def serve(work: Path, recipe: str, segment: int, suites: list[str], max_tokens: int) -> dict[str, Any]:
    """Exports one checkpoint and lets vLLM decode the suites with it, as evaluate_method does."""
    from scripts import evaluate_method
    from scripts.eagle3.acceptance import Counters, acceptance
    from scripts.eagle3.files import sha256_file

    answered_prompts.use_small_engines()
    target, folder = target_of(work), work / "recipes" / recipe
    files = DraftFiles(folder / "config.json", work / "head.safetensors", folder / "vocab/d2t.npy", folder / "vocab/t2d.npy")
    weights, export = folder / str(segment) / "model.safetensors", folder / f"export-{segment}"
    export_checkpoint(target, files, weights, export, sha256_file(weights))
    results = folder / f"served-{segment}"
    places = work / "conversations/eval", suites, export / "store", results, answered_prompts.hardware(80)
    settings = answered_prompts.evaluation(max_tokens)
    evaluate_method.run(target, settings, "eagle3", export, work / "evaluation/baseline", *places)
    served = {}
    for suite in suites:
        record = read_json(results / f"{suite}.json")
        counters = Counters.from_record(record)
        served[suite] = acceptance(counters.drafts, counters.accepted_by_position)
        served[suite] |= {"drafts": counters.drafts, "identical": len(record["requests"]) - len(record["differences"])}
    return {"served": served}


def export_checkpoint(target: Target, files: DraftFiles, weights: Path, export: Path, identity: str) -> None:
    """The folder that vLLM serves, checked as export_draft checks it."""
    from scripts.eagle3.export import check_export, export_config, export_tensors, write_export, write_manifest
    from scripts.eagle3.target import fingerprint

    provenance = {"target": fingerprint(target), **files.identity(), "weights": identity, "layer_ids": target.aux_layer_ids}
    write_export(export, export_tensors(weights, files), export_config(target, files), "A benchmark's draft.\n", provenance)
    check_export(export, target, files, weights)
    write_manifest(export)


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {**answered_prompts.FUNCTIONS, "train": train, "serve": serve}


def plan_training(names: Sequence[str], suites: list[str], passes: int, vocab_size: int, parallel: int) -> list[Step]:
    """One step for each recipe."""
    steps: list[Step] = []
    for name in names:
        sections = changed(name, passes, vocab_size)
        settings, vocabulary = sections["training"], sections["vocabulary"]["draft_vocab_size"]
        seconds = START_S + OPTIMISER_S * TOKEN_BUDGET / settings["batch_tokens"]
        seconds += TOKEN_BUDGET * settings["ttt_steps"] * (1 + vocabulary / 65536) / STEP_TOKENS_PER_S
        arguments = {"recipe": name, **sections, "suites": suites}
        steps.append(Step("train", arguments, int(LIMIT_FACTOR * seconds), share(len(steps), parallel)))
    return steps


def share(number: int, parallel: int) -> dict[str, str]:
    """Steps that run side by side share the cores, and take turns with the GPUs."""
    gpus = (os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(visible_gpus())))).split(",")
    device = {"CUDA_VISIBLE_DEVICES": gpus[number % len(gpus)]} if len(gpus) > 1 else {}
    return {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // parallel)), **device}


def plan_serving(
    trained: Iterable[dict[str, Any]], chosen: Sequence[str] | None, asked: dict[str, Any], parallel: int
) -> list[Step]:
    """The checkpoints that are served: those named RECIPE or RECIPE:SEGMENT.

    None named: all of SERVED_FIRST, and the selected ones of the recipes that are best on the validation rows.
    """
    by_name = {result["recipe"]: result for result in trained}
    if chosen is None:
        ranked = sorted(by_name, key=lambda name: -selected(by_name[name])["simulated"]["val"]["acceptance_length"])
        first = by_name.get(SERVED_FIRST, {"checkpoints": []})["checkpoints"]
        chosen = [f"{SERVED_FIRST}:{checkpoint['segment']}" for checkpoint in first]
        chosen += [name for name in ranked if name != SERVED_FIRST][:SERVED_BEST]
    steps: list[Step] = []
    for text in chosen:
        name, _, segment = text.partition(":")
        if name not in by_name:
            raise StageError(f"--serve {text}: recipe {name} is not trained; name one of {', '.join(by_name) or 'none'}")
        number = int(segment) if segment else by_name[name]["selected"]
        arguments = {"recipe": name, "segment": number, **asked}
        steps.append(Step("serve", arguments, LIMIT_FACTOR * SERVED_S, share(len(steps), parallel)))
    return steps


def selected(result: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint that the validation rows chose."""
    return next(item for item in result["checkpoints"] if item["segment"] == result["selected"])


def results_of(work: Path, steps: list[Step]) -> list[dict[str, Any]]:
    """What the finished ones of `steps` returned."""
    paths = [answered_prompts.done_file(work, step.name, step.arguments) for step in steps]
    return [read_json(path) for path in paths if path.is_file()]


def summarize(trained: list[dict[str, Any]], served: list[dict[str, Any]], suites: list[str]) -> dict[str, Any]:
    """Simulated against served acceptance length over all served checkpoints, by suite: rank correlation, largest gap."""
    simulated = {(result["recipe"], item["segment"]): item["simulated"] for result in trained for item in result["checkpoints"]}
    summary = {}
    for suite in suites:
        points = [
            {
                **{"recipe": result["recipe"], "segment": result["segment"]},
                "simulated": simulated[result["recipe"], result["segment"]][suite]["acceptance_length"],
                "served": result["served"][suite]["acceptance_length"],
            }
            for result in served
        ]
        pairs = [(point["simulated"], point["served"]) for point in points]
        gaps = [abs(one - other) for one, other in pairs]
        summary[suite] = {
            "checkpoints": len(points),
            "rank_correlation": rank_correlation(*zip(*pairs, strict=True)) if len(pairs) > 1 else None,
            "largest_gap": max(gaps, default=None),
            "points": points,
        }
    return summary


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Spearman's; equal values share the mean of their ranks. None where one side does not vary."""

    def ranks(values: Sequence[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        numbers = np.array(values)
        below, equal = (numbers < numbers[:, None]).sum(1), (numbers == numbers[:, None]).sum(1)
        return below + (equal - 1) / 2

    if len(set(left)) == 1 or len(set(right)) == 1:
        return None
    return float(np.corrcoef(ranks(left), ranks(right))[0, 1])


def table(trained: list[dict[str, Any]], served: list[dict[str, Any]], suites: list[str]) -> str:
    """The ablation table in Markdown, best on the validation rows first: figures of each recipe's selected checkpoint."""
    in_service = {(result["recipe"], result["segment"]): result["served"] for result in served}
    heads = ["recipe", "steps", "tokens", "train s", "pass", "loss", "validation", *suites]
    heads += [f"{suite} served" for suite in suites]
    lines = [heads, ["---"] * len(heads)]
    for result in sorted(trained, key=lambda result: -selected(result)["simulated"]["val"]["acceptance_length"]):
        best = selected(result)
        measured = in_service.get((result["recipe"], best["segment"]))
        lines.append(
            [
                *(result["recipe"], str(result["optimizer_steps"]), str(result["trained_tokens"]), f"{result['train_s']:.0f}"),
                *(f"{best['segment'] + 1} of {len(result['checkpoints'])}", f"{best['loss']:.3f}"),
                *(f"{best['simulated'][kind]['acceptance_length']:.3f}" for kind in ("val", *suites)),
                *(f"{measured[suite]['acceptance_length']:.3f}" if measured else "" for suite in suites),
            ]
        )
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def show(steps: list[Step], what: str, parallel: int) -> None:
    """Says what comes, how long it should take and how long it may."""
    for step in steps:
        name, seconds = step.arguments.get("recipe", step.name), step.limit_s / LIMIT_FACTOR
        print(f"{what}: {name}, about {seconds:.0f} s, at most {step.limit_s} s", flush=True)
    total = sum(step.limit_s / LIMIT_FACTOR for step in steps) / max(parallel, 1)
    print(f"{what}: {len(steps)} steps, about {total:.0f} s together", flush=True)


def main() -> None:
    """Command line: see the top of the file."""
    parser = make_parser(__doc__)
    answered_prompts.add_options(parser)
    described = f"recipes, or several joined by +: {' '.join(RECIPES)}"
    parser.add_argument("--recipes", nargs="*", default=[*RECIPES, COMBINED], metavar="NAME", help=described)
    parser.add_argument("--passes", type=int, default=6, help="over the training rows; checkpoints of each recipe")
    parser.add_argument("--serve", nargs="*", metavar="RECIPE[:PASS]", help="checkpoints to serve, passes from 0")
    parser.add_argument("--parallel", type=int, default=4, help="recipes, and served checkpoints, at a time")
    options = parser.parse_args()
    work, output = options.work, options.output
    if options.one:
        run_one(options.one, work, answered_prompts.keeping(FUNCTIONS))
        return
    try:
        run(options, work, output)
    except StageError as error:
        parser.exit(1, f"{parser.prog}: error: {error}\n")


def run(options: argparse.Namespace, work: Path, output: Path) -> None:
    """Data one step after the other, then recipes, then served checkpoints; what is finished already is left out."""
    data = answered_prompts.steps(options)
    asked = {name: data[0].arguments[name] for name in ("suites", "max_tokens")}
    vocab_size = int(text_config(target_of(work))["vocab_size"])
    training = plan_training(options.recipes, asked["suites"], options.passes, vocab_size, options.parallel)

    def go(steps: list[Step], what: str, keep_going: bool, parallel: int) -> None:
        waiting = unfinished(work, steps)
        show(waiting, what, parallel)
        run_steps("benchmarks.recipe", waiting, work, output, keep_going, parallel)

    go(data, "data", False, 1)
    go(training, "recipe", True, options.parallel)
    trained = results_of(work, training)
    serving = plan_serving(trained, options.serve, asked, options.parallel)
    go(serving, "served", True, options.parallel)
    served = results_of(work, serving)
    write_json(output / "summary.json", summarize(trained, served, asked["suites"]))
    write_text(output / "recipes.md", table(trained, served, asked["suites"]))
    print((output / "recipes.md").read_text(encoding="utf-8"))
    for suite, figures in read_json(output / "summary.json").items():
        print(suite, {name: value for name, value in figures.items() if name != "points"})
    left = unfinished(work, [*chain(data, training, serving)])
    if left:
        raise StageError(f"{len(left)} steps failed, see {output}/*.log; the same command tries them again")


if __name__ == "__main__":
    main()
