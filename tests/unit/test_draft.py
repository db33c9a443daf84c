"""The draft model: the target's frozen tensors, the alignment of a row, its loss mask, its weights as a file."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import extract_target_head
from scripts.eagle3.draft import (
    build_draft,
    draft_inputs,
    forward,
    load_trainable,
    read_head,
    save_trainable,
    single_row_batch,
    target_ids,
    trainable_state,
)
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.shards import StateRow
from tests.draft_case import TTT_STEPS, make_draft_files, random_row


@pytest.fixture(scope="module")
def files(tmp_path_factory, tiny_llama):
    return make_draft_files(tmp_path_factory.mktemp("draft"), tiny_llama)


@pytest.fixture(scope="module")
def draft(files):
    return build_draft(*files)


@pytest.fixture
def target_copy(tmp_path, tiny_llama):
    """A target of its own, to be spoiled."""
    shutil.copytree(tiny_llama.path, tmp_path / "target")
    return tiny_llama.model_copy(update={"path": str(tmp_path / "target")})


def edit_config(target, **changes):
    path = f"{target.path}/config.json"
    write_json(path, {**read_json(path), **changes})


def test_frozen_tensors_are_the_targets_and_the_rest_is_trained(files, draft):
    head = read_head(files.head)
    assert torch.equal(draft.embed_tokens.weight, head["embed_tokens.weight"])
    assert torch.equal(draft.verifier_norm.weight, head["norm.weight"])
    own_rows = head["lm_head.weight"][target_ids(draft.d2t)]
    assert torch.equal(draft.lm_head.weight, own_rows) and torch.equal(draft.verifier_lm_head.weight, own_rows)
    trained = {name for name, parameter in draft.named_parameters() if parameter.requires_grad}
    assert trained == set(trainable_state(draft))
    assert {name.split(".")[0] for name in trained} == {"fc", "layers", "norm"}


def test_initial_weights_come_from_the_seed(files, draft):
    torch.manual_seed(123)
    again, other = build_draft(*files), build_draft(*files, seed=1)
    assert torch.equal(again.fc.weight, draft.fc.weight) and not torch.equal(other.fc.weight, draft.fc.weight)


def test_head_of_another_target_is_refused(tmp_path, files, target_copy):
    edit_config(target_copy, rope_theta=20000.0)
    extract_target_head.run(target_copy, tmp_path / "head.safetensors")
    with pytest.raises(StageError, match=r"head.safetensors: target.config is \w+"):
        build_draft(files.config, tmp_path / "head.safetensors", files.d2t, files.t2d)


def test_vocabulary_of_another_target_is_refused(tmp_path, files):
    shutil.copytree(files.d2t.parent, tmp_path / "vocab")
    coverage = read_json(files.d2t.parent / "coverage.json")
    coverage["provenance"]["target"]["tokenizer"] = "another"
    write_json(tmp_path / "vocab/coverage.json", coverage)
    with pytest.raises(StageError, match=r"coverage.json: target.tokenizer is another"):
        build_draft(files.config, files.head, tmp_path / "vocab/d2t.npy", tmp_path / "vocab/t2d.npy")


def test_exchanged_vocabulary_map_is_refused(tmp_path, files):
    import numpy as np

    shutil.copytree(files.d2t.parent, tmp_path / "vocab")
    np.save(tmp_path / "vocab/d2t.npy", np.load(files.d2t) + 1)
    with pytest.raises(StageError, match=r"d2t.npy: sha256: expected"):
        build_draft(files.config, files.head, tmp_path / "vocab/d2t.npy", tmp_path / "vocab/t2d.npy")


def test_row_is_aligned_as_speculators_aligns_it(tiny_llama):
    from speculators.models.eagle3.data import shift_batch

    row = random_row(tiny_llama, 12, 5)
    theirs = shift_batch(
        {
            "input_ids": row.token_ids.long(),
            "hidden_states": row.hidden_states[:, :-1].flatten(1),
            "verifier_last_hidden_states": row.hidden_states[:, -1],
            "loss_mask": row.loss_mask,
            "lengths": torch.tensor([12]),
            "position_ids": torch.arange(12),
        }
    )
    ours = draft_inputs(row)
    for name in ("input_ids", "hidden_states", "verifier_last_hidden_states", "position_ids"):
        assert torch.equal(ours[name], theirs[name]), name


def test_loss_is_taken_only_between_two_tokens_of_one_answer(tiny_llama):
    row = random_row(tiny_llama, 10, 10)
    mask = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 1, 1], dtype=torch.bool)
    found = draft_inputs(StateRow(row.key, row.token_ids, mask, row.hidden_states))["loss_mask"]
    # position t sees x[t+1] and predicts x[t+2]: the first answer's 4 and 5, then the second one's 9
    assert found.nonzero().flatten().tolist() == [2, 3, 7]


def test_row_of_one_token_is_refused(tiny_llama):
    with pytest.raises(StageError, match=r"a draft needs at least 2"):
        draft_inputs(random_row(tiny_llama, 1, 0))


def test_padding_changes_neither_tokens_nor_loss(tiny_llama, draft):
    inputs = draft_inputs(random_row(tiny_llama, 30, 10))
    bare_tokens, bare_loss, metrics = forward(draft, single_row_batch(inputs, 1), TTT_STEPS, loss="kl_div")
    tokens, loss, _ = forward(draft, single_row_batch(inputs), TTT_STEPS, loss="kl_div")
    assert tokens[0].shape == (1, 128)
    for bare, padded in zip(bare_tokens, tokens, strict=True):
        assert torch.equal(bare[0], padded[0, :29])
    torch.testing.assert_close(bare_loss, loss)
    assert metrics["full_acc_0_total"] == 19


def test_forward_without_a_loss_drafts_the_same_tokens(tiny_llama, draft):
    batch = single_row_batch(draft_inputs(random_row(tiny_llama, 30, 10)))
    with_loss, _, _ = forward(draft, batch, TTT_STEPS, loss="ce")
    without, loss, metrics = forward(draft, batch, TTT_STEPS)
    assert loss is None and not metrics
    assert all(torch.equal(left, right) for left, right in zip(with_loss, without, strict=True))


def test_trained_weights_survive_the_file(tmp_path, files, draft):
    path = tmp_path / "model.safetensors"
    other = build_draft(*files, seed=5)
    save_trainable(trainable_state(other), path)
    loaded = build_draft(*files)
    load_trainable(loaded, path)
    assert set(load_file(path)) == set(trainable_state(draft))
    for name, tensor in trainable_state(other).items():
        assert torch.equal(trainable_state(loaded)[name], tensor), name


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda state: state.pop("fc.weight"), "tensors: expected"),
        (lambda state: state.update({"fc.weight": state["fc.weight"][:, 1:].contiguous()}), "tensors: expected"),
        (lambda state: state["fc.weight"].fill_(torch.nan), "fc.weight holds values that are not finite"),
    ],
)
def test_weights_that_do_not_fit_are_refused(tmp_path, files, spoil, message):
    model = build_draft(*files)
    state = {name: tensor.clone() for name, tensor in trainable_state(model).items()}
    spoil(state)
    save_file(state, tmp_path / "model.safetensors")
    with pytest.raises(StageError, match=message):
        load_trainable(model, tmp_path / "model.safetensors")


def test_head_comes_from_the_sharded_files_of_a_wrapped_target(tmp_path, tiny_kimi):
    extract_target_head.run(tiny_kimi, tmp_path / "head.safetensors")
    own = load_file(f"{tiny_kimi.path}/model.safetensors")
    found = read_head(tmp_path / "head.safetensors")
    assert torch.equal(found["lm_head.weight"], own["language_model.lm_head.weight"])
    assert torch.equal(found["norm.weight"], own["language_model.model.norm.weight"])
    assert torch.equal(found["embed_tokens.weight"], own["language_model.model.embed_tokens.weight"])


def drop_head(target):
    """Removes lm_head.weight from the target's weights."""
    path = f"{target.path}/model.safetensors"
    tensors = load_file(path)
    del tensors["lm_head.weight"]
    save_file(tensors, path)


def test_tied_head_is_the_embedding(tmp_path, target_copy):
    drop_head(target_copy)
    edit_config(target_copy, tie_word_embeddings=True)
    extract_target_head.run(target_copy, tmp_path / "head.safetensors")
    found = read_head(tmp_path / "head.safetensors")
    assert torch.equal(found["lm_head.weight"], found["embed_tokens.weight"])


def test_missing_head_of_an_untied_target_is_refused(tmp_path, target_copy):
    drop_head(target_copy)
    with pytest.raises(StageError, match=r"no tensor lm_head.weight"):
        extract_target_head.run(target_copy, tmp_path / "head.safetensors")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma3_text"}, "model_type gemma3_text has a final norm that multiplies by 1 [+] weight"),
        ({"model_type": "qwen3_next"}, "model_type qwen3_next has a final norm"),
        ({"logit_scale": 0.0625}, "logit_scale is 0.0625, which changes the logits"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        ({"vocab_size": 77}, r"embed_tokens.weight: expected \[77, 256\]"),
    ],
)
def test_target_without_a_plain_head_is_refused_by_name(tmp_path, target_copy, changes, message):
    edit_config(target_copy, **changes)
    with pytest.raises(StageError, match=message):
        extract_target_head.run(target_copy, tmp_path / "head.safetensors")
    assert not (tmp_path / "head.safetensors").exists()


def test_head_carries_its_provenance_and_epsilon(files):
    from scripts.eagle3.draft import head_metadata

    metadata = head_metadata(files.head)
    assert float(metadata["rms_norm_eps"]) == 1e-5
    assert json.loads(metadata["provenance"])["target"]["dtype"] == "float32"
