"""Snakemake killed with SIGKILL while states are extracted: no lock, no process and no half file stays, and no row is lost."""

import json
import random
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Target
from tests.extract_case import ONE_THREAD, rows_written
from tests.production_case import processes_in, wait_until
from tests.workflow.conftest import ROOT, Checkout
from tests.workflow.test_tiny_run import tiny_config

STATES = "results/tiny/hidden/part-0"
ROWS = 150
ENDS_WITHIN_S = 300


def write_conversations(path: Path) -> None:
    numbers = random.Random(0)
    words = ["red", "blue", "seven", "river", "cloud", "quick", "stone", "paper"]
    with open(path, "w") as file:
        for index in range(ROWS):
            said = [" ".join(numbers.choices(words, k=numbers.randint(5, 30))) for _ in range(2)]
            messages = [{"role": "user", "content": f"{index}: {said[0]}"}, {"role": "assistant", "content": said[1]}]
            file.write(json.dumps({"id": str(index), "messages": messages}) + "\n")


class Case:
    """A checkout whose states of one part are asked for."""

    def __init__(self, checkout: Checkout, target: Target) -> None:
        self.checkout, self.root = checkout, checkout.root
        shutil.copy2(ROOT / "Makefile", self.root)
        write_conversations(self.root / "conversations.jsonl")
        config: dict[str, Any] = tiny_config(target)
        config["conversations"]["train"] = [{"path": "conversations.jsonl"}]
        config["conversations"]["validation_fraction"] = 0.05
        config["scatter"] = {"parts": 1, "shards_per_part": 2}
        (self.root / "case.yaml").write_text(yaml.safe_dump({**config, "responses": "given"}))

    def start(self) -> subprocess.Popen[bytes]:
        options = ["--cores", "all", "--rerun-incomplete", "--configfile", "case.yaml"]
        small = ["--set-resources", "extract_hidden_states:max_num_seqs=2", "extract_hidden_states:batch_tokens=256"]
        with open(self.root / "printed", "wb") as printed:
            return subprocess.Popen(
                self.checkout.command(f"{STATES}/manifest.json", *options, *small),
                cwd=self.root,
                env={**self.checkout.environment(), **ONE_THREAD},
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def printed(self) -> str:
        return (self.root / "printed").read_text()

    def finish(self) -> None:
        assert self.start().wait(ENDS_WITHIN_S) == 0, self.printed()

    def written(self) -> int:
        return rows_written(self.root / "results/tiny/store")

    def states(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.root / STATES).iterdir())}

    def restore(self) -> str:
        command = ["make", "restore-production"]
        return subprocess.run(command, cwd=self.root, text=True, stdout=subprocess.PIPE, check=True).stdout


@pytest.fixture
def case(checkout: Checkout, tiny_llama: Target) -> Iterator[Case]:
    made = Case(checkout, tiny_llama)
    yield made
    for pid in processes_in(made.root):  # only after a failing case
        subprocess.run(["kill", "-9", str(pid)])


@pytest.mark.slow
def test_sigkill_of_snakemake_again_and_again_loses_no_row(case: Case) -> None:
    case.finish()
    undisturbed = case.states()
    for folder in (STATES, "results/tiny/store/extract_hidden_states"):
        shutil.rmtree(case.root / folder)
    for kill in range(1, 4):
        goal = case.written() + 20
        snakemake = case.start()
        wait_until(lambda: case.written() >= goal or snakemake.poll() is not None, "rows", ENDS_WITHIN_S)  # noqa: B023
        assert snakemake.poll() is None, case.printed()
        snakemake.send_signal(signal.SIGKILL)
        snakemake.wait()
        wait_until(lambda: not processes_in(case.root), "the end of all its processes", 20)
        assert not (case.root / STATES).exists() or not case.states(), f"kill {kill}: a file under a final name"
        assert "cannot be locked" in locked(case)
        assert "Snakemake's lock is cleared" in case.restore()
    written = case.written()
    case.finish()
    log = (case.root / "results/tiny/logs/extract_hidden_states/part-0.log").read_text()
    assert f"{written}/" in log and "rows were finished by an earlier run" in log
    assert case.states() == undisturbed


def locked(case: Case) -> str:
    snakemake = case.start()
    assert snakemake.wait(ENDS_WITHIN_S) != 0
    return case.printed()


@pytest.mark.slow
def test_clean_rows_frees_what_another_config_left(case: Case) -> None:
    if not (case.root / STATES).exists():
        case.finish()
    text = (case.root / "case.yaml").read_text()
    stores = lambda: sorted((case.root / "results/tiny/store/extract_hidden_states").iterdir())  # noqa: E731
    (before,) = stores()
    config = yaml.safe_load(text)
    config["target"]["aux_layer_ids"] = [2, 4, 6]
    (case.root / "case.yaml").write_text(yaml.safe_dump(config))
    case.finish()
    log = (case.root / "results/tiny/logs/extract_hidden_states/part-0.log").read_text()
    assert "layer_ids is [2, 4, 6, 8], was [2, 4, 5, 8]" in log
    made = case.states()
    assert len(stores()) == 2
    case.checkout.snakemake("clean_rows", "--cores", "1", "--configfile", "case.yaml")
    assert before not in stores() and len(stores()) == 1
    assert case.states() == made
