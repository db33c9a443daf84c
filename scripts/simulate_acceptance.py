"""The acceptance that the exported draft should reach in serving: walked over the answers that the baseline gave.

In: the baseline's evaluation/baseline/{suite}.json, the export, the target. Out: evaluation/simulated/{suite}.json with
the walk's figures under the names of the served ones. States are captured on prompt and answer with one engine load; a
draft trained on states of another layout cannot reach what it reaches here.
"""

import argparse
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.config import Evaluation, Target
from scripts.eagle3.draft_files import OTHER_STATES, check_layers
from scripts.eagle3.engine import Hardware
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, require_free_space, write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.progress import Progress
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint, text_config

METHOD = "eagle3"
BYTES = {"bfloat16": 2, "float32": 4}


def run(
    target: Target,
    evaluation: Evaluation,
    export: Path,
    baseline: Path,
    suites: Sequence[str],
    output: Path,
    hardware: Hardware,
) -> None:
    """Writes one file per suite; StageError where export and baseline are not of this target, before it is loaded."""
    exported = read_json(export / "provenance.json")
    check_provenance({"target": fingerprint(target)}, exported, export / "provenance.json")
    check_layers(export / "config.json", target, OTHER_STATES)
    rows = {suite: answered_rows(baseline / f"{suite}.json", target) for suite in suites}
    # the same request may stand in two suites: it is captured once
    distinct = list({row.key: row for suite in suites for row in rows[suite]}.values())
    state_bytes = (len(target.aux_layer_ids) + 1) * text_config(target)["hidden_size"] * BYTES[target.dtype]
    require_free_space(output, state_bytes * sum(map(len, distinct)), "simulate_acceptance, for states that it deletes")

    from scripts.eagle3.export import load_export
    from scripts.eagle3.extraction import extract_rows
    from scripts.eagle3.walk import walk_device, walk_rows

    draft = load_export(export)
    speculative_tokens = evaluation.methods[METHOD].num_speculative_tokens
    with tempfile.TemporaryDirectory(prefix=".states-", dir=output) as folder:
        states = {row.key: row for row in extract_rows(target, hardware, distinct, target.dtype, Path(folder))}
        draft = draft.to(walk_device())
        for suite in suites:
            progress = Progress(f"simulate_acceptance: {suite}", len(rows[suite]))
            walked = (_with_mask(states[row.key], row, progress) for row in rows[suite])
            result = walk_rows(draft, walked, speculative_tokens)
            progress.finish()
            provenance = {
                "target": fingerprint(target),
                "weights": exported["weights"],
                "layer_ids": captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers),
            }
            write_json(output / f"{suite}.json", {"suite": suite, **result.figures(), "provenance": provenance})


def answered_rows(path: Path, target: Target) -> list[TokenRow]:
    """One row per request of the baseline: prompt and answer, the mask on the answer."""
    record = read_json(path)
    check_provenance({"target": fingerprint(target)}, record["provenance"], path)
    rows = []
    for request in record["requests"]:
        prompt, answer = request["prompt_ids"], request["output_ids"]
        if not prompt or not answer:
            raise StageError(f"{path}: {request['id']}, turn {request['turn']}: no prompt or no answer; measure it again")
        rows.append(make_row([*prompt, *answer], [False] * len(prompt) + [True] * len(answer)))
    if not rows:
        raise StageError(f"{path}: no requests in it; measure the baseline again")
    return rows


def _with_mask(states: Any, row: TokenRow, progress: Progress) -> Any:
    """The captured row with this request's own mask."""
    import torch

    progress.advance(tokens=len(row))
    return replace(states, loss_mask=torch.from_numpy(row.loss_mask))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    parser.add_argument("--evaluation", type=section(Evaluation), required=True, help="section `evaluation:` as JSON")
    parser.add_argument("--export", type=Path, required=True, help="folder of this run's exported draft")
    parser.add_argument("--baseline", type=Path, required=True, help="folder of the baseline's results")
    parser.add_argument("--suites", nargs="+", required=True, help="names of the suites")
    parser.add_argument("--output", type=Path, required=True, help="folder of the results")
    Hardware.add_options(parser)
    options = parser.parse_args(argv)
    run(
        options.target,
        options.evaluation,
        options.export,
        options.baseline,
        options.suites,
        options.output,
        Hardware.from_options(options),
    )


if __name__ == "__main__":
    run_stage(main)
