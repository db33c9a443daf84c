"""States captured in a real vLLM against Hugging Face's Llama; the alignment proof can fail."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.eagle3.alignment import EngineView, engine_view, prove
from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.extraction import Extractor, open_extractor
from scripts.eagle3.part import shard_tokens
from scripts.eagle3.shards import Shard, create_shard
from tests.capture_case import HARDWARE, LAYERS, LENGTHS, assert_neighbours_differ, captured, make_rows, relative_error


@pytest.fixture(scope="module")
def llama(tiny_llama: Target) -> Iterator[Extractor]:
    with open_extractor(tiny_llama, HARDWARE, max(LENGTHS), "float32") as extractor:
        yield extractor


@pytest.fixture(scope="module")
def llama_reference(tiny_llama: Target) -> Any:
    from transformers import LlamaForCausalLM

    return LlamaForCausalLM.from_pretrained(tiny_llama.path, dtype=torch.float32).eval()


@torch.inference_mode()
def llama_states(model: Any, row: TokenRow) -> list[torch.Tensor]:
    before_norm: list[torch.Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    states = model(torch.tensor(row.input_ids.tolist())[None], output_hidden_states=True).hidden_states
    handle.remove()
    return [*(state[0] for state in states[:-1]), before_norm[0]]


def test_llama_states_equal_hugging_face(llama: Extractor, llama_reference: Any, tmp_path: Path) -> None:
    rows = make_rows()  # more tokens and rows than one step takes
    states, _ = captured(llama, rows, tmp_path / "rows.pt")
    assert [row.key for row in states] == [row.key for row in rows]
    for row, found in zip(rows, states, strict=True):
        expected = llama_states(llama_reference, row)
        assert_neighbours_differ(expected)
        for index, layer in enumerate(LAYERS):
            assert relative_error(found.hidden_states[:, index], expected[layer]).max() < 0.005
        assert found.token_ids.tolist() == row.input_ids.tolist()
        assert found.loss_mask.tolist() == row.loss_mask.tolist()


def test_hooks_leave_the_engines_answer_alone(llama: Extractor, llama_reference: Any, tmp_path: Path) -> None:
    rows = make_rows(seed=1)
    _, outputs = captured(llama, rows, tmp_path / "rows.pt")
    for row, output in zip(rows, outputs, strict=True):
        with torch.inference_mode():
            logits = llama_reference(torch.tensor(row.input_ids.tolist())[None]).logits[0, -1]
        assert output.outputs[0].token_ids[0] == int(logits.argmax())


def test_prefixes_and_near_twins_are_told_apart(llama: Extractor, llama_reference: Any, tmp_path: Path) -> None:
    whole = make_rows(seed=2, lengths=(60,))[0].input_ids.tolist()
    rows = [make_row(whole), make_row(whole[:30]), make_row([*whole[:-1], (whole[-1] + 1) % 1000])]
    states, _ = captured(llama, rows, tmp_path / "rows.pt")
    for row, found in zip(rows, states, strict=True):
        assert len(found.token_ids) == len(row)
        assert relative_error(found.hidden_states[:, -1], llama_states(llama_reference, row)[8]).max() < 0.005


def test_a_row_that_was_not_computed_is_refused(llama: Extractor, tmp_path: Path) -> None:
    asked, computed = make_rows(seed=3)[:4], make_rows(seed=4)[:4]
    path = make_shard(llama, asked, tmp_path)
    llama.start([*computed[:3], asked[3]], path, range(4))
    with pytest.raises(StageError, match="3 of 4 rows were not computed in one piece"):
        llama.results(wait=True)
    assert [Shard(path).written(index) for index in range(4)] == [False, False, False, True]


def test_rows_that_are_fed_while_others_are_computed_end_up_in_their_places(llama: Extractor, tmp_path: Path) -> None:
    rows, files = make_rows(seed=7), []
    alone, _ = captured(llama, rows, tmp_path / "alone.pt")
    results = []
    for number, chosen in enumerate((rows[:2], rows[2:3], rows[3:], rows[:1])):
        (tmp_path / str(number)).mkdir()
        files.append(make_shard(llama, chosen, tmp_path / str(number)))
        llama.feed(chosen, {files[-1]: range(len(chosen))})
        results += llama.results()
        assert number or not results  # nothing has been computed yet: the engine waits for company
    llama.drain()
    results += llama.results(wait=True)
    assert [result["paths"] for result in results] == [[str(path)] for path in files]
    found = [row for path in files for row in Shard(path)]
    for row, expected in zip(found, [*alone, alone[0]], strict=True):
        assert row.key == expected.key
        assert relative_error(row.hidden_states[:, -1], expected.hidden_states[:, -1]).max() < 1e-4


def make_shard(extractor: Extractor, rows: list[TokenRow], folder: Path) -> Path:
    """A shard with room for the rows' states."""
    tokens = [shard_tokens(row) for row in rows]
    create_shard(folder / "rows.pt", tokens, LAYERS, extractor.hidden_size, torch.float32, extractor.provenance)
    return folder / "rows.pt"


def test_a_row_with_nan_is_rejected_with_its_layer(llama: Extractor, tmp_path: Path) -> None:
    rows = [make_row([1, 2, 3, 4]), make_row([5, 6, 1001, 7]), make_row([8, 9])]

    ids: list[torch.Tensor] = []
    handles: list[Any] = []

    def poison(worker: Any) -> None:
        # the engine's worker is in this process: NaN in the output of layer index 3 wherever token 1001 goes in
        body = worker.get_model().model
        handles.append(body.embed_tokens.register_forward_pre_hook(lambda _, args: ids.append(args[0].clone())))
        handles.append(
            body.layers[3].mlp.register_forward_hook(
                lambda _, args, output: torch.where((ids[-1] == 1001)[:, None], float("nan"), output)
            )
        )

    llama.llm.collective_rpc(poison)
    try:
        path = make_shard(llama, rows, tmp_path)
        llama.start(rows, path, range(3))
        results = llama.results(wait=True)
    finally:
        for handle in handles:
            handle.remove()
    keys = sorted([rows[0].key, rows[2].key])
    assert results == [{"paths": [str(path)], "keys": keys, "rejected": [[rows[1].key, 4, "not finite"]]}]
    assert [Shard(path).written(index) for index in range(3)] == [True, False, True]


@pytest.fixture(scope="module")
def seen(llama: Extractor, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[EngineView], list[torch.Tensor]]:
    """What the engine says about a few rows, and their captured states."""
    path = tmp_path_factory.mktemp("proof") / "rows.pt"
    states, outputs = captured(llama, make_rows(seed=5), path, logprobs=2, prompt_logprobs=2)
    return [engine_view(output) for output in outputs], [row.hidden_states.clone() for row in states]


class TestProof:
    def test_passes_on_captured_states(self, llama: Extractor, tiny_llama: Target, tmp_path: Path) -> None:
        proof = llama.prove(make_rows(seed=5), tmp_path)
        assert proof.argmax_agreement >= 0.99 and proof.row_tokens == [250, 128, 99, 64]
        assert max(proof.alone_batch_difference.values()) <= 1e-3

    def test_fails_on_states_one_token_late(self, tiny_llama: Target, seen: Any) -> None:
        views, states = seen
        late = [row.roll(1, dims=0) for row in states]
        with pytest.raises(StageError, match="choose the engine's token on"):
            prove(tiny_llama, views, late, late[:2], LAYERS)

    def test_fails_on_the_state_of_another_layer(self, tiny_llama: Target, seen: Any) -> None:
        views, states = seen
        early = [row[:, :3] for row in states]
        with pytest.raises(StageError, match="choose the engine's token on"):
            prove(tiny_llama, views, early, early[:2], LAYERS[:3])

    def test_fails_where_company_changes_the_states(self, tiny_llama: Target, seen: Any) -> None:
        views, states = seen
        with pytest.raises(StageError, match="rows alone and in a batch differ"):
            prove(tiny_llama, views, states, [states[0] * 1.01], LAYERS)
        shortest = [*states[:-1], states[-1].roll(1, dims=0)]
        with pytest.raises(StageError, match="rows alone and in a batch differ"):
            prove(tiny_llama, views, states, shortest, LAYERS)

    @pytest.mark.parametrize(
        ("tensor", "change", "message"),
        [
            # same choices, other probabilities
            ("lm_head.weight", lambda weight: 1.5 * weight, "scales or caps its logits"),
            # a checkpoint that is meant to be multiplied by 1 + weight
            ("model.norm.weight", lambda weight: weight - 1, "norm or head is not the plain one that training would use"),
        ],
    )
    def test_fails_where_the_engines_norm_or_head_is_another(
        self, tiny_llama: Target, seen: Any, tmp_path: Path, tensor: str, change: Any, message: str
    ) -> None:
        views, states = seen
        folder = tmp_path / "changed"
        shutil.copytree(tiny_llama.path, folder)
        tensors = load_file(folder / "model.safetensors")
        tensors[tensor] = change(tensors[tensor])
        save_file(tensors, folder / "model.safetensors")
        with pytest.raises(StageError, match=message):
            prove(tiny_llama.model_copy(update={"path": str(folder)}), views, states, states[:2], LAYERS)
