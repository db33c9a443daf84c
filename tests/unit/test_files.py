"""Files are whole or absent, and what cannot be read or written is named."""

import os
from pathlib import Path

import pytest

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import (
    read_json,
    require_free_space,
    sha256_file,
    sha256_json,
    write_atomically,
    write_json,
    write_text,
)


def test_a_writer_that_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_text(tmp_path / "file.txt", "old")

    def fails(path: Path) -> None:
        path.write_text("half")
        raise ValueError("interrupted")

    with pytest.raises(ValueError, match="interrupted"):
        write_atomically(tmp_path / "file.txt", fails)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"file.txt": "old"}


def test_the_writer_sees_the_final_basename_in_a_folder_of_its_own(tmp_path: Path) -> None:
    seen: list[Path] = []
    write_atomically(tmp_path / "new" / "file.pt", lambda path: (seen.append(path), path.write_bytes(b"x")))
    assert seen[0].name == "file.pt"
    assert seen[0].parent.parent == tmp_path / "new"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file.pt"]


def test_a_file_is_as_readable_as_any_other_even_where_its_writer_made_it_private(tmp_path: Path) -> None:
    (tmp_path / "ordinary").touch()

    def private(path: Path) -> None:
        path.touch()
        path.chmod(0o600)

    write_atomically(tmp_path / "file", private)
    assert (tmp_path / "file").stat().st_mode == (tmp_path / "ordinary").stat().st_mode


def test_a_full_disk_is_one_line_that_names_the_file(tmp_path: Path) -> None:
    def full(path: Path) -> None:
        with open("/dev/full", "wb") as device:
            device.write(b"x")

    with pytest.raises(StageError, match=r"file\.json: cannot write: No space left on device"):
        write_atomically(tmp_path / "file.json", full)
    assert list(tmp_path.iterdir()) == []


def test_json_comes_back_and_does_not_depend_on_key_order(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"b": [1, None], "a": "é"})
    write_json(tmp_path / "b.json", {"a": "é", "b": [1, None]})
    assert read_json(tmp_path / "a.json") == {"b": [1, None], "a": "é"}
    assert sha256_file(tmp_path / "a.json") == sha256_file(tmp_path / "b.json")
    assert sha256_json({"a": 1, "b": 2}) == sha256_json({"b": 2, "a": 1}) != sha256_json({"a": 2, "b": 1})


@pytest.mark.parametrize("content", [b"{", b"\xff"])
def test_damaged_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "bad.json").write_bytes(content)
    with pytest.raises(StageError, match=r"bad\.json: not valid JSON"):
        read_json(tmp_path / "bad.json")
    with pytest.raises(StageError, match=r"none\.json: no such file"):
        read_json(tmp_path / "none.json")


def test_too_little_space_is_said_with_both_figures(tmp_path: Path) -> None:
    free = os.statvfs(tmp_path)
    require_free_space(tmp_path / "new", 1, "states")
    with pytest.raises(StageError, match=r"states needs \d+\.\d\d GB, \d+\.\d\d GB are free"):
        require_free_space(tmp_path, free.f_frsize * free.f_blocks * 2, "states")
