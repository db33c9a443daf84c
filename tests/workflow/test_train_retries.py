"""A training job that is told to end, as a pre-emption or a time limit does it: Snakemake starts it again and it goes on."""

import json
import os
import signal
import subprocess

import pytest
import yaml

from scripts.eagle3.processes import arguments
from tests.production_case import processes_in, wait_until
from tests.slurm.test_slurm import write_conversations
from tests.workflow.test_rolling import rolling_config

WITHIN_S = 1200


@pytest.mark.slow
def test_training_told_to_end_is_started_again_and_goes_on(checkout, tiny_llama):
    root = checkout.root.resolve()
    write_conversations(root / "answered.jsonl")
    config = rolling_config(tiny_llama, "retried", rolling=None, segments=2, checkpoint_minutes=60)
    config["scatter"]["parts"] = 1
    (root / "retried.yaml").write_text(yaml.safe_dump(config))
    wanted = ["results/retried/checkpoints/1.json", "--cores", "all", "--configfile", "retried.yaml"]
    lines = root / "results/retried/metrics/0.jsonl"

    with open(root / "printed", "wb") as printed:
        command = checkout.command(*wanted, "--retries", "1")
        snakemake = subprocess.Popen(command, cwd=root, env=checkout.environment(), stdout=printed, stderr=subprocess.STDOUT)
    try:
        wait_until(lambda: snakemake.poll() is not None or (lines.is_file() and lines.read_text()), "a step", WITHIN_S)
        stages = [pid for pid in processes_in(root) if arguments(pid)[1:3] == ["-m", "scripts.train_draft"]]
        for pid in stages:
            os.kill(pid, signal.SIGTERM)
        assert stages and snakemake.wait(WITHIN_S) == 0, (root / "printed").read_text()[-4000:]
    finally:
        snakemake.terminate()
    assert "after SIGTERM; run again to go on" in (root / "printed").read_text()
    record = json.loads((root / "results/retried/checkpoints/0.json").read_text())
    steps = [json.loads(line)["step"] for line in lines.read_text().splitlines()][:-1]  # the last one is the validation
    assert steps == list(range(record["step"])) and 0 < record["continued_from"] < record["step"]

    config["training"].update(checkpoint_minutes=5, keep_checkpoints=2)
    (root / "retried.yaml").write_text(yaml.safe_dump(config))
    assert "Nothing to be done" in checkout.snakemake(*wanted)
