"""Presets of the draft: what they give, what wins over them, and that each contradiction is one line."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts.draft_config import compare_with_target, decoder_config
from scripts.eagle3 import presets
from scripts.eagle3.config import Draft, load_config
from scripts.eagle3.errors import StageError
from scripts.preflight import draft_lines
from tests.kimi_config import PRESET_NAMES, YARN, kimi_text
from tests.preflight_case import assert_red, config_for, line

ROOT = Path(__file__).parents[2]
SHAPES = {
    "kimi-k2.5-llama": (1, 64, 64, 128, 18432),
    "kimi-k2.5-llama-4layer": (4, 64, 64, 128, 18432),
    "kimi-k2.5-gqa": (1, 64, 8, 128, 18432),
}


@pytest.fixture
def own_presets(tmp_path, monkeypatch):
    """A folder of presets in place of the repository's, and a function that writes one."""
    monkeypatch.setattr(presets, "PRESETS", tmp_path)

    def write(name: str, values: Any) -> None:
        (tmp_path / f"{name}.json").write_text(json.dumps(values))

    return write


def test_every_preset_of_the_repository_is_tested_here():
    assert sorted(SHAPES) == PRESET_NAMES


@pytest.mark.parametrize("name", SHAPES)
def test_preset_on_kimi_gives_its_shape_and_the_targets_values(name):
    draft = Draft(preset=name)
    compare_with_target(kimi_text(), draft)
    layer = decoder_config(kimi_text(), draft)
    assert tuple(layer[key] for key in presets.SHAPE) == SHAPES[name]
    assert (layer["hidden_size"], layer["vocab_size"], layer["max_position_embeddings"]) == (7168, 163840, 262144)
    assert layer["rms_norm_eps"] == 1e-5
    assert layer["rope_parameters"] == {
        "rope_type": "yarn",
        "rope_theta": 50000.0,
        **{key: YARN[key] for key in ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow")},
    }
    assert (layer["bos_token_id"], layer["eos_token_id"], layer["pad_token_id"]) == (163584, 163585, 163839)


def test_keys_of_the_section_win_over_the_preset():
    draft = Draft(preset="kimi-k2.5-gqa", num_key_value_heads=16, num_hidden_layers=2)
    assert (draft.num_key_value_heads, draft.num_hidden_layers, draft.num_attention_heads) == (16, 2, 64)


def test_resolved_values_travel_to_the_stages_and_an_edited_preset_does_not_change_them(own_presets):
    own_presets("mine", {"num_attention_heads": 8, "hidden_size": 256})
    sent = Draft(preset="mine").model_dump_json()
    own_presets("mine", {"num_attention_heads": 16, "hidden_size": 512, "head_dim": 32})
    received = Draft.model_validate_json(sent)
    assert (received.num_attention_heads, received.head_dim) == (8, None)
    assert received.target_values == {"hidden_size": 256}
    assert Draft(preset="mine").model_dump_json() != sent  # a new parse of the workflow reruns


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hidden_size": 4096}, "hidden_size is 7168, the target's is 4096"),
        ({"vocab_size": 160000}, "vocab_size is 163840, the target's is 160000"),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-05, the target's is 1e-06"),
        ({"max_position_embeddings": 131072}, "max_position_embeddings is 262144, the target's is 131072"),
        ({"rope_theta": 1e6}, "rope_theta is 50000.0, the target's is 1000000.0"),
        ({"rope_scaling": {**YARN, "factor": 32.0}}, "rope factor is 64.0, the target's is 32.0"),
        ({"rope_scaling": None}, "rope beta_fast is 32.0, the target's is None"),
    ],
)
def test_contradiction_to_the_target_names_key_and_both_values(change, words):
    with pytest.raises(StageError) as error:
        compare_with_target(kimi_text(**change), Draft(preset="kimi-k2.5-llama"))
    assert words in str(error.value) and "draft.preset kimi-k2.5-llama" in str(error.value)
    assert "\n" not in str(error.value)


def test_both_forms_of_rotary_parameters_are_the_same_to_the_comparison():
    modern = kimi_text(rope_theta=None, rope_scaling=None, rope_parameters={**YARN, "rope_type": "yarn", "rope_theta": 5e4})
    compare_with_target(modern, Draft(preset="kimi-k2.5-llama"))


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
def test_special_ids_of_a_preset_are_compared(own_presets, key):
    own_presets("mine", {key: 7})
    with pytest.raises(StageError, match=f"{key} is 7, the target's is"):
        compare_with_target(kimi_text(), Draft(preset="mine"))


def test_theta_alone_and_no_scaling_are_compared_as_they_are_written(own_presets):
    own_presets("theta", {"rope_theta": 50000})
    compare_with_target(kimi_text(), Draft(preset="theta"))
    own_presets("unscaled", {"rope_theta": 50000, "rope_scaling": None})
    with pytest.raises(StageError, match=r"the target's is 32\.0"):
        compare_with_target(kimi_text(), Draft(preset="unscaled"))


def section(draft: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": "r",
        "target": {"path": "somewhere", "num_hidden_layers": 8},
        "conversations": {"train": [{"path": "a.jsonl"}], "evaluation": {"suite": {"path": "b.jsonl"}}},
        "draft": draft,
    }


def test_unknown_preset_is_refused_with_the_known_names():
    with pytest.raises(StageError) as error:
        load_config(section({"preset": "kimi-k3"}))
    for words in ("draft.preset is kimi-k3", *PRESET_NAMES):
        assert words in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"num_layers": 1}, "unknown key num_layers"),
        ([1], "expected one JSON object"),
        ({"num_hidden_layers": 9}, "draft.num_hidden_layers"),
    ],
)
def test_wrong_preset_is_refused_when_the_config_is_read(own_presets, values, words):
    own_presets("mine", values)
    with pytest.raises(StageError, match=words) as error:
        load_config(section({"preset": "mine"}))
    assert "\n" not in str(error.value)


def test_unknown_value_to_compare_is_refused():
    with pytest.raises(StageError, match=r"draft\.target_values: unknown key hidden"):
        load_config(section({"target_values": {"hidden": 1}}))


@pytest.mark.parametrize("path", sorted((ROOT / "config").glob("kimi*.yaml")), ids=lambda path: path.stem)
def test_configurations_of_kimi_use_a_preset(path):
    values = yaml.safe_load(path.read_text())
    assert values["draft"] == {"preset": "kimi-k2.5-llama"}
    assert load_config(values).draft.num_attention_heads == 64


def test_preflight_names_the_contradiction(tiny_llama):
    lines = draft_lines(tiny_llama, config_for(tiny_llama, draft={"preset": "kimi-k2.5-llama"}), 1)
    assert_red(line(lines, "architecture"), "hidden_size is 7168, the target's is 256")
