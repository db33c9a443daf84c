"""What a target of Kimi-K2.5's widths takes on one large GPU, with few layers and random weights: training, serving.

In: how many layers; one GPU of 141 GB holds eight with all 384 experts in INT4. Out: one JSON line per measurement in
`{output}/results.jsonl`. Extraction: benchmarks/extraction_speed.py.

    python -m benchmarks.kimi_k25_shape --work /dev/shm/k25 --output results [--only train --stages 3]
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import random_target
from benchmarks.harness import Step, make_parser, run_one, run_steps
from scripts.eagle3.config import Draft, Target, Training, Vocabulary
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import Hardware, load_engine
from scripts.eagle3.files import read_json, sha256_file, write_json

AUX = [2, 4, 5]
DRAFTS = {
    "llama": Draft(num_attention_heads=64, num_key_value_heads=64, head_dim=128, intermediate_size=18432),
    "gqa": Draft(num_attention_heads=64, num_key_value_heads=8, head_dim=128, intermediate_size=18432),
}
DRAFT_VOCAB = 32000
MASKED = 0.6
STEPS, WARM_STEPS = 5, 2


def target_of(work: Path) -> Target:
    """The target that `make` has written."""
    layers = read_json(work / "target/config.json")["text_config"]["num_hidden_layers"]
    return Target(path=str(work / "target"), num_hidden_layers=layers, aux_layer_ids=AUX, trust_remote_code=True)


def train(
    work: Path, draft: str, zero_stage: int, shapes: list[tuple[int, bool]], dtype: str = "bfloat16", steps: int = STEPS
) -> dict[str, Any]:
    """Steps of one row of each length with random states, with and without recomputation: a record of each shape.

    WARM_STEPS more, or as many, compile first and do not count. A shape that does not fit is recorded as such.
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
            measured = train_steps(engine, folder / "rows.pt", settings.model_copy(update={"batch_tokens": length}), steps)
        except torch.OutOfMemoryError as error:
            measured = {"out_of_memory": str(error).split(". ")[0]}
            engine.optimizer.zero_grad()
        records.append({**constant, "length": length, "recompute": recompute, **measured})
        print(records[-1], flush=True)
    return {"records": records}


def train_steps(engine: Any, path: Path, settings: Training, steps: int) -> dict[str, Any]:
    """A few optimiser steps of one row of `batch_tokens` each; the states pass through a shard at `path`."""
    import torch

    from scripts.eagle3 import training
    from scripts.eagle3.packing import TrainingRows, open_shards
    from scripts.eagle3.rows import row_key
    from scripts.eagle3.shards import StateRow, write_shard

    warm = min(steps, WARM_STEPS)
    length, hidden, layers = settings.batch_tokens, random_target.WIDTHS["hidden_size"], [*AUX, 8]
    rows = []
    for _ in range(warm + steps):
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
    speeds = sorted(record["tokens_per_s"] for record in records[warm:])
    return {
        "tokens_per_s": speeds[len(speeds) // 2],
        "loader_wait": max(record["loader_wait"] for record in records[warm:]),
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
    """Answers, states, training, export, serving: scripts.canary on this target, with fewer and longer segments.

    All engines are eager: compiling would take most of the time and show nothing more.
    """
    from scripts import canary as stage
    from scripts import evaluate_method, regenerate_responses
    from scripts.collect_conversations import run as collect
    from scripts.eagle3.config import Conversations, Parts, Source

    def eager_engine(*arguments: Any, **options: Any) -> Any:
        return load_engine(*arguments, **{**options, "eager": True})

    for module in (regenerate_responses, evaluate_method):
        setattr(module, "load_engine", eager_engine)  # noqa: B010 - a type checker would refuse the plain form
    stage.SEGMENTS, stage.PASSES = 1, 48  # a checkpoint with its resume state has 10 GB
    # so wide a random target repeats itself, and the draft has not learnt everything: this shows that it is served as it is
    stage.MIN_DISTINCT_TOKENS, stage.MIN_ACCURACY, stage.MIN_ACCEPTANCE_LENGTH = 1, 0.0, 1.0
    train, evaluation = (
        Source(path="config/data/train/questions.jsonl"),
        Source(path="config/data/eval/everyday.jsonl", limit=2),
    )
    conversations = Conversations(train=[train], evaluation={"everyday": evaluation}, validation_fraction=0.4)
    collect(conversations, Parts(), work / "conversations")
    made = stage.Canary(target_of(work), DRAFTS[draft], work / f"canary-{draft}", Hardware(8192, 32))
    began = time.perf_counter()
    result = stage.run(made, work / "conversations/val/shard-0.parquet")
    simulated = read_json(made.folder / "checkpoints/0.json")["metrics"]["validation"]
    expected = {f"simulated_{name}": simulated[name] for name in ("acceptance_length", "accepted_by_position", "drafts")}
    return {"draft": draft, "seconds": time.perf_counter() - began, **result, **expected}


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {"train": train, "canary": canary}


def plan(only: list[str], stages: list[int] | None) -> list[Step]:
    """The measurements in order."""
    every = [(length, recompute) for length in (4096, 8192, 16384) for recompute in (True, False)]
    steps = [
        Step("canary", {"draft": "gqa"}, 540),
        Step("train", {"draft": "llama", "zero_stage": 1, "shapes": every}, 420),
        Step("train", {"draft": "llama", "zero_stage": 3, "shapes": every}, 420),
        # without Tensor Cores a step takes ten times as long
        Step("train", {"draft": "llama", "zero_stage": 0, "shapes": every, "dtype": "float32", "steps": 1}, 420),
        Step("train", {"draft": "gqa", "zero_stage": 1, "shapes": every[2:3]}, 240),
    ]
    return [step for step in steps if step.name in only and (not stages or step.arguments.get("zero_stage") in stages)]


def main() -> None:
    """Command line: see the top of the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=384)
    parser.add_argument("--bfloat16", action="store_true", help="experts in bfloat16 instead of INT4")
    parser.add_argument("--only", nargs="+", default=list(FUNCTIONS), choices=FUNCTIONS)
    parser.add_argument("--stages", type=int, nargs="+", help="ZeRO stages of `train`; default: all")
    options = parser.parse_args()
    if options.one:
        random_target.register()
        run_one(options.one, options.work, FUNCTIONS)
        return
    if not (options.work / "target/config.json").is_file():
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        random_target.make(options.work / "target", options.layers, options.experts, not options.bfloat16, device)
    run_steps("benchmarks.kimi_k25_shape", plan(options.only, options.stages), options.work, options.output, options.keep_going)


if __name__ == "__main__":
    main()
