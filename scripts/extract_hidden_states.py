"""Extracts the target's hidden states for all token shards of one part: one engine load, or none where nothing is missing.

In: `{tokens}/shard-{s}.parquet`. Out: `{output}/shard-{s}.pt`, linked from the store of finished work, and manifest.json
with their checksums, the alignment proof's figures and the ledger of rejected rows.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.batches import TokenRow, read_token_shard
from scripts.eagle3.capture import refuse_uncapturable
from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.extraction import extract_part, states_provenance
from scripts.eagle3.files import require_free_space, write_json
from scripts.eagle3.part import Part
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.row_key import final_positions
from scripts.eagle3.rows import read_provenance
from scripts.eagle3.shards import DTYPES, SUPERVISED, Shard, bytes_per_state
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.store import Store, open_store
from scripts.eagle3.target import fingerprint, text_config

STAGE = "extract_hidden_states"
DISK_MARGIN = 1.05


def run(
    target: Target,
    tokens: Path,
    shards: int,
    output: Path,
    storage: Path,
    dtype: str,
    hardware: Hardware,
    max_rejected_fraction: float = 0.001,
    final_states: str = "all",
) -> dict[str, Any]:
    """Makes the part's hidden-state shards and returns the manifest.

    Raises StageError before any engine starts where the token shards are not this target's, the disk is too small or the
    target cannot be captured; in the first seconds of the engine where the alignment proof fails; after finishing the
    rest where more than `max_rejected_fraction` of the rows were rejected.
    """
    rows = read_part(target, tokens, shards)
    refuse_uncapturable(target, max(len(row) for shard in rows for row in shard))
    provenance = states_provenance(target, dtype, final_states)
    with open_store(storage, STAGE, provenance, part=output.name) as store:
        part = Part(store, rows, provenance, int(text_config(target)["hidden_size"]))
        require_free_space(storage, _needed_bytes(part, target, dtype), f"extraction of {output.name}")
        extract_part(part, target, hardware, dtype)
        _check_rejected(part, max_rejected_fraction)
        manifest = _deliver(part, store, output)
    write_json(output / "manifest.json", manifest)
    return manifest


def read_part(target: Target, tokens: Path, shards: int) -> list[list[TokenRow]]:
    """The rows of a part's token shards; StageError where they were not made for this target."""
    identity, vocab_size = fingerprint(target), int(text_config(target)["vocab_size"])
    # token ids depend on nothing else of the target
    expected = {"target": {name: identity[name] for name in ("tokenizer", "chat_template")}}
    rows = []
    for shard in range(shards):
        path = tokens / f"shard-{shard}.parquet"
        check_provenance(expected, read_provenance(path)[0], path)
        rows.append(read_token_shard(path, vocab_size))
        if not rows[-1]:
            raise StageError(f"{path}: no rows; lower scatter.parts or scatter.shards_per_part")
    return rows


def _needed_bytes(part: Part, target: Target, dtype: str) -> int:
    """Room for the shards that are not finished, less what they have by now."""
    rows = [row for number in part.open_shards() for row in part.shards[number]]
    tokens = finals = sum(map(len, rows))
    if part.provenance.get("final_states") == SUPERVISED:
        finals = sum(int(final_positions(row.loss_mask).sum()) for row in rows)
    size = (tokens * len(target.aux_layer_ids) + finals) * bytes_per_state(part.hidden_size, dtype)
    return max(0, int(size * DISK_MARGIN) - part.growing_bytes())


def _check_rejected(part: Part, max_fraction: float) -> None:
    rejected = part.rejections()
    if len(rejected) > max_fraction * len(part.rows):
        key, record = next(iter(rejected.items()))
        raise StageError(
            f"{len(rejected)} of {len(part.rows)} rows were rejected, at most {max_fraction:.2%} may be; first: row {key}, "
            f"state {record['layer']} is {record['reason']}; look at {part.store.folder / 'rejected.jsonl'}, and delete it "
            "to try them again"
        )
    for shard in part.open_shards():
        if not part.expected_keys(shard):
            raise StageError(
                f"{part.store.folder / 'rejected.jsonl'}: holds every row of shard {shard}; mend the target or its dtype, "
                "or lower scatter.shards_per_part"
            )


def _deliver(part: Part, store: Store, output: Path) -> dict[str, Any]:
    entries = []
    for number, finished in enumerate(part.finished):
        if finished is None:
            raise StageError(f"{store.folder}: shard {number} is not finished; run again")
        path = output / f"shard-{number}.pt"
        store.deliver(finished, path)
        shard = Shard(path, part.provenance, part.layer_ids)
        # accounting: in = out + rejected
        expect(part.expected_keys(number), shard.row_keys, f"{path}: row keys", "delete it and run again")
        entries.append(
            {
                "file": path.name,
                "digest": part.checksums.get(finished.stem),
                "rows": len(shard),
                "tokens": sum(shard.lengths()),
                "rows_in": len(part.shards[number]),
            }
        )
    return {
        "provenance": part.provenance,
        "shards": entries,
        "rejected": [{"row_key": key, **record} for key, record in part.rejections().items()],
        "proof": part.proofs.get("proof"),
    }


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(prog=STAGE, description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--tokens", type=Path, required=True, help="folder of the part's token shards")
    parser.add_argument("--shards", type=int, required=True, help="number of shard-*.parquet in it")
    parser.add_argument("--store", type=Path, required=True, help="root of the stores of finished work")
    parser.add_argument("--output", type=Path, required=True, help="folder of the part's hidden states")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="bfloat16", help="what the states are stored as")
    parser.add_argument("--final-states", choices=["all", SUPERVISED], default="all", help="of which tokens they are stored")
    parser.add_argument(
        "--max-rejected-fraction", type=float, default=0.001, help="share of rejected rows above which it fails"
    )
    Hardware.add_options(parser)
    options = parser.parse_args(argv)
    run(
        options.target,
        options.tokens,
        options.shards,
        options.output,
        options.store,
        options.dtype,
        Hardware.from_options(options),
        options.max_rejected_fraction,
        options.final_states,
    )


if __name__ == "__main__":
    run_stage(main)
