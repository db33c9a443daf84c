"""The configuration: every wrong key or value is one line that names it, and what is documented is what is accepted."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from scripts import make_schema
from scripts.eagle3.config import Target, json_schema, load_config
from scripts.eagle3.errors import StageError
from scripts.eagle3.target import text_config

ROOT = Path(__file__).parents[2]
MINIMAL: dict[str, Any] = {
    "run": "r",
    "target": {"path": "somewhere", "num_hidden_layers": 8},
    "conversations": {"train": [{"path": "a.jsonl"}], "evaluation": {"suite": {"path": "b.jsonl"}}},
}

BOTH = {"baseline": {"kind": "baseline"}, "eagle3": {"kind": "eagle3"}}


def with_value(key: str, value: Any) -> dict[str, Any]:
    values = copy.deepcopy(MINIMAL)
    node = values
    *parents, last = key.split(".")
    for parent in parents:
        node = node.setdefault(parent, {})
    node[last] = value
    return values


def test_minimal_config_gets_the_default_auxiliary_layers():
    assert load_config(MINIMAL).target.aux_layer_ids == [2, 4, 5]


def test_demo_config_is_valid():
    config = load_config(yaml.safe_load((ROOT / "config" / "config.yaml").read_text()))
    assert config.run == "demo"
    assert config.scatter.parts >= 2 and config.scatter.shards_per_part >= 2
    assert config.training.segments >= 3


@pytest.mark.parametrize(
    ("key", "value", "named"),
    [
        ("traning", {}, "traning: unknown key"),
        ("training.learning_rte", 1.0, "training.learning_rte: unknown key"),
        ("training.segments", "many", "training.segments"),
        ("training.learning_rate", -1, "training.learning_rate"),
        ("target.dtype", "float16", "target.dtype"),
        ("training", {"optimizer": "muon", "zero_stage": 3}, "training: optimizer muon with dtype bfloat16 and zero_stage 3"),
        (
            "training",
            {"dtype": "bfloat16", "zero_stage": 0},
            "training: dtype bfloat16 with zero_stage 0: DeepSpeed keeps no float32",
        ),
        ("training", {"muon_learning_rate": 0.01}, "training: muon_learning_rate is for optimizer muon"),
        ("training", {"patience": 2, "rolling": {}}, "training: patience and rolling exclude each other"),
        ("training.learning_rate", float("inf"), "training.learning_rate"),
        ("run", "../elsewhere", "run"),
        ("run", "long" * 30, "run"),
        ("storage.hidden_states", "~/states", "storage.hidden_states"),
        ("target.aux_layer_ids", [4, 2, 5], "ascending"),
        ("target.aux_layer_ids", [2, 2, 5], "distinct"),
        ("target.aux_layer_ids", [2, 4, 8], "1 <= k < 8"),
        ("target.aux_layer_ids", [0, 4, 5], "1 <= k < 8"),
        ("evaluation.methods", {"eagle3": {"kind": "eagle3"}}, "baseline"),
        ("evaluation.methods", {**BOTH, "simulated": {"kind": "ngram"}}, "cannot be named simulated"),
        ("responses", "keep", "responses"),
        ("training", None, "training: expected keys with values (docs/configuration.md), found None"),
        ("run", "my run", "run: expected letters, digits, `.`, `_` and `-`, found 'my run'"),
        ("target.path", "~/models/x", "target.path: expected a whole path"),
    ],
)
def test_wrong_key_or_value_is_one_line_that_names_it(key, value, named):
    with pytest.raises(StageError) as error:
        load_config(with_value(key, value))
    assert named in str(error.value)
    assert "\n" not in str(error.value)


def test_small_target_without_auxiliary_layers_is_refused():
    with pytest.raises(StageError, match="at least 7"):
        load_config(with_value("target.num_hidden_layers", 6))


def test_documented_and_accepted_keys_agree():
    make_schema.run(ROOT, check=True)
    documented = {key for key, *_ in make_schema.documented_keys(json_schema())}
    assert {"training.ttt_steps", "conversations.train[].path", "evaluation.methods.*.kind"} <= documented
    for key in documented:
        if key.count(".") != 1 or any(mark in key for mark in "[]*"):
            continue
        # a documented key is accepted: a nonsense value is refused for its value, not as unknown
        with pytest.raises(StageError) as error:
            load_config(with_value(key, object()))
        assert "unknown key" not in str(error.value), key


def test_a_sister_model_is_told_by_its_architecture(tiny_llama: Target) -> None:
    assert text_config(tiny_llama.model_copy(update={"architecture": "LlamaForCausalLM"}))
    with pytest.raises(StageError, match=r"architectures is \['LlamaForCausalLM'\], expected KimiK25ForConditionalGeneration;"):
        text_config(tiny_llama.model_copy(update={"architecture": "KimiK25ForConditionalGeneration"}))
