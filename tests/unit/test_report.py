"""The report: one file that needs nothing else, tells what the run's records say, and claims no more."""

import re
import shutil
from html import unescape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from scripts import compare_methods, report
from scripts.eagle3.errors import StageError
from tests.summary_case import CONFIG, SUITES, edit, make_run, write

VOID = {"meta", "br", "path", "use", "rect", "input"}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_run(tmp_path_factory.mktemp("report") / "sample")
    compare_methods.run(CONFIG.evaluation, folder, SUITES, folder / "checkpoints", folder / "metrics", segments=2)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "sample"))


def compare_again(folder: Path) -> None:
    write(folder / "evaluation" / "summary.json", compare_methods.summarise(CONFIG.evaluation, folder, SUITES))


def page(folder: Path, config=CONFIG) -> str:
    report.run(config, folder, folder / "hidden", folder / "report.html")
    return (folder / "report.html").read_text()


def text_of(html: str) -> str:
    """What a reader sees."""
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", re.sub(r"<(title|style)>.*?</\1>", "", html, flags=re.DOTALL))))


def test_page_counts_the_passes_that_were_trained_before_an_early_stop(folder):
    edit(folder / "checkpoints/1.json", folder="1")
    shutil.copy(folder / "checkpoints/1.json", folder / "checkpoints/2.json")
    edit(folder / "checkpoints/2.json", segment=2, stopped=True)
    compare_methods.run(CONFIG.evaluation, folder, SUITES, folder / "checkpoints", folder / "metrics", segments=3)
    training = CONFIG.training.model_copy(update={"segments": 3, "patience": 1})
    text = text_of(page(folder, CONFIG.model_copy(update={"training": training})))
    assert "passes 2, 20 optimiser steps" in text and "optimiser adamw, learning rate 0.001, linear" in text


def test_page_refers_to_nothing_outside_itself(folder):
    html = page(folder)
    assert "http" not in html and "//" not in re.sub(r"<script>.*?</script>", "", html)
    assert not re.search(r"<(link|script|img|iframe|object)\b", html)
    assert all(value.startswith("#") for value in re.findall(r'(?:href|src)="([^"]*)"', html))
    assert not re.search(r"url\((?!#)", html) and "@import" not in html


def test_page_is_well_formed(folder):
    class Nesting(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.open: list[str] = []

        def handle_starttag(self, tag, attributes) -> None:
            if tag not in VOID:
                self.open.append(tag)

        def handle_endtag(self, tag) -> None:
            if tag not in VOID:
                assert self.open.pop() == tag

    parser = Nesting()
    parser.feed(page(folder))
    assert parser.open == []


def test_headline_is_pooled_over_suites(folder):
    text = text_of(page(folder))
    assert "1.800 acceptance length, served" in text
    assert "1.792 the same, simulated: differs by 0.0079" in text
    assert "20 / 20 outputs identical" in text


def test_all_plots_are_inside(folder):
    assert page(folder).count('<svg class="plot"') == 4


def test_texts_of_the_data_are_escaped(folder):
    html = page(folder)
    assert "<script>" not in html and "Who &lt;script&gt;asks" in html


def test_example_marks_exactly_the_accepted_tokens(folder):
    marked = re.findall(r"<mark>([^<]*)</mark>", page(folder))
    # steps 1, 3, 2, 1, ...: tokens 1, 2 and 4 were drafted; the first mark is the legend's
    assert marked[1:4] == [" word1", " word2", " word4"]


def test_cpu_run_claims_no_speedup(folder):
    text = text_of(page(folder))
    assert "no speed-up is claimed" in text and "Tokens per second were measured on a CPU" in text
    assert "tokens per second against the baseline" not in text


def test_gpu_run_shows_its_speedup(folder):
    for method in ("baseline", "eagle3", "ngram"):
        for suite in SUITES:
            edit(folder / "evaluation" / method / f"{suite}.json", device="1 x NVIDIA H200")
    compare_again(folder)
    text = text_of(page(folder))
    assert "1.25× tokens per second against the baseline" in text
    assert "no speed-up is claimed" not in text


def test_missed_gate_is_shown_and_makes_no_error(folder):
    gate = CONFIG.gate.model_copy(update={"min_acceptance_length": 2.0})
    html = page(folder, CONFIG.model_copy(update={"gate": gate}))
    assert '<td class="bad">missed</td><td>acceptance length</td><td>at least 2</td><td>1.8000</td>' in html


def test_outputs_that_differ_are_not_called_identical(folder):
    path = folder / "evaluation" / "eagle3" / "everyday.json"
    edit(path, differences=[{"id": "a", "position": 0, "logit_gap": 0.0}, {"id": "b", "position": 0, "logit_gap": 2.0}])
    compare_again(folder)
    text = text_of(page(folder))
    assert "18 of 20 answers were" in text and "1 more differs only after a tie" in text
    assert "every answer was" not in text


def test_ledgers_of_earlier_stages_are_told(folder):
    counts = {"read": 600, "kept": 560, "duplicates": 20, "contaminated": 15, "rejected": 5}
    rejected = [{"source": "train.jsonl", "row": 17, "reason": "not JSON"}]
    write(
        folder / "conversations" / "ledger.json",
        {
            **{"counts": counts, "rows": {"rejected": rejected}, "split": {"train": 500, "val": 60}},
            **{"sources": [{"source": "train.jsonl"}], "evaluation": {"everyday": {"counts": {"kept": 10}}}},
        },
    )
    text = text_of(page(folder))
    assert "600 from train.jsonl" in text and "20 duplicates, 15 contaminated, 5 rejected" in text
    assert "not JSON" in text and "everyday (10)" in text


def test_run_without_ledgers_still_has_a_report(folder):
    text = text_of(page(folder))
    assert "Conversations" not in text and "512 of the target's 1,024 tokens" in text


def test_missing_summary_is_named(folder):
    (folder / "evaluation" / "summary.json").unlink()
    with pytest.raises(StageError, match=r"summary.json: no such file"):
        page(folder)
