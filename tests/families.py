"""Tiny random models of several families, made by transformers' own classes, and what those classes compute.

In: a family's name and a folder. Out: a target in Hugging Face format with 8 layers, and the residual stream after each of
them. Branches are scaled so that neighbouring states differ by 20 % and more: a state of the wrong layer is never near.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from scripts.eagle3.config import Target
from scripts.eagle3.files import write_json
from scripts.make_tiny_target import BRANCH_GAIN, LOGIT_STD, MLA, VOCAB_SIZE

NUM_LAYERS = 8
HIDDEN = 128
COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN,
    "intermediate_size": 256,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": VOCAB_SIZE - 6,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e5,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 2, "norm_topk_prob": True}
DEEPSEEK = {
    **MLA,
    **EXPERTS,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
}
WINDOWS = ["sliding_attention", "full_attention"] * (NUM_LAYERS // 2)


@dataclass(frozen=True)
class Family:
    """A family: transformers' configuration class, its settings beside COMMON, and the name of vLLM's class.

    dtype: what the engine computes in (vLLM's latent attention on CPUs takes bfloat16 alone). branch: gain of what attention
    and MLP add to the stream. since: the vLLM release whose class has the EAGLE-3 interface, where the one before lacks it.
    """

    config: str
    vllm_class: str
    settings: dict[str, Any] = field(default_factory=dict)
    dtype: str = "float32"
    branch: float = BRANCH_GAIN
    since: str = "0.31.0"

    @property
    def without(self) -> tuple[str, ...]:
        """Settings of COMMON that mean something else here: latent attention has head sizes of its own."""
        return ("head_dim",) if "kv_lora_rank" in self.settings else ()


FAMILIES = {
    "llama": Family("LlamaConfig", "LlamaForCausalLM"),
    "llama-tied": Family("LlamaConfig", "LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": Family("MistralConfig", "MistralForCausalLM", {"sliding_window": 64}),
    "qwen2": Family("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": Family("Qwen3Config", "Qwen3ForCausalLM"),
    "qwen3-moe": Family("Qwen3MoeConfig", "Qwen3MoeForCausalLM", {**EXPERTS, "num_experts": 8}),
    "mixtral": Family("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 8}),
    "gpt-oss": Family(
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "sliding_window": 64,
            "layer_types": WINDOWS,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
    "granite": Family(
        "GraniteConfig",
        "GraniteForCausalLM",
        {"embedding_multiplier": 4.0, "residual_multiplier": 0.5, "attention_multiplier": 0.1, "logits_scaling": 1.0},
        branch=8 * BRANCH_GAIN,
        since="0.32.0",
    ),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 64, "layer_types": WINDOWS}),
    "deepseek-v2": Family(
        "DeepseekV2Config",
        "DeepseekV2ForCausalLM",
        {**DEEPSEEK, "topk_method": "greedy", "norm_topk_prob": False},
        dtype="bfloat16",
    ),
    "deepseek-v3": Family(
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**DEEPSEEK, "topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        dtype="bfloat16",
    ),
}
# vLLM 0.32's classes of these cannot hand out auxiliary states
WITHOUT_INTERFACE = ("mixtral", "gemma3")
CAPTURED = [name for name in FAMILIES if name not in WITHOUT_INTERFACE]


def make_family(name: str, folder: Path, tokenizer: Path, **changes: Any) -> Target:
    """Writes the family's target to `folder`, with the tokenizer of the folder `tokenizer`; `changes` go into its config."""
    import transformers

    family = FAMILIES[name]
    settings = {key: value for key, value in COMMON.items() if key not in family.without} | family.settings | changes
    config = getattr(transformers, family.config)(**settings)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            parameter.copy_(_weight(parameter_name, parameter.shape, family, generator))
    model.to(getattr(torch, family.dtype)).save_pretrained(folder)
    for path in tokenizer.glob("tokenizer*"):
        shutil.copy(path, folder / path.name)
    write_json(folder / "generation_config.json", {"eos_token_id": COMMON["eos_token_id"], "do_sample": False})
    return Target(path=str(folder), num_hidden_layers=NUM_LAYERS, aux_layer_ids=[2, 4, 5], dtype=family.dtype)


def _weight(name: str, shape: torch.Size, family: Family, generator: torch.Generator) -> torch.Tensor:
    """Random values such that each part has a size of about 1, and a branch adds `family.branch` to the stream."""
    noise = torch.randn(shape, generator=generator)
    if "norm" in name:
        # Gemma multiplies by 1 + weight
        around = 0.2 * noise if name == "model.norm.weight" else torch.zeros(shape)
        return around if family.config.startswith("Gemma") else 1 + around
    if len(shape) == 1 or name.endswith("_bias"):  # biases, and the sinks of gpt-oss
        return 0.1 * noise
    if "embed_tokens" in name:
        return noise / HIDDEN**0.5 if family.config.startswith("Gemma") else noise  # Gemma multiplies by the same root
    # gpt-oss keeps its experts as [experts, in, out], all others have [..., out, in]
    fan_in = shape[-2] if family.config == "GptOssConfig" and ".experts." in name else shape[-1]
    return noise * _gain(name, family) / fan_in**0.5


def _gain(name: str, family: Family) -> float:
    if "lm_head" in name:
        return LOGIT_STD
    if "o_proj" in name:
        return family.branch
    if "down_proj" in name:
        # silu(gate) * up has a standard deviation of about 0.6, and a token's experts share its weight
        # where it is rounded to bfloat16 another expert may be chosen, which must stay a small difference
        rounded = ".experts." in name and family.dtype == "bfloat16"
        return family.branch / 0.6 * (0.3 if rounded else 1)
    sharp = ("q_proj", "k_proj", "gate.weight", "router.weight")
    return 2.0 if any(part in name for part in sharp) else 1.0


class Reference:
    """Transformers' own model of a folder, in float32."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def states(self, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """[tokens] -> n + 1 states of [tokens, hidden]: `hidden_states[k]`, but for the last one, which is before the norm."""
        return self.states_and_logits(token_ids)[0]

    @torch.inference_mode()
    def states_and_logits(self, token_ids: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
        """`states`, and the logits [tokens, vocabulary]."""
        before_norm: list[torch.Tensor] = []
        handle = self.model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
        output = self.model(token_ids.long()[None], output_hidden_states=True)
        handle.remove()
        return [*(state[0] for state in output.hidden_states[:-1]), before_norm[0]], output.logits[0]
