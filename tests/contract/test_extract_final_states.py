"""Final states of supervised positions only, from the real engine: the states that `all` has, whatever was killed between."""

import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from scripts.eagle3.config import Target
from scripts.eagle3.row_key import final_positions
from scripts.eagle3.shards import Shard
from tests.contract.test_extraction import spoil
from tests.extract_case import ENDS_WITHIN_S, Extraction, token_rows

SHARDS = [token_rows(1, 40), token_rows(2, 40)]


def shards(run: Extraction) -> list[Shard]:
    return [Shard(run.folder / f"hidden/part-0/shard-{number}.pt") for number in range(len(SHARDS))]


@pytest.fixture(scope="module")
def supervised(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Extraction:
    run = Extraction(tmp_path_factory.mktemp("supervised"), tiny_llama, SHARDS)
    run.finish(final_states="supervised")
    return run


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_the_engines_states_are_those_of_all_where_training_reads_them(
    supervised: Extraction, tiny_llama: Target, tmp_path: Path, dtype: str
) -> None:
    run = supervised
    if dtype != "bfloat16":
        run = Extraction(tmp_path, tiny_llama, SHARDS, supervised.store)
        run.finish(final_states="supervised", dtype=dtype)
    (tmp_path / "all").mkdir()
    whole = Extraction(tmp_path / "all", tiny_llama, SHARDS, supervised.store)
    whole.finish(dtype=dtype)
    assert len(whole.started()) == whole.rows  # nothing of the other layout was taken
    assert "final_states is nothing, was supervised" in whole.printed()
    stored = final = 0
    for one, other in zip(shards(whole), shards(run), strict=True):
        for row, found in zip(one, other, strict=True):
            needed = torch.from_numpy(final_positions(row.loss_mask.numpy()))
            assert row.key == found.key and torch.equal(row.loss_mask, found.loss_mask)
            assert torch.equal(row.hidden_states[:, :-1], found.hidden_states[:, :-1])
            assert torch.equal(row.hidden_states[needed, -1], found.hidden_states[needed, -1])
            assert found.hidden_states[~needed, -1].isnan().all()
        stored, final = stored + len(one.content["token_ids"]), final + len(other.content["final_states"])
    sizes = [sum(shard.path.stat().st_size for shard in shards(each)) for each in (whole, run)]
    spared = (stored - final) * (one.state_bytes // 4 + (4 if dtype == "fp8" else 0))
    assert spared == pytest.approx(sizes[0] - sizes[1], abs=2000) and spared > 0.1 * sizes[0]


def test_killed_it_resumes_to_the_same_bytes_and_a_damaged_row_is_made_again(
    supervised: Extraction, tiny_llama: Target, tmp_path: Path
) -> None:
    run = Extraction(tmp_path, tiny_llama, SHARDS)
    job, deadline = run.start(final_states="supervised"), time.monotonic() + ENDS_WITHIN_S
    while run.written() < 20:
        assert job.poll() is None and time.monotonic() < deadline, run.printed()
        time.sleep(0.002)
    os.killpg(job.pid, signal.SIGKILL)
    job.wait()
    run.wait_until_empty()
    kept, before = run.written(), len(run.started())
    growing = Shard(run.stored("growing/*.pt")[0])
    damaged = next(i for i in range(len(growing)) if growing.written(i) and np.diff(growing.final_offsets)[i] > 3)
    spoil(growing.path, growing.content["final_states"][slice(*growing.final_offsets[damaged : damaged + 2])])
    run.finish(final_states="supervised")
    assert f"{growing.path}: row {damaged} ({growing.row_keys[damaged]}) is damaged" in run.printed()
    assert f"{kept - 1}/{run.rows} rows were finished by an earlier run" in run.printed()
    assert len(run.started()) - before < run.rows
    assert run.files() == supervised.files()


def test_rows_whose_loss_mask_changed_are_computed_again(supervised: Extraction, tiny_llama: Target, tmp_path: Path) -> None:
    changed = [{**row, "loss_mask": [True] * len(row["loss_mask"])} for row in SHARDS[0][:5]]
    run = Extraction(tmp_path, tiny_llama, [[*changed, *SHARDS[0][5:]], SHARDS[1]], supervised.store)
    run.finish(final_states="supervised")
    again = {row["row_key"] for row in changed}
    # the five, and the company in which a part computes them
    assert again <= set(run.started()) and len(run.started()) <= 2 * len(again)
    shard = Shard(run.folder / "hidden/part-0/shard-0.pt")
    assert all(shard.row(index).has_final[1:-1].all() for index in range(5))
