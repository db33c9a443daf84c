"""Writes the draft's configuration: a Llama decoder as wide as the target, in the format of speculators.

In: the target's config.json and the sections `draft:` and `vocabulary:`. Out: draft/config.json, which speculators
trains from and vLLM serves from. Our provenance stands in it under a key of its own that both ignore.
"""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Draft, Target, Vocabulary
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.presets import ROPE_VALUES, SAME_VALUES
from scripts.eagle3.provenance import PROVENANCE_KEY
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint, resolve_folder, text_config

# rope types that Llama in transformers and in vLLM 0.22 to 0.32 compute alike, with the parameters that go along
ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    # mscale, mscale_all_dim and attention_factor are left out: versions differ on them, all agree on the default, which is
    # to multiply cos and sin by 0.1 ln(factor) + 1. The draft learns with that factor and is served with it, whatever the
    # target does (Kimi-K2.5: 1 on cos and sin, the factor's square on the scores); tests/contract/test_rotary.py compares
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
DEFAULT_AUX_STATES = 3
NORM_FLAGS = ("norm_before_residual", "norm_before_fc", "norm_output")
MLA_GROUP = 8
SPECIAL_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


def run(target: Target, draft: Draft, vocabulary: Vocabulary, ttt_steps: int, output: Path) -> None:
    """Writes the configuration; raises StageError where the sections contradict the target or each other."""
    text = text_config(target)
    if vocabulary.draft_vocab_size > text["vocab_size"]:
        raise StageError(
            f"vocabulary.draft_vocab_size is {vocabulary.draft_vocab_size}: expected at most {text['vocab_size']}, the "
            "target's vocab_size; lower it"
        )
    check_norms(draft)
    write_json(output, speculator_config(target, draft, vocabulary.draft_vocab_size, ttt_steps))


def speculator_config(target: Target, draft: Draft, draft_vocab_size: int, ttt_steps: int) -> dict[str, Any]:
    """`Eagle3SpeculatorConfig` as JSON."""
    whole = read_json(resolve_folder(target) / "config.json")
    text = text_config(target)
    compare_with_target(text, draft)
    layer = decoder_config(text, draft)
    layer["dtype"] = target.dtype
    # a wrapper may have them beside its text model
    layer |= {key: whole.get(key) for key in SPECIAL_IDS if layer[key] is None}
    if len(target.aux_layer_ids) != DEFAULT_AUX_STATES:
        # vLLM sizes `fc` for three states unless this key of its own says otherwise
        layer["num_aux_hidden_states"] = len(target.aux_layer_ids)
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "draft_vocab_size": draft_vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(target.aux_layer_ids),
        "norm_before_residual": draft.norm_before_residual,
        "norm_before_fc": draft.norm_before_fc,
        "norm_output": draft.norm_output,
        "fc_norm": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "dtype": target.dtype,
        "transformer_layer_config": layer,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": ttt_steps, "verifier_accept_k": 1}],
            "verifier": {"name_or_path": target.path, "architectures": whole.get("architectures") or []},
        },
        PROVENANCE_KEY: {"provenance": {"target": fingerprint(target)}},
    }


def check_norms(draft: Draft) -> None:
    """StageError where the vLLM of this environment would serve the head without `norm_output`, as 0.22 does."""
    if draft.norm_output and "norm_output" in unread_norms():
        from vllm import __version__

        raise StageError(
            f"draft.norm_output is true: vLLM {__version__} does not read it from a head's config.json and would serve as "
            "if it were false; set the key to false, or rebuild the environment with the locked vLLM, which reads it"
        )


def unread_norms() -> list[str]:
    """The norm flags of a head in speculators' format that the installed vLLM does not pass on to its own model."""
    served: dict[str, Any] = {"model_type": "llama"}
    head = {"draft_vocab_size": 1, "eagle_aux_hidden_state_layer_ids": [1], **dict.fromkeys(NORM_FLAGS, True)}
    importlib.import_module("vllm.transformers_utils.configs.speculators.algos").SUPPORTED_SPECULATORS_TYPES["eagle3"](
        head, served
    )
    return [flag for flag in NORM_FLAGS if not served.get(flag)]


def decoder_config(text: Mapping[str, Any], draft: Draft) -> dict[str, Any]:
    """`LlamaConfig` of the draft's decoder. Every key is written out: vLLM reads it without Llama's own defaults."""
    heads, key_value_heads, head_dim = attention_shape(text, draft)
    return {
        "model_type": "llama",
        "vocab_size": text["vocab_size"],
        "hidden_size": text["hidden_size"],
        # MoE targets without a dense MLP have no such width
        "intermediate_size": draft.intermediate_size or text.get("intermediate_size") or 3 * text["hidden_size"],
        "num_hidden_layers": draft.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "rms_norm_eps": text["rms_norm_eps"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_parameters": rope_parameters(text),
        "tie_word_embeddings": False,
        **{key: text.get(key) for key in SPECIAL_IDS},
    }


def compare_with_target(text: Mapping[str, Any], draft: Draft) -> None:
    """StageError where a value that a preset names is not the target's: the preset was made for another target."""
    named = dict(draft.target_values)
    where = f"draft.preset {draft.preset}" if draft.preset else "draft.target_values"
    for key in SAME_VALUES:
        if key in named:
            _require_same(where, key, named[key], text.get(key))
    rope = {key: named[key] for key in ROPE_VALUES if key in named}
    if not rope:
        return
    own = rope_parameters(text)
    asked = rope_parameters({"rope_theta": own["rope_theta"], **rope})
    if asked["rope_theta"] != own["rope_theta"]:
        _require_same(where, "rope_theta", asked["rope_theta"], own["rope_theta"])
    if set(rope) != {"rope_theta"}:
        for key in sorted((asked.keys() | own.keys()) - {"rope_theta"}):
            _require_same(where, f"rope {key}", asked.get(key), own.get(key))


def _require_same(where: str, key: str, preset: Any, own: Any) -> None:
    if preset != own:
        raise StageError(
            f"{where}: {key} is {preset}, the target's is {own}; the draft must have the target's: take another preset, or "
            "set target.path to the target that it is for"
        )


def attention_shape(text: Mapping[str, Any], draft: Draft) -> tuple[int, int, int]:
    """(query heads, key and value heads, width of a head): from `draft:`, else as the target has them.

    A target with latent attention (MLA) has no key and value heads that could be copied: there the draft gets one for
    eight query heads, and heads of 128 (64 below a hidden size of 2048), which every attention kernel knows.
    """
    latent = text.get("kv_lora_rank") is not None
    heads = draft.num_attention_heads or text["num_attention_heads"]
    if latent:
        grouped = heads // MLA_GROUP if heads % MLA_GROUP == 0 else heads
        key_value_heads = draft.num_key_value_heads or grouped
        head_dim = draft.head_dim or (128 if text["hidden_size"] >= 2048 else 64)
    else:
        key_value_heads = draft.num_key_value_heads or text.get("num_key_value_heads") or heads
        head_dim = draft.head_dim or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    if heads % key_value_heads:
        raise StageError(
            f"draft: {heads} query heads cannot share {key_value_heads} key and value heads; expected a divisor of "
            f"{heads}; set draft.num_attention_heads and draft.num_key_value_heads"
        )
    if head_dim % 2:
        raise StageError(f"draft.head_dim is {head_dim}: expected an even number, as rotary embeddings turn pairs")
    return heads, key_value_heads, head_dim


def rope_parameters(text: Mapping[str, Any]) -> dict[str, Any]:
    """Rotary parameters of the draft: the target's where Llama can have them, else its theta without scaling.

    Reads both forms of config.json: `rope_parameters`, and `rope_theta` with `rope_scaling`.
    """
    found = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    # one set per kind of layer: the draft has full attention
    found = dict(found.get("full_attention", found))
    theta = found.get("rope_theta", text.get("rope_theta", 10000.0))
    kind = found.get("rope_type", found.get("type", "default"))
    if kind not in ROPE_PARAMETERS:
        kind = "default"
    kept = {key: found[key] for key in ROPE_PARAMETERS[kind] if found.get(key) is not None}
    return {"rope_type": kind, "rope_theta": float(theta), **kept}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    parser.add_argument("--draft", type=section(Draft), required=True, help="section `draft:` as JSON")
    parser.add_argument("--vocabulary", type=section(Vocabulary), required=True, help="section `vocabulary:` as JSON")
    parser.add_argument("--ttt-steps", type=int, required=True, help="training-time test steps; tokens that it proposes")
    parser.add_argument("--output", type=Path, required=True, help="draft/config.json")
    options = parser.parse_args(argv)
    run(options.target, options.draft, options.vocabulary, options.ttt_steps, options.output)


if __name__ == "__main__":
    run_stage(main)
