"""Pruning of checkpoints: the best and the last stay, whatever the number, and nothing that is awaited goes."""

import pytest

from scripts.eagle3.draft_files import WEIGHTS, weights_path
from scripts.eagle3.files import read_json, sha256_file, write_json
from scripts.eagle3.pruning import prune

# of segments 0 to 5
LENGTHS = [1.5, 1.9, 1.7, 1.8, 1.6, 1.4]


@pytest.fixture
def checkpoints(tmp_path):
    """Six checkpoints; segment 1 is the best."""
    for segment, length in enumerate(LENGTHS):
        state = tmp_path / f"{segment}/deepspeed/state"
        state.mkdir(parents=True)
        (state / "rank.pt").write_text("state")
        weights = tmp_path / f"{segment}/{WEIGHTS}"
        weights.write_text(f"weights {segment}")
        metrics = {"validation": {"acceptance_length": length}}
        record = {"segment": segment, "folder": str(segment), "metrics": metrics, "weights_sha256": sha256_file(weights)}
        write_json(tmp_path / f"{segment}.json", record)
    return tmp_path


def left(checkpoints):
    """Segments with weights, and those with a resume state."""
    segments = range(len(LENGTHS))
    weights = {n for n in segments if weights_path(checkpoints, read_json(checkpoints / f"{n}.json"))}
    return weights, {n for n in segments if (checkpoints / f"{n}/deepspeed/state/rank.pt").is_file()}


def awaited_by_nobody(segment):
    return False


@pytest.mark.parametrize(("keep", "weights"), [(1, {1, 4, 5}), (2, {1, 3, 4, 5}), (3, {1, 2, 3, 4, 5})])
def test_the_best_and_the_last_two_checkpoints_stay(checkpoints, keep, weights):
    prune(checkpoints, 5, keep, awaited_by_nobody)
    assert left(checkpoints) == (weights, {4, 5})
    prune(checkpoints, 5, keep, awaited_by_nobody)
    assert left(checkpoints) == (weights, {4, 5})


def test_pruning_after_each_segment_never_takes_the_best_so_far(checkpoints):
    for last in range(len(LENGTHS)):
        prune(checkpoints, last, 1, awaited_by_nobody)
        best = max(range(last + 1), key=LENGTHS.__getitem__)
        assert {best, last} <= left(checkpoints)[0]


def test_without_a_number_all_checkpoints_stay(checkpoints):
    prune(checkpoints, 5, 0, awaited_by_nobody)
    everything = set(range(len(LENGTHS)))
    assert left(checkpoints) == (everything, everything)


def test_an_awaited_checkpoint_stays_whole(checkpoints):
    prune(checkpoints, 5, 1, lambda segment: segment in (0, 1))
    assert left(checkpoints) == ({0, 1, 4, 5}, {0, 1, 4, 5})


def test_checkpoints_of_later_segments_that_are_trained_again_are_not_counted(checkpoints):
    prune(checkpoints, 2, 1, awaited_by_nobody)
    assert left(checkpoints) == ({1, 2, 3, 4, 5}, {1, 2, 3, 4, 5})
