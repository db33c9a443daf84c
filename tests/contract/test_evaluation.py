"""evaluate_method in the real engine: outputs, counters, resuming, and the comparison with the baseline."""

import json
from pathlib import Path
from typing import Any

import pytest

from scripts import compare_methods, evaluate_method
from scripts.eagle3.acceptance import Counters
from scripts.eagle3.config import Evaluation, Method, Target
from scripts.eagle3.errors import StageError
from tests.generation_case import HARDWARE, conversation, make_looping_target, write_conversations

pytestmark = pytest.mark.slow
SUITES = ["one-turn", "two-turn"]
EVALUATION = Evaluation(max_tokens=60, max_num_seqs=3)


class Run:
    """Suites in a folder, and what each method made of them."""

    def __init__(self, target: Target, folder: Path) -> None:
        self.target, self.folder = target, folder
        suites = {
            "one-turn": [conversation(f"s{i}", [f"say {i} and stop"]) for i in range(4)],
            "two-turn": [conversation(f"t{i}", [f"count to {i}", "and back"]) for i in range(2)],
        }
        for suite, rows in suites.items():
            write_conversations(folder / "conversations" / f"{suite}.parquet", rows)

    def evaluate(self, method: str, output: str | None = None, evaluation: Evaluation = EVALUATION) -> dict[str, Any]:
        folder = self.folder / "evaluation" / (output or method)
        baseline = None if method == "baseline" else self.folder / "evaluation" / "baseline"
        conversations, export, store = (self.folder / name for name in ("conversations", "export", "store"))
        evaluate_method.run(self.target, evaluation, method, export, baseline, conversations, SUITES, store, folder, HARDWARE)
        return {suite: json.loads((folder / f"{suite}.json").read_text()) for suite in SUITES}

    def chunks(self, method: str) -> Path:
        (path,) = self.folder.glob(f"store/evaluate_method/*/{method}/chunks.jsonl")
        return path


@pytest.fixture(scope="module")
def run(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("evaluation")
    return Run(make_looping_target(tiny_llama, folder / "target"), folder)


@pytest.fixture(scope="module")
def baseline(run: Run) -> dict[str, Any]:
    return run.evaluate("baseline")


@pytest.fixture(scope="module")
def ngram(run: Run, baseline: dict[str, Any]) -> dict[str, Any]:
    return run.evaluate("ngram")


def outputs(result: dict[str, Any]) -> list[list[int]]:
    return [entry["output_ids"] for entry in result["requests"]]


def test_every_turn_is_answered_on_top_of_the_methods_own_answer(baseline: dict[str, Any]) -> None:
    assert [entry["turn"] for entry in baseline["one-turn"]["requests"]] == [0] * 4
    assert [(entry["id"], entry["turn"]) for entry in baseline["two-turn"]["requests"]] == [
        *(("t0", 0), ("t0", 1)),
        *(("t1", 0), ("t1", 1)),
    ]
    first, second = baseline["two-turn"]["requests"][:2]
    assert second["prompt_ids"][: len(first["prompt_ids"])] == first["prompt_ids"]
    assert len(second["prompt_ids"]) > len(first["prompt_ids"]) + 20, "the answer is not in the second prompt"


def test_baseline_drafts_nothing_and_counts_its_tokens(baseline: dict[str, Any]) -> None:
    for result in baseline.values():
        assert Counters.from_record(result) == Counters()
        assert result["output_tokens"] == sum(map(len, outputs(result))) and result["wall_s"] > 0


def test_repeated_evaluation_gives_the_same_outputs(run: Run, baseline: dict[str, Any]) -> None:
    run.chunks("baseline").unlink()
    again = run.evaluate("baseline", output="again")
    for suite in SUITES:
        assert outputs(again[suite]) == outputs(baseline[suite])
        assert again[suite]["wall_s"] != baseline[suite]["wall_s"], "it was not measured again"


def test_finished_chunks_are_not_run_again(run: Run, baseline: dict[str, Any]) -> None:
    path = run.chunks("baseline")
    lines = path.read_bytes().splitlines(keepends=True)
    assert len(lines) == 3
    path.write_bytes(b"".join(lines[:2]) + lines[2][:50])  # killed while the last chunk was being written
    resumed = run.evaluate("baseline", output="resumed")
    after = path.read_bytes().splitlines(keepends=True)
    assert after[:2] == lines[:2] and len(after) == 3
    records = [json.loads(line)["record"] for line in after]
    assert resumed["one-turn"]["wall_s"] == records[0]["wall_s"] + records[1]["wall_s"]
    assert outputs(resumed["two-turn"]) == outputs(baseline["two-turn"])


def test_counters_fit_the_outputs(ngram: dict[str, Any]) -> None:
    for result in ngram.values():
        counters = Counters.from_record(result)
        assert counters.drafts > 0 and counters.accepted_tokens > 0, "the case must accept something"
        assert counters.accepted_tokens == sum(counters.accepted_by_position)
        assert len(counters.accepted_by_position) == 3
        assert list(counters.accepted_by_position) == sorted(counters.accepted_by_position, reverse=True)
        assert counters.drafts <= counters.drafted_tokens <= 3 * counters.drafts
        assert counters.accepted_tokens < result["output_tokens"] + 3 * len(result["requests"])


def test_engine_steps_of_an_example_add_up_to_its_answer(baseline: dict[str, Any], ngram: dict[str, Any]) -> None:
    for result, most in ((baseline, 1), (ngram, 4)):
        traced = [entry for suite in SUITES for entry in result[suite]["requests"] if "steps" in entry]
        assert len(traced) == 2 + 2 * 2
        for entry in traced:
            assert sum(entry["steps"]) == len(entry["output_ids"]) == len(entry["texts"])
            assert max(entry["steps"]) == most


def test_drafting_does_not_change_the_outputs(run: Run, baseline: dict[str, Any], ngram: dict[str, Any]) -> None:
    for suite in SUITES:
        assert outputs(ngram[suite]) == outputs(baseline[suite])
        assert ngram[suite]["differences"] == []


def test_difference_is_found_and_its_logit_gap_is_the_targets(
    run: Run, baseline: dict[str, Any], ngram: dict[str, Any]
) -> None:
    folder = run.folder / "evaluation" / "baseline"
    path = folder / "two-turn.json"
    original = path.read_text()
    altered = json.loads(original)
    entry = altered["requests"][0]
    right, wrong = entry["output_ids"][5], (entry["output_ids"][5] + 1) % 1000
    entry["output_ids"][5] = wrong
    altered["requests"][1]["prompt_ids"] = [*altered["requests"][1]["prompt_ids"], 1]
    try:
        path.write_text(json.dumps(altered))
        found = run.evaluate("ngram", output="differing")["two-turn"]["differences"]
    finally:
        path.write_text(original)
    first, second = found
    assert {name: first[name] for name in ("id", "turn", "position", "token", "baseline_token")} == {
        **{"id": "t0", "turn": 0, "position": 5},
        **{"token": right, "baseline_token": wrong},
    }
    assert first["logit_gap"] is None or first["logit_gap"] < 0
    assert second == {"id": "t0", "turn": 1, "follows": True}
    assert compare_methods.count_differences(found, 1e-4) == (0, 2)


def test_missing_head_is_refused_before_the_engine_is_loaded(run: Run, baseline: dict[str, Any]) -> None:
    with pytest.raises(StageError, match="no head there"):
        run.evaluate("eagle3")


def test_prompt_longer_than_the_target_takes_is_refused(run: Run) -> None:
    with pytest.raises(StageError, match=r"suite one-turn, s0: may need \d+ tokens, the target takes 2048"):
        run.evaluate("baseline", evaluation=Evaluation(max_tokens=3000))


def test_method_that_does_not_exist_is_refused(run: Run) -> None:
    methods = {"baseline": Method(kind="baseline"), "eagle3": Method(kind="eagle3")}
    with pytest.raises(StageError, match="no method ngram, there are baseline, eagle3"):
        run.evaluate("ngram", evaluation=Evaluation(methods=methods))
