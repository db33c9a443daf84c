"""Chooses the checkpoint that would be served best: the greatest simulated acceptance length on validation rows.

In: the records and weights of training, the hidden states of the validation rows. Out: selected.json with the chosen
segment and the figures of every checkpoint. The lowest loss is not the criterion; it is written down beside.
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.draft_files import DraftFiles, read_records, weights_path
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.progress import Progress
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint


def run(
    target: Target,
    files: DraftFiles,
    checkpoints: Path,
    segments: int,
    hidden: Path,
    shards: int,
    speculative_tokens: int,
    output: Path,
) -> None:
    """Walks every distinct checkpoint over shards 0 .. shards - 1 of `hidden`; the earliest of equals wins.

    Checkpoints whose weights were pruned are listed without figures; StageError where none is left, or where one was
    trained from other files.
    """
    records = read_records(checkpoints, segments)
    provenance = {"target": fingerprint(target), **files.identity()}
    for record in records:
        check_provenance(provenance, record["provenance"], checkpoints / f"{record['segment']}.json")
    if not any(weights_path(checkpoints, record) for record in records):
        raise StageError(f"{checkpoints}: the weights of all {len(records)} checkpoints were pruned; train again")
    from scripts.eagle3.draft import build_draft, load_trainable
    from scripts.eagle3.walk import walk_device, walk_rows

    draft = build_draft(*files, attention="sdpa").to(walk_device())
    candidates = []
    for record in records:
        candidate = {key: record[key] for key in ("segment", "step", "weights_sha256", "folder", "metrics")}
        candidate["training"] = record["provenance"]["training"]
        path = weights_path(checkpoints, record)
        if path is not None:
            load_trainable(draft, path)
            rows = _validation_rows(target, hidden, shards, f"select_checkpoint: segment {record['segment']}")
            candidate["simulated"] = walk_rows(draft, rows, speculative_tokens).figures()
        candidates.append(candidate)
    measured = [candidate for candidate in candidates if "simulated" in candidate]
    best = max(measured, key=lambda candidate: candidate["simulated"]["acceptance_length"])
    if not best["simulated"]["drafts"]:
        raise StageError(f"{hidden}: nothing to draft in any row; expected answers of 2 tokens or more; add conversations")
    write_json(output, {"selected": best, "candidates": candidates, "provenance": provenance})


def _validation_rows(target: Target, hidden: Path, shards: int, what: str) -> Iterator[Any]:
    from scripts.eagle3.shards import Shard

    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    opened = [Shard(hidden / f"shard-{index}.pt", {"target": fingerprint(target)}, layer_ids) for index in range(shards)]
    progress = Progress(what, sum(len(shard) for shard in opened))
    for shard in opened:
        for row in shard:
            yield row
            progress.advance(tokens=len(row.token_ids))
    progress.finish()


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    DraftFiles.add_options(parser)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of {segment}.json and the weight folders")
    parser.add_argument("--segments", type=int, required=True, help="number of segments, from 0")
    parser.add_argument("--hidden", type=Path, required=True, help="folder of the validation shards, hidden/val")
    parser.add_argument("--shards", type=int, required=True, help="number of validation shards, from 0")
    parser.add_argument("--speculative-tokens", type=int, required=True, help="K: tokens drafted per step")
    parser.add_argument("--output", type=Path, required=True, help="selected.json")
    options = parser.parse_args(argv)
    run(
        options.target,
        DraftFiles.from_options(options),
        options.checkpoints,
        options.segments,
        options.hidden,
        options.shards,
        options.speculative_tokens,
        options.output,
    )


if __name__ == "__main__":
    run_stage(main)
