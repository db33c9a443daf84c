"""Deletes the states of one part, and their store, once the checkpoint of the segment that was trained on them is safe.

In: checkpoints/{segment}.json with its weight folder, hidden/part-{segment}/ with manifest.json, the root of the store of
states. Out: hidden/part-{segment}/released.json, written last. The manifest stays, and the store's small records (rejected
rows, checksums, attempts). May be interrupted at any time and run again.
"""

import argparse
import fcntl
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, sync, write_json
from scripts.eagle3.provenance import check_provenance, digest
from scripts.eagle3.released import RECORD
from scripts.eagle3.stage import run_stage
from scripts.eagle3.store import LOCK
from scripts.train_draft import hashes

STATES_STAGE = "extract_hidden_states"


def run(record_path: Path, folder: Path, storage: Path) -> None:
    """Deletes the states in `folder` and those of its provenance in the store; StageError where the checkpoint is not whole."""
    record, manifest = read_json(record_path), read_json(folder / "manifest.json")
    weights = record_path.parent / record["folder"]
    if not weights.is_dir():
        raise StageError(f"{weights}: no such folder, so {folder} is not deleted: train segment {record['segment']} again")
    expected = {key: record[key] for key in ("weights_sha256", "state_sha256")}
    check_provenance(expected, hashes(weights), f"{weights} (compared with {record_path})")

    store = storage / STATES_STAGE / digest(manifest["provenance"]) / folder.name
    freed = sum(delete(path) for path in sorted(folder.glob("shard-*.pt"))) + delete_stored(store)
    sync(folder)
    shards = manifest["shards"]
    write_json(
        folder / RECORD,
        {
            "segment": record["segment"],
            **expected,
            "rows": sum(shard["rows"] for shard in shards),
            "tokens": sum(shard["tokens"] for shard in shards),
        },
    )
    print(f"release_part: {folder.name}: {freed / 1e9:.2f} GB freed", flush=True)


def delete_stored(store: Path) -> int:
    """Deletes the folders and state files of a part's store; StageError where a living job holds it."""
    if not store.is_dir():
        return 0
    with open(store / LOCK, "a") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StageError(f"{store}: held by a job that lives; wait for it or end it, then run again") from None
        return sum(delete(path) for path in sorted(store.iterdir()) if path.is_dir() or path.suffix == ".pt")


def delete(path: Path) -> int:
    """Deletes a file, link or folder; bytes that nothing else holds any more."""
    files = [each for each in path.rglob("*") if each.is_file()] if path.is_dir() else [path]
    size = sum(os.lstat(each).st_size for each in files if os.lstat(each).st_nlink == 1 and not each.is_symlink())
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
    return size


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="checkpoints/{segment}.json")
    parser.add_argument("--hidden", type=Path, required=True, help="the part's folder, hidden/part-{segment}")
    parser.add_argument("--store", type=Path, required=True, help="root of the stores of finished work")
    options = parser.parse_args(argv)
    run(options.record, options.hidden, options.store)


if __name__ == "__main__":
    run_stage(main)
