"""Targets that stop and targets that loop, and conversations: for the tests of what runs the engine to generate."""

import json
import shutil
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.engine import Hardware
from scripts.eagle3.rows import CONVERSATIONS, write_rows

HARDWARE = Hardware(batch_tokens=512, max_num_seqs=4, kv_cache_gb=1)
HARDWARE_OPTIONS = ["--batch-tokens", "512", "--max-num-seqs", "4", "--kv-cache-gb", "1"]


def make_stopping_target(tiny_llama: Target, folder: Path, stop_ids: list[int]) -> Target:
    """tiny-llama that ends its turn with any of `stop_ids`."""
    shutil.copytree(tiny_llama.path, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stop_ids, "do_sample": False}))
    return tiny_llama.model_copy(update={"path": str(folder)})


def make_looping_target(tiny_llama: Target, folder: Path) -> Target:
    """tiny-llama without its branches: the next token depends on the last one only, so greedy answers cycle."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(tiny_llama.path, folder)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor.zero_()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tiny_llama.model_copy(update={"path": str(folder)})


def conversation(name: str, questions: list[str], system: str | None = None, answer: str | None = None) -> dict[str, Any]:
    """One row of conversations; `answer` is given after each question."""
    messages = [{"role": "system", "content": system}] if system else []
    for question in questions:
        messages.append({"role": "user", "content": question})
        if answer is not None:
            messages.append({"role": "assistant", "content": answer})
    return {"conversation_id": name, "source": "test", "split": "train", "messages": messages}


def write_conversations(path: Path, rows: list[dict[str, Any]]) -> None:
    """One shard or suite, as collect_conversations writes it."""
    write_rows(path, rows, CONVERSATIONS, {"conversations": {"format": 1}}, {"rows": len(rows)})
