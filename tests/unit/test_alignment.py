"""Which rows the alignment proof takes, and that company which changes one of them is seen whatever its length."""

from typing import Any

import pytest
import torch

from scripts.eagle3.alignment import HEAD_TOKENS, Proof, proof_rows, prove
from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError

LAYERS = [2, 4, 8]


def rows(*lengths: int) -> list[TokenRow]:
    return [make_row(range(number, number + length)) for number, length in enumerate(lengths)]


def test_rows_of_one_length_are_proven_at_different_lengths() -> None:
    lengths = [len(row) for row in proof_rows(rows(*[2048] * 20))]
    assert lengths == list(HEAD_TOKENS) * 4


def test_the_longest_rows_are_taken_once_and_short_ones_whole() -> None:
    given = rows(5, 300, 40, 7)
    assert [len(row) for row in proof_rows([*given, *given])] == [300, 40, 7, 5]


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_one_row_that_company_changes_fails_the_proof(tiny_llama: Target, wrong: int) -> None:
    states = [torch.randn(length, len(LAYERS), 256) for length in (200, 30, 3)]
    alone = [state.clone() for state in states]
    alone[wrong][:, 1] *= 1.01
    with pytest.raises(StageError, match=r"differ by 0.01 \(relative, median of the worst row\) in state 4"):
        prove(tiny_llama, [], states, alone, LAYERS)


def test_a_deep_layer_may_differ_by_more(tiny_llama: Target) -> None:
    states = [torch.randn(9, 3, 256)]
    alone = [states[0] * 1.0015]
    with pytest.raises(StageError, match=r"in state 2, expected at most 0\.001;"):
        prove(tiny_llama, [], states, alone, [2, 30, 61])
    alone[0][:, 0] = states[0][:, 0]
    alone[0][:, 2] *= 1.002
    with pytest.raises(StageError, match=r"differ by 0.0035 \(.*\) in state 61, expected at most 0.0028;"):
        prove(tiny_llama, [], states, alone, [2, 30, 61])


def test_states_that_are_not_numbers_fail_the_proof(tiny_llama: Target) -> None:
    states = [torch.randn(9, len(LAYERS), 256), torch.full((4, len(LAYERS), 256), float("nan"))]
    with pytest.raises(StageError, match="differ by nan"):
        prove(tiny_llama, [], states, states, LAYERS)
    one_layer = torch.ones(4, len(LAYERS), 256)
    one_layer[:, 1] = float("nan")
    with pytest.raises(StageError, match=r"differ by nan \(.*\) in state 4"):
        prove(tiny_llama, [], [one_layer], [one_layer], LAYERS)


def test_the_figures_are_told_in_one_line() -> None:
    figures: dict[str, Any] = {"argmax_agreement": 0.995, "median_logprob_difference": 0.0123456}
    proof = Proof([512, 384], 896, alone_batch_difference={"2": 1e-7, "8": 0.0034}, **figures)
    assert "99.50% of 896 positions" in str(proof) and "rows of 512, 384 tokens" in str(proof) and "0.0034" in str(proof)
    assert "\n" not in str(proof)
