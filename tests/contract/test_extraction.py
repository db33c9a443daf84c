"""The extraction stage on tiny-llama with a real engine: killed and resumed, dealt anew, damaged, refused."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts.eagle3.batches import TOGETHER
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.packing import TrainingRows, open_shards
from scripts.eagle3.rows import TOKENS, row_key, write_rows
from scripts.eagle3.shards import Shard
from scripts.eagle3.target import fingerprint
from scripts.extract_hidden_states import main
from scripts.train_draft import check_listed

ROWS_PER_SHARD = 40
DEADLINE_S = 180
LAYERS = [2, 4, 5, 8]


def make_token_rows(seed: int) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    rows = []
    for index in range(ROWS_PER_SHARD):
        ids = [numbers.randrange(1000) for _ in range(numbers.choice([2, 5, 30, 90, 150]))]
        mask = [numbers.random() < 0.5 for _ in ids]
        identity = {"row_key": row_key(ids), "conversation_id": f"c{seed}-{index}", "source": "test", "split": "train"}
        rows.append({**identity, "input_ids": ids, "loss_mask": mask})
    return rows


def write_tokens(folder: Path, target: Target, shards: list[list[dict[str, Any]]]) -> None:
    for number, rows in enumerate(shards):
        write_rows(folder / f"shard-{number}.parquet", rows, TOKENS, {"target": fingerprint(target)}, {})


class Run:
    """A run's folders, and its stage started as the workflow starts it."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.folder, self.target = folder, target

    def arguments(self, part: str = "part-0", shards: int = 2, **changes: Any) -> list[str]:
        options = {
            "--target": self.target.model_dump_json(),
            "--tokens": self.folder / "tokens" / part,
            "--shards": shards,
            "--store": self.folder / "store",
            "--output": self.folder / "hidden" / part,
            "--batch-tokens": 256,
            "--max-num-seqs": 8,
            "--kv-cache-gb": 1,
        } | {"--" + key.replace("_", "-"): value for key, value in changes.items()}
        return [str(word) for pair in options.items() for word in pair]

    def start(self, part: str = "part-0", shards: int = 2) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "scripts.extract_hidden_states", *self.arguments(part, shards)]
        return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)

    def finish(self, part: str = "part-0", shards: int = 2) -> str:
        process = self.start(part, shards)
        _, errors = process.communicate(timeout=DEADLINE_S)
        assert process.returncode == 0, errors
        return errors

    def without_engine(self, part: str = "part-0", shards: int = 2) -> str:
        """Runs the stage and asserts that vLLM was not even imported."""
        code = (
            "import sys; from scripts.extract_hidden_states import main; main(sys.argv[1:]); assert 'vllm' not in sys.modules"
        )
        command = [sys.executable, "-c", code, *self.arguments(part, shards)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def files(self, part: str = "part-0") -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "hidden" / part).iterdir())}

    def rows_written(self, part: str = "part-0") -> int:
        """Rows whose states the part's store has."""
        files = [*self.stored(f"{part}/growing/*.pt"), *self.stored(f"{part}/shards/*.pt")]
        return sum(shard.written(index) for shard in map(Shard, files) for index in range(len(shard)))

    def stored(self, pattern: str) -> list[Path]:
        return sorted((self.folder / "store").glob(f"extract_hidden_states/*/{pattern}"))


def spoil(path: Path, states: Any) -> None:
    """Flips one bit of the file, in the middle of these states."""
    content = path.read_bytes()
    found = content.index(states.contiguous().view(torch.uint8).numpy().tobytes())
    with open(path, "r+b") as file:
        file.seek(found + states.nbytes // 2)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.fixture(scope="module")
def finished(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """An undisturbed run of one part of two shards."""
    run = Run(tmp_path_factory.mktemp("finished"), tiny_llama)
    write_tokens(run.folder / "tokens/part-0", tiny_llama, [make_token_rows(1), make_token_rows(2)])
    run.finish()
    return run


def test_every_row_is_there_in_the_order_of_the_token_shard(finished: Run) -> None:
    manifest = json.loads(finished.files()["manifest.json"])
    for number, seed in enumerate((1, 2)):
        rows = make_token_rows(seed)
        shard = Shard(finished.folder / f"hidden/part-0/shard-{number}.pt", manifest["provenance"], LAYERS)
        assert shard.row_keys == [row["row_key"] for row in rows]
        for found, row in zip(shard, rows, strict=True):
            assert found.token_ids.tolist() == row["input_ids"] and found.loss_mask.tolist() == row["loss_mask"]
        entry = manifest["shards"][number]
        assert entry["rows"] == entry["rows_in"] == ROWS_PER_SHARD
        assert entry["tokens"] == sum(len(row["input_ids"]) for row in rows)
    assert manifest["rejected"] == [] and manifest["proof"]["argmax_agreement"] >= 0.98
    assert finished.stored("part-0/growing/*.pt") == []


def test_killed_extraction_resumes_without_recomputing_to_the_same_bytes(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, finished.target)
    write_tokens(tmp_path / "tokens/part-0", finished.target, [make_token_rows(1), make_token_rows(2)])
    process = run.start()
    deadline = time.monotonic() + DEADLINE_S
    while run.rows_written() < 12:  # of the first shard
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "hidden").exists()
    kept = run.rows_written()
    growing = run.stored("part-0/growing/*.pt")[0]
    shard = Shard(growing)
    damaged = next(index for index in range(len(shard)) if shard.written(index))
    spoil(growing, shard.row(damaged).hidden_states)
    errors = run.finish()
    assert f"{growing}: row {damaged} ({shard.row_keys[damaged]}) is damaged" in errors
    assert f"{kept - 1}/{2 * ROWS_PER_SHARD} rows were finished by an earlier run" in errors
    assert run.files() == finished.files()


def test_rows_that_stand_in_several_shards_are_in_each_of_them(tiny_llama: Target, tmp_path: Path) -> None:
    run, rows = Run(tmp_path, tiny_llama), [make_token_rows(seed)[:6] for seed in range(TOGETHER)]
    # one in the same group, one in the next, and a shard of the next group that has nothing of its own
    shards = [rows[0], [*rows[1], rows[0][1]], *rows[2:], [rows[0][0], *make_token_rows(9)[:3]], rows[0][2:4]]
    write_tokens(run.folder / "tokens/part-0", tiny_llama, shards)
    run.finish(shards=len(shards))
    for number, expected in enumerate(shards):
        shard = Shard(run.folder / f"hidden/part-0/shard-{number}.pt")
        assert [row.key for row in shard] == [row["row_key"] for row in expected]


def test_finished_part_starts_no_engine_and_makes_lost_outputs_again(finished: Run) -> None:
    before = finished.files()
    for path in (finished.folder / "hidden/part-0").iterdir():
        path.unlink()
    finished.without_engine()
    assert finished.files() == before


def test_rows_dealt_to_other_parts_are_taken_from_the_store(finished: Run) -> None:
    # one part of one shard: the second shard's rows in another order, and some of the first's
    rows = [*reversed(make_token_rows(2)), *make_token_rows(1)[:7]]
    write_tokens(finished.folder / "tokens/part-1", finished.target, [rows])
    finished.without_engine("part-1", shards=1)
    shard = Shard(finished.folder / "hidden/part-1/shard-0.pt")
    assert shard.row_keys == [row["row_key"] for row in rows]
    original = {
        row.key: row.crc32() for number in (0, 1) for row in Shard(finished.folder / f"hidden/part-0/shard-{number}.pt")
    }
    assert all(row.crc32() == original[row.key] for row in shard)


def test_new_rows_alone_are_computed(finished: Run) -> None:
    new = make_token_rows(3)[:5]
    write_tokens(finished.folder / "tokens/part-2", finished.target, [[*make_token_rows(1), *new]])
    errors = finished.finish("part-2", shards=1)
    assert f"{ROWS_PER_SHARD}/{ROWS_PER_SHARD + 5} rows were finished by an earlier run" in errors


def test_a_flipped_byte_in_a_finished_shard_is_noticed_and_remade(finished: Run) -> None:
    before = finished.files()
    output = finished.folder / "hidden/part-0/shard-1.pt"
    spoil(output, Shard(output).row(3).hidden_states)
    with pytest.raises(StageError, match="checksum differs; delete this shard and remake it"):
        list(Shard(output))
    # part-1 still has these rows: no engine is needed to remake it
    errors = finished.without_engine()
    assert "row 3 " in errors and "is damaged: checksum differs" in errors
    assert finished.files() == before


def test_training_refuses_a_shard_that_the_manifest_does_not_list(finished: Run, tmp_path: Path) -> None:
    folder = tmp_path / "part-0"
    shutil.copytree(finished.folder / "hidden/part-0", folder)
    check_listed([Shard(folder / "shard-0.pt"), Shard(folder / "shard-1.pt")])
    shutil.copy(folder / "shard-1.pt", folder / "shard-0.pt")
    with pytest.raises(StageError, match=r"shard-0\.pt: digest: expected .*, found .*; .*manifest\.json lists another"):
        check_listed([Shard(folder / "shard-0.pt"), Shard(folder / "shard-1.pt")])


def test_a_second_job_on_the_same_part_is_refused(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, finished.target)
    write_tokens(tmp_path / "tokens/part-0", finished.target, [make_token_rows(1), make_token_rows(2)])
    process = run.start()
    deadline = time.monotonic() + DEADLINE_S
    while not run.stored("part-0/lock") or not run.stored("part-0/lock")[0].read_text():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.005)
    with pytest.raises(StageError, match=rf"held by another job \(pid {process.pid} "):
        main(run.arguments())
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_states_in_float8_take_half_the_room_and_are_read_as_bfloat16(finished: Run, tmp_path: Path) -> None:
    run = Run(tmp_path, finished.target)
    write_tokens(tmp_path / "tokens/part-0", finished.target, [make_token_rows(1)])
    main(run.arguments(shards=1, dtype="fp8"))
    small, whole = tmp_path / "hidden/part-0/shard-0.pt", finished.folder / "hidden/part-0/shard-0.pt"
    assert small.stat().st_size < 0.56 * whole.stat().st_size
    rows = TrainingRows(open_shards([small], LAYERS), ttt_steps=2, batch_tokens=200)
    assert len(rows) > 20
    for number in range(len(rows)):
        found = rows.row(number)
        expected = next(row for row in Shard(whole) if row.key == found.key).hidden_states[: len(found.token_ids)]
        assert found.hidden_states.dtype == torch.bfloat16
        # three bits of mantissa; half a step of the smallest numbers beside the largest of the token and layer
        largest = expected.float().abs().amax(dim=-1, keepdim=True)
        error = (found.hidden_states.float() - expected.float()).abs()
        assert (error <= expected.float().abs() / 14 + largest / 448 / 512).all()
    # bytes and scales are part of a row's checksum
    spoil(small, Shard(small).stored_row(3).scales)
    with pytest.raises(StageError, match=r"row 3 .* is damaged"):
        Shard(small).row(3)


def test_tokens_of_another_tokenizer_are_refused(finished: Run, tmp_path: Path) -> None:
    origin = {"target": {**fingerprint(finished.target), "tokenizer": "another"}}
    write_rows(tmp_path / "tokens/part-0/shard-0.parquet", make_token_rows(1), TOKENS, origin, {})
    with pytest.raises(StageError, match=r"shard-0.parquet: target\.tokenizer is another, expected"):
        main(Run(tmp_path, finished.target).arguments(shards=1))


def test_other_layer_ids_are_refused_by_readers(finished: Run) -> None:
    with pytest.raises(StageError, match=r"layer_ids: expected \[2, 4, 6, 8\], found \[2, 4, 5, 8\]"):
        Shard(finished.folder / "hidden/part-0/shard-0.pt", layer_ids=[2, 4, 6, 8])


def test_a_small_disk_is_refused_before_any_engine(finished: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tokens(tmp_path / "tokens/part-0", finished.target, [make_token_rows(4)])
    monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1_000_000}))
    with pytest.raises(StageError, match=r"extraction of part-0 needs 0\.00 GB, 0\.00 GB are free"):
        main(Run(tmp_path, finished.target).arguments(shards=1))


def test_rejected_rows_are_in_the_ledger_or_fail_the_part(finished: Run) -> None:
    rows = make_token_rows(1)[:3]
    write_tokens(finished.folder / "tokens/part-9", finished.target, [rows])
    finished.without_engine("part-9", shards=1)  # makes the part's store
    ledger = finished.stored("part-9/rejected.jsonl")[0]
    from scripts.eagle3.store import RecordStore

    RecordStore(ledger).put(rows[1]["row_key"], {"layer": 4, "reason": "not finite"})
    with pytest.raises(
        StageError, match=r"1 of 3 rows were rejected, at most 0\.10% may be; first: row .*, state 4 is not finite"
    ):
        main(finished.arguments("part-9", shards=1))
    main(finished.arguments("part-9", shards=1, max_rejected_fraction=0.5))
    manifest = json.loads(finished.files("part-9")["manifest.json"])
    assert manifest["rejected"] == [{"row_key": rows[1]["row_key"], "layer": 4, "reason": "not finite"}]
    assert (manifest["shards"][0]["rows"], manifest["shards"][0]["rows_in"]) == (2, 3)
