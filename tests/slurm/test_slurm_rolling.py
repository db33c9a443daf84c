"""`training.rolling` on a real Slurm: the next part is extracted on one node while another trains."""

import json

import pytest
import yaml

from scripts.eagle3.config import Target
from tests.slurm.slurm import NODES, Slurm
from tests.slurm.test_slurm import ClusterRun, write_conversations
from tests.workflow.conftest import Checkout
from tests.workflow.test_rolling import ON_DISK, PARTS, rolling_config

pytestmark = pytest.mark.slurm


@pytest.mark.slow
def test_the_next_part_is_extracted_on_another_node_while_a_segment_trains(
    slurm: Slurm, tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = ClusterRun(Checkout(tmp_path_factory.mktemp("cluster").resolve()), slurm)
    (cluster.root / "rolling.yaml").write_text(yaml.safe_dump(rolling_config(tiny_llama, "rolling")))
    write_conversations(cluster.root / "answered.jsonl")
    before = slurm.last_job()
    released = [f"results/rolling/hidden/part-{part}/released.json" for part in range(PARTS)]
    cluster.snakemake("rolling.yaml", *released)

    jobs = {job.name.removeprefix("rule_"): job for job in slurm.jobs(before)}
    last = PARTS - 1  # waits for the first segments' end, then goes beside the segment before its own
    extraction = jobs[f"extract_hidden_states_wildcards_part-{last}"]
    training = jobs[f"train_draft_wildcards_{last - 1}"]
    assert {extraction.node, training.node} == set(NODES)
    assert extraction.overlaps(training)
    room = jobs[f"train_draft_wildcards_{last - ON_DISK}"]
    assert room.end and extraction.start and room.end <= extraction.start
    assert {job.state for job in jobs.values()} == {"COMPLETED"}
    assert not [name for name in jobs if name.startswith("release_part")]  # deletes here, without a place in the queue
    run = cluster.root / "results/rolling"
    assert not [*run.glob("hidden/part-*/*.pt"), *run.glob("store/extract_hidden_states/*/part-*/**/*.pt")]
    record = json.loads((run / f"checkpoints/{last}.json").read_text())
    assert record["step"] == record["total_steps"]
