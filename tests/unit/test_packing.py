"""Packing for training: every row once, rows apart, cut ones counted, shards of another origin refused."""

import subprocess
import sys

import pytest
import torch

from scripts.eagle3.draft import draft_inputs
from scripts.eagle3.errors import StageError
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.packing import TrainingRows, load_pack, open_shards, pack_rows, read_ahead
from scripts.eagle3.shards import StateRow
from tests.draft_case import TTT_STEPS, random_row
from tests.training_case import synthetic_rows, write_states

BATCH_TOKENS = 64


@pytest.fixture
def shards(tmp_path, tiny_llama):
    """Two shards of six rows each."""
    paths = [
        write_states(tmp_path / f"part-0/shard-{index}.pt", tiny_llama, synthetic_rows(tiny_llama, first_seed=10 * index))
        for index in range(2)
    ]
    return open_shards(paths, captured_layer_ids(tiny_llama.aux_layer_ids, tiny_llama.num_hidden_layers))


@pytest.fixture
def rows(shards):
    return TrainingRows(shards, TTT_STEPS, BATCH_TOKENS)


def open_rows(folder, target, rows, batch_tokens=BATCH_TOKENS):
    path = write_states(folder / "part-0/shard-0.pt", target, rows)
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    return TrainingRows(open_shards([path], layer_ids), TTT_STEPS, batch_tokens)


def test_every_training_row_is_packed_once_within_the_limit(rows):
    packs = pack_rows(rows, (0, 0))
    assert sorted(number for pack in packs for number in pack) == list(range(12))
    assert all(rows.positions[pack].sum() <= BATCH_TOKENS for pack in packs)
    assert len(packs) < 12


def test_training_order_depends_on_seed_and_segment_alone(rows):
    assert pack_rows(rows, (0, 1)) == pack_rows(rows, (0, 1))
    assert pack_rows(rows, (0, 1)) != pack_rows(rows, (0, 2)) != pack_rows(rows, (1, 2))


def test_full_packs_are_closed_when_many_rows_wait(tmp_path, tiny_llama):
    many = open_rows(tmp_path, tiny_llama, [random_row(tiny_llama, 40, 8, seed) for seed in range(40)])
    packs = pack_rows(many, (0, 0))
    assert sorted(number for pack in packs for number in pack) == list(range(40))
    assert len(packs) == 40  # no two of them fit into 64


def test_packed_batch_holds_each_rows_own_inputs(rows):
    pack = pack_rows(rows, (0, 0))[0]
    batch = load_pack(rows, pack, multiple_of=128)
    start = 0
    for document, number in enumerate(pack):
        row = rows.row(number)
        assert batch.rows[document].key == row.key
        expected = draft_inputs(row)
        end = start + len(expected["input_ids"])
        assert (batch.inputs["document_ids"][0, start:end] == document).all()
        for name, tensor in expected.items():
            assert torch.equal(batch.inputs[name][0, start:end], tensor), name
        start = end
    assert batch.inputs["document_ids"].shape == (1, 128)
    assert (batch.inputs["document_ids"][0, start:] == -1).all()
    assert not batch.inputs["loss_mask"][0, start:].any()


def test_supervised_positions_are_counted_from_the_masks_alone(rows):
    for number in range(len(rows)):
        mask = draft_inputs(rows.row(number))["loss_mask"]
        assert rows.supervised[number].tolist() == [int(mask[step:].sum()) for step in range(TTT_STEPS)]


def test_long_training_rows_are_cut_and_counted(tmp_path, tiny_llama):
    long = random_row(tiny_llama, 100, 10)
    rows = open_rows(tmp_path, tiny_llama, [long, random_row(tiny_llama, 65, 10, seed=1)])
    assert rows.counts()["rows_cut"] == 1 and rows.positions.tolist() == [64, 64]
    cut = rows.row(0)
    assert torch.equal(cut.token_ids, long.token_ids[:65]) and torch.equal(cut.hidden_states, long.hidden_states[:65])
    assert load_pack(rows, [0]).inputs["input_ids"].shape == (1, 64)


def test_rows_that_teach_nothing_are_left_out_and_counted(tmp_path, tiny_llama):
    silent, cut_off = random_row(tiny_llama, 20, 20), random_row(tiny_llama, 100, 80, seed=1)
    rows = open_rows(tmp_path, tiny_llama, [silent, cut_off, random_row(tiny_llama, 20, 10, seed=2)])
    assert len(rows) == 1 and rows.counts()["rows_without_supervision"] == 2


def test_training_rows_with_empty_masks_are_refused(tmp_path, tiny_llama):
    with pytest.raises(StageError, match=r"part-0: none of 2 rows has two answer tokens"):
        open_rows(tmp_path, tiny_llama, [random_row(tiny_llama, 20, 20, seed) for seed in range(2)])


def test_shard_of_another_origin_is_refused_naming_both(tmp_path, tiny_llama):
    layer_ids = captured_layer_ids(tiny_llama.aux_layer_ids, tiny_llama.num_hidden_layers)
    paths = [
        write_states(tmp_path / f"{engine}.pt", tiny_llama, synthetic_rows(tiny_llama, 1), {"engine": {"version": engine}})
        for engine in ("0.32.0", "0.22.0")
    ]
    with pytest.raises(StageError, match=r"0.22.0.pt \(compared with .*0.32.0.pt\): engine.version is 0.22.0, expected"):
        open_shards(paths, layer_ids)


def test_shard_with_other_layers_is_refused(tmp_path, tiny_llama):
    path = write_states(tmp_path / "shard-0.pt", tiny_llama, synthetic_rows(tiny_llama, 1))
    with pytest.raises(StageError, match=r"shard-0.pt: layer_ids: expected \[1, 4, 5, 8\], found \[2, 4, 5, 8\]"):
        open_shards([path], [1, 4, 5, 8])


def test_damaged_training_row_stops_the_reading(tmp_path, tiny_llama):
    good = random_row(tiny_llama, 20, 10)
    rows = open_rows(tmp_path, tiny_llama, [good])
    spoiled = StateRow(good.key, good.token_ids, good.loss_mask, good.hidden_states + 1)
    content = torch.load(rows.shards[0].path, weights_only=True)
    content["hidden_states"] = spoiled.hidden_states
    torch.save(content, tmp_path / "spoiled.pt")
    layer_ids = captured_layer_ids(tiny_llama.aux_layer_ids, tiny_llama.num_hidden_layers)
    spoiled_rows = TrainingRows(open_shards([tmp_path / "spoiled.pt"], layer_ids), TTT_STEPS, BATCH_TOKENS)
    with pytest.raises(StageError, match=r"spoiled.pt: row 0 .* is damaged"):
        next(read_ahead(spoiled_rows, [[0]]))


def test_read_ahead_keeps_the_training_order(rows):
    packs = pack_rows(rows, (0, 0))
    keys = [[row.key for row in batch.rows] for batch in read_ahead(rows, packs)]
    assert keys == [[rows.row(number).key for number in pack] for pack in packs]


HELD = """
import sys
from pathlib import Path
from scripts.eagle3.packing import TrainingRows, open_shards, pack_rows, read_ahead

def held():
    lines = Path("/proc/self/status").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith(("RssAnon:", "RssShmem:"))) * 1024

rows = TrainingRows(open_shards([Path(sys.argv[1])], [2, 4, 5, 8]), 3, 512)
batches = read_ahead(rows, pack_rows(rows, (0,)))
next(batches)  # what threads and allocators need
before, peak = held(), 0
for batch in batches:
    peak = max(peak, held() - before)
print(peak)
"""


def test_a_pass_over_a_shard_never_holds_more_than_a_few_batches_of_it(tmp_path, tiny_llama):
    path = write_states(tmp_path / "shard-0.pt", tiny_llama, [random_row(tiny_llama, 400, seed) for seed in range(120)])
    batch = 512 * 4 * 256 * 4  # tokens, layers, hidden size, bytes
    assert path.stat().st_size > 80 * batch
    ended = subprocess.run([sys.executable, "-c", HELD, str(path)], capture_output=True, text=True, check=True)
    assert 0 < int(ended.stdout) < 16 * batch
