"""Counts the optimiser steps of every segment of a rolling run from its token rows, before most states are there.

In: tokens/part-*/, the `training:` section. Out: draft/schedule.json with `steps` of each segment and `rows`, which stands for
the rows of all parts.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.eagle3.config import Training
from scripts.eagle3.files import sha256_json, write_json
from scripts.eagle3.stage import run_stage, section


def run(settings: Training, tokens: Path, shards: int, output: Path) -> None:
    """Plans each part as its segment will."""
    from scripts.eagle3.rolling import open_tokens, row_keys
    from scripts.eagle3.training import plan_steps

    steps, keys = [], []
    for part in range(settings.segments):
        rows = open_tokens(tokens / f"part-{part}", shards, settings)
        steps.append(len(plan_steps(rows, settings, part)))
        keys.append(row_keys(rows))
    write_json(output, {"steps": steps, "rows": sha256_json(keys)})
    print(f"schedule_training: {sum(steps)} steps in {len(steps)} segments", flush=True)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=section(Training), required=True, help="section `training:` as JSON")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of part-0/, part-1/, ...")
    parser.add_argument("--shards", type=int, required=True, help="shards of each part, from 0")
    parser.add_argument("--output", type=Path, required=True, help="schedule.json")
    options = parser.parse_args(argv)
    run(options.training, options.tokens, options.shards, options.output)


if __name__ == "__main__":
    run_stage(main)
