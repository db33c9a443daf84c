"""The run as one self-contained page: what was made, from what, how well it works, and what it does not show.

In: the config and the run's folder with `evaluation/summary.json` and the plots; what else lies there is told too. Out:
`report.html`, without references to any other file or host.
"""

import argparse
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Config
from scripts.eagle3.files import read_json, write_text
from scripts.eagle3.gate import METHOD, gate_checks, pool
from scripts.eagle3.rows import read_provenance
from scripts.eagle3.stage import run_stage, section

Record = dict[str, Any]
TEMPLATE = "report_template.html.j2"
PLOTS = {
    "acceptance": "Acceptance at each drafted position, served by vLLM and simulated from one teacher-forced forward.",
    "segments": "Simulated acceptance length on validation rows after each training segment; the best one is exported.",
    "training": "Training: loss, and how often the draft's best token is the target's, by training-time-test step.",
    "coverage": "How much of the target's own text a draft vocabulary of each size can propose at all.",
}
EXAMPLE_TOKENS = 160


def run(config: Config, folder: Path, hidden: Path, output: Path) -> None:
    """Writes the page of the run in `folder`, its states in `hidden`; StageError where the summary or a plot is missing."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    summary = read_json(folder / "evaluation" / "summary.json")
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent / "eagle3"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["rates"] = lambda rates: "  ".join(f"{rate:.3f}" for rate in rates) or "–"
    page = environment.get_template(TEMPLATE).render(
        run=config.run,
        target=target_name(config),
        summary=summary,
        headline=headline(summary),
        checks=gate_checks(summary, config.gate),
        agreement=agreement(summary),
        steps=[step for step in work_done(config, folder, hidden) if step["facts"]],
        plots=[{"caption": caption, "svg": inline_svg(folder, name)} for name, caption in PLOTS.items()],
        examples=list(examples(folder, summary)),
        caveats=caveats(config, folder, summary),
        provenance=flat(summary["provenance"]),
        config_text=config.model_dump_json(indent=2),
    )
    write_text(output, page)


def target_name(config: Config) -> str:
    """A hub id as it is, a folder by its last name."""
    path = config.target.path
    return Path(path).name if Path(path).is_absolute() or path.count("/") != 1 else path


def headline(summary: Record) -> Record:
    """The few figures that the page opens with, pooled over the suites."""
    served, simulated = pool(summary["methods"][METHOD]), pool(summary["simulated"])
    suites = summary["methods"][METHOD].values()
    speedups = [suite["speedup"] for suite in suites]
    return {
        "served": served.acceptance_length,
        "simulated": simulated.acceptance_length,
        "by_position": served.by_position,
        "drafts": served.drafts,
        "identical": sum(suite["identical"] for suite in suites),
        "ties": sum(suite["ties"] for suite in suites),
        "total": sum(suite["total"] for suite in suites),
        "speedups": None if None in speedups else (min(speedups), max(speedups)),
        "cpu": on_cpu(summary),
        "device": ", ".join(sorted({suite["device"] for suite in suites})),
    }


def on_cpu(summary: Record) -> bool:
    """Whether any figure of the head was measured on a CPU."""
    return any(suite["device"].startswith("CPU") for suite in summary["methods"][METHOD].values())


def agreement(summary: Record) -> list[Record]:
    """Served and simulated figures of each suite, side by side, and all suites pooled."""
    served, simulated = summary["methods"][METHOD], summary["simulated"]
    rows = [{"suite": suite, "served": served[suite], "simulated": simulated[suite]} for suite in served]
    if len(rows) > 1:
        pooled = (
            {"acceptance_length": p.acceptance_length, "acceptance_by_position": p.by_position, "drafts": p.drafts}
            for p in (pool(served), pool(simulated))
        )
        rows.append({"suite": "all", **dict(zip(("served", "simulated"), pooled, strict=True))})
    return rows


def work_done(config: Config, folder: Path, hidden: Path) -> Iterator[Record]:
    """The stages in order, each with its facts (name, value); a stage whose records are not there has none."""
    yield {"title": "Conversations", "facts": conversation_facts(folder)}
    yield {"title": "Answers of the target", "facts": answer_facts(config, folder)}
    yield {"title": "Training rows", "facts": row_facts(config, folder, hidden)}
    yield {"title": "Draft vocabulary", "facts": vocabulary_facts(folder)}
    yield {"title": "Training", "facts": training_facts(config, folder)}


def conversation_facts(folder: Path) -> list[tuple[str, str]]:
    """From conversations/ledger.json."""
    ledger = read_optional(folder / "conversations" / "ledger.json")
    if ledger is None:
        return []
    counts = ledger["counts"]
    dropped = [f"{count:,} {name}" for name, count in counts.items() if name not in ("read", "kept") and count]
    facts = [
        ("read", f"{counts['read']:,} from {', '.join(source['source'] for source in ledger['sources'])}"),
        ("kept", f"{counts['kept']:,}: {ledger['split']['train']:,} train, {ledger['split']['val']:,} validate"),
        ("left out", ", ".join(dropped) or "none"),
    ]
    reasons = sorted({entry["reason"] for entry in ledger["rows"]["rejected"]})
    if reasons:
        facts.append(("why rejected", "; ".join(reasons[:5]) + ("; ..." if len(reasons) > 5 else "")))
    suites = [f"{name} ({found['counts']['kept']})" for name, found in ledger["evaluation"].items()]
    return [*facts, ("suites", ", ".join(suites))]


def answer_facts(config: Config, folder: Path) -> list[tuple[str, str]]:
    """From the counts in responses/{part}/."""
    if config.responses == "given":
        return [("taken from", "the data set itself (responses: given)")]
    paths = [path for part in parts(config) for path in sorted((folder / "responses" / part).glob("shard-*.parquet"))]
    found_in = [read_provenance(path) for path in paths]
    if not found_in:
        return []
    counts, asked = [counts for _, counts in found_in], found_in[0][0]["responses"]
    reasons: dict[str, int] = {}
    for name, count in (item for found in counts for item in found["finish_reasons"].items()):
        reasons[name] = reasons.get(name, 0) + count
    ended = {"stop": "ended by the target", "length": "cut at the token limit"}
    rejected = sum(sum(found["rejected"].values()) for found in counts)
    cut = sum(sum(found["cut"].values()) for found in counts)
    lost = sum(found.get("dropped", 0) for found in counts)
    dropped = f", {lost:,} dropped for an answer cut at the limit" if lost else ""
    return [
        ("turns answered", f"{sum(found['turns_out'] for found in counts):,}"),
        ("tokens", f"{sum(found['response_tokens'] for found in counts):,}"),
        ("ends", ", ".join(f"{count:,} {ended.get(name, name)}" for name, count in sorted(reasons.items()))),
        ("conversations", f"{rejected:,} rejected, {cut:,} ended early{dropped}"),
        ("sampling", f"temperature {asked['temperature']:g}, at most {asked['max_tokens']:,} tokens a turn"),
    ]


def row_facts(config: Config, folder: Path, hidden: Path) -> list[tuple[str, str]]:
    """From tokens/{part}/counts.json and the sizes of the hidden-state shards."""
    records = {part: read_optional(folder / "tokens" / part / "counts.json") for part in parts(config)}
    found = {part: record for part, record in records.items() if record is not None}
    if not found:
        return []
    train = [record for part, record in found.items() if part != "val"]

    def total(name: str) -> int:
        return sum(record[name] for record in train)

    facts = [
        (
            "rows",
            f"{total('rows'):,} for training" + (f", {found['val']['rows']:,} for validation" if "val" in found else ""),
        ),
        ("tokens", f"{total('tokens'):,} for training, {total('masked_tokens'):,} of them what the target said"),
        ("cut", f"{total('rows_cut'):,} rows longer than {config.rows.max_length:,} tokens"),
    ]
    shards = [path for part in parts(config) for path in (hidden / part).glob("shard-*.pt")]
    if shards:
        size = sum(path.stat().st_size for path in shards)
        layers = ", ".join(map(str, config.target.aux_layer_ids))
        final = " of supervised tokens" if config.extraction.final_states == "supervised" else ""
        states = f"{size / 1e9:,.2f} GB in {len(shards)} files: states {layers} and the final one{final}"
        deleted = "; those of the parts were deleted after training" if config.training.rolling else ""
        facts.append(("hidden states", states + deleted))
    return facts


def vocabulary_facts(folder: Path) -> list[tuple[str, str]]:
    """From vocab/coverage.json."""
    record = read_optional(folder / "vocab" / "coverage.json")
    if record is None:
        return []
    covered = record["coverage"]
    return [
        ("size", f"{record['draft_vocab_size']:,} of the target's {record['target_vocab_size']:,} tokens"),
        ("covers", f"{covered['train']:.1%} of training tokens, {covered['val']:.1%} of validation tokens"),
    ]


def training_facts(config: Config, folder: Path) -> list[tuple[str, str]]:
    """From selected.json."""
    selected = read_optional(folder / "selected.json")
    if selected is None:
        return []
    chosen, settings = selected["selected"], config.training
    validation = chosen["metrics"]["validation"]
    # after an early stop (training.patience) fewer than training.segments
    passes = settings.rolling.passes if settings.rolling else len(selected["candidates"])
    return [
        ("passes", f"{passes}, {max(entry['step'] for entry in selected['candidates']):,} optimiser steps"),
        ("objective", f"{settings.loss} over {settings.ttt_steps} TTT steps"),
        ("optimiser", f"{settings.optimizer}, learning rate {settings.learning_rate:g}, {settings.schedule}"),
        (
            "chosen",
            f"segment {chosen['segment']}, step {chosen['step']:,}: the best simulated acceptance length",
        ),
        (
            "its validation",
            f"loss {validation['loss']:.3f}, acceptance length {chosen['simulated']['acceptance_length']:.3f}",
        ),
    ]


def parts(config: Config) -> list[str]:
    """Names of all parts of this run."""
    return [*(f"part-{part}" for part in range(config.scatter.parts)), "val"]


def read_optional(path: Path) -> Any:
    """A JSON file, or None where there is none: a run without it still has a report."""
    return read_json(path) if path.is_file() else None


def inline_svg(folder: Path, name: str) -> str:
    """A plot as part of the page: namespaces are implied there, and no address is left in it."""
    text = (folder / "evaluation" / "plots" / f"{name}.svg").read_text(encoding="utf-8")
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")


def examples(folder: Path, summary: Record) -> Iterator[Record]:
    """One answer of each suite as pieces of text, each with whether it was drafted by the head and accepted."""
    for suite in summary["methods"][METHOD]:
        result = read_optional(folder / "evaluation" / METHOD / f"{suite}.json")
        traced = [entry for entry in result["requests"] if "steps" in entry] if result else []
        if not traced:
            continue
        entry = max(traced, key=lambda candidate: len(candidate["output_ids"]) / len(candidate["steps"]))
        pieces = list(pieces_of(entry["texts"], entry["steps"]))[:EXAMPLE_TOKENS]
        shown = {
            "suite": suite,
            "question": entry["question"],
            "pieces": pieces,
            "cut": len(pieces) < len(entry["texts"]),
        }
        yield {**shown, "tokens": len(entry["output_ids"]), "steps": len(entry["steps"])}


def pieces_of(texts: Sequence[str], steps: Sequence[int]) -> Iterator[Record]:
    """Each engine step gives accepted drafts first and the target's own token last."""
    start = 0
    for count in steps:
        for index in range(start, min(start + count, len(texts))):
            yield {"text": texts[index], "accepted": index < start + count - 1}
        start += count


def caveats(config: Config, folder: Path, summary: Record) -> list[str]:
    """What a reader must not conclude from the page."""
    methods = summary["methods"]
    prompts = sum(suite["total"] for suite in methods[METHOD].values())
    found = [
        f"Each figure is one run over {prompts} prompts, greedy decoding, without error bars. Other prompts, sampling "
        "temperatures and batch sizes give other figures."
    ]
    if on_cpu(summary):
        found.append(
            "Tokens per second were measured on a CPU, where verifying several tokens costs nearly as much as decoding "
            "them one by one. This run shows identical outputs and the agreement of training and serving, no speed-up."
        )
    found.append(
        "The served counters include the last draft of an answer whole, even where the answer was cut within it; the "
        "simulation knows only the answer. That is the residual difference to expect."
    )
    if any(method.kind == "ngram" for name, method in config.evaluation.methods.items() if name in methods):
        found.append(
            "An n-gram method drafts only where its lookup matches. Its acceptance length counts those steps alone, so "
            "compare the number of drafts beside it."
        )
    coverage = read_optional(folder / "vocab" / "coverage.json")
    if coverage is not None:
        missing = 1 - coverage["coverage"]["val"]
        found.append(f"{missing:.1%} of the validation tokens lie outside the draft vocabulary and can never be accepted.")
    if config.responses == "given":
        found.append("The head learnt from the data set's answers, not from the target's own: expect lower acceptance.")
    return found


def flat(value: Record, prefix: str = "") -> list[tuple[str, str]]:
    """Nested values as dotted names with texts."""
    items: list[tuple[str, str]] = []
    for key, item in value.items():
        if isinstance(item, dict):
            items += flat(item, f"{prefix}{key}.")
        else:
            items.append((f"{prefix}{key}", "–" if item is None else str(item)))
    return items


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=section(Config), required=True, help="the whole config, JSON")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, results/{run}")
    parser.add_argument("--hidden", type=Path, required=True, help="folder of the hidden states, {part}/shard-{shard}.pt")
    parser.add_argument("--output", type=Path, required=True, help="report.html")
    options = parser.parse_args(argv)
    run(options.config, options.run, options.hidden, options.output)


if __name__ == "__main__":
    run_stage(main)
