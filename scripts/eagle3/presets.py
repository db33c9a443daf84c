"""Presets of the draft's architecture: files in config/draft/ with names as in LlamaConfig.

In: the section `draft:` with `preset: NAME`. Out: the section with the preset's values in it, so that they, and not only the
name, reach the stages: an edited preset reruns what was made from it. Shape is taken from a preset; what must agree with
the target is only compared, by draft_config.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json

PRESETS = Path(__file__).parents[2] / "config" / "draft"
SHAPE = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
ROPE_VALUES = ("rope_theta", "rope_scaling", "rope_parameters")
SAME_VALUES = (
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "max_position_embeddings",
    "bos_token_id",
    "eos_token_id",
    "pad_token_id",
)
TARGET_VALUES = (*SAME_VALUES, *ROPE_VALUES)


def with_preset(section: dict[str, Any]) -> dict[str, Any]:
    """The section `draft:` completed from its preset; its own keys stay. StageError where there is no such preset."""
    name = section["preset"]
    known = sorted(path.stem for path in PRESETS.glob("*.json"))
    if name not in known:
        raise StageError(f"draft.preset is {name}: expected one of {', '.join(known)}; they lie in {PRESETS}")
    path = PRESETS / f"{name}.json"
    values = read_json(path)
    if not isinstance(values, dict):
        raise StageError(f"{path}: expected one JSON object with names of LlamaConfig, found {type(values).__name__}; mend it")
    refuse_unknown(values, (*SHAPE, *TARGET_VALUES), str(path))
    shape = {key: values[key] for key in SHAPE if key in values}
    compared = {key: values[key] for key in TARGET_VALUES if key in values}
    return {**shape, "target_values": compared, **section}


def refuse_unknown(values: Iterable[str], known: Collection[str], where: str) -> None:
    """StageError naming the keys that are not among the known ones."""
    unknown = sorted(set(values) - set(known))
    if unknown:
        raise StageError(f"{where}: unknown key {', '.join(unknown)}; known are {', '.join(known)}")
