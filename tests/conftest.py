"""Fixtures for all tests: the tiny targets, made once per version of the script that makes them."""

import hashlib
from pathlib import Path

import pytest

from scripts import make_tiny_target
from scripts.eagle3.config import Target

AUX_LAYER_IDS = [2, 4, 5]


def _make(kind: str, config: pytest.Config) -> Path:
    assert config.cache is not None
    version = hashlib.sha256(Path(make_tiny_target.__file__).read_bytes()).hexdigest()[:12]
    folder = config.cache.mkdir("tiny-targets") / version / kind
    if not (folder / "config.json").is_file():
        make_tiny_target.run(kind, folder)
    return folder


@pytest.fixture(scope="session")
def tiny_llama(pytestconfig: pytest.Config) -> Target:
    """Random Llama with grouped-query attention, 8 layers, float32."""
    folder = _make("tiny-llama", pytestconfig)
    return Target(path=str(folder), num_hidden_layers=8, aux_layer_ids=AUX_LAYER_IDS, dtype="float32")


@pytest.fixture(scope="session")
def tiny_kimi(pytestconfig: pytest.Config) -> Target:
    """Random Kimi-K2.5 (vision wrapper, MLA, mixture of experts), 8 layers, bfloat16."""
    folder = _make("tiny-kimi", pytestconfig)
    return Target(path=str(folder), num_hidden_layers=8, aux_layer_ids=AUX_LAYER_IDS, dtype="bfloat16")
