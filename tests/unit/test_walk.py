"""The simulated walk: where it starts, how it advances, where it ends, and what it counts."""

import pytest
import torch

from scripts.eagle3.draft import build_draft
from scripts.eagle3.shards import StateRow
from scripts.eagle3.walk import WalkResult, add_row, answer_spans, drafted_tokens, walk_rows
from tests.draft_case import make_draft_files, random_row

K = 3
MISS = 9999


def walk(ids: list[int], mask: list[int], misses: set[tuple[int, int]]) -> WalkResult:
    """Walks a row whose draft is right everywhere but at (step, position) in `misses`."""
    tokens = torch.tensor(ids)
    drafted = torch.full((K, len(ids) - 1), MISS)
    for step in range(K):
        for position in range(len(ids) - 2 - step):
            if (step, position) not in misses:
                drafted[step, position] = tokens[position + 2 + step]
    result = WalkResult(K)
    add_row(result, tokens, torch.tensor(mask, dtype=torch.bool), drafted)
    return result


def test_perfect_draft_advances_by_k_plus_one():
    # prompt 0..3, answer 4..12: drafts from 3 (knows x4) and 7 (knows x8) hit three each; from 11 x12 is the end
    result = walk(list(range(13)), [0] * 4 + [1] * 9, set())
    assert (result.drafts, result.accepted_by_position, result.unknown_by_position) == (2, [2, 2, 2], [0, 0, 0])
    assert result.acceptance_length == 4


def test_walk_stops_a_draft_at_its_first_miss_and_goes_on_behind_the_targets_own_token():
    # from 3: step 0 right, step 1 wrong -> one accepted, next from 5; from 5: step 0 wrong -> next from 6, ...
    result = walk(list(range(9)), [0] * 4 + [1] * 5, {(1, 3), (0, 5)})
    # 3 (x5), 5 (miss), 6 (x8 and then the answer is over)
    assert (result.drafts, result.accepted_by_position) == (3, [2, 0, 0])
    assert result.unknown_by_position == [0, 1, 1]


def test_later_step_that_is_right_behind_a_miss_counts_nothing():
    result = walk(list(range(8)), [0] * 4 + [1] * 4, {(0, 3), (0, 4), (0, 5)})
    assert (result.drafts, result.accepted_by_position) == (3, [0, 0, 0])


def test_nothing_is_drafted_for_an_answer_of_one_token():
    assert walk(list(range(6)), [0, 0, 0, 1, 0, 0], set()).drafts == 0


def test_answer_of_two_tokens_is_drafted_once():
    result = walk(list(range(6)), [0, 0, 0, 1, 1, 0], set())
    # x5 is the next turn's prompt: the row knows it, the answer ends before it
    assert (result.drafts, result.accepted_by_position, result.unknown_by_position) == (1, [1, 0, 0], [0, 1, 1])


def test_each_answer_of_a_row_is_a_walk_of_its_own():
    mask = [0, 0, 1, 1, 1, 0, 0, 1, 1, 1]
    both = walk(list(range(10)), mask, set())
    first, second = walk(list(range(10)), mask[:5] + [0] * 5, set()), walk(list(range(10)), [0] * 7 + mask[7:], set())
    assert (both.drafts, first.drafts, second.drafts) == (2, 1, 1)
    assert both.accepted_by_position == [2, 2, 0]


def test_row_that_starts_with_its_answer_has_nothing_to_draft_from():
    assert walk(list(range(6)), [1] * 6, set()).drafts == 0


def test_spans_are_the_runs_of_the_mask():
    mask = torch.tensor([1, 0, 1, 1, 0, 0, 1], dtype=torch.bool)
    assert list(answer_spans(mask)) == [(0, 0), (2, 3), (6, 6)]
    assert list(answer_spans(torch.zeros(4, dtype=torch.bool))) == []


def test_unknown_positions_bound_the_acceptance_length():
    result = WalkResult(2, drafts=10, accepted_by_position=[5, 2], unknown_by_position=[0, 3])
    assert (result.acceptance_length, result.acceptance_length_upper) == (1.7, 2.0)
    figures = result.figures()
    assert figures["acceptance_by_position"] == [0.5, 0.2]
    assert figures["conditional_acceptance_by_position"] == [0.5, 0.4]
    assert (figures["drafted_tokens"], figures["accepted_tokens"]) == (20, 7)


@pytest.fixture(scope="module")
def draft(tmp_path_factory, tiny_llama):
    return build_draft(*make_draft_files(tmp_path_factory.mktemp("walk"), tiny_llama))


def test_coverage_counts_answer_tokens_in_the_draft_vocabulary(tiny_llama, draft):
    row = random_row(tiny_llama, 40, 20)
    result = walk_rows(draft, [row], K)
    inside = sum(bool(draft.t2d[token]) for token in row.token_ids[20:].tolist())
    assert 0 < inside < 20
    assert (result.answer_tokens, result.coverage, result.rows) == (20, inside / 20, 1)


def test_each_step_sees_the_true_tokens_so_far_and_none_beyond(tiny_llama, draft):
    row = random_row(tiny_llama, 24, 8)
    drafted = drafted_tokens(draft, row, K)
    changed = row.token_ids.clone()
    changed[16] = (changed[16] + 1) % 512
    other = drafted_tokens(draft, StateRow(row.key, changed, row.loss_mask, row.hidden_states), K)
    for step in range(K):
        # step k from position t takes x[..t+1+k]: token 16 first at t = 15 - k
        assert torch.equal(drafted[step, : 15 - step], other[step, : 15 - step]), step
    assert not torch.equal(drafted, other)


def test_drafted_tokens_are_target_ids(tiny_llama, draft):
    drafted = drafted_tokens(draft, random_row(tiny_llama, 24, 8), K)
    assert drafted.shape == (K, 23)
    assert draft.t2d[drafted.flatten()].all()
