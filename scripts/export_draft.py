"""Exports the chosen checkpoint as the folder that `vllm serve --speculative-config` takes.

In: selected.json and its weights, draft/config.json, the target's head, the vocabulary map. Out: export/ with
config.json, model.safetensors, README.md, provenance.json and manifest.json, compared with everything that it was made
from.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.draft_files import DraftFiles, require_weights
from scripts.eagle3.files import read_json
from scripts.eagle3.model_card import model_card
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint


def run(target: Target, files: DraftFiles, checkpoints: Path, selected: Path, output: Path) -> None:
    """Writes and checks the export; raises StageError where its sources do not belong together."""
    selection = read_json(selected)
    provenance: dict[str, Any] = {"target": fingerprint(target), **files.identity()}
    check_provenance(provenance, selection["provenance"], selected)
    chosen = selection["selected"]
    weights = require_weights(checkpoints, chosen)

    from scripts.eagle3.export import check_export, export_config, export_tensors, write_export, write_manifest

    provenance |= {
        "weights": chosen["weights_sha256"],
        "segment": chosen["segment"],
        "layer_ids": target.aux_layer_ids,
    }
    config = export_config(target, files)
    write_export(output, export_tensors(weights, files), config, model_card(target, config, chosen), provenance)
    check_export(output, target, files, weights)
    write_manifest(output)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    DraftFiles.add_options(parser)
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of {segment}.json and the weight folders")
    parser.add_argument("--selected", type=Path, required=True, help="selected.json")
    parser.add_argument("--output", type=Path, required=True, help="folder of the export")
    options = parser.parse_args(argv)
    files = DraftFiles.from_options(options)
    run(options.target, files, options.checkpoints, options.selected, options.output)


if __name__ == "__main__":
    run_stage(main)
