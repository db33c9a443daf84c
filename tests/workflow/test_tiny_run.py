"""The whole DAG on a tiny random target, with the real engine; then what a second run, an edit and a touch cause."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Target
from tests.workflow.test_plan import jobs

# pretended: the jobs run on the CPU, the budget, the leases and the counts do not know
EIGHT_GPUS = {"CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7"}

AFTER_TRAINING = {
    "select_checkpoint": 1,
    "export_draft": 1,
    "evaluate_method": 1,
    "simulate_acceptance": 1,
    "compare_methods": 1,
    "report": 1,
    "check_gate": 1,
    "all": 1,
}


def tiny_config(target: Target) -> dict[str, Any]:
    return {
        "run": "tiny",
        "target": target.model_dump(exclude_none=True),
        "conversations": {
            "train": [
                {"path": "config/data/train/questions.jsonl", "limit": 20},
                {"path": "config/data/train/dialogues.jsonl", "limit": 8},
            ],
            "evaluation": {
                "everyday": {"path": "config/data/eval/everyday.jsonl", "limit": 4},
                "technical": {"path": "config/data/eval/technical.jsonl", "limit": 4},
            },
            "validation_fraction": 0.2,
        },
        "responses": {"max_tokens": 32},
        "rows": {"max_length": 512},
        "scatter": {"parts": 2, "shards_per_part": 2},
        "vocabulary": {"draft_vocab_size": 512, "min_coverage": 0.5},
        "training": {"segments": 2, "batch_tokens": 1024, "dtype": "float32", "learning_rate": 1e-3},
        "evaluation": {"max_tokens": 24, "max_num_seqs": 8},
        # a random target that is not trained for long: outputs must agree, acceptance may be low
        "gate": {"max_simulated_difference": 0.05, "max_position_difference": 0.05, "max_drafts_difference": 0.05},
    }


@pytest.fixture(scope="module")
def run(checkout, tiny_llama) -> Iterator[Path]:
    """The results folder of a run with the profile of a GPU machine: 8 pretended GPUs, states on another file system."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as other_disk:
        config = {**tiny_config(tiny_llama), "storage": {"hidden_states": other_disk}}
        (checkout.root / "tiny.yaml").write_text(yaml.safe_dump(config))
        checkout.snakemake("--profile", "local-rtx6000", "--configfile", "tiny.yaml", environment=EIGHT_GPUS)
        yield checkout.root / "results/tiny"


def planned(checkout, config: dict[str, Any]) -> dict[str, int]:
    (checkout.root / "edited.yaml").write_text(yaml.safe_dump(config))
    printed = checkout.snakemake("-n", "--cores", "all", "--configfile", "edited.yaml")
    return {} if "Nothing to be done" in printed else jobs(printed)


def test_whole_run_leaves_every_artefact(run):
    for part in ("part-0", "part-1", "val"):
        for shard in (0, 1):
            assert (run / f"hidden/{part}/shard-{shard}.pt").is_file()
    assert (run / "export/config.json").is_file()
    assert "<svg" in (run / "report.html").read_text()
    assert (run / "gate.passed").is_file()


def test_summary_has_the_documented_shape(run):
    summary = json.loads((run / "evaluation/summary.json").read_text())
    assert set(summary) == {"methods", "simulated", "provenance"}
    assert set(summary["methods"]) == {"baseline", "eagle3", "ngram"}
    for suites in summary["methods"].values():
        assert set(suites) == {"everyday", "technical"}
        for figures in suites.values():
            assert set(figures) >= {
                "acceptance_length",
                "acceptance_by_position",
                "conditional_acceptance_by_position",
                "tokens_per_s",
                "speedup",
                "identical",
                "ties",
                "total",
                "K",
                "temperature",
                "max_num_seqs",
            }
            assert figures["identical"] + figures["ties"] == figures["total"] > 0


def test_states_lie_on_the_other_disk(run):
    for shard in run.glob("hidden/*/*.pt"):
        assert shard.resolve().is_relative_to("/dev/shm")
    assert not (run / "store/extract_hidden_states").exists()


def test_every_gpu_job_was_given_its_gpus(run):
    granted = {
        path.relative_to(run / "logs"): re.findall(r"^GPUs ([\d,]+)", path.read_text(), re.MULTILINE)
        for path in run.glob("logs/**/*.log")
    }
    all_gpus = [EIGHT_GPUS["CUDA_VISIBLE_DEVICES"]]
    for name in ("regenerate_responses/val", "extract_hidden_states/part-0", "train_draft/0", "evaluate_method/eagle3"):
        assert granted[Path(f"{name}.log")] == all_gpus
    assert len(granted[Path("select_checkpoint.log")][0].split(",")) == 1
    assert granted[Path("collect_conversations.log")] == []


@pytest.mark.parametrize("place", [["--cores", "all"], ["--profile", "local-rtx6000"], ["--profile", "b300-cluster"]])
def test_second_run_has_nothing_to_do_wherever_it_is_started(checkout, run, place):
    assert "Nothing to be done" in checkout.snakemake(*place, "--configfile", "tiny.yaml")


def test_touching_config_scripts_and_sources_reruns_nothing(checkout, run):
    for pattern in ("config/**/*", "scripts/**/*.py", "tiny.yaml"):
        for path in checkout.root.glob(pattern):
            if path.is_file():
                os.utime(path)
    assert "Nothing to be done" in checkout.snakemake("--cores", "all", "--configfile", "tiny.yaml")


def test_an_edited_value_reruns_exactly_what_depends_on_it(checkout, run, tiny_llama):
    config = tiny_config(tiny_llama)
    # where states lie, and what stops for them, is no science
    assert planned(checkout, config) == {}
    server = {"stop": "true", "start": "true", "health": "http://127.0.0.1:1/health"}
    target = {**config["target"], "min_gpus": 4}
    assert planned(checkout, {**config, "target": target, "production": server, "grace_s": 5}) == {}

    gate = {**config, "gate": {**config["gate"], "min_acceptance_length": 1.0}}
    assert planned(checkout, gate).keys() == {"check_gate", "report", "all"}

    evaluation = {**config, "evaluation": {**config["evaluation"], "max_tokens": 25}}
    assert planned(checkout, evaluation).keys() == {
        "evaluate_method",
        "simulate_acceptance",
        "compare_methods",
        "report",
        "check_gate",
        "all",
    }

    training = {**config, "training": {**config["training"], "learning_rate": 2e-3}}
    assert planned(checkout, training) == {"train_draft": 2, **AFTER_TRAINING}


def test_an_edited_docstring_or_comment_reruns_nothing(checkout, run, tiny_llama):
    script = checkout.root / "scripts/extract_hidden_states.py"
    script.write_text(script.read_text().replace('"""', '"""Edited. ', 1) + "# edited\n")
    assert planned(checkout, tiny_config(tiny_llama)) == {}


def test_edited_code_reruns_its_rule(checkout, run, tiny_llama):
    script = checkout.root / "scripts/check_gate.py"
    script.write_text(script.read_text() + "\nEDITED = True\n")
    assert planned(checkout, tiny_config(tiny_llama)) == {"check_gate": 1, "all": 1}
