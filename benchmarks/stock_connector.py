"""speculators generate-offline-data against vLLM's server with its stock hidden-states connector, timed by its files.

In: a target, rows, a folder. Out: tokens per second for each number of requests in flight, without the start of the server and
of the client: from the file that completes the first engine step's worth of tokens to the last one.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from scripts.eagle3.batches import TokenRow
from scripts.eagle3.config import Target
from scripts.eagle3.layers import captured_layer_ids

START_S = 240
# the server waits between the answers of few, and many wait for the files' locks: the best of these counts
CONCURRENCIES = (32, 128)


def measure(target: Target, rows: Sequence[TokenRow], batch_tokens: int, longest: int, folder: Path) -> dict[str, Any]:
    """Starts the server, runs the client once per concurrency, ends the server."""
    from datasets import Dataset

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    columns = [{"input_ids": row.input_ids.tolist(), "loss_mask": [1] * len(row), "seq_len": len(row)} for row in rows]
    data = Dataset.from_list(columns)
    data.set_format("torch")
    data.save_to_disk(str(folder / "rows"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with open(folder / "server.log", "wb") as log:
        server = subprocess.Popen(_server(target, port, batch_tokens, longest, folder), stdout=log, stderr=log)
        try:
            _wait(server, port, folder / "server.log")
            speeds = {number: _client(target, port, number, folder, rows, batch_tokens) for number in CONCURRENCIES}
        finally:
            server.terminate()
            server.wait()
    total = sum(map(len, rows))
    return {"tokens": total, "tokens_per_s": max(speeds.values()), "by_concurrency": speeds}


def _server(target: Target, port: int, batch_tokens: int, longest: int, folder: Path) -> list[str]:
    layers = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    draft = {"hf_config": {"eagle_aux_hidden_state_layer_ids": layers}}
    speculative = {"method": "extract_hidden_states", "num_speculative_tokens": 1, "draft_model_config": draft}
    states = folder / "server-states"
    states.mkdir()
    transfer = {"kv_connector": "ExampleHiddenStatesConnector", "kv_role": "kv_producer"}
    extra = {"kv_connector_extra_config": {"shared_storage_path": str(states)}}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", target.path, "--port", str(port)]
    command += ["--dtype", target.dtype, "--max-model-len", str(longest + 2), "--max-num-batched-tokens", str(batch_tokens)]
    command += ["--max-num-seqs", "256", "--no-enable-prefix-caching", "--no-enable-chunked-prefill", "--host", "127.0.0.1"]
    command += ["--speculative-config", json.dumps(speculative), "--kv-transfer-config", json.dumps(transfer | extra)]
    return command


def _wait(server: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if server.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"the server did not start: {log.read_text(errors='replace')[-3000:]}")


def _client(target: Target, port: int, concurrency: int, folder: Path, rows: Sequence[TokenRow], batch_tokens: int) -> float:
    output = folder / f"states-{concurrency}"
    command = [sys.executable, "-m", "speculators", "generate-offline-data", "--preprocessed-data", str(folder / "rows")]
    command += ["--endpoint", f"http://127.0.0.1:{port}/v1", "--output", str(output), "--concurrency", str(concurrency)]
    command += ["--model", target.path]
    with open(folder / f"client-{concurrency}.log", "wb") as log:
        subprocess.run(command, stdout=log, stderr=log, check=True, env={**os.environ, "COLUMNS": "200"})
    written = sorted((path.stat().st_mtime, int(path.stem.split("_")[-1])) for path in output.glob("hs_*.safetensors"))
    if len(written) != len(rows):
        said = (folder / f"client-{concurrency}.log").read_text(errors="replace")[-3000:]
        raise RuntimeError(f"{len(written)} of {len(rows)} files were written: {said}")
    tokens = np.cumsum([len(rows[index]) for _, index in written])
    first = int(np.searchsorted(tokens, batch_tokens))
    shutil.rmtree(output)
    return float(tokens[-1] - tokens[first]) / (written[-1][0] - written[first][0])
