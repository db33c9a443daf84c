"""Rolling mode: the optimiser steps of a part are planned from its token shards, as most parts have no states at a time.

In: the token shards of a part, its states, the `training:` section, the steps of all parts. Out: the part's `Segment`, its
steps as packs of rows of those states. So the learning rate knows all steps from the first one on, and a part trains exactly
the steps that were counted for it, whichever of its rows the extraction rejected.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from scripts.eagle3.config import Training
from scripts.eagle3.errors import StageError, expect
from scripts.eagle3.packing import Pack, TrainingRows
from scripts.eagle3.training import Segment, plan_steps


class TokenMasks:
    """Keys and loss masks of a token shard: all that planning reads of an open shard of states."""

    def __init__(self, path: Path) -> None:
        """Reads two columns; StageError where the file is missing or damaged."""
        self.path = path
        try:
            table = pq.read_table(path, columns=["row_key", "loss_mask"])
            masks = table.column("loss_mask").combine_chunks()
            self.row_keys: list[str] = table.column("row_key").to_pylist()
        except (OSError, KeyError, pa.ArrowInvalid) as error:
            said = str(error).splitlines()[0]
            raise StageError(f"{path}: no token shard that can be read ({said}); delete and remake it") from error
        self._offsets = np.concatenate([[0], np.cumsum(masks.value_lengths().to_numpy(zero_copy_only=False))])
        self._mask = torch.from_numpy(masks.flatten().to_numpy(zero_copy_only=False).astype(np.bool_))

    def __len__(self) -> int:
        return len(self.row_keys)

    def loss_mask(self, index: int) -> torch.Tensor:
        """The mask [tokens] of row `index`."""
        return self._mask[self._offsets[index] : self._offsets[index + 1]]


def open_tokens(folder: Path, shards: int, settings: Training) -> TrainingRows:
    """The rows of a part's token shards, as they will be trained on; they have no states."""
    masks = [TokenMasks(folder / f"shard-{shard}.parquet") for shard in range(shards)]
    return TrainingRows(masks, settings.ttt_steps, settings.batch_tokens)  # type: ignore[arg-type] # for planning only


def row_keys(rows: TrainingRows) -> list[list[str]]:
    """The keys of all rows, shard by shard, those that teach nothing included."""
    return [shard.row_keys for shard in rows.shards]


def plan_part(
    rows: TrainingRows, rejected: Iterable[str], tokens: Path, counts: list[int], settings: Training, number: int
) -> Segment:
    """Segment `number`; rows: of the states of its part; rejected: keys of rows without states; tokens: the part's folder.

    counts: the steps of all segments. StageError where the part does not give the steps that were counted for it.
    """
    planned = open_tokens(tokens, len(rows.shards), settings)
    steps = plan_steps(planned, settings, number)
    expect(
        counts[number], len(steps), f"{tokens}: optimiser steps of segment {number}", "delete draft/schedule.json, run again"
    )
    steps = _on_states(steps, planned, rows, set(rejected), tokens)
    return Segment(number, steps, sum(counts[:number]), sum(counts))


def _on_states(
    steps: list[list[Pack]], planned: TrainingRows, rows: TrainingRows, rejected: set[str], where: Path
) -> list[list[Pack]]:
    """The planned steps with row numbers of `rows` in place of those of `planned`, rejected rows left out."""
    number_of = {rows.key(number): number for number in range(len(rows))}
    keys = [planned.key(number) for number in range(len(planned))]
    found = [number for number, key in enumerate(keys) if key in number_of]
    lost, foreign = set(keys) - number_of.keys() - rejected, number_of.keys() - set(keys)
    same = np.array_equal(planned.supervised[found], rows.supervised[[number_of[keys[number]] for number in found]])
    if lost or foreign or not same:
        raise StageError(
            f"{where}: expected the rows that {rows.shards[0].path.parent} holds or lists as rejected, found {len(lost)} "
            f"without states, {len(foreign)} states of other rows{'' if same else ', other loss masks'}; delete the "
            "manifest.json of the states and run again"
        )
    mapped = [[[number_of[keys[row]] for row in pack if keys[row] in number_of] for pack in step] for step in steps]
    kept = [[pack for pack in step if pack] for step in mapped]
    # where all rows of a step were rejected the one before is trained once more: the learning rate counts this step
    last = next(step for step in kept if step)
    return [last := step or last for step in kept]
