"""The vocabulary map: which tokens are in, what they cover, and when the stage refuses."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import build_vocab_mapping
from scripts.eagle3.config import Target, Vocabulary
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.rows import TOKENS, write_rows
from scripts.eagle3.target import fingerprint, load_tokenizer, stop_token_ids, text_config
from scripts.eagle3.vocabulary import coverage, maps, rank, smallest_size, special_token_ids


def test_special_tokens_come_first_then_the_frequent_ones_then_the_lowest_ids() -> None:
    counts = np.array([0, 5, 0, 9, 5, 0, 0, 1])
    assert rank(counts, [6]).tolist() == [6, 3, 1, 4, 7, 0, 2, 5]


@given(st.lists(st.integers(0, 20), min_size=2, max_size=60), st.data())
def test_the_maps_agree_with_each_other(counts: list[int], data: st.DataObject) -> None:
    special = data.draw(st.sets(st.integers(0, len(counts) - 1)))
    size = data.draw(st.integers(max(1, len(special)), len(counts)))
    d2t, t2d = maps(rank(np.array(counts), special), size)
    target_ids = np.arange(size) + d2t
    assert d2t.dtype == np.int64
    assert t2d.sum() == size
    assert target_ids.tolist() == np.flatnonzero(t2d).tolist()
    assert special <= set(target_ids.tolist())
    left_out = [counts[token] for token in np.flatnonzero(~t2d)]
    taken = [counts[token] for token in target_ids if token not in special]
    assert max(left_out, default=0) <= min(taken, default=max(counts))


def test_a_draft_vocabulary_as_large_as_the_targets_is_the_identity() -> None:
    d2t, t2d = maps(rank(np.array([3, 0, 7]), [1]), 3)
    assert d2t.tolist() == [0, 0, 0]
    assert t2d.all()


def test_coverage_and_the_smallest_size_that_reaches_a_floor() -> None:
    ranking = rank(np.array([10, 30, 0, 60]), [])
    covered = coverage(ranking, np.array([1, 2, 2, 5]))
    assert covered.tolist() == [0.5, 0.7, 0.8, 1.0]
    assert [smallest_size(covered, floor) for floor in (0.0, 0.5, 0.6, 0.7, 1.0)] == [1, 1, 2, 2, 4]


def test_special_tokens_are_all_added_tokens_and_the_stop_ids_inside_the_vocabulary(tiny_llama: Target) -> None:
    tokenizer, size = load_tokenizer(tiny_llama), text_config(tiny_llama)["vocab_size"]
    special = special_token_ids(tokenizer, [5, size + 3], size)
    assert special == sorted({5, *(token for token in tokenizer.added_tokens_decoder if token < size)})
    assert set(tokenizer.all_special_ids) & set(range(size)) <= set(special)


# -- the stage


def write_part(folder: Path, target: Target, token_counts: dict[int, int], shards: int = 1, **changed: Any) -> None:
    identity = {name: fingerprint(target)[name] for name in ("tokenizer", "chat_template")}
    if "tokenizer" in changed:
        identity["tokenizer"] = changed["tokenizer"]
    provenance = {"target": identity, "tokens": {"format": 1, "max_length": changed.get("max_length", 64)}}
    counts = {str(token): count for token, count in token_counts.items()}
    write_json(folder / "counts.json", {"provenance": provenance, "token_counts": counts})
    for shard in range(shards):
        write_rows(folder / f"shard-{shard}.parquet", [], TOKENS, provenance, {})


def test_the_stage_counts_training_parts_only_and_reports_the_validation_tokens(tmp_path: Path, tiny_llama: Target) -> None:
    write_part(tmp_path / "part-0", tiny_llama, {700: 3, 701: 1}, shards=2)
    write_part(tmp_path / "part-1", tiny_llama, {701: 1, 702: 4}, shards=2)
    write_part(tmp_path / "val", tiny_llama, {700: 3, 703: 1}, shards=2)
    special = special_token_ids(load_tokenizer(tiny_llama), stop_token_ids(tiny_llama), text_config(tiny_llama)["vocab_size"])
    vocabulary = Vocabulary(draft_vocab_size=len(special) + 3, min_coverage=0.7)
    options = ["--vocabulary", vocabulary.model_dump_json(), "--target", tiny_llama.model_dump_json(), "--parts", "2"]
    build_vocab_mapping.main([*options, "--shards", "2", "--tokens", str(tmp_path), "--output", str(tmp_path / "vocab")])

    d2t, t2d = (np.load(tmp_path / "vocab" / f"{name}.npy") for name in ("d2t", "t2d"))
    assert set((np.arange(len(d2t)) + d2t).tolist()) == {*special, 700, 701, 702}
    assert (d2t.dtype, t2d.dtype, len(t2d)) == (np.int64, np.bool_, text_config(tiny_llama)["vocab_size"])
    record = read_json(tmp_path / "vocab" / "coverage.json")
    assert record["coverage"] == {"train": 1.0, "val": 0.75}
    assert record["counted"] == {"train": 9, "val": 4}
    assert record["distinct_training_tokens"] == 3
    sizes = [entry["size"] for entry in record["by_size"]]
    assert {512, len(special) + 3, len(t2d)} <= set(sizes)
    assert sizes == sorted(sizes)
    assert record["by_size"][-1]["val"] == 1.0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"draft_vocab_size": 10**6}, r"draft_vocab_size is 1000000, the target's vocabulary has \d+ tokens; lower it"),
        ({"draft_vocab_size": 2}, r"draft_vocab_size is 2, the target has \d+ special tokens; raise it"),
        (
            {"draft_vocab_size": 20, "min_coverage": 0.8},
            r"20 covers 0\.7500 .*min_coverage is 0\.8; 712 of \d+ tokens reach",
        ),
    ],
)
def test_a_size_that_does_not_fit_is_refused_with_the_figure(
    tmp_path: Path, tiny_llama: Target, settings: dict[str, Any], said: str
) -> None:
    write_part(tmp_path / "part-0", tiny_llama, {700: 3})
    write_part(tmp_path / "val", tiny_llama, {700: 3, 703: 1})
    with pytest.raises(StageError, match=said) as error:
        build_vocab_mapping.run(Vocabulary(**settings), tiny_llama, tmp_path, 1, 1, tmp_path / "vocab")
    assert "\n" not in str(error.value)
    assert not (tmp_path / "vocab").exists()


def test_rows_of_another_tokenizer_or_of_other_settings_are_refused(tmp_path: Path, tiny_llama: Target) -> None:
    vocabulary = Vocabulary(draft_vocab_size=100)
    write_part(tmp_path / "part-0", tiny_llama, {700: 3}, tokenizer="0" * 64)
    with pytest.raises(StageError, match=r"counts\.json: target\.tokenizer is 0000"):
        build_vocab_mapping.run(vocabulary, tiny_llama, tmp_path, 1, 1, tmp_path / "vocab")
    write_part(tmp_path / "part-0", tiny_llama, {700: 3})
    (tmp_path / "part-0" / "shard-0.parquet").rename(tmp_path / "kept")
    write_part(tmp_path / "part-0", tiny_llama, {700: 3}, max_length=32)
    (tmp_path / "kept").rename(tmp_path / "part-0" / "shard-0.parquet")
    with pytest.raises(StageError, match=r"shard-0\.parquet: tokens\.max_length is 64, expected 32"):
        build_vocab_mapping.run(vocabulary, tiny_llama, tmp_path, 1, 1, tmp_path / "vocab")


def test_a_part_without_answers_is_refused(tmp_path: Path, tiny_llama: Target) -> None:
    write_part(tmp_path / "part-0", tiny_llama, {700: 3})
    write_part(tmp_path / "val", tiny_llama, {})
    with pytest.raises(StageError, match=r"val/counts\.json: no token under the loss mask"):
        build_vocab_mapping.run(Vocabulary(draft_vocab_size=100), tiny_llama, tmp_path, 1, 1, tmp_path / "vocab")


def test_the_coverage_record_is_plain_json(tmp_path: Path, tiny_llama: Target) -> None:
    write_part(tmp_path / "part-0", tiny_llama, {700: 3})
    write_part(tmp_path / "val", tiny_llama, {700: 3})
    record = build_vocab_mapping.run(Vocabulary(draft_vocab_size=100), tiny_llama, tmp_path, 1, 1, tmp_path / "vocab")
    assert json.loads((tmp_path / "vocab" / "coverage.json").read_text()) == record
