"""One summary of all methods on all suites: acceptance, speed, and whether the outputs are the baseline's.

In: one run's `evaluation/{method}/{suite}.json`, `evaluation/simulated/`, `vocab/coverage.json`, `selected.json`, and
records and metrics of the training. Out: `evaluation/summary.json`, `.csv`, `.md` and `evaluation/plots/*.svg`.
"""

import argparse
import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.acceptance import acceptance
from scripts.eagle3.config import Evaluation
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json, write_text
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.stage import run_stage, section

BASELINE = "baseline"
Figures = dict[str, Any]
# What a method's result must share with the baseline's to be compared with it.
SHARED_SETTINGS = ("max_tokens", "temperature", "max_num_seqs")
SIMULATED = (
    *("acceptance_length", "acceptance_by_position", "conditional_acceptance_by_position", "drafts"),
    *("accepted_by_position", "num_speculative_tokens", "acceptance_length_upper", "unknown_by_position", "coverage"),
)
COLUMNS = (
    *("method", "suite", "acceptance_length", "acceptance_by_position", "conditional_acceptance_by_position"),
    *("tokens_per_s", "speedup", "identical", "ties", "total", "K", "temperature", "max_num_seqs", "drafts"),
    *("accepted_by_position", "output_tokens", "wall_s"),
)


def run(
    evaluation: Evaluation, folder: Path, suites: Sequence[str], checkpoints: Path, metrics: Path, segments: int
) -> dict[str, Any]:
    """Writes summary and plots of the run in `folder`; returns the summary. StageError as `summarise`."""
    summary = summarise(evaluation, folder, suites)
    output = folder / "evaluation"
    write_json(output / "summary.json", summary)
    write_text(output / "summary.csv", to_csv(summary))
    write_text(output / "summary.md", to_markdown(summary))
    write_plots(folder, summary, checkpoints, metrics, segments)
    return summary


def summarise(evaluation: Evaluation, folder: Path, suites: Sequence[str]) -> dict[str, Any]:
    """The content of summary.json.

    Raises StageError where a result is missing, or methods did not answer the same requests under the same settings.
    """
    results = {
        method: {suite: read_json(folder / "evaluation" / method / f"{suite}.json") for suite in suites}
        for method in evaluation.methods
    }
    simulated = {suite: read_json(folder / "evaluation" / "simulated" / f"{suite}.json") for suite in suites}
    for method, by_suite in results.items():
        for suite, result in by_suite.items():
            check_comparable(results[BASELINE][suite], result, f"evaluation/{method}/{suite}.json")
    for suite, record in simulated.items():
        served = results["eagle3"][suite]["provenance"]
        walked = {
            "target": served["target"],
            **{key: served["draft"][key] for key in served["draft"] if key == "weights"},
        }
        check_provenance(walked, record["provenance"], f"evaluation/simulated/{suite}.json")
    return {
        "methods": {
            method: {
                suite: figures(result, results[BASELINE][suite], evaluation.tie_logit_margin)
                for suite, result in by_suite.items()
            }
            for method, by_suite in results.items()
        },
        "simulated": {suite: {name: record.get(name) for name in SIMULATED} for suite, record in simulated.items()},
        "provenance": provenance(results),
    }


def check_comparable(baseline: Figures, result: Figures, where: str) -> None:
    """Raises StageError unless both answered the same requests of the same target, engine and settings."""
    shared = {
        **{name: baseline["provenance"][name] for name in ("target", "engine", "conversations")},
        "settings": {name: baseline["settings"][name] for name in SHARED_SETTINGS},
    }
    check_provenance(shared, {**result["provenance"], "settings": result["settings"]}, where)
    expected, found = (request_ids(record) for record in (baseline, result))
    if expected == found:
        return
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    example = ", ".join(f"{name} turn {turn}" for name, turn in (missing + extra)[:3]) or "another order"
    raise StageError(
        f"{where}: {len(found)} requests, the baseline has {len(expected)} ({len(missing)} missing, {len(extra)} extra:"
        f" {example}); evaluate this method again"
    )


def request_ids(result: Figures) -> list[tuple[str, int]]:
    """(conversation id, turn) of each request, in order."""
    return [(entry["id"], entry["turn"]) for entry in result["requests"]]


def figures(result: Figures, baseline: Figures, tie_logit_margin: float) -> Figures:
    """What the summary says of one method on one suite. `speedup` is None where the devices differ."""
    tokens_per_s = result["output_tokens"] / result["wall_s"]
    same_device = result["device"] == baseline["device"]
    ties, different = count_differences(result.get("differences", []), tie_logit_margin)
    total = len(result["requests"])
    settings = result["settings"]
    return {
        **acceptance(result["drafts"], result["accepted_by_position"]),
        "tokens_per_s": tokens_per_s,
        "speedup": tokens_per_s * baseline["wall_s"] / baseline["output_tokens"] if same_device else None,
        "identical": total - ties - different,
        "ties": ties,
        "total": total,
        "K": settings["method"].get("num_speculative_tokens", 0),
        "temperature": settings["temperature"],
        "max_num_seqs": settings["max_num_seqs"],
        "drafts": result["drafts"],
        "accepted_by_position": result["accepted_by_position"],
        "output_tokens": result["output_tokens"],
        "wall_s": result["wall_s"],
        "device": result["device"],
    }


def count_differences(differences: Sequence[Figures], tie_logit_margin: float) -> tuple[int, int]:
    """(ties, true differences) among the outputs that are not the baseline's.

    A tie: at the first differing token the target's two logits are within the margin. A later turn of a conversation
    whose prompt holds a differing answer is judged as that answer.
    """
    verdicts: dict[str, bool] = {}
    ties = 0
    for difference in differences:
        if difference.get("follows"):
            tie = verdicts[difference["id"]]
        else:
            gap = difference.get("logit_gap")
            tie = gap is not None and abs(gap) <= tie_logit_margin
        verdicts[difference["id"]] = verdicts.get(difference["id"], True) and tie
        ties += tie
    return ties, len(differences) - ties


def provenance(results: Mapping[str, Mapping[str, Figures]]) -> Figures:
    """Target, engine and settings that all methods share, and each method's own settings and head."""
    first = next(iter(results[BASELINE].values()))
    own = {method: next(iter(by_suite.values()))["provenance"] for method, by_suite in results.items()}
    return {
        "target": first["provenance"]["target"],
        "engine": first["provenance"]["engine"],
        "settings": {name: first["settings"][name] for name in SHARED_SETTINGS},
        "methods": {name: {"draft": found["draft"], **found["settings"]["method"]} for name, found in own.items()},
    }


def to_csv(summary: Figures) -> str:
    """One line for each method and suite; lists are separated by spaces."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for method, suite, found in _lines(summary):
        values = {"method": method, "suite": suite, **found}
        cells = (values[name] for name in COLUMNS)
        writer.writerow(" ".join(map(str, cell)) if isinstance(cell, list) else cell for cell in cells)
    return text.getvalue()


def to_markdown(summary: Figures) -> str:
    """Two tables: the methods, and served against simulated acceptance."""
    lines = [
        "# Summary",
        "",
        "| suite | method | acceptance length | by position | drafts | tokens/s | speed-up | identical outputs |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for method, suite, found in sorted(_lines(summary), key=lambda line: line[1]):
        length = f"{found['acceptance_length']:.3f}"
        speedup = "-" if found["speedup"] is None else f"{found['speedup']:.2f}"
        outputs = f"{found['identical']}/{found['total']}" + (f" (+{found['ties']} ties)" if found["ties"] else "")
        lines.append(
            f"| {suite} | {method} | {length} | {_rates(found)} | {found['drafts']} | {found['tokens_per_s']:.1f} |"
            f" {speedup} | {outputs} |"
        )
    lines += [
        "",
        "| suite | | acceptance length | by position | drafts |",
        "|---|---|---|---|---|",
    ]
    for suite, simulated in summary["simulated"].items():
        for name, found in (("simulated", simulated), ("served", summary["methods"]["eagle3"][suite])):
            length = f"{found['acceptance_length']:.4f}"
            lines.append(f"| {suite} | {name} | {length} | {_rates(found)} | {found['drafts']} |")
    return "\n".join(lines) + "\n"


def _rates(found: Figures) -> str:
    return " ".join(f"{rate:.3f}" for rate in found["acceptance_by_position"]) or "-"


def _lines(summary: Figures) -> list[tuple[str, str, Figures]]:
    return [(method, suite, found) for method, suites in summary["methods"].items() for suite, found in suites.items()]


def write_plots(folder: Path, summary: Figures, checkpoints: Path, metrics: Path, segments: int) -> None:
    """The four plots of the run."""
    from scripts.eagle3 import plots

    records = [read_json(checkpoints / f"{segment}.json") for segment in range(segments)]
    # the metrics are no artefacts: without them the curve has one point for each segment
    paths = [metrics / f"{segment}.jsonl" for segment in range(segments)]
    lines = [line for path in paths if path.is_file() for line in path.read_text(encoding="utf-8").splitlines()]
    drawn = {
        "training": plots.training(records, [json.loads(line) for line in lines]),
        "acceptance": plots.acceptance_by_position(summary["methods"]["eagle3"], summary["simulated"]),
        "coverage": plots.coverage(read_json(folder / "vocab" / "coverage.json")),
        "segments": plots.segments(read_json(folder / "selected.json")),
    }
    for name, svg in drawn.items():
        write_text(folder / "evaluation" / "plots" / f"{name}.svg", svg)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule compare_methods."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluation", type=section(Evaluation), required=True, help="section of the config, JSON")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, results/{run}")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of {segment}.json")
    parser.add_argument("--metrics", type=Path, required=True, help="folder of {segment}.jsonl, the training metrics")
    parser.add_argument("--suites", nargs="+", required=True, help="names of the suites")
    parser.add_argument("--segments", type=int, required=True, help="number of training segments")
    options = parser.parse_args(argv)
    summary = run(options.evaluation, options.run, options.suites, options.checkpoints, options.metrics, options.segments)
    print(to_markdown(summary))


if __name__ == "__main__":
    run_stage(main)
