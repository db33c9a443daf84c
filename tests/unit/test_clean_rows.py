"""What clean_rows takes for superseded: never the last copy of a row that the run wants, never what hidden/ links to."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import clean_rows
from scripts.eagle3.batches import make_row
from scripts.eagle3.config import Target
from scripts.eagle3.part import shard_tokens
from scripts.eagle3.rows import TOKENS, write_rows
from scripts.eagle3.shards import ShardWriter, StateRow, create_shard, write_shard
from scripts.eagle3.store import Store, open_store
from scripts.extract_hidden_states import STAGE
from tests.planning_case import cpu, make, make_config

NOW = {"layer_ids": [2, 8], "dtype": "float32"}
BEFORE = {"layer_ids": [3, 8], "dtype": "float32"}
ROWS = [[5, 6, number] for number in range(6)]


def write_tokens(run: Path, part: str, rows: list[list[int]]) -> None:
    made = [make_row(ids) for ids in rows]
    identity = {"conversation_id": "c", "source": "test", "split": "train"}
    values = [{"row_key": row.key, "input_ids": row.input_ids.tolist(), "loss_mask": [True] * len(row)} for row in made]
    write_rows(run / f"tokens/{part}/shard-0.parquet", [{**identity, **value} for value in values], TOKENS, {}, {})


def finish(store: Store, name: str, rows: list[list[int]], provenance: dict[str, Any]) -> Path:
    states = [StateRow(*shard_tokens(make_row(ids)), torch.ones(len(ids), 2, 4)) for ids in rows]
    write_shard(store.folder / "shards" / name, states, provenance["layer_ids"], provenance)
    return store.folder / "shards" / name


def grow(store: Store, name: str, rows: list[list[int]], written: int, provenance: dict[str, Any]) -> Path:
    path = store.folder / "growing" / name
    tokens = [shard_tokens(make_row(ids)) for ids in rows]
    create_shard(path, tokens, provenance["layer_ids"], 4, torch.float32, provenance)
    for index in range(written):
        ShardWriter(path).put(index, torch.ones(3, 2, 4))
    return path


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """One part and validation, whose states are delivered."""
    write_tokens(tmp_path / "run", "part-0", ROWS[:3])
    write_tokens(tmp_path / "run", "val", ROWS[3:4])
    for part, rows in (("part-0", ROWS[:3]), ("val", ROWS[3:4])):
        with open_store(tmp_path / "store", STAGE, NOW, part) as store:
            store.deliver(finish(store, "now.pt", rows, NOW), tmp_path / f"run/hidden/{part}/shard-0.pt")
    return tmp_path / "run"


def clean(run: Path) -> list[Path]:
    return [file.path for file in clean_rows.run(NOW, run, run.parent / "store", parts=1, shards=1)]


def test_nothing_of_a_run_that_has_changed_nothing(run: Path) -> None:
    assert clean(run) == []


def test_states_of_another_provenance_go_with_their_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(run.parent / "store", STAGE, BEFORE, "part-0") as store:
        old = [grow(store, "old.pt", ROWS[:3], 2, BEFORE), finish(store, "old.pt", ROWS[3:], BEFORE)]
    assert clean(run) == old
    assert not store.folder.parent.exists()
    assert f"{store.folder}: 5 rows in 2 files" in capsys.readouterr().err


def test_states_that_hidden_still_links_to_stay(run: Path) -> None:
    with open_store(run.parent / "store", STAGE, BEFORE, "part-0") as store:
        linked, old = finish(store, "linked.pt", ROWS[:3], BEFORE), finish(store, "old.pt", ROWS[:3], BEFORE)
        output = run / "hidden/part-0/shard-0.pt"
        output.unlink()
        output.symlink_to(linked)
    assert clean(run) == [old]
    assert output.exists()


def test_files_of_an_earlier_deal_go_once_their_rows_are_delivered_or_not_wanted(run: Path) -> None:
    with open_store(run.parent / "store", STAGE, NOW, "part-1") as store:
        old = [grow(store, "old.pt", ROWS[2:], 2, NOW), finish(store, "old.pt", [*ROWS[1:3], ROWS[5]], NOW)]
    write_tokens(run, "part-0", [*ROWS[:3], ROWS[5]])  # more rows: not delivered yet
    assert clean(run) == old[:1]
    write_tokens(run, "part-0", ROWS[:3])
    assert clean(run) == old[1:]


def test_while_a_token_shard_is_missing_no_row_of_now_goes(run: Path) -> None:
    with open_store(run.parent / "store", STAGE, NOW, "part-1") as store:
        finish(store, "old.pt", ROWS[:3], NOW)
    os.unlink(run / "tokens/val/shard-0.parquet")
    assert clean(run) == []


def test_a_store_that_a_living_job_holds_is_left(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with open_store(run.parent / "store", STAGE, BEFORE, "part-0") as store:
        old = finish(store, "old.pt", ROWS[:3], BEFORE)
        assert clean(run) == []
        assert old.exists() and f"left: {store.folder}: held by another job (pid {os.getpid()} " in capsys.readouterr().err


def test_the_plan_counts_superseded_rows(tiny_llama: Target, tmp_path: Path) -> None:
    config, run = make_config(tiny_llama), tmp_path / "run"
    assert not [note for note in make(config, cpu(run))["notes"] if "superseded" in note]
    with open_store(run / "store", STAGE, BEFORE, "part-0") as store:
        finish(store, "old.pt", ROWS, BEFORE)
    (note,) = (note for note in make(config, cpu(run))["notes"] if "superseded" in note)
    assert note.startswith(f"{len(ROWS)} superseded rows take ") and "clean_rows" in note
