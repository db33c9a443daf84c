"""For the tests of preflight: a configuration, a copy of a tiny target that may be damaged, and one line of a table."""

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.checks import Line
from scripts.eagle3.config import Config, Target

DATA = Path(__file__).parents[1] / "config/data"


def config_for(target: Target, **sections: Any) -> Config:
    """A configuration that is in order for the tiny targets; sections replace its own."""
    values: dict[str, Any] = {
        "run": "checked",
        "target": target.model_dump(),
        "conversations": {
            "train": [{"path": str(DATA / "train/questions.jsonl")}],
            "evaluation": {"suite": {"path": str(DATA / "eval/everyday.jsonl")}},
        },
        "rows": {"max_length": 256},
        "vocabulary": {"draft_vocab_size": 512},
    }
    return Config.model_validate({**values, **sections})


def copy_target(target: Target, folder: Path) -> Target:
    """The target with a folder of its own."""
    shutil.copytree(target.path, folder)
    return target.model_copy(update={"path": str(folder)})


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Changes a JSON file in place."""
    values = json.loads(path.read_text(encoding="utf-8"))
    change(values)
    path.write_text(json.dumps(values), encoding="utf-8")


def line(lines: Sequence[Line], name: str) -> Line:
    """The one line of this name."""
    (found,) = [each for each in lines if each.name == name]
    return found


def assert_red(found: Line, *words: str) -> None:
    """Red, says what it found, and what to do."""
    assert found.state == "red", found
    assert found.advice, found
    for word in words:
        assert word in f"{found.found} -> {found.advice}", found
