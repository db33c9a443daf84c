"""The target on disk: what is wrong with its folder is one line, and what identifies it is its content."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.eagle3 import target as target_module
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError


@pytest.fixture
def copy(tiny_llama: Target, tmp_path: Path) -> Target:
    """A copy of a tiny target that a test may damage."""
    folder = tmp_path / "target"
    shutil.copytree(tiny_llama.path, folder)
    target_module._fingerprint.cache_clear()
    return tiny_llama.model_copy(update={"path": str(folder)})


@pytest.mark.parametrize(
    ("removed", "line"),
    [
        (["config.json"], "no config.json"),
        (["model.safetensors"], "the target's weights are missing"),
        (["tokenizer.json", "tokenizer_config.json"], "no tokenizer files"),
    ],
)
def test_incomplete_folder_is_refused_in_one_line(copy, removed, line):
    for name in removed:
        (Path(copy.path) / name).unlink()
    with pytest.raises(StageError, match=line) as error:
        target_module.fingerprint(copy)
    assert "\n" not in str(error.value)


def test_missing_folder_is_refused_without_asking_a_hub():
    for path in ("results/targets/nothing", "/nowhere/at/all", "./nothing"):
        with pytest.raises(StageError, match="no such folder"):
            target_module.resolve_folder(Target(path=path, num_hidden_layers=8))


def test_wrong_number_of_layers_is_refused_with_both_numbers(copy):
    with pytest.raises(StageError, match="expected 9, found 8"):
        target_module.text_config(copy.model_copy(update={"num_hidden_layers": 9}))


def test_fingerprint_follows_content_and_not_the_path(copy, tiny_llama):
    first = target_module.fingerprint(copy)
    assert first == target_module.fingerprint(tiny_llama)
    template = Path(copy.path) / "chat_template.jinja"
    config = Path(copy.path) / "tokenizer_config.json"
    if template.is_file():
        template.write_text(template.read_text() + " ")
    else:
        settings = json.loads(config.read_text())
        config.write_text(json.dumps({**settings, "chat_template": settings["chat_template"] + " "}))
    target_module._fingerprint.cache_clear()
    changed = target_module.fingerprint(copy)
    assert changed["chat_template"] != first["chat_template"]
    assert changed["weights"] == first["weights"]
