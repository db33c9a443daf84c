"""check_gate: each check can fail, and only where it is switched on."""

import copy
import json
from typing import Any

import pytest

from scripts import check_gate, compare_methods
from scripts.eagle3.config import Gate
from scripts.eagle3.errors import StageError
from scripts.eagle3.gate import gate_checks
from tests.summary_case import CONFIG, SUITES, make_run

OFF: dict[str, Any] = {
    **{"min_acceptance_length": None, "max_simulated_difference": None, "max_position_difference": None},
    **{"max_drafts_difference": None, "identical_outputs": False},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> dict:
    return compare_methods.summarise(CONFIG.evaluation, make_run(tmp_path_factory.mktemp("gate") / "sample"), SUITES)


@pytest.fixture
def summary(made) -> dict:
    return copy.deepcopy(made)


def missed(summary: dict, **gate: Any) -> list[str]:
    return [check.name for check in gate_checks(summary, Gate(**gate)) if not check.passed]


def test_sound_summary_passes_the_default_gate(summary):
    assert missed(summary, min_acceptance_length=1.79) == []


def test_gate_that_is_switched_off_checks_nothing(summary):
    assert gate_checks(summary, Gate(**OFF)) == []


def test_acceptance_length_is_pooled_over_drafts_not_averaged_over_suites(summary):
    suites = summary["methods"]["eagle3"]
    suites["everyday"] |= {"drafts": 300, "accepted_by_position": [30, 0, 0]}
    suites["technical"] |= {"drafts": 100, "accepted_by_position": [90, 80, 80]}
    pooled = 1 + (30 + 250) / 400
    assert missed(summary, **{**OFF, "min_acceptance_length": pooled - 0.001}) == []
    assert missed(summary, **{**OFF, "min_acceptance_length": pooled + 0.001}) == ["acceptance length"]


def test_low_acceptance_length_is_missed(summary):
    assert missed(summary, min_acceptance_length=1.81) == ["acceptance length"]


def test_simulated_length_that_differs_is_missed(summary):
    summary["simulated"]["everyday"]["accepted_by_position"] = [50, 20, 18]
    gate = {**OFF, "max_simulated_difference": 0.02}
    assert missed(summary, **gate) == ["difference of acceptance length"]


def test_position_that_differs_is_missed_although_the_length_agrees(summary):
    summary["simulated"]["everyday"]["accepted_by_position"] = [53, 19, 8]
    summary["simulated"]["technical"]["accepted_by_position"] = [53, 19, 8]
    assert missed(summary) == [f"difference at position {position}" for position in range(3)]


def test_number_of_drafts_that_differs_is_missed(summary):
    for figures in summary["simulated"].values():
        figures["drafts"] = 102
    assert missed(summary, **{**OFF, "max_drafts_difference": 0.01}) == ["difference of drafts, relative"]


@pytest.mark.parametrize("method", ["eagle3", "ngram"])
def test_output_that_differs_is_missed_and_ties_are_not(summary, method):
    figures = summary["methods"][method]["technical"]
    figures |= {"identical": 9, "ties": 1}
    assert missed(summary) == []
    figures |= {"identical": 9, "ties": 0}
    assert missed(summary) == [f"outputs of {method} equal the baseline's"]


def test_method_that_drafted_nothing_does_not_agree(summary):
    for figures in summary["methods"]["eagle3"].values():
        figures |= {"drafts": 0, "accepted_by_position": [0, 0, 0]}
    assert "drafts served" in missed(summary)


def test_suite_that_was_not_simulated_is_an_error(summary):
    del summary["simulated"]["technical"]
    with pytest.raises(StageError, match=r"expected \['everyday', 'technical'\], found \['everyday'\]"):
        gate_checks(summary, Gate())


def test_summary_without_the_method_is_an_error(summary):
    del summary["methods"]["eagle3"]
    with pytest.raises(StageError, match="no method eagle3"):
        gate_checks(summary, Gate())


def test_command_prints_a_table_and_one_line_for_each_miss(summary, tmp_path, capsys):
    summary["methods"]["ngram"]["everyday"]["identical"] = 0
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary))
    with pytest.raises(SystemExit) as exit_:
        check_gate.main(["--summary", str(path), "--gate", json.dumps({"min_acceptance_length": 3})])
    assert exit_.value.code == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 1 + 8 and out.count("MISSED") == 2
    assert err.splitlines() == [
        "check_gate: missed: acceptance length: required at least 3, found 1.8000",
        "check_gate: missed: outputs of ngram equal the baseline's: required all, ties excepted, found 10 of 20",
    ]


def test_command_succeeds_on_a_sound_summary(summary, tmp_path, capsys):
    path = tmp_path / "summary.json"
    path.write_text(json.dumps(summary))
    check_gate.main(["--summary", str(path), "--gate", "{}"])
    assert "MISSED" not in capsys.readouterr().out
