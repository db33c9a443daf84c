"""Files that are either whole or absent: temporary folder beside the target, final basename, fsync, rename.

In: a path and a function that writes it. Out: the finished file; sha256 sums; a disk check.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Calls `write(temporary path of the same basename)`, then moves the result to `path`. A full disk is a StageError."""
    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".unfinished-", dir=path.parent))
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        unfinished = folder / path.name
        write(unfinished)
        # safetensors writes files that only their owner can read; a server may run as someone else
        default = folder / ".mode"
        default.touch()
        shutil.copymode(default, unfinished)
        sync(unfinished)
        os.replace(unfinished, path)
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def cannot_write(path: Path, error: OSError) -> StageError:
    """What a full or broken disk is reported as."""
    return StageError(f"{path}: cannot write: {error.strerror or error}; make room or mend the folder, then run again")


def write_text(path: Path, text: str) -> None:
    """Writes a UTF-8 text file atomically."""
    write_atomically(path, lambda unfinished: unfinished.write_text(text, encoding="utf-8"))


def write_json(path: Path, value: Any) -> None:
    """Writes indented JSON with sorted keys, so that equal values are equal bytes."""
    write_text(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: Path) -> Any:
    """Reads JSON; a missing or damaged file is a StageError that names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise StageError(f"{path}: no such file") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise StageError(f"{path}: not valid JSON ({error})") from error


def sha256_file(path: Path) -> str:
    """Hex sha256 of a file's content."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """Hex sha256 of a JSON value, independent of key order."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def require_free_space(folder: Path, needed_bytes: int, what: str) -> None:
    """Raises StageError when the file system of `folder` has less than `needed_bytes` free."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StageError(
            f"{folder}: {what} needs {needed_bytes / 1e9:.2f} GB, {free / 1e9:.2f} GB are free; make room, or set "
            "storage.hidden_states to a larger disk"
        )


def sync(path: Path) -> None:
    """fsync of a file or folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def existing_parent(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
