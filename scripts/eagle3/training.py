"""The training loop: one segment is one pass over the training rows, or in rolling mode the passes over one part.

In: a DeepSpeed engine around `TrainingDraft`, the rows, the `training:` section. Out: trained weights in the engine, a
metrics record per optimiser step, the segment's means, and what the validation rows say, simulated acceptance included.

All that decides the result is known beforehand: order and packing from (seed, segment), the learning rate from the
step, the normalisation from the loss masks. So a resumed run equals an uninterrupted one, also from any step inside a segment,
and no generator is saved.
"""

import math
import resource
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from scripts.eagle3.acceptance import acceptance
from scripts.eagle3.config import Training
from scripts.eagle3.draft import FLEX_BLOCK, target_ids
from scripts.eagle3.errors import StageError
from scripts.eagle3.metrics import MetricsLog
from scripts.eagle3.packing import Pack, PackedBatch, TrainingRows, pack_rows, read_ahead
from scripts.eagle3.progress import Progress
from scripts.eagle3.training_cost import DraftShape, peak_flops, step_flops
from scripts.eagle3.walk import WalkResult, add_row
from scripts.eagle3.zero import DTYPES, set_learning_rate, step_optimizer

if TYPE_CHECKING:
    from deepspeed import DeepSpeedEngine


class Segment(NamedTuple):
    """What one segment does: its optimiser steps, each the packs of all ranks, and where they lie in the run."""

    number: int
    steps: list[list[Pack]]
    first_step: int
    total_steps: int


class Done(NamedTuple):
    """How far a segment is: its finished optimiser steps, and the sums [5, K] over them that its means are made of."""

    steps: int
    sums: torch.Tensor


def nothing_done(settings: Training) -> Done:
    """The start of a segment."""
    return Done(0, torch.zeros(5, settings.ttt_steps, dtype=torch.float64))


def plan_segment(rows: TrainingRows, settings: Training, number: int) -> Segment:
    """Segment `number` of a run whose segments are passes over the same rows; `total_steps` counts all segments."""
    plans = [plan_steps(rows, settings, segment) for segment in range(settings.segments)]
    return Segment(number, plans[number], sum(map(len, plans[:number])), sum(map(len, plans)))


def plan_steps(rows: TrainingRows, settings: Training, segment: int) -> list[list[Pack]]:
    """The optimiser steps of one segment, each the packs of all ranks. The last step of a pass may be smaller."""
    size, rolling = settings.gradient_accumulation, settings.rolling
    seeds = [(settings.seed, segment, number) for number in range(rolling.passes)] if rolling else [(settings.seed, segment)]
    passes = [pack_rows(rows, seed) for seed in seeds]
    return [packs[start : start + size] for packs in passes for start in range(0, len(packs), size)]


def learning_rate(step: int, total_steps: int, settings: Training) -> float:
    """Of optimiser step `step` (from 0) of `total_steps`: linear warm-up, then the schedule down to 0."""
    warmup = math.ceil(settings.warmup_fraction * total_steps)
    if step < warmup:
        return settings.learning_rate * (step + 1) / warmup
    left = (total_steps - step) / (total_steps - warmup)
    decay = min(math.ceil(settings.decay_fraction * total_steps), total_steps - warmup)
    factor = {
        "linear": left,
        "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        "constant": 1.0,
        "wsd": min(1.0, (total_steps - step) / max(decay, 1)),
    }[settings.schedule]
    return settings.learning_rate * factor


def train_segment(
    engine: "DeepSpeedEngine",
    rows: TrainingRows,
    segment: Segment,
    settings: Training,
    log: MetricsLog | None,
    done: Done | None = None,
    after_step: Callable[[Done], None] = lambda done: None,
) -> dict[str, Any]:
    """Trains one segment; returns its mean metrics. StageError, naming the rows, where a loss is not finite.

    log: None on all ranks but the first. done: what the engine's weights have of the segment; None: nothing.
    """
    done = done or nothing_done(settings)
    rank, world = dist.get_rank(), dist.get_world_size()
    steps, first_step = segment.steps[done.steps :], segment.first_step + done.steps
    shares = [share(packs, rank, world) for packs in steps]
    batches = read_ahead(rows, [pack for own in shares for pack, _ in own], block_length(engine, settings))
    progress = Progress(f"train_draft: segment {segment.number}", len(segment.steps), "steps", done.steps) if log else None
    shape, peak = DraftShape.of(engine.module.config()), device_flops(settings)
    engine.train()
    for step, (packs, own) in enumerate(zip(steps, shares, strict=True), first_step):
        began, waited = time.perf_counter(), 0.0
        rate = learning_rate(step, segment.total_steps, settings)
        set_learning_rate(engine, rate)
        # DeepSpeed averages over ranks and micro-batches; wanted is the sum over the supervised positions of them all
        trained = [row for pack in packs for row in pack]
        masked = torch.tensor(rows.supervised[trained].sum(0)).clamp(min=1)
        normaliser = (masked / (world * engine.gradient_accumulation_steps())).to(engine.device)
        sums = torch.zeros_like(done.sums)
        for index, (_, counts) in enumerate(own):
            asked = time.perf_counter()
            batch = next(batches)
            waited += time.perf_counter() - asked
            weighted = normaliser if counts else torch.full_like(normaliser, torch.inf)
            loss, batch_sums, _ = engine(**inputs(engine, batch, settings), masked_tokens=weighted)
            require_finite(loss.item(), "loss", step, [row.key for row in batch.rows])
            engine.set_gradient_accumulation_boundary(index == len(own) - 1)
            engine.backward(loss)
            sums += counts * batch_sums.cpu()
        norm = step_optimizer(engine)
        require_finite(norm, "gradient norm", step, [rows.key(row) for row in trained])
        sums = sum_over_ranks(sums, engine)
        done = Done(done.steps + 1, done.sums + sums)
        elapsed, positions = time.perf_counter() - began, int(rows.positions[trained].sum())
        if log is not None and progress is not None:
            flops = step_flops(shape, rows.positions[trained], rows.supervised[trained])
            record = {
                **metrics(sums, settings),
                "learning_rate": rate,
                "grad_norm": norm,
                "tokens": positions,
                "tokens_per_s": positions / elapsed,
                "mfu": flops / (elapsed * peak * world) if peak else None,
                "loader_wait": waited / elapsed,
                "peak_memory_bytes": peak_memory_bytes(),
            }
            log.write({"step": step, "segment": segment.number, **record})
            progress.advance(tokens=positions, note=f"loss {record['loss']:.3f}")
        after_step(done)
    if progress is not None:
        progress.finish()
    return metrics(done.sums, settings)


@torch.no_grad()
def validate(
    engine: "DeepSpeedEngine", rows: TrainingRows, settings: Training, after_batch: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """The training metrics over all `rows`, and their simulated walk with K = ttt_steps."""
    rank, world = dist.get_rank(), dist.get_world_size()
    packs = pack_rows(rows, (settings.seed,))
    own = share(packs, rank, world)
    batches = read_ahead(rows, [pack for pack, _ in own], block_length(engine, settings))
    totals = torch.zeros(5, settings.ttt_steps, dtype=torch.float64)
    walk = WalkResult(settings.ttt_steps)
    ones = torch.ones(settings.ttt_steps, device=engine.device)
    engine.eval()
    for (_, counts), batch in zip(own, batches, strict=True):
        _, sums, drafted = engine(**inputs(engine, batch, settings), masked_tokens=ones)
        if counts:
            totals += sums.cpu()
            walk_batch(walk, batch, drafted.cpu(), engine.module.d2t())
        after_batch()
    counted = torch.tensor([walk.drafts, *walk.accepted_by_position, *walk.unknown_by_position], dtype=torch.float64)
    drafts, *by_position = sum_over_ranks(counted, engine).long().tolist()
    accepted, unknown = by_position[: settings.ttt_steps], by_position[settings.ttt_steps :]
    return {
        **metrics(sum_over_ranks(totals, engine), settings),
        **acceptance(drafts, accepted),
        "drafts": drafts,
        "accepted_by_position": accepted,
        "unknown_by_position": unknown,
    }


def share(packs: list[Pack], rank: int, world: int) -> list[tuple[Pack, bool]]:
    """One rank's part of `packs`, equally many on each rank: where they run out, one is repeated and does not count."""
    return [
        (packs[start + rank], True) if start + rank < len(packs) else (packs[0], False) for start in range(0, len(packs), world)
    ]


def inputs(engine: "DeepSpeedEngine", batch: PackedBatch, settings: Training) -> dict[str, torch.Tensor]:
    """The batch on the engine's device, states in the dtype that the draft computes in."""
    dtype = DTYPES[settings.dtype]
    return {
        name: tensor.to(engine.device, dtype if tensor.is_floating_point() else None) for name, tensor in batch.inputs.items()
    }


def block_length(engine: "DeepSpeedEngine", settings: Training) -> int:
    """Batches are padded to a multiple of this: all to one length with flex attention, which is compiled per length."""
    return -(-settings.batch_tokens // FLEX_BLOCK) * FLEX_BLOCK if engine.module.flex else 1


def require_finite(value: float, what: str, step: int, keys: Sequence[str]) -> None:
    """StageError naming the rows that `value` was made of, where it is NaN or infinite."""
    if not math.isfinite(value):
        raise StageError(
            f"step {step}: {what} is {value} on rows {', '.join(keys)}; nothing of this step is saved: look at the states of "
            "these rows, or lower training.learning_rate"
        )


def metrics(sums: torch.Tensor, settings: Training) -> dict[str, Any]:
    """Rates from the sums [5, K] of `ttt.step_sums`; lists are by TTT step.

    `accuracy` is marginal: right at this step. `conditional_accuracy`: among positions right at all earlier steps. Right is
    what the walk accepts, the row's own next token out of the whole vocabulary: the target's choice in greedy answers, a draw
    from its distribution in sampled ones. A token outside the draft vocabulary is never right.
    """
    loss, masked, correct, reached, right_again = sums
    by_step = loss / masked.clamp(min=1)
    decay = settings.step_loss_decay ** torch.arange(settings.ttt_steps)
    return {
        "loss": float((by_step * decay).sum()),
        "loss_by_step": by_step.tolist(),
        "accuracy": (correct / masked.clamp(min=1)).tolist(),
        "conditional_accuracy": (right_again / reached.clamp(min=1)).tolist(),
        "supervised_positions": int(masked[0]),
    }


def walk_batch(walk: WalkResult, batch: PackedBatch, drafted: torch.Tensor, d2t: torch.Tensor) -> None:
    """Walks the rows of one batch. drafted [K, T]: draft ids, -1 where no loss is taken, which no walk comes by."""
    proposed = torch.where(drafted < 0, drafted, target_ids(d2t)[drafted.clamp(min=0)])
    start = 0
    for row in batch.rows:
        end = start + len(row.token_ids) - 1
        add_row(walk, row.token_ids.long(), row.loss_mask, proposed[:, start:end])
        start = end


def sum_over_ranks(sums: torch.Tensor, engine: "DeepSpeedEngine") -> torch.Tensor:
    """The sum of all ranks' `sums`, on the CPU."""
    if dist.get_world_size() == 1:
        return sums
    moved = sums.to(engine.device)
    dist.all_reduce(moved)
    return moved.cpu()


def device_flops(settings: Training) -> float | None:
    """What this process's GPU can calculate; None on a CPU, and where it is not known."""
    return peak_flops(torch.cuda.get_device_name(), settings.dtype) if torch.cuda.is_available() else None


def peak_memory_bytes() -> int:
    """Largest use so far: of the GPU where there is one, else of this process."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
