"""Training metrics as they arise: JSON lines always, tensorboard and wandb where `training.loggers` names them.

In: one record per optimiser step, and one of the validation. Out: {folder}/{segment}.jsonl, {folder}/tensorboard/,
{folder}/wandb/. A segment that is trained again starts its lines anew and replaces its steps in tensorboard; one that goes on
from a saved state keeps those up to it.
"""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError
from scripts.eagle3.files import sync, write_text

# the id under which all segments of a run log to one wandb run
WANDB_ID = "wandb_run_id"


class MetricsLog:
    """An open log of one segment; a context manager."""

    def __init__(
        self,
        folder: Path,
        segment: int,
        first_step: int,
        loggers: Sequence[str],
        settings: Mapping[str, Any],
        done: int = 0,
    ) -> None:
        """`first_step`: the segment's first optimiser step; `done`: how many are logged already, by the job that is continued.

        settings: what wandb shows as the run's configuration.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = self._wandb = None
        if "wandb" in loggers:
            self._wandb = _start_wandb(folder, settings)
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step + done)
        self._path = folder / f"{segment}.jsonl"
        write_text(self._path, kept_lines(self._path, range(first_step, first_step + done)))

    def write(self, record: Mapping[str, Any], kind: str = "train") -> None:
        """Writes one record with `step` among its keys; its lists are by TTT step."""
        with open(self._path, "a", encoding="utf-8") as file:
            file.write(json.dumps({"kind": kind, **record}) + "\n")
        scalars = {f"{kind}/{name}": value for name, value in flat(record).items() if name not in ("step", "segment")}
        if self._tensorboard is not None:
            for name, value in scalars.items():
                self._tensorboard.add_scalar(name, value, record["step"])
        if self._wandb is not None:
            self._wandb.log(scalars, step=record["step"])

    def sync(self) -> None:
        """What was written is on the disk afterwards."""
        if self._tensorboard is not None:
            self._tensorboard.flush()
        sync(self._path)

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(kind is not None))


def kept_lines(path: Path, steps: range) -> str:
    """The lines of these training steps; of a killed job the last line may be half."""
    if not steps or not path.is_file():
        return ""
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines(keepends=True):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            break
        if record["kind"] == "train" and record["step"] in steps:
            kept.append(line)
    return "".join(kept)


def flat(record: Mapping[str, Any]) -> dict[str, Any]:
    """Lists become one key per item (`accuracy/0`, ...); what is neither a list nor a number is left out."""
    result: dict[str, Any] = {}
    for name, value in record.items():
        if isinstance(value, list):
            result.update({f"{name}/{index}": item for index, item in enumerate(value)})
        elif isinstance(value, int | float):
            result[name] = value
    return result


def _start_wandb(folder: Path, settings: Mapping[str, Any]) -> Any:
    import wandb

    path = folder / WANDB_ID
    if not path.is_file():
        path.write_text(secrets.token_hex(4))
    try:
        return wandb.init(
            project=os.environ.get("WANDB_PROJECT", "eagle3-flow"),
            name=folder.resolve().parent.name,
            id=path.read_text().strip(),
            resume="allow",
            dir=str(folder),
            config=dict(settings),
            settings=wandb.Settings(silent=True),
        )
    except Exception as error:  # wandb's errors have no common base class
        line = (str(error).splitlines() or [type(error).__name__])[0]
        advice = "log in to it, or set WANDB_MODE=offline"
        raise StageError(f"training.loggers: wandb does not start ({line}); {advice}") from error
