"""The plan of a run: what is counted, what is estimated, what finished work changes, and what stops it."""

import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from scripts import plan
from scripts.eagle3.config import Draft, Regeneration, Target, Vocabulary
from scripts.eagle3.errors import StageError
from scripts.eagle3.estimate import unique_bytes
from scripts.eagle3.estimate_data import mean_answer
from scripts.eagle3.estimate_facts import Table, active_parameters, draft_size, rate, read_table, target_facts
from scripts.eagle3.files import read_json
from tests.draft_case import make_draft_case
from tests.planning_case import ANSWER, HARDWARE, ROOT, FinishedParts, cpu, gpus, kimi_config, make, make_config, run_command


@pytest.fixture
def table() -> Table:
    return read_table(HARDWARE)


@pytest.fixture
def finished(tmp_path: Path, tiny_llama: Target) -> FinishedParts:
    return FinishedParts(make_config(tiny_llama), tmp_path / "planned")


# -- the facts --------------------------------------------------------------------------------------------------------


def test_active_parameters_of_the_known_targets(table: Table) -> None:
    assert active_parameters(table.targets["kimi-k2.5"].config) == pytest.approx(32e9, rel=0.03)
    assert active_parameters(table.targets["smollm2-135m"].config) == pytest.approx(134.5e6, rel=0.01)


@pytest.mark.parametrize("draft", [Draft(), Draft(num_hidden_layers=2, norm_before_fc=True, intermediate_size=96)])
def test_the_size_of_the_draft_is_that_of_the_model(tmp_path: Path, tiny_llama: Target, table: Table, draft: Draft) -> None:
    from safetensors.torch import load_file

    case = make_draft_case(tmp_path, tiny_llama, draft)
    trained = sum(tensor.numel() for tensor in load_file(case.checkpoints / "0/model.safetensors").values())
    facts = target_facts(tiny_llama, table)
    assert draft_size(facts, draft, Vocabulary().draft_vocab_size, len(tiny_llama.aux_layer_ids)).trained == trained


def test_a_target_that_is_there_is_read_and_one_that_is_not_comes_from_the_table(tiny_llama: Target, table: Table) -> None:
    assert target_facts(tiny_llama, table).source.endswith("config.json")
    away = target_facts(Target(path="anywhere/KIMI-K2.5", num_hidden_layers=61), table)
    assert away.source.startswith("config/hardware.yaml")
    assert (away.hidden_size, away.vocab_size) == (7168, 163840)


def test_an_unknown_target_says_what_to_do(table: Table) -> None:
    with pytest.raises(StageError, match=r"knows no target other.*kimi-k2\.5.*add an entry under `targets:`"):
        target_facts(Target(path="/models/Other", num_hidden_layers=8), table)


def test_a_known_target_with_another_number_of_layers_is_refused(table: Table) -> None:
    with pytest.raises(StageError, match=r"num_hidden_layers is 60.*says 61"):
        target_facts(Target(path="/models/Kimi-K2.5", num_hidden_layers=60), table)


# -- speeds -----------------------------------------------------------------------------------------------------------


def test_a_measured_speed_counts_whole_and_a_scaled_one_is_marked(table: Table) -> None:
    measured = rate(table, "decode", "cpu", 0, "smollm2-135m", 1.345e8, 128)
    assert (measured.how, measured.tokens_per_s) == ("measured", 167)
    bigger = rate(table, "decode", "cpu", 0, "other", 1.345e9, 128)
    assert bigger.how == "scaled"
    assert bigger.tokens_per_s == pytest.approx(167 / 10 * table.scaling.safety, rel=0.01)
    assert "smollm2-135m" in bigger.source


def test_more_gpus_are_faster_and_a_cpu_speed_is_never_used_for_gpus(table: Table) -> None:
    work = active_parameters(table.targets["kimi-k2.5"].config)
    one, eight = (rate(table, "train", "b300", count, "kimi-k2.5", 4e9) for count in (1, 8))
    assert eight.tokens_per_s == pytest.approx(8 * one.tokens_per_s)
    only_cpu = table.model_copy(update={"rates": [entry for entry in table.rates if entry.gpus == 0]})
    with pytest.raises(StageError, match="no rate of stage prefill"):
        rate(only_cpu, "prefill", "b300", 8, "kimi-k2.5", work)


def test_fewer_requests_at_once_decode_slower(table: Table) -> None:
    work = active_parameters(table.targets["kimi-k2.5"].config)
    speeds = [rate(table, "decode", "rtx_pro_6000", 8, "kimi-k2.5", work, count).tokens_per_s for count in (8, 16, 64, 128)]
    assert speeds == sorted(speeds)
    assert speeds[0] == pytest.approx(speeds[1] / 2)


def test_two_kinds_of_hardware_differ_by_the_table_only(tmp_path: Path) -> None:
    config = kimi_config(limit=1)
    different = [make(config, gpus(tmp_path / name, name))["stages"] for name in ("rtx_pro_6000", "b300")]
    assert different[0]["regenerate_responses"]["hours_left"] > different[1]["regenerate_responses"]["hours_left"]
    assert (different[0]["train_draft"]["cost_left"], different[1]["train_draft"]["cost_left"] > 0) == (None, True)

    values = yaml.safe_load(HARDWARE.read_text())
    values["hardware"]["twin"] = values["hardware"]["b300"]
    (tmp_path / "hardware.yaml").write_text(yaml.safe_dump(values))
    same = [plan.make_plan(config, gpus(tmp_path / "same", name), tmp_path / "hardware.yaml") for name in ("b300", "twin")]
    assert plan.as_record(same[0])["stages"] == plan.as_record(same[1])["stages"]


def test_without_a_price_the_plan_says_so(tmp_path: Path) -> None:
    config = kimi_config(limit=1)
    texts = [plan.as_text(plan.make_plan(config, gpus(tmp_path, name), HARDWARE)) for name in ("rtx_pro_6000", "b300")]
    assert "No price is known" in texts[0]
    assert "$" not in texts[0]
    assert "for a GPU-hour (" in texts[1]


def test_more_nodes_shorten_the_time_and_not_the_gpu_hours(tmp_path: Path) -> None:
    config = kimi_config(limit=10, scatter={"parts": 8, "shards_per_part": 1})
    one, four = (make(config, gpus(tmp_path / "run", "b300", nodes))["stages"] for nodes in (1, 4))
    assert four["extract_hidden_states"]["hours_left"] < 0.4 * one["extract_hidden_states"]["hours_left"]
    assert four["extract_hidden_states"]["gpu_hours_left"] == one["extract_hidden_states"]["gpu_hours_left"]


def test_an_unknown_hardware_is_refused_with_the_known_ones(tmp_path: Path, tiny_llama: Target) -> None:
    with pytest.raises(StageError, match=r"no hardware named h100, there are cpu, rtx_pro_6000"):
        make(make_config(tiny_llama), gpus(tmp_path, "h100"))


# -- rows and tokens --------------------------------------------------------------------------------------------------


def test_answers_are_cut_at_the_limit(table: Table) -> None:
    text = table.targets["smollm2-135m"].text.model_copy(update={"mean_answer_tokens": 100})
    assert mean_answer(text, 1) == pytest.approx(1, rel=0.01)
    assert mean_answer(text, 10**6) == pytest.approx(100)
    assert mean_answer(table.unknown_text, 300) == 300


def test_a_data_set_without_a_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"some/dataset: the number of rows is not known.*set `limit`"):
        make(kimi_config(limit=None), gpus(tmp_path, "b300"))


def test_before_the_run_all_is_estimated_but_what_was_counted(tmp_path: Path, tiny_llama: Target) -> None:
    plan.run(make_config(tiny_llama), cpu(tmp_path / "run"), HARDWARE)
    stages = read_json(tmp_path / "run/plan.json")["stages"]
    assert stages["collect_conversations"]["rows_in"] == {"value": 30, "how": "estimated"}
    assert stages["extract_hidden_states"]["tokens_in"]["how"] == "estimated"
    assert stages["evaluate_method"]["rows_in"]["how"] == "measured"  # turns of a file that was read whole
    assert stages["regenerate_responses"]["jobs_left"] == 3
    text = (tmp_path / "run/plan.md").read_text()
    assert "| ~30" in text
    assert "Largest risk" in text


def test_given_answers_are_not_generated(tmp_path: Path, tiny_llama: Target) -> None:
    rows = [{"messages": [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "x" * 400}]}] * 20
    (tmp_path / "given.jsonl").write_text("\n".join(map(json.dumps, rows)))
    suites = {"everyday": {"path": str(ROOT / "config/data/eval/everyday.jsonl")}}
    config = make_config(
        tiny_llama,
        responses="given",
        conversations={"train": [{"path": str(tmp_path / "given.jsonl")}], "evaluation": suites},
    )
    stages = make(config, cpu(tmp_path / "run"))["stages"]
    assert "regenerate_responses" not in stages
    assert stages["tokenize_conversations"]["tokens_out"]["value"] > 20 * 100


def test_finished_parts_are_measured_and_correct_the_others(finished: FinishedParts) -> None:
    before = make(finished.config, cpu(finished.run))["stages"]
    finished.collect()
    finished.answer("part-0")
    finished.tokenize("part-0")
    stages = make(finished.config, cpu(finished.run))["stages"]
    assert stages["collect_conversations"]["rows_in"]["how"] == "measured"
    assert stages["collect_conversations"]["hours_left"] == 0
    assert (stages["regenerate_responses"]["jobs"], stages["regenerate_responses"]["jobs_left"]) == (3, 2)
    # 30 answers of ten tokens, not the 32 that are allowed
    assert before["regenerate_responses"]["tokens_out"]["value"] == pytest.approx(30 * 32, rel=0.01)
    assert stages["regenerate_responses"]["tokens_out"] == {"value": 30 * ANSWER, "how": "estimated"}
    for part in ("part-1", "val"):
        finished.answer(part)
        finished.tokenize(part)
    stages = make(finished.config, cpu(finished.run))["stages"]
    assert stages["regenerate_responses"]["tokens_out"] == {"value": 30 * ANSWER, "how": "measured"}
    assert stages["extract_hidden_states"]["tokens_in"] == {"value": 30 * (20 + ANSWER), "how": "measured"}


def test_answers_made_with_other_settings_do_not_count(finished: FinishedParts) -> None:
    finished.collect()
    finished.answer("part-0", Regeneration(max_tokens=31))
    assert make(finished.config, cpu(finished.run))["stages"]["regenerate_responses"]["jobs_left"] == 3


def test_the_measured_speed_of_an_undisturbed_job_is_used(finished: FinishedParts, table: Table) -> None:
    finished.collect()
    finished.answer("part-0")
    finished.benchmark("regenerate_responses", "part-0", 1000)
    finished.attempt("regenerate_responses", "part-0")
    found = make(finished.config, cpu(finished.run))["stages"]["regenerate_responses"]
    assert found["tokens_per_s"]["how"] == "this run"
    assert found["tokens_per_s"]["tokens_per_s"] < 1  # 150 tokens in about a thousand seconds
    assert found["hours_left"] > 1000 / 3600
    # a job that was continued took only the rest of its time
    finished.attempt("regenerate_responses", "part-0")
    again = make(finished.config, cpu(finished.run))["stages"]["regenerate_responses"]
    assert again["tokens_per_s"]["how"] == "scaled"


# -- bytes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("final_states", ["all", "supervised"])
def test_hidden_states_are_planned_to_the_byte_and_finished_ones_are_not_needed_again(
    tmp_path: Path, tiny_llama: Target, table: Table, final_states: str
) -> None:
    finished = FinishedParts(make_config(tiny_llama, extraction={"final_states": final_states}), tmp_path / "planned")
    hidden = target_facts(finished.config.target, table).hidden_size
    finished.collect()
    for part in ("part-0", "part-1", "val"):
        finished.answer(part)
        finished.tokenize(part)
    before = make(finished.config, cpu(finished.run))
    for part in ("part-0", "part-1"):
        finished.extract(part, hidden)
    after = make(finished.config, cpu(finished.run))
    stages = [record["stages"]["extract_hidden_states"] for record in (before, after)]
    assert [stage["jobs_left"] for stage in stages] == [3, 1]
    assert stages[1]["hours_left"] < stages[0]["hours_left"]
    finished.extract("val", hidden)
    wrote = make(finished.config, cpu(finished.run))["stages"]["extract_hidden_states"]["bytes"]
    assert wrote["how"] == "measured"
    # the archive around the tensors is a few kB for each shard
    assert stages[0]["bytes"]["value"] == pytest.approx(wrote["value"], rel=0.02)
    needed = [record["disks"][0]["needed"] for record in (before, after)]
    assert needed[0] - needed[1] > 0.5 * stages[1]["bytes_written"]
    # states of the other layout are not taken for these
    other = {"all": "supervised", "supervised": "all"}[final_states]
    asked = make(make_config(tiny_llama, extraction={"final_states": other}), cpu(finished.run))
    assert asked["stages"]["extract_hidden_states"]["jobs_left"] == 3


def test_a_shard_may_be_copied_without_its_rejected_rows_on_each_node(tmp_path: Path) -> None:
    config = kimi_config(limit=40, scatter={"parts": 4, "shards_per_part": 2})
    one, four = (make(config, gpus(tmp_path / "run", "b300", nodes)) for nodes in (1, 4))
    extra = [record["stages"]["extract_hidden_states"]["bytes_besides_while_running"] for record in (one, four)]
    assert extra[1] == pytest.approx(4 * extra[0])
    assert four["disks"][0]["peak"] > four["disks"][0]["final"]


def test_states_on_another_disk_are_planned_apart(tmp_path: Path) -> None:
    other = Path("/dev/shm")
    if other.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("/dev/shm and the temporary folder are one file system")
    place = replace(gpus(tmp_path / "run", "b300"), states=other / "states-that-nobody-has-made")
    disks = make(kimi_config(limit=5), place)["disks"]
    assert [disk["holds"] for disk in disks] == ["all but hidden states", "hidden states"]
    assert disks[1]["free"] == pytest.approx(shutil.disk_usage(other).free, rel=0.1)
    # 57,344 bytes of states for each token, and a twentieth of margin
    states = disks[1]["final"]
    assert disks[1]["needed"] > states > 5 * 57_344
    assert disks[0]["final"] > disks[1]["final"]


def test_a_disk_that_is_too_small_stops_after_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    with pytest.raises(StageError, match=rf"{run}: the run \(everything\) needs [\d.]+ TB more, [\d.]+ [TGM]B are free"):
        plan.run(kimi_config(limit=10**9), gpus(run, "b300", 4), HARDWARE)
    assert "extract_hidden_states" in capsys.readouterr().out
    assert read_json(run / "plan.json")["largest_risk"].startswith("disk:")
    assert "extract_hidden_states" in (run / "plan.md").read_text()


def test_hard_links_count_once(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"x" * 1000)
    os.link(tmp_path / "a", tmp_path / "b")
    (tmp_path / "c").symlink_to("a")
    assert unique_bytes([tmp_path]) == 1000
    assert unique_bytes([tmp_path / "a", tmp_path / "c", tmp_path / "missing"], follow=True) == 1000


# -- what is said -----------------------------------------------------------------------------------------------------


def test_the_largest_risk_is_what_most_of_the_time_depends_on(tmp_path: Path) -> None:
    made = plan.make_plan(kimi_config(limit=1), gpus(tmp_path / "run", "b300"), HARDWARE)
    roomy = made._replace(disks=[replace(disk, free=1e18) for disk in made.disks])
    assert re.match(r"speed: 9\d% of the time left stands on speeds that were not measured on b300", plan.largest_risk(roomy))
    full = made._replace(disks=[replace(disk, free=disk.needed / 3) for disk in made.disks])
    assert re.match(r"disk: .*\(300%\)", plan.largest_risk(full))


def test_where_speeds_are_measured_the_answers_are_the_risk(tmp_path: Path, table: Table) -> None:
    target = Target(path="nowhere/smollm2-135m", num_hidden_layers=30, aux_layer_ids=[2, 15, 27], dtype="float32")
    made = plan.make_plan(make_config(target, responses={"max_tokens": 400}), cpu(tmp_path / "run"), HARDWARE)
    roomy = made._replace(disks=[replace(disk, free=1e18) for disk in made.disks])
    expected = mean_answer(table.targets["smollm2-135m"].text, 400)
    assert plan.largest_risk(roomy).startswith(f"answers: answers of {expected:.0f} tokens on average (at most 400; ")


def test_run_time_limits_are_twice_the_longest_job(tmp_path: Path) -> None:
    record = make(kimi_config(limit=100, scatter={"parts": 1, "shards_per_part": 1}), gpus(tmp_path / "run", "b300"))
    hours = record["stages"]["train_draft"]["hours_left"] / 2  # two segments, one after the other
    assert record["runtime_min"]["train_draft"] >= 2 * 60 * hours
    assert record["runtime_min"]["train_draft"] <= 2 * 60 * hours + 10
    assert set(record["runtime_min"]) == {
        "regenerate_responses",
        "extract_hidden_states",
        "train_draft",
        "select_checkpoint",
        "evaluate_method",
        "simulate_acceptance",
    }


def test_the_command_ends_with_one_line_and_exit_code_1(tmp_path: Path) -> None:
    done = run_command(kimi_config(limit=10**9), tmp_path / "run", "--gpu-model", "b300", "--gpus", "8", "--nodes", "4")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("plan: error: ")
    assert "| extract_hidden_states" in done.stdout
