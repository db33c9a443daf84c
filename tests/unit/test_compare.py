"""compare_methods: figures, ties, and refusing to compare what is not comparable."""

import csv
import json
from pathlib import Path

import pytest

from scripts import compare_methods
from scripts.eagle3.errors import StageError
from tests.summary_case import CONFIG, SUITES, TARGET, edit, make_run

KEYS = [
    *("acceptance_length", "acceptance_by_position", "conditional_acceptance_by_position", "tokens_per_s", "speedup"),
    *("identical", "ties", "total", "K", "temperature", "max_num_seqs", "drafts", "accepted_by_position"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_run(tmp_path / "sample")


def compare(folder: Path) -> dict:
    return compare_methods.summarise(CONFIG.evaluation, folder, SUITES)


def write_all(folder: Path) -> None:
    compare_methods.run(CONFIG.evaluation, folder, SUITES, folder / "checkpoints", folder / "metrics", segments=2)


def test_summary_holds_every_figure_of_every_method_and_suite(folder):
    write_all(folder)
    summary = json.loads((folder / "evaluation" / "summary.json").read_text())
    assert sorted(summary) == ["methods", "provenance", "simulated"]
    assert sorted(summary["methods"]) == ["baseline", "eagle3", "ngram"]
    for suites in summary["methods"].values():
        assert sorted(suites) == SUITES
        for figures in suites.values():
            assert set(KEYS) <= set(figures)
    assert sorted(summary["simulated"]) == SUITES


def test_figures_are_those_of_the_counts_and_seconds(folder):
    found = compare(folder)["methods"]
    eagle3 = found["eagle3"]["everyday"]
    assert eagle3["acceptance_length"] == pytest.approx(1.8)
    assert eagle3["acceptance_by_position"] == [0.5, 0.2, 0.1]
    assert eagle3["conditional_acceptance_by_position"] == pytest.approx([0.5, 0.4, 0.5])
    assert eagle3["tokens_per_s"] == pytest.approx(200 / 8)
    assert eagle3["speedup"] == pytest.approx(10 / 8)
    assert (eagle3["identical"], eagle3["ties"], eagle3["total"], eagle3["K"]) == (10, 0, 10, 3)
    assert found["baseline"]["everyday"]["speedup"] == 1 and found["baseline"]["everyday"]["K"] == 0
    assert found["ngram"]["everyday"]["speedup"] == pytest.approx(0.5)


def test_seconds_of_another_device_give_no_speedup(folder):
    edit(folder / "evaluation" / "eagle3" / "everyday.json", device="1 x NVIDIA H200")
    assert compare(folder)["methods"]["eagle3"]["everyday"]["speedup"] is None


@pytest.mark.parametrize(
    ("differences", "ties", "different"),
    [
        ([{"id": "a", "position": 1, "logit_gap": 0.00005}], 1, 0),
        ([{"id": "a", "position": 1, "logit_gap": -0.00005}], 1, 0),
        ([{"id": "a", "position": 1, "logit_gap": 0.5}], 0, 1),
        ([{"id": "a", "position": 1, "logit_gap": None}], 0, 1),
        ([{"id": "a", "position": None}], 0, 1),
        ([{"id": "a", "position": 1, "logit_gap": 0.0}, {"id": "a", "turn": 1, "follows": True}], 2, 0),
        ([{"id": "a", "position": 1, "logit_gap": 0.5}, {"id": "a", "turn": 1, "follows": True}], 0, 2),
    ],
)
def test_only_differences_within_the_margin_and_what_follows_from_them_are_ties(differences, ties, different):
    assert compare_methods.count_differences(differences, 1e-4) == (ties, different)


def test_ties_and_differences_are_taken_from_identical_outputs(folder):
    path = folder / "evaluation" / "eagle3" / "everyday.json"
    edit(path, differences=[{"id": "x", "position": 0, "logit_gap": 0.0}, {"id": "y", "position": 0, "logit_gap": 1.0}])
    found = compare(folder)["methods"]["eagle3"]["everyday"]
    assert (found["identical"], found["ties"], found["total"]) == (8, 1, 10)


def test_missing_request_is_refused_by_name(folder):
    path = folder / "evaluation" / "ngram" / "everyday.json"
    edit(path, requests=json.loads(path.read_text())["requests"][:-1])
    with pytest.raises(StageError, match=r"ngram/everyday.json: 9 requests, the baseline has 10 \(1 missing.*everyday-9"):
        compare(folder)


def test_other_request_is_refused_although_the_counts_agree(folder):
    path = folder / "evaluation" / "ngram" / "everyday.json"
    requests = json.loads(path.read_text())["requests"]
    requests[3]["id"] = "somebody-else"
    edit(path, requests=requests)
    with pytest.raises(StageError, match=r"1 missing, 1 extra"):
        compare(folder)


@pytest.mark.parametrize("key", ["target", "engine"])
def test_result_of_another_target_or_engine_is_refused(folder, key):
    path = folder / "evaluation" / "eagle3" / "technical.json"
    provenance = json.loads(path.read_text())["provenance"]
    provenance[key] = {**provenance["target"], "weights": "other"} if key == "target" else "vllm 0.22.0"
    edit(path, provenance=provenance)
    with pytest.raises(StageError, match=f"eagle3/technical.json: {key}"):
        compare(folder)


def test_simulation_of_another_head_is_refused(folder):
    provenance = {"target": TARGET, "weights": "another"}
    edit(folder / "evaluation" / "simulated" / "technical.json", provenance=provenance)
    with pytest.raises(StageError, match=r"simulated/technical.json: weights is another"):
        compare(folder)


def test_result_with_other_settings_is_refused(folder):
    path = folder / "evaluation" / "eagle3" / "technical.json"
    edit(path, settings={**json.loads(path.read_text())["settings"], "max_tokens": 99})
    with pytest.raises(StageError, match=r"settings.max_tokens is 99, expected 20"):
        compare(folder)


def test_missing_result_is_named(folder):
    (folder / "evaluation" / "simulated" / "technical.json").unlink()
    with pytest.raises(StageError, match=r"simulated/technical.json: no such file"):
        compare(folder)


def test_tables_hold_a_line_for_each_method_and_suite(folder):
    write_all(folder)
    lines = list(csv.DictReader((folder / "evaluation" / "summary.csv").open()))
    assert len(lines) == 6
    assert {line["method"]: line["acceptance_length"] for line in lines}["eagle3"] == "1.8"
    markdown = (folder / "evaluation" / "summary.md").read_text()
    assert "| everyday | eagle3 | 1.800 | 0.500 0.200 0.100 | 100 | 25.0 | 1.25 | 10/10 |" in markdown
    assert "| technical | simulated | 1.7921 |" in markdown


def test_plots_are_the_same_bytes_each_time_and_follow_the_page(folder):
    write_all(folder)
    plots = folder / "evaluation" / "plots"
    first = {path.name: path.read_bytes() for path in plots.iterdir()}
    assert sorted(first) == ["acceptance.svg", "coverage.svg", "segments.svg", "training.svg"]
    write_all(folder)
    assert {path.name: path.read_bytes() for path in plots.iterdir()} == first
    for content in first.values():
        assert b"currentColor" in content and b"prefers-color-scheme: dark" in content


def test_training_curve_uses_every_logged_step(folder):
    write_all(folder)
    path = folder / "evaluation" / "plots" / "training.svg"
    coarse = path.read_text()
    lines = [{"kind": "train", "step": step, "loss": 9.0 - step / 10, "accuracy": [0.1, 0.1, 0.1]} for step in range(20)]
    (folder / "metrics").mkdir()
    (folder / "metrics" / "0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_all(folder)
    assert len(path.read_text()) > len(coarse)
