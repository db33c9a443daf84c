"""Parquet rows: whole, typed, with provenance, and the same bytes for the same rows."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.eagle3.errors import StageError
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, TOKENS, read_provenance, read_rows, row_key, write_rows

ROW = {
    "row_key": row_key([1, 2, 3]),
    "conversation_id": "c",
    "source": "rows.jsonl#1",
    "split": "train",
    "input_ids": [1, 2, 3],
    "loss_mask": [False, True, True],
}
PROVENANCE: dict[str, Any] = {"target": {"weights": "abc"}}


def test_rows_provenance_and_counts_come_back(tmp_path: Path) -> None:
    path = tmp_path / "part-0" / "shard-0.parquet"
    write_rows(path, [ROW, {**ROW, "row_key": "other"}], TOKENS, PROVENANCE, {"rows": 2})
    assert read_rows(path, TOKENS) == [ROW, {**ROW, "row_key": "other"}]
    assert read_provenance(path) == (PROVENANCE, {"rows": 2})
    assert [item.name for item in path.parent.iterdir()] == ["shard-0.parquet"]


@pytest.mark.parametrize("schema", [CONVERSATIONS, RESPONSES, TOKENS])
def test_a_shard_may_be_empty(tmp_path: Path, schema: pa.Schema) -> None:
    write_rows(tmp_path / "shard-0.parquet", [], schema, PROVENANCE, {})
    assert read_rows(tmp_path / "shard-0.parquet", schema) == []


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.parquet", [ROW], TOKENS, {"a": 1, "b": 2}, {})
    write_rows(tmp_path / "b.parquet", [ROW], TOKENS, {"b": 2, "a": 1}, {})
    assert (tmp_path / "a.parquet").read_bytes() == (tmp_path / "b.parquet").read_bytes()


def test_the_key_of_a_row_is_its_token_ids() -> None:
    assert row_key([1, 2]) == row_key((1, 2))
    assert row_key([1, 2]) != row_key([2, 1])
    assert row_key([1, 2]) != row_key([1, 2, 0])
    assert len(row_key([])) == 32


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    for read in (read_provenance, lambda path: read_rows(path, TOKENS)):
        with pytest.raises(StageError, match=r"shard-7\.parquet: no such file"):
            read(tmp_path / "shard-7.parquet")


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.parquet"
    write_rows(path, [ROW], TOKENS, PROVENANCE, {})
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(StageError, match=r"shard-0\.parquet: not a readable Parquet file"):
        read_rows(path, TOKENS)
    with pytest.raises(StageError, match=r"shard-0\.parquet: no provenance"):
        read_provenance(path)


def test_a_file_of_another_stage_is_refused(tmp_path: Path) -> None:
    write_rows(tmp_path / "tokens.parquet", [ROW], TOKENS, PROVENANCE, {})
    with pytest.raises(StageError, match="column messages is missing"):
        read_rows(tmp_path / "tokens.parquet", CONVERSATIONS)


def test_a_file_that_this_workflow_did_not_make_has_no_provenance(tmp_path: Path) -> None:
    pq.write_table(pa.table({"messages": ["a"]}), tmp_path / "foreign.parquet")
    with pytest.raises(StageError, match="no provenance in it"):
        read_provenance(tmp_path / "foreign.parquet")
