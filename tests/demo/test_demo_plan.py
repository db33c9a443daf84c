"""The plan of the demo, made before anything has run, against what the demo then wrote and how long it took."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from scripts.eagle3.config import load_config
from scripts.eagle3.estimate_done import unique_bytes
from tests.workflow.conftest import Checkout, checkout  # noqa: F401 - a fixture

pytestmark = pytest.mark.slow

RUN = "results/demo"


class Demo(NamedTuple):
    """What was planned before and after the run, the run's folder, and the seconds from start to end."""

    before: dict[str, Any]
    after: dict[str, Any]
    run: Path
    seconds: float


def make_plan(checkout: Checkout) -> dict[str, Any]:  # noqa: F811
    config = load_config(yaml.safe_load((checkout.root / "config/config.yaml").read_text()))
    folders = ["--run", RUN, "--storage", f"{RUN}/store", "--hardware", "config/hardware.yaml"]
    command = ["bin/in-env", "python", "-m", "scripts.plan", "--config", config.model_dump_json(), *folders]
    command += ["--gpu-model", "cpu", "--gpus", "0"]
    subprocess.run(command, cwd=checkout.root, env=checkout.environment(), check=True, timeout=120)
    return json.loads((checkout.root / RUN / "plan.json").read_text())


@pytest.fixture(scope="module")
def demo(checkout: Checkout) -> Demo:  # noqa: F811
    before = make_plan(checkout)
    started = time.monotonic()
    checkout.snakemake("--cores", "all", timeout_s=3 * 3600)
    seconds = time.monotonic() - started
    return Demo(before, make_plan(checkout), checkout.root / RUN, seconds)


def test_the_planned_bytes_are_those_that_the_run_wrote(demo: Demo) -> None:
    assert demo.before["totals"]["bytes_of_run"] == pytest.approx(unique_bytes([demo.run]), rel=0.1)
    for stage in ("extract_hidden_states", "train_draft", "export_draft", "prepare_draft"):
        planned, wrote = (plan["stages"][stage]["bytes"]["value"] for plan in (demo.before, demo.after))
        assert planned == pytest.approx(wrote, rel=0.1), stage


def test_the_run_took_between_half_and_twice_the_planned_time(demo: Demo) -> None:
    planned = 3600 * demo.before["totals"]["hours_left"]
    assert planned / 2 < demo.seconds < planned * 2


def test_after_the_run_all_is_measured_and_nothing_is_left(demo: Demo) -> None:
    assert demo.after["totals"]["hours_left"] == 0
    assert demo.after["disks"][0]["needed"] == 0
    for name, stage in demo.after["stages"].items():
        assert (stage["jobs_left"], stage["bytes"]["how"]) == (0, "measured"), name
