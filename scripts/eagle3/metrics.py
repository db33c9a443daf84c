"""Training metrics as they arise: JSON lines always, tensorboard and wandb where `training.loggers` names them.

In: one record per optimiser step, and one of the validation. Out: {folder}/{segment}.jsonl, {folder}/tensorboard/,
{folder}/wandb/. A segment that is trained again starts its lines anew and replaces its steps in tensorboard.
"""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError

# the id under which all segments of a run log to one wandb run
WANDB_ID = "wandb_run_id"


class MetricsLog:
    """An open log of one segment; a context manager."""

    def __init__(
        self, folder: Path, segment: int, first_step: int, loggers: Sequence[str], settings: Mapping[str, Any]
    ) -> None:
        """`first_step`: the segment's first optimiser step. `settings`: what wandb shows as the run's configuration."""
        folder.mkdir(parents=True, exist_ok=True)
        self._tensorboard = self._wandb = None
        if "wandb" in loggers:
            self._wandb = _start_wandb(folder, settings)
        if "tensorboard" in loggers:
            from torch.utils.tensorboard import SummaryWriter

            self._tensorboard = SummaryWriter(str(folder / "tensorboard"), purge_step=first_step)
        self._path = folder / f"{segment}.jsonl"
        self._path.write_text("")

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

    def __enter__(self) -> "MetricsLog":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._tensorboard is not None:
            self._tensorboard.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code=int(kind is not None))


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
