"""The draft's configuration: what comes from the target, what contradicts it, and that speculators reads it."""

from typing import Any

import pytest

from scripts import draft_config
from scripts.draft_config import attention_shape, rope_parameters, speculator_config, unread_norms
from scripts.eagle3.checks import check
from scripts.eagle3.config import Draft, Target, Vocabulary
from scripts.eagle3.draft import provenance_of, read_draft_config
from scripts.eagle3.errors import StageError
from scripts.eagle3.target import fingerprint
from scripts.preflight import check_served_norms
from tests.preflight_case import assert_red

MLA = {
    "hidden_size": 7168,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "kv_lora_rank": 512,
    "v_head_dim": 128,
}
YARN = {"factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0, "beta_slow": 1.0}


def written(tmp_path, target: Target, **draft: Any):
    path = tmp_path / "config.json"
    draft_config.run(target, Draft(**draft), Vocabulary(draft_vocab_size=100), 4, path)
    return path


def test_speculators_reads_what_was_written(tmp_path, tiny_llama):
    config = read_draft_config(written(tmp_path, tiny_llama, norm_before_fc=True, num_hidden_layers=2))
    layer = config.transformer_layer_config
    assert (config.draft_vocab_size, config.target_vocab_size) == (100, layer.vocab_size)
    assert config.eagle_aux_hidden_state_layer_ids == tiny_llama.aux_layer_ids
    assert (config.norm_before_residual, config.norm_before_fc, config.norm_output) == (True, True, False)
    assert config.speculators_config.proposal_methods[0].speculative_tokens == 4
    assert config.speculators_config.verifier.name_or_path == tiny_llama.path
    assert config.speculators_config.verifier.architectures == ["LlamaForCausalLM"]
    assert (layer.num_hidden_layers, layer.hidden_size, layer.head_dim) == (2, 256, 64)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.intermediate_size) == (4, 2, 512)
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1e-5, 2048)
    assert layer.rope_parameters["rope_theta"] == 10000.0
    assert not layer.tie_word_embeddings


def ignore_norm_output(monkeypatch):
    """vLLM reads a head as 0.22 does, which passes on the other two flags."""
    from vllm.transformers_utils.configs.speculators.algos import SUPPORTED_SPECULATORS_TYPES

    current = SUPPORTED_SPECULATORS_TYPES["eagle3"]

    def older(head, served):
        current(head, served)
        served.pop("norm_output")

    monkeypatch.setitem(SUPPORTED_SPECULATORS_TYPES, "eagle3", older)


def test_norms_that_the_installed_vllm_reads_are_taken(tmp_path, tiny_llama):
    assert unread_norms() == []
    assert read_draft_config(written(tmp_path, tiny_llama, norm_output=True)).norm_output


def test_norm_that_the_installed_vllm_would_ignore_is_refused(tmp_path, tiny_llama, monkeypatch):
    ignore_norm_output(monkeypatch)
    assert unread_norms() == ["norm_output"]
    words = r"draft.norm_output is true: vLLM \S+ does not read it .* as if it were false; set the key to false"
    with pytest.raises(StageError, match=words):
        written(tmp_path, tiny_llama, norm_output=True)
    assert not (tmp_path / "config.json").exists()
    assert_red(check("draft", "norms", lambda: check_served_norms(Draft(norm_output=True))), "draft.norm_output", "set the key")
    assert not read_draft_config(written(tmp_path, tiny_llama, norm_before_fc=True)).norm_output


def test_provenance_names_the_target(tmp_path, tiny_llama):
    assert provenance_of(written(tmp_path, tiny_llama)) == {"target": fingerprint(tiny_llama)}


def test_wrapped_latent_attention_target_gives_a_grouped_llama(tmp_path, tiny_kimi):
    layer = read_draft_config(written(tmp_path, tiny_kimi)).transformer_layer_config
    # four heads do not make groups of eight
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 4, 64)
    assert layer.rope_parameters["rope_type"] == "yarn"


def test_latent_attention_at_real_width_gets_eight_queries_for_one_key():
    assert attention_shape(MLA, Draft()) == (64, 8, 128)


def test_draft_section_wins_over_the_target():
    assert attention_shape(MLA, Draft(num_attention_heads=56, num_key_value_heads=7, head_dim=64)) == (56, 7, 64)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        ({"num_attention_heads": 4, "num_key_value_heads": 3}, "4 query heads cannot share 3"),
        ({"head_dim": 33}, "head_dim is 33: expected an even number"),
    ],
)
def test_contradictions_are_one_line_errors(tmp_path, tiny_llama, draft, message):
    with pytest.raises(StageError, match=message) as error:
        written(tmp_path, tiny_llama, **draft)
    assert "\n" not in str(error.value)


def test_draft_vocabulary_larger_than_the_targets_is_refused(tmp_path, tiny_llama):
    with pytest.raises(StageError, match="draft_vocab_size is 99999: expected at most"):
        draft_config.run(tiny_llama, Draft(), Vocabulary(draft_vocab_size=99999), 3, tmp_path / "config.json")
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ({"rope_theta": 5e4}, {"rope_type": "default", "rope_theta": 5e4}),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {"rope_type": "default", "rope_theta": 7.0}),
        (
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "mscale": 1.0, "mscale_all_dim": 1.0, **YARN}},
            {"rope_type": "yarn", "rope_theta": 5e4, **YARN},
        ),
        # a draft has neither a long-rope table for another head width nor multimodal positions
        (
            {"rope_theta": 8.0, "rope_scaling": {"type": "longrope", "long_factor": [1]}},
            {"rope_type": "default", "rope_theta": 8.0},
        ),
        (
            {"rope_theta": 8.0, "rope_scaling": {"type": "default", "mrope_section": [1]}},
            {"rope_type": "default", "rope_theta": 8.0},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {},
                }
            },
            {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        ),
    ],
)
def test_rotary_parameters_keep_what_every_version_computes_alike(text, expected):
    assert rope_parameters(text) == expected


def test_other_than_three_auxiliary_states_are_announced_to_vllm(tiny_llama):
    four = tiny_llama.model_copy(update={"aux_layer_ids": [1, 3, 5, 7]})
    assert speculator_config(four, Draft(), 100, 3)["transformer_layer_config"]["num_aux_hidden_states"] == 4
    assert "num_aux_hidden_states" not in speculator_config(tiny_llama, Draft(), 100, 3)["transformer_layer_config"]
