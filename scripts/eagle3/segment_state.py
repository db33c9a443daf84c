"""The state inside a segment, saved every few minutes and when training is told to end, which an interrupted one goes on from.

In: the engine, how far the segment is, what it is trained from. Out: checkpoints/.segment-{number}/step-{done}/ with
deepspeed/ and position.json, deleted with the segment's record. A state is written under another name, synced and renamed, and
only then the older one is deleted: whenever the job is killed, a whole one is there, or none was yet.
"""

import os
import shutil
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from scripts.eagle3 import zero
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import cannot_write, read_json, sync, write_json
from scripts.eagle3.metrics import MetricsLog
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.stage import ENDING_SIGNALS, keep_printing
from scripts.eagle3.training import Done, Segment

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine

POSITION = "position.json"
UNFINISHED = ".unfinished"


def state_folder(checkpoints: Path, number: int) -> Path:
    """Where the states of segment `number` lie. Snakemake does not know it, so it outlives a failed job."""
    return checkpoints / f".segment-{number}"


def find_state(checkpoints: Path, number: int, origin: dict[str, Any]) -> Path | None:
    """The last state of an interrupted segment, None without one; StageError where it was trained from something else.

    origin: what the segment is trained from, how, by how many processes, and the weights that it starts from.
    """
    folder = state_folder(checkpoints, number)
    states = sorted(folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
    if not states:
        return None
    where = f"{states[-1] / POSITION} (an interrupted segment; delete {folder} to start it over)"
    check_provenance(origin, read_json(states[-1] / POSITION)["origin"], where)
    return states[-1]


def load_state(engine: "DeepSpeedEngine", state: Path) -> Done:
    """Restores what `Keeper` saved; returns how far the segment was."""
    try:
        zero.load_state(engine, state)
    except (OSError, RuntimeError, EOFError) as error:
        said = (str(error).splitlines() or [type(error).__name__])[0]
        raise StageError(f"{state}: damaged ({said}); delete {state.parent} to start the segment over") from error
    position = read_json(state / POSITION)
    return Done(position["done"], torch.tensor(position["sums"], dtype=torch.float64))


class Ending:
    """While entered, a signal that asks the stage to end is only noted, so that what it interrupts stays whole."""

    number = 0

    def __enter__(self) -> "Ending":
        self._former = {each: signal.signal(each, self._note) for each in ENDING_SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for each, handler in self._former.items():
            signal.signal(each, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        if not self.number:
            self.number = number
            keep_printing()


class Keeper:
    """Saves the state where it is due, and ends the stage where a signal asks for it; every rank calls it after each step.

    minutes: between two saves; 0 saves after every step.
    """

    def __init__(
        self,
        engine: "DeepSpeedEngine",
        checkpoints: Path,
        segment: Segment,
        origin: dict[str, Any],
        minutes: float,
        ending: Ending,
        log: MetricsLog | None,
        done: Done,
    ) -> None:
        self.engine, self.segment, self.origin, self.minutes = engine, segment, origin, minutes
        self.ending, self.log = ending, log
        self.folder = state_folder(checkpoints, segment.number)
        self.saved_at = time.monotonic()
        self.done, self.saved = done, done.steps

    def after_step(self, done: Done) -> None:
        """SystemExit where a rank was told to end; the state is saved before."""
        self.done = done
        overdue = time.monotonic() - self.saved_at >= 60 * self.minutes
        self._act(overdue and self.engine.global_rank == 0)

    def after_batch(self) -> None:
        """As `after_step`, in the validation behind the last step: nothing is due there."""
        self._act(False)

    def _act(self, due: bool) -> None:
        wishes = torch.tensor([int(due), self.ending.number], device=self.engine.device)
        if dist.get_world_size() > 1:  # ranks see clock and signals at different steps
            dist.all_reduce(wishes, dist.ReduceOp.MAX)
        due, number = bool(wishes[0]), int(wishes[1])
        if due or number:
            self._save()
        if number:
            if self.engine.global_rank == 0:
                place = f"step {self.done.steps} of {len(self.segment.steps)}"
                name = signal.Signals(number).name
                text = f"train_draft: segment {self.segment.number} stopped at {place} after {name}; run again to go on"
                print(text, file=sys.stderr, flush=True)
            sys.exit(128 + number)

    def _save(self) -> None:
        if self.done.steps == self.saved:
            return
        leader, unfinished = self.engine.global_rank == 0, self.folder / UNFINISHED
        state = self.folder / f"step-{self.done.steps}"
        try:
            if leader:
                shutil.rmtree(unfinished, ignore_errors=True)
                unfinished.mkdir(parents=True)
                if self.log is not None:
                    self.log.sync()
            dist.barrier()
            zero.save_state(self.engine, unfinished, {"segment": self.segment.number, "done": self.done.steps})
            if leader:
                position = {"done": self.done.steps, "sums": self.done.sums.tolist(), "origin": self.origin}
                write_json(unfinished / POSITION, position)
                publish(unfinished, state)
        except (OSError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "inline_container" not in str(error):  # where torch 2 finds a disk full
                raise
            shutil.rmtree(unfinished, ignore_errors=True)
            reason = error if isinstance(error, OSError) else OSError("the disk took only a part of it")
            raise cannot_write(state, reason) from error
        dist.barrier()  # no rank ends, and so ends the others, before the state has its name
        self.saved, self.saved_at = self.done.steps, time.monotonic()


def publish(unfinished: Path, state: Path) -> None:
    """Gives a written state its name, then deletes the older ones."""
    for written in [*unfinished.rglob("*"), unfinished]:
        sync(written)
    os.replace(unfinished, state)
    sync(state.parent)
    for older in state.parent.glob("step-*"):
        if older != state:
            shutil.rmtree(older, ignore_errors=True)
