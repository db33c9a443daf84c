"""Kimi-K2.5's config.json as far as the draft depends on it, and presets at the width of a tiny target."""

from typing import Any

from scripts.eagle3.config import Draft, Target
from scripts.eagle3.presets import PRESETS
from scripts.eagle3.target import text_config

PRESET_NAMES = sorted(path.stem for path in PRESETS.glob("*.json"))
YARN = {
    "type": "yarn",
    "factor": 64.0,
    "original_max_position_embeddings": 4096,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}


def kimi_text(**changes: Any) -> dict[str, Any]:
    """`text_config` of Kimi-K2.5: what the draft copies from it."""
    return {
        "model_type": "kimi_k2",
        "num_hidden_layers": 61,
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "kv_lora_rank": 512,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 262144,
        "rope_theta": 50000.0,
        "rope_scaling": dict(YARN),
        "bos_token_id": 163584,
        "eos_token_id": 163585,
        "pad_token_id": 163839,
        **changes,
    }


def scaled_preset(name: str, target: Target) -> Draft:
    """A preset with widths and head counts of `target`: layer count, and whether heads share keys, are the preset's."""
    preset = Draft(preset=name)
    text = text_config(target)
    heads = text["num_attention_heads"]
    assert preset.num_attention_heads is not None and preset.num_key_value_heads is not None
    shared = min(heads, preset.num_attention_heads // preset.num_key_value_heads)
    return Draft(
        num_hidden_layers=preset.num_hidden_layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // shared,
        head_dim=64,
        intermediate_size=text["intermediate_size"],
        target_values={"rope_scaling": text["rope_scaling"]},
    )
