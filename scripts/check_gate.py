"""Fails when the summary misses what the config asks for; makes nothing.

In: `evaluation/summary.json` and the `gate:` section. Out: a table of all checks, and exit code 1 with one line for
each missed one. It runs last, so that its failure destroys nothing that explains it.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from scripts.eagle3.config import Gate
from scripts.eagle3.files import read_json
from scripts.eagle3.gate import Check, gate_checks
from scripts.eagle3.stage import run_stage, section


def run(summary: Path, gate: Gate) -> list[Check]:
    """All checks of a summary; StageError where it is missing or lacks what the gate needs."""
    return gate_checks(read_json(summary), gate)


def table(checks: Sequence[Check]) -> str:
    """The checks as aligned lines of text."""
    rows = [("", "check", "required", "found")]
    rows += [("ok" if check.passed else "MISSED", check.name, check.required, check.found) for check in checks]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule check_gate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--summary", type=Path, required=True, help="evaluation/summary.json")
    parser.add_argument("--gate", type=section(Gate), required=True, help="section of the config, JSON")
    options = parser.parse_args(argv)
    checks = run(options.summary, options.gate)
    print(table(checks) if checks else "the gate is switched off", flush=True)
    missed = [check for check in checks if not check.passed]
    for check in missed:
        print(f"check_gate: missed: {check.name}: required {check.required}, found {check.found}", file=sys.stderr)
    if missed:
        sys.exit(1)


if __name__ == "__main__":
    run_stage(main)
