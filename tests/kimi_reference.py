"""A plain PyTorch forward of Kimi-K2.5's language model (MLA, YaRN, mixture of experts), to compare captured states with.

In: a target folder and one row of token ids. Out: the residual stream after 0, 1, ..., n layers, in float32.
"""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

PREFIX = "language_model.model."


class KimiReference:
    """Weights as stored, computed in float32, one row at a time, no cache."""

    def __init__(self, folder: Path) -> None:
        self.config: dict[str, Any] = json.loads((folder / "config.json").read_text())["text_config"]
        self.weights = {name: tensor.float() for name, tensor in load_file(folder / "model.safetensors").items()}

    @torch.inference_mode()
    def states(self, token_ids: torch.Tensor) -> list[torch.Tensor]:
        """[tokens] -> n + 1 states of [tokens, hidden]; entry k is the stream after k layers."""
        stream = self.weights[PREFIX + "embed_tokens.weight"][token_ids.long()]
        states = [stream]
        for layer in range(self.config["num_hidden_layers"]):
            prefix = f"{PREFIX}layers.{layer}."
            stream = stream + self._attention(prefix + "self_attn.", self._norm(stream, prefix + "input_layernorm.weight"))
            x = self._norm(stream, prefix + "post_attention_layernorm.weight")
            dense = layer < self.config["first_k_dense_replace"]
            stream = stream + (self._mlp(prefix + "mlp.", x) if dense else self._experts(prefix + "mlp.", x))
            states.append(stream)
        return states

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * self.weights[name]

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self.weights[name + ".weight"].T

    def _mlp(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        gate = torch.nn.functional.silu(self._linear(x, prefix + "gate_proj"))
        return self._linear(gate * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _experts(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        scores = torch.sigmoid(self._linear(x, prefix + "gate"))
        # the bias only chooses; the weights are the scores without it
        chosen = (
            (scores + self.weights[prefix + "gate.e_score_correction_bias"]).topk(self.config["num_experts_per_tok"]).indices
        )
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True) * self.config["routed_scaling_factor"]
        total = self._mlp(prefix + "shared_experts.", x)
        for expert in range(self.config["n_routed_experts"]):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            total = total + share * self._mlp(f"{prefix}experts.{expert}.", x)
        return total

    def _attention(self, prefix: str, x: torch.Tensor) -> torch.Tensor:
        config, tokens, heads = self.config, len(x), self.config["num_attention_heads"]
        nope, rope, rank = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["kv_lora_rank"]
        q = self._norm(self._linear(x, prefix + "q_a_proj"), prefix + "q_a_layernorm.weight")
        q = self._linear(q, prefix + "q_b_proj").view(tokens, heads, nope + rope)
        latent, k_rope = self._linear(x, prefix + "kv_a_proj_with_mqa").split([rank, rope], dim=-1)
        kv = self._linear(self._norm(latent, prefix + "kv_a_layernorm.weight"), prefix + "kv_b_proj")
        k_nope, v = kv.view(tokens, heads, -1).split([nope, config["v_head_dim"]], dim=-1)
        q = torch.cat([q[..., :nope], self._rotate(q[..., nope:])], dim=-1)
        k = torch.cat([k_nope, self._rotate(k_rope.unsqueeze(1)).expand(-1, heads, -1)], dim=-1)
        yarn = config["rope_scaling"]
        mscale = 0.1 * yarn["mscale_all_dim"] * math.log(yarn["factor"]) + 1
        scores = torch.einsum("qhd,khd->hqk", q, k) * (nope + rope) ** -0.5 * mscale**2
        scores = scores.masked_fill(torch.ones(tokens, tokens, dtype=torch.bool).triu(1), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v)
        return self._linear(mixed.reshape(tokens, -1), prefix + "o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """Rotary embedding over neighbouring pairs; x [tokens, heads, rope]."""
        angles = torch.arange(len(x)).float()[:, None] * self._frequencies()[None]
        cos, sin = angles.cos()[:, None], angles.sin()[:, None]
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2)

    def _frequencies(self) -> torch.Tensor:
        """YaRN: fast dimensions as trained, slow ones stretched by the factor, a ramp between."""
        yarn, size, base = self.config["rope_scaling"], self.config["qk_rope_head_dim"], self.config["rope_theta"]
        plain = base ** -(torch.arange(0, size, 2).float() / size)

        def dimension(rotations: float) -> float:
            return size * math.log(yarn["original_max_position_embeddings"] / (rotations * 2 * math.pi)) / (2 * math.log(base))

        low, high = math.floor(dimension(yarn["beta_fast"])), math.ceil(dimension(yarn["beta_slow"]))
        low, high = max(low, 0), min(high, size - 1)
        ramp = ((torch.arange(size // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
        return plain / yarn["factor"] * ramp + plain * (1 - ramp)
