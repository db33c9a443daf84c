"""The whole run under Slurm with its results on an S3 server: what lies there, what stays here, what a second run does."""

import shutil
from collections.abc import Iterator

import pytest
import yaml

from scripts.eagle3.config import Target
from scripts.eagle3.export import check_manifest
from tests.slurm.s3 import S3, running
from tests.slurm.slurm import Slurm
from tests.slurm.test_slurm import POLLING
from tests.workflow.conftest import Checkout
from tests.workflow.test_plan import jobs
from tests.workflow.test_tiny_run import tiny_config

SHARDS = [f"{part}/shard-{shard}" for part in ("part-0", "part-1", "val") for shard in (0, 1)]
SUITES = ("everyday", "technical")
EXPORT = ["manifest.json", "config.json", "model.safetensors", "provenance.json", "README.md"]
RESULTS = {
    "report.html",
    "gate.passed",
    "selected.json",
    "draft/config.json",
    "target/head.safetensors",
    "conversations/ledger.json",
    *(f"conversations/eval/{suite}.parquet" for suite in SUITES),
    *(f"{stage}/{shard}.parquet" for stage in ("conversations", "responses", "tokens") for shard in SHARDS),
    *(f"tokens/{part}/counts.json" for part in ("part-0", "part-1", "val")),
    *(f"vocab/{name}" for name in ("d2t.npy", "t2d.npy", "coverage.json")),
    *(f"export/{name}" for name in EXPORT),
    *(f"evaluation/{method}/{suite}.json" for method in ("baseline", "eagle3", "ngram", "simulated") for suite in SUITES),
    *(f"evaluation/summary.{kind}" for kind in ("json", "csv", "md")),
    *(f"evaluation/plots/{plot}.svg" for plot in ("training", "acceptance", "coverage", "segments")),
}

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


class Run:
    """The run `tiny` of one checkout; `place` says where its jobs run."""

    def __init__(self, checkout: Checkout, s3: S3, target: Target) -> None:
        self.checkout, self.s3, self.root = checkout, s3, checkout.root
        self.results = checkout.root / "results/tiny"
        self.config = tiny_config(target)

    def snakemake(self, place: tuple[str, ...], *arguments: str, config: dict | None = None, succeeds: bool = True) -> str:
        (self.root / "tiny.yaml").write_text(yaml.safe_dump(config or self.config))
        return self.checkout.snakemake(
            *place,
            *("--configfile", "tiny.yaml"),
            *self.s3.options,
            *arguments,
            succeeds=succeeds,
            timeout_s=1500,
            environment=self.s3.environment,
        )


CLUSTER = ("--profile", "b300-cluster", *POLLING)
HERE = ("--cores", "all")


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    with running() as server:
        yield server


@pytest.fixture(scope="module")
def finished(slurm: Slurm, s3: S3, tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = Run(Checkout(tmp_path_factory.mktemp("s3").resolve()), s3, tiny_llama)
    run.snakemake(CLUSTER)
    return run


def test_the_bucket_holds_all_results_and_nothing_else(finished):
    objects = finished.s3.objects()
    results = {key for key in objects if not key.startswith("results/tiny/benchmarks/")}
    assert results == {f"results/tiny/{name}" for name in RESULTS}
    assert [key for key in results if objects[key] == 0] == ["results/tiny/gate.passed"]
    assert "results/tiny/benchmarks/train_draft/1.tsv" in objects


def test_states_checkpoints_store_and_logs_stay_on_the_file_system(finished):
    for shard in SHARDS:
        assert (finished.results / f"hidden/{shard}.pt").stat().st_size > 0
    here = {path.relative_to(finished.results).parts[0] for path in finished.results.rglob("*") if path.is_file()}
    assert here == {"hidden", "checkpoints", "store", "metrics", "logs"}


def test_the_export_in_the_bucket_is_whole(finished, tmp_path):
    finished.s3.download(tmp_path, *(f"results/tiny/export/{name}" for name in EXPORT))
    check_manifest(tmp_path)


@pytest.mark.parametrize("place", [CLUSTER, HERE])
def test_second_run_has_nothing_to_do(finished, place):
    assert "Nothing to be done" in finished.snakemake(place)


def test_without_any_local_copy_there_is_nothing_to_do(finished):
    shutil.rmtree(finished.root / ".snakemake/storage", ignore_errors=True)
    assert "Nothing to be done" in finished.snakemake(HERE)


def test_another_clone_finds_the_results(finished, tiny_llama, tmp_path):
    clone = Run(Checkout(tmp_path), finished.s3, tiny_llama)
    assert "Nothing to be done" in clone.snakemake(HERE)
    assert not clone.results.exists()


def test_an_edited_value_reruns_exactly_what_depends_on_it(finished):
    edited = {**finished.config, "gate": {**finished.config["gate"], "min_acceptance_length": 1.0}}
    before = finished.s3.objects()
    assert jobs(finished.snakemake(HERE, config=edited)).keys() == {"check_gate", "report", "all"}
    after = finished.s3.objects()
    assert after.keys() == before.keys()
    changed = {key for key in after if after[key] != before[key]}
    assert "results/tiny/report.html" in changed
    assert all(key == "results/tiny/report.html" or "/benchmarks/" in key for key in changed)


def test_a_failing_stage_is_told_at_the_end(finished):
    edited = {**finished.config, "vocabulary": {"draft_vocab_size": 512, "min_coverage": 1.0}}
    printed = finished.snakemake(HERE, config=edited, succeeds=False)
    assert "build_vocab_mapping: error: " in printed.split("Exiting because a job execution failed.")[1]
