"""The training stage on DeepSpeed: resumption, ranks, refusals, logs, and the walk of its weights."""

import socket

import pytest
import torch

from scripts import select_checkpoint, train_draft
from scripts.eagle3 import training as training_loop
from scripts.eagle3 import zero
from scripts.eagle3.draft import build_draft, load_trainable
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.metrics import flat
from scripts.eagle3.packing import load_pack
from scripts.eagle3.shards import Shard, StateRow
from scripts.eagle3.target import fingerprint, text_config
from scripts.eagle3.training import plan_segment, train_segment
from scripts.eagle3.ttt import TrainingDraft
from scripts.eagle3.walk import walk_rows
from tests.draft_case import TTT_STEPS, draft_vocabulary, write_vocabulary
from tests.training_case import (
    TrainingCase,
    largest_difference,
    learnable_rows,
    metrics_lines,
    synthetic_rows,
    training,
    weights,
    write_states,
)

DEADLINE_S = 120


@pytest.fixture(scope="module")
def trained(tmp_path_factory, tiny_llama):
    """A run of two segments, made in this process; tests leave its files as they are."""
    case = TrainingCase(tmp_path_factory.mktemp("trained"), tiny_llama)
    write_states(case.shard("val"), tiny_llama, learnable_rows(tiny_llama, case.files))
    for number in range(2):
        case.train(number)
    return case


@pytest.fixture
def case(tmp_path, tiny_llama):
    """Files of a run, nothing trained."""
    return TrainingCase(tmp_path, tiny_llama)


def finish(process):
    """Standard error of a process that must succeed."""
    _, errors = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 0, errors
    return errors


def test_training_leaves_a_checkpoint_whose_record_names_its_weights(trained):
    record = read_json(trained.checkpoints / "1.json")
    assert record["segment"] == 1 and record["step"] == record["total_steps"] == 2 * read_step(trained)
    assert record["rows"]["train"]["rows"] == 12 and record["rows"]["validation"]["rows"] == 3
    found = train_draft.hashes(trained.checkpoints / "1")
    assert {name: record[name] for name in found} == found
    state = weights(trained.checkpoints, 1)
    assert {tensor.dtype for tensor in state.values()} == {torch.float32}
    assert not list(trained.checkpoints.glob(".unfinished*"))


def read_step(trained):
    return read_json(trained.checkpoints / "0.json")["step"]


def test_training_metrics_have_one_line_per_step_and_the_validation(trained):
    lines = metrics_lines(trained.metrics, 1)
    first = read_step(trained)
    assert [line["step"] for line in lines] == [*range(first, 2 * first), 2 * first - 1]
    assert [line["kind"] for line in lines] == ["train"] * first + ["validation"]
    for line in lines[:-1]:
        assert line["loss"] == pytest.approx(sum(line["loss_by_step"]))
        assert len(line["accuracy"]) == len(line["conditional_accuracy"]) == TTT_STEPS
        assert line["grad_norm"] > 0 and line["tokens_per_s"] > 0 and 0 <= line["loader_wait"] <= 1
        assert line["mfu"] is None  # nobody knows the peak of this CPU
    assert (
        lines[-1]["acceptance_length"]
        == read_json(trained.checkpoints / "1.json")["metrics"]["validation"]["acceptance_length"]
    )


def test_validation_of_training_equals_the_walk_over_the_saved_weights(trained):
    draft = build_draft(*trained.files)
    load_trainable(draft, trained.checkpoints / "1" / WEIGHTS)
    walked = walk_rows(draft, Shard(trained.shard("val")), TTT_STEPS).figures()
    recorded = read_json(trained.checkpoints / "1.json")["metrics"]["validation"]
    keys = ("drafts", "accepted_by_position", "unknown_by_position", "acceptance_length", "acceptance_by_position")
    assert {key: recorded[key] for key in keys} == {key: walked[key] for key in keys}
    assert recorded["drafts"] > 0


@pytest.mark.slow
def test_training_resumed_in_a_new_process_gives_the_same_bits(trained, tmp_path):
    checkpoints = tmp_path / "checkpoints"
    for number in range(2):
        finish(trained.start(number, checkpoints=checkpoints))
        assert largest_difference(weights(checkpoints, number), weights(trained.checkpoints, number)) == 0


@pytest.mark.parametrize("changes", [{}, {"zero_stage": 1, "dtype": "bfloat16"}], ids=["float32", "bfloat16-zero1"])
def test_resumed_training_equals_uninterrupted_training(case, changes):
    settings = training(**changes)
    data = train_draft.read_data(case.target, settings, case.inputs())
    engine = train_draft.start_draft(case.files, settings, zero.start_process_group())
    for number in range(2):
        train_segment(engine, data.train, plan_segment(data.train, settings, number), settings, None)
    uninterrupted = zero.full_weights(engine)
    engine.destroy()
    for number in range(2):
        case.train(number, settings)
    resumed = weights(case.checkpoints, 1)
    assert largest_difference(resumed, uninterrupted) == 0
    assert any((tensor != tensor.bfloat16()).any() for tensor in resumed.values())  # masters, not rounded copies


def test_accumulated_training_step_equals_one_large_batch(case):
    norms, losses = [], []
    for batch_tokens, accumulation in ((64, 16), (1024, 1)):
        settings = training(batch_tokens=batch_tokens, gradient_accumulation=accumulation, segments=1)
        case.train(0, settings)
        (line,) = metrics_lines(case.metrics, 0)[:-1]
        norms.append(line["grad_norm"])
        losses.append(line["loss"])
    assert norms[0] == pytest.approx(norms[1], rel=1e-4) and losses[0] == pytest.approx(losses[1], rel=1e-5)


RANKS = {
    "zero0": {"zero_stage": 0},
    "zero1": {"zero_stage": 1},
    "zero2": {"zero_stage": 2},
    "zero3": {"zero_stage": 3},
    "muon-zero0": {"zero_stage": 0, "optimizer": "muon"},
    "muon-bfloat16-zero1": {"zero_stage": 1, "optimizer": "muon", "dtype": "bfloat16"},
}


@pytest.mark.slow
@pytest.mark.parametrize("changes", RANKS.values(), ids=RANKS)
def test_two_ranks_train_as_one(case, changes):
    """Each rank accumulates two micro-batches where one alone accumulates four."""
    settings = training(gradient_accumulation=4, **changes)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    for number in range(2):
        case.train(number, settings)
        launcher = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        ranks = [
            case.start(number, settings, case.folder / "ranks", RANK=str(rank), LOCAL_RANK=str(rank), **launcher)
            for rank in range(2)
        ]
        for process in ranks:
            finish(process)
    # AdamW divides by the gradient's own size: a rounding error can become a small part of a step
    exact = settings.dtype == "float32"
    found, expected = weights(case.folder / "ranks", 1), weights(case.checkpoints, 1)
    assert largest_difference(found, expected) < (1e-4 if exact else 2e-3)
    one, two = (read_json(folder / "1.json")["metrics"] for folder in (case.checkpoints, case.folder / "ranks"))
    assert one["train"]["loss"] == pytest.approx(two["train"]["loss"], rel=1e-5 if exact else 1e-3)
    assert one["validation"]["drafts"] == two["validation"]["drafts"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_zero_stages_train_alike(case, dtype):
    states = {}
    for stage in (1, 2, 3):
        settings = training(zero_stage=stage, dtype=dtype)
        for number in range(2):
            case.train(number, settings)
        states[stage] = weights(case.checkpoints, 1)
    tolerance = 1e-4 if dtype == "float32" else 2e-3
    for stage in (2, 3):
        assert largest_difference(states[stage], states[1]) < tolerance


@pytest.fixture
def stopped_early(case):
    """Validation cannot improve: segments after the second repeat its record."""
    settings = training(segments=4, patience=1, learning_rate=1e-12, keep_checkpoints=1)
    for number in range(4):
        case.train(number, settings)
    return case


def test_training_stops_early_and_later_segments_repeat_the_record(stopped_early, capsys):
    case, records = stopped_early, [read_json(stopped_early.checkpoints / f"{number}.json") for number in range(4)]
    lengths = [record["metrics"]["validation"]["acceptance_length"] for record in records]
    assert lengths[1] == lengths[0]
    assert [record.get("stopped", False) for record in records] == [False, False, True, True]
    for number in (2, 3):
        assert records[number] == {**records[1], "segment": number, "stopped": True}
    assert sorted(path.name for path in case.checkpoints.iterdir() if path.is_dir()) == ["0", "1"]
    assert sorted(path.name for path in case.metrics.glob("*.jsonl")) == ["0.jsonl", "1.jsonl"]


def test_checkpoint_is_selected_from_what_was_trained_before_the_early_stop(stopped_early, tmp_path):
    case, output = stopped_early, tmp_path / "selected.json"
    select_checkpoint.run(case.target, case.files, case.checkpoints, 4, case.hidden / "val", 1, TTT_STEPS, output)
    selected = read_json(output)
    assert [candidate["segment"] for candidate in selected["candidates"]] == [0, 1]


def test_early_stop_of_training_refuses_a_checkpoint_of_another_origin(stopped_early):
    case = stopped_early
    write_states(case.shard("part-1"), case.target, synthetic_rows(case.target, first_seed=50))
    with pytest.raises(StageError, match=r"checkpoints/1.json: rows is"):
        case.train(2, training(segments=4, patience=1, learning_rate=1e-12, keep_checkpoints=1))


@pytest.mark.parametrize(
    ("lengths", "patience", "stops"),
    [
        ([1.5, 1.6], 1, False),
        ([1.5, 1.5], 1, True),
        ([1.5, 1.4], 2, False),
        ([1.5, 1.4, 1.4], 2, True),
        ([1.5, 1.4, 1.6], 2, False),
        ([1.4, 1.6, 1.5, 1.7], 2, False),
        ([1.5, 1.4], None, False),
    ],
)
def test_patience_of_training_counts_segments_without_a_better_one(tmp_path, lengths, patience, stops):
    for number, length in enumerate(lengths):
        write_json(tmp_path / f"{number}.json", {"metrics": {"validation": {"acceptance_length": length}}})
    assert train_draft.stops_early(tmp_path, len(lengths), patience) is stops


@pytest.fixture
def one_segment(case):
    """Segment 0 is trained; what segment 1 resumes from can be spoiled."""
    case.train(0)
    return case


def test_training_refuses_changed_weights(one_segment):
    path = one_segment.checkpoints / "0" / WEIGHTS
    path.write_bytes(path.read_bytes()[:-4] + b"\0\0\0\1")
    with pytest.raises(StageError, match=r"checkpoints/0 \(compared with .*0.json\): weights_sha256 is"):
        one_segment.train(1)


def test_training_refuses_a_changed_resume_state(one_segment):
    (path,) = (one_segment.checkpoints / "0/deepspeed").rglob("*.pt")
    path.unlink()
    with pytest.raises(StageError, match=r"state_sha256 is"):
        one_segment.train(1)


def test_training_refuses_a_pruned_checkpoint(one_segment):
    (one_segment.checkpoints / "0").rename(one_segment.folder / "elsewhere")
    with pytest.raises(StageError, match=r"checkpoints/0: no such folder; it was pruned: train segment 0 again"):
        one_segment.train(1)


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"learning_rate": 5e-4}, "training.learning_rate"),
        ({"seed": 1}, "training.seed"),
        ({"zero_stage": 1}, "zero_stage"),
        ({"optimizer": "muon"}, "training.optimizer"),
    ],
)
def test_training_refuses_to_resume_with_other_settings(one_segment, changes, key):
    with pytest.raises(StageError, match=rf"checkpoints/0.json: {key} is"):
        one_segment.train(1, training(**changes))


def test_training_refuses_to_resume_with_another_number_of_processes(one_segment, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    words = r"checkpoints/0.json: processes is 1, expected 2; DeepSpeed reads an optimiser's state only as it was sharded"
    with pytest.raises(StageError, match=words):
        one_segment.train(1)


def test_training_refuses_to_resume_on_other_rows(one_segment):
    write_states(one_segment.shard("part-1"), one_segment.target, synthetic_rows(one_segment.target, first_seed=50))
    with pytest.raises(StageError, match=r"checkpoints/0.json: rows is"):
        one_segment.train(1)


def test_training_refuses_to_resume_with_another_vocabulary_or_draft(one_segment):
    record = read_json(one_segment.checkpoints / "0.json")
    for key in ("vocabulary", "draft_config"):
        changed = {**record, "provenance": {**record["provenance"], key: "another"}}
        write_json(one_segment.checkpoints / "0.json", changed)
        with pytest.raises(StageError, match=rf"checkpoints/0.json: {key} is another"):
            one_segment.train(1)


def test_training_refuses_states_of_another_target(case):
    other = {"target": {**fingerprint(case.target), "config": "another"}}
    write_states(case.shard("part-1"), case.target, synthetic_rows(case.target), other)
    with pytest.raises(StageError, match=r"part-1/shard-0.pt \(compared with .*part-0/shard-0.pt\): target.config is"):
        case.train(0)
    for part in ("part-0", "part-1", "val"):
        write_states(case.shard(part), case.target, synthetic_rows(case.target), other)
    with pytest.raises(StageError, match=r"part-0/shard-0.pt \(compared with .*config.json\): target.config is another"):
        case.train(0)


def test_training_refuses_layers_that_the_draft_does_not_read(case):
    config = read_json(case.files.config)
    write_json(case.files.config, {**config, "eagle_aux_hidden_state_layer_ids": [1, 4, 5]})
    with pytest.raises(StageError, match=r"eagle_aux_hidden_state_layer_ids: expected \[2, 4, 5\], found \[1, 4, 5\]"):
        case.train(0)


def test_training_stops_at_a_loss_that_is_not_finite_and_names_the_rows(case):
    rows = synthetic_rows(case.target)
    broken = StateRow(rows[0].key, rows[0].token_ids, rows[0].loss_mask, rows[0].hidden_states.clone())
    broken.hidden_states[-2, 0] = float("inf")
    write_states(case.shard("part-0"), case.target, [broken, *rows[1:]])
    with pytest.raises(StageError, match=rf"loss is nan on rows .*{broken.key}"):
        case.train(0)
    assert not case.checkpoints.exists() or not list(case.checkpoints.iterdir())


def test_training_names_the_rows_whose_gradients_are_not_finite(case, monkeypatch):
    """Every loss is finite, so any of the step's rows can be at fault: all of them are named."""
    monkeypatch.setattr(training_loop, "step_optimizer", lambda engine: float("nan"))
    with pytest.raises(StageError, match=r"step 0: gradient norm is nan on rows (\w+, )+\w+; nothing of this step") as error:
        case.train(0, training(gradient_accumulation=16))
    keys = {key for part in ("part-0", "part-1") for key in Shard(case.shard(part)).row_keys}
    assert len(keys) == 12 and all(key in str(error.value) for key in keys)


def test_training_refuses_a_vocabulary_map_of_another_size(case):
    vocabulary = draft_vocabulary(text_config(case.target)["vocab_size"])
    write_vocabulary(case.files.d2t.parent, case.target, vocabulary[1:])
    with pytest.raises(StageError, match=r"d2t.npy: shape and dtype: expected .*512.*found .*511.*build_vocab_mapping"):
        case.train(0)


def test_training_refuses_a_segment_beyond_the_last(case):
    with pytest.raises(StageError, match=r"--segment 2: expected 0 to 1"):
        case.train(2)


@pytest.mark.slow
def test_training_logs_go_to_tensorboard_and_to_one_wandb_run(case, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setenv("WANDB_MODE", "offline")
    settings = training(loggers=["tensorboard", "wandb"])
    identities = set()
    for number in range(2):
        case.train(number, settings)
        identities.add((case.metrics / "wandb_run_id").read_text())
    assert len(identities) == 1
    assert len(list((case.metrics / "wandb").glob(f"offline-run-*-{identities.pop()}"))) >= 1
    events = EventAccumulator(str(case.metrics / "tensorboard")).Reload()
    steps = read_json(case.checkpoints / "1.json")["step"]
    assert [event.step for event in events.Scalars("train/loss")] == list(range(steps))
    assert [event.step for event in events.Scalars("validation/acceptance_length")] == [steps // 2 - 1, steps - 1]
    lines = [line for number in range(2) for line in metrics_lines(case.metrics, number)]
    for kind in ("train", "validation"):
        records = [flat(line) for line in lines if line["kind"] == kind]
        names = records[0].keys() - {"step", "segment"}
        assert {f"{kind}/{name}" for name in names} == {tag for tag in events.Tags()["scalars"] if tag.startswith(f"{kind}/")}
        for name in names:
            values = [event.value for event in events.Scalars(f"{kind}/{name}")]
            assert values == pytest.approx([record[name] for record in records], rel=1e-6)


@pytest.mark.gpu
def test_compiled_flex_attention_trains_as_dense_attention_on_a_gpu(case):
    settings = training()
    rows = train_draft.read_data(case.target, settings, case.inputs()).train
    batch = load_pack(rows, [0, 1, 2, 3], 128)
    results = []
    for attention in ("sdpa", "flex"):
        model = TrainingDraft(build_draft(*case.files, attention=attention).cuda(), TTT_STEPS, 1.0, "kl_div")
        loss, _, _ = model(
            **{name: tensor.cuda() for name, tensor in batch.inputs.items()},
            masked_tokens=torch.ones(TTT_STEPS, device="cuda"),
        )
        loss.backward()
        results.append((loss.item(), {name: p.grad for name, p in model.named_parameters()}))
    (dense, expected), (flex, found) = results
    assert flex == pytest.approx(dense, rel=1e-3)
    for name, gradient in expected.items():
        assert (found[name] - gradient).abs().max() < 1e-2 * gradient.abs().max(), name
