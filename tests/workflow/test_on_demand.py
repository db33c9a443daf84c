"""`plan` and `preflight` as users type them, and the start of a run that preflight refuses."""

import contextlib
import json
import os
import signal
import subprocess

import pytest
import yaml


def test_plan_of_the_demo_is_written_and_shown_before_anything_runs(checkout):
    printed = checkout.snakemake("--cores", "all", "plan")
    assert "Largest risk" in printed
    assert "train_draft" in json.dumps(json.loads((checkout.root / "results/demo/plan.json").read_text()))
    assert (checkout.root / "results/demo/plan.md").read_text() in printed.replace("\r", "")
    assert not (checkout.root / "results/demo/conversations").exists()


def test_a_screen_that_closes_ends_the_run_and_not_its_threads(checkout):
    process = subprocess.Popen(
        checkout.command("--cores", "all", "plan"),
        cwd=checkout.root,
        env=checkout.environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    assert process.stdout is not None
    try:
        assert any(b"regenerate_responses" in line for line in process.stdout)
        process.stdout.close()
        process.wait(timeout=60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.slow
def test_plan_of_the_hero_run_fails_on_a_disk_that_cannot_hold_it(checkout):
    printed = checkout.snakemake("--profile", "b300-cluster", "plan", succeeds=False)
    assert "b300" in printed and "kimi-k2.5-hero" in printed
    error = next(line for line in printed.splitlines() if "plan: error: " in line)
    assert "results/kimi-k2.5-hero" in error and "needs" in error and "free" in error
    # the table comes first, so that the numbers can be read
    assert printed.index("GPU-hours") < printed.index("plan: error: ")


@pytest.mark.slow
@pytest.mark.parametrize(("model", "line"), [("", "--gpu-model is empty: expected"), ("b300 x", "no hardware named b300 x")])
def test_a_gpu_model_that_is_none_is_one_line(checkout, model, line):
    printed = checkout.snakemake("--profile", "b300-cluster", "plan", succeeds=False, environment={"GPU_MODEL": model})
    assert "plan: error: " in printed and line in printed
    assert "usage: " not in printed


def test_preflight_is_green_before_the_demo_target_is_made(checkout):
    printed = checkout.snakemake("--cores", "all", "preflight")
    assert "green" in printed and " red " not in printed


@pytest.mark.slow
def test_preflight_of_the_pilot_names_what_is_missing_here(checkout):
    printed = checkout.snakemake("--profile", "local-rtx6000", "preflight", succeeds=False)
    red = [line for line in printed.splitlines() if " red " in line]
    assert any("GPUs" in line for line in red) and any("/models/Kimi-K2.5" in line for line in red)


def test_a_red_line_stops_a_run_before_any_job(checkout):
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    target = {**config["target"], "path": "/nowhere/model"}
    (checkout.root / "red.yaml").write_text(yaml.safe_dump({**config, "run": "red", "target": target}))
    printed = checkout.snakemake("--cores", "all", "--configfile", "red.yaml", succeeds=False)
    assert "preflight: error: preflight of red: " in printed and "/nowhere/model" in printed
    assert not (checkout.root / "results/red/conversations").exists()
    assert "Traceback" not in printed
    # nothing loads the target here
    checkout.snakemake("--cores", "all", "results/red/conversations/ledger.json", "--configfile", "red.yaml")
