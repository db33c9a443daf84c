"""Rolling mode: steps are counted before states are there, parts are deleted only behind a whole checkpoint, and the plan."""

import fcntl
import itertools
import shutil
from dataclasses import replace
from types import SimpleNamespace

import pytest

from scripts import release_part, schedule_training, train_draft
from scripts.eagle3.config import load_config
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.errors import StageError
from scripts.eagle3.estimate import Job, StagePlan
from scripts.eagle3.estimate_totals import seconds_together
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.provenance import digest
from scripts.eagle3.released import is_released, refuse_deleted, require_states
from scripts.eagle3.rolling import open_tokens
from scripts.eagle3.rows import TOKENS, write_rows
from scripts.eagle3.training import learning_rate, plan_steps
from scripts.plan import as_text, make_plan
from tests.planning_case import HARDWARE, FinishedParts, cpu, make, make_config
from tests.training_case import SHARDS, TrainingCase, synthetic_rows, training, write_states
from tests.unit.test_config import MINIMAL, with_value

PARTS = 2
ROLLING = {"passes": 2, "parts_on_disk": 1}


def settings(**changes):
    return training(segments=PARTS, rolling=ROLLING, **changes)


@pytest.fixture
def case(tmp_path, tiny_llama):
    """Files of a run of two parts, as the extraction leaves them in rolling mode, and the steps counted."""
    case = TrainingCase(tmp_path, tiny_llama)
    for part in range(PARTS):
        rows = synthetic_rows(tiny_llama, first_seed=10 * part)
        write_tokens(case, part, rows)
        write_json(case.hidden / f"part-{part}/manifest.json", {"rejected": []})
    count_steps(case)
    return case


def write_tokens(case, part, rows):
    columns = {"conversation_id": "", "source": "", "split": "train"}
    found = [
        {"row_key": row.key, "input_ids": row.token_ids.tolist(), "loss_mask": row.loss_mask.tolist(), **columns}
        for row in rows
    ]
    write_rows(case.folder / f"tokens/part-{part}/shard-0.parquet", found, TOKENS, {}, {})


def count_steps(case):
    schedule_training.run(settings(), case.folder / "tokens", SHARDS, case.folder / "schedule.json")
    return read_json(case.folder / "schedule.json")["steps"]


def inputs(case, part):
    tokens, schedule = case.folder / f"tokens/part-{part}", case.folder / "schedule.json"
    return train_draft.Inputs(case.files, case.hidden, PARTS, SHARDS, tokens, schedule)


def planned(case, part):
    """(the rows of the part's states, its segment)"""
    data = train_draft.read_data(case.target, settings(), inputs(case, part), part)
    return data.train, train_draft.plan(data, settings(), inputs(case, part), part)


def reject(case, part, count):
    """As if the first `count` rows of the part had been rejected by the extraction."""
    rows = synthetic_rows(case.target, first_seed=10 * part)
    write_states(case.shard(f"part-{part}"), case.target, rows[count:])
    rejected = [{"row_key": row.key, "layer": 2, "reason": "not finite"} for row in rows[:count]]
    write_json(case.hidden / f"part-{part}/manifest.json", {"rejected": rejected})


# -- the configuration ------------------------------------------------------------------------------------------------


def test_a_rolling_run_has_one_segment_for_each_part():
    config = load_config({**with_value("training.rolling", {"passes": 3}), "scatter": {"parts": 7}})
    assert config.training.segments == 7
    assert load_config(config.model_dump()).training.segments == 7
    with pytest.raises(StageError, match=r"training.segments is 2: with training.rolling a segment is one part, and scatter"):
        load_config({**MINIMAL, "scatter": {"parts": 7}, "training": {"segments": 2, "rolling": {}}})


def test_parts_on_disk_reach_no_stage():
    config = load_config(with_value("training.rolling", {"parts_on_disk": 5}))
    assert config.training.rolling.parts_on_disk == 5 and "parts_on_disk" not in config.training.model_dump_json()


# -- the steps --------------------------------------------------------------------------------------------------------


def test_every_row_of_a_part_is_trained_once_in_each_pass_and_the_steps_follow_those_before(case):
    counts, first = read_json(case.folder / "schedule.json")["steps"], 0
    for part in range(PARTS):
        rows, segment = planned(case, part)
        assert (segment.first_step, len(segment.steps), segment.total_steps) == (first, counts[part], sum(counts))
        trained = sorted(number for step in segment.steps for pack in step for number in pack)
        assert trained == sorted(ROLLING["passes"] * list(range(len(rows))))
        first += counts[part]
    rates = [learning_rate(step, first, settings(warmup_fraction=0)) for step in range(first)]
    assert all(later < earlier for earlier, later in itertools.pairwise(rates)) and rates[-1] > 0


def test_the_passes_over_a_part_come_in_different_orders(case):
    steps = planned(case, 0)[1].steps
    assert steps[: len(steps) // 2] != steps[len(steps) // 2 :]


@pytest.mark.parametrize("count", [1, 5])
def test_rejected_rows_are_left_out_and_change_no_step_count(case, count):
    before = planned(case, 1)[1]
    reject(case, 1, count)
    rows, segment = planned(case, 1)
    assert segment[2:] == before[2:] and len(segment.steps) == len(before.steps)
    assert all(pack for step in segment.steps for pack in step) and all(segment.steps)
    assert {number for step in segment.steps for pack in step for number in pack} == set(range(len(rows)))


def test_rows_without_states_that_nobody_rejected_are_refused(case):
    reject(case, 1, 2)
    write_json(case.hidden / "part-1/manifest.json", {"rejected": []})
    with pytest.raises(StageError, match="found 2 without states, 0 states of other rows"):
        planned(case, 1)


def test_states_of_other_rows_and_other_masks_are_refused(case):
    write_states(case.shard("part-1"), case.target, synthetic_rows(case.target, 7, first_seed=10))
    with pytest.raises(StageError, match="found 0 without states, 1 states of other rows"):
        planned(case, 1)
    rows = synthetic_rows(case.target, first_seed=10)
    rows[0].loss_mask[:] = True
    write_states(case.shard("part-1"), case.target, rows)
    with pytest.raises(StageError, match="other loss masks; delete the manifest"):
        planned(case, 1)


def test_a_part_that_is_not_as_it_was_counted_is_refused(case):
    schedule = read_json(case.folder / "schedule.json")
    write_json(case.folder / "schedule.json", {**schedule, "steps": [*schedule["steps"][:1], 99]})
    with pytest.raises(StageError, match=r"optimiser steps of segment 1: expected 99, found 4"):
        planned(case, 1)


def test_a_damaged_token_shard_is_one_line(case):
    path = case.folder / "tokens/part-0/shard-0.parquet"
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(StageError, match=r"shard-0.parquet: no token shard that can be read .*delete and remake it"):
        open_tokens(path.parent, SHARDS, settings())


def test_a_pass_counts_as_many_steps_as_packs_of_its_rows_need(case):
    rows = open_tokens(case.folder / "tokens/part-0", SHARDS, settings())
    single = len(plan_steps(rows, settings(gradient_accumulation=1), 0))
    assert len(plan_steps(rows, settings(gradient_accumulation=single), 0)) == ROLLING["passes"]


# -- deleting ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def extracted(tmp_path):
    """(hidden/part-0, the part's store, the record of its segment), as extraction and training leave them; contents made up."""
    folder, checkpoints = tmp_path / "hidden/part-0", tmp_path / "checkpoints"
    provenance = {"layer_ids": [2, 4, 5, 8]}
    store = tmp_path / "store/extract_hidden_states" / digest(provenance) / "part-0"
    for path in (store / "shards/a.pt", store / "shards/b.pt", store / "batches/c.pt", checkpoints / "0" / WEIGHTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(path.name)
    (store / "attempts.jsonl").touch()
    folder.mkdir(parents=True)
    (folder / "shard-0.pt").hardlink_to(store / "shards/a.pt")
    (folder / "shard-1.pt").symlink_to(store / "shards/b.pt")
    shards = [{"rows": 3, "tokens": 30}, {"rows": 2, "tokens": 20}]
    write_json(folder / "manifest.json", {"provenance": provenance, "shards": shards})
    write_json(checkpoints / "0.json", {"segment": 0, "folder": "0", **train_draft.hashes(checkpoints / "0")})
    return folder, store, checkpoints / "0.json"


def release(extracted):
    folder, store, record = extracted
    release_part.run(record, folder, store.parents[2])


def test_a_released_part_leaves_its_manifest_and_small_records(extracted, tmp_path):
    folder, store, _ = extracted
    release(extracted)
    assert not list(tmp_path.rglob("*.pt"))
    assert {path.name for path in folder.iterdir()} == {"manifest.json", "released.json"}
    assert (store / "attempts.jsonl").is_file()
    record = read_json(folder / "released.json")
    assert (record["segment"], record["rows"], record["tokens"]) == (0, 5, 50)
    assert is_released(folder)


@pytest.mark.parametrize("deleted", [["shard-0.pt"], ["shard-0.pt", "shard-1.pt"], ["released.json"]])
def test_a_release_that_was_killed_is_finished_by_the_next(extracted, tmp_path, deleted):
    folder = extracted[0]
    if deleted == ["released.json"]:
        release(extracted)
    for name in deleted:
        (folder / name).unlink()
    assert not is_released(folder)
    release(extracted)
    assert is_released(folder) and not list(tmp_path.rglob("*.pt"))


@pytest.mark.parametrize("damage", ["gone", "changed"])
def test_nothing_is_deleted_behind_a_checkpoint_that_is_not_whole(extracted, tmp_path, damage):
    weights = extracted[2].parent / "0"
    if damage == "gone":
        shutil.rmtree(weights)
    else:
        (weights / WEIGHTS).write_text("other")
    before = sorted(tmp_path.rglob("*.pt"))
    with pytest.raises(StageError, match="train segment 0 again" if damage == "gone" else "weights_sha256"):
        release(extracted)
    assert sorted(tmp_path.rglob("*.pt")) == before and len(before) == 5


def test_a_store_that_a_job_holds_is_not_deleted(extracted):
    _, store, _ = extracted
    with open(store / "lock", "a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(StageError, match="held by a job that lives"):
            release(extracted)
    assert len(list(store.rglob("*.pt"))) == 3


def test_training_on_a_deleted_part_says_how_to_get_it_back(extracted):
    folder = extracted[0]
    release(extracted)
    with pytest.raises(StageError, match=r"deleted after its segment was trained; to extract .*rm -r .*hidden/part-0, then"):
        require_states(folder, 2)


def run_of(*segments, touch=False):
    """What Snakemake shows of a run that would train these segments."""
    jobs = [
        SimpleNamespace(rule=SimpleNamespace(name="train_draft"), wildcards=SimpleNamespace(segment=str(n))) for n in segments
    ]
    others = [SimpleNamespace(rule=SimpleNamespace(name="report"), wildcards=SimpleNamespace())]
    return SimpleNamespace(touch=touch, dag=SimpleNamespace(needrun_jobs=lambda: [*jobs, *others]))


def test_only_a_run_that_trains_deleted_parts_again_is_refused(extracted):
    folder = extracted[0]
    refuse_deleted(run_of(0, 1), folder.parent)
    release(extracted)
    with pytest.raises(StageError, match=r"1 parts \(part-0 to part-0\).*rm -r .*hidden/part-0, then run again; .*--touch"):
        refuse_deleted(run_of(0, 1), folder.parent)
    refuse_deleted(run_of(1), folder.parent)
    refuse_deleted(run_of(0, 1, touch=True), folder.parent)
    (folder / "shard-0.pt").touch()  # extracted again
    refuse_deleted(run_of(0, 1), folder.parent)


# -- the plan ---------------------------------------------------------------------------------------------------------


def stages(extraction, training_s, done=()):
    """Jobs of these seconds: parts and last the validation, segments."""
    names = [*(f"part-{number}" for number in range(len(extraction) - 1)), "val"]
    jobs = [Job(name, seconds, name in done) for name, seconds in zip(names, extraction, strict=True)]
    return [
        StagePlan("extract_hidden_states", jobs),
        StagePlan("train_draft", [Job(str(number), seconds) for number, seconds in enumerate(training_s)]),
    ]


@pytest.mark.parametrize(
    ("parts_on_disk", "nodes", "hours"),
    [
        (1, 1, 25),  # one job after the other
        (2, 1, 25),
        (1, 4, 24),  # validation beside part 0, then in turns
        (2, 2, 16),  # part 1 on the second node from 1 on; part 2 waits for segment 0, which ends at 8
        (3, 4, 14),  # all parts at once
    ],
)
def test_extraction_and_training_overlap_as_parts_and_nodes_allow(parts_on_disk, nodes, hours):
    assert seconds_together(stages([5, 5, 5, 1], [3, 3, 3]), parts_on_disk, nodes) == pytest.approx(hours)


def test_finished_jobs_take_no_time_together():
    assert seconds_together(stages([5, 5, 1], [5, 5], done=("part-0", "val")), 2, 2) == 10


def test_the_plan_of_a_rolling_run_holds_some_parts_at_a_time(tmp_path, tiny_llama):
    def states(parts_on_disk, **rolling):
        scatter, shape = {"parts": 4, "shards_per_part": 1}, {"dtype": "float32"} | rolling
        if not rolling:
            shape["segments"] = 4
        place = replace(cpu(tmp_path / "run"), parts_on_disk=parts_on_disk)
        return make(make_config(tiny_llama, scatter=scatter, training=shape), place)

    everything = states(2)
    whole = everything["stages"]["extract_hidden_states"]["bytes"]["value"]
    peaks = {}
    for parts in (1, 2, 4):
        plan = states(parts, rolling={"passes": 1})
        stage = plan["stages"]["extract_hidden_states"]
        assert stage["bytes_moved"] == pytest.approx(whole, rel=0.01)
        assert stage["bytes"]["value"] < 0.5 * whole  # validation is what stays
        peaks[parts] = stage["bytes"]["value"] + stage["bytes_besides_while_running"]
        assert plan["disks"][0]["peak"] > peaks[parts]  # checkpoints are written beside them
    assert peaks[1] < peaks[2] < peaks[4]
    assert peaks[2] - peaks[1] == pytest.approx((peaks[4] - peaks[2]) / 2, rel=0.05)
    tokens = [plan["stages"]["train_draft"]["tokens_in"]["value"] for plan in (everything, states(2, rolling={"passes": 3}))]
    assert tokens[0] * 3 == pytest.approx(tokens[1] * 4, rel=0.01)  # passes over all rows


def test_a_deleted_part_is_finished_work_unless_its_training_has_changed(tmp_path, tiny_llama):
    def config(**shape):
        return make_config(tiny_llama, training={"dtype": "float32", "rolling": {}, **shape})

    run = FinishedParts(config(), tmp_path / "planned")
    run.collect()
    for part in ("part-0", "part-1", "val"):
        run.answer(part)
        run.tokenize(part)
        run.extract(part, 256)
    for made in ("vocab/coverage.json", "draft/config.json", "target/head.safetensors"):
        (run.run / made).parent.mkdir(exist_ok=True)
        (run.run / made).touch()
    place = cpu(run.run)
    before = make(config(), place)["stages"]
    assert before["extract_hidden_states"]["jobs_left"] == 0
    trained = config().training.model_dump(exclude=train_draft.NOT_SCIENCE)
    record = {"provenance": {"training": trained}}
    write_json(run.run / "checkpoints/0.json", record)
    (run.run / "hidden/part-0/shard-0.pt").unlink()
    write_json(run.run / "hidden/part-0/released.json", {})

    found = make(config(), place)["stages"]
    assert (found["extract_hidden_states"]["jobs_left"], found["train_draft"]["jobs_left"]) == (0, 1)
    changed = make_plan(config(learning_rate=2e-3), place, HARDWARE)
    assert [job.name for job in changed.stages[3].left] == ["part-0"] and changed.stages[3].name == "extract_hidden_states"
    assert "rolling: deleted after a training with other settings, and counted as to be extracted: part-0" in as_text(changed)
    assert len(changed.stages[5].left) == 2 and changed.stages[5].name == "train_draft"

    (run.run / "benchmarks/train_draft").mkdir(parents=True)
    (run.run / "benchmarks/train_draft/0.tsv").write_text("s\n100.0\n")
    assert make(config(), place)["stages"]["train_draft"]["tokens_per_s"]["how"] == "this run"
    write_json(run.run / "checkpoints/0.json", {**record, "continued_from": 3})
    assert make(config(), place)["stages"]["train_draft"]["tokens_per_s"]["how"] != "this run"
