"""Deletes superseded hidden states from a run's store: `snakemake clean_rows`; the plan counts them before.

In: the run's folder, its store, and what the configuration asks for now. Out: one line for each folder of the store.
States of another target, layers, dtype or choice of final states go, and files of an earlier deal whose rows are delivered
in newer ones. What hidden/ links to stays, and so do the rows that a job that goes on would take.
"""

import argparse
import shutil
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.extraction import states_provenance
from scripts.eagle3.provenance import digest
from scripts.eagle3.shards import DTYPES, SUPERVISED
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.store import lock_folder
from scripts.eagle3.superseded import Superseded, superseded
from scripts.extract_hidden_states import STAGE


def run(provenance: dict[str, Any], folder: Path, storage: Path, parts: int, shards: int) -> list[Superseded]:
    """Deletes, and returns what was deleted; a part whose store a living job holds is left alone."""
    deleted = []
    files = superseded(storage.resolve() / STAGE, folder, provenance, parts, shards)
    for part, of_part in groupby(files, key=lambda file: file.part):
        gone = list(of_part)
        try:
            with lock_folder(part):
                for file in gone:
                    file.path.unlink()
                if part.parent.name != digest(provenance) and not list(part.rglob("*.pt")):
                    shutil.rmtree(part)
                    if not list(part.parent.iterdir()):
                        part.parent.rmdir()
        except StageError as error:
            print(f"clean_rows: left: {error}", file=sys.stderr)
            continue
        rows, size = sum(file.rows for file in gone), sum(file.bytes for file in gone)
        print(f"clean_rows: {part}: {rows} rows in {len(gone)} files, {size / 1e6:.1f} MB", file=sys.stderr)
        deleted += gone
    print(f"clean_rows: {sum(file.bytes for file in deleted) / 1e6:.1f} MB freed", file=sys.stderr)
    return deleted


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="clean_rows", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder")
    parser.add_argument("--store", type=Path, required=True, help="root of the store of hidden states")
    parser.add_argument("--parts", type=int, required=True, help="scatter.parts")
    parser.add_argument("--shards", type=int, required=True, help="scatter.shards_per_part")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="what the states are stored as")
    parser.add_argument("--final-states", choices=["all", SUPERVISED], default="all", help="of which tokens they are stored")
    options = parser.parse_args(argv)
    provenance = states_provenance(options.target, options.dtype, options.final_states)
    run(provenance, options.run, options.store, options.parts, options.shards)


if __name__ == "__main__":
    run_stage(main)
