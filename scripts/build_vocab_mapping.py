"""Builds the vocabulary map: the tokens that the draft can propose, counted over the answers of the training rows.

In: counts.json of each part and of the validation rows. Out: OUTPUT/d2t.npy (int64), OUTPUT/t2d.npy (bool) and
OUTPUT/coverage.json: the share of training and validation tokens inside, for this size and for others.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.eagle3.config import Target, Vocabulary
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sha256_file, write_atomically, write_json
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.rows import read_provenance
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint, load_tokenizer, stop_token_ids, text_config
from scripts.eagle3.vocabulary import Counts, coverage, maps, rank, smallest_size, special_token_ids

SMALLEST_SHOWN = 512


def run(vocabulary: Vocabulary, target: Target, tokens: Path, parts: int, shards: int, output: Path) -> dict[str, Any]:
    """Writes the map to the folder `output`; returns what coverage.json holds.

    StageError where the size does not fit the target, the rows were made with another tokenizer, or the coverage of the
    validation tokens is below vocabulary.min_coverage.
    """
    size, full_size = vocabulary.draft_vocab_size, text_config(target)["vocab_size"]
    if size > full_size:
        raise StageError(f"vocabulary.draft_vocab_size is {size}, the target's vocabulary has {full_size} tokens; lower it")
    identity = fingerprint(target)
    expected = {"target": {name: identity[name] for name in ("tokenizer", "chat_template")}}
    train = np.zeros(full_size, dtype=np.int64)
    for part in range(parts):
        train += read_counts(tokens / f"part-{part}", shards, expected, full_size)
    val = read_counts(tokens / "val", shards, expected, full_size)

    special = special_token_ids(load_tokenizer(target), stop_token_ids(target), full_size)
    if size < len(special):
        raise StageError(f"vocabulary.draft_vocab_size is {size}, the target has {len(special)} special tokens; raise it")
    ranking = rank(train, special)
    inside_train, inside_val = coverage(ranking, train), coverage(ranking, val)
    check_coverage(inside_val, vocabulary)
    d2t, t2d = maps(ranking, size)
    write_atomically(output / "d2t.npy", lambda path: np.save(path, d2t))
    write_atomically(output / "t2d.npy", lambda path: np.save(path, t2d))
    record = {
        "draft_vocab_size": size,
        "target_vocab_size": full_size,
        "special_tokens": len(special),
        "distinct_training_tokens": int(np.count_nonzero(train)),
        "counted": {"train": int(train.sum()), "val": int(val.sum())},
        "coverage": {"train": float(inside_train[size - 1]), "val": float(inside_val[size - 1])},
        "min_coverage": vocabulary.min_coverage,
        "by_size": [
            {"size": shown, "train": float(inside_train[shown - 1]), "val": float(inside_val[shown - 1])}
            for shown in sizes_shown(size, full_size)
        ],
        "sha256": {name: sha256_file(output / name) for name in ("d2t.npy", "t2d.npy")},
        "provenance": {**expected, "vocabulary": {"format": 1, "draft_vocab_size": size}},
    }
    write_json(output / "coverage.json", record)
    return record


def read_counts(folder: Path, shards: int, expected: dict[str, Any], vocab_size: int) -> Counts:
    """How often each of the target's tokens occurs under the loss mask in one part, [vocab_size]."""
    path = folder / "counts.json"
    record = read_json(path)
    check_provenance(expected, record["provenance"], path)
    for shard in range(shards):
        shard_path = folder / f"shard-{shard}.parquet"
        check_provenance({"tokens": record["provenance"]["tokens"]}, read_provenance(shard_path)[0], shard_path)
    counts = np.zeros(vocab_size, dtype=np.int64)
    for token, count in record["token_counts"].items():
        counts[int(token)] = count
    if not counts.any():
        raise StageError(f"{path}: no token under the loss mask; give more conversations")
    return counts


def check_coverage(inside_val: np.ndarray, vocabulary: Vocabulary) -> None:
    """Raises StageError where the vocabulary holds too few of the validation tokens; says which size would do."""
    size, floor = vocabulary.draft_vocab_size, vocabulary.min_coverage
    reached = float(inside_val[size - 1])
    if reached < floor:
        raise StageError(
            f"vocabulary.draft_vocab_size {size} covers {reached:.4f} of the validation tokens, vocabulary."
            f"min_coverage is {floor:g}; {smallest_size(inside_val, floor)} of {len(inside_val)} tokens reach it: "
            "raise draft_vocab_size, count over more conversations, or lower min_coverage"
        )


def sizes_shown(size: int, full_size: int) -> list[int]:
    """512, 1024, ... up to the target's vocabulary, that itself, and the chosen size."""
    doublings = (SMALLEST_SHOWN << power for power in range(full_size.bit_length()))
    return sorted({size, full_size, *(shown for shown in doublings if shown < full_size)})


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options and runs the stage."""
    parser = argparse.ArgumentParser(description="Build the map between the draft's and the target's vocabulary.")
    parser.add_argument("--vocabulary", type=section(Vocabulary), required=True, help="section of the config, JSON")
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--tokens", type=Path, required=True, help="folder with part-0, part-1, ... and val")
    parser.add_argument("--parts", type=int, required=True, help="number of parts")
    parser.add_argument("--shards", type=int, required=True, help="shards of each part")
    parser.add_argument("--output", type=Path, required=True, help="folder for d2t.npy, t2d.npy, coverage.json")
    options = parser.parse_args(argv)
    record = run(options.vocabulary, options.target, options.tokens, options.parts, options.shards, options.output)
    train, val = record["coverage"]["train"], record["coverage"]["val"]
    print(f"vocabulary: {record['draft_vocab_size']} tokens cover {train:.4f} of training, {val:.4f} of validation")


if __name__ == "__main__":
    run_stage(main)
