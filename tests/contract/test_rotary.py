"""Kimi-K2.5's YaRN in the draft: training (speculators' model) and serving (vLLM's class) turn by the same angles."""

import math

import pytest
import torch

from scripts.draft_config import decoder_config
from scripts.eagle3.config import Draft
from tests.kimi_config import YARN, kimi_text

HEAD_DIM = 128
LONGEST = 262144
THETA, FACTOR, ORIGINAL = 50000.0, 64.0, 4096


def positions() -> torch.Tensor:
    """A spread over the whole context, with both of its ends and the length before scaling."""
    return torch.cat([torch.arange(0, LONGEST, 97), torch.tensor([ORIGINAL - 1, ORIGINAL, LONGEST - 1])])


def trained(dtype: torch.dtype) -> torch.Tensor:
    """[positions, HEAD_DIM] cos and sin of the rotary module of speculators' own draft, which is narrow otherwise."""
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig

    text = kimi_text(hidden_size=64, intermediate_size=64, vocab_size=128)
    draft = Draft(num_attention_heads=2, num_key_value_heads=1, head_dim=HEAD_DIM, intermediate_size=64)
    layer = decoder_config(text, draft)
    layer |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    values = {"speculators_model_type": "eagle3", "transformer_layer_config": layer, "draft_vocab_size": 64}
    config = Eagle3SpeculatorConfig.from_dict(values)
    config.transformer_layer_config._attn_implementation = "sdpa"
    model = Eagle3DraftModel(config)
    cos, sin = model.rotary_emb(torch.zeros(1, dtype=dtype), positions()[None])
    half = HEAD_DIM // 2
    assert torch.equal(cos[..., :half], cos[..., half:])
    return torch.cat([cos[0, :, :half], sin[0, :, :half]], dim=-1)


def served(dtype: torch.dtype) -> torch.Tensor:
    """[positions, HEAD_DIM] cos and sin as vLLM's Llama attention gets them for the same config."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    layer = decoder_config(kimi_text(), Draft(head_dim=HEAD_DIM))
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(HEAD_DIM, LONGEST, rope_parameters=layer["rope_parameters"], dtype=dtype)
    assert len(rope.cos_sin_cache) == LONGEST
    return rope.cos_sin_cache[positions()]


def reference() -> torch.Tensor:
    """[positions, HEAD_DIM] in float64, from the definition of YaRN; the attention factor is 0.1 ln(factor) + 1."""
    frequencies = THETA ** (-torch.arange(0, HEAD_DIM, 2, dtype=torch.float64) / HEAD_DIM)

    def dimension(turns: float) -> float:
        return HEAD_DIM * math.log(ORIGINAL / (turns * 2 * math.pi)) / (2 * math.log(THETA))

    low, high = math.floor(dimension(YARN["beta_fast"])), math.ceil(dimension(YARN["beta_slow"]))
    interpolated = ((torch.arange(HEAD_DIM // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    angles = positions().double()[:, None] * frequencies * (1 - interpolated + interpolated / FACTOR)
    return (0.1 * math.log(FACTOR) + 1) * torch.cat([angles.cos(), angles.sin()], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draft_of_kimi_turns_alike_in_training_and_serving(dtype):
    assert torch.equal(trained(dtype), served(dtype))


def test_both_are_yarn_with_its_attention_factor():
    # float32 angles of up to 262143 radians are exact to 1/64
    torch.testing.assert_close(served(torch.float32).double(), reference(), rtol=0, atol=0.03)
    early = positions() < 2000
    torch.testing.assert_close(served(torch.float32).double()[early], reference()[early], rtol=0, atol=5e-4)
