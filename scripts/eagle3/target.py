"""The target on disk: its config, its fingerprint, its tokenizer, its three head tensors.

In: the `target:` section. Out: facts that need no engine; each problem is a StageError that names the file.
"""

import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Regeneration, Target
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, sha256_file

# A single-file checkpoint up to this size is hashed whole; beyond it and for sharded ones the index, or the header, stands in.
WHOLE_HASH_BYTES = 4 << 30
# tokenization*.py and tool_declaration*.py: code that comes with the target and decides ids too (Kimi-K2.5)
TOKENIZER_FILES = ("tokeniz", "tiktoken", "special_tokens", "vocab", "merges", "tool_declaration")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


def resolve_folder(target: Target) -> Path:
    """The target's local folder; a hub id is downloaded (or taken from the hub's cache)."""
    folder = Path(target.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StageError(f"{folder}: no config.json; target.path must be a folder in Hugging Face format")
        return folder
    if folder.is_absolute() or target.path.startswith((".", "results/")) or target.path.count("/") != 1:
        raise StageError(f"{folder}: no such folder; set target.path to the target's folder or hub id")
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(target.path, revision=target.revision))
    except Exception as error:  # the hub's client has no common base class for its failures
        raise StageError(
            f"target.path {target.path}: neither a folder nor a reachable hub id ({type(error).__name__})"
        ) from error


def text_config(target: Target) -> dict[str, Any]:
    """config.json of the text model (unwrapped from `text_config`), compared with target.num_hidden_layers."""
    path = resolve_folder(target) / "config.json"
    config = read_json(path)
    text = config.get("text_config", config)
    expect(
        target.num_hidden_layers,
        text.get("num_hidden_layers"),
        f"{path}: num_hidden_layers",
        "mend target.num_hidden_layers",
    )
    return text


def fingerprint(target: Target) -> dict[str, Any]:
    """What identifies the target in every artefact: hashes of config, weights, tokenizer, chat template; no paths.

    Weights: sha256 of a single file up to 4 GiB; of the index of a sharded checkpoint; else of the safetensors header.
    """
    folder = resolve_folder(target)
    return _fingerprint(folder, target.revision, target.dtype)


@cache
def _fingerprint(folder: Path, revision: str | None, dtype: str) -> dict[str, Any]:
    tokenizer_files = sorted(path for path in folder.iterdir() if path.is_file() and path.name.startswith(TOKENIZER_FILES))
    if not tokenizer_files:
        raise StageError(f"{folder}: no tokenizer files; the target's folder must hold its tokenizer")
    tokenizer = hashlib.sha256()
    for path in tokenizer_files:
        tokenizer.update(path.name.encode() + b"\0" + sha256_file(path).encode())
    return {
        "revision": revision,
        "dtype": dtype,
        "config": sha256_file(folder / "config.json"),
        "weights": _weights_hash(folder),
        "tokenizer": tokenizer.hexdigest(),
        "chat_template": hashlib.sha256(chat_template(folder).encode()).hexdigest(),
    }


def _weights_hash(folder: Path) -> str:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sha256_file(index)
    single = folder / "model.safetensors"
    if not single.is_file():
        raise StageError(
            f"{folder}: neither model.safetensors nor model.safetensors.index.json; the target's weights are missing"
        )
    if single.stat().st_size <= WHOLE_HASH_BYTES:
        return sha256_file(single)
    with open(single, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        return hashlib.sha256(file.read(length)).hexdigest()


def chat_template(folder: Path) -> str:
    """The chat template's text, from chat_template.jinja or tokenizer_config.json."""
    template = folder / "chat_template.jinja"
    if template.is_file():
        return template.read_text(encoding="utf-8")
    path = folder / "tokenizer_config.json"
    found = read_json(path).get("chat_template") if path.is_file() else None
    if not found:
        raise StageError(f"{folder}: no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    return found if isinstance(found, str) else json.dumps(found, sort_keys=True)


def load_tokenizer(target: Target) -> Any:
    """The target's own tokenizer (transformers); StageError where it is Python code and target.trust_remote_code is off.

    Left to itself, transformers 5 makes a tokenizer of its own from such a folder, which splits text differently.
    """
    from transformers import AutoTokenizer

    folder = resolve_folder(target)
    code = python_tokenizer(folder)
    if code and not target.trust_remote_code:
        raise StageError(
            f"{folder}: the tokenizer is Python code that comes with the target ({code}), and target.trust_remote_code is "
            "off; read that code, then set target.trust_remote_code: true"
        )
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=target.trust_remote_code)


def python_tokenizer(folder: Path) -> str | None:
    """The class that the folder's own code must supply, as `module.Class`; None where transformers has all it needs."""
    path = folder / "tokenizer_config.json"
    named = (read_json(path).get("auto_map") or {}).get("AutoTokenizer") if path.is_file() else None
    if named is None or (folder / "tokenizer.json").is_file():
        return None
    classes = [named] if isinstance(named, str) else [name for name in named if name]
    return classes[0] if classes else None


def stop_token_ids(target: Target) -> list[int]:
    """Ids that end a turn: eos_token_id of generation_config.json, else of config.json."""
    folder = resolve_folder(target)
    path = folder / "generation_config.json"
    found = read_json(path).get("eos_token_id") if path.is_file() else None
    if found is None:
        found = text_config(target).get("eos_token_id")
    if found is None:
        raise StageError(f"{folder}: no eos_token_id in generation_config.json or config.json")
    return [found] if isinstance(found, int) else list(found)


def resolve_sampling(target: Target, responses: Regeneration) -> Regeneration:
    """`responses` with temperature and top_p filled in from generation_config.json, as vLLM serves the target.

    Greedy where that has `do_sample: false`; 1 for what it does not name. What greedy answers do not depend on is set back
    to its default.
    """
    path = resolve_folder(target) / "generation_config.json"
    found = read_json(path) if path.is_file() else {}
    temperature, top_p = responses.temperature, responses.top_p
    if temperature is None:
        named = found.get("temperature")
        temperature = 0.0 if found.get("do_sample") is False else 1.0 if named is None else float(named)
    if top_p is None:
        named = found.get("top_p")
        top_p = 1.0 if temperature == 0 or named is None else float(named)
    return Regeneration.model_validate({**responses.model_dump(), "temperature": temperature, "top_p": top_p})


def read_tensor(target: Target, names: tuple[str, ...]) -> Any | None:
    """The first of `names` in the checkpoint, read from the one file that holds it; None where there is none of them."""
    from safetensors import safe_open

    folder = resolve_folder(target)
    index = folder / "model.safetensors.index.json"
    files = read_json(index)["weight_map"] if index.is_file() else None
    for name in names:
        file = folder / (files.get(name, "") if files is not None else "model.safetensors")
        if not file.is_file():
            continue
        with safe_open(file, "pt") as tensors:
            if name in set(tensors.keys()):
                return tensors.get_tensor(name)
    return None
