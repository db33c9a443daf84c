"""Rows whose states are not finite: rejected one by one with key and layer, whatever else the part holds; the sum closes.

The numbers really overflow: two tokens of a checkpoint are planted, one whose embedding is NaN and one that the fourth layer
drives to infinity. All other tokens compute what they compute without the plants.
"""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.rows import TOKENS, row_key, write_rows
from scripts.eagle3.shards import Shard, StateRow
from scripts.eagle3.target import fingerprint
from scripts.extract_hidden_states import main
from tests.capture_case import relative_error

NAN_TOKEN, INF_TOKEN = 1001, 1002
DEADLINE_S = 180
Row = dict[str, Any]


def planted(tiny_llama: Target, folder: Path, plants: bool = True) -> Target:
    """A copy of tiny-llama in which channel 0 belongs to INF_TOKEN alone: no layer writes it, one multiplies it."""
    shutil.copytree(tiny_llama.path, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    embedding[:, 0] = 0
    for layer in range(8):
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"][0] = 0
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"][0] = 0
    for name in ("gate_proj", "up_proj"):
        tensors[f"model.layers.3.mlp.{name}.weight"][0] = 0
    if plants:
        embedding[NAN_TOKEN] = float("nan")
        embedding[INF_TOKEN, 0] = 1
        for name in ("gate_proj", "up_proj"):
            tensors[f"model.layers.3.mlp.{name}.weight"][0, 0] = 1e20  # their product leaves float32's range
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tiny_llama.model_copy(update={"path": str(folder)})


def make_row(numbers: random.Random, length: int, planted: int | None = None) -> Row:
    ids = [numbers.randrange(1000) for _ in range(length)]
    if planted is not None:
        ids[numbers.randrange(length)] = planted
    identity = {"row_key": row_key(ids), "conversation_id": f"c{numbers.random()}", "source": "test", "split": "train"}
    return {**identity, "input_ids": ids, "loss_mask": [True] * length}


class Extraction:
    """A part's folders, and the stage over them."""

    def __init__(self, folder: Path, target: Target, shards: list[list[Row]]) -> None:
        self.folder, self.target, self.shards = folder, target, shards
        for number, rows in enumerate(shards):
            path = folder / f"tokens/part-0/shard-{number}.parquet"
            write_rows(path, rows, TOKENS, {"target": fingerprint(target)}, {})

    def arguments(self, max_rejected_fraction: float) -> list[str]:
        options = {
            "--target": self.target.model_dump_json(),
            "--tokens": self.folder / "tokens/part-0",
            "--shards": len(self.shards),
            "--store": self.folder / "store",
            "--output": self.folder / "hidden/part-0",
            "--batch-tokens": 256,
            "--max-num-seqs": 8,
            "--kv-cache-gb": 1,
            "--max-rejected-fraction": max_rejected_fraction,
        }
        return [str(word) for pair in options.items() for word in pair]

    def run(self, max_rejected_fraction: float = 0.001) -> None:
        main(self.arguments(max_rejected_fraction))

    def without_engine(self, max_rejected_fraction: float = 0.001) -> str:
        """Runs the stage in a process of its own and asserts that vLLM was not even imported; returns its errors."""
        code = (
            "import atexit, sys; from scripts.extract_hidden_states import main; from scripts.eagle3.stage import run_stage; "
            "atexit.register(lambda: print('engine:', 'vllm' in sys.modules)); run_stage(main)"
        )
        command = [sys.executable, "-c", code, *self.arguments(max_rejected_fraction)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert "engine: False" in done.stdout, done.stderr
        return done.stderr

    def ledger(self) -> dict[str, Any]:
        (path,) = self.folder.glob("store/extract_hidden_states/*/part-0/rejected.jsonl")
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return {line["key"]: line["record"] for line in lines}

    def finished_rows(self) -> dict[str, StateRow]:
        """What the store holds, by row key."""
        paths = sorted(self.folder.glob("store/extract_hidden_states/*/part-0/*/*.pt"))
        shards = [Shard(path) for path in paths]
        return {shard.row_keys[i]: shard.row(i) for shard in shards for i in range(len(shard)) if shard.written(i)}

    def manifest(self) -> dict[str, Any]:
        return json.loads((self.folder / "hidden/part-0/manifest.json").read_text())


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    """Sixty rows of mixed lengths; the planted ones are among the longest and the shortest."""
    numbers = random.Random(0)
    found = [make_row(numbers, numbers.choice([2, 5, 30, 90, 150])) for _ in range(57)]
    found.insert(5, make_row(numbers, 200, NAN_TOKEN))
    found.insert(20, make_row(numbers, 160, INF_TOKEN))
    found.insert(21, make_row(numbers, 3, INF_TOKEN))
    return found


@pytest.fixture(scope="module")
def expected(rows: list[Row]) -> dict[str, dict[str, Any]]:
    """The ledger: the first captured state that is not finite. States 2, 4, 5 and 8 are captured."""
    layers = {5: 2, 20: 4, 21: 4}
    return {rows[index]["row_key"]: {"layer": layer, "reason": "not finite"} for index, layer in layers.items()}


@pytest.fixture(scope="module")
def failed(tiny_llama: Target, rows: list[Row], tmp_path_factory: pytest.TempPathFactory) -> tuple[Extraction, str]:
    """A part in which more rows overflow than may be, and how it ended."""
    folder = tmp_path_factory.mktemp("planted")
    part = Extraction(folder, planted(tiny_llama, folder / "target"), [rows[:30], rows[30:]])
    with pytest.raises(StageError) as error:
        part.run()
    return part, str(error.value)


def test_overflowing_rows_are_in_the_ledger_with_key_and_layer(
    failed: tuple[Extraction, str], rows: list[Row], expected: dict[str, dict[str, Any]]
) -> None:
    part, message = failed
    assert part.ledger() == expected
    assert message.startswith("3 of 60 rows were rejected, at most 0.10% may be; first: row ")
    assert f"row {rows[5]['row_key']}, state 2 is not finite" in message


def test_all_other_rows_are_finished_before_the_part_fails(
    failed: tuple[Extraction, str], rows: list[Row], expected: dict[str, dict[str, Any]]
) -> None:
    part, _ = failed
    assert not (part.folder / "hidden").exists()
    assert set(part.finished_rows()) | set(expected) == {row["row_key"] for row in rows}
    assert not set(part.finished_rows()) & set(expected)


def test_overflow_in_one_row_changes_no_other(
    failed: tuple[Extraction, str],
    rows: list[Row],
    expected: dict[str, Any],
    tiny_llama: Target,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    healthy = [row for row in rows if row["row_key"] not in expected]
    twin = Extraction(tmp_path, planted(tiny_llama, tmp_path / "target", plants=False), [healthy])
    twin.run()
    found, undisturbed = failed[0].finished_rows(), twin.finished_rows()
    assert found.keys() == undisturbed.keys()
    for key, row in found.items():
        assert relative_error(row.hidden_states, undisturbed[key].hidden_states).max() < 0.005
    assert "extract_hidden_states: alignment proof: the engine's token on " in capfd.readouterr().err
    assert twin.manifest()["proof"]["row_tokens"] == [150, 150, 150, 128]


def test_a_retry_computes_nothing_and_a_higher_limit_delivers_what_is_there(
    failed: tuple[Extraction, str], rows: list[Row], expected: dict[str, dict[str, Any]]
) -> None:
    part, message = failed
    assert message in part.without_engine()
    part.without_engine(max_rejected_fraction=0.05)
    manifest = part.manifest()
    assert manifest["rejected"] == [{"row_key": key, **record} for key, record in expected.items()]
    assert [(entry["rows_in"], entry["rows"]) for entry in manifest["shards"]] == [(30, 27), (30, 30)]
    delivered = [Shard(part.folder / "hidden/part-0" / entry["file"]) for entry in manifest["shards"]]
    keys = [key for shard in delivered for key in shard.row_keys]
    assert keys == [row["row_key"] for row in rows if row["row_key"] not in expected]
    assert all(torch.isfinite(row.hidden_states).all() for shard in delivered for row in shard)


def test_a_shard_whose_rows_all_overflow_fails_after_the_other_shards(tiny_llama: Target, tmp_path: Path) -> None:
    numbers = random.Random(1)
    bad = [make_row(numbers, 20, NAN_TOKEN) for _ in range(4)]
    good = [[make_row(numbers, 20 + index) for index in range(30)] for _ in range(2)]
    part = Extraction(tmp_path, planted(tiny_llama, tmp_path / "target"), [good[0], bad, good[1]])
    with pytest.raises(StageError, match=r"rejected.jsonl: holds every row of shard 1"):
        part.run(max_rejected_fraction=0.5)
    assert set(part.ledger()) == {row["row_key"] for row in bad}
    assert set(part.finished_rows()) == {row["row_key"] for rows in good for row in rows}
    assert "rejected.jsonl: holds every row of shard 1; mend the target or its dtype" in part.without_engine(0.5)


def test_a_target_that_overflows_on_every_row_is_refused_by_the_proof(tiny_llama: Target, tmp_path: Path) -> None:
    numbers = random.Random(2)
    bad = [make_row(numbers, 10 + index, NAN_TOKEN) for index in range(9)]  # more than the proof takes at once
    part = Extraction(tmp_path, planted(tiny_llama, tmp_path / "target"), [bad])
    with pytest.raises(StageError, match=r"state 2 of row \w+ is not finite; the engine's numbers overflow"):
        part.run(max_rejected_fraction=1.0)
    assert part.ledger() == {} and part.finished_rows() == {}
