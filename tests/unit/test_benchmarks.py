"""The training benchmarks: both trainers see the same batches, operations are counted right, recipes are valid."""

import json

import numpy as np
import pytest
import torch

from benchmarks import answered_prompts, recipe, speculators_trainer, training_speed
from benchmarks.harness import Step, run_steps
from scripts.eagle3.config import Draft, Training, Vocabulary
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.packing import TrainingRows, load_pack, open_shards
from tests.training_case import synthetic_rows, write_states

BATCH_TOKENS = 64


@pytest.fixture
def rows(tmp_path, tiny_llama):
    shard = write_states(tmp_path / "rows.pt", tiny_llama, synthetic_rows(tiny_llama, 6))
    return TrainingRows(open_shards([shard], [2, 4, 5, 8]), 3, BATCH_TOKENS)


def test_speculators_loader_gives_our_batches(tmp_path, rows):
    from speculators.models.eagle3.data import shift_batch
    from speculators.train.data import ArrowDataset, CollateFn

    speculators_trainer.write_data(rows, tmp_path / "data")
    count, held = len(rows), speculators_trainer.VALIDATION_ROWS
    data = ArrowDataset(BATCH_TOKENS, tmp_path / "data", train_ratio=(count + 0.5) / (count + held), on_missing="raise")
    assert len(data) == count
    collate = CollateFn(BATCH_TOKENS, 256, dtype=torch.float32, preprocess=shift_batch)
    settings = Training(batch_tokens=BATCH_TOKENS, seed=3)
    passes = speculators_trainer.batches(rows, settings, 2)
    assert all(sorted(np.concatenate(batches)) == list(range(count)) for batches in passes)
    for pack in passes[1]:
        theirs, own = collate([data[int(number)] for number in pack]), load_pack(rows, pack.tolist(), BATCH_TOKENS).inputs
        for name, tensor in own.items():
            assert torch.equal(theirs[name].to(tensor.dtype), tensor), name


def measured(**changes):
    record = {"step_tokens": [8, 8], "trained_parameters": 5, "tokens_per_s": 30.0, "tokens_per_s_median": 30.0}
    record |= {"peak_gb": 7.0, "peak_warm_gb": 6.0, "mfu": None, "loss": [9.0, 5.0, 4.0, 2.0]}
    return {**record, "first_losses": [], "last_losses": [], **changes}


def test_comparison_takes_ratios_and_the_largest_late_difference_of_losses():
    theirs = measured(tokens_per_s=20.0, peak_gb=10.0, loss=[1.0, 1.0, 4.0, 2.1])
    result = training_speed.compare("real", measured(), theirs)
    assert result["speed_ratio"] == 1.5 and result["memory_ratio"] == 0.7
    assert result["loss_difference"] == pytest.approx(0.1 / 2.1) and result["windows_compared"] == 2


def test_comparison_refuses_other_packs():
    with pytest.raises(StageError, match="positions of each step"):
        training_speed.compare("real", measured(), measured(step_tokens=[8, 9]))


def test_speed_leaves_out_first_steps_of_passes_and_of_the_run(monkeypatch):
    # steps 0, 4 begin passes; the first fourth is warm-up: 2, 3, 5, 6, 7 count
    clock = iter([0.0, 100.0, 101.0, 102.0, 200.0, 202.0, 204.0, 206.0])
    monkeypatch.setattr(training_speed.time, "perf_counter", lambda: next(clock))
    watch = training_speed.Watch([[None] * 4, [None] * 4], [1e12] * 8)
    for _ in range(8):
        watch.step(1.0, 10)
    record = watch.record("NVIDIA H200")
    assert record["counted_steps"] == 5 and record["tokens_per_s"] == 50 / 8
    assert record["mfu"] == pytest.approx(5e12 / 8 / 989e12)


def test_each_recipe_is_a_valid_configuration_and_changes_something():
    sections = {name: recipe.changed(name, passes=6, vocab_size=49152) for name in recipe.RECIPES}
    for name, changed in sections.items():
        assert Training(**changed["training"]).segments == 6
        Draft(**changed["draft"]), Vocabulary(**changed["vocabulary"])
        assert (changed == sections["baseline"]) is (name == "baseline")
    joined = recipe.changed("ttt5+cosine+vocab-32000", passes=6, vocab_size=20000)
    assert joined["training"] == {**sections["ttt5"]["training"], "schedule": "cosine"}
    assert joined["vocabulary"]["draft_vocab_size"] == 20000
    assert recipe.changed(recipe.COMBINED, 6, 49152)["draft"] == {"norm_before_fc": True}
    with pytest.raises(StageError, match="no recipe ttt9"):
        recipe.changed("ttt5+ttt9", 6, 49152)


def trained(name, *lengths):
    checkpoints = [
        {"segment": number, "loss": 1.0, "simulated": {kind: {"acceptance_length": length} for kind in ("val", "suite")}}
        for number, length in enumerate(lengths)
    ]
    best = max(range(len(lengths)), key=lengths.__getitem__)
    return {"recipe": name, "checkpoints": checkpoints, "selected": best}


def test_served_are_all_baseline_checkpoints_and_the_best_recipes():
    results = [trained("baseline", 1.5, 1.6), *(trained(f"r{n}", 1.1 + n / 10, 1.0) for n in range(5))]
    steps = recipe.plan_serving(results, None, {"suites": ["suite"]}, 2)
    chosen = [(step.arguments["recipe"], step.arguments["segment"]) for step in steps]
    assert chosen == [("baseline", 0), ("baseline", 1), ("r4", 0), ("r3", 0), ("r2", 0)]
    (named,) = recipe.plan_serving(results, ["r1:1"], {}, 1)
    assert named.arguments == {"recipe": "r1", "segment": 1}
    with pytest.raises(StageError, match="--serve other"):
        recipe.plan_serving(results, ["other"], {}, 1)


def test_summary_ranks_simulated_against_served():
    results = [trained("baseline", 1.0, 2.0, 3.0)]
    served = [
        {"recipe": "baseline", "segment": number, "served": {"suite": {"acceptance_length": length}}}
        for number, length in enumerate((1.1, 2.4, 2.3))
    ]
    figures = recipe.summarize(results, served, ["suite"])["suite"]
    assert figures["rank_correlation"] == pytest.approx(0.5) and figures["largest_gap"] == pytest.approx(0.7)
    assert recipe.rank_correlation([1, 1], [1, 2]) is None


def test_listed_prompts_come_in_the_order_of_the_list_and_all_of_them(tmp_path):
    prompts, ids = tmp_path / "prompts.jsonl", tmp_path / "ids.txt"
    prompts.write_text("".join(json.dumps({"id": name, "messages": [], "more": 1}) + "\n" for name in "abc"))
    ids.write_text("c\na\n")
    assert answered_prompts.listed_prompts([prompts], ids) == [{"id": "c", "messages": []}, {"id": "a", "messages": []}]
    ids.write_text("a\nz\n")
    with pytest.raises(StageError, match=r"1 of 2 ids .* e\.g\. z"):
        answered_prompts.listed_prompts([prompts], ids)


@pytest.mark.slow
def test_both_trainers_lose_alike(tmp_path):
    arguments = {"width": training_speed.WIDE, "passes": 2}
    steps = [Step(name, arguments, 500) for name in ("prepare", "theirs", "ours")]
    run_steps("benchmarks.training_speed", steps, tmp_path / "work", tmp_path / "output", keep_going=False)
    theirs, ours = (read_json(answered_prompts.done_file(tmp_path / "work", name, arguments)) for name in ("theirs", "ours"))
    training_speed.compare(training_speed.WIDE, ours, theirs)
    assert theirs["parameter_dtypes"] == ["float32"]
    assert ours["first_losses"] == pytest.approx(theirs["first_losses"], rel=1e-5)
    assert ours["last_losses"] == pytest.approx(theirs["last_losses"], rel=1e-3)
