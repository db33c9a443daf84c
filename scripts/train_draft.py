"""Trains the draft for one segment: one pass over the training rows, from scratch or from where the last segment ended.

In: hidden/part-*/ (with `training.rolling` the one part of the segment, its token shards and draft/schedule.json) and
hidden/val/, the draft's config, the target's head, the vocabulary map, checkpoints/{segment - 1}/. Out:
checkpoints/{segment}/ with model.safetensors (trained weights, float32) and deepspeed/ (what the next segment resumes from),
then checkpoints/{segment}.json: `segment`, `step`, `folder`, `weights_sha256`, `state_sha256`, `metrics`, `rows`, `engine`,
`continued_from` (steps that an earlier job had made), `provenance`. After an early stop (`training.patience`) a segment only
repeats the record before it, with `stopped`. An interrupted segment leaves neither and goes on from its
last state (segment_state.py).
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from scripts.eagle3.config import Target, Training
from scripts.eagle3.draft_files import WEIGHTS, DraftFiles, check_layers
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.files import read_json, require_free_space, sha256_file, sha256_json, sync, write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.provenance import PROVENANCE_KEY, check_provenance
from scripts.eagle3.released import is_released, require_states
from scripts.eagle3.stage import run_stage, section

if TYPE_CHECKING:
    import torch
    from deepspeed import DeepSpeedEngine

    from scripts.eagle3.packing import TrainingRows
    from scripts.eagle3.shards import Shard
    from scripts.eagle3.third_party import ForeignHead
    from scripts.eagle3.training import Segment

# settings that change where and how training runs, not what is learnt
NOT_SCIENCE = {"loggers", "zero_stage", "initial_head"}  # of the last: the path
# settings that are no part of the section's JSON, so that a change reruns nothing
KEEPING = ("checkpoint_minutes", "keep_checkpoints")
# float32 copies of each weight on the disk: those in a checkpoint; and weights, masters, two moments in each of two states
COPIES = 9


class Inputs(NamedTuple):
    """What a segment is trained from: the draft's files, the folder of the states, its parts and shards per part.

    tokens, schedule: the part's token shards and schedule.json, for rolling mode only.
    """

    files: DraftFiles
    hidden: Path
    parts: int
    shards: int
    tokens: Path | None = None
    schedule: Path | None = None

    def rolling(self) -> tuple[Path, dict[str, Any]]:
        """The folder of the part's token shards and the schedule's content; StageError where they were not given."""
        if self.tokens is None or self.schedule is None:
            raise StageError("--tokens and --schedule are missing: expected with training.rolling; name both")
        return self.tokens, read_json(self.schedule)


class Data(NamedTuple):
    """Training and validation rows, and what everything was made from."""

    train: "TrainingRows"
    validation: "TrainingRows"
    provenance: dict[str, Any]


def run(target: Target, settings: Training, inputs: Inputs, number: int, checkpoints: Path, metrics: Path) -> None:
    """Trains segment `number` and writes its checkpoint; inputs are checked before a model is built."""
    import torch

    from scripts.eagle3 import segment_state, training, zero
    from scripts.eagle3.metrics import MetricsLog
    from scripts.eagle3.pruning import prune
    from scripts.eagle3.training_cost import DraftShape, check_memory

    if not 0 <= number < settings.segments:
        raise StageError(f"--segment {number}: expected 0 to {settings.segments - 1}, as training.segments says")
    zero.check_settings(settings)
    data = read_data(target, settings, inputs, number)
    resumable = {"zero_stage": settings.zero_stage, "processes": zero.processes()}
    if stops_early(checkpoints, number, settings.patience):
        check_previous(checkpoints, number, data.provenance, resumable)
        repeat_record(checkpoints, number)
        return
    initial = read_initial_head(target, settings, inputs.files)
    origin = {**data.provenance, "engine": resumable, "start": start_of(checkpoints, number)}
    interrupted = segment_state.find_state(checkpoints, number, origin)
    previous = check_previous(checkpoints, number, data.provenance, resumable) if number and not interrupted else None
    segment = plan(data, settings, inputs, number)
    device = zero.start_process_group()
    if device.type == "cuda":
        shape = DraftShape.of(read_json(inputs.files.config))
        check_memory(shape, settings, zero.processes(), torch.cuda.get_device_properties(device).total_memory)

    engine = start_draft(inputs.files, settings, device, initial)
    size = COPIES * 4 * sum(parameter.numel() for parameter in engine.module.parameters())
    require_free_space(checkpoints, size, "a checkpoint")
    done = training.nothing_done(settings)
    if interrupted is not None:
        done = segment_state.load_state(engine, interrupted)
    elif previous is not None:
        position = zero.load_state(engine, previous)
        expect(segment.first_step, position["step"], f"{previous}: step", "train that segment again")
    leader, log = engine.global_rank == 0, None
    if leader:
        log = MetricsLog(metrics, number, segment.first_step, settings.loggers, settings.model_dump(), done.steps)
    with segment_state.Ending() as ending:
        keeper = segment_state.Keeper(engine, checkpoints, segment, origin, settings.checkpoint_minutes, ending, log, done)
        with log or nullcontext():
            trained = training.train_segment(engine, data.train, segment, settings, log, done, keeper.after_step)
            validated = training.validate(engine, data.validation, settings, keeper.after_batch)
            step = segment.first_step + len(segment.steps)
            if log is not None:
                log.write({"step": step - 1, "segment": number, **validated}, "validation")
        unfinished = write_unfinished(engine, checkpoints, {"segment": number, "step": step})
        if leader:
            position = {"segment": number, "step": step, "total_steps": segment.total_steps, "folder": str(number)}
            rows = {"train": data.train.counts(), "validation": data.validation.counts()}
            figures = {"metrics": {"train": trained, "validation": validated}, "rows": rows, "continued_from": done.steps}
            finish(unfinished, checkpoints, {**position, **figures, "engine": resumable, "provenance": data.provenance})
            shutil.rmtree(keeper.folder, ignore_errors=True)
            prune(checkpoints, number, settings.keep_checkpoints, lambda segment: is_awaited(settings, inputs, segment))
    engine.destroy()


def stops_early(checkpoints: Path, number: int, patience: int | None) -> bool:
    """Whether the last `patience` segments before `number` were no better than one before them."""
    if patience is None or number <= patience:
        return False
    records = [read_json(checkpoints / f"{segment}.json") for segment in range(number)]
    lengths = [record["metrics"]["validation"]["acceptance_length"] for record in records]
    return max(lengths[-patience:]) <= max(lengths[:-patience])


def repeat_record(checkpoints: Path, number: int) -> None:
    """Segment `number` is not trained: its record is the one before, whose folder it names too."""
    record = read_json(checkpoints / f"{number - 1}.json")
    if os.environ.get("RANK", "0") == "0":
        print(f"train_draft: segment {number} is not trained: training.patience ended it at step {record['step']}", flush=True)
        write_json(checkpoints / f"{number}.json", {**record, "segment": number, "stopped": True})


def start_of(checkpoints: Path, number: int) -> str:
    """Stands for the weights that segment `number` starts from: a state inside it is worth nothing with others."""
    return read_json(checkpoints / f"{number - 1}.json")["weights_sha256"] if number else "seed"


def is_awaited(settings: Training, inputs: Inputs, number: int) -> bool:
    """Whether release_part has yet to compare segment `number`'s checkpoint with its record before it deletes the states."""
    return settings.rolling is not None and not is_released(inputs.hidden / f"part-{number}")


def plan(data: Data, settings: Training, inputs: Inputs, number: int) -> "Segment":
    """The steps of segment `number` and their place among those of all segments."""
    from scripts.eagle3 import training

    if settings.rolling is None:
        return training.plan_segment(data.train, settings, number)
    from scripts.eagle3.rolling import plan_part

    tokens, schedule = inputs.rolling()
    rejected = [entry["row_key"] for entry in read_json(inputs.hidden / f"part-{number}" / "manifest.json")["rejected"]]
    return plan_part(data.train, rejected, tokens, schedule["steps"], settings, number)


def read_data(target: Target, settings: Training, inputs: Inputs, number: int = 0) -> Data:
    """Opens every shard that segment `number` trains on and compares origins; no state is read yet."""
    from scripts.eagle3.draft import provenance_of
    from scripts.eagle3.packing import TrainingRows, open_shards

    config_path = inputs.files.config
    config = read_json(config_path)
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    check_layers(config_path, target, "remake it with draft_config, or mend target.aux_layer_ids")

    def paths(part: str) -> list[Path]:
        return [inputs.hidden / part / f"shard-{shard}.pt" for shard in range(inputs.shards)]

    parts = [f"part-{part}" for part in (range(inputs.parts) if settings.rolling is None else [number])]
    for part in parts:
        require_states(inputs.hidden / part, inputs.shards)
    train = open_shards([path for part in parts for path in paths(part)], layer_ids)
    validation = open_shards(paths("val"), layer_ids, train[0])
    check_listed([*train, *validation])
    states = train[0].meta["provenance"]
    expected = {"target": provenance_of(config_path)["target"]}
    check_provenance(expected, states, f"{train[0].path} (compared with {config_path})")
    config["speculators_config"]["verifier"].pop("name_or_path")  # a path is never compared
    config.pop(PROVENANCE_KEY)
    provenance = {
        "target": states["target"],
        "draft_config": sha256_json(config),
        "vocabulary": sha256_file(inputs.files.d2t),
        "layer_ids": layer_ids,
        "states": states,
        # rolling: those of all parts, or no segment could follow another
        "rows": inputs.rolling()[1]["rows"] if settings.rolling else sha256_json([shard.row_keys for shard in train]),
        "training": settings.model_dump(exclude=NOT_SCIENCE),
    }
    if settings.initial_head:
        weights = Path(settings.initial_head) / WEIGHTS
        provenance["training"]["initial_head"] = sha256_file(weights) if weights.is_file() else "nothing"
    sizes = settings.ttt_steps, settings.batch_tokens
    return Data(TrainingRows(train, *sizes), TrainingRows(validation, *sizes), provenance)


def check_listed(shards: "Sequence[Shard]") -> None:
    """StageError for a shard that is not the one that its folder's manifest.json lists, e.g. a copy of its neighbour."""
    for shard in shards:
        manifest = shard.path.parent / "manifest.json"
        entries = read_json(manifest).get("shards", []) if manifest.is_file() else []
        for entry in entries:
            if entry["file"] == shard.path.name:
                expect(entry.get("digest"), shard.digest(), f"{shard.path}: digest", f"{manifest} lists another: extract again")


def read_initial_head(target: Target, settings: Training, files: DraftFiles) -> "ForeignHead | None":
    """The head that training starts from, compared with the draft's config; None where there is none."""
    if settings.initial_head is None:
        return None
    from scripts.eagle3.initial_head import check_initial_head

    config = read_json(files.config)
    head, adapted = check_initial_head(settings.initial_head, target, config["transformer_layer_config"], config)
    if adapted and os.environ.get("RANK", "0") == "0":
        print(f"train_draft: the initial head was trained otherwise and adapts: {'; '.join(adapted)}", flush=True)
    return head


def check_previous(checkpoints: Path, number: int, provenance: dict[str, Any], resumable: dict[str, Any]) -> Path:
    """The folder that segment `number` resumes from; StageError where it is not whole, or of another origin.

    resumable: ZeRO stage and number of processes.
    """
    path = checkpoints / f"{number - 1}.json"
    record = read_json(path)
    check_provenance(provenance, record["provenance"], path)
    for key, value in resumable.items():
        had = record["engine"][key]
        if had != value:
            raise StageError(
                f"{path}: {key} is {had}, expected {value}; DeepSpeed reads an optimiser's state only as it was sharded: train "
                f"with {key} {had} as before, or all segments anew"
            )
    folder = checkpoints / record["folder"]
    if not folder.is_dir():
        raise StageError(f"{folder}: no such folder; it was pruned: train segment {number - 1} again")
    if os.environ.get("RANK", "0") == "0":  # once is enough where several processes train
        expected = {key: record[key] for key in ("weights_sha256", "state_sha256")}
        check_provenance(expected, hashes(folder), f"{folder} (compared with {path})")
    return folder


def start_draft(
    files: DraftFiles, settings: Training, device: "torch.device", initial: "ForeignHead | None" = None
) -> "DeepSpeedEngine":
    """The draft with the initial head's weights, or fresh ones from the seed, in a DeepSpeed engine."""
    from scripts.eagle3 import zero
    from scripts.eagle3.draft import build_draft
    from scripts.eagle3.initial_head import start_from
    from scripts.eagle3.ttt import TrainingDraft

    draft = build_draft(*files, dtype=zero.DTYPES[settings.dtype], seed=settings.seed)
    if initial is not None:
        taken = start_from(draft, initial)  # in later segments for lm_head only: the rest is resumed
        if os.environ.get("RANK", "0") == "0":
            print(f"train_draft: initial head {taken}", flush=True)
    draft = draft.to(device)
    model = TrainingDraft(draft, settings.ttt_steps, settings.step_loss_decay, settings.loss)
    return zero.start_engine(model, settings)


def write_unfinished(engine: "DeepSpeedEngine", checkpoints: Path, position: dict[str, Any]) -> Path:
    """Writes weights and resume state into a folder with an unfinished name; all ranks must call it."""
    import torch.distributed as dist

    from scripts.eagle3 import zero
    from scripts.eagle3.draft import save_trainable

    unfinished = checkpoints / f".unfinished-segment-{position['segment']}"
    weights = zero.full_weights(engine) | engine.module.own_head()
    if engine.global_rank == 0:
        shutil.rmtree(unfinished, ignore_errors=True)
        save_trainable(weights, unfinished / WEIGHTS)
    dist.barrier()
    zero.save_state(engine, unfinished, position)
    return unfinished


def hashes(folder: Path) -> dict[str, str]:
    """sha256 of the weights, and one over the names and hashes of all files of the resume state."""
    from scripts.eagle3.zero import STATE

    files = sorted(path for path in (folder / STATE).rglob("*") if path.is_file())
    state = {str(path.relative_to(folder)): sha256_file(path) for path in files}
    weights = folder / WEIGHTS
    return {
        "weights_sha256": sha256_file(weights) if weights.is_file() else "nothing",
        "state_sha256": sha256_json(state),
    }


def finish(unfinished: Path, checkpoints: Path, record: dict[str, Any]) -> None:
    """Gives the folder its name, then writes the record, which makes the segment count."""
    record = {**record, **hashes(unfinished)}
    for written in unfinished.rglob("*"):
        sync(written)
    final, path = checkpoints / record["folder"], checkpoints / f"{record['segment']}.json"
    path.unlink(missing_ok=True)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(unfinished, final)
    sync(checkpoints)
    write_json(path, record)


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section `target:` as JSON")
    parser.add_argument("--training", type=section(Training), required=True, help="section `training:` as JSON")
    parser.add_argument("--draft-config", type=Path, required=True, help="draft/config.json")
    parser.add_argument("--head", type=Path, required=True, help="target/head.safetensors")
    parser.add_argument("--vocab", type=Path, required=True, help="folder of d2t.npy, t2d.npy and coverage.json")
    parser.add_argument("--hidden", type=Path, required=True, help="folder of part-0/, part-1/, ... and val/")
    parser.add_argument("--parts", type=int, required=True, help="number of training parts, from 0")
    parser.add_argument("--shards", type=int, required=True, help="shards of each part, from 0")
    parser.add_argument("--tokens", type=Path, help="training.rolling: folder of the part's token shards")
    parser.add_argument("--schedule", type=Path, help="training.rolling: draft/schedule.json")
    parser.add_argument("--segment", type=int, required=True, help="which pass over the rows (rolling: part), from 0")
    parser.add_argument("--checkpoints", type=Path, required=True, help="folder of {segment}.json and {segment}/")
    parser.add_argument("--metrics", type=Path, required=True, help="folder of {segment}.jsonl and tensorboard/")
    for name in KEEPING:
        description = Training.model_fields[name].description
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"{description} Default: as --training says")
    options = parser.parse_args(argv)
    files = DraftFiles(options.draft_config, options.head, options.vocab / "d2t.npy", options.vocab / "t2d.npy")
    inputs = Inputs(files, options.hidden, options.parts, options.shards, options.tokens, options.schedule)
    keeping = {name: getattr(options, name) for name in KEEPING if getattr(options, name) is not None}
    settings = options.training.model_copy(update=keeping)
    run(options.target, settings, inputs, options.segment, options.checkpoints, options.metrics)


if __name__ == "__main__":
    run_stage(main)
