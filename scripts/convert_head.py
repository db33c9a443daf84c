"""Converts an EAGLE-3 head between the format of SpecForge and SGLang and the one of speculators, which vLLM serves.

In: a head's folder (config.json, model.safetensors) and the target. Out: a folder in the other format with the same tensors
under the other names. Typed by hand: the stages convert by themselves where they have to.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.third_party import canonical_ids, check_fits, foreign_format, own_format, read_foreign_head, write_head


def run(target: Target, source: Path, output: Path, aux_layer_ids: Sequence[int] | None = None) -> None:
    """Writes `source` to `output` in the format that it has not; StageError where it is no head of this target."""
    head = read_foreign_head(source)
    check_fits(head, target)
    ids = canonical_ids(head, target, aux_layer_ids)
    if head.kind == "latent":
        raise StageError(f"{source}: a head with latent attention; vLLM serves it as it is, there is no other format for it")
    if output.exists() and any(output.iterdir()):
        raise StageError(f"{output}: not empty; name a new folder")
    write_head(output, *(foreign_format(head, ids) if head.kind == "speculators" else own_format(head, target, ids)))


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    parser.add_argument("--head", type=Path, required=True, help="folder of the head")
    parser.add_argument("--aux-layer-ids", type=int, nargs="+", help="its states, as target.aux_layer_ids counts them")
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    options = parser.parse_args(argv)
    run(options.target, options.head, options.output, options.aux_layer_ids)


if __name__ == "__main__":
    run_stage(main)
