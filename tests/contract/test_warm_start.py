"""Training that starts from a head: what is taken from it, what stays with the checkpoints and the export, refusals."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import evaluate_method, export_draft, select_checkpoint, train_draft
from scripts.eagle3.config import Draft, Evaluation
from scripts.eagle3.draft import build_draft, load_trainable, read_head, target_ids
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.errors import StageError
from scripts.eagle3.export import check_export, load_export
from scripts.eagle3.files import read_json
from scripts.eagle3.initial_head import start_from
from scripts.eagle3.third_party import HEAD, read_foreign_head
from scripts.preflight import head_lines
from tests.draft_case import DRAFT_VOCAB_SIZE, TTT_STEPS, make_draft_files
from tests.foreign_case import foreign_config, foreign_head, foreign_tensors, latent_head, write_foreign
from tests.generation_case import HARDWARE, conversation, write_conversations
from tests.preflight_case import assert_red, config_for, line
from tests.training_case import TrainingCase, training, weights

INDICES = [1, 3, 4]
THEIRS = Draft(norm_before_residual=False)
# so small that what was trained is what it started from
STILL = {"learning_rate": 1e-12}


@pytest.fixture
def case(tmp_path, tiny_llama):
    """A run whose draft has the shape of `foreign_head`."""
    return TrainingCase(tmp_path / "run", tiny_llama, THEIRS)


@pytest.fixture
def other_map(tmp_path, tiny_llama):
    """(folder, target ids) of a head whose vocabulary shares only some tokens with the run's."""
    config = foreign_config(tiny_llama, INDICES)
    ids = torch.arange(300, 300 + DRAFT_VOCAB_SIZE)
    return write_foreign(tmp_path / "theirs", config, foreign_tensors(config, ids=ids)), ids


def export(case: TrainingCase, folder: Path) -> Path:
    selected = folder / "selected.json"
    select_checkpoint.run(case.target, case.files, case.checkpoints, 2, case.hidden / "val", 1, TTT_STEPS, selected)
    export_draft.run(case.target, case.files, case.checkpoints, selected, folder / "export")
    return folder / "export"


def test_rows_of_the_head_follow_their_tokens_and_new_ones_are_the_targets(tmp_path, tiny_llama, other_map):
    files = make_draft_files(tmp_path / "run", tiny_llama, THEIRS)
    folder, known = other_map
    model = build_draft(*files, attention="sdpa")
    told = start_from(model, read_foreign_head(folder))
    theirs, target = load_file(folder / WEIGHTS), read_head(files.head)[HEAD]
    kept = 0
    for row, token in zip(model.lm_head.weight, target_ids(model.d2t).tolist(), strict=True):
        place = (known == token).nonzero().flatten().tolist()
        kept += len(place)
        assert torch.equal(row, theirs[HEAD][place[0]] if place else target[token])
    assert 50 < kept < DRAFT_VOCAB_SIZE - 50
    assert f"{kept} rows of lm_head" in told and f"{DRAFT_VOCAB_SIZE - kept} new" in told and "another map" in told
    assert torch.equal(model.verifier_lm_head.weight, target[model.t2d])
    assert torch.equal(model.fc.weight, theirs["fc.weight"])
    assert torch.equal(model.layers[0].self_attn.k_proj.weight, theirs["midlayer.self_attn.k_proj.weight"])


def test_equal_maps_take_every_row(tmp_path, tiny_llama):
    files = make_draft_files(tmp_path / "run", tiny_llama, THEIRS)
    folder = foreign_head(tmp_path / "theirs", tiny_llama, INDICES)
    model = build_draft(*files, attention="sdpa")
    told = start_from(model, read_foreign_head(folder))
    assert torch.equal(model.lm_head.weight, load_file(folder / WEIGHTS)[HEAD])
    assert "the map is the same" in told and " 0 new" in told


def test_training_starts_from_the_head_and_its_own_rows_reach_the_export(case, other_map, tmp_path, capsys):
    folder, _ = other_map
    settings = training(initial_head=str(folder), **STILL)
    for number in range(2):
        case.train(number, settings)
    assert "new from the target's head" in capsys.readouterr().out
    theirs = load_file(folder / WEIGHTS)
    for number in range(2):
        trained = weights(case.checkpoints, number)
        torch.testing.assert_close(trained["fc.weight"], theirs["fc.weight"], rtol=0, atol=1e-8)
        torch.testing.assert_close(trained["norm.weight"], theirs["norm.weight"], rtol=0, atol=1e-8)
    started = build_draft(*case.files, attention="sdpa")
    start_from(started, read_foreign_head(folder))
    assert torch.equal(trained[HEAD], started.lm_head.weight)
    # the export serves these rows, and its check compares them with the checkpoint, not with the target
    exported = export(case, tmp_path)
    assert torch.equal(load_export(exported).lm_head.weight, started.lm_head.weight)
    assert "head that training started from" in (exported / "README.md").read_text()
    with pytest.raises(StageError, match="check head"):
        check_export(exported, case.target, case.files)
    record = read_json(case.checkpoints / "0.json")["provenance"]["training"]["initial_head"]
    assert len(record) == 64 and str(folder) not in str(read_json(case.checkpoints / "0.json"))


@pytest.mark.slow
def test_the_engine_serves_an_export_with_rows_of_its_own(case, other_map, tmp_path):
    for number in range(2):
        case.train(number, training(initial_head=str(other_map[0])))
    exported = export(case, tmp_path)
    write_conversations(tmp_path / "conversations/suite.parquet", [conversation(f"s{i}", [f"say {i}"]) for i in range(2)])
    found = {}
    for name, baseline in (("baseline", None), ("eagle3", tmp_path / "baseline")):
        places = (exported, baseline, tmp_path / "conversations", ["suite"], tmp_path / "store", tmp_path / name)
        evaluate_method.run(case.target, Evaluation(max_tokens=24, max_num_seqs=2), name, *places, HARDWARE)
        found[name] = read_json(tmp_path / name / "suite.json")
    assert found["eagle3"]["drafts"] > 0 and not found["eagle3"]["differences"]
    outputs = [[entry["output_ids"] for entry in found[name]["requests"]] for name in found]
    assert outputs[0] == outputs[1] and sum(map(len, outputs[0])) > 0


def test_checkpoint_with_rows_of_its_own_and_one_without_follow_each_other(case, other_map, tmp_path):
    case.train(0, training(initial_head=str(other_map[0]), **STILL))
    with_rows = case.checkpoints / "0" / WEIGHTS
    tensors = load_file(with_rows)
    model = build_draft(*case.files, attention="sdpa")
    load_trainable(model, with_rows)
    assert torch.equal(model.lm_head.weight, tensors.pop(HEAD))
    save_file(tensors, tmp_path / "without.safetensors")
    load_trainable(model, tmp_path / "without.safetensors")
    assert torch.equal(model.lm_head.weight, model.verifier_lm_head.weight)


def test_export_of_ours_is_a_start_with_the_targets_rows(case, tmp_path):
    for number in range(2):
        case.train(number)
    exported = export(case, tmp_path)
    again = TrainingCase(tmp_path / "again", case.target, THEIRS)
    again.train(0, training(initial_head=str(exported), **STILL))
    trained = weights(again.checkpoints, 0)
    assert HEAD not in trained
    torch.testing.assert_close(trained["fc.weight"], load_file(exported / WEIGHTS)["fc.weight"], rtol=0, atol=1e-8)


def test_resumed_training_refuses_another_initial_head(case, tmp_path, tiny_llama, other_map):
    case.train(0, training(initial_head=str(other_map[0]), **STILL))
    another = foreign_head(tmp_path / "another", tiny_llama, INDICES)
    with pytest.raises(StageError, match=r"training\.initial_head is"):
        case.train(1, training(initial_head=str(another), **STILL))


CONTRADICTIONS = {
    "width of the MLP": ({"intermediate_size": 256}, {}, "intermediate_size is 256, the draft's is 512; set draft.inter"),
    "heads": ({"num_key_value_heads": 4}, {}, "num_key_value_heads is 4, the draft's is 2; set draft.num_key_value_heads"),
    "norm flag": ({}, {"norm_before_residual": True}, "norm_before_residual is False, the draft's is True; set draft.norm"),
    "layers": ({}, {"num_hidden_layers": 2}, "num_hidden_layers is 1, the draft's is 2"),
    "another target": ({"vocab_size": 2048}, {}, "vocab_size is 2048, the target's is 1024"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_contradiction_is_one_line_before_a_model_is_built(tmp_path, tiny_llama, name, monkeypatch):
    theirs, ours, words = CONTRADICTIONS[name]
    folder = foreign_head(tmp_path / "theirs", tiny_llama, INDICES, **theirs)
    draft = Draft(**{"norm_before_residual": False, **ours})
    case = TrainingCase(tmp_path / "run", tiny_llama, draft)
    case.files.head.unlink()  # building a model would need it
    with pytest.raises(StageError) as error:
        case.train(0, training(initial_head=str(folder)))
    assert words in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    draft_section = draft.model_dump()
    config = config_for(tiny_llama, draft=draft_section, training={"initial_head": str(folder)})
    assert_red(line(head_lines(tiny_llama, config), "initial head"), words.partition(";")[0])


def test_head_of_other_states_is_refused(tmp_path, tiny_llama, case):
    folder = foreign_head(tmp_path / "theirs", tiny_llama, INDICES)
    other = tiny_llama.model_copy(update={"aux_layer_ids": [1, 4, 6]})
    with pytest.raises(StageError, match=r"trained on states \[2, 4, 5\], this run's draft reads \[1, 4, 6\]"):
        train_draft.read_initial_head(other, training(initial_head=str(folder)), case.files)


def test_head_with_latent_attention_is_no_start(tmp_path, tiny_llama, case):
    folder = latent_head(tmp_path / "theirs", tiny_llama, INDICES)
    with pytest.raises(StageError, match="latent attention"):
        case.train(0, training(initial_head=str(folder)))


def test_what_training_has_to_adapt_is_said(tmp_path, tiny_llama, case, capsys):
    folder = foreign_head(tmp_path / "theirs", tiny_llama, INDICES, rope_theta=1e6, rms_norm_eps=1e-6)
    assert train_draft.read_initial_head(tiny_llama, training(initial_head=str(folder)), case.files) is not None
    told = capsys.readouterr().out
    assert "rms_norm_eps 1e-06 -> 1e-05" in told and "1000000.0" in told
