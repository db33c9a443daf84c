"""How fast hidden states are extracted, against the same engine without capture, the disk, and vLLM's own connector.

In: a shape (random weights) or a target's folder; a folder in memory and one on a disk. Out: a JSON line per measurement and
a table of ratios. The extraction is the stage's own: batches, growing shards, checksums, fsync.

    python -m benchmarks.extraction_speed --shape smollm2 --work /dev/shm/speed --disk /data/speed --output results
"""

import argparse
import json
import os
import shutil
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import random_target
from benchmarks.harness import Step, make_parser, run_one, run_steps
from scripts.eagle3.batches import TOGETHER, Batch, TokenRow, make_row, plan_batches
from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware, load_engine, on_cpu, unload_engine
from scripts.eagle3.extraction import Feed, capturing, open_engine, run_batches, states_provenance
from scripts.eagle3.files import read_json
from scripts.eagle3.part import Part
from scripts.eagle3.shards import bytes_per_state
from scripts.eagle3.store import open_store
from scripts.eagle3.target import text_config

MAX_ROWS = 128
SHORTEST, LONGEST = 256, 2048
SHARD_BYTES = 2e9
SAMPLE_S = 0.02
# innermost lines of our own code, those that took longest
PLACES, OWN = 24, str(Path(__file__).resolve().parents[1] / "scripts")
TURNS = 2
DISK_BYTES, DISK_PIECE = 4 << 30, 64 << 20


def target_of(work: Path) -> Target:
    """The target that `make` has written, or the one that is linked there."""
    folder = (work / "target").resolve()
    config = read_json(folder / "config.json")
    layers = config.get("text_config", config)["num_hidden_layers"]
    third = {"aux_layer_ids": [2, 4, 5]} if layers == 8 else {}
    kimi = "text_config" in config
    dtype = "float32" if on_cpu() else "bfloat16"
    return Target(path=str(folder), num_hidden_layers=layers, trust_remote_code=kimi, dtype=dtype, **third)


def some_rows(tokens: int) -> list[TokenRow]:
    """Rows of SHORTEST to LONGEST tokens, of random ids, about `tokens` in all."""
    random = np.random.default_rng(0)
    rows = []
    while tokens > 0:
        rows.append(make_row(random.integers(0, 1000, int(random.integers(SHORTEST, LONGEST + 1))).tolist()))
        tokens -= len(rows[-1])
    return rows


def shards_of(rows: list[TokenRow], target: Target, dtype: str) -> list[list[TokenRow]]:
    """Rows dealt to shards of about SHARD_BYTES, at least as many as grow side by side."""
    hidden, states = int(text_config(target)["hidden_size"]), len(target.aux_layer_ids) + 1
    size = sum(map(len, rows)) * states * bytes_per_state(hidden, dtype)
    count = min(len(rows), max(TOGETHER, round(size / SHARD_BYTES)))
    return [rows[number::count] for number in range(count)]


class Watch:
    """Samples while it is open: the GPU's idle share, the peak of this process's own memory, where the engine's thread is."""

    def __init__(self) -> None:
        self.busy: list[float] = []
        self.peak_bytes = 0
        self.places: Counter[str] = Counter()
        self._thread = threading.get_ident()
        self._end = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)

    def __enter__(self) -> "Watch":
        self._sampler.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._sampler.join()

    def record(self) -> dict[str, Any]:
        """For the result."""
        idle = {"gpu_idle": round(1 - sum(self.busy) / len(self.busy) / 100, 3)} if self.busy else {}
        total = self.places.total()
        places = {place: round(count / total, 3) for place, count in self.places.most_common(PLACES)}
        return {**idle, "host_gb": self.peak_bytes / 1e9, "engine_thread": places}

    def _sample(self) -> None:
        import torch

        while not self._end.wait(SAMPLE_S):
            if torch.cuda.is_available():
                self.busy.append(torch.cuda.utilization())
            # without the pages of mapped files, which the kernel takes back
            status = Path("/proc/self/status").read_text().splitlines()
            own = [int(line.split()[1]) * 1024 for line in status if line.startswith(("RssAnon:", "RssShmem:"))]
            self.peak_bytes = max(self.peak_bytes, sum(own))
            stack = traceback.walk_stack(sys._current_frames()[self._thread])
            ours = next((frame for frame, _ in stack if frame.f_code.co_filename.startswith(OWN)), None)
            if ours:
                self.places[f"{Path(ours.f_code.co_filename).name}:{ours.f_lineno} {ours.f_code.co_name}"] += 1


def plain(llm: Any, rows: Sequence[TokenRow], batches: Sequence[Batch]) -> dict[str, Any]:
    """The engine alone on the batches of the extraction, which it is given in the same way; the faster of two passes."""
    by_key = {row.key: row for row in rows}
    feed = Feed(llm)

    def run(batches: Sequence[Batch]) -> None:
        for batch in batches:
            feed.put([by_key[key] for key in batch.keys])
        feed.drain()

    run(batches[-1:])
    seconds = []
    with Watch() as watch:
        for _ in range(TURNS):
            began = time.perf_counter()
            run(batches)
            seconds.append(time.perf_counter() - began)
    return {**speeds(sum(map(len, rows)), seconds), **watch.record()}


def speeds(tokens: int, seconds: Sequence[float]) -> dict[str, float]:
    """Of passes over the same tokens."""
    return {"tokens_per_s": tokens / min(seconds), "tokens_per_s_worse": tokens / max(seconds)}


def compiled(work: Path, tokens: int, batch_tokens: int) -> dict[str, Any]:
    """Plain prefill of the compiled engine."""
    rows, target = some_rows(tokens), target_of(work)
    batches = plan_batches(shards_of(rows, target, target.dtype), batch_tokens, MAX_ROWS)
    llm = load_engine(target, Hardware(batch_tokens, MAX_ROWS), max_model_len=LONGEST + 1, eager=False)
    found = plain(llm, rows, batches)
    unload_engine(llm)
    return {"tokens": sum(map(len, rows)), "batches": len(batches), **found}


def extract(work: Path, tokens: int, batch_tokens: int, folder: str, dtype: str) -> dict[str, Any]:
    """Plain prefill, then the stage on the same engine and batches, its store in `folder`; each twice, the faster counts."""
    rows, target = some_rows(tokens), target_of(work)
    shards = shards_of(rows, target, dtype)
    batches = plan_batches(shards, batch_tokens, MAX_ROWS)
    provenance = states_provenance(target, dtype)
    seconds, watches, root = [], [], Path(folder)
    began = time.perf_counter()
    with open_engine(target, Hardware(batch_tokens, MAX_ROWS), LONGEST) as llm:
        loaded = time.perf_counter() - began
        without = plain(llm, rows, batches)
        with capturing(llm, target, dtype) as extractor:
            proof = extractor.prove(rows, root / "proof")
            for turn in range(TURNS):
                with open_store(root / str(turn), "extract_hidden_states", provenance) as store:
                    part = Part(store, shards, provenance, int(text_config(target)["hidden_size"]))
                    with Watch() as watch:
                        began = time.perf_counter()
                        run_batches(part, extractor, batches)
                        seconds.append(time.perf_counter() - began)
                    watches.append(watch.record())
                size = sum(path.stat().st_size for path in store.folder.glob("shards/*.pt"))
                shutil.rmtree(root / str(turn))
            installed = extractor.installed
    total = sum(map(len, rows))
    return {
        **{"tokens": total, "batches": len(batches), "shards": len(shards), **installed, "load_s": loaded},
        **speeds(total, seconds),
        **{"gb_per_s": size / min(seconds) / 1e9, **watches[seconds.index(min(seconds))], "proof": proof.record()},
        **{"plain": without, "of_plain": total / min(seconds) / without["tokens_per_s"]},
    }


def disk(work: Path, folder: str) -> dict[str, Any]:
    """What the file system of `folder` takes in one file and in several at a time, a thread each, with fsync."""
    root = Path(folder)
    root.mkdir(parents=True, exist_ok=True)
    piece = np.random.default_rng(0).bytes(DISK_PIECE)

    def write(path: Path, size: int) -> None:
        with open(path, "wb", buffering=0) as file:
            for _ in range(size // DISK_PIECE):
                file.write(piece)
            os.fsync(file.fileno())

    rates = {}
    for count in (1, TOGETHER):
        paths = [root / f"disk-rate-{number}" for number in range(count)]
        began = time.perf_counter()
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(write, paths, [DISK_BYTES // count] * count))
        rates[f"gb_per_s_{count}"] = DISK_BYTES / (time.perf_counter() - began) / 1e9
        for path in paths:
            path.unlink()
    return rates


def connector(work: Path, tokens: int, batch_tokens: int, folder: str) -> dict[str, Any]:
    """speculators generate-offline-data on the same rows: vLLM's server with its stock connector, and the client."""
    from benchmarks import stock_connector

    return stock_connector.measure(target_of(work), some_rows(tokens), batch_tokens, LONGEST, Path(folder))


FUNCTIONS: dict[str, Callable[..., dict[str, Any]]] = {
    "extract": extract,
    "compiled": compiled,
    "disk": disk,
    "connector": connector,
}


def plan(options: argparse.Namespace) -> list[Step]:
    """The measurements in order."""
    size = {"tokens": options.tokens, "batch_tokens": options.batch_tokens}
    v1, v2 = {"VLLM_USE_V2_MODEL_RUNNER": "0"}, {"VLLM_USE_V2_MODEL_RUNNER": "1"}
    memory, place = str(options.work / "states"), str(options.disk)
    steps = [
        Step("extract", {**size, "folder": memory, "dtype": options.dtype}, 300, v1),
        Step("disk", {"folder": memory}, 120),
        Step("disk", {"folder": place}, 120),
        Step("extract", {**size, "folder": place, "dtype": options.dtype}, 300, v1),
    ]
    if not on_cpu():
        steps += [
            Step("extract", {**size, "folder": memory, "dtype": "fp8"}, 300, v1),
            Step("extract", {**size, "folder": memory, "dtype": options.dtype}, 300, v2),
            Step("compiled", size, 400, v1),
            Step("connector", {**size, "folder": memory}, 400, v1),
        ]
    return [step for number, step in enumerate(steps) if not options.only or number in options.only]


@contextmanager
def emptied(*folders: Path) -> Iterator[None]:
    """States are deleted whatever happens."""
    try:
        yield
    finally:
        for folder in folders:
            shutil.rmtree(folder, ignore_errors=True)


def main() -> None:
    """Command line: see the top of the file."""
    parser = make_parser(__doc__)
    parser.add_argument("--shape", help=f"{', '.join(random_target.SHAPES)}, or the folder of a target")
    parser.add_argument("--disk", type=Path, help="folder on a disk")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--batch-tokens", type=int, default=16384)
    parser.add_argument("--dtype", default="bfloat16", help="of the stored states")
    parser.add_argument("--only", type=int, nargs="+", help="numbers of the measurements, from 0")
    options = parser.parse_args()
    if options.one:
        random_target.register()
        run_one(options.one, options.work, FUNCTIONS)
        return
    random_target.place(options.shape, options.work / "target")
    with emptied(options.work / "states", options.disk):
        run_steps("benchmarks.extraction_speed", plan(options), options.work, options.output, options.keep_going)
    results = [json.loads(line) for line in (options.output / "results.jsonl").read_text().splitlines()]
    for result in results:
        print(*(result.get(name, "") for name in ("measurement", "folder", "dtype", "tokens_per_s", "of_plain")))


if __name__ == "__main__":
    main()
