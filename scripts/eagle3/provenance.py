"""What an artefact was made from, and the refusal to mix artefacts of different origin.

In: the provenance that an artefact carries and the one that its consumer expects, as nested dicts of JSON values without
paths or times. Out: nothing, or a StageError that names the first difference and both sides.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import sha256_json

# where our provenance stands in a config.json that speculators and vLLM read too; both ignore this key
PROVENANCE_KEY = "eagle3_flow"


def check_provenance(expected: Mapping[str, Any], found: Mapping[str, Any], where: Path | str) -> None:
    """Compares every key of `expected`; raises StageError naming the first that differs, with both values."""
    for key, value in _flat(expected).items():
        other = _flat(found).get(key, "nothing")
        if value != other:
            raise StageError(f"{where}: {key} is {_short(other)}, expected {_short(value)}; remake it, or restore what made it")


def differences(new: Mapping[str, Any], old: Mapping[str, Any]) -> list[str]:
    """Every field in which the two differ, e.g. `layer_ids is [2, 4, 6, 8], was [2, 4, 5, 8]`."""
    now, before = _flat(new), _flat(old)
    keys = [key for key in {**now, **before} if now.get(key, "nothing") != before.get(key, "nothing")]
    return [f"{key} is {_short(now.get(key, 'nothing'))}, was {_short(before.get(key, 'nothing'))}" for key in keys]


def digest(provenance: Mapping[str, Any]) -> str:
    """16 hex digits that stand for a provenance: the name of a store."""
    return sha256_json(provenance)[:16]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, item in value.items():
        if isinstance(item, Mapping):
            flat.update(_flat(item, f"{prefix}{key}."))
        else:
            flat[prefix + key] = item
    return flat


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:16] + "..."
