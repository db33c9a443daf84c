"""Collects the conversations of all sources: normalised, de-duplicated, free of evaluation prompts, split and dealt.

In: the `conversations:` and `scatter:` sections. Out: OUTPUT/part-{p}/shard-{s}.parquet (training rows in source
order), OUTPUT/val/shard-{s}.parquet, OUTPUT/eval/{suite}.parquet, and OUTPUT/ledger.json, in which every row read is
accounted for.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Conversations, Parts
from scripts.eagle3.conversations import (
    Decontamination,
    Ledger,
    Row,
    check_source,
    collect,
    deal,
    in_validation,
    source_record,
)
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_json
from scripts.eagle3.messages import has_tool_messages
from scripts.eagle3.rows import CONVERSATIONS, write_rows
from scripts.eagle3.stage import run_stage, section

# A row is identified by its content; sources and settings decide only which rows there are. So rows that are dealt
# anew, or come from a source that has grown, are still the same rows to the stages that follow.
PROVENANCE = {"conversations": {"format": 1}}


def run(conversations: Conversations, scatter: Parts, output: Path) -> dict[str, Any]:
    """Writes rows and ledger to the folder `output`; returns the ledger. StageErrors come before any writing."""
    for source in [*conversations.evaluation.values(), *conversations.train]:
        check_source(source)
    suites, suite_ledgers = collect_evaluation(conversations)
    ledger = Ledger()
    decontamination = Decontamination((row for rows in suites.values() for row in rows), conversations.decontamination_overlap)
    rows = collect(conversations.train, ledger, "train", decontamination)
    ledger.check_rejected(conversations.max_rejected_fraction)
    held_out = [in_validation(row["conversation_id"], conversations.validation_fraction) for row in rows]
    training = [row for row, held in zip(rows, held_out, strict=True) if not held]
    validation = [{**row, "split": "val"} for row, held in zip(rows, held_out, strict=True) if held]
    check_enough(training, validation, scatter)

    shards = deal(training, scatter.parts * scatter.shards_per_part)
    for number, shard in enumerate(shards):
        part, place = divmod(number, scatter.shards_per_part)
        write(output / f"part-{part}" / f"shard-{place}.parquet", shard)
    for place, shard in enumerate(deal(validation, scatter.shards_per_part)):
        write(output / "val" / f"shard-{place}.parquet", shard)
    for suite, suite_rows in suites.items():
        write(output / "eval" / f"{suite}.parquet", suite_rows)
    record = {
        **entries(ledger),
        "split": {"train": len(training), "val": len(validation)},
        "sources": [source_record(source) for source in conversations.train],
        "evaluation": {
            suite: {**entries(suite_ledger), **source_record(conversations.evaluation[suite])}
            for suite, suite_ledger in suite_ledgers.items()
        },
    }
    write_json(output / "ledger.json", record)
    return record


def collect_evaluation(conversations: Conversations) -> tuple[dict[str, list[Row]], dict[str, Ledger]]:
    """Rows and ledger of each evaluation suite; a malformed row is a StageError."""
    suites, ledgers = {}, {}
    for suite, source in conversations.evaluation.items():
        ledgers[suite] = Ledger()
        suites[suite] = collect([source], ledgers[suite], "eval")
        if ledgers[suite].rejected:
            first = ledgers[suite].rejected[0]
            raise StageError(
                f"evaluation suite {suite}: {first['source']}: row {first['row']}: {first['reason']}; an evaluation "
                f"source may have no malformed rows, found {len(ledgers[suite].rejected)}; mend or remove them"
            )
        for row in suites[suite]:
            if has_tool_messages(row["messages"]):
                raise StageError(
                    f"evaluation suite {suite}: {row['source']}: has tool messages, and an evaluation prompt is answered on "
                    "the target's own answers alone; keep its declared tools and user messages, or remove the row"
                )
        if not suites[suite]:
            raise StageError(f"evaluation suite {suite}: {source.path}: no rows; give it some, or remove the suite")
    return suites, ledgers


def check_enough(training: Sequence[Row], validation: Sequence[Row], scatter: Parts) -> None:
    """Raises StageError unless each shard gets a row."""
    shards = scatter.parts * scatter.shards_per_part
    if len(training) < shards:
        raise StageError(
            f"{len(training)} training conversations for {scatter.parts} parts x {scatter.shards_per_part} shards: "
            f"each shard needs one; lower scatter.parts or scatter.shards_per_part, or give more conversations"
        )
    if len(validation) < scatter.shards_per_part:
        raise StageError(
            f"{len(validation)} validation conversations for {scatter.shards_per_part} shards: each shard needs one; "
            "raise conversations.validation_fraction, or lower scatter.shards_per_part"
        )


def entries(ledger: Ledger) -> dict[str, Any]:
    """The ledger as JSON: the figures, and below `rows` one entry for each row that was not kept."""
    return {
        "counts": ledger.counts(),
        "rows": {"duplicates": ledger.duplicates, "contaminated": ledger.contaminated, "rejected": ledger.rejected},
    }


def write(path: Path, rows: list[Row]) -> None:
    """One shard."""
    write_rows(path, rows, CONVERSATIONS, PROVENANCE, {"rows": len(rows)})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options and runs the stage."""
    parser = argparse.ArgumentParser(description="Collect, clean, split and deal the conversations of all sources.")
    parser.add_argument("--conversations", type=section(Conversations), required=True, help="section of the config, JSON")
    parser.add_argument("--scatter", type=section(Parts), required=True, help="section of the config, JSON")
    parser.add_argument("--output", type=Path, required=True, help="folder for the shards and ledger.json")
    options = parser.parse_args(argv)
    record = run(options.conversations, options.scatter, options.output)
    counts = ", ".join(f"{count} {name}" for name, count in record["counts"].items())
    print(f"conversations: {counts}; {record['split']['train']} for training, {record['split']['val']} for validation")


if __name__ == "__main__":
    run_stage(main)
