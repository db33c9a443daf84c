"""Hidden-state shards: rows come back as written, equal rows give equal bytes, damage and foreign shards are refused."""

import os
import random
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.eagle3.errors import StageError
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import Shard, StateRow, write_shard

LAYERS = [2, 4, 8]
PROVENANCE = {"target": {"weights": "w1"}, "dtype": "bfloat16"}


def make_rows(dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> list[StateRow]:
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    rows = []
    for length in (3, 17, 2, 40):
        ids = torch.tensor([numbers.randrange(500) for _ in range(length)], dtype=torch.int32)
        mask = torch.tensor([numbers.random() < 0.5 for _ in range(length)])
        states = torch.randn(length, len(LAYERS), 16, generator=generator).to(dtype)
        rows.append(StateRow(row_key(ids.numpy()), ids, mask, states))
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_come_back_as_written(tmp_path: Path, dtype: torch.dtype) -> None:
    rows = make_rows(dtype)
    write_shard(tmp_path / "shard-0.pt", rows, LAYERS, PROVENANCE)
    shard = Shard(tmp_path / "shard-0.pt", PROVENANCE, LAYERS)
    assert (len(shard), shard.lengths(), shard.layer_ids) == (4, [3, 17, 2, 40], LAYERS)
    for row, found in zip(rows, shard, strict=True):
        assert found.key == row.key and found.hidden_states.dtype == dtype
        for name in ("token_ids", "loss_mask", "hidden_states"):
            assert torch.equal(getattr(found, name), getattr(row, name))


def test_torch_alone_reads_the_documented_layout(tmp_path: Path) -> None:
    rows = make_rows()
    write_shard(tmp_path / "shard-0.pt", rows, LAYERS, PROVENANCE)
    content = torch.load(tmp_path / "shard-0.pt", mmap=True, weights_only=True)
    assert content["hidden_states"].shape == (62, 3, 16)
    assert content["token_ids"].dtype == torch.int32 and content["loss_mask"].dtype == torch.bool
    assert content["row_offsets"].tolist() == [0, 3, 20, 22, 62]
    assert content["row_keys"] == [row.key for row in rows]


def test_equal_rows_give_equal_bytes(tmp_path: Path) -> None:
    for folder in ("a", "b"):
        write_shard(tmp_path / folder / "shard-0.pt", make_rows(), LAYERS, PROVENANCE)
    assert (tmp_path / "a/shard-0.pt").read_bytes() == (tmp_path / "b/shard-0.pt").read_bytes()


@pytest.mark.parametrize("fraction", [0.0, 0.3, 0.6, 0.999])
def test_truncated_shard_is_refused_in_one_line(tmp_path: Path, fraction: float) -> None:
    path = tmp_path / "shard-0.pt"
    write_shard(path, make_rows(), LAYERS, PROVENANCE)
    os.truncate(path, int(path.stat().st_size * fraction))
    with pytest.raises(StageError, match=r"shard-0\.pt: not a readable shard, cut short or damaged") as refused:
        Shard(path)
    assert "\n" not in str(refused.value)


def test_flipped_byte_is_refused_when_its_row_is_read(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.pt"
    rows = make_rows()
    write_shard(path, rows, LAYERS, PROVENANCE)
    content = bytearray(path.read_bytes())
    where = content.index(rows[1].hidden_states.view(torch.uint8).numpy().tobytes())
    content[where + 5] ^= 1
    path.write_bytes(content)
    shard = Shard(path)
    assert torch.equal(shard.row(0).hidden_states, rows[0].hidden_states)
    with pytest.raises(StageError, match=r"row 1 .* is damaged: checksum differs"):
        shard.row(1)


def test_shard_of_another_target_or_other_layers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "shard-0.pt"
    write_shard(path, make_rows(), LAYERS, PROVENANCE)
    with pytest.raises(StageError, match=r"target\.weights is w1, expected w2"):
        Shard(path, {"target": {"weights": "w2"}, "dtype": "bfloat16"})
    with pytest.raises(StageError, match=r"layer_ids: expected \[2, 5, 8\], found \[2, 4, 8\]"):
        Shard(path, layer_ids=[2, 5, 8])


def test_missing_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StageError, match="no such file"):
        Shard(tmp_path / "shard-0.pt")
    torch.save({"hidden_states": torch.zeros(1)}, tmp_path / "shard-1.pt")
    with pytest.raises(StageError, match="token_ids is missing"):
        Shard(tmp_path / "shard-1.pt")
    with pytest.raises(StageError, match="no rows for this shard"):
        write_shard(tmp_path / "shard-2.pt", [], LAYERS, PROVENANCE)


def test_full_disk_is_one_line_and_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import sys; from tests.unit.test_shards import *\n"
        "try: write_shard(Path(sys.argv[1]), make_rows(), LAYERS, PROVENANCE)\n"
        "except StageError as error: print(error)"
    )
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))  # noqa: E731
    command = [sys.executable, "-c", code, str(tmp_path / "shard-0.pt")]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit)
    assert f"{tmp_path / 'shard-0.pt'}: cannot write" in done.stdout and done.stdout.count("\n") == 1, done.stderr
    assert list(tmp_path.iterdir()) == []
