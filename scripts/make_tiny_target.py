"""Makes a tiny target with random weights, for tests and the canary.

In: `--kind tiny-llama` (LlamaForCausalLM with GQA, float32) or `--kind tiny-kimi` (KimiK25ForConditionalGeneration around
MLA and mixture of experts, bfloat16). Out: a folder in Hugging Face format with 8 layers and a small real tokenizer.
`--kind kimi-text` is Kimi-K2.5's text side without weights: tiktoken vocabulary, chat template, configs.
Branch weights are scaled so that neighbouring states differ by 20 % and more: a state of the wrong layer is never near.
"""

import argparse
import itertools
import string
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.files import write_atomically, write_json, write_text
from scripts.eagle3.stage import run_stage
from scripts.tiny_kimi import write_tokenizer_folder

KINDS = ("tiny-llama", "tiny-kimi", "kimi-text")
NUM_LAYERS = 8
HIDDEN = 256
# how strongly one branch (attention or MLP) adds to the stream, relative to the embedding
BRANCH_GAIN = 0.8
LOGIT_STD = 3.0

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|media_begin|>",
    "<|media_content|>",
    "<|media_end|>",
    "<|media_pad|>",
    "[PAD]",
)
WORD_STARTS = [
    "th",
    "he",
    "in",
    "an",
    "of",
    "to",
    "co",
    "re",
    "be",
    "wa",
    "wh",
    "ha",
    "st",
    "is",
    "it",
    "as",
    "on",
    "or",
    "fo",
    "no",
    "so",
    "we",
    "do",
    "by",
    "at",
    "al",
    "ca",
    "se",
    "ma",
    "de",
    "pr",
    "wi",
    "sh",
    "ch",
    "me",
    "my",
    "pa",
    "su",
    "le",
    "fr",
    "tr",
    "la",
    "ne",
    "ex",
    "ho",
    "si",
    "mo",
    "go",
    "fe",
    "li",
    "us",
    "up",
    "en",
    "di",
    "po",
    "un",
    "ke",
    "yo",
]
VOCAB_SIZE = 256 + 26 * 26 + len(WORD_STARTS) + 26 + len(SPECIAL_TOKENS)
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# Kimi-K2.5's attention at tiny width; vLLM's CPU backend accepts no other kv_lora_rank and qk_rope_head_dim
MLA = {"q_lora_rank": 64, "kv_lora_rank": 512, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64}
EXPERTS, EXPERT_SIZE = 8, 128
VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 1,
    "num_hidden_layers": 1,
    "patch_size": 14,
}
VISION_CONFIG = {
    **VISION,
    # transformers reads the first three, vLLM 0.31 the published names (0.32 both)
    **{"pos_emb_height": 4, "pos_emb_width": 4, "pos_emb_time": 4},
    **{"init_pos_emb_height": 4, "init_pos_emb_width": 4, "init_pos_emb_time": 4},
    "merge_kernel_size": [2, 2],
}

# vLLM wants the image processor's settings even where no row has an image
MEDIA = {
    "in_patch_limit": 64,
    "in_patch_limit_each_frame": 64,
    "in_patch_limit_video": None,
    "patch_limit_on_one_side": 8,
    "patch_size": 14,
    "merge_kernel_size": 2,
    "temporal_merge_kernel_size": 4,
    "fixed_output_tokens": None,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def run(kind: str, output: Path, seed: int = 0) -> None:
    """Writes the target of `kind` to `output`; the same seed gives the same bytes."""
    output.mkdir(parents=True, exist_ok=True)
    if kind == "kimi-text":
        write_json(output / "preprocessor_config.json", {"media_proc_cfg": MEDIA})
        write_tokenizer_folder(output, WORD_STARTS, VISION_CONFIG)
        return
    _write_tokenizer(output)
    eos = VOCAB_SIZE - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<|im_end|>")
    config, tensors = _llama(seed, eos) if kind == "tiny-llama" else _kimi(seed, eos)
    if kind == "tiny-kimi":
        write_json(output / "preprocessor_config.json", {"media_proc_cfg": MEDIA})
    write_json(output / "generation_config.json", {"eos_token_id": eos, "do_sample": False})
    from safetensors.torch import save_file

    write_atomically(output / "model.safetensors", lambda path: save_file(tensors, path, metadata={"format": "pt"}))
    write_json(output / "config.json", config)  # last: with it the folder counts as a target


def _write_tokenizer(output: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = string.ascii_lowercase
    space = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str(" ")[0][0]
    merges = [
        *itertools.product(letters, letters),
        *((space, word) for word in WORD_STARTS),
        *((space, letter) for letter in letters),
    ]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in merges)]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    write_text(output / "tokenizer.json", tokenizer.to_str(pretty=False))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "[PAD]",
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token not in ("<|im_end|>", "[PAD]")],
        "clean_up_tokenization_spaces": False,
        "model_max_length": 2048,
        "chat_template": CHAT_TEMPLATE,
    }
    write_json(output / "tokenizer_config.json", settings)


def _random(seed: int, dtype: str) -> Callable[..., Any]:
    """A function `weight(rows, columns, gain)`: normal, so that unit-variance inputs give outputs of std `gain`."""
    import torch

    generator = torch.Generator().manual_seed(seed)

    def weight(*shape: int, gain: float = 1.0) -> Any:
        fan_in = 1
        for size in shape[1:]:
            fan_in *= size
        return (torch.randn(shape, generator=generator) * gain / fan_in**0.5).to(getattr(torch, dtype))

    return weight


def _llama(seed: int, eos: int) -> tuple[dict[str, Any], dict[str, Any]]:
    import torch

    heads, kv_heads, head_dim, intermediate = 4, 2, 64, 512
    weight = _random(seed, "float32")
    tensors = {
        "model.embed_tokens.weight": weight(VOCAB_SIZE, HIDDEN, gain=HIDDEN**0.5),
        "model.norm.weight": 1 + 0.2 * weight(HIDDEN),
        "lm_head.weight": weight(VOCAB_SIZE, HIDDEN, gain=LOGIT_STD),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"model.layers.{layer}."
        tensors |= {
            # sharp attention: with a flat one the mean over the row would wash the values out
            prefix + "self_attn.q_proj.weight": weight(heads * head_dim, HIDDEN, gain=2.0),
            prefix + "self_attn.k_proj.weight": weight(kv_heads * head_dim, HIDDEN, gain=2.0),
            prefix + "self_attn.v_proj.weight": weight(kv_heads * head_dim, HIDDEN),
            prefix + "self_attn.o_proj.weight": weight(HIDDEN, heads * head_dim, gain=BRANCH_GAIN),
            **_mlp(weight, prefix + "mlp.", intermediate),
            prefix + "input_layernorm.weight": torch.ones(HIDDEN),
            prefix + "post_attention_layernorm.weight": torch.ones(HIDDEN),
        }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": eos,
        "torch_dtype": "float32",
    }
    return config, tensors


def _mlp(weight: Callable[..., Any], prefix: str, intermediate: int, gain: float = BRANCH_GAIN) -> dict[str, Any]:
    return {
        prefix + "gate_proj.weight": weight(intermediate, HIDDEN),
        prefix + "up_proj.weight": weight(intermediate, HIDDEN),
        # silu(gate) * up has a standard deviation of about 0.6
        prefix + "down_proj.weight": weight(HIDDEN, intermediate, gain=gain / 0.6),
    }


def _kimi(seed: int, eos: int) -> tuple[dict[str, Any], dict[str, Any]]:
    weight = _random(seed, "bfloat16")
    prefix = "language_model.model."
    tensors = {
        prefix + "embed_tokens.weight": weight(VOCAB_SIZE, HIDDEN, gain=HIDDEN**0.5),
        prefix + "norm.weight": 1 + 0.2 * weight(HIDDEN),
        "language_model.lm_head.weight": weight(VOCAB_SIZE, HIDDEN, gain=LOGIT_STD),
        **_vision(weight),
    }
    heads, intermediate = 4, 512
    for layer in range(NUM_LAYERS):
        tensors |= _kimi_layer(weight, f"{prefix}layers.{layer}.", heads, None if layer else intermediate)
    text = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": HIDDEN,
        "intermediate_size": intermediate,
        "moe_intermediate_size": EXPERT_SIZE,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        **MLA,
        "n_routed_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "n_group": 1,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-5,
        "rope_theta": 50000.0,
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 512,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 0,
        "vocab_size": VOCAB_SIZE,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    media_pad = VOCAB_SIZE - len(SPECIAL_TOKENS) + SPECIAL_TOKENS.index("<|media_pad|>")
    config = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": VISION_CONFIG,
        # vLLM reads the published name when a draft is loaded, transformers the other two
        "media_placeholder_token_id": media_pad,
        "image_token_id": media_pad,
        "video_token_id": media_pad,
        "tie_word_embeddings": False,
        "eos_token_id": eos,
        "torch_dtype": "bfloat16",
    }
    return config, tensors


def _kimi_layer(weight: Callable[..., Any], prefix: str, heads: int, dense_size: int | None) -> dict[str, Any]:
    import torch

    ones = lambda size: torch.ones(size, dtype=torch.bfloat16)  # noqa: E731
    nope, rope, value, kv_rank, q_rank = (
        MLA[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank", "q_lora_rank")
    )
    attention = prefix + "self_attn."
    tensors = {
        attention + "q_a_proj.weight": weight(q_rank, HIDDEN),
        attention + "q_a_layernorm.weight": ones(q_rank),
        attention + "q_b_proj.weight": weight(heads * (nope + rope), q_rank),
        attention + "kv_a_proj_with_mqa.weight": weight(kv_rank + rope, HIDDEN),
        attention + "kv_a_layernorm.weight": ones(kv_rank),
        attention + "kv_b_proj.weight": weight(heads * (nope + value), kv_rank),
        attention + "o_proj.weight": weight(HIDDEN, heads * value, gain=BRANCH_GAIN),
        prefix + "input_layernorm.weight": ones(HIDDEN),
        prefix + "post_attention_layernorm.weight": ones(HIDDEN),
    }
    if dense_size is not None:
        return tensors | _mlp(weight, prefix + "mlp.", dense_size)
    for expert in range(EXPERTS):
        # weak beside the shared expert: rounding may choose another one, which must stay a small difference
        tensors |= _mlp(weight, f"{prefix}mlp.experts.{expert}.", EXPERT_SIZE, gain=0.3 * BRANCH_GAIN)
    return tensors | {
        **_mlp(weight, prefix + "mlp.shared_experts.", EXPERT_SIZE),
        prefix + "mlp.gate.weight": weight(EXPERTS, HIDDEN, gain=2.0),
        prefix + "mlp.gate.e_score_correction_bias": weight(EXPERTS, gain=0.01).float(),
    }


def _vision(weight: Callable[..., Any]) -> dict[str, Any]:
    """The smallest vision tower that loads; no text row ever runs it."""
    size, inner, patch = VISION["hidden_size"], VISION["intermediate_size"], VISION["patch_size"]
    shapes = {
        "vision_tower.patch_embed.proj.weight": (size, 3, patch, patch),
        "vision_tower.patch_embed.proj.bias": (size,),
        "vision_tower.patch_embed.pos_emb.weight": (4, 4, size),
        "vision_tower.encoder.blocks.0.wqkv.weight": (3 * size, size),
        "vision_tower.encoder.blocks.0.wo.weight": (size, size),
        "vision_tower.encoder.blocks.0.mlp.fc0.weight": (inner, size),
        "vision_tower.encoder.blocks.0.mlp.fc1.weight": (size, inner),
        "mm_projector.proj.0.weight": (4 * size, 4 * size),
        "mm_projector.proj.2.weight": (HIDDEN, 4 * size),
    }
    biased = [name for name, shape in shapes.items() if name.endswith("weight") and len(shape) == 2]
    shapes |= {name.replace("weight", "bias"): shapes[name][:1] for name in biased}
    for norm in ("encoder.blocks.0.norm0", "encoder.blocks.0.norm1", "encoder.final_layernorm"):
        shapes |= {f"vision_tower.{norm}.{kind}": (size,) for kind in ("weight", "bias")}
    shapes |= {f"mm_projector.pre_norm.{kind}": (size,) for kind in ("weight", "bias")}
    return {name: weight(*shape) for name, shape in shapes.items()}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line; see `--help`."""
    parser = argparse.ArgumentParser(prog="make_tiny_target", description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--kind", choices=KINDS, required=True, help="which target to make")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights")
    options = parser.parse_args(argv)
    run(options.kind, options.output, options.seed)


if __name__ == "__main__":
    run_stage(main)
