"""Selection and export: the best walk wins, the folder is complete, and planted faults are stopped by a named check."""

import ast
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import evaluate_method, export_draft, select_checkpoint, simulate_acceptance
from scripts.eagle3.config import Draft, Evaluation, Target
from scripts.eagle3.draft import build_draft, draft_inputs, forward, load_trainable, single_row_batch
from scripts.eagle3.draft_files import WEIGHTS, read_records, require_weights
from scripts.eagle3.engine import Hardware
from scripts.eagle3.errors import StageError
from scripts.eagle3.export import MANIFEST, WRITTEN, check_export, load_export
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.shards import StateRow, write_shard
from scripts.eagle3.target import fingerprint
from scripts.eagle3.walk import drafted_tokens
from tests.draft_case import TTT_STEPS, DraftCase, add_checkpoint, make_draft_case, random_row
from tests.generation_case import conversation, write_conversations


def write_validation_rows(folder: Path, target: Target, rows: list[StateRow]) -> None:
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    for index, row in enumerate(rows):
        write_shard(folder / f"shard-{index}.pt", [row], layer_ids, {"target": fingerprint(target)})


def rows_that_please(case: DraftCase, segment: int) -> list[StateRow]:
    """Two rows whose answers are what the checkpoint of `segment` drafts at step 0."""
    draft = build_draft(*case.files)
    load_trainable(draft, require_weights(case.checkpoints, read_json(case.checkpoints / f"{segment}.json")))
    rows = []
    for seed in range(2):
        row = random_row(case.target, 24, 12, seed)
        ids = row.token_ids.clone()
        for position in range(10, 22):
            ids[position + 2] = drafted_tokens(draft, StateRow(row.key, ids, row.loss_mask, row.hidden_states), 1)[0, position]
        from scripts.eagle3.rows import row_key

        rows.append(StateRow(row_key(ids.numpy()), ids, row.loss_mask, row.hidden_states))
    return rows


def select(case: DraftCase, folder: Path, segments: int) -> dict:
    output = folder / "selected.json"
    select_checkpoint.run(case.target, case.files, case.checkpoints, segments, folder / "val", 2, TTT_STEPS, output)
    return read_json(output)


@pytest.fixture
def trained(tmp_path, tiny_llama):
    """Three segments: random weights, others that the validation rows follow, and a repetition of the first."""
    case = make_draft_case(tmp_path / "run", tiny_llama)
    add_checkpoint(case, 1, seed=2)
    add_checkpoint(case, 2, seed=0, folder="0")
    write_validation_rows(tmp_path / "val", tiny_llama, rows_that_please(case, 1))
    return case


def test_longest_acceptance_wins_and_repeated_records_are_walked_once(tmp_path, trained):
    selected = select(trained, tmp_path, 3)
    assert selected["selected"]["segment"] == 1
    assert [candidate["segment"] for candidate in selected["candidates"]] == [0, 1]
    first, second = (candidate["simulated"] for candidate in selected["candidates"])
    assert first["acceptance_length"] < 1.2 < 2 <= second["acceptance_length"]
    assert second["acceptance_by_position"][0] == 1.0
    assert first["rows"] == second["rows"] == 2


def test_pruned_checkpoints_are_listed_without_figures(tmp_path, trained):
    (trained.checkpoints / "1" / WEIGHTS).unlink()
    selected = select(trained, tmp_path, 3)
    assert selected["selected"]["segment"] == 0
    assert "simulated" not in selected["candidates"][1]


def test_changed_weights_are_refused(tmp_path, trained):
    with open(trained.checkpoints / "0" / WEIGHTS, "r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(StageError, match=r"0/model.safetensors: sha256: expected"):
        select(trained, tmp_path, 3)


def test_checkpoint_of_another_draft_is_refused(tmp_path, trained):
    edit_config(trained.files.config.parent, norm_output=True)
    with pytest.raises(StageError, match=r"0.json: draft_config is"):
        select(trained, tmp_path, 3)


def test_moved_target_changes_nothing_but_the_exported_path(tmp_path, exported):
    case, folder = exported
    moved = tmp_path / "elsewhere"
    moved.symlink_to(case.target.path)
    target = case.target.model_copy(update={"path": str(moved)})
    export_draft.run(target, case.files, case.checkpoints, folder.parent / "selected.json", tmp_path / "export")
    config = read_json(tmp_path / "export/config.json")
    assert config["speculators_config"]["verifier"]["name_or_path"] == str(moved)


def test_states_of_other_layers_are_refused(tmp_path, trained):
    other = trained.target.model_copy(update={"aux_layer_ids": [1, 4, 5]})
    with pytest.raises(StageError, match=r"shard-0.pt: layer_ids: expected \[1, 4, 5, 8\], found \[2, 4, 5, 8\]"):
        select(DraftCase(other, trained.files, trained.checkpoints), tmp_path, 1)


def test_records_in_a_row_are_read_once_per_weights(trained):
    assert [record["segment"] for record in read_records(trained.checkpoints, 3)] == [0, 1]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_llama):
    """(case, folder) of a finished export."""
    return make_export(tmp_path_factory.mktemp("export"), tiny_llama)


def make_export(folder: Path, target: Target, draft: Draft | None = None) -> tuple[DraftCase, Path]:
    case = make_draft_case(folder / "run", target, draft)
    write_validation_rows(folder / "val", target, [random_row(target, 24, 12, seed) for seed in range(2)])
    select(case, folder, 1)
    (folder / "export").mkdir()
    (folder / "export/left-over.bin").touch()
    export_draft.run(target, case.files, case.checkpoints, folder / "selected.json", folder / "export")
    return case, folder / "export"


def test_export_has_its_five_files_and_nothing_else(exported):
    _, folder = exported
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "manifest.json",
        "model.safetensors",
        "provenance.json",
    }
    assert set(read_json(folder / "manifest.json")["files"]) == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert (folder / WEIGHTS).stat().st_mode & 0o044  # a server may run as another user


def test_float32_target_keeps_float32_and_bfloat16_gives_bfloat16(tmp_path, exported, tiny_kimi):
    _, kimi = make_export(tmp_path, tiny_kimi, Draft(norm_before_fc=True))
    for folder, dtype in ((exported[1], torch.float32), (kimi, torch.bfloat16)):
        tensors = load_file(folder / WEIGHTS)
        assert tensors["fc.weight"].dtype == tensors["embed_tokens.weight"].dtype == dtype
    assert "input_norm.weight" in load_file(kimi / WEIGHTS)


def test_loaded_export_drafts_as_the_trained_model(exported):
    case, folder = exported
    trained = build_draft(*case.files)
    load_trainable(trained, require_weights(case.checkpoints, read_json(case.checkpoints / "0.json")))
    batch = single_row_batch(draft_inputs(random_row(case.target, 40, 10)))
    ours, theirs = forward(trained, batch, TTT_STEPS)[0], forward(load_export(folder), batch, TTT_STEPS)[0]
    assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))


def test_model_card_names_target_layers_and_figures(exported):
    case, folder = exported
    card = (folder / "README.md").read_text()
    figures = read_json(folder.parent / "selected.json")["selected"]["simulated"]
    for expected in (
        f"`{case.target.path}` (LlamaForCausalLM)",
        "| [2, 4, 5] |",
        "| [1, 3, 4] |",
        f"| {figures['acceptance_length']:.3f} |",
        '"num_speculative_tokens": 3',
        "| learning_rate | 0.001 |",
        "license",
    ):
        assert expected in card, expected


def test_full_vocabulary_is_exported_without_a_map(tmp_path, tiny_llama):
    from scripts import draft_config
    from scripts.eagle3.config import Vocabulary
    from scripts.eagle3.target import text_config
    from tests.draft_case import write_record, write_vocabulary

    size = text_config(tiny_llama)["vocab_size"]
    case = make_draft_case(tmp_path / "run", tiny_llama)
    draft_config.run(tiny_llama, Draft(), Vocabulary(draft_vocab_size=size), TTT_STEPS, case.files.config)
    write_vocabulary(case.files.d2t.parent, tiny_llama, torch.arange(size))
    write_record(case, 0, "0")
    write_validation_rows(tmp_path / "val", tiny_llama, [random_row(tiny_llama, 24, 12, seed) for seed in range(2)])
    select(case, tmp_path, 1)
    export_draft.run(tiny_llama, case.files, case.checkpoints, tmp_path / "selected.json", tmp_path / "export")
    assert not {"d2t", "t2d"} & set(load_file(tmp_path / "export" / WEIGHTS))
    assert load_export(tmp_path / "export").d2t is None


def edit_tensors(folder: Path, edit) -> None:
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)


def edit_config(folder: Path, **changes) -> None:
    write_json(folder / "config.json", {**read_json(folder / "config.json"), **changes})


def replace(name: str, change):
    return lambda folder: edit_tensors(folder, lambda tensors: tensors.update({name: change(tensors[name])}))


FAULTS = {
    "d2t holds target ids": ("vocabulary", replace("d2t", lambda d2t: torch.arange(len(d2t)) + d2t)),
    "d2t falls": ("vocabulary", replace("d2t", lambda d2t: d2t.flip(0))),
    "d2t of another map": ("vocabulary", replace("d2t", lambda d2t: d2t + (torch.arange(len(d2t)) > 500))),
    "t2d of another map": ("vocabulary", replace("t2d", lambda t2d: t2d.roll(1))),
    "embedding of another target": ("embedding", replace("embed_tokens.weight", lambda weight: weight.roll(1, 0))),
    "head of another target": ("head", replace("lm_head.weight", lambda weight: weight.roll(1, 0))),
    "head of all rows but the draft's": ("tensors", replace("lm_head.weight", lambda weight: weight[1:])),
    "NaN": ("finite", replace("fc.weight", lambda weight: weight.index_fill(0, torch.tensor([3]), torch.nan))),
    "bfloat16 of a float32 target": ("tensors", replace("fc.weight", lambda weight: weight.bfloat16())),
    "missing tensor": (
        "tensors",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.pop("layers.0.hidden_norm.weight")),
    ),
    "unexpected tensor": (
        "tensors",
        lambda folder: edit_tensors(folder, lambda tensors: tensors.update(extra=torch.ones(1))),
    ),
    "norm_before_residual flipped": ("norms", lambda folder: edit_config(folder, norm_before_residual=False)),
    "norm_output flipped": ("norms", lambda folder: edit_config(folder, norm_output=True)),
    "layers shifted": ("layers", lambda folder: edit_config(folder, eagle_aux_hidden_state_layer_ids=[1, 3, 4])),
    "layers swapped": ("layers", lambda folder: edit_config(folder, eagle_aux_hidden_state_layer_ids=[4, 2, 5])),
    "another vocabulary size": ("config", lambda folder: edit_config(folder, draft_vocab_size=511)),
    "another origin": (
        "origin",
        lambda folder: edit_config(folder, eagle3_flow={"provenance": {"target": {}, "a": 1}}),
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_stopped_by_its_check(tmp_path, exported, fault):
    import shutil

    case, folder = exported
    shutil.copytree(folder, tmp_path / "export")
    check_export(tmp_path / "export", case.target, case.files)
    check, plant = FAULTS[fault]
    plant(tmp_path / "export")
    with pytest.raises(StageError, match=f"check {check}: "):
        check_export(tmp_path / "export", case.target, case.files)
    with pytest.raises(StageError, match=r"sha256 differs from manifest.json"):
        load_export(tmp_path / "export")


def test_layers_are_compared_with_the_target_section_too(exported):
    case, folder = exported
    other = case.target.model_copy(update={"aux_layer_ids": [1, 3, 4]})
    with pytest.raises(StageError, match=r"check layers: .* is \[2, 4, 5\], expected \[1, 3, 4\]"):
        check_export(folder, other, case.files)


def test_head_of_other_states_or_another_target_is_not_measured(tmp_path, exported, tiny_kimi):
    case, folder = exported
    evaluation, hardware, baseline = Evaluation(), Hardware(), tmp_path / "baseline"
    write_conversations(tmp_path / "suite.parquet", [conversation("a", ["say it"])])
    write_json(tmp_path / "baseline/suite.json", {})
    other = case.target.model_copy(update={"aux_layer_ids": [1, 3, 4]})
    for target, words in (
        (other, r"config.json: eagle_aux_hidden_state_layer_ids: expected \[1, 3, 4\], found \[2, 4, 5\]; .* other states"),
        (tiny_kimi, r"provenance.json: target\.\w+ is "),
    ):
        with pytest.raises(StageError, match=words):
            evaluate_method.run(
                target, evaluation, "eagle3", folder, baseline, tmp_path, ["suite"], tmp_path / "s", tmp_path / "o", hardware
            )
        with pytest.raises(StageError, match=words):
            simulate_acceptance.run(target, evaluation, folder, baseline, ["suite"], tmp_path / "simulated", hardware)


def test_selection_of_another_draft_is_refused(tmp_path, exported):
    case, folder = exported
    selected = read_json(folder.parent / "selected.json")
    selected["provenance"]["vocabulary"] = "another"
    write_json(tmp_path / "selected.json", selected)
    with pytest.raises(StageError, match=r"selected.json: vocabulary is another"):
        export_draft.run(case.target, case.files, case.checkpoints, tmp_path / "selected.json", tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_the_workflow_declares_every_file_of_the_export():
    rules = (Path(__file__).parents[2] / "rules/common.smk").read_text()
    declared = ast.literal_eval(re.search(r"^EXPORT = (.*)$", rules, re.MULTILINE)[1])
    assert sorted(declared) == sorted([MANIFEST, *WRITTEN])
    assert declared[0] == MANIFEST
