"""What the stages of a plan come to: what each file system must hold, and how long they take where two overlap.

In: the stages of `estimate`. Out: `DiskPlan` for a file system, seconds.
"""

from dataclasses import dataclass
from pathlib import Path

from scripts.eagle3.estimate import Job, StagePlan
from scripts.eagle3.estimate_done import STATES_STAGE
from scripts.extract_hidden_states import DISK_MARGIN

TRAINING_STAGE = "train_draft"


@dataclass(frozen=True)
class DiskPlan:
    """One file system: what it holds in the end and at most, what it needs on top of what is there, what is free."""

    path: Path
    holds: str
    final: float
    peak: float
    needed: float
    free: float


def plan_disk(stages: list[StagePlan], path: Path, holds: str, free: float, rolling: bool = False) -> DiskPlan:
    """Stages come one after the other; what a stage needs besides its files is gone when it has ended.

    rolling: the parts that an extraction needs besides are there until all are trained.
    """
    if rolling:  # the checkpoints are written beside the parts
        stages = sorted(stages, key=lambda stage: stage.name == STATES_STAGE)
    final = peak = left = needed = 0.0
    for stage in stages:
        final += stage.bytes_.value
        left += stage.bytes_left
        peak = max(peak, final + stage.extra)
        if stage.left:
            needed = max(needed, left + stage.extra - stage.extra_written)
    return DiskPlan(path, holds, final, peak, needed * DISK_MARGIN, free)


def seconds_together(stages: list[StagePlan], parts_on_disk: int, nodes: int) -> float:
    """Of extraction and training in rolling mode, one job on a node at a time; training goes first where both could start."""
    extraction, training = (next(stage for stage in stages if stage.name == name) for name in (STATES_STAGE, TRAINING_STAGE))
    *parts, validation = extraction.jobs
    # (is an extraction, number of its part)
    val = True, -1
    seconds = {val: _left(validation)}
    needs: dict[tuple[bool, int], list[tuple[bool, int]]] = {val: []}
    for number, (part, segment) in enumerate(zip(parts, training.jobs, strict=True)):
        seconds |= {(True, number): _left(part), (False, number): _left(segment)}
        needs[True, number] = [(False, number - parts_on_disk)] if number >= parts_on_disk else []
        needs[False, number] = [(True, number), val, *([(False, number - 1)] if number else [])]
    ends: dict[tuple[bool, int], float] = {}
    free = [0.0] * nodes
    while len(ends) < len(needs):
        can_start = {
            job: max([min(free), *(ends[need] for need in needed)])
            for job, needed in needs.items()
            if job not in ends and all(need in ends for need in needed)
        }
        job = min(can_start, key=lambda job: (can_start[job], job))
        ends[job] = can_start[job] + seconds[job]
        if seconds[job]:
            free[free.index(max(end for end in free if end <= can_start[job]))] = ends[job]
    return max(ends.values())


def _left(job: Job) -> float:
    return 0.0 if job.done else job.seconds
