"""What a target of Kimi-K2.5's widths takes on one large GPU, stage by stage, with few layers and random weights.

In: how many layers; one GPU of 141 GB holds eight with all 384 experts in INT4. Out: one JSON line per measurement in
`{output}/results.jsonl`, and a table. Each measurement is a process of its own with a time limit; the first failure ends it.

    python -m benchmarks.kimi_k25_shape --work /dev/shm/k25 --output results [--layers 8] [--experts 384] [--bfloat16]
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import random_target
from scripts.eagle3.batches import TokenRow, make_row, plan_batches
from scripts.eagle3.config import Draft, Target, Training, Vocabulary
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import Hardware, device_name, engine_version, load_engine, unload_engine
from scripts.eagle3.files import read_json, sha256_file, write_json

AUX = [2, 4, 5]
DRAFTS = {
    "llama": Draft(num_attention_heads=64, num_key_value_heads=64, head_dim=128, intermediate_size=18432),
    "gqa": Draft(num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=18432),
}
DRAFT_VOCAB = 32000
BATCH_TOKENS = 16384
LONGEST = 4096
MASKED = 0.6
STEPS, WARM_STEPS = 5, 2


def target_of(work: Path) -> Target:
    """The target that `make` has written."""
    layers = read_json(work / "target/config.json")["text_config"]["num_hidden_layers"]
    return Target(path=str(work / "target"), num_hidden_layers=layers, aux_layer_ids=AUX, trust_remote_code=True)


def some_rows(tokens: int) -> list[TokenRow]:
    """Rows of 512 to LONGEST tokens, of random ids, `tokens` in all."""
    random = np.random.default_rng(0)
    rows = []
    while tokens > 0:
        length = min(tokens, int(random.integers(512, LONGEST + 1)))
        rows.append(make_row(random.integers(0, 1000, max(length, 2)).tolist()))
        tokens -= length
    return rows


def batches_of(rows: list[TokenRow]) -> list[list[TokenRow]]:
    """As the extraction plans them."""
    by_key = {row.key: row for row in rows}
    return [[by_key[key] for key in batch.keys] for batch in plan_batches([rows], BATCH_TOKENS, 128)]


def prefill(work: Path, tokens: int, eager: bool) -> dict[str, Any]:
    """The plain engine on the batches of the extraction."""
    from vllm import SamplingParams

    batches = batches_of(some_rows(tokens))
    hardware = Hardware(BATCH_TOKENS, 128)
    options: dict[str, Any] = {"enable_chunked_prefill": False} if eager else {}
    began = time.perf_counter()
    llm = load_engine(target_of(work), hardware, max_model_len=LONGEST + 1, eager=eager, **options)
    loaded = time.perf_counter() - began
    parameters = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

    def run(batch: list[TokenRow]) -> None:
        llm.generate([{"prompt_token_ids": row.input_ids.tolist()} for row in batch], parameters, use_tqdm=False)

    run(batches[-1])
    began = time.perf_counter()
    for batch in batches:
        run(batch)
    seconds = time.perf_counter() - began
    unload_engine(llm)
    return {"tokens": tokens, "tokens_per_s": tokens / seconds, "load_s": loaded}


def capture(work: Path, tokens: int) -> dict[str, Any]:
    """The same batches with all states captured, proven and written to `work`."""
    from scripts.eagle3.extraction import open_extractor

    rows = some_rows(tokens)
    batches, folder = batches_of(rows), work / "states"
    began = time.perf_counter()
    with open_extractor(target_of(work), Hardware(BATCH_TOKENS, 128), LONGEST, "bfloat16") as extractor:
        loaded = time.perf_counter() - began
        proof = extractor.prove(rows, folder)
        extractor.write(batches[-1], folder / "warm.pt")
        began = time.perf_counter()
        for number, batch in enumerate(batches):
            extractor.start(batch, folder / f"{number}.pt")
        extractor.results(wait=True)
        seconds = time.perf_counter() - began
        runner = extractor.installed["runner"]
    written = sum(path.stat().st_size for path in folder.glob("*.pt"))
    for path in folder.glob("*.pt"):
        path.unlink()
    rate = {"tokens": tokens, "tokens_per_s": tokens / seconds, "gb_per_s": written / seconds / 1e9}
    return {**rate, "load_s": loaded, "runner": runner, "proof": proof.record()}


def train(work: Path, draft: str, zero_stage: int, shapes: list[tuple[int, bool]], dtype: str = "bfloat16") -> dict[str, Any]:
    """Steps of one row of each length with random states, with and without recomputation: a record of each shape.

    The first steps of a shape compile and do not count. A shape that does not fit is recorded as such.
    """
    import torch

    from scripts.eagle3 import zero
    from scripts.train_draft import start_draft

    folder = work / f"train-{draft}"
    files = draft_files(work, folder, DRAFTS[draft])
    longest = max(length for length, _ in shapes)
    settings = Training(
        segments=1, ttt_steps=4, batch_tokens=longest, dtype=dtype, zero_stage=zero_stage, loggers=[], learning_rate=1e-4
    )
    engine = start_draft(files, settings, zero.start_process_group())
    constant = {"draft": draft, "zero_stage": zero_stage, "dtype": dtype}
    constant["trained_parameters"] = sum(parameter.numel() for parameter in engine.module.parameters())
    records = []
    for length, recompute in shapes:
        engine.module.recompute = recompute
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        try:
            measured = train_steps(engine, folder / "rows.pt", settings.model_copy(update={"batch_tokens": length}))
        except torch.OutOfMemoryError as error:
            measured = {"out_of_memory": str(error).split(". ")[0]}
            engine.optimizer.zero_grad()
        records.append({**constant, "length": length, "recompute": recompute, **measured})
        print(records[-1], flush=True)
    return {"records": records}


def train_steps(engine: Any, path: Path, settings: Training) -> dict[str, Any]:
    """A few optimiser steps of one row of `batch_tokens` each; the states pass through a shard at `path`."""
    import torch

    from scripts.eagle3 import training
    from scripts.eagle3.packing import TrainingRows, open_shards
    from scripts.eagle3.rows import row_key
    from scripts.eagle3.shards import StateRow, write_shard

    length, hidden, layers = settings.batch_tokens, random_target.WIDTHS["hidden_size"], [*AUX, 8]
    rows = []
    for _ in range(WARM_STEPS + STEPS):
        ids = torch.randint(0, 1000, (length + 1,), dtype=torch.int32)
        states = torch.randn(length + 1, len(layers), hidden, dtype=torch.bfloat16, device="cuda").cpu()
        rows.append(StateRow(row_key(ids.numpy()), ids, torch.arange(length + 1) > (1 - MASKED) * length, states))
    write_shard(path, rows, layers, {})
    del rows
    torch.cuda.empty_cache()
    data = TrainingRows(open_shards([path], layers), settings.ttt_steps, length)
    records: list[dict[str, Any]] = []

    class Log:
        def write(self, record: dict[str, Any], *_: Any) -> None:
            records.append(record)

    training.train_segment(engine, data, training.plan_segment(data, settings, 0), settings, Log())  # type: ignore[arg-type]
    speeds = sorted(record["tokens_per_s"] for record in records[WARM_STEPS:])
    return {
        "tokens_per_s": speeds[len(speeds) // 2],
        "loader_wait": max(record["loader_wait"] for record in records[WARM_STEPS:]),
        "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
        "loss": records[-1]["loss"],
    }


def draft_files(work: Path, folder: Path, draft: Draft) -> DraftFiles:
    """The files that a draft is built from; the vocabulary is the first DRAFT_VOCAB ids."""
    from scripts import draft_config, extract_target_head
    from scripts.eagle3.target import fingerprint

    target = target_of(work)
    files = DraftFiles(folder / "config.json", work / "head.safetensors", folder / "d2t.npy", folder / "t2d.npy")
    folder.mkdir(parents=True, exist_ok=True)
    if not files.head.is_file():
        extract_target_head.run(target, files.head)
    draft_config.run(target, draft, Vocabulary(draft_vocab_size=DRAFT_VOCAB), 4, files.config)
    np.save(files.d2t, np.zeros(DRAFT_VOCAB, dtype=np.int64))
    np.save(files.t2d, np.arange(random_target.WIDTHS["vocab_size"]) < DRAFT_VOCAB)
    identity = fingerprint(target)
    provenance = {"target": {name: identity[name] for name in ("tokenizer", "chat_template")}}
    hashes = {path.name: sha256_file(path) for path in (files.d2t, files.t2d)}
    write_json(folder / "coverage.json", {"provenance": provenance, "sha256": hashes})
    return files


def canary(work: Path, draft: str) -> dict[str, Any]:
    """Answers, states, training, export, serving: scripts.canary on this target, with fewer and longer segments."""
    from scripts import canary as stage
    from scripts.collect_conversations import run as collect
    from scripts.eagle3.config import Conversations, Parts, Source

    stage.SEGMENTS, stage.PASSES = 1, 160  # a checkpoint with its resume state has 10 GB
    stage.MIN_DISTINCT_TOKENS = 1  # so wide a random target repeats itself: this shows that it is served, not how well
    train, evaluation = (
        Source(path="config/data/train/questions.jsonl"),
        Source(path="config/data/eval/everyday.jsonl", limit=2),
    )
    conversations = Conversations(train=[train], evaluation={"everyday": evaluation}, validation_fraction=0.4)
    collect(conversations, Parts(), work / "conversations")
    made = stage.Canary(target_of(work), DRAFTS[draft], work / f"canary-{draft}", Hardware(8192, 32))
    began = time.perf_counter()
    result = stage.run(made, work / "conversations/val/shard-0.parquet")
    return {"draft": draft, "seconds": time.perf_counter() - began, **result}


MEASUREMENTS: dict[str, Callable[..., dict[str, Any]]] = {
    "prefill": prefill,
    "capture": capture,
    "train": train,
    "canary": canary,
}


def plan(tokens: int, only: list[str]) -> list[tuple[str, dict[str, Any], dict[str, str], int]]:
    """(measurement, its arguments, environment, time limit in seconds), in order."""
    v1, v2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    steps: list[tuple[str, dict[str, Any], dict[str, str], int]] = [
        ("capture", {"tokens": tokens}, v1, 300),
        ("prefill", {"tokens": tokens, "eager": True}, v1, 240),
        ("capture", {"tokens": tokens}, v2, 240),
        ("prefill", {"tokens": tokens, "eager": False}, v1, 300),
        ("canary", {"draft": "gqa"}, {}, 540),
    ]
    every = [(length, recompute) for length in (4096, 8192, 16384) for recompute in (True, False)]
    steps.append(("train", {"draft": "llama", "zero_stage": 1, "shapes": every}, {}, 420))
    steps.append(("train", {"draft": "llama", "zero_stage": 3, "shapes": every[2:4]}, {}, 240))
    steps.append(("train", {"draft": "llama", "zero_stage": 0, "shapes": every[:1], "dtype": "float32"}, {}, 240))
    steps.append(("train", {"draft": "gqa", "zero_stage": 1, "shapes": every[2:3]}, {}, 240))
    return [step for step in steps if step[0] in only]


def measure(work: Path, output: Path, step: tuple[str, dict[str, Any], dict[str, str], int]) -> bool:
    """Runs one measurement in its own process and shows its line; False where it failed."""
    name, arguments, environment, limit = step
    command = [sys.executable, "-m", "benchmarks.kimi_k25_shape", "--work", str(work), "--output", str(output)]
    command += ["--one", json.dumps([name, arguments])]
    began = time.perf_counter()
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=limit)
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, said = 124, f"{error.stdout or b''!r} {error.stderr or b''!r}"
    found = [line for line in said.splitlines() if line.startswith("RESULT ")]
    record = {"measurement": name, **arguments, **environment, "wall_s": round(time.perf_counter() - began, 1)}
    if code == 0 and found:
        record |= json.loads(found[-1].removeprefix("RESULT "))
    else:
        record["failed"] = code
        (output / f"{name}-failed-{int(time.time())}.log").write_text(said)
        print(said[-1500:])
    with open(output / "results.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record), flush=True)
    return code == 0


def main() -> None:
    """Command line: see the top of the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True, help="folder for the target and for states: up to 30 GB")
    parser.add_argument("--output", type=Path, required=True, help="folder for results.jsonl and the logs of failures")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--bfloat16", action="store_true", help="experts in bfloat16 instead of INT4")
    parser.add_argument("--tokens", type=int, default=200_000, help="tokens of prefill and capture")
    parser.add_argument("--only", nargs="+", default=list(MEASUREMENTS), choices=MEASUREMENTS)
    parser.add_argument("--keep-going", action="store_true", help="go on after a failed measurement")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        random_target.register()
        name, arguments = json.loads(options.one)
        result = MEASUREMENTS[name](options.work, **arguments)
        print("RESULT " + json.dumps({**result, "engine": engine_version(), "device": device_name()}), flush=True)
        return
    options.output.mkdir(parents=True, exist_ok=True)
    if not (options.work / "target/config.json").is_file():
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        random_target.make(options.work / "target", options.layers, options.experts, not options.bfloat16, device)
    for step in plan(options.tokens, options.only):
        if not measure(options.work, options.output, step) and not options.keep_going:
            sys.exit(1)


if __name__ == "__main__":
    main()
