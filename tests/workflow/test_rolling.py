"""`training.rolling` with the real engine: the peak on disk, kills in between, and what asks for deleted parts again."""

import json
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import yaml

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import arguments
from scripts.eagle3.shards import Shard
from tests.production_case import processes_in, wait_until
from tests.slurm.test_slurm import write_conversations
from tests.workflow.conftest import Checkout
from tests.workflow.test_plan import jobs
from tests.workflow.test_tiny_run import tiny_config

PARTS, ON_DISK, PASSES = 3, 2, 2
WITHIN_S = 1200


def rolling_config(target: Target, run: str, **training: Any) -> dict[str, Any]:
    """Answered already, so that only the extraction loads an engine."""
    config = tiny_config(target)
    rolling = {"passes": PASSES, "parts_on_disk": ON_DISK}
    return {
        **config,
        "run": run,
        "responses": "given",
        "conversations": {
            "train": [{"path": "answered.jsonl", "limit": 60}],
            "evaluation": {"everyday": {"path": "config/data/eval/everyday.jsonl", "limit": 4}},
            "validation_fraction": 0.1,
        },
        "scatter": {"parts": PARTS, "shards_per_part": 2},
        "training": {"batch_tokens": 256, "dtype": "float32", "rolling": rolling, **training},
    }


class RollingRun:
    """One run of a checkout: the whole of it, or up to its selected checkpoint and the deletion of its last part."""

    def __init__(self, checkout: Checkout, target: Target, name: str, whole: bool = False) -> None:
        self.checkout, self.target, self.root, self.whole = checkout, target, checkout.root.resolve(), whole
        self.folder = self.root / "results" / name
        self.name = name
        self.configure()

    def configure(self, **training: Any) -> None:
        config = rolling_config(self.target, self.name, **training)
        (self.root / f"{self.name}.yaml").write_text(yaml.safe_dump(config))

    def options(self) -> list[str]:
        released = [f"results/{self.name}/hidden/part-{part}/released.json" for part in range(PARTS)]
        wanted = [] if self.whole else [f"results/{self.name}/selected.json", *released]
        return [*wanted, "--cores", "all", "--rerun-incomplete", "--configfile", f"{self.name}.yaml"]

    def make(self, *options: str, succeeds: bool = True) -> str:
        return self.checkout.snakemake(*self.options(), *options, succeeds=succeeds, timeout_s=2400)

    def parts_on_disk(self) -> set[str]:
        """Parts of which any state file exists, as an output or in the store."""
        roots = (self.folder / "hidden", self.folder / "store/extract_hidden_states")
        found = [each for root in roots for each in os.walk(root)]  # passes over folders that vanish meanwhile
        folders = [folder for folder, _, files in found if any(name.endswith(".pt") for name in files)]
        return {name for folder in folders for name in folder.split("/") if name.startswith("part-")}

    @contextmanager
    def watched(self) -> Iterator[list[set[str]]]:
        """The sets of parts that were on disk together, in the order in which they were seen."""
        seen: list[set[str]] = []
        ended = threading.Event()

        def watch() -> None:
            while not ended.wait(0.02):
                parts = self.parts_on_disk()
                if not seen or seen[-1] != parts:
                    seen.append(parts)

        watcher = threading.Thread(target=watch)
        watcher.start()
        try:
            yield seen
        finally:
            watched = watcher.is_alive()
            ended.set()
            watcher.join()
        assert watched

    def kill_when(self, condition: Callable[[], bool]) -> None:
        """Starts the run, kills Snakemake with SIGKILL at the condition, and waits until its jobs have ended themselves."""
        with open(self.root / "printed", "wb") as printed:
            snakemake = subprocess.Popen(
                self.checkout.command(*self.options()),
                cwd=self.root,
                env=self.checkout.environment(),
                stdout=printed,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            wait_until(lambda: condition() or snakemake.poll() is not None, "the moment of the kill", WITHIN_S)
            assert snakemake.poll() is None, (self.root / "printed").read_text()[-4000:]
        finally:
            snakemake.kill()
            snakemake.wait()
        wait_until(lambda: not processes_in(self.root), "the end of its jobs", 30)
        self.checkout.snakemake("--unlock", "--configfile", f"{self.name}.yaml")

    def works_on(self, stage: str) -> bool:
        """Whether a job of the stage runs."""
        return any(arguments(pid)[1:3] == ["-m", f"scripts.{stage}"] for pid in processes_in(self.root))

    def rows_in_growing_shards(self, part: str) -> int:
        """Rows of the part that are stored while their shard is not finished."""
        try:
            shards = [Shard(path) for path in self.folder.glob(f"store/extract_hidden_states/*/{part}/growing/*.pt")]
        except (StageError, FileNotFoundError):  # it was finished meanwhile
            return 0
        return sum(shard.written(index) for shard in shards for index in range(len(shard)))

    def record(self, segment: int) -> dict[str, Any]:
        return json.loads((self.folder / f"checkpoints/{segment}.json").read_text())


@pytest.fixture(scope="module")
def module_checkout(checkout, tiny_llama) -> Checkout:
    write_conversations(checkout.root / "answered.jsonl")
    return checkout


@pytest.fixture(scope="module")
def undisturbed(module_checkout, tiny_llama) -> tuple[RollingRun, list[set[str]]]:
    """A finished run with its evaluation and report, and which parts were on disk together while it ran."""
    run = RollingRun(module_checkout, tiny_llama, "undisturbed", whole=True)
    with run.watched() as seen:
        run.make()
    return run, seen


def test_dry_run_shows_the_whole_run_with_one_segment_for_each_part(module_checkout, tiny_llama):
    planned = jobs(RollingRun(module_checkout, tiny_llama, "planned", whole=True).make("-n"))
    assert planned["extract_hidden_states"] == PARTS + 1
    assert planned["train_draft"] == planned["release_part"] == PARTS
    assert planned["schedule_training"] == planned["check_gate"] == 1


@pytest.mark.slow
def test_no_more_parts_than_configured_are_on_disk_and_none_in_the_end(undisturbed):
    run, seen = undisturbed
    assert max(len(parts) for parts in seen) == ON_DISK
    assert set.union(*seen) == {f"part-{part}" for part in range(PARTS)}
    assert run.parts_on_disk() == set()
    assert (run.folder / "gate.passed").is_file() and "deleted after training" in (run.folder / "report.html").read_text()
    assert len(list((run.folder / "hidden/val").glob("shard-*.pt"))) == 2
    for part in range(PARTS):
        manifest = json.loads((run.folder / f"hidden/part-{part}/manifest.json").read_text())
        released = json.loads((run.folder / f"hidden/part-{part}/released.json").read_text())
        assert released["rows"] == sum(shard["rows"] for shard in manifest["shards"]) > 0
        assert released["weights_sha256"] == run.record(part)["weights_sha256"]


@pytest.mark.slow
def test_each_segment_trains_all_its_passes_over_its_part_and_the_schedule_knows_them(undisturbed):
    run, _ = undisturbed
    schedule = json.loads((run.folder / "draft/schedule.json").read_text())["steps"]
    for segment in range(PARTS):
        record = run.record(segment)
        assert (record["step"], record["total_steps"]) == (sum(schedule[: segment + 1]), sum(schedule))
        lines = (run.folder / f"metrics/{segment}.jsonl").read_text().splitlines()
        steps = [line for line in map(json.loads, lines) if line["kind"] == "train"]
        assert len(steps) == schedule[segment]
        assert sum(step["tokens"] for step in steps) == PASSES * record["rows"]["train"]["positions"] > 0
    assert steps[-1]["learning_rate"] == pytest.approx(1e-3 / (sum(schedule) - 1), rel=0.1)  # of the whole run's last step


@pytest.mark.slow
def test_a_second_run_asks_for_nothing_that_was_deleted(undisturbed):
    run, _ = undisturbed
    assert "Nothing to be done" in run.make()
    script = run.root / "scripts/extract_hidden_states.py"
    script.write_text(script.read_text() + "\nEDITED = True\n")
    assert "Nothing to be done" in run.make()
    script = run.root / "scripts/check_gate.py"
    script.write_text(script.read_text() + "\nEDITED = True\n")
    assert jobs(run.make("-n")) == {"check_gate": 1, "all": 1}
    run.make("--touch")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "first"), [({"learning_rate": 2e-3}, 0), ({"rolling": {"passes": PASSES, "parts_on_disk": 1}}, 1)]
)
def test_what_would_extract_deleted_parts_again_is_refused_before_any_job(undisturbed, change, first):
    run, _ = undisturbed
    run.configure(**change)
    printed = run.make(succeeds=False)
    assert f"the states of {PARTS - first} parts (part-{first} to part-2) were deleted after they were trained" in printed
    assert f"rm -r results/undisturbed/hidden/part-{{{first}..2}}, then run again" in printed and "--touch" in printed
    assert "Traceback" not in printed and "train_draft: error" not in printed
    assert run.record(0)["provenance"]["training"]["learning_rate"] == 1e-3  # still there
    run.make("--touch")
    assert "Nothing to be done" in run.make()
    run.configure()
    run.make("--touch")


@pytest.mark.slow
def test_a_run_that_is_killed_again_and_again_ends_with_the_same_weights_within_the_same_peak(
    module_checkout, tiny_llama, undisturbed
):
    run = RollingRun(module_checkout, tiny_llama, "killed")
    with run.watched() as seen:
        run.kill_when(lambda: run.rows_in_growing_shards("part-1") > 0)
        run.kill_when(lambda: (run.folder / "metrics/0.jsonl").is_file() and run.works_on("train_draft"))
        run.kill_when(lambda: run.works_on("release_part"))
        run.kill_when(lambda: (run.folder / "metrics/1.jsonl").is_file() and run.works_on("train_draft"))
        run.make()
    assert max(len(parts) for parts in seen) == ON_DISK
    assert run.parts_on_disk() == set()
    for segment in range(PARTS):
        assert run.record(segment)["weights_sha256"] == undisturbed[0].record(segment)["weights_sha256"], segment
    assert "Nothing to be done" in run.make()
    for part in range(PARTS):
        (attempts,) = run.folder.glob(f"store/extract_hidden_states/*/part-{part}/attempts.jsonl")
        finished = attempts.read_text().count('"outcome": "finished"')
        assert finished == 1, part  # no part was extracted twice


@pytest.mark.slow
def test_after_the_advice_of_the_refusal_parts_are_extracted_and_trained_again(module_checkout, tiny_llama, undisturbed):
    run, _ = undisturbed
    run.configure(learning_rate=2e-3)
    run.whole = False
    for part in run.folder.glob("hidden/part-*"):
        shutil.rmtree(part)
    with run.watched() as seen:
        run.make()
    assert max(len(parts) for parts in seen) == ON_DISK
    assert run.record(PARTS - 1)["provenance"]["training"]["learning_rate"] == 2e-3
    assert "Nothing to be done" in run.make()
