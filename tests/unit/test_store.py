"""The store: one holder at a time, records that survive a kill, other parts' work visible."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.eagle3.errors import StageError
from scripts.eagle3.store import RecordStore, open_store

PROVENANCE = {"target": "t", "dtype": "bfloat16"}


def test_records_are_there_when_the_store_is_opened_again(tmp_path: Path) -> None:
    with open_store(tmp_path, "stage", PROVENANCE) as store:
        store.records("answers").put("a", {"ids": [1, 2]})
        store.records("other").put("a", "ü")
    with open_store(tmp_path, "stage", PROVENANCE) as store:
        assert store.records("answers").get("a") == {"ids": [1, 2]}
        assert store.records("other").get("a") == "ü"
        assert store.records("answers").get("b") is None


def test_other_provenance_is_another_store(tmp_path: Path) -> None:
    with open_store(tmp_path, "stage", PROVENANCE) as store:
        store.records("answers").put("a", 1)
    with open_store(tmp_path, "stage", {**PROVENANCE, "dtype": "float32"}) as store:
        assert "a" not in store.records("answers")


def test_other_parts_records_are_read_and_never_written(tmp_path: Path) -> None:
    with open_store(tmp_path, "stage", PROVENANCE, part="part-0") as store:
        store.records("answers").put("a", 1)
    with open_store(tmp_path, "stage", PROVENANCE, part="part-1") as store:
        records = store.records("answers")
        assert records.get("a") == 1
        records.put("b", 2)
        assert [folder.name for folder in store.others()] == ["part-0"]
    assert "b" not in RecordStore(tmp_path / "stage" / store.folder.parent.name / "part-0" / "answers.jsonl")


def test_torn_last_line_is_cut_off_and_the_next_record_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    records = RecordStore(path)
    records.put("a", 1)
    records.put("b", [2] * 50)
    os.truncate(path, path.stat().st_size - 20)
    records = RecordStore(path)
    assert records.get("a") == 1 and "b" not in records
    records.put("c", 3)
    again = RecordStore(path)
    assert (again.get("a"), again.get("b"), again.get("c")) == (1, None, 3)


def test_flipped_record_is_dropped_with_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "answers.jsonl"
    records = RecordStore(path)
    for key in ("a", "b", "c"):
        records.put(key, [7, 7, 7])
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(lines[0] + lines[1].replace(b"[7, 7, 7]", b"[7, 9, 7]") + lines[2])
    records = RecordStore(path)
    assert ("a" in records, "b" in records, "c" in records) == (True, False, True)
    assert "1 damaged records are dropped" in capsys.readouterr().err


HOLDER = """
import sys, time
from pathlib import Path
from scripts.eagle3.store import open_store
with open_store(Path(sys.argv[1]), "stage", {"target": "t", "dtype": "bfloat16"}) as store:
    store.records("answers").put("a", 1)
    (store.folder / ".unfinished-x").mkdir()
    print("ready", flush=True)
    time.sleep(600)
"""


def test_second_holder_is_refused_and_a_killed_one_lets_go(tmp_path: Path) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert holder.stdout is not None and holder.stdout.readline() == "ready\n"
    with (
        pytest.raises(StageError, match=rf"held by another job \(pid {holder.pid} on "),
        open_store(tmp_path, "stage", PROVENANCE),
    ):
        pass
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
    with open_store(tmp_path, "stage", PROVENANCE) as store:
        assert store.records("answers").get("a") == 1
        assert not (store.folder / ".unfinished-x").exists()


def test_attempts_are_recorded_with_their_end(tmp_path: Path) -> None:
    with pytest.raises(StageError), open_store(tmp_path, "stage", PROVENANCE) as store:
        raise StageError("no room")
    attempts = [json.loads(line) for line in (store.folder / "attempts.jsonl").read_text().splitlines()]
    assert [attempt.get("outcome") for attempt in attempts] == [None, "StageError: no room"]


def test_delivered_file_is_a_hard_link_and_replaces_what_was_there(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", "stage", PROVENANCE) as store:
        finished, output = store.folder / "x.pt", tmp_path / "out" / "shard-0.pt"
        finished.write_bytes(b"states")
        output.parent.mkdir()
        output.write_bytes(b"old")
        os.link(finished, output.parent / ".unfinished-1-shard-0.pt")  # of a job that was killed in between
        store.deliver(finished, output)
        store.deliver(finished, output)  # again, onto the same file
    assert list(output.parent.iterdir()) == [output]
    assert output.samefile(finished) and not output.is_symlink()
    finished.unlink()
    assert output.read_bytes() == b"states"


def test_delivery_leaves_the_time_of_a_file_that_a_copied_run_has_too(tmp_path: Path) -> None:
    with open_store(tmp_path / "store", "stage", PROVENANCE) as store:
        finished, output, copy = store.folder / "x.pt", tmp_path / "out/shard-0.pt", tmp_path / "copy/shard-0.pt"
        finished.write_bytes(b"states")
        store.deliver(finished, output)
        copy.parent.mkdir()
        os.link(output, copy)  # cp -al
        os.utime(copy, (1, 1))
        output.unlink()  # Snakemake, before it runs a job
        store.deliver(finished, output)
        os.utime(output, follow_symlinks=False)  # Snakemake, after it has run a job
    assert copy.stat().st_mtime == 1 < output.lstat().st_mtime
    assert output.read_bytes() == b"states"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"layer_ids": [2, 4, 6, 8]}, "layer_ids is [2, 4, 6, 8], was [2, 4, 5, 8]"),
        ({"target": {"revision": "b", "chat_template": "c"}}, "target.revision is b, was a"),
        ({"target": {"revision": "a", "chat_template": "d"}}, "target.chat_template is d, was c"),
        ({"dtype": "fp8", "new": 1}, "dtype is fp8, was bfloat16; new is 1, was nothing"),
    ],
)
def test_a_part_that_is_made_anew_says_which_fields_differ(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, Any], said: str
) -> None:
    made_from = {"target": {"revision": "a", "chat_template": "c"}, "layer_ids": [2, 4, 5, 8], "dtype": "bfloat16"}
    with open_store(tmp_path, "stage", made_from, part="part-0") as before:
        pass
    for part in ("part-0", "part-0", "part-1"):
        with open_store(tmp_path, "stage", {**made_from, **change}, part=part):
            pass
    assert capsys.readouterr().err == f"stage: nothing is reused of {before.folder}: {said}\n"


def test_delivery_to_another_disk_is_a_symbolic_link(tmp_path: Path) -> None:
    memory = Path("/dev/shm")
    if not memory.is_dir() or memory.stat().st_dev == tmp_path.stat().st_dev:
        pytest.skip("needs a second file system")
    with open_store(tmp_path / "store", "stage", PROVENANCE) as store:
        finished, output = store.folder / "x.pt", memory / f"deliver-{os.getpid()}" / "shard-0.pt"
        finished.write_bytes(b"states")
        try:
            store.deliver(finished, output)
            assert output.is_symlink() and output.read_bytes() == b"states"
        finally:
            output.unlink(missing_ok=True)
            output.parent.rmdir()
