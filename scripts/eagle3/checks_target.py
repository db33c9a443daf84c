"""The target's files: there, whole, of the kind that the stages take. Only headers are read, so 64 files take a second.

In: the `target:` section and its folder. Out: lines of preflight's table, and the folder, or why it cannot be asked.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.eagle3.capture import refuse_uncapturable
from scripts.eagle3.checks import Fault, Line, Skipped, check, some
from scripts.eagle3.config import Config, Target
from scripts.eagle3.files import read_json
from scripts.eagle3.target import (
    EMBEDDING_NAMES,
    FETCH_AGAIN,
    HEAD_NAMES,
    INDEX,
    NORM_NAMES,
    SINGLE,
    SMALL_FILES,
    check_names,
    resolve_folder,
    tensor_names,
    text_config,
    ties_head,
)

MADE_HERE = "results/targets/"
LFS = b"version https://git-lfs.github.com/spec/"
LFS_LARGEST = 1024
HEADER_LARGEST = 100_000_000  # safetensors' own limit


def here(target: Target) -> Target:
    """The target with its folder as path; Skipped where the run makes it, or a hub id is not in the hub's cache."""
    if Path(target.path).is_dir():
        if target.path.startswith(MADE_HERE) and not (Path(target.path) / "manifest.json").is_file():
            raise Skipped("made by this run")
        resolve_folder(target)
        return target
    if target.path.startswith(MADE_HERE):
        raise Skipped("made by this run")
    if Path(target.path).is_absolute() or target.path.startswith(".") or target.path.count("/") != 1:
        resolve_folder(target)  # says what is wrong
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            target.path, revision=target.revision, allow_patterns=list(SMALL_FILES), local_files_only=True
        )
    except LocalEntryNotFoundError:
        raise Skipped(f"hub id {target.path}, not in the cache yet: downloaded by the first job that needs it") from None
    if not (Path(folder) / "config.json").is_file() or not any((Path(folder) / name).is_file() for name in (INDEX, SINGLE)):
        raise Skipped(f"hub id {target.path}, in the cache in part: the first job that needs it downloads the rest")
    return target.model_copy(update={"path": folder})


def target_lines(config: Config) -> tuple[Target | None, list[Line]]:
    """The target with its folder as path (None where it cannot be asked about), and the lines about its files."""
    found: list[Target] = []

    def locate() -> str:
        found.append(here(config.target))
        text = text_config(found[0])
        return f"{found[0].path}: {text['num_hidden_layers']} layers, {_architecture(found[0])}"

    lines = [check("target", "folder", locate)]
    if not found:
        return None, lines
    if lines[0].state == "red":
        return None, lines
    target = found[0]
    return target, [
        *lines,
        check("target", "weights", lambda: check_weights(Path(target.path), partial=target.path != config.target.path)),
        check("target", "names", lambda: names_line(target)),
        check("target", "embedding, norm, head", lambda: check_head(target)),
        check("target", "captured states", lambda: check_capture(target, config.rows.max_length)),
    ]


def names_line(target: Target) -> str:
    """The tensors are named as those of the model in config.json."""
    check_names(target)
    return f"{len(tensor_names(resolve_folder(target)))} tensors, as config.json describes them"


def check_weights(folder: Path, partial: bool = False) -> str:
    """Every file of the index is there, as long as its header says, and holds the tensors that the index places in it.

    partial: a hub's cache, where jobs fetch what is missing.
    """
    refuse_pointers(folder)
    placed = placed_tensors(folder)
    absent = [name for name in placed if not (folder / name).is_file()]
    if partial and absent:
        raise Skipped(f"{len(absent)} of {len(placed)} files are not in the hub's cache yet: jobs download what they need")
    if absent:
        raise Fault(f"{folder}: {len(absent)} of {len(placed)} weight files are missing, e.g. {min(absent)}", FETCH_AGAIN)
    problems = []
    for name in sorted(placed):
        try:
            header = read_header(folder / name)
        except Fault as fault:
            problems.append(fault.found)
            continue
        missing = sorted(placed[name] - header.keys())
        if missing:
            problems.append(f"{name} lacks {some(missing, 2)}, which {INDEX} places there")
    if problems:
        raise Fault(f"{folder}: {some(problems)}", f"{FETCH_AGAIN}: these files, then compare their checksums")
    size = sum((folder / name).stat().st_size for name in placed)
    tensors = sum(map(len, placed.values()))
    written = f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
    return f"{len(placed)} files of the index, {written}, {tensors} tensors" if tensors else f"{SINGLE}, {written}"


def placed_tensors(folder: Path) -> dict[str, set[str]]:
    """File -> tensors that the index places in it; of a single file nothing is promised."""
    if (folder / INDEX).is_file():
        placed: dict[str, set[str]] = {}
        for tensor, file in read_json(folder / INDEX)["weight_map"].items():
            placed.setdefault(file, set()).add(tensor)
        return placed
    if not (folder / SINGLE).is_file():
        raise Fault(f"{folder}: neither {SINGLE} nor {INDEX}", FETCH_AGAIN)
    return {SINGLE: set()}


def refuse_pointers(folder: Path) -> None:
    """Git without LFS leaves a text of three lines in place of each large file."""
    read = {path for pattern in ("*.safetensors", *SMALL_FILES) for path in folder.glob(pattern)}
    pointers = [path.name for path in sorted(read) if is_pointer(path)]
    if pointers:
        raise Fault(
            f"{folder}: {some(pointers)} only point to Git LFS, their content was not fetched",
            f"run `git lfs pull` in {folder}, or fetch the target with `hf download`",
        )


def is_pointer(path: Path) -> bool:
    """Whether the file is a Git LFS pointer."""
    if not path.is_file() or path.stat().st_size > LFS_LARGEST:
        return False
    with open(path, "rb") as file:
        return file.read(len(LFS)) == LFS


def read_header(path: Path) -> dict[str, Any]:
    """A safetensors header, without its metadata; Fault where file and header do not fit each other."""
    if not path.is_file():
        raise Fault(f"{path.name} is missing", FETCH_AGAIN)
    size = path.stat().st_size
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= HEADER_LARGEST:
            raise Fault(f"{path.name} of {size} bytes is no safetensors file", FETCH_AGAIN)
        if 8 + length > size:
            raise Fault(f"{path.name} is cut off in its header ({size} bytes)", FETCH_AGAIN)
        raw = file.read(length)
    try:
        header = json.loads(raw)
        header.pop("__metadata__", None)
        end = max((tensor["data_offsets"][1] for tensor in header.values()), default=0)
    except (ValueError, AttributeError, KeyError, TypeError, IndexError):
        raise Fault(f"{path.name} has a header that cannot be read", FETCH_AGAIN) from None
    if size != 8 + length + end:
        what = "is cut off" if size < 8 + length + end else "is too long"
        raise Fault(f"{path.name} {what}: {size} bytes, its header says {8 + length + end}", FETCH_AGAIN)
    return dict(header)


def check_head(target: Target) -> str:
    """The three tensors that the draft shares with the target, by the names that are looked for."""
    folder = resolve_folder(target)
    names = tensor_names(folder)
    tied = ties_head(target)
    wanted = {"embedding": EMBEDDING_NAMES, "final norm": NORM_NAMES, "head": HEAD_NAMES}
    for what, known in wanted.items():
        if not names & set(known) and not (what == "head" and tied is not False):
            raise Fault(
                f"{folder}: no {what} among the tensors (looked for {' and '.join(known)})",
                "this family names it differently and is not supported, or the files are of another model",
            )
    shared = "" if names & set(HEAD_NAMES) and not tied else "; the head is the embedding"
    return f"{sorted(names & set(EMBEDDING_NAMES))[0]}, {sorted(names & set(NORM_NAMES))[0]}{shared}"


def check_capture(target: Target, max_length: int) -> str:
    """The family returns whole states between its layers, and its context holds the longest row."""
    refuse_uncapturable(target, max_length)
    return f"{_architecture(target)}: layers {target.aux_layer_ids} and {target.num_hidden_layers}, rows of {max_length}"


def _architecture(target: Target) -> str:
    names: Iterable[str] = read_json(resolve_folder(target) / "config.json").get("architectures") or ["no architecture named"]
    return ", ".join(names)
