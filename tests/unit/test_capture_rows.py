"""Rows are found in the engine's steps by their ids; targets that cannot be captured are refused before anything loads."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from scripts.eagle3.capture import CaptureExtension, Step, decoder, match_rows, refuse_uncapturable, unsupported
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.rows import row_key


def row(*ids: int) -> torch.Tensor:
    return torch.tensor(ids, dtype=torch.int32)


def step(ids: list[int], positions: list[int]) -> Step:
    """A step whose states are the index of the token in it."""
    states = torch.arange(len(ids)).float()[:, None, None]
    return Step(torch.tensor(ids), torch.tensor(positions), states, torch.ones(len(ids), 1, dtype=torch.bool))


def places(rows: list[torch.Tensor], *steps: Step) -> list[list[float]]:
    found = match_rows(rows, steps)
    return [found[row_key(row.numpy())][0].flatten().tolist() for row in rows]


def test_rows_are_found_whatever_their_order_and_step() -> None:
    a, b, c = row(5, 6, 7), row(8, 9), row(5, 6)
    first, second = step([8, 9, 5, 6, 7], [0, 1, 0, 1, 2]), step([5, 6], [0, 1])
    assert places([a, b, c], first, second) == [[2, 3, 4], [0, 1], [0, 1]]


def test_padding_is_cut_off_whether_its_positions_are_zero_or_go_on() -> None:
    a, b = row(5, 6, 7), row(8, 9)
    assert places([a, b], step([5, 6, 7, 8, 9, 0, 0], [0, 1, 2, 0, 1, 0, 0])) == [[0, 1, 2], [3, 4]]
    assert places([a, b], step([5, 6, 7, 8, 9, 1, 1], [0, 1, 2, 0, 1, 2, 3])) == [[0, 1, 2], [3, 4]]


def test_decode_steps_are_passed_over() -> None:
    assert places([row(5, 6)], step([5, 6, 9], [0, 1, 7]), step([4], [2])) == [[0, 1]]


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        ([5, 6, 8], [0, 1, 2]),  # another token
        ([5, 6], [0, 1]),  # cut off
        ([6, 7], [1, 2]),  # its beginning came from a cache
        ([5, 6, 7], [0, 1, 3]),  # a gap
    ],
)
def test_a_row_in_pieces_or_with_other_ids_is_refused(ids: list[int], positions: list[int]) -> None:
    with pytest.raises(StageError, match="1 of 1 rows were not computed in one piece"):
        match_rows([row(5, 6, 7)], [step(ids, positions)])


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
