"""Counters of drafts, and the figures that follow from them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.eagle3.acceptance import Counters, acceptance
from scripts.eagle3.errors import StageError


def test_figures_of_a_worked_example():
    found = acceptance(200, [100, 40, 10])
    assert found["acceptance_length"] == 1.75
    assert found["acceptance_by_position"] == [0.5, 0.2, 0.05]
    assert found["conditional_acceptance_by_position"] == [0.5, 0.4, 0.25]


def test_position_that_nothing_reached_has_rate_zero():
    assert acceptance(10, [4, 0, 0])["conditional_acceptance_by_position"] == [0.4, 0.0, 0.0]


def test_method_without_drafts_gives_one_token_a_step():
    assert acceptance(0, [])["acceptance_length"] == 1.0


@pytest.mark.parametrize("by_position", [[11], [5, 6]])
def test_counts_that_rise_are_refused(by_position):
    with pytest.raises(StageError, match="must not rise"):
        acceptance(10, by_position)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), st.integers(0, 50))
def test_conditional_rates_multiply_to_the_marginal_ones(losses, rest):
    reached = [rest + sum(losses[index:]) for index in range(len(losses) + 1)]
    drafts, by_position = reached[0], reached[1:]
    found = acceptance(drafts, by_position)
    product = 1.0
    for conditional, marginal in zip(found["conditional_acceptance_by_position"], found["acceptance_by_position"], strict=True):
        product *= conditional
        assert product == pytest.approx(marginal)


def test_difference_and_sum_of_counters_are_exact():
    early, late = Counters(2, 6, 3, (2, 1, 0)), Counters(5, 15, 9, (5, 3, 1))
    assert late - early == Counters(3, 9, 6, (3, 2, 1))
    assert early + (late - early) == late
    assert Counters() + late == late


def test_counters_survive_a_record():
    counters = Counters(5, 15, 9, (5, 3, 1))
    assert Counters.from_record({**counters.as_record(), "wall_s": 1.0}) == counters
