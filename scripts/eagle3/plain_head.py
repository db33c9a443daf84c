"""Whether a target's logits are what training and the alignment proof rebuild: a plain RMSNorm and a linear head.

In: config.json of the text model. Out: nothing, or a StageError that names the key: before anything is loaded.
What no key tells (a head with a bias, a scale inside the model) shows in the checkpoint or in the proof's figures.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError

# families whose final norm multiplies by 1 + weight (transformers 5.19 and vLLM 0.32 agree on them)
GEMMA_STYLE_NORM = ("gemma", "recurrent_gemma", "vaultgemma", "t5gemma", "qwen3_next", "qwen3_5", "step3p5", "step3p7")
PLAIN_NORM = ("gemma3n", "gemma4")  # of the same name, yet without the 1
# config keys that scale or bend the logits, or the state in front of the head, and their neutral values
LOGIT_CHANGES = {
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "final_logit_softcapping": None,
    "logits_soft_cap": None,
    "dim_model_base": None,
    "use_gemma_norm": False,
}


def check_plain_head(text: Mapping[str, Any], where: Path) -> None:
    """Refuses, by name, targets whose logits are not a plain RMSNorm and a linear head."""
    model_type = str(text.get("model_type", ""))
    if model_type.startswith(GEMMA_STYLE_NORM) and not model_type.startswith(PLAIN_NORM):
        raise StageError(
            f"{where}: model_type {model_type} has a final norm that multiplies by 1 + weight; expected a plain RMSNorm"
            "; this family is not supported as a target"
        )
    if text.get("rms_norm_eps") is None:
        raise StageError(f"{where}: no rms_norm_eps; expected a final RMSNorm; {model_type or 'this family'} is not supported")
    for key, neutral in LOGIT_CHANGES.items():
        found = text.get(key, neutral)
        if found is not None and found != neutral:
            raise StageError(
                f"{where}: {key} is {found}, which changes the logits; expected {neutral}; not supported as a target"
            )
