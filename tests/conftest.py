"""Fixtures for all tests: the tiny targets, made once per version of the script that makes them."""

import hashlib
from pathlib import Path
from types import ModuleType

import pytest

from scripts import fetch_demo_target, make_tiny_target
from scripts.eagle3.config import Target
from scripts.tiny_kimi import HERE as KIMI_TEXT

AUX_LAYER_IDS = [2, 4, 5]


def _cached(script: ModuleType, name: str, config: pytest.Config, *more: Path) -> Path:
    """A folder that lives as long as the script and the files that fill it stay the same."""
    assert config.cache is not None and script.__file__ is not None
    files = [Path(script.__file__), *more]
    version = hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]
    return config.cache.mkdir("targets") / version / name


def _make(kind: str, config: pytest.Config) -> Path:
    more = [path for path in sorted(KIMI_TEXT.iterdir()) if path.is_file()] if kind == "kimi-text" else []
    folder = _cached(make_tiny_target, kind, config, *more)
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


@pytest.fixture(scope="session")
def kimi_text(pytestconfig: pytest.Config) -> Target:
    """Kimi-K2.5's text side without weights: a tiktoken vocabulary with the real special ids, a chat template, configs."""
    folder = _make("kimi-text", pytestconfig)
    return Target(path=str(folder), num_hidden_layers=61, aux_layer_ids=[2, 30, 58], trust_remote_code=True)


@pytest.fixture(scope="session")
def smollm2(pytestconfig: pytest.Config) -> Target:
    """The demo's target, for slow tests: SmolLM2-135M-Instruct."""
    folder = _cached(fetch_demo_target, "smollm2-135m", pytestconfig)
    if not (folder / "manifest.json").is_file():
        folder.parent.mkdir(parents=True, exist_ok=True)
        fetch_demo_target.run(folder, folder / "manifest.json")
    return Target(path=str(folder), num_hidden_layers=30, aux_layer_ids=[2, 15, 27], dtype="float32")
