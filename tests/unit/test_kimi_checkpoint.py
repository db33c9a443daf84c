"""A checkpoint with the names and the layout of Kimi-K2.5: three tensors of 64 shards are read, and wrong files are named.

The shards without the three tensors have garbage for content, and sizes as the real ones: whoever opens one fails.
"""

import json
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import draft_config, extract_target_head
from scripts.eagle3 import target as target_module
from scripts.eagle3.checks_target import target_lines
from scripts.eagle3.config import Draft, Target, Vocabulary
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.engine import Hardware, load_engine
from scripts.eagle3.errors import StageError
from scripts.eagle3.target import INDEX
from tests.preflight_case import assert_red, config_for, copy_target, edit_json, line

LAYERS, EXPERTS, SHARDS = 61, 6, 64
HIDDEN, VOCABULARY = 32, 1024
SHARD_BYTES = 9_000_000_000
COMMIT = "0123456789abcdef0123456789abcdef01234567"
ROOT = Path(__file__).parents[2]


def shard(number: int) -> str:
    return f"model-{number:05}-of-{SHARDS:06}.safetensors"


def weight_map() -> dict[str, str]:
    """Tensor -> file: one layer a shard, the embedding in the second, norm and head in one of the last."""
    placed = {"language_model.model.embed_tokens.weight": shard(2)}
    for layer in range(LAYERS):
        prefix = f"language_model.model.layers.{layer}."
        names = ["input_layernorm.weight", "self_attn.kv_a_proj_with_mqa.weight", "self_attn.kv_b_proj.weight"]
        if layer:
            names += [
                f"mlp.experts.{expert}.{name}_proj.{part}"
                for expert in range(EXPERTS)
                for name in ("gate", "up", "down")
                for part in ("weight_packed", "weight_scale", "weight_shape")
            ]
        placed |= {prefix + name: shard(layer + 1 if layer != 1 else 1) for name in names}
    placed |= {"language_model.model.norm.weight": shard(62), "language_model.lm_head.weight": shard(62)}
    return placed | {"vision_tower.encoder.blocks.0.norm0.weight": shard(64), "mm_projector.proj.0.weight": shard(63)}


@pytest.fixture
def kimi(tiny_kimi: Target, tmp_path: Path) -> Target:
    folder = tmp_path / "kimi"
    folder.mkdir()
    for path in Path(tiny_kimi.path).iterdir():
        if path.is_file() and path.name != WEIGHTS:
            shutil.copy(path, folder / path.name)
    small = {"num_hidden_layers": LAYERS, "n_routed_experts": EXPERTS, "hidden_size": HIDDEN, "vocab_size": VOCABULARY}
    edit_json(folder / "config.json", lambda config: config["text_config"].update(small))
    placed = weight_map()
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": SHARDS * SHARD_BYTES}, "weight_map": placed}))
    for number in range(1, SHARDS + 1):
        with open(folder / shard(number), "wb") as file:
            file.write(b"\xff" * 64)
            file.truncate(SHARD_BYTES)  # a hole: takes no space
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).bfloat16()

    wide = tensor(VOCABULARY, HIDDEN)
    save_file({"language_model.model.embed_tokens.weight": wide}, folder / shard(2))
    last = {"language_model.model.norm.weight": tensor(HIDDEN), "language_model.lm_head.weight": tensor(VOCABULARY, HIDDEN)}
    save_file(last, folder / shard(62))
    target_module._fingerprint.cache_clear()
    return Target(path=str(folder), num_hidden_layers=LAYERS, aux_layer_ids=[2, 30, 58])


def expected_head(target: Target) -> dict[str, torch.Tensor]:
    both = {**load_file(Path(target.path) / shard(2)), **load_file(Path(target.path) / shard(62))}
    return {name.removeprefix("language_model.").removeprefix("model."): tensor for name, tensor in both.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_head_is_read_from_the_two_shards_that_hold_it(kimi, tmp_path, capsys):
    extract_target_head.run(kimi, tmp_path / "head.safetensors")
    assert_same(load_file(tmp_path / "head.safetensors"), expected_head(kimi))
    read = 2 * HIDDEN * (2 * VOCABULARY + 1)
    assert capsys.readouterr().out == f"extract_target_head: {read:,} bytes of {SHARDS * SHARD_BYTES:,} in the checkpoint\n"


def test_neither_head_nor_draft_config_needs_the_other_shards(kimi, tmp_path):
    expected = expected_head(kimi)
    for number in range(1, SHARDS + 1):
        if number not in (2, 62):
            (Path(kimi.path) / shard(number)).unlink()
    extract_target_head.run(kimi, tmp_path / "head.safetensors")
    assert_same(load_file(tmp_path / "head.safetensors"), expected)
    draft_config.run(kimi, Draft(), Vocabulary(draft_vocab_size=100), 4, tmp_path / "config.json")
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    assert (layer["hidden_size"], layer["vocab_size"], layer["rope_parameters"]["rope_type"]) == (HIDDEN, VOCABULARY, "yarn")


# -- a hub id ---------------------------------------------------------------------------------------------------------


class Hub(ThreadingHTTPServer):
    """As much of the hub as its client asks for one repository; `served`: the files that it handed out."""

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), HubHandler)
        self.folder, self.served = folder, set[str]()


class HubHandler(BaseHTTPRequestHandler):
    server: Hub

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.answer(body=False)

    def do_GET(self) -> None:
        self.answer(body=True)

    def answer(self, body: bool) -> None:
        path = self.path.partition("?")[0]
        files = sorted(self.server.folder.iterdir())
        if path == "/api/models/moonshotai/Kimi-K2.5/revision/main":
            names = [{"rfilename": file.name} for file in files]
            self.send({"id": "moonshotai/Kimi-K2.5", "sha": COMMIT, "siblings": names}, body)
        elif path == f"/api/models/moonshotai/Kimi-K2.5/tree/{COMMIT}":
            self.send([{"type": "file", "path": f.name, "size": f.stat().st_size, "oid": f"oid-{f.name}"} for f in files], body)
        elif path.startswith(f"/moonshotai/Kimi-K2.5/resolve/{COMMIT}/"):
            self.send_file(self.server.folder / path.rpartition("/")[2], body)
        else:
            self.send_error(404)

    def send(self, value: Any, body: bool) -> None:
        content = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)

    def send_file(self, file: Path, body: bool) -> None:
        self.send_response(200)
        self.send_header("ETag", f'"oid-{file.name}"')
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("Content-Length", str(file.stat().st_size))
        self.end_headers()
        if body:
            self.server.served.add(file.name)
            self.wfile.write(file.read_bytes())


@pytest.fixture
def hub(kimi: Target) -> Iterator[Hub]:
    with Hub(Path(kimi.path)) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_of_a_hub_id_only_the_shards_of_the_three_tensors_are_fetched(hub, kimi, tmp_path):
    target = kimi.model_copy(update={"path": "moonshotai/Kimi-K2.5"})
    environment = {
        "PATH": "/usr/bin:/bin",
        "HOME": str(tmp_path),
        "HF_HOME": str(tmp_path / "cache"),
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_DISABLE_XET": "1",
    }
    output = tmp_path / "head.safetensors"
    command = [sys.executable, "-m", "scripts.extract_target_head", "--target", target.model_dump_json()]
    done = subprocess.run(
        [*command, "--output", str(output)], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert_same(load_file(output), expected_head(kimi))
    fetched = {name for name in hub.served if name.endswith(".safetensors")}
    assert fetched == {shard(2), shard(62)}
    assert {INDEX, "config.json", "tokenizer_config.json"} <= hub.served
    # preflight then finds a cache that is not whole, which is no fault
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache/hub"))
        found, lines = target_lines(config_for(target))
    assert found is not None
    weights = line(lines, "weights")
    assert (weights.state, weights.found.split(" files")[0]) == ("skipped", "62 of 64")
    assert line(lines, "names").state == "green"


# -- wrong files ------------------------------------------------------------------------------------------------------


def rename_tensors(target: Target, rename: Callable[[str], str | None]) -> None:
    def change(index: dict[str, Any]) -> None:
        renamed = {rename(name): file for name, file in index["weight_map"].items()}
        renamed.pop(None, None)
        index["weight_map"] = renamed

    edit_json(Path(target.path) / INDEX, change)


def edit_text(target: Target, **changes: Any) -> None:
    edit_json(Path(target.path) / "config.json", lambda config: config["text_config"].update(changes))


def unwrap(target: Target) -> None:
    edit_json(Path(target.path) / "config.json", lambda config: config.update(config.pop("text_config")))


WRONG_NAMES = {
    "weights of K2 under the config of K2.5": (
        lambda target: rename_tensors(target, lambda name: name.removeprefix("language_model.")),
        "config.json says KimiK25ForConditionalGeneration, the weights are named model.*",
    ),
    "weights of K2.5 under the config of K2": (unwrap, "config.json says DeepseekV3ForCausalLM, the weights are named lang"),
    "a layer that is missing": (
        lambda target: rename_tensors(target, lambda name: None if ".layers.60." in name else name),
        "with 61 layers, the weights lack layer 60",
    ),
    "a layer too many": (
        lambda target: rename_tensors(target, lambda name: name.replace(".layers.60.", ".layers.61.")),
        "the weights lack layer 60",
    ),
    "other experts": (lambda target: edit_text(target, n_routed_experts=8), "with 8 experts, the weights of layer 1 have 6"),
}


@pytest.mark.parametrize("name", WRONG_NAMES)
def test_names_that_do_not_fit_the_config_are_one_line(kimi, tmp_path, name):
    change, words = WRONG_NAMES[name]
    change(kimi)
    with pytest.raises(StageError) as error:
        extract_target_head.run(kimi, tmp_path / "head.safetensors")
    assert words in str(error.value) and kimi.path in str(error.value) and "fetch the target again" in str(error.value)
    assert "\n" not in str(error.value)
    assert_red(line(target_lines(config_for(kimi))[1], "names"), words)


@pytest.mark.parametrize(
    ("gone", "words"),
    [
        (r"layers\.5\.mlp\.", "the weights of layer 5 have 0"),
        (r"layers\.39\..*\.experts\.", "the weights of layer 39 have 0"),
        (r"experts\.3\.", "the weights of layer 1 have 5"),
    ],
)
def test_experts_that_are_missing_anywhere_are_named(kimi, tmp_path, gone, words):
    def drop(index):
        index["weight_map"] = {name: file for name, file in index["weight_map"].items() if not re.search(gone, name)}

    edit_json(Path(kimi.path) / INDEX, drop)
    with pytest.raises(StageError, match=words):
        extract_target_head.run(kimi, tmp_path / "head.safetensors")


def test_a_missing_head_is_no_tied_one(kimi, tmp_path):
    edit_json(Path(kimi.path) / INDEX, lambda index: index["weight_map"].pop("language_model.lm_head.weight"))
    edit_json(Path(kimi.path) / "config.json", lambda config: config.pop("tie_word_embeddings", None))
    edit_text(kimi, tie_word_embeddings=None)
    with pytest.raises(StageError, match=r"no tensor lm_head.weight or language_model.lm_head.weight"):
        extract_target_head.run(kimi, tmp_path / "head.safetensors")


def test_extra_layer_of_the_config_is_no_fault(kimi, tmp_path):
    # DeepSeek-V3 stores its multi-token prediction as one more layer
    edit_text(kimi, num_nextn_predict_layers=1)
    edit_json(
        Path(kimi.path) / INDEX,
        lambda index: index["weight_map"].update({"language_model.model.layers.61.eh_proj.weight": shard(64)}),
    )
    extract_target_head.run(kimi, tmp_path / "head.safetensors")


def test_shard_that_is_missing_is_named_before_the_engine_is_built(kimi):
    for number in (7, 9):
        (Path(kimi.path) / shard(number)).unlink()
    with pytest.raises(StageError, match=f"2 of 64 weight files are missing, e.g. {shard(7)}"):
        load_engine(kimi, Hardware(), max_model_len=64, eager=True)


def test_shard_that_is_cut_off_is_named_before_the_engine_is_built(tiny_llama, tmp_path):
    cut = copy_target(tiny_llama, tmp_path / "cut")
    path = Path(cut.path) / "model.safetensors"
    with open(path, "r+b") as file:
        file.truncate(path.stat().st_size - 5)
    with pytest.raises(StageError, match=r"model.safetensors is cut off: \d+ bytes, its header says"):
        load_engine(cut, Hardware(), max_model_len=64, eager=True)


def test_weights_of_another_model_are_named_before_the_engine_is_built(tiny_llama, tmp_path):
    other = copy_target(tiny_llama, tmp_path / "other")
    edit_json(Path(other.path) / "config.json", lambda config: config.update(model_type="kimi_k25", text_config=dict(config)))
    with pytest.raises(StageError, match=r"named model\.\*, not language_model\.\*: Kimi-K2"):
        load_engine(other, Hardware(), max_model_len=64, eager=True)


def test_shard_of_a_wanted_tensor_that_is_missing_is_named(kimi, tmp_path):
    (Path(kimi.path) / shard(62)).unlink()
    with pytest.raises(StageError, match=f"{shard(62)}: no such file; the target is not whole"):
        extract_target_head.run(kimi, tmp_path / "head.safetensors")


def test_wanted_tensor_that_is_not_where_the_index_says_is_named(kimi, tmp_path):
    edit_json(Path(kimi.path) / INDEX, lambda index: index["weight_map"].update({"language_model.lm_head.weight": shard(2)}))
    with pytest.raises(StageError, match=rf"{shard(2)}: no tensor language_model.lm_head.weight, though"):
        extract_target_head.run(kimi, tmp_path / "head.safetensors")


def test_damaged_shard_of_a_wanted_tensor_is_named(kimi, tmp_path):
    edit_json(Path(kimi.path) / INDEX, lambda index: index["weight_map"].update({"language_model.lm_head.weight": shard(3)}))
    with pytest.raises(StageError, match=f"{shard(3)}: not a readable safetensors file"):
        extract_target_head.run(kimi, tmp_path / "head.safetensors")
