"""Batches: every row once, of few shards at a time, within the budget; a plan is kept and only extended."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.eagle3.batches import TOGETHER, Batch, TokenRow, make_row, plan_batches, read_token_shard, resume_plan
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.rows import TOKENS, row_key, write_rows


def shard(*lengths: int, first: int = 0) -> list[TokenRow]:
    return [make_row([first + index] * length) for index, length in enumerate(lengths)]


@given(
    st.lists(st.lists(st.integers(2, 60), min_size=1, max_size=20), min_size=1, max_size=2 * TOGETHER + 1),
    st.integers(2, 80),
    st.integers(1, 5),
)
def test_plan_holds_each_row_once_within_the_budget(lengths: list[list[int]], budget: int, max_rows: int) -> None:
    shards = [shard(*numbers, first=100 * index) for index, numbers in enumerate(lengths)]
    batches = plan_batches(shards, budget, max_rows)
    assert [number for numbers in sorted({batch.shards for batch in batches}) for number in numbers] == [*range(len(shards))]
    for numbers in {batch.shards for batch in batches}:
        assert len(numbers) <= TOGETHER
        length = {row.key: len(row) for number in numbers for row in shards[number]}
        mine = [batch.keys for batch in batches if batch.shards == numbers]
        assert sorted(key for keys in mine for key in keys) == sorted(length)
        for keys in mine:
            assert len(keys) <= max_rows
            assert sum(length[key] for key in keys) <= budget or len(keys) == 1


def test_equal_rows_give_an_equal_plan_whatever_their_order() -> None:
    rows = shard(5, 9, 2, 9, 30)
    assert plan_batches([rows], 20, 4) == plan_batches([rows[::-1]], 20, 4)


def test_batches_of_mixed_lengths_are_full() -> None:
    lengths = np.random.default_rng(0).integers(2, 500, 400).tolist()
    batches = plan_batches([shard(*lengths)], 2000, 50)
    assert len(batches) <= sum(lengths) / 2000 * 1.03 + 1


def test_resumed_plan_keeps_its_batches_when_the_hardware_changes(tmp_path: Path) -> None:
    rows = [shard(5, 9, 2, 9, 30)]
    keys = {row.key for row in rows[0]}
    first = resume_plan(tmp_path / "plan.json", rows, keys, 20, 4)
    left = keys - set(first[0].keys)
    assert resume_plan(tmp_path / "plan.json", rows, left, 1000, 100) == first[1:]


def test_resumed_plan_repeats_a_whole_batch_for_one_lost_row(tmp_path: Path) -> None:
    rows = [shard(5, 9, 2, 9, 30)]
    first = resume_plan(tmp_path / "plan.json", rows, {row.key for row in rows[0]}, 20, 4)
    whole = next(batch for batch in first if len(batch.keys) > 1)
    assert resume_plan(tmp_path / "plan.json", rows, {whole.keys[1]}, 20, 4) == [whole]


def test_plan_is_extended_for_rows_that_it_lacks_and_replaced_for_other_rows(tmp_path: Path) -> None:
    rows = [shard(5, 9, 2)]
    held = rows[0][0].key  # another part had it when the plan was made
    first = resume_plan(tmp_path / "plan.json", rows, {row.key for row in rows[0][1:]}, 20, 4)
    assert resume_plan(tmp_path / "plan.json", rows, {row.key for row in rows[0]}, 20, 4) == [*first, Batch((0,), (held,))]
    other = [shard(7, 8, first=50)]
    assert {
        key for batch in resume_plan(tmp_path / "plan.json", other, {row.key for row in other[0]}, 20, 4) for key in batch.keys
    } == {row.key for row in other[0]}


def test_a_plan_of_other_groups_is_replaced(tmp_path: Path) -> None:
    rows, path = [shard(5, 9, 2)], tmp_path / "plan.json"
    keys = {row.key for row in rows[0]}
    first = resume_plan(path, rows, keys, 20, 4)
    found = read_json(path)
    write_json(path, {"rows": found["rows"], "batches": [{"shard": 0, "keys": list(keys)}]})  # as older versions planned
    assert resume_plan(path, rows, keys, 20, 4) == first
    assert read_json(path) == found


def test_batch_files_are_named_by_their_rows() -> None:
    assert Batch((0,), ("a", "b")).file_name == Batch((1,), ("a", "b")).file_name != Batch((0,), ("b", "a")).file_name


def write(path: Path, ids: list[int], mask: list[bool], key: str | None = None) -> Path:
    row = {"row_key": key or row_key(ids), "conversation_id": "c", "source": "s", "split": "train", "input_ids": ids}
    write_rows(path, [{**row, "loss_mask": mask}], TOKENS, {}, {})
    return path


def test_token_shard_is_read_with_its_mask(tmp_path: Path) -> None:
    (row,) = read_token_shard(write(tmp_path / "shard-0.parquet", [4, 5, 6], [False, True, True]), vocab_size=7)
    assert np.array_equal(row.input_ids, [4, 5, 6]) and row.loss_mask.tolist() == [False, True, True]


@pytest.mark.parametrize(
    ("ids", "mask", "key", "message"),
    [
        ([4, 5], [True, True], "0" * 32, "row 0: row_key is 0000"),
        ([4], [True], None, "row 0 has 1 ids"),
        ([4, 5], [True], None, "1 mask entries"),
        ([4, 7], [True, True], None, r"token id outside 0\.\.6"),
    ],
)
def test_wrong_token_rows_are_refused(tmp_path: Path, ids: list[int], mask: list[bool], key: str | None, message: str) -> None:
    with pytest.raises(StageError, match=message):
        read_token_shard(write(tmp_path / "shard-0.parquet", ids, mask, key), vocab_size=7)
