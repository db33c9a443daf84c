"""Parts whose states were deleted after training (`training.rolling`): who may still ask for them, and what to do then.

In: hidden/part-*/ of a run: the shards, manifest.json, released.json where `release_part` has deleted the shards. Out: nothing,
or a StageError that names the ways on. Nothing of Snakemake is imported.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.eagle3.errors import StageError

RECORD = "released.json"


def is_released(folder: Path) -> bool:
    """Whether the states of this part were deleted and not made again since."""
    return (folder / RECORD).is_file() and not any(folder.glob("shard-*.pt"))


def require_states(folder: Path, shards: int) -> None:
    """StageError where a state shard of the part is missing."""
    for path in (folder / f"shard-{shard}.pt" for shard in range(shards)):
        if not path.is_file():
            why = "deleted after its segment was trained" if (folder / RECORD).is_file() else "no such file"
            raise StageError(f"{path}: {why}; to extract the part again: rm -r {folder}, then run again")


def refuse_deleted(workflow: Any, hidden: Path) -> None:
    """StageError, before any job, where a run would train again on parts that were deleted. `workflow` is Snakemake's.

    Extracting them again may take days of GPUs: that is for the user to say.
    """
    if not workflow.touch:
        jobs = [job for job in workflow.dag.needrun_jobs() if job.rule.name == "train_draft"]
        refuse_segments({int(job.wildcards.segment) for job in jobs}, hidden)


def refuse_segments(segments: Iterable[int], hidden: Path) -> None:
    """StageError where the part of one of these segments was deleted."""
    gone = sorted(segment for segment in segments if is_released(hidden / f"part-{segment}"))
    if not gone:
        return
    numbers = str(gone[0]) if len(gone) == 1 else f"{{{gone[0]}..{gone[-1]}}}"
    raise StageError(
        f"something changed that training depends on (-n says what), and the states of {len(gone)} parts (part-{gone[0]} to "
        f"part-{gone[-1]}) were deleted after they were trained; to extract and train them again: "
        f"rm -r {hidden}/part-{numbers}, then run again; to keep what is trained: accept the change once with --touch"
    )
