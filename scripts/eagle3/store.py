"""The store of finished work: what a long job has done survives the loss of its declared outputs.

In: a root folder on the outputs' file system, the stage, the provenance of the work, the part. Out: a folder of this part,
`{root}/{stage}/{digest of the provenance}/{part}/`, held under flock while the job lives; what other parts of the same
provenance have finished can be read. Snakemake deletes outputs and log of a failed job; nothing deletes a store but a person.
"""

import contextlib
import fcntl
import json
import os
import shutil
import socket
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import cannot_write, read_json, sync, write_json
from scripts.eagle3.provenance import differences, digest

ATTEMPTS = "attempts.jsonl"
LOCK = "lock"
PROVENANCE = "provenance.json"
ERROR_CHARACTERS = 500


class RecordStore:
    """Append-only JSON lines keyed by a string; each line carries a checksum. The last record of a key counts.

    A torn last line (the job was killed while writing) is cut off; other damaged lines are skipped with a warning, so
    that their work is done again.
    """

    def __init__(self, path: Path, others: Iterable[Path] = ()) -> None:
        """Opens `path` for appending; the records of `others` (files of other parts) are read and never written."""
        self.path = Path(path)
        self._records: dict[str, Any] = {}
        for other in others:
            self._records.update(_read_records(other)[0])
        if self.path.exists():
            records, whole = _read_records(self.path)
            self._records.update(records)
            if whole < self.path.stat().st_size:
                os.truncate(self.path, whole)
        self._file: IO[bytes] = open(self.path, "ab")  # noqa: SIM115 - open as long as the store is
        sync(self.path.parent)

    def get(self, key: str) -> Any | None:
        """The record of `key`, or None."""
        return self._records.get(key)

    def put(self, key: str, record: Any) -> None:
        """Appends a JSON value; it is on disk when this returns."""
        line = {"crc32": _record_crc32(key, record), "key": key, "record": record}
        try:
            self._file.write(json.dumps(line, sort_keys=True).encode() + b"\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise StageError(f"{self.path}: cannot write: {error.strerror}; make room, then run again") from error
        self._records[key] = record

    def close(self) -> None:
        """Closes the file; `put` is not possible any more."""
        self._file.close()

    def __contains__(self, key: str) -> bool:
        return key in self._records

    def __len__(self) -> int:
        return len(self._records)


class Store:
    """An open store: `folder` is this part's own; nothing else writes to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._open: list[RecordStore] = []

    def others(self) -> list[Path]:
        """Folders of other parts with the same provenance: for reading only, they may grow or vanish meanwhile."""
        found = (path for path in self.folder.parent.iterdir() if path.is_dir() and path != self.folder)
        return sorted(path for path in found if (path / LOCK).exists())

    def records(self, name: str) -> RecordStore:
        """The part's record file `{name}.jsonl`; records of other parts are seen by `get` too."""
        file = f"{name}.jsonl"
        others = [folder / file for folder in self.others() if (folder / file).is_file()]
        self._open.append(RecordStore(self.folder / file, others))
        return self._open[-1]

    def deliver(self, finished: Path, output: Path) -> None:
        """Puts a finished file of the store in place as `output`: a hard link, or a symbolic one.

        Snakemake sets the time of what a job has made, an old file counts as made now. All hard links of a file have one time:
        across file systems, and where a copy of the run has hard links to it too, it is a symbolic link, with its own time.
        """
        output.parent.mkdir(parents=True, exist_ok=True)
        link = output.parent / f".unfinished-{os.getpid()}-{output.name}"
        for left in output.parent.glob(f".unfinished-*-{output.name}"):  # of a job that was killed here
            left.unlink()
        known = 1 + (output.exists() and output.samefile(finished) and not output.is_symlink())
        try:
            if finished.stat().st_nlink > known:
                link.symlink_to(finished.resolve())
            else:
                os.link(finished, link)
        except OSError:
            link.symlink_to(finished.resolve())
        os.replace(link, output)
        link.unlink(missing_ok=True)  # renaming onto another link of the same file does nothing

    def close(self) -> None:
        """Closes the record files."""
        for records in self._open:
            with contextlib.suppress(OSError):  # what a full disk has not taken was told when it was put
                records.close()


@contextmanager
def open_store(root: Path, stage: str, provenance: dict[str, Any], part: str = "all") -> Iterator[Store]:
    """Opens the store of one part's work and holds its lock; StageError when another living job holds it.

    `part` is the name of the output's folder, e.g. part-0. Each opening is recorded in `attempts.jsonl`, with its end.
    """
    folder = Path(root).resolve() / stage / digest(provenance) / part
    attempt = {"pid": os.getpid(), "host": socket.gethostname(), "started": _now()}
    with lock_folder(folder):
        for unfinished in folder.rglob(".unfinished-*"):
            shutil.rmtree(unfinished, ignore_errors=True)
        if not (folder / PROVENANCE).exists():
            _tell_what_differs(folder, stage, provenance)
        write_json(folder / PROVENANCE, provenance)
        store = Store(folder)
        try:
            _append(folder / ATTEMPTS, attempt)
        except OSError as error:
            raise cannot_write(folder / ATTEMPTS, error) from error
        outcome = "finished"
        try:
            yield store
        except BaseException as error:
            outcome = f"{type(error).__name__}: {error}"[:ERROR_CHARACTERS]
            raise
        finally:
            store.close()
            with contextlib.suppress(OSError):  # a full disk, which the error that ends the job is about
                _append(folder / ATTEMPTS, {**attempt, "ended": _now(), "outcome": outcome})


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Makes the folder of one part's work and holds its lock; StageError when another living job holds it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+")  # noqa: SIM115 - the with follows, outside of this try
    except OSError as error:
        raise StageError(f"{folder}: cannot make the store: {error.strerror}; mend the folder, then run again") from error
    with lock:
        _take(lock, folder)
        yield


def _tell_what_differs(folder: Path, stage: str, provenance: dict[str, Any]) -> None:
    """One line where the part was made before with another provenance: nothing of that is used."""
    others = folder.parent.parent.glob(f"*/{folder.name}/{PROVENANCE}")
    newest = max(others, key=lambda path: path.stat().st_mtime, default=None)
    if newest is not None:
        with contextlib.suppress(StageError):  # damaged: it cannot be compared
            said = "; ".join(differences(provenance, read_json(newest)))
            print(f"{stage}: nothing is reused of {newest.parent}: {said}", file=sys.stderr, flush=True)


def _take(lock: IO[str], folder: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.seek(0)
        holder = lock.read().strip() or "unknown"
        raise StageError(f"{folder}: held by another job ({holder}); wait for it or end it, then run again") from None
    with contextlib.suppress(OSError):  # on a full disk the holder has no name
        os.truncate(lock.fileno(), 0)
        os.write(lock.fileno(), f"pid {os.getpid()} on {socket.gethostname()} since {_now()}\n".encode())


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _append(path: Path, value: dict[str, Any]) -> None:
    with open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(value, sort_keys=True) + "\n")


def _record_crc32(key: str, record: Any) -> int:
    return zlib.crc32(json.dumps([key, record], sort_keys=True).encode())


def _read_records(path: Path) -> tuple[dict[str, Any], int]:
    """The good records of a file, and its length without a torn last line."""
    content = path.read_bytes()
    whole = content.rfind(b"\n") + 1
    records: dict[str, Any] = {}
    damaged = 0
    for line in content[:whole].splitlines():
        try:
            value = json.loads(line)
            key, record = value["key"], value["record"]
            if value["crc32"] != _record_crc32(key, record):
                raise ValueError("checksum differs")
        except (ValueError, KeyError, TypeError):
            damaged += 1
            continue
        records[key] = record
    if damaged:
        print(f"{path}: {damaged} damaged records are dropped and made again", file=sys.stderr, flush=True)
    return records, whole
