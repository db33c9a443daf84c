"""Both GPU profiles, typed as users type them, in a clone that has no Kimi-K2.5, no GPU and no Slurm."""

import re
from pathlib import Path

import pytest
import yaml

from tests.workflow.conftest import ROOT
from tests.workflow.test_plan import jobs

PROFILES = ("local-rtx6000", "b300-cluster")
GPU_RULES = {
    *("regenerate_responses", "extract_hidden_states", "train_draft", "select_checkpoint"),
    *("evaluate_method", "simulate_acceptance", "canary"),
}


@pytest.mark.parametrize("profile", PROFILES)
def test_root_link_resolves_into_profiles(profile):
    link = ROOT / profile
    assert link.is_symlink()
    assert link.resolve() == ROOT / "profiles" / profile
    assert (link / "profile.v9+.yaml").is_file()


@pytest.mark.parametrize(("profile", "parts"), [("local-rtx6000", 2), ("b300-cluster", 16)])
def test_dry_run_shows_the_whole_run_of_the_profiles_own_configuration(checkout, profile, parts):
    planned = jobs(checkout.snakemake("--profile", profile, "-n"))
    assert planned["extract_hidden_states"] == parts + 1
    assert planned["check_gate"] == 1
    assert "fetch_demo_target" not in planned


@pytest.mark.parametrize(
    ("profile", "run", "before"),
    [("local-rtx6000", "kimi-k2.5-pilot", {"canary": 1}), ("b300-cluster", "kimi-k2.5-hero", {})],
)
def test_one_artefact_and_the_dag_of_a_profile(checkout, profile, run, before):
    planned = jobs(checkout.snakemake("--profile", profile, "-n", f"results/{run}/hidden/part-0/shard-3.pt"))
    assert planned == {
        "collect_conversations": 1,
        "regenerate_responses": 1,
        "tokenize_conversations": 1,
        "extract_hidden_states": 1,
        **before,
    }
    assert "digraph" in checkout.snakemake("--profile", profile, "--dag")


@pytest.mark.parametrize("profile", PROFILES)
def test_another_configuration_replaces_the_profiles_own(checkout, profile):
    printed = checkout.snakemake("--profile", profile, "-n", "--configfile", "config/config.yaml")
    assert jobs(printed)["fetch_demo_target"] == 1
    assert "kimi" not in printed.split("Job stats:")[1]


@pytest.mark.parametrize("profile", PROFILES)
def test_every_entry_of_a_profile_says_why(profile):
    lines = (ROOT / "profiles" / profile / "profile.v9+.yaml").read_text().splitlines()
    entries = [index for index, line in enumerate(lines) if re.match(r"[a-z_-]+:", line)]
    assert len(entries) > 5
    for index in entries:
        above = lines[index - 1]
        assert above.startswith("#") or above.startswith("__") or "#" in lines[index], lines[index]


@pytest.mark.parametrize("profile", PROFILES)
def test_profiles_reserve_gpus_for_exactly_the_rules_that_use_them(profile):
    entries = yaml.safe_load((ROOT / "profiles" / profile / "profile.v9+.yaml").read_text())["set-resources"]
    using = set()
    for path in (ROOT / "rules").glob("*.smk"):
        for rule in path.read_text().split("\nrule ")[1:]:
            if "bin/on-gpus" in rule:
                using.add(rule.split(":")[0])
    assert using == GPU_RULES == {name for name, resources in entries.items() if resources.get("gpu")}


def test_cluster_gives_gpu_jobs_whole_nodes(checkout):
    printed = checkout.snakemake("--profile", "b300-cluster", "-n")
    resources = {
        block.split(":")[0]: block.split("resources: ")[1].split("\n")[0]
        for block in re.split(r"^rule ", printed, flags=re.MULTILINE)[1:]
        if "resources: " in block
    }
    for name in GPU_RULES - {"canary"}:
        assert "nodes=1" in resources[name] and "gpu=8" in resources[name] and "gpu_model=b300" in resources[name]
    assert "gpu_model" not in resources["collect_conversations"]


def test_b200_nodes_are_a_value(checkout):
    printed = checkout.snakemake("--profile", "b300-cluster", "-n", environment={"GPU_MODEL": "b200", "PARTITION_GPU": "big"})
    assert "gpu_model=b200" in printed and "gpu_model=b300" not in printed
    assert "slurm_partition=big" in printed


def test_local_budget_is_the_machines_gpus():
    entries = yaml.safe_load(Path(ROOT / "profiles/local-rtx6000/profile.v9+.yaml").read_text())
    assert entries["resources"] == {"gpu": 8}
