"""The rows that the training benchmarks work on: the target's greedy answers to listed prompts, and their states.

In: a target's folder, prompts (JSON Lines, also .gz) and the ids to take of them, evaluation suites (JSON Lines with
`turns`, of which the first is asked). Out, below `work`: target/, part-0 (training) and val, the baseline's answers to
the suites, and one folder of states for all of them. The stages themselves do the work, decontamination included; each
of the three steps loads the engine once, and finished ones are not repeated.
"""

import argparse
import gzip
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import random_target
from benchmarks.extraction_speed import target_of
from benchmarks.harness import Step
from scripts.eagle3.config import Conversations, Evaluation, Parts, Regeneration, Rows, Source, Target
from scripts.eagle3.engine import Hardware, load_engine, on_cpu
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sha256_json, write_json, write_text
from scripts.eagle3.target import fingerprint, text_config

SHARDS = 4
LONGEST_ROW = 4096
# over-long prompts and the like; the share that was really rejected stands in the record
MAX_REJECTED = 0.02
KV_CACHE_BYTES = 8 << 30
# of a GPU's memory that must be free: the rest is the neighbours'
MEMORY_PERCENT = 12


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds --target, --prompts, --ids, --suites and --max-tokens."""
    parser.add_argument("--target", type=Path, help="folder of the target")
    parser.add_argument("--prompts", type=Path, nargs="+", help="JSON Lines with `id` and `messages`, also .gz")
    parser.add_argument("--ids", type=Path, help="ids of the prompts to take, one a line; default: all")
    parser.add_argument("--suites", type=Path, nargs="+", help="evaluation suites: JSON Lines with `turns`")
    parser.add_argument("--max-tokens", type=int, default=256, help="new tokens per answer")


def steps(options: argparse.Namespace) -> list[Step]:
    """Writes the sources below `work` and returns the steps that make the rows, in order."""
    if not options.target or not options.prompts or not options.suites:
        raise StageError("--target, --prompts or --suites is missing; expected all three; name them")
    random_target.place(str(options.target), options.work / "target")
    sources = {"prompts": listed_prompts(options.prompts, options.ids)}
    suites = [suite_name(path) for path in options.suites]
    for name, path in zip(suites, options.suites, strict=True):
        sources[name] = [{"messages": [{"role": "user", "content": row["turns"][0]}]} for row in read_lines(path)]
    for name, rows in sources.items():
        write_lines(options.work / f"sources/{name}.jsonl", rows)
    asked = {"suites": suites, "max_tokens": options.max_tokens, "sources": sha256_json(sources)}
    return [Step("answer", asked, 400), Step("baseline", asked, 300), Step("extract", asked, 300)]


def suite_name(path: Path) -> str:
    """`eval_mt_bench.jsonl` -> `mt_bench`."""
    return path.stem.removeprefix("eval_")


def listed_prompts(paths: list[Path], ids: Path | None) -> list[dict[str, Any]]:
    """The prompts with these ids, in the order of the list; StageError where one is not there."""
    found = {row["id"]: row for path in paths for row in read_lines(path)}
    wanted = list(found) if ids is None else ids.read_text(encoding="utf-8").split()
    missing = [name for name in wanted if name not in found]
    if missing:
        raise StageError(f"{ids}: {len(missing)} of {len(wanted)} ids are in no file of --prompts, e.g. {missing[0]}")
    return [{"id": name, "messages": found[name]["messages"]} for name in wanted]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The rows of a JSON Lines file."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else open(path, encoding="utf-8") as file:
        return [json.loads(line) for line in file if line.strip()]


def write_lines(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes a JSON Lines file."""
    write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def shards_of(work: Path, kind: str) -> list[Path]:
    """The state shards of `train`, `val`, or one suite."""
    return [work / "hidden/all" / name for name in read_json(work / "hidden/shards.json")[kind]]


def hardware(max_num_seqs: int) -> Hardware:
    """For a small target, which may have neighbours on the device."""
    return Hardware(4096, min(64, max_num_seqs)) if on_cpu() else Hardware(16384, max_num_seqs, MEMORY_PERCENT)


def row_limit(target: Target) -> Rows:
    """What the target takes, at most LONGEST_ROW."""
    return Rows(max_length=min(LONGEST_ROW, int(text_config(target).get("max_position_embeddings") or LONGEST_ROW)))


def use_small_engines() -> None:
    """Eager engines with a fixed cache: compiling a small target takes longer than its answers, and a fixed cache needs no
    profiling, in which vLLM refuses to have neighbours on the GPU."""
    from scripts import evaluate_method, regenerate_responses

    def engine(*arguments: Any, **options: Any) -> Any:
        cache = {} if on_cpu() else {"kv_cache_memory_bytes": KV_CACHE_BYTES}
        return load_engine(*arguments, **{**options, "eager": True, **cache})

    for module in (evaluate_method, regenerate_responses):
        setattr(module, "load_engine", engine)  # noqa: B010 - a type checker would refuse the plain form


def answer(work: Path, suites: list[str], max_tokens: int, sources: str) -> dict[str, Any]:
    """Collects, lets the target answer training and validation prompts with one engine, makes the token rows.

    sources: a hash of what `steps` wrote, so that other prompts are another step.
    """
    from scripts import collect_conversations, extract_target_head, regenerate_responses, tokenize_conversations

    use_small_engines()
    target = target_of(work)
    questions = {suite: Source(path=str(work / f"sources/{suite}.jsonl")) for suite in suites}
    conversations = Conversations(train=[Source(path=str(work / "sources/prompts.jsonl"))], evaluation=questions)
    ledger = collect_conversations.run(conversations, Parts(shards_per_part=SHARDS), work / "conversations")
    parts = [(part, shard) for part in ("part-0", "val") for shard in range(SHARDS)]
    for number, (part, shard) in enumerate(parts):
        link(work / f"conversations/{part}/shard-{shard}.parquet", work / f"conversations/all/shard-{number}.parquet")
    asked, rows = Regeneration(temperature=0, max_tokens=max_tokens), row_limit(target)
    places = work / "conversations/all", len(parts), work / "store", work / "responses/all"
    answered = regenerate_responses.run(target, asked, rows, *places, hardware(512), MAX_REJECTED)
    for number, (part, shard) in enumerate(parts):
        link(work / f"responses/all/shard-{number}.parquet", work / f"responses/{part}/shard-{shard}.parquet")
    counts = {}
    for part in ("part-0", "val"):
        source, output = work / f"responses/{part}", work / f"tokens/{part}"
        record = tokenize_conversations.run(target, rows, asked, source, SHARDS, output, MAX_REJECTED)
        counts[part] = {name: record[name] for name in ("rows", "tokens", "masked_tokens", "rows_cut")}
    extract_target_head.run(target, work / "head.safetensors")
    kept = {name: answered[name] for name in ("in", "out", "rejected", "response_tokens", "finish_reasons")}
    return {"conversations": ledger["counts"], "answers": kept, **counts}


def baseline(work: Path, suites: list[str], max_tokens: int, sources: str) -> dict[str, Any]:
    """The target's own answers to the suites, as evaluate_method measures them."""
    from scripts import evaluate_method

    use_small_engines()
    results = work / "evaluation/baseline"
    places = work / "conversations/eval", suites, work / "store", results
    evaluate_method.run(target_of(work), evaluation(max_tokens), "baseline", None, None, *places, hardware(512))
    return {suite: {"output_tokens": read_json(results / f"{suite}.json")["output_tokens"]} for suite in suites}


def evaluation(max_tokens: int) -> Evaluation:
    """How suites are asked; more requests at a time than the default, which measures seconds."""
    return Evaluation(max_tokens=max_tokens, max_num_seqs=16 if on_cpu() else 80)


def extract(work: Path, suites: list[str], max_tokens: int, sources: str) -> dict[str, Any]:
    """States of all rows with one engine: training, validation, and prompts of the suites with the baseline's answers."""
    from scripts import extract_hidden_states
    from scripts.eagle3.rows import TOKENS, write_rows
    from scripts.simulate_acceptance import answered_rows

    target = target_of(work)
    identity = {name: fingerprint(target)[name] for name in ("tokenizer", "chat_template")}
    tokens, names = work / "tokens/all", iter(f"shard-{number}" for number in range(2 * SHARDS + len(suites)))
    placed: dict[str, list[str]] = {}
    for kind, part in (("train", "part-0"), ("val", "val")):
        placed[kind] = [next(names) for _ in range(SHARDS)]
        for shard, name in enumerate(placed[kind]):
            link(work / f"tokens/{part}/shard-{shard}.parquet", tokens / f"{name}.parquet")
    for suite in suites:
        placed[suite] = [next(names)]
        rows = [
            {
                **{"row_key": row.key, "conversation_id": row.key, "source": suite, "split": "eval"},
                **{"input_ids": row.input_ids.tolist(), "loss_mask": row.loss_mask.tolist()},
            }
            for row in {row.key: row for row in answered_rows(work / f"evaluation/baseline/{suite}.json", target)}.values()
        ]
        write_rows(tokens / f"{placed[suite][0]}.parquet", rows, TOKENS, {"target": identity}, {})
    places = sum(map(len, placed.values())), work / "hidden/all", work / "store"
    manifest = extract_hidden_states.run(target, tokens, *places, "bfloat16", hardware(128))
    write_json(work / "hidden/shards.json", {kind: [f"{name}.pt" for name in found] for kind, found in placed.items()})
    entries = {entry["file"]: entry for entry in manifest["shards"]}
    totals = {kind: sum(entries[f"{name}.pt"]["tokens"] for name in found) for kind, found in placed.items()}
    return {"tokens": totals, "rejected": len(manifest["rejected"]), "proof": manifest["proof"]}


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {"answer": answer, "baseline": baseline, "extract": extract}


def link(source: Path, path: Path) -> None:
    """A second name for a finished file, in place of what is there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.link(source, path)


def done_file(work: Path, name: str, arguments: dict[str, Any]) -> Path:
    """Where a finished step's result lies."""
    return work / "done" / f"{name}-{sha256_json(arguments)[:16]}.json"


def unfinished(work: Path, steps: list[Step]) -> list[Step]:
    """The steps without a result."""
    return [step for step in steps if not done_file(work, step.name, step.arguments).is_file()]


def keeping(functions: dict[str, Callable[..., dict[str, Any]]]) -> dict[str, Callable[..., dict[str, Any]]]:
    """The same functions; what one returns also lies in its `done_file`."""

    def kept(name: str, function: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
        def run(work: Path, **arguments: Any) -> dict[str, Any]:
            result = function(work, **arguments)
            write_json(done_file(work, name, arguments), {**arguments, **result})
            return result

        return run

    return {name: kept(name, function) for name, function in functions.items()}
