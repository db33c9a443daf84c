"""What a training step takes: its arithmetic, for the model FLOPs utilisation, and its GPU memory, before anything is loaded.

In: draft/config.json, the `training:` section, the rows of a step. Out: FLOPs, bytes.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from scripts.eagle3.config import Training
from scripts.eagle3.errors import StageError

HARDWARE = Path(__file__).parents[2] / "config" / "hardware.yaml"
ITEMSIZE = {"bfloat16": 2, "float32": 4}
# of a position, in values: fitted to six steps on one H200 (docs/kimi-k2.5.md), whose peaks it meets within 5 %. Of four more,
# of ZeRO 0 and 3, it meets three within 7 %; with packs of 4,096 at ZeRO 3 gathered weights are the peak, and it is 10 % low.
# Several decoder layers were not measured
KEY_VALUE_COPIES, MLP_COPIES, HIDDEN_COPIES, STATE_COPIES = 2.5, 7, 17, 1


class DraftShape(NamedTuple):
    """The sizes of a draft that its cost depends on; `states`: how many auxiliary ones `fc` reads."""

    hidden: int
    intermediate: int
    heads: int
    key_value_heads: int
    head_dim: int
    layers: int
    states: int
    draft_vocab: int
    target_vocab: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "DraftShape":
        """From draft/config.json."""
        layer = config["transformer_layer_config"]
        return cls(
            hidden=layer["hidden_size"],
            intermediate=layer["intermediate_size"],
            heads=layer["num_attention_heads"],
            key_value_heads=layer["num_key_value_heads"],
            head_dim=layer["head_dim"],
            layers=layer["num_hidden_layers"],
            states=len(config["eagle_aux_hidden_state_layer_ids"]),
            draft_vocab=config["draft_vocab_size"],
            target_vocab=layer["vocab_size"],
        )

    @property
    def layer_weights(self) -> int:
        """Matrices of all decoder layers; the first one reads embedding and state side by side."""
        projections = self.head_dim * (self.heads + 2 * self.key_value_heads) * self.hidden
        inner = 3 * self.hidden * self.intermediate + self.heads * self.head_dim * self.hidden
        return self.layers * (inner + projections) + projections

    @property
    def fc_weights(self) -> int:
        """The projection of the auxiliary states."""
        return self.hidden * self.hidden * self.states

    @property
    def frozen_weights(self) -> int:
        """The target's embedding, and its head cut to the draft vocabulary: the draft's and the one for the targets."""
        return self.hidden * (self.target_vocab + 2 * self.draft_vocab)


def step_flops(shape: DraftShape, positions: np.ndarray, supervised: np.ndarray) -> float:
    """FLOPs of forward and backward over rows of `positions` [rows], of which `supervised` [rows, K] take a loss.

    Every TTT step passes the decoder at every position. A matrix costs 2 FLOPs a weight and position forward and 4 backward;
    `fc` 2 backward, as nothing below it wants a gradient; the frozen head 2 and 2 where a loss is taken, and 2 more for the
    target's logits. A query costs 4 x head_dim for each head and key forward and twice that backward; its keys are those of
    the first step up to its position and its own of later steps. What is no work of the model does not count: padding,
    positions of other rows, and whatever the backward pass computes again.
    """
    steps, tokens = supervised.shape[1], float(positions.sum())
    keys = steps * float((positions * (positions + 1.0) / 2).sum()) + tokens * steps * (steps - 1) / 2
    matrices = tokens * (6 * steps * shape.layer_weights + 4 * shape.fc_weights)
    attention = 12.0 * shape.layers * shape.heads * shape.head_dim * keys
    head = float(shape.hidden * shape.draft_vocab) * float(4 * supervised.sum() + 2 * supervised[:, 0].sum())
    return matrices + attention + head


def peak_flops(device: str, dtype: str) -> float | None:
    """Dense bfloat16 arithmetic of a GPU by config/hardware.yaml; None where that has no GPU of this name, and for float32."""
    if dtype != "bfloat16":
        return None
    name = re.sub(r"[^a-z0-9]+", "_", device.lower())
    machines = yaml.safe_load(HARDWARE.read_text(encoding="utf-8"))["hardware"]
    known = [machine for machine in machines if f"_{machine}_" in f"_{name}_"]
    return float(machines[max(known, key=len)]["flops"]) if known and "_mig_" not in f"_{name}_" else None


def needed_bytes(shape: DraftShape, settings: Training, processes: int = 1) -> int:
    """GPU memory that each of `processes` needs for a step of `batch_tokens`.

    Trained weights: those that compute, gradients, float32 masters and moments, as the ZeRO stage shares them out. Frozen
    ones: one copy. Activations: with the TTT steps computed again in the backward pass, as on every GPU.
    """
    itemsize, stage = ITEMSIZE[settings.dtype], settings.zero_stage
    # with bfloat16 the gradients are held twice: as they arise, and summed up in float32
    gradients = 4 if itemsize == 4 else 6
    optimiser = (4 if settings.optimizer == "muon" else 8) + (4 if itemsize == 2 else 0)
    shares = [(itemsize, 3), (gradients, 2), (optimiser, 1)]
    trained = sum(size / (processes if stage >= least else 1) for size, least in shares)
    weights = (shape.layer_weights + shape.fc_weights) * trained + shape.frozen_weights * itemsize
    keys = 2 * shape.layers * shape.key_value_heads * shape.head_dim
    layer = shape.layers * (MLP_COPIES * shape.intermediate + HIDDEN_COPIES * shape.hidden)
    position = KEY_VALUE_COPIES * settings.ttt_steps * keys + layer + STATE_COPIES * ((shape.states + 1) * shape.hidden)
    return int(weights + settings.batch_tokens * itemsize * (position + shape.draft_vocab))


def check_memory(shape: DraftShape, settings: Training, processes: int, device_bytes: int) -> str:
    """StageError where a step of `batch_tokens` does not fit on the device; else what it needs, in words."""
    needed = needed_bytes(shape, settings, processes)
    said = (
        f"a step of training.batch_tokens {settings.batch_tokens} needs about {needed / 1e9:.1f} GB on each of {processes} GPUs"
    )
    if needed > device_bytes:
        raise StageError(
            f"{said}, of which one has {device_bytes / 1e9:.1f} GB; lower training.batch_tokens (longer rows are cut), raise "
            "training.zero_stage, or take more or larger GPUs"
        )
    return said
