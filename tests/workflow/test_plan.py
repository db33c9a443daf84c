"""What Snakemake says before it runs anything: the whole DAG, single artefacts, graphs, and wrong configurations."""

import re

import pytest
import yaml


def jobs(printed: str) -> dict[str, int]:
    """Rule -> number of jobs, from the job table of a dry run."""
    table = printed.split("Job stats:")[1].split("total")[0]
    return {name: int(count) for name, count in re.findall(r"^(\w+)\s+(\d+)$", table, re.MULTILINE)}


def test_dry_run_shows_every_stage_of_a_fresh_clone(checkout):
    planned = jobs(checkout.snakemake("-n", "--cores", "all"))
    assert planned["extract_hidden_states"] == planned["regenerate_responses"] == planned["tokenize_conversations"] == 3
    assert planned["train_draft"] == 4
    assert planned["evaluate_method"] == 3
    assert planned["check_gate"] == 1


def test_one_shard_alone_needs_its_part_and_nothing_after_it(checkout):
    planned = jobs(checkout.snakemake("-n", "--cores", "all", "results/demo/hidden/part-1/shard-1.pt"))
    assert planned == {
        "fetch_demo_target": 1,
        "collect_conversations": 1,
        "regenerate_responses": 1,
        "tokenize_conversations": 1,
        "extract_hidden_states": 1,
    }


def test_given_responses_skip_the_regeneration(checkout):
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    (checkout.root / "given.yaml").write_text(yaml.safe_dump({**config, "run": "given", "responses": "given"}))
    planned = jobs(checkout.snakemake("-n", "--cores", "all", "--configfile", "given.yaml"))
    assert "regenerate_responses" not in planned
    assert planned["tokenize_conversations"] == 3


def test_another_config_file_is_not_merged_with_the_demo(checkout):
    (checkout.root / "partial.yaml").write_text("run: partial\n")
    printed = checkout.snakemake("-n", "--cores", "all", "--configfile", "partial.yaml", succeeds=False)
    assert "target: missing" in printed


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ("traning: {}", "traning: unknown key"),
        ("training: {segments: many}", "training.segments"),
        ("draft: {preset: mine}", "draft.preset is mine: expected one of kimi-k2.5-gqa, kimi-k2.5-llama"),
        ("target: {path: x, num_hidden_layers: 8, aux_layer_ids: [4, 2]}", "ascending"),
        ("target: {path: x, num_hidden_layers: 8, aux_layer_ids: [2, 9]}", "1 <= k < 8"),
    ],
)
def test_wrong_configuration_stops_before_the_dag(checkout, change, line):
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    (checkout.root / "wrong.yaml").write_text(yaml.safe_dump({**config, **yaml.safe_load(change)}))
    printed = checkout.snakemake("-n", "--cores", "all", "--configfile", "wrong.yaml", succeeds=False)
    assert line in printed
    assert "Traceback" not in printed


def test_graphs_can_be_drawn(checkout):
    assert "digraph" in checkout.snakemake("--dag", "dot")
    assert "flowchart" in checkout.snakemake("--rulegraph", "mermaid-js")


def test_a_target_of_ones_own_does_not_lie_in_the_folder_of_the_workflows(checkout):
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    config["target"]["path"] = "results/targets/mine"
    (checkout.root / "mine.yaml").write_text(yaml.safe_dump(config))
    printed = checkout.snakemake("-n", "--cores", "all", "--configfile", "mine.yaml", succeeds=False)
    assert "target.path is results/targets/mine" in printed


def test_only_what_failed_now_is_told_at_the_end(checkout):
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    config["conversations"]["train"] = [{"path": "missing.jsonl"}]
    (checkout.root / "missing.yaml").write_text(yaml.safe_dump({**config, "run": "missing"}))
    old = checkout.root / "results/missing/logs/train_draft/0.log"
    old.parent.mkdir(parents=True)
    old.write_text("train_draft: error: of another day\n")
    ledger = "results/missing/conversations/ledger.json"
    printed = checkout.snakemake("--cores", "all", ledger, "--configfile", "missing.yaml", succeeds=False)
    assert "missing.jsonl: no such file" in printed and "of another day" not in printed
