"""Rows are found in the engine's steps by their ids; targets that cannot be captured are refused before anything loads."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scripts.eagle3.batches import make_row
from scripts.eagle3.capture import CaptureExtension, decoder, refuse_uncapturable, unsupported
from scripts.eagle3.capture_process import share
from scripts.eagle3.capture_writer import CaptureWriter
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.part import shard_tokens
from scripts.eagle3.shards import DTYPES, Shard, create_shard

LAYERS = [2, 8]
HIDDEN = 64


Step = tuple[list[int], list[int]]


def make_shard(path: Path, rows: list[list[int]], dtype: torch.dtype = torch.float32) -> Path:
    tokens = [shard_tokens(make_row(ids)) for ids in rows]
    create_shard(path, tokens, LAYERS, HIDDEN, dtype, {})
    return path


def run(path: Path, indices: list[int], *steps: Step) -> dict[str, Any]:
    """The result of a batch whose forward passes are `steps`: ids and positions; states are the token's index in its step."""
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))
    writer.expect({path: indices}, LAYERS)
    for ids, positions in steps:
        state = torch.arange(len(ids)).float()[:, None].expand(-1, HIDDEN)
        writer.take(torch.tensor(ids), torch.tensor(positions), [state, state + 100])
    return writer.results(wait=True)[0]


def places(folder: Path, rows: list[list[int]], *steps: Step) -> list[list[float]]:
    path = make_shard(folder / "shard-0.pt", rows)
    assert run(path, list(range(len(rows))), *steps).get("rejected") == []
    found = [row.hidden_states for row in Shard(path)]
    assert all(torch.equal(states[:, 1], states[:, 0] + 100) for states in found)
    return [states[:, 0, 0].tolist() for states in found]


def test_rows_are_found_whatever_their_order_and_step(tmp_path: Path) -> None:
    first, second = ([8, 9, 5, 6, 7], [0, 1, 0, 1, 2]), ([5, 6], [0, 1])
    assert places(tmp_path, [[5, 6, 7], [8, 9], [5, 6]], first, second) == [[2, 3, 4], [0, 1], [0, 1]]


def test_padding_is_cut_off_whether_its_positions_are_zero_or_go_on(tmp_path: Path) -> None:
    rows, ids = [[5, 6, 7], [8, 9]], [5, 6, 7, 8, 9, 0, 0]
    assert places(tmp_path, rows, (ids, [0, 1, 2, 0, 1, 0, 0])) == [[0, 1, 2], [3, 4]]
    assert places(tmp_path, rows, (ids, [0, 1, 2, 0, 1, 2, 3])) == [[0, 1, 2], [3, 4]]


def test_decode_steps_are_passed_over(tmp_path: Path) -> None:
    assert places(tmp_path, [[5, 6]], ([5, 6, 9], [0, 1, 7]), ([4], [2])) == [[0, 1]]


def test_a_row_that_stands_twice_in_a_shard_is_written_twice(tmp_path: Path) -> None:
    assert places(tmp_path, [[5, 6], [8, 9], [5, 6]], ([5, 6, 8, 9], [0, 1, 0, 1])) == [[0, 1], [2, 3], [0, 1]]


@pytest.mark.parametrize(
    "step",
    [
        ([5, 6, 8], [0, 1, 2]),  # another token
        ([5, 6], [0, 1]),  # cut off
        ([6, 7], [1, 2]),  # its beginning came from a cache
        ([5, 6, 7], [0, 1, 3]),  # a gap
    ],
)
def test_a_row_in_pieces_or_with_other_ids_is_refused(tmp_path: Path, step: Step) -> None:
    path = make_shard(tmp_path / "shard-0.pt", [[5, 6, 7]])
    assert "1 of 1 rows were not computed in one piece" in run(path, [0], step)["error"]
    assert not Shard(path).written(0)


def test_rows_that_only_keep_company_are_not_written(tmp_path: Path) -> None:
    path = make_shard(tmp_path / "shard-0.pt", [[5, 6], [8, 9]])
    result = run(path, [1], ([5, 6, 8, 9], [0, 1, 0, 1]))
    assert result["keys"] == [Shard(path).row_keys[1]]
    assert (Shard(path).written(0), Shard(path).written(1)) == (False, True)


def test_a_row_with_infinity_is_rejected_with_its_layer_and_the_others_are_kept(tmp_path: Path) -> None:
    path = make_shard(tmp_path / "shard-0.pt", [[5, 6], [8, 9]])
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))
    writer.expect({path: [0, 1]}, LAYERS)
    states = [torch.ones(4, HIDDEN), torch.ones(4, HIDDEN)]
    states[1][3, 5] = float("inf")
    writer.take(torch.tensor([5, 6, 8, 9]), torch.tensor([0, 1, 0, 1]), states)
    keys = Shard(path).row_keys
    assert writer.results(wait=True) == [{"paths": [str(path)], "keys": [keys[0]], "rejected": [[keys[1], 8, "not finite"]]}]
    assert (Shard(path).written(0), Shard(path).written(1)) == (True, False)


def test_many_forward_passes_of_many_batches_end_up_in_their_places(tmp_path: Path) -> None:
    # more passes than buffers, over two files, written by several threads
    rows = [[number, number + 1] for number in range(0, 200, 2)]
    writer, results = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS)), []
    for name in ("shard-0.pt", "shard-1.pt"):
        make_shard(tmp_path / name, rows)
        for start in range(0, len(rows), 4):
            writer.expect({tmp_path / name: list(range(start, start + 4))}, LAYERS)
            for ids in rows[start : start + 4]:
                state = torch.tensor(ids).float()[:, None].expand(-1, HIDDEN)
                writer.take(torch.tensor(ids), torch.tensor([0, 1]), [state, -state])
            results += writer.results(wait=False)
    results += writer.results(wait=True)
    assert [len(result["keys"]) for result in results] == [4] * 50
    for name in ("shard-0.pt", "shard-1.pt"):
        assert [row.hidden_states[:, 0, 0].tolist() for row in Shard(tmp_path / name)] == rows


def test_a_pass_may_hold_rows_of_two_batches_and_files(tmp_path: Path) -> None:
    for name, rows in (("shard-0.pt", [[5, 6], [8, 9]]), ("shard-1.pt", [[1, 2, 3], [5, 6]])):
        make_shard(tmp_path / name, rows)
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))

    def take(*ids: int, positions: list[int]) -> None:
        state = torch.tensor(ids).float()[:, None].expand(-1, HIDDEN)
        writer.take(torch.tensor(ids), torch.tensor(positions), [state, -state])

    writer.expect({tmp_path / "shard-0.pt": [0, 1]}, LAYERS)
    take(5, 6, positions=[0, 1])
    writer.expect({tmp_path / "shard-1.pt": [0, 1]}, LAYERS)
    assert writer.results(wait=True, computing=2) == []
    take(8, 9, 1, 2, 3, positions=[0, 1, 0, 1, 2])
    (first,) = writer.results(wait=True, computing=1)
    assert first["paths"][0].endswith("shard-0.pt") and len(first["keys"]) == 2
    take(5, 6, positions=[0, 1])
    (second,) = writer.results(wait=True)
    assert second["paths"][0].endswith("shard-1.pt") and len(second["keys"]) == 2
    assert [row.hidden_states[:, 0, 0].tolist() for row in Shard(tmp_path / "shard-0.pt")] == [[5, 6], [8, 9]]
    assert [row.hidden_states[:, 0, 0].tolist() for row in Shard(tmp_path / "shard-1.pt")] == [[1, 2, 3], [5, 6]]


def test_a_batch_may_be_of_several_files_and_a_row_of_two_of_them_is_written_into_both(tmp_path: Path) -> None:
    rows = {"shard-0.pt": [[5, 6], [8, 9]], "shard-1.pt": [[1, 2, 3], [5, 6]]}
    for name, ids in rows.items():
        make_shard(tmp_path / name, ids)
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))
    writer.expect({tmp_path / "shard-0.pt": [0], tmp_path / "shard-1.pt": [0, 1]}, LAYERS)
    state = torch.tensor([1, 2, 3, 5, 6, 8, 9]).float()[:, None].expand(-1, HIDDEN)
    writer.take(torch.tensor([1, 2, 3, 5, 6, 8, 9]), torch.tensor([0, 1, 2, 0, 1, 0, 1]), [state, -state])
    (result,) = writer.results(wait=True)
    assert result["paths"] == [str(tmp_path / name) for name in rows] and len(result["keys"]) == 2
    assert not Shard(tmp_path / "shard-0.pt").written(1)
    assert Shard(tmp_path / "shard-0.pt").row(0).hidden_states[:, 0, 0].tolist() == [5, 6]
    assert [row.hidden_states[:, 0, 0].tolist() for row in Shard(tmp_path / "shard-1.pt")] == [[1, 2, 3], [5, 6]]


def test_states_in_float8_come_back_within_its_rounding(tmp_path: Path) -> None:
    path = make_shard(tmp_path / "shard-0.pt", [[5, 6, 7]], DTYPES["fp8"])
    states = [torch.randn(3, HIDDEN) * torch.tensor([[1e-3], [1.0], [1e5]]), torch.zeros(3, HIDDEN)]
    writer = CaptureWriter(16, len(LAYERS), 4 * HIDDEN * len(LAYERS))
    writer.expect({path: [0]}, LAYERS)
    writer.take(torch.tensor([5, 6, 7]), torch.tensor([0, 1, 2]), states)
    assert writer.results(wait=True)[0]["keys"]
    row = Shard(path).row(0)
    assert row.hidden_states.dtype == torch.bfloat16
    found, largest = row.hidden_states[:, 0].float(), states[0].abs().amax(dim=-1, keepdim=True)
    # three bits of mantissa, and what lies below the smallest step of the token's scale
    assert ((found - states[0]).abs() <= states[0].abs() / 15 + largest / 448 / 512).all()
    assert torch.equal(row.hidden_states[:, 1], torch.zeros(3, HIDDEN, dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("key", "value"),
    [("model_type", "deepseek_v32"), ("architectures", ["GlmMoeDsaForCausalLM"]), ("model_type", "kimi_k3")],
)
def test_models_that_defer_their_all_reduce_are_refused_by_name(
    tiny_llama: Target, tmp_path: Path, key: str, value: Any
) -> None:
    config = json.loads((Path(tiny_llama.path) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: value}))
    with pytest.raises(StageError, match="defers its all-reduce"):
        refuse_uncapturable(tiny_llama.model_copy(update={"path": str(tmp_path)}))


def test_rows_that_fill_the_targets_context_are_refused(tiny_llama: Target) -> None:
    refuse_uncapturable(tiny_llama, longest=2047)
    with pytest.raises(StageError, match=r"takes 2048 tokens, the longest row has 2048; set rows\.max_length below 2048"):
        refuse_uncapturable(tiny_llama, longest=2048)


def engine(**changes: Any) -> Any:
    """The part of vLLM's config that is looked at, of an engine that can be captured from, with changes."""
    settings = {"pipeline_parallel_size": 1, "data_parallel_size": 1, "enable_dbo": False, "dtype": torch.bfloat16}
    values = SimpleNamespace(**{**settings, "enable_prefix_caching": False, "enforce_eager": True, **changes})
    return SimpleNamespace(parallel_config=values, model_config=values, cache_config=values)


def model(**more: Any) -> Any:
    return SimpleNamespace(model=SimpleNamespace(embed_tokens=1, layers=[], norm=1), **more)


def test_an_engine_that_can_be_captured_from_is_accepted() -> None:
    assert unsupported(engine(), model(set_aux_hidden_state_layers=None)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"pipeline_parallel_size": 2}, "pipeline parallelism is 2"),
        ({"data_parallel_size": 8}, "data parallelism is 8"),
        ({"prefill_context_parallel_size": 2}, "prefill context parallelism is 2"),
        ({"enable_dbo": True}, "dual-batch overlap"),
        ({"dtype": torch.float16}, "float16"),
        ({"enable_prefix_caching": True}, "prefix caching is on"),
        ({"enforce_eager": False}, "compiled"),
    ],
)
def test_engines_are_refused_by_name(changes: dict[str, Any], reason: str) -> None:
    assert reason in str(unsupported(engine(**changes), model(set_aux_hidden_state_layers=None)))


def test_a_model_without_the_interface_is_refused() -> None:
    assert "lacks vLLM's EAGLE-3 interface" in str(unsupported(engine(), model()))


def test_the_decoder_is_found_behind_wrappers_and_other_names() -> None:
    stack = SimpleNamespace(embedding="embedding", layers=["layer"], norm="norm")  # gpt-oss
    for wrapped in (stack, SimpleNamespace(model=stack), SimpleNamespace(language_model=SimpleNamespace(model=stack))):
        found = decoder(wrapped)
        assert found is not None and (found.embed_tokens, found.layers, found.norm) == ("embedding", ["layer"], "norm")
    assert decoder(SimpleNamespace(model=SimpleNamespace(layers=[], norm="norm"))) is None


def test_clearing_reaches_every_tensor_of_the_cache() -> None:
    caches = [torch.ones(2), [torch.ones(3), (torch.full((1,), float("nan")),)]]
    CaptureExtension.capture_clear_cache(SimpleNamespace(model_runner=SimpleNamespace(kv_caches=caches)))
    assert not caches[0].any() and not caches[1][0].any() and not caches[1][1][0].any()


@given(lengths=st.lists(st.integers(1, 2048), max_size=40), writers=st.integers(1, 8))
def test_writers_share_the_rows_of_a_pass(lengths: list[int], writers: int) -> None:
    ends = list(itertools.accumulate(lengths))
    rows = [(str(number), end - length, end) for number, (length, end) in enumerate(zip(lengths, ends, strict=True))]
    shares = [share(rows, number, writers) for number in range(writers)]
    assert sorted(row for each in shares for row in each) == sorted(rows)
    loads = [sum(end - start for _, start, end in each) for each in shares]
    assert max(loads) - min(loads) <= max(lengths, default=0)
