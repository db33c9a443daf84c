"""Third-party EAGLE-3 heads: what is read from them, which states they mean, the way to our format and back, refusals."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import convert_head, evaluate_method
from scripts.eagle3.config import Method
from scripts.eagle3.draft import draft_inputs, forward, single_row_batch
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.errors import StageError
from scripts.eagle3.export import load_export, write_manifest
from scripts.eagle3.files import read_json, write_json, write_text
from scripts.eagle3.third_party import canonical_ids, check_fits, read_foreign_head, served_folder
from scripts.preflight import head_lines
from tests.draft_case import TTT_STEPS, random_row
from tests.foreign_case import IDS, foreign_config, foreign_head, foreign_tensors, latent_head, write_foreign
from tests.preflight_case import assert_red, config_for, line

INDICES = [1, 3, 4]  # of the tiny targets' states 2, 4, 5


def method(folder, **changes):
    return Method(kind="eagle3", model=str(folder), **changes)


def same_bytes(left, right):
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert tensor.dtype == right[name].dtype, name
        assert torch.equal(tensor.flatten().view(torch.uint8), right[name].flatten().view(torch.uint8)), name


# -- conversion -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [INDICES, [2, 4, 5], None])
def test_import_and_back_gives_the_same_config_and_tensors(tmp_path, tiny_llama, ids):
    source = foreign_head(tmp_path / "theirs", tiny_llama, ids)
    convert_head.run(tiny_llama, source, tmp_path / "ours")
    convert_head.run(tiny_llama, tmp_path / "ours", tmp_path / "back")
    assert read_json(tmp_path / "back/config.json") == read_json(source / "config.json")
    same_bytes(load_file(tmp_path / "back" / WEIGHTS), load_file(source / WEIGHTS))


def test_imported_head_is_as_that_family_computes_it(tmp_path, tiny_llama):
    yarn = {"type": "yarn", "factor": 8.0, "original_max_position_embeddings": 256, "mscale": 1.0, "mscale_all_dim": 1.0}
    source = foreign_head(tmp_path / "theirs", tiny_llama, INDICES, rope_scaling=yarn, rope_theta=5e4, rms_norm_eps=1e-6)
    convert_head.run(tiny_llama, source, tmp_path / "ours")
    config = read_json(tmp_path / "ours/config.json")
    assert config[IDS] == [2, 4, 5]
    assert not any(config[flag] for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"))
    layer = config["transformer_layer_config"]
    assert layer["rope_parameters"] == {
        **{key: value for key, value in yarn.items() if key != "type"},
        "rope_type": "yarn",
        "rope_theta": 5e4,
    }
    assert (layer["rms_norm_eps"], layer["num_key_value_heads"], config["draft_vocab_size"]) == (1e-6, 2, 512)
    assert set(load_file(tmp_path / "ours" / WEIGHTS)) == {
        name.replace("midlayer", "layers.0") for name in load_file(source / WEIGHTS)
    }


def test_imported_head_with_an_embedding_loads_and_drafts(tmp_path, tiny_llama):
    config = foreign_config(tiny_llama, INDICES)
    embedding = torch.randn(config["vocab_size"], config["hidden_size"])
    source = write_foreign(tmp_path / "theirs", config, {**foreign_tensors(config), "embed_tokens.weight": embedding})
    convert_head.run(tiny_llama, source, tmp_path / "ours")
    for name in ("README.md", "provenance.json"):
        write_text(tmp_path / "ours" / name, "{}")
    write_manifest(tmp_path / "ours")
    draft = load_export(tmp_path / "ours")
    assert draft.layers[0].norm_before_residual is False
    batch = single_row_batch(draft_inputs(random_row(tiny_llama, 20, 5)))
    assert len(forward(draft, batch, TTT_STEPS)[0]) == TTT_STEPS


@pytest.mark.parametrize("change", [{"norm_before_residual": True}, {"norm_before_fc": True}, {"num_hidden_layers": 2}])
def test_head_that_the_other_family_has_no_place_for_is_not_converted(tmp_path, tiny_llama, change):
    convert_head.run(tiny_llama, foreign_head(tmp_path / "theirs", tiny_llama, INDICES), tmp_path / "ours")
    config = read_json(tmp_path / "ours/config.json")
    tensors = load_file(tmp_path / "ours" / WEIGHTS)
    hidden = config["transformer_layer_config"]["hidden_size"]
    if "norm_before_fc" in change:
        tensors["input_norm.weight"] = torch.ones(3 * hidden)
    if "num_hidden_layers" in change:
        config["transformer_layer_config"] |= change
        second = {
            name.replace("layers.0", "layers.1"): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith("layers.0.") and "hidden_norm" not in name
        }
        for name in ("q", "k", "v"):
            key = f"layers.1.self_attn.{name}_proj.weight"
            second[key] = second[key][:, :hidden].contiguous()
        tensors |= second
    save_file(tensors, tmp_path / "ours" / WEIGHTS)
    write_json(tmp_path / "ours/config.json", {**config, **change})
    with pytest.raises(StageError, match="this family has one layer and no such norms"):
        convert_head.run(tiny_llama, tmp_path / "ours", tmp_path / "back")


def test_a_folder_with_something_in_it_is_not_written_to(tmp_path, tiny_llama):
    source = foreign_head(tmp_path / "theirs", tiny_llama, INDICES)
    with pytest.raises(StageError, match="not empty"):
        convert_head.run(tiny_llama, source, source)


# -- which states -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [INDICES, [2, 4, 5], None])
@pytest.mark.parametrize("make", [foreign_head, latent_head])
def test_both_numberings_and_none_mean_the_same_states(tmp_path, tiny_llama, make, ids):
    head = read_foreign_head(make(tmp_path / "head", tiny_llama, ids))
    assert canonical_ids(head, tiny_llama) == [2, 4, 5]


@pytest.mark.parametrize(("layers", "expected"), [([1, 29, 57], [2, 30, 58]), ([2, 30, 58], [2, 30, 58]), (None, [2, 30, 58])])
def test_numberings_of_kimi(tmp_path, tiny_llama, layers, expected):
    head = read_foreign_head(foreign_head(tmp_path / "head", tiny_llama, layers))
    kimi = tiny_llama.model_copy(update={"num_hidden_layers": 61, "aux_layer_ids": [2, 30, 58]})
    # the tiny folder has 8 layers: only its width is asked for
    folder = tmp_path / "kimi"
    folder.mkdir()
    config = read_json(f"{tiny_llama.path}/config.json")
    write_json(folder / "config.json", {**config, "num_hidden_layers": 61})
    assert canonical_ids(head, kimi.model_copy(update={"path": str(folder)})) == expected


def test_numbering_that_cannot_be_told_is_refused_until_the_config_says_it(tmp_path, tiny_llama):
    folder = foreign_head(tmp_path / "head", tiny_llama, [1, 2, 6])
    with pytest.raises(StageError, match=r"states \[1, 2, 6\] or, counted from the layer's index, \[2, 3, 7\]\?") as error:
        evaluate_method.read_third_party(tiny_llama, method(folder))
    assert "aux_layer_ids" in str(error.value) and "\n" not in str(error.value)
    for given in ([2, 3, 7], [1, 2, 6]):
        found = evaluate_method.read_third_party(tiny_llama, method(folder, aux_layer_ids=given))
        assert found is not None and found[1] == given
    with pytest.raises(StageError, match=r"not aux_layer_ids \[1, 3, 5\] in either numbering"):
        evaluate_method.read_third_party(tiny_llama, method(folder, aux_layer_ids=[1, 3, 5]))


def test_numbering_that_can_be_read_both_ways_is_refused(tmp_path, tiny_llama):
    # as ours they are this run's states, as indices the default ones
    head = read_foreign_head(foreign_head(tmp_path / "head", tiny_llama, INDICES))
    other = tiny_llama.model_copy(update={"aux_layer_ids": INDICES})
    with pytest.raises(StageError, match="Both numberings are in use"):
        canonical_ids(head, other)


def test_other_number_of_states_than_fc_reads_is_refused(tmp_path, tiny_llama):
    head = read_foreign_head(foreign_head(tmp_path / "head", tiny_llama, None))
    with pytest.raises(StageError, match=r"fc reads 3 states of 256, .* names 2"):
        canonical_ids(head, tiny_llama, [2, 4])


# -- what is served ---------------------------------------------------------------------------------------------------


def test_head_with_our_numbering_is_served_from_its_own_folder(tmp_path, tiny_llama):
    head = read_foreign_head(foreign_head(tmp_path / "head", tiny_llama, [2, 4, 5]))
    assert served_folder(head, tiny_llama, [2, 4, 5], tmp_path / "place") == tmp_path / "head"
    assert not (tmp_path / "place").exists()


@pytest.mark.parametrize("ids", [INDICES, None])
def test_head_with_the_other_numbering_is_served_from_a_converted_copy(tmp_path, tiny_llama, ids):
    head = read_foreign_head(foreign_head(tmp_path / "head", tiny_llama, ids))
    (tmp_path / "place").mkdir()
    (tmp_path / "place/stale").touch()
    assert served_folder(head, tiny_llama, [2, 4, 5], tmp_path / "place") == tmp_path / "place"
    assert sorted(path.name for path in (tmp_path / "place").iterdir()) == ["config.json", WEIGHTS]
    config = read_json(tmp_path / "place/config.json")
    assert (config["speculators_model_type"], config[IDS]) == ("eagle3", [2, 4, 5])
    assert read_json(tmp_path / "head/config.json") == head.config


@pytest.mark.parametrize("ids", [INDICES, None])
def test_head_with_latent_attention_keeps_its_format_and_gets_our_numbering(tmp_path, tiny_kimi, ids):
    head = read_foreign_head(latent_head(tmp_path / "head", tiny_kimi, ids))
    check_fits(head, tiny_kimi)
    place = served_folder(head, tiny_kimi, [2, 4, 5], tmp_path / "place")
    config = read_json(place / "config.json")
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config[IDS] == config.get("eagle_config", config)[IDS] == [2, 4, 5]
    same_bytes(load_file(place / WEIGHTS), load_file(tmp_path / "head" / WEIGHTS))


def test_head_that_vllm_takes_for_mtp_layers_is_refused(tmp_path, tiny_kimi):
    head = read_foreign_head(latent_head(tmp_path / "head", tiny_kimi, INDICES, model_type="deepseek_v3"))
    with pytest.raises(StageError, match="model_type is deepseek_v3, which vLLM takes for that model's own MTP layers"):
        check_fits(head, tiny_kimi)


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "expected an EAGLE-3 head"),
        ({"architectures": []}, "expected an EAGLE-3 head"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "an EAGLE-1 head"),
        ({"hidden_size": 128}, "hidden_size is 128, the target's is 256"),
        ({"vocab_size": 2048}, "vocab_size is 2048, the target's is 1024"),
        ({"num_key_value_heads": 4}, "k_proj.weight is [128, 512], config.json says [256, 512]"),
        ({"draft_vocab_size": 400}, "lm_head.weight is [512, 256], config.json says [400, 256]"),
        ({"num_hidden_layers": 2}, "tensors missing: ['layers.1."),
        ({"norm_before_fc": True}, "tensors missing: ['input_norm.weight']"),
        ({"intermediate_size": None}, "no intermediate_size"),
    ],
)
def test_head_that_does_not_fit_is_refused_before_an_engine_is_loaded(tmp_path, tiny_llama, changes, words):
    config = foreign_config(tiny_llama, INDICES)
    folder = write_foreign(tmp_path / "head", {**config, **changes}, foreign_tensors(config))
    with pytest.raises(StageError) as error:
        evaluate_method.read_third_party(tiny_llama, method(folder))
    assert words in str(error.value) and str(folder) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no head there"),
        (lambda folder: (folder / WEIGHTS).unlink(), "safetensors files: none"),
        (lambda folder: (folder / WEIGHTS).rename(folder / "a.safetensors"), "safetensors files: a.safetensors"),
        (lambda folder: (folder / WEIGHTS).write_bytes(b"no"), "not a readable safetensors file"),
    ],
)
def test_damaged_head_is_refused(tmp_path, tiny_llama, damage, words):
    folder = foreign_head(tmp_path / "head", tiny_llama, INDICES)
    damage(folder)
    with pytest.raises(StageError, match=words):
        evaluate_method.read_third_party(tiny_llama, method(folder))


def test_head_without_the_map_of_its_smaller_vocabulary_is_refused(tmp_path, tiny_llama):
    config = foreign_config(tiny_llama, INDICES)
    tensors = foreign_tensors(config)
    del tensors["d2t"]
    head = read_foreign_head(write_foreign(tmp_path / "head", config, tensors))
    with pytest.raises(StageError, match="no d2t, though 512 of 1024"):
        check_fits(head, tiny_llama)


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("d2t", lambda d2t: torch.arange(len(d2t)) + d2t, "expected offsets in d2t"),
        ("d2t", lambda d2t: d2t.flip(0), "expected offsets in d2t"),
        ("t2d", lambda t2d: t2d.roll(1), "differs from the true positions of t2d"),
    ],
)
def test_map_that_is_no_map_is_refused(tmp_path, tiny_llama, name, change, words):
    config = foreign_config(tiny_llama, INDICES)
    tensors = foreign_tensors(config)
    tensors[name] = change(tensors[name])
    head = read_foreign_head(write_foreign(tmp_path / "head", config, tensors))
    with pytest.raises(StageError, match=words):
        check_fits(head, tiny_llama)


@pytest.mark.parametrize(("change", "words"), [({"hidden_size": 128}, "hidden_size"), ({"vocab_size": 7}, "vocab_size")])
def test_head_with_latent_attention_of_another_target_is_refused(tmp_path, tiny_kimi, change, words):
    head = read_foreign_head(latent_head(tmp_path / "head", tiny_kimi, None, **change))
    with pytest.raises(StageError, match=f"{words} is"):
        check_fits(head, tiny_kimi)


def test_preflight_has_a_line_for_each_head_that_is_listed(tmp_path, tiny_llama):
    good = foreign_head(tmp_path / "good", tiny_llama, INDICES)
    bad = foreign_head(tmp_path / "bad", tiny_llama, INDICES, vocab_size=2048)
    methods = {
        "baseline": {"kind": "baseline"},
        "eagle3": {"kind": "eagle3"},
        "theirs": {"kind": "eagle3", "model": str(good)},
        "another": {"kind": "eagle3", "model": str(bad)},
    }
    lines = head_lines(tiny_llama, config_for(tiny_llama, evaluation={"methods": methods}))
    assert line(lines, "head of theirs").state == "green"
    assert "states [2, 4, 5]" in line(lines, "head of theirs").found
    assert_red(line(lines, "head of another"), "vocab_size is 2048")
    assert len(lines) == 2
