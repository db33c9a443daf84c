"""An extraction that is killed: its rows, its processes, and a count of the rows that went to the engine.

`python -m tests.extract_case OPTIONS` is the stage, with the real engine, that also notes each batch in `started` in its
working directory before it is computed.
"""

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3 import extraction
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.processes import arguments, descendants
from scripts.eagle3.rows import TOKENS, row_key, write_rows
from scripts.eagle3.shards import Shard
from scripts.eagle3.stage import run_stage
from scripts.eagle3.target import fingerprint
from scripts.extract_hidden_states import main
from tests.production_case import processes_in, wait_until

ROOT = Path(__file__).parents[1]
ENDS_WITHIN_S = 240
ROWS_PER_BATCH = 2
# threads that wait for each other on cores that others use too are many times slower than one
ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
# a variable that has the engine's whole KV cache written before the first batch: its pages would come with the rows else
TOUCH = "EXTRACT_CASE_TOUCHES_CACHE"


def token_rows(seed: int, count: int, lengths: Sequence[int] = range(20, 121)) -> list[dict[str, Any]]:
    numbers = random.Random(seed)
    rows = []
    for index in range(count):
        ids = [numbers.randrange(1000) for _ in range(numbers.choice(lengths))]
        identity = {"row_key": row_key(ids), "conversation_id": f"c{seed}-{index}", "source": "test", "split": "train"}
        rows.append({**identity, "input_ids": ids, "loss_mask": [numbers.random() < 0.5 for _ in ids]})
    return rows


def rows_written(store: Path) -> int:
    """Rows of part-0 whose states are in the store by now, whatever their provenance."""
    count = 0
    parts = sorted(store.glob("extract_hidden_states/*/part-0"))
    for path in [path for folder in ("growing", "shards") for part in parts for path in part.glob(f"{folder}/*.pt")]:
        try:
            shard = Shard(path)
        except StageError:
            if path.exists():
                raise
            return rows_written(store)  # it was finished, and moved, between the two looks
        count += sum(shard.written(index) for index in range(len(shard)))
    return count


class Extraction:
    """One part in a folder of its own, `store` may lie elsewhere."""

    def __init__(self, folder: Path, target: Target, shards: list[list[dict[str, Any]]], store: Path | None = None) -> None:
        self.folder, self.target, self.shards = folder, target, len(shards)
        self.rows = sum(map(len, shards))
        self.store = store or folder / "store"
        for number, rows in enumerate(shards):
            write_rows(folder / f"tokens/shard-{number}.parquet", rows, TOKENS, {"target": fingerprint(target)}, {})

    def arguments(self, **changes: Any) -> list[str]:
        options = {
            "--target": self.target.model_dump_json(),
            "--tokens": self.folder / "tokens",
            "--shards": self.shards,
            "--store": self.store,
            "--output": self.folder / "hidden/part-0",
            "--batch-tokens": 256,
            "--max-num-seqs": ROWS_PER_BATCH,
            "--kv-cache-gb": 1,
        } | {"--" + key.replace("_", "-"): value for key, value in changes.items()}
        return [str(word) for pair in options.items() for word in pair]

    def start(self, *before: str, **changes: Any) -> subprocess.Popen[bytes]:
        """Starts it in a session of its own; what it says is appended to `printed`. `before` is put before the command."""
        command = [*before, sys.executable, "-m", "tests.extract_case", *self.arguments(**changes)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **ONE_THREAD}
        with open(self.folder / "printed", "ab") as printed:
            return subprocess.Popen(command, cwd=self.folder, env=environment, stderr=printed, start_new_session=True)

    def finish(self, *before: str, **changes: Any) -> None:
        process = self.start(*before, **changes)
        assert process.wait(ENDS_WITHIN_S) == 0, self.printed()

    def printed(self) -> str:
        return (self.folder / "printed").read_text(errors="replace")

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted((self.folder / "hidden/part-0").iterdir())}

    def stored(self, pattern: str) -> list[Path]:
        return sorted(self.store.glob(f"extract_hidden_states/*/part-0/{pattern}"))

    def written(self) -> int:
        """Rows whose states the store has by now."""
        return rows_written(self.store)

    def started(self) -> list[str]:
        """Keys of all rows that were given to the engine, in order, as often as they were; without the proof's."""
        path = self.folder / "started"
        return [key for line in path.read_text().splitlines() for key in json.loads(line)] if path.exists() else []

    def writers(self, pid: int) -> list[int]:
        return [child for child in descendants(pid) if any("capture_process import" in word for word in arguments(child))]

    def wait_until_empty(self) -> None:
        left = lambda: {pid: arguments(pid)[:4] for pid in processes_in(self.folder)}  # noqa: E731
        wait_until(lambda: not left(), f"the end of {left()}", 10)


def _note_batches() -> None:
    original = extraction.Extractor.feed

    def feed(self: Any, rows: Any, places: Any) -> None:
        if TOUCH in os.environ and not os.path.exists("started"):
            self.clear_cache()
        with open("started", "a") as file:
            file.write(json.dumps([row.key for row in rows]) + "\n")
        original(self, rows, places)

    extraction.Extractor.feed = feed  # type: ignore[method-assign]


if __name__ == "__main__":
    _note_batches()
    run_stage(main)
