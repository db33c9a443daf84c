"""Heads as other tools write them, made at test time for a tiny target, with random or with given weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from scripts.eagle3.config import Target
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.target import text_config
from tests.draft_case import DRAFT_VOCAB_SIZE, draft_vocabulary

IDS = "eagle_aux_hidden_state_layer_ids"
BLOCK = {
    "midlayer.self_attn.q_proj.weight": ("queries", "read"),
    "midlayer.self_attn.k_proj.weight": ("keys", "read"),
    "midlayer.self_attn.v_proj.weight": ("keys", "read"),
    "midlayer.self_attn.o_proj.weight": ("hidden", "queries"),
    "midlayer.mlp.gate_proj.weight": ("inner", "hidden"),
    "midlayer.mlp.up_proj.weight": ("inner", "hidden"),
    "midlayer.mlp.down_proj.weight": ("hidden", "inner"),
    "midlayer.hidden_norm.weight": ("hidden",),
    "midlayer.input_layernorm.weight": ("hidden",),
    "midlayer.post_attention_layernorm.weight": ("hidden",),
    "fc.weight": ("hidden", "states"),
    "norm.weight": ("hidden",),
    "lm_head.weight": ("draft", "hidden"),
}


def foreign_config(target: Target, ids: list[int] | None, **changes: Any) -> dict[str, Any]:
    """config.json of the shape of SpecForge's: a flat LlamaConfig; `ids` as they are to stand there, None: absent."""
    text = text_config(target)
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": text["hidden_size"],
        "intermediate_size": 512,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "hidden_act": "silu",
        "vocab_size": text["vocab_size"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "max_position_embeddings": text["max_position_embeddings"],
        "rms_norm_eps": text["rms_norm_eps"],
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    if ids is not None:
        config["eagle_config"] = {IDS: ids, "use_aux_hidden_state": True}
    return {**config, **changes}


def foreign_tensors(config: Mapping[str, Any], states: int = 3, ids: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Random tensors under that family's names; `ids` is the draft vocabulary."""
    generator = torch.Generator().manual_seed(11)
    hidden = config["hidden_size"]
    sizes = {
        "hidden": hidden,
        "read": 2 * hidden,
        "states": states * hidden,
        "inner": config["intermediate_size"],
        "queries": config["num_attention_heads"] * config["head_dim"],
        "keys": config["num_key_value_heads"] * config["head_dim"],
        "draft": config["draft_vocab_size"],
    }
    shapes = {name: [sizes[key] for key in keys] for name, keys in BLOCK.items()}
    tensors = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    vocabulary = draft_vocabulary(config["vocab_size"]) if ids is None else ids
    mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
    mask[vocabulary] = True
    return {**tensors, "d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": mask}


def write_foreign(folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor]) -> Path:
    """The folder of such a head."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def foreign_head(folder: Path, target: Target, ids: list[int] | None, **changes: Any) -> Path:
    """A random head of `target`."""
    config = foreign_config(target, ids, **changes)
    return write_foreign(folder, config, foreign_tensors(config))


def as_foreign(export: Path, folder: Path, target: Target, ids: list[int]) -> Path:
    """An export of ours under the other family's names, written without our converter: no embedding, `ids` as given."""
    tensors = load_file(export / WEIGHTS)
    del tensors["embed_tokens.weight"]
    renamed = {name.replace("layers.0", "midlayer"): tensor for name, tensor in tensors.items()}
    return write_foreign(folder, foreign_config(target, ids), renamed)


def latent_head(folder: Path, target: Target, ids: list[int] | None, **changes: Any) -> Path:
    """A head with latent attention, as far as it is looked at."""
    text = text_config(target)
    config = {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        "hidden_size": text["hidden_size"],
        "vocab_size": text["vocab_size"],
        "draft_vocab_size": text["vocab_size"],
        "num_hidden_layers": 1,
        **({"eagle_config": {IDS: ids}} if ids is not None else {}),
        **changes,
    }
    hidden = text["hidden_size"]
    tensors = {
        "fc.weight": torch.zeros(hidden, 3 * hidden),
        "lm_head.weight": torch.zeros(text["vocab_size"], hidden),
        "layers.0.self_attn.kv_b_proj.weight": torch.zeros(8, 8),
    }
    return write_foreign(folder, config, tensors)


def latent_config(target: Target, ids: list[int]) -> dict[str, Any]:
    """config.json of a whole head with latent attention, of the target's own sizes."""
    text = text_config(target)
    names = ["hidden_size", "intermediate_size", "num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim"]
    names += ["qk_rope_head_dim", "v_head_dim", "vocab_size", "max_position_embeddings", "rms_norm_eps", "rope_theta"]
    return {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"],
        "model_type": "kimi_k2",
        **{name: text[name] for name in names},
        "rope_scaling": text.get("rope_scaling"),
        "num_key_value_heads": text["num_attention_heads"],
        "draft_vocab_size": DRAFT_VOCAB_SIZE,
        "num_hidden_layers": 1,
        "first_k_dense_replace": 1,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "eagle_config": {IDS: ids},
    }


def latent_tensors(config: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Random tensors under that family's names."""
    generator = torch.Generator().manual_seed(12)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    rope, rank, key = config["qk_rope_head_dim"], config["kv_lora_rank"], config["qk_nope_head_dim"]
    block = "layers.0."
    queries = heads * (key + rope)
    shapes: dict[str, list[int]] = {
        f"{block}self_attn.kv_a_proj_with_mqa.weight": [rank + rope, 2 * hidden],
        f"{block}self_attn.kv_b_proj.weight": [heads * (key + config["v_head_dim"]), rank],
        f"{block}self_attn.o_proj.weight": [hidden, heads * config["v_head_dim"]],
        f"{block}mlp.gate_proj.weight": [inner, hidden],
        f"{block}mlp.up_proj.weight": [inner, hidden],
        f"{block}mlp.down_proj.weight": [hidden, inner],
        "fc.weight": [hidden, 3 * hidden],
        "lm_head.weight": [config["draft_vocab_size"], hidden],
    }
    if config["q_lora_rank"]:
        shapes[f"{block}self_attn.q_a_proj.weight"] = [config["q_lora_rank"], 2 * hidden]
        shapes[f"{block}self_attn.q_b_proj.weight"] = [queries, config["q_lora_rank"]]
    else:
        shapes[f"{block}self_attn.q_proj.weight"] = [queries, 2 * hidden]
    tensors = {name: 0.05 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    norms = {"norm": hidden, f"{block}hidden_norm": hidden, f"{block}input_layernorm": hidden}
    norms |= {f"{block}post_attention_layernorm": hidden, f"{block}self_attn.kv_a_layernorm": rank}
    if config["q_lora_rank"]:
        norms[f"{block}self_attn.q_a_layernorm"] = config["q_lora_rank"]
    tensors |= {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    vocabulary = draft_vocabulary(config["vocab_size"])
    mask = torch.zeros(config["vocab_size"], dtype=torch.bool)
    mask[vocabulary] = True
    return {**tensors, "d2t": vocabulary - torch.arange(len(vocabulary)), "t2d": mask}
