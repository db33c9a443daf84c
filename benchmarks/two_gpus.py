"""What a second GPU in the host gives, and that it changes no result: extraction, training and serving on one and on two.

In: a folder in memory; two GPUs. Out: one JSON line per measurement in `{output}/results.jsonl`.

    python -m benchmarks.two_gpus --work /dev/shm/two --output results [--only train]
"""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import extraction_speed, kimi_k25_shape, random_target
from benchmarks.harness import RESULT, Step, make_parser, run_one, run_steps
from scripts import make_tiny_target
from scripts.eagle3.config import Training
from scripts.eagle3.engine import Hardware, load_engine, unload_engine
from scripts.eagle3.files import read_json

ONE, TWO = {"CUDA_VISIBLE_DEVICES": "0"}, {"CUDA_VISIBLE_DEVICES": "0,1"}
V1 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}
BATCH_TOKENS = 16384
PARITY_ROWS, MICRO_BATCHES, PACK = 64, 16, 8192


def make(work: Path, shape: str) -> dict[str, Any]:
    """Writes the target of one shape, in a process of its own: an engine on two GPUs must not start after CUDA has."""
    if shape.startswith("tiny-"):
        make_tiny_target.run(shape, work / shape / "target")
    else:
        random_target.place(shape, work / shape / "target")
    return {"shape": shape}


def parity(work: Path, shape: str, gpus: int) -> dict[str, Any]:
    """States of the same rows with this many GPUs, kept in `{work}/{shape}/states-{gpus}`."""
    from scripts.eagle3.extraction import extract_rows

    folder = work / shape
    rows = extraction_speed.some_rows(PARITY_ROWS * extraction_speed.LONGEST)[:PARITY_ROWS]
    states = folder / f"states-{gpus}"
    shutil.rmtree(states, ignore_errors=True)
    states.mkdir()
    began = time.perf_counter()
    found = extract_rows(extraction_speed.target_of(folder), Hardware(BATCH_TOKENS, 128), rows, "bfloat16", states)
    return {"shape": shape, "gpus": gpus, "rows": len(found), "seconds": time.perf_counter() - began}


def compare(work: Path, shape: str) -> dict[str, Any]:
    """The two sets of states: relative error per state, and how often both choose the same token."""
    import torch

    from scripts.eagle3.alignment import _Logits
    from scripts.eagle3.shards import Shard

    folder = work / shape
    logits = _Logits(extraction_speed.target_of(folder))
    one, two = ({path.name: Shard(path) for path in sorted((folder / f"states-{n}").glob("*.pt"))} for n in (1, 2))
    errors, same, total = [], 0, 0
    for name, shard in one.items():
        for mine, theirs in zip(shard, two[name], strict=True):
            a, b = mine.hidden_states.float(), theirs.hidden_states.float()
            errors.append(((a - b).norm(dim=-1) / a.norm(dim=-1).clamp_min(1e-12)).median(0).values)
            picked = slice(None, None, 16)
            same += int((logits(a[picked, -1]).argmax(-1) == logits(b[picked, -1]).argmax(-1)).sum())
            total += len(a[picked])
    by_row = torch.stack(errors)
    layers = next(iter(one.values())).layer_ids
    medians = {str(layer): float(value) for layer, value in zip(layers, by_row.median(0).values, strict=True)}
    worst = {str(layer): float(value) for layer, value in zip(layers, by_row.amax(0), strict=True)}
    return {"shape": shape, "rows": len(errors), "median": medians, "worst_row": worst, "argmax_agreement": same / total}


def extract(work: Path, shape: str, tokens: int, store: str) -> dict[str, Any]:
    """Tokens per second of the extraction on the visible GPUs; `store`: the name of its folder below the shape's."""
    folder = work / shape
    speed = extraction_speed.extract(folder, tokens, BATCH_TOKENS, str(folder / store), "bfloat16")
    return {"shape": shape, **speed}


def side_by_side(work: Path, shape: str, tokens: int) -> dict[str, Any]:
    """Two extractions at once, each on a GPU of its own."""
    jobs = []
    for gpu in "01":
        step = json.dumps(["extract", {"shape": shape, "tokens": tokens, "store": f"beside-{gpu}"}])
        command = [sys.executable, "-m", "benchmarks.two_gpus", "--work", str(work), "--output", str(work), "--one", step]
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpu}
        jobs.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True))
    found = [
        json.loads(line.removeprefix(RESULT))
        for job in jobs
        for line in job.communicate()[0].splitlines()
        if line.startswith(RESULT)
    ]
    if len(found) != len(jobs):
        raise RuntimeError(f"{len(found)} of {len(jobs)} extractions ended with a result")
    speeds = [each["tokens_per_s"] for each in found]
    return {
        "shape": shape,
        "tokens": tokens,
        "tokens_per_s": sum(speeds),
        "each": speeds,
        "gb_per_s": [each["gb_per_s"] for each in found],
    }


def train(work: Path, zero_stage: int, dtype: str, gpus: int) -> dict[str, Any]:
    """Optimiser steps at Kimi-K2.5's draft width over the same rows: losses, tokens per second, memory of each GPU."""
    folder = work / "kimi-k2.5"
    prepare_rows(folder)
    command = [sys.executable, "-m", "scripts.per_gpu", "benchmarks.two_gpus", "--work", str(folder), "--output", str(folder)]
    command += ["--one", json.dumps(["train_rank", {"zero_stage": zero_stage, "dtype": dtype}])]
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    found = [json.loads(line.split(RESULT, 1)[1]) for line in run.stdout.splitlines() if RESULT in line]
    if run.returncode or len(found) != gpus:
        raise RuntimeError(f"exit code {run.returncode}, {len(found)} results: {run.stdout[-3000:]}")
    found.sort(key=lambda each: each["rank"])
    first = {name: found[0][name] for name in ("losses", "tokens_per_s", "trained_parameters")}
    return {"zero_stage": zero_stage, "dtype": dtype, "gpus": gpus, **first, "peak_gb": [each["peak_gb"] for each in found]}


def prepare_rows(folder: Path) -> None:
    """A shard of random states, one row per micro-batch, and the draft's files; once."""
    import torch

    from scripts.eagle3.rows import row_key
    from scripts.eagle3.shards import StateRow, write_shard

    kimi_k25_shape.draft_files(folder, folder / "train", kimi_k25_shape.DRAFTS["llama"])
    if (folder / "rows.pt").is_file():
        return
    hidden, layers = random_target.WIDTHS["hidden_size"], [*kimi_k25_shape.AUX, 8]
    rows, generator = [], torch.Generator("cuda").manual_seed(0)
    for number in range(MICRO_BATCHES):
        ids = torch.from_numpy(np.random.default_rng(number).integers(0, 1000, PACK + 1, dtype=np.int32))
        states = torch.randn(PACK + 1, len(layers), hidden, dtype=torch.bfloat16, device="cuda", generator=generator).cpu()
        rows.append(StateRow(row_key(ids.numpy()), ids, torch.arange(PACK + 1) > 0.4 * PACK, states))
    write_shard(folder / "rows.pt", rows, layers, {})


def train_rank(work: Path, zero_stage: int, dtype: str) -> dict[str, Any]:
    """One process of `train`."""
    import torch
    import torch.distributed as dist

    from scripts.eagle3 import training, zero
    from scripts.eagle3.packing import TrainingRows, open_shards
    from scripts.train_draft import start_draft

    settings = Training(
        **{"segments": 1, "ttt_steps": 4, "batch_tokens": PACK, "gradient_accumulation": 2, "learning_rate": 1e-4},
        **{"dtype": dtype, "zero_stage": zero_stage, "loggers": []},
    )
    files = kimi_k25_shape.draft_files(work, work / "train", kimi_k25_shape.DRAFTS["llama"])
    engine = start_draft(files, settings, zero.start_process_group())
    trained = sum(getattr(parameter, "ds_numel", parameter.numel()) for parameter in engine.module.parameters())
    rows = TrainingRows(open_shards([work / "rows.pt"], [*kimi_k25_shape.AUX, 8]), settings.ttt_steps, PACK)
    records: list[dict[str, Any]] = []

    class Log:
        def write(self, record: dict[str, Any], *_: Any) -> None:
            records.append(record)

    log = Log() if dist.get_rank() == 0 else None
    training.train_segment(engine, rows, training.plan_segment(rows, settings, 0), settings, log)  # type: ignore[arg-type]
    speeds = sorted(record["tokens_per_s"] for record in records[2:])
    peak = {"rank": dist.get_rank(), "peak_gb": torch.cuda.max_memory_allocated() / 1e9, "trained_parameters": trained}
    dist.barrier()
    dist.destroy_process_group()
    return {
        **peak,
        "losses": [record["loss"] for record in records],
        "tokens_per_s": speeds[len(speeds) // 2] if speeds else None,
    }


def head(work: Path) -> dict[str, Any]:
    """A head for tiny-llama that knows its rows by heart, made and served on one GPU by scripts.canary."""
    from scripts import canary
    from scripts.collect_conversations import run as collect
    from scripts.eagle3.config import Conversations, Draft, Parts, Source

    train, suite = Source(path="config/data/train/questions.jsonl"), Source(path="config/data/eval/everyday.jsonl", limit=2)
    collect(
        Conversations(train=[train], evaluation={"everyday": suite}, validation_fraction=0.4), Parts(), work / "conversations"
    )
    target = extraction_speed.target_of(work / "tiny-llama")
    made = canary.Canary(target, Draft(), work / "canary", Hardware(8192, 32))
    return canary.run(made, work / "conversations/val/shard-0.parquet")


def served(work: Path, gpus: int) -> dict[str, Any]:
    """The head of `head` again, with the target on this many GPUs: acceptance length, and outputs like the baseline's."""
    from scripts import evaluate_method
    from scripts.eagle3.config import Evaluation

    made, results = work / "canary", work / f"served-{gpus}"
    shutil.rmtree(results, ignore_errors=True)
    target, evaluation = extraction_speed.target_of(work / "tiny-llama"), Evaluation(max_tokens=96, max_num_seqs=10)
    found = {}
    for method in ("baseline", "eagle3"):
        baseline = results / "baseline" if method == "eagle3" else None
        where = made / "conversations/eval", ["canary"], results / "store", results / method
        evaluate_method.run(target, evaluation, method, made / "export", baseline, *where, Hardware(4096, 10))
        found[method] = read_json(results / method / "canary.json")
    counted = found["eagle3"]
    length = 1 + sum(counted["accepted_by_position"]) / counted["drafts"]
    return {"gpus": gpus, "drafts": counted["drafts"], "acceptance_length": length, "differences": len(counted["differences"])}


def draft_weights(work: Path, size: int | None) -> dict[str, Any]:
    """Shapes of the draft's largest weights on each of two GPUs, with `draft_tensor_parallel_size` as given."""
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    speculative: dict[str, Any] = {"method": "eagle3", "num_speculative_tokens": 3, "model": str(work / "canary/export")}
    if size:
        speculative["draft_tensor_parallel_size"] = size
    target = extraction_speed.target_of(work / "tiny-llama")
    llm = load_engine(target, Hardware(4096, 8), max_model_len=1024, eager=True, speculative=speculative)
    answers = llm.collective_rpc(_shapes)
    unload_engine(llm)
    return {"draft_tensor_parallel_size": size, "by_gpu": answers}


def _shapes(worker: Any) -> dict[str, list[int]]:
    drafter = getattr(worker.model_runner, "drafter", None) or worker.model_runner.speculator
    return {name: list(parameter.shape) for name, parameter in drafter.model.named_parameters() if parameter.ndim > 1}


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    **{"make": make, "parity": parity, "compare": compare, "extract": extract, "side_by_side": side_by_side},
    **{"train": train, "train_rank": train_rank, "head": head, "served": served, "draft_weights": draft_weights},
}


def plan(only: list[str], shapes: list[str], tokens: int) -> list[Step]:
    """The measurements in order."""
    steps = []
    for shape in shapes:
        steps.append(Step("make", {"shape": shape}, 120, ONE))
        if shape != "kimi-k2.5":  # whose random weights are drawn by each GPU for itself: another target on two than on one
            steps += [
                Step("parity", {"shape": shape, "gpus": 1}, 180, ONE | V1),
                Step("parity", {"shape": shape, "gpus": 2}, 180, TWO | V1),
            ]
            steps.append(Step("compare", {"shape": shape}, 120))
        if shape in random_target.SHAPES:
            size = {"shape": shape, "tokens": tokens}
            steps.append(Step("extract", {**size, "store": "on-one"}, 180, ONE | V1))
            steps.append(Step("extract", {**size, "store": "on-two"}, 180, TWO | V1))
            steps.append(Step("side_by_side", size, 240, V1))
    steps.append(Step("make", {"shape": "kimi-k2.5"}, 120, ONE))
    for stage, dtype in ((1, "bfloat16"), (2, "bfloat16"), (3, "bfloat16"), (0, "float32")):
        alone = [Step("train", {"zero_stage": stage, "dtype": dtype, "gpus": 1}, 240, ONE)] if stage in (0, 1) else []
        steps += [*alone, Step("train", {"zero_stage": stage, "dtype": dtype, "gpus": 2}, 240, TWO)]
    steps += [Step("make", {"shape": "tiny-llama"}, 60, ONE), Step("head", {}, 300, ONE)]
    steps += [Step("served", {"gpus": 1}, 240, ONE), Step("served", {"gpus": 2}, 240, TWO)]
    steps += [Step("draft_weights", {"size": size}, 180, TWO | V1) for size in (None, 1)]
    return [step for step in steps if step.name in only]


def main() -> None:
    """Command line: see the top of the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--shapes", nargs="+", default=["llama-8b", "tiny-kimi", "kimi-k2.5"])
    parser.add_argument("--tokens", type=int, default=500_000)
    options = parser.parse_args()
    if options.one:
        random_target.register()  # the engine's other processes are forked from this one
        run_one(options.one, options.work, FUNCTIONS)
        return
    steps = plan(options.only, options.shapes, options.tokens)
    run_steps("benchmarks.two_gpus", steps, options.work, options.output, options.keep_going)


if __name__ == "__main__":
    main()
