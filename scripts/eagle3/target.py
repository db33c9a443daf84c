"""The target on disk: its config, its fingerprint, its tokenizer, its three head tensors.

In: the `target:` section. Out: facts that need no engine; each problem is a StageError that names the file.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from scripts.eagle3.config import Regeneration, Target
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, sha256_file

# A single-file checkpoint up to this size is hashed whole; beyond it and for sharded ones the index, or the header, stands in.
WHOLE_HASH_BYTES = 4 << 30
VOCABULARY_FILES = ("tokenizer.json", "tekken.json", "*.model", "*.tiktoken", "vocab.*")
# model types whose configurations are for an own head unless they say otherwise
OWN_HEAD = ("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25")
# tokenization*.py and tool_declaration*.py: code that comes with the target and decides ids too (Kimi-K2.5)
TOKENIZER_FILES = ("tokeniz", "tiktoken", "special_tokens", "vocab", "merges", "tool_declaration")
EMBEDDING_NAMES = ("model.embed_tokens.weight", "language_model.model.embed_tokens.weight")
NORM_NAMES = ("model.norm.weight", "language_model.model.norm.weight")
HEAD_NAMES = ("lm_head.weight", "language_model.lm_head.weight")


INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
# of a hub id: all that is read without an engine, but for the shards of the three tensors
SMALL_FILES = ("*.json", "*.jinja", "*.model", "*.py", "*.txt", "*.tiktoken")
FETCH_AGAIN = "fetch the target again"
LAYER = re.compile(r"layers\.(\d+)\.")
EXPERT = re.compile(r"layers\.(\d+)\..*\.experts\.(\d+)\.")


def resolve_folder(target: Target, weights: bool = False) -> Path:
    """The target's local folder. Of a hub id it is the hub's cache, where what is missing is downloaded.

    Without `weights` the shards of a hub id need not be in it: `read_tensor` fetches the one that it reads.
    """
    folder = Path(target.path)
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise StageError(f"{folder}: no config.json; target.path must be a folder in Hugging Face format")
        return folder
    if folder.is_absolute() or target.path.startswith((".", "results/")) or target.path.count("/") != 1:
        raise StageError(f"{folder}: no such folder; set target.path to the target's folder or hub id")
    folder = _download(target.path, target.revision, None if weights else SMALL_FILES)
    if not weights and not (folder / INDEX).is_file():
        _download(target.path, target.revision, (SINGLE,))  # it identifies the target
    return folder


@cache
def _download(name: str, revision: str | None, files: tuple[str, ...] | None) -> Path:
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(files) if files else None))
    except Exception as error:  # the hub's client has no common base class for its failures
        raise StageError(f"target.path {name}: neither a folder nor a reachable hub id ({type(error).__name__})") from error


def text_config(target: Target) -> dict[str, Any]:
    """config.json of the text model (out of `text_config`), compared with target.architecture and num_hidden_layers."""
    path = resolve_folder(target) / "config.json"
    config = read_json(path)
    text = config.get("text_config", config)
    named = config.get("architectures") or []
    if target.architecture is not None and target.architecture not in named:
        raise StageError(
            f"{path}: architectures is {named}, expected {target.architecture}; another model lies there: mend target.path"
        )
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
    index = folder / INDEX
    if index.is_file():
        return sha256_file(index)
    single = folder / SINGLE
    if not single.is_file():
        raise StageError(f"{folder}: neither {SINGLE} nor {INDEX}; the target's weights are missing")
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
    found = [path for pattern in VOCABULARY_FILES for path in folder.glob(pattern)]
    if not any(path.is_file() and path.stat().st_size for path in found):
        raise StageError(f"{folder}: no vocabulary, none of {', '.join(VOCABULARY_FILES)} has content; {FETCH_AGAIN}")
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


def tensor_names(folder: Path) -> set[str]:
    """All tensors of the checkpoint: from the index, else from the header of the one file."""
    if (folder / INDEX).is_file():
        return set(read_json(folder / INDEX)["weight_map"])
    with _open(folder / SINGLE) as tensors:
        return set(tensors.keys())


def check_names(target: Target) -> None:
    """StageError where the tensors' names are not those of the model that config.json describes.

    Kimi-K2's files under Kimi-K2.5's config, or the other way round, have the sizes that are expected: their names differ.
    """
    folder = resolve_folder(target)
    config, names, text = read_json(folder / "config.json"), tensor_names(folder), text_config(target)
    plain, wrapped = (name in names for name in EMBEDDING_NAMES)
    architecture = (config.get("architectures") or ["no architecture"])[0]
    where = f"{folder}: config.json says {architecture}"
    advice = f"config.json and weights are of different models: {FETCH_AGAIN}"
    if plain and not wrapped and config.get("model_type") == "kimi_k25":
        raise StageError(f"{where}, the weights are named model.*, not language_model.*: Kimi-K2's?; {advice}")
    if wrapped and not plain and "text_config" not in config:
        raise StageError(f"{where}, the weights are named language_model.*: those of a multimodal model; {advice}")
    prefix = EMBEDDING_NAMES[wrapped].removesuffix("embed_tokens.weight")
    inner = [name.removeprefix(prefix) for name in names if name.startswith(f"{prefix}layers.")]
    found = {int(match[1]) for name in inner if (match := LAYER.match(name))}
    layers = text["num_hidden_layers"]
    most = layers + (text.get("num_nextn_predict_layers") or 0)
    if found and not set(range(layers)) <= found <= set(range(most)):
        wrong = sorted(set(range(layers)) - found) or sorted(found - set(range(most)))
        what = "lack" if set(range(layers)) - found else "have"
        raise StageError(f"{where} with {layers} layers, the weights {what} layer {wrong[0]}; {advice}")
    expected, experts = text.get("n_routed_experts"), dict[int, set[int]]()
    for name in inner:
        if match := EXPERT.match(name):
            experts.setdefault(int(match[1]), set()).add(int(match[2]))
    if not expected or not experts or text.get("moe_layer_freq", 1) != 1:
        return
    for layer in range(text.get("first_k_dense_replace", 0), layers):
        if (held := experts.get(layer, set())) != set(range(expected)):
            raise StageError(f"{where} with {expected} experts, the weights of layer {layer} have {len(held)}; {advice}")


def ties_head(target: Target) -> bool | None:
    """Whether the head is the embedding; None where config.json leaves it to the family."""
    config, text = read_json(resolve_folder(target) / "config.json"), text_config(target)
    said = text.get("tie_word_embeddings", config.get("tie_word_embeddings"))
    return False if said is None and text.get("model_type") in OWN_HEAD else said


def read_tensor(target: Target, names: tuple[str, ...]) -> Any | None:
    """The first of `names` in the checkpoint, read from the one file that holds it; None where there is none of them."""
    folder = resolve_folder(target)
    placed = read_json(folder / INDEX)["weight_map"] if (folder / INDEX).is_file() else None
    for name in names:
        if placed is not None and name not in placed:
            continue
        file = placed[name] if placed is not None else SINGLE
        if not Path(target.path).is_dir():
            _download(target.path, target.revision, (file,))
        with _open(folder / file) as tensors:
            if name in set(tensors.keys()):
                return tensors.get_tensor(name)
        if placed is not None:
            raise StageError(f"{folder / file}: no tensor {name}, though {INDEX} places it there; {FETCH_AGAIN}")
    return None


def weight_bytes(target: Target) -> int:
    """Bytes of the target's safetensors files; of a hub id that is not all in the cache yet, what its index says."""
    folder = resolve_folder(target)
    here = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    said = read_json(folder / INDEX).get("metadata", {}).get("total_size", 0) if (folder / INDEX).is_file() else 0
    return max(here, int(said))


@contextmanager
def _open(path: Path) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise StageError(f"{path}: no such file; the target is not whole: {FETCH_AGAIN}")
    try:
        with safe_open(path, "pt") as tensors:
            yield tensors
    except SafetensorError as error:
        raise StageError(f"{path}: not a readable safetensors file ({error}); {FETCH_AGAIN}") from error
