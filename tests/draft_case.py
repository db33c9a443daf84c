"""A draft of a tiny target, made by our own stages: for the tests of the draft, the walk and the export."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from scripts import draft_config, extract_target_head
from scripts.eagle3.config import Draft, Target, Training, Vocabulary
from scripts.eagle3.draft import build_draft, save_trainable, trainable_state
from scripts.eagle3.draft_files import WEIGHTS, DraftFiles
from scripts.eagle3.files import sha256_file, write_json
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import StateRow
from scripts.eagle3.target import fingerprint, text_config

TTT_STEPS = 3
DRAFT_VOCAB_SIZE = 512


@dataclass(frozen=True)
class DraftCase:
    """Files of one draft, as a run has them."""

    target: Target
    files: DraftFiles
    checkpoints: Path


def make_draft_files(folder: Path, target: Target, draft: Draft | None = None) -> DraftFiles:
    """Head, config and a vocabulary map that skips every other id of the upper half."""
    files = DraftFiles(
        folder / "draft/config.json", folder / "head.safetensors", folder / "vocab/d2t.npy", folder / "vocab/t2d.npy"
    )
    vocabulary = Vocabulary(draft_vocab_size=DRAFT_VOCAB_SIZE)
    extract_target_head.run(target, files.head)
    draft_config.run(target, draft or Draft(), vocabulary, TTT_STEPS, files.config)
    write_vocabulary(folder / "vocab", target, draft_vocabulary(text_config(target)["vocab_size"]))
    return files


def draft_vocabulary(vocab_size: int) -> torch.Tensor:
    """[DRAFT_VOCAB_SIZE] ascending target ids: the last (special) ones and some of the others."""
    special = torch.arange(vocab_size - 8, vocab_size)
    return torch.cat([torch.linspace(0, vocab_size - 9, DRAFT_VOCAB_SIZE - len(special)).long(), special])


def write_vocabulary(folder: Path, target: Target, ids: torch.Tensor) -> None:
    """d2t.npy, t2d.npy and coverage.json of the draft vocabulary `ids`."""
    folder.mkdir(parents=True, exist_ok=True)
    mask = torch.zeros(text_config(target)["vocab_size"], dtype=torch.bool)
    mask[ids] = True
    np.save(folder / "d2t.npy", (ids - torch.arange(len(ids))).numpy())
    np.save(folder / "t2d.npy", mask.numpy())
    identity = {name: fingerprint(target)[name] for name in ("tokenizer", "chat_template")}
    sums = {name: sha256_file(folder / name) for name in ("d2t.npy", "t2d.npy")}
    write_json(folder / "coverage.json", {"provenance": {"target": identity}, "sha256": sums})


def add_checkpoint(case: DraftCase, segment: int, seed: int, folder: str | None = None) -> None:
    """The record and the random weights of one segment; `folder` repeats the record of an earlier one."""
    path = case.checkpoints / (folder or str(segment)) / WEIGHTS
    if folder is None:
        save_trainable(trainable_state(build_draft(*case.files, seed=seed)), path)
    write_record(case, segment, folder or str(segment))


def write_record(case: DraftCase, segment: int, folder: str) -> None:
    """checkpoints/{segment}.json as training leaves it, for the weights in `folder`."""
    record = {
        "segment": segment,
        "step": 10 * segment,
        "weights_sha256": sha256_file(case.checkpoints / folder / WEIGHTS),
        "folder": folder,
        "metrics": {"loss": 1.0},
        "provenance": {
            "target": fingerprint(case.target),
            **case.files.identity(),
            "training": Training(ttt_steps=TTT_STEPS).model_dump(),
        },
    }
    write_json(case.checkpoints / f"{segment}.json", record)


def make_draft_case(folder: Path, target: Target, draft: Draft | None = None) -> DraftCase:
    """As after training, with one checkpoint of random weights."""
    case = DraftCase(target, make_draft_files(folder, target, draft), folder / "checkpoints")
    add_checkpoint(case, 0, seed=1)
    return case


def random_row(target: Target, length: int, prompt: int, seed: int = 0) -> StateRow:
    """A row of random ids and states; the answer is tokens prompt .. length - 1."""
    generator = torch.Generator().manual_seed(seed)
    text = text_config(target)
    ids = torch.randint(0, text["vocab_size"], (length,), generator=generator, dtype=torch.int32)
    states = torch.randn(length, len(target.aux_layer_ids) + 1, text["hidden_size"], generator=generator)
    return StateRow(row_key(ids.numpy()), ids, torch.arange(length) >= prompt, states)
