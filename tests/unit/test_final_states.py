"""Final states of supervised positions only: what training reads is stored and nothing else, and it is checked."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.capture_writer import CaptureWriter
from scripts.eagle3.config import Target
from scripts.eagle3.draft import build_draft, draft_inputs, draft_loss_mask
from scripts.eagle3.errors import StageError
from scripts.eagle3.packing import TrainingRows, load_pack, open_shards
from scripts.eagle3.part import Part, shard_tokens
from scripts.eagle3.row_key import final_positions
from scripts.eagle3.shards import DTYPES, Shard, ShardWriter, StateRow, create_shard, to_fp8, write_shard
from scripts.eagle3.store import open_store
from scripts.eagle3.ttt import TrainingDraft
from scripts.eagle3.walk import walk_rows
from tests.draft_case import TTT_STEPS, make_draft_files, random_row
from tests.training_case import TrainingCase, synthetic_rows, weights, write_states

LAYERS, HIDDEN = [2, 4, 8], 16
APART = {"final_states": "supervised"}
MASKS = ([0, 1, 1], [1] * 5, [0] * 4, [0, 1, 1, 1, 0, 0, 1, 0, 1, 1], [1, 1])
NEEDED = ([1], [1, 2, 3], [], [1, 2, 8], [])


def make_rows(dtype: str = "bfloat16") -> list[StateRow]:
    generator, rows = torch.Generator().manual_seed(0), []
    for number, mask in enumerate(MASKS):
        ids = make_row([number, *range(1, len(mask))], list(map(bool, mask)))
        states = torch.randn(len(mask), len(LAYERS), HIDDEN, generator=generator)
        stored = to_fp8(states) if dtype == "fp8" else (states.to(DTYPES[dtype]), None)
        rows.append(StateRow(*shard_tokens(ids), *stored))
    return rows


def equal_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def test_needed_positions_are_those_of_answer_tokens_after_an_answer_token() -> None:
    assert [np.flatnonzero(final_positions(np.array(mask, bool))).tolist() for mask in MASKS] == list(NEEDED)
    together, starts = np.concatenate(MASKS).astype(bool), np.cumsum([0, *map(len, MASKS[:-1])])
    apart = np.concatenate([final_positions(np.array(mask, bool)) for mask in MASKS])
    assert np.array_equal(final_positions(together, starts.tolist()), apart)


@pytest.mark.parametrize("dtype", sorted(DTYPES))
def test_supervised_states_come_back_and_the_others_are_not_a_number(tmp_path: Path, dtype: str) -> None:
    rows, shards = make_rows(dtype), []
    for name, provenance in (("all.pt", {}), ("supervised.pt", APART)):
        write_shard(tmp_path / name, rows, LAYERS, provenance)
        shards.append(Shard(tmp_path / name, provenance))
    for index, needed in enumerate(NEEDED):
        whole, found = (shard.row(index) for shard in shards)
        assert found.hidden_states.shape == whole.hidden_states.shape and found.hidden_states.dtype == whole.hidden_states.dtype
        assert equal_bytes(found.hidden_states[:, :-1], whole.hidden_states[:, :-1])
        assert equal_bytes(found.hidden_states[needed, -1], whole.hidden_states[needed, -1])
        absent = [position for position in range(len(whole.token_ids)) if position not in needed]
        assert found.hidden_states[absent, -1].isnan().all()
        assert whole.has_final is None and found.has_final.nonzero().flatten().tolist() == needed
    assert shards[1].content["final_states"].shape == (7, HIDDEN)


def test_a_shard_that_needs_no_final_state_is_whole(tmp_path: Path) -> None:
    rows = [replace(row, loss_mask=torch.zeros_like(row.loss_mask)) for row in make_rows("fp8")]
    write_shard(tmp_path / "shard-0.pt", rows, LAYERS, APART)
    for row, found in zip(rows, Shard(tmp_path / "shard-0.pt"), strict=True):
        assert torch.equal(found.token_ids, row.token_ids) and not found.has_final.any()


@pytest.mark.parametrize("name", ["hidden_states", "final_states", "scales", "final_scales"])
def test_a_flipped_byte_in_either_tensor_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "shard-0.pt"
    write_shard(path, make_rows("fp8"), LAYERS, APART)
    shard = Shard(path)
    tokens = shard.content[name][shard.final_offsets[3] if name.startswith("final") else shard.offsets[3] :]
    content = bytearray(path.read_bytes())
    content[content.index(tokens.contiguous().view(torch.uint8).numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    damaged = Shard(path)
    assert damaged.row(1).key
    with pytest.raises(StageError, match=r"row 3 .* is damaged: checksum differs"):
        damaged.row(3)


def test_a_mask_that_asks_for_more_than_is_stored_is_refused(tmp_path: Path) -> None:
    write_shard(tmp_path / "shard-0.pt", make_rows(), LAYERS, APART)
    row = Shard(tmp_path / "shard-0.pt").row(3)
    draft_inputs(row)
    draft_inputs(replace(row, loss_mask=torch.tensor([0, 0, 1, 1, 0, 0, 0, 0, 1, 1]).bool()))  # asks for less
    with pytest.raises(StageError, match=r"the loss mask asks for 8 final states, 5 of them are not stored; extract again"):
        draft_inputs(replace(row, loss_mask=torch.ones(10, dtype=torch.bool)))


def test_the_two_layouts_are_not_taken_for_each_other(tmp_path: Path) -> None:
    paths = [tmp_path / "all.pt", tmp_path / "supervised.pt"]
    for path, provenance in zip(paths, ({}, APART), strict=True):
        write_shard(path, make_rows(), LAYERS, provenance)
    with pytest.raises(StageError, match=r"final_states is all, expected supervised"):
        Shard(paths[0], APART)
    with pytest.raises(StageError, match=r"final_states is supervised, expected all"):
        Shard(paths[1], {"final_states": "all"})
    for mixed in (paths, paths[::-1]):
        with pytest.raises(StageError, match="final_states"):
            open_shards(mixed, LAYERS)


@pytest.mark.parametrize("dtype", ["float32", "fp8"])
def test_captured_passes_are_split_by_the_mask_of_each_place(tmp_path: Path, dtype: str) -> None:
    """A row that stands in two shards with two masks is computed once and written as each of them needs it."""
    ids = [[1, 2, 3, 4, 5], [7, 8, 9]]
    masks = {"a": [[0, 0, 1, 1, 1], [1, 1, 1]], "b": [[0, 1, 1, 0, 0], [0, 0, 0]]}
    states = torch.randn(8, len(LAYERS), HIDDEN)
    found = {}
    for name, provenance in (("a", APART), ("b", APART), ("all", {})):
        rows = [
            shard_tokens(make_row(row, list(map(bool, mask))))
            for row, mask in zip(ids, masks.get(name, masks["a"]), strict=True)
        ]
        create_shard(tmp_path / name, rows, LAYERS, HIDDEN, DTYPES[dtype], provenance)
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))
    writer.expect({tmp_path / name: [0, 1] for name in ("a", "b", "all")}, LAYERS)
    writer.take(torch.tensor([*ids[0], *ids[1]]), torch.tensor([0, 1, 2, 3, 4, 0, 1, 2]), list(states.unbind(1)))
    assert len(writer.results(wait=True)[0]["keys"]) == 2
    writer.close()
    found = {name: Shard(tmp_path / name) for name in ("a", "b", "all")}
    for name, needed in (("a", [[2, 3], [1]]), ("b", [[1], []])):
        for index, positions in enumerate(needed):
            row, whole = found[name].row(index), found["all"].row(index)
            assert row.has_final.nonzero().flatten().tolist() == positions
            assert equal_bytes(row.hidden_states[:, :-1], whole.hidden_states[:, :-1])
            assert equal_bytes(row.hidden_states[positions, -1], whole.hidden_states[positions, -1])


PART: dict[str, Any] = {"layer_ids": [2, 8], "dtype": "float32", **APART}


def masked(*mask: int) -> TokenRow:
    return make_row(list(range(3, 3 + len(mask))), list(map(bool, mask)))


def test_a_row_is_reused_only_where_its_mask_needs_the_same_final_states(tmp_path: Path) -> None:
    first = masked(0, 1, 1, 1, 0)
    with open_store(tmp_path, "extract_hidden_states", PART) as store:
        part = Part(store, [[first]], PART, 4)
        path, lacking = part.grow(0)
        ShardWriter(path).put(0, torch.rand(5, 2, 4))
        part.take({"paths": [str(path)], "keys": list(lacking), "rejected": []})
        assert part.missing() == set() and part.finish(0)
        states = Shard(part.finished[0]).row(0).hidden_states
    wider, same = masked(0, 1, 1, 1, 1), masked(1, 1, 1, 1, 0)
    assert first.key == wider.key == same.key and not np.array_equal(first.loss_mask, same.loss_mask)
    with open_store(tmp_path, "extract_hidden_states", PART) as store:
        # a narrower mask, as another row of the part: it is made beside the one that is found
        part = Part(store, [[first], [masked(0, 1, 1, 0, 0), first, masked(0, 1, 1, 0, 0)], [wider]], PART, 4)
        assert part.open_shards() == [1, 2]
        assert part.missing(1) == part.missing(2) == {first.key}
        path, lacking = part.grow(1)
        assert lacking == {first.key: [0, 2]}
        assert [Shard(path).written(index) for index in range(3)] == [False, True, False]
    with open_store(tmp_path, "extract_hidden_states", PART) as store:
        assert Part(store, [[wider]], PART, 4).missing() == {first.key}
        assert Part(store, [[same]], PART, 4).missing() == set()  # nobody needs the first token of a row
    with open_store(tmp_path, "extract_hidden_states", PART) as store:
        part = Part(store, [[first, masked(0, 1, 1, 1, 0, 0)]], PART, 4)
        path, lacking = part.grow(0)
        assert list(lacking) == [masked(0, 1, 1, 1, 0, 0).key]
        found = Shard(path).row(0).hidden_states
        assert torch.equal(found.nan_to_num(), states.nan_to_num())


def test_a_file_of_the_other_layout_in_a_store_is_not_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row, names = masked(0, 1, 1, 1, 0), {name: value for name, value in PART.items() if name != "final_states"}
    for kept, other in ((names, PART), (PART, names)):
        with open_store(tmp_path, "extract_hidden_states", kept) as store:
            (store.folder / "shards").mkdir()
            tokens = shard_tokens(row)
            write_shard(store.folder / "shards/astray.pt", [StateRow(*tokens, torch.rand(5, 2, 4))], [2, 8], other)
            assert Part(store, [[row]], kept, 4).missing() == {row.key}
            assert "final_states is" in capsys.readouterr().err


def spoiled(row: StateRow) -> StateRow:
    """The row with garbage in place of every final state that is not named as needed."""
    states = row.hidden_states.clone()
    absent = ~torch.from_numpy(final_positions(row.loss_mask.numpy()))
    states[absent, -1] = 1e6 * torch.randn(int(absent.sum()), states.shape[-1])
    return replace(row, hidden_states=states)


def test_loss_gradients_and_walk_read_no_other_final_state(tmp_path: Path, tiny_llama: Target) -> None:
    generator = torch.Generator().manual_seed(3)
    rows = synthetic_rows(tiny_llama, 3)
    # masks of several answers, some of one token
    rows += [
        replace(row, loss_mask=torch.rand(len(row.token_ids), generator=generator) < 0.7)
        for row in synthetic_rows(tiny_llama, 3, 50)
    ]
    files, results = make_draft_files(tmp_path, tiny_llama), []
    for name, written in (("a", rows), ("b", list(map(spoiled, rows)))):
        shard = Shard(write_states(tmp_path / name / "shard-0.pt", tiny_llama, written))
        packed = TrainingRows([shard], TTT_STEPS, 30)  # cuts rows
        assert packed.cut
        model = TrainingDraft(build_draft(*files, seed=1), TTT_STEPS, 0.9, "kl_div")
        pack = list(range(len(packed)))
        loss, sums, drafted = model(
            **load_pack(packed, pack).inputs, masked_tokens=torch.tensor(packed.supervised[pack].sum(0))
        )
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        walk = walk_rows(build_draft(*files, seed=1), shard, TTT_STEPS)
        results.append((loss, sums, drafted, gradients, walk.figures()))
    (loss, sums, drafted, gradients, walk), (loss_b, sums_b, drafted_b, gradients_b, walk_b) = results
    assert torch.equal(loss, loss_b) and torch.equal(sums, sums_b) and torch.equal(drafted, drafted_b) and walk == walk_b
    assert loss > 0 and walk["drafts"] > 0
    assert all(torch.equal(gradient, gradients_b[name]) for name, gradient in gradients.items())


def test_each_needed_final_state_is_read(tmp_path: Path, tiny_llama: Target) -> None:
    row, files = random_row(tiny_llama, 12, 4), make_draft_files(tmp_path, tiny_llama)
    model = TrainingDraft(build_draft(*files, seed=1), TTT_STEPS, 1.0, "kl_div")
    losses = []
    for position in [None, *np.flatnonzero(final_positions(row.loss_mask.numpy()))]:
        states = row.hidden_states.clone()
        if position is not None:
            states[position, -1] *= -1
        shard = Shard(write_states(tmp_path / f"{position}/shard-0.pt", tiny_llama, [replace(row, hidden_states=states)]))
        packed = TrainingRows([shard], TTT_STEPS, 30)
        loss, *_ = model(**load_pack(packed, [0]).inputs, masked_tokens=torch.tensor(packed.supervised[0]))
        losses.append(loss.item())
    assert len(losses) == int(draft_loss_mask(row.loss_mask).sum()) + 1
    assert all(loss != losses[0] for loss in losses[1:])


def test_training_on_both_layouts_gives_identical_weights(tmp_path: Path, tiny_llama: Target) -> None:
    trained = []
    for name, provenance in (("all", {}), ("supervised", APART)):
        case = TrainingCase(tmp_path / name, tiny_llama)
        for part, seed in (("part-0", 0), ("part-1", 10), ("val", 100)):
            write_states(case.shard(part), tiny_llama, synthetic_rows(tiny_llama, first_seed=seed), provenance)
        case.train(0)
        trained.append((weights(case.checkpoints, 0), case.shard("val").stat().st_size))
    (first, size), (second, smaller) = trained
    assert smaller < size
    assert first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
