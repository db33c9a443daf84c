"""Plans a run before the money is spent: rows, tokens, bytes, hours, GPU-hours and cost of each stage, and the largest risk.

In: the configuration, config/hardware.yaml, and what the run's folder holds already. Out: RUN/plan.json and RUN/plan.md,
which is printed too. No model is loaded and the target need not be on this machine. Exit 1 where a disk cannot hold the
run: after the table, one line with the path, what is needed and what is free.
"""

import argparse
import dataclasses
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts.eagle3.config import Config
from scripts.eagle3.errors import StageError
from scripts.eagle3.estimate import Estimator, Place, StagePlan
from scripts.eagle3.estimate_data import Figure, RunData, run_data
from scripts.eagle3.estimate_done import STATES_STAGE
from scripts.eagle3.estimate_facts import Table, TargetFacts, read_table, target_facts
from scripts.eagle3.estimate_totals import TRAINING_STAGE, DiskPlan, plan_disk, seconds_together
from scripts.eagle3.extraction import states_provenance
from scripts.eagle3.files import existing_parent, write_json, write_text
from scripts.eagle3.released import is_released
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.superseded import superseded

# a job's time limit: its planned time this many times over, in steps of these minutes
RUNTIME_FACTOR, RUNTIME_STEP_MIN = 2, 10


class Plan(NamedTuple):
    """Everything that is printed."""

    config: Config
    facts: TargetFacts
    table: Table
    place: Place
    data: RunData
    stages: list[StagePlan]
    disks: list[DiskPlan]

    @property
    def seconds_left(self) -> float:
        """Of all stages, one after the other but for extraction and training in rolling mode."""
        rolling = self.seconds_together
        apart = [stage for stage in self.stages if rolling is None or stage.name not in (STATES_STAGE, TRAINING_STAGE)]
        return sum(stage.seconds_left for stage in apart) + (rolling or 0.0)

    @property
    def seconds_together(self) -> float | None:
        """Of extraction and training in rolling mode, which overlap where there are nodes for it; else None."""
        if self.config.training.rolling is None:
            return None
        return seconds_together(self.stages, self.place.parts_on_disk, self.place.nodes)


def make_plan(config: Config, place: Place, hardware: Path) -> Plan:
    """Reads the table, the sources and the run's folder; writes nothing."""
    table = read_table(hardware)
    facts = target_facts(config.target, table)
    data = run_data(config, place.run, facts.text)
    data.notes.extend(superseded_notes(config, place))
    stages = Estimator(config, facts, table, place, data).plan()
    return Plan(config, facts, table, place, data, stages, disks(stages, place, config.training.rolling is not None))


def run(config: Config, place: Place, hardware: Path) -> None:
    """Writes and prints the plan; StageError where a disk is too small for it."""
    plan = make_plan(config, place, hardware)
    text = as_text(plan)
    write_json(place.run / "plan.json", as_record(plan))
    write_text(place.run / "plan.md", text)
    print(text, flush=True)
    for disk in plan.disks:
        if disk.needed > disk.free:
            raise StageError(
                f"{disk.path}: the run ({disk.holds}) needs {size(disk.needed)} more, {size(disk.free)} are free; make room, "
                "set storage.hidden_states to a larger disk, or plan fewer rows or shorter answers"
            )


def disks(stages: list[StagePlan], place: Place, rolling: bool) -> list[DiskPlan]:
    """One plan for each file system: the run's, and the hidden states' where they lie on another."""
    run, states = (existing_parent(path) for path in (place.run, place.states))
    free = {path: float(shutil.disk_usage(path).free) for path in (run, states)}
    if run.stat().st_dev == states.stat().st_dev:
        return [plan_disk(stages, place.run, "everything", free[run], rolling)]
    others = [stage for stage in stages if not stage.on_states_disk]
    mine = [stage for stage in stages if stage.on_states_disk]
    return [
        plan_disk(others, place.run, "all but hidden states", free[run]),
        plan_disk(mine, place.states, "hidden states", free[states]),
    ]


# -- what is said -----------------------------------------------------------------------------------------------------


def largest_risk(plan: Plan) -> str:
    """The risk that most of the disk or of the time left depends on, in one line."""
    seconds = plan.seconds_left or 1.0
    risks = []
    for disk in plan.disks:
        share = disk.needed / disk.free if disk.free else math.inf
        risks.append((share, f"disk: {disk.path} must take {size(disk.needed)} of {size(disk.free)} free ({share:.0%})"))
    scaled = [stage for stage in plan.stages if stage.rate and stage.rate.how == "scaled"]
    share = sum(stage.seconds_left for stage in scaled) / seconds
    worst = max(scaled, key=lambda stage: stage.seconds_left, default=None)
    if worst and worst.rate:
        said = f"{share:.0%} of the time left stands on speeds that were not measured on {plan.place.hardware} with this target"
        risks.append((share, f"speed: {said}; most of it is {worst.name}, scaled from {worst.rate.source}"))
    answers = next((stage for stage in plan.stages if stage.name == "regenerate_responses"), None)
    if answers and answers.left:
        share = answers.seconds_left / seconds
        mean = answers.tokens_out.value / max(answers.rows_in.value, 1)
        how = "measured on finished parts" if any(job.done for job in answers.jobs) else plan.facts.text.source
        limit = getattr(plan.config.responses, "max_tokens", 0)
        said = f"answers of {mean:.0f} tokens on average (at most {limit}; {how}) take {share:.0%} of the time left"
        risks.append((share, f"answers: {said}, and decide the bytes of the states"))
    return max(risks)[1]


def runtimes(plan: Plan) -> dict[str, int]:
    """Rule -> minutes: twice the planned time of its longest job."""
    longest = {stage.name: max(job.seconds for job in stage.jobs) for stage in plan.stages if stage.gpus}
    steps = {name: math.ceil(RUNTIME_FACTOR * seconds / 60 / RUNTIME_STEP_MIN) for name, seconds in longest.items()}
    return {name: RUNTIME_STEP_MIN * count for name, count in steps.items()}


def cost(gpu_seconds: float, plan: Plan) -> float | None:
    """Of reserved GPUs; None where the table has no price."""
    price = plan.table.machine(plan.place.hardware).price_per_gpu_hour
    return None if price is None else gpu_seconds / 3600 * price


def as_record(plan: Plan) -> dict[str, Any]:
    """plan.json."""
    gpu_seconds = sum(stage.gpu_seconds_left for stage in plan.stages)
    return {
        "target": {"name": plan.facts.name, "source": plan.facts.source, "weight_bytes": plan.facts.weight_bytes},
        "hardware": {"model": plan.place.hardware, "gpus": plan.place.gpus, "nodes": plan.place.nodes},
        "stages": {stage.name: stage_record(stage, plan) for stage in plan.stages},
        "totals": {
            "hours_left": plan.seconds_left / 3600,
            "hours_of_extraction_and_training": None if plan.seconds_together is None else plan.seconds_together / 3600,
            "hours_spent": sum(job.seconds for stage in plan.stages for job in stage.jobs if job.done) / 3600,
            "gpu_hours_left": gpu_seconds / 3600,
            "cost_left": cost(gpu_seconds, plan),
            "bytes_of_run": sum(stage.bytes_.value for stage in plan.stages if stage.name != "fetch_demo_target"),
        },
        "disks": [{**dataclasses.asdict(disk), "path": str(disk.path)} for disk in plan.disks],
        "largest_risk": largest_risk(plan),
        "runtime_min": runtimes(plan),
        "notes": plan.data.notes,
    }


def stage_record(stage: StagePlan, plan: Plan) -> dict[str, Any]:
    """One stage of plan.json."""
    figures = ("rows_in", "rows_out", "tokens_in", "tokens_out")
    return {
        "jobs": len(stage.jobs),
        "jobs_left": len(stage.left),
        **{name: figure_record(getattr(stage, name)) for name in figures},
        "bytes": figure_record(stage.bytes_),
        "bytes_written": stage.written,
        "bytes_besides_while_running": stage.extra,
        "bytes_moved": stage.moved or stage.bytes_.value,
        "hours_left": stage.seconds_left / 3600,
        "gpu_hours_left": stage.gpu_seconds_left / 3600,
        "cost_left": cost(stage.gpu_seconds_left, plan),
        "tokens_per_s": stage.rate._asdict() if stage.rate else None,
    }


def figure_record(figure: Figure) -> dict[str, Any]:
    """A figure of plan.json."""
    return {"value": round(figure.value), "how": "measured" if figure.measured else "estimated"}


def as_text(plan: Plan) -> str:
    """plan.md."""
    place, machine = plan.place, plan.table.machine(plan.place.hardware)
    where = f"{place.nodes} x {place.gpus} {place.hardware}" if place.gpus else f"{place.hardware} ({machine.source})"
    price = machine.price_per_gpu_hour
    paid = f"${price:.2f} for a GPU-hour ({machine.price_source})" if price is not None else NO_PRICE
    lines = [
        f"# Plan of {plan.config.run}: {plan.facts.name} on {where}",
        "",
        f"Target: {plan.facts.source}. {paid if place.gpus else 'No GPUs, no cost.'}",
        "`~` is estimated, everything else measured or counted. Hours, GPU-hours and cost are of what is left to do.",
        "",
        *table(stage_rows(plan)),
        "",
        *(f"- {disk_line(disk)}" for disk in plan.disks),
        f"- **Largest risk:** {largest_risk(plan)}",
        *(f"- {note}" for note in [*plan.data.notes, *hardware_notes(plan)]),
        "",
        "Speeds, in tokens per second of one job:",
        "",
        *table([("stage", "tokens/s", "how", "source"), *(rate_row(stage) for stage in plan.stages if stage.rate)]),
    ]
    if place.gpus:
        limits = ", ".join(f"{name}: {minutes}" for name, minutes in runtimes(plan).items())
        lines += ["", f"Run time limits in minutes, {RUNTIME_FACTOR} x the longest job: {limits}"]
    return "\n".join(lines) + "\n"


NO_PRICE = "No price is known: set `price_per_gpu_hour` in config/hardware.yaml."
COLUMNS = ("stage", "jobs", "rows in", "rows out", "tokens in", "tokens out", "bytes", "time left", "GPU-hours", "cost")


def stage_rows(plan: Plan) -> list[tuple[str, ...]]:
    """The cells of the table of stages."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for stage in plan.stages:
        done = len(stage.jobs) - len(stage.left)
        jobs = f"{len(stage.jobs)}" + (f", {done} done" if done else "")
        figures = (stage.rows_in, stage.rows_out, stage.tokens_in, stage.tokens_out)
        spent = stage.gpu_seconds_left
        cells = [*(count(figure) for figure in figures), mark(stage.bytes_) + size(stage.bytes_.value)]
        rows.append((stage.name, jobs, *cells, duration(stage.seconds_left), gpu_hours(spent), money(cost(spent, plan))))
    gpu_seconds = sum(stage.gpu_seconds_left for stage in plan.stages)
    written = Figure(sum(s.bytes_.value for s in plan.stages), all(s.bytes_.measured for s in plan.stages))
    time = duration(plan.seconds_left)
    jobs = str(sum(len(stage.jobs) for stage in plan.stages))
    total = ("**total**", jobs, "", "", "", "", mark(written) + size(written.value), time, gpu_hours(gpu_seconds))
    return [*rows, (*total, money(cost(gpu_seconds, plan)))]


def hardware_notes(plan: Plan) -> list[str]:
    """What the plan takes for granted of the disk, and GPUs that are paid for and idle."""
    notes = []
    stage = next(stage for stage in plan.stages if stage.name == "extract_hidden_states")
    if stage.left and stage.rate and stage.tokens_in.value:
        per_s = stage.rate.tokens_per_s * stage.moved / stage.tokens_in.value
        notes.append(f"extraction writes {size(per_s)} a second per job at the planned speed; a slower disk makes it slower")
    notes += rolling_notes(plan, stage)
    packs, gpus = plan.config.training.gradient_accumulation, plan.place.training_gpus
    if gpus > 1 and packs % gpus:
        notes.append(f"training.gradient_accumulation is {packs}: train_draft refuses {gpus} GPUs, which must divide it")
    return notes


def rolling_notes(plan: Plan, extraction: StagePlan) -> list[str]:
    """What is never on the disk at the same time, what runs at the same time, and what was deleted too early."""
    if plan.config.training.rolling is None:
        return []
    kept = min(plan.place.parts_on_disk, plan.config.scatter.parts)
    notes = [f"rolling: {size(extraction.moved)} of states in all, {kept} of {plan.config.scatter.parts} parts at a time"]
    jobs = [job for stage in plan.stages if stage.name in (STATES_STAGE, TRAINING_STAGE) for job in stage.left]
    if jobs and plan.seconds_together is not None:
        one_by_one = duration(sum(job.seconds for job in jobs))
        took = duration(plan.seconds_together)
        where = f"{plan.place.nodes} node{'s' if plan.place.nodes > 1 else ''}"
        notes.append(f"rolling: extraction and training take {took} on {where}, {one_by_one} one by one")
    gone = [part.name for part in plan.data.parts if is_released(plan.place.run / "hidden" / part.name)]
    again = [job.name for job in extraction.left if job.name in gone]
    if again:
        said = f"{again[0]} to {again[-1]}" if len(again) > 1 else again[0]
        notes.append(f"rolling: deleted after a training with other settings, and counted as to be extracted: {said}")
    return notes


def disk_line(disk: DiskPlan) -> str:
    """What one file system must hold."""
    return (
        f"{disk.path} ({disk.holds}): {size(disk.final)} in the end, {size(disk.peak)} at most; needs {size(disk.needed)} "
        f"more, {size(disk.free)} are free"
    )


def superseded_notes(config: Config, place: Place) -> list[str]:
    """Stored states that nothing will read, if there are any; without the target it cannot be told which."""
    store = place.states / STATES_STAGE
    if not store.is_dir():
        return []
    try:
        provenance = states_provenance(config.target, config.extraction.dtype, config.extraction.final_states)
    except StageError:
        return []
    scatter = config.scatter
    files = superseded(store, place.run, provenance, scatter.parts, scatter.shards_per_part)
    if not files:
        return []
    rows, taken = sum(file.rows for file in files), size(sum(file.bytes for file in files))
    return [f"{rows} superseded rows take {taken} of {place.states}: `snakemake clean_rows` deletes them"]


def rate_row(stage: StagePlan) -> tuple[str, ...]:
    """One line of the table of speeds."""
    assert stage.rate is not None
    return stage.name, f"{stage.rate.tokens_per_s:,.0f}", stage.rate.how, stage.rate.source


def table(rows: Iterable[Sequence[str]]) -> list[str]:
    """Markdown, columns aligned so that it reads well on a screen."""
    rows = [list(row) for row in rows]
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in rows]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def mark(figure: Figure) -> str:
    """`~` before an estimate."""
    return "" if figure.measured else "~"


def count(figure: Figure) -> str:
    """E.g. `~1,200,000`; nothing for a stage that has none of them."""
    return mark(figure) + f"{figure.value:,.0f}" if figure.value else ""


def size(value: float) -> str:
    """E.g. `5.73 TB`, decimal."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if value >= factor:
            return f"{value / factor:.2f} {unit}"
    return f"{value / 1e3:.0f} kB"


def duration(seconds: float) -> str:
    """E.g. `1.6 min`, `3.2 h`."""
    return f"{seconds / 3600:,.1f} h" if seconds >= 3600 else f"{seconds / 60:.1f} min"


def gpu_hours(gpu_seconds: float) -> str:
    """Nothing for a stage without GPUs."""
    return f"{gpu_seconds / 3600:,.1f}" if gpu_seconds else ""


def money(value: float | None) -> str:
    """Nothing where there is no price or nothing to pay."""
    return f"${value:,.0f}" if value else ""


def check_options(options: argparse.Namespace) -> None:
    """StageError where a number, or the name of the hardware, cannot be meant."""
    if not options.gpu_model.strip():
        known = ", ".join(read_table(options.hardware).hardware)
        raise StageError(f"--gpu-model is empty: expected one of {known}; set gpu_model of `plan` in the profile (GPU_MODEL)")
    for name, least in {"gpus": 0, "nodes": 1, "max_num_seqs": 1, "training_gpus": 0}.items():
        found = getattr(options, name)
        if found is not None and found < least:
            option = f"--{name.replace('_', '-')}"
            raise StageError(f"{option} is {found}: expected at least {least}; mend it under `plan` in the profile")
    if (options.gpu_model.lower() == "cpu") != (options.gpus == 0):
        raise StageError(f"--gpu-model {options.gpu_model} with --gpus {options.gpus}: cpu has 0 GPUs, all others at least 1")
    have = options.gpus * options.nodes
    if options.training_gpus is not None and options.training_gpus > have:
        where = f"a node has {options.gpus} (--gpus)" if options.nodes == 1 else f"{options.nodes} nodes have {have}"
        raise StageError(f"--training-gpus is {options.training_gpus}: {where}; lower it")


def main(argv: Sequence[str] | None = None) -> None:
    """Command line: see --help."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", type=section(Config), required=True, help="the whole configuration as JSON")
    parser.add_argument("--run", type=Path, required=True, help="the run's folder, e.g. results/demo; it need not exist")
    parser.add_argument("--storage", type=Path, required=True, help="root of the store of hidden states")
    parser.add_argument("--hardware", type=Path, required=True, help="config/hardware.yaml")
    parser.add_argument("--gpu-model", required=True, help="name of an entry in it, or cpu")
    parser.add_argument("--gpus", type=int, required=True, help="GPUs of one node; 0 on a CPU machine")
    parser.add_argument("--nodes", type=int, default=1, help="nodes that can work at once")
    parser.add_argument("--max-num-seqs", type=int, default=128, help="as regenerate_responses is given")
    parser.add_argument("--parts-on-disk", type=int, default=2, help="training.rolling.parts_on_disk")
    parser.add_argument("--training-gpus", type=int, help="GPUs of train_draft, on all its nodes; default: one node's")
    options = parser.parse_args(argv)
    check_options(options)
    place = Place(
        options.run,
        options.storage,
        options.gpu_model.lower(),
        options.gpus,
        options.nodes,
        options.max_num_seqs,
        options.gpus if options.training_gpus is None else options.training_gpus,
        options.parts_on_disk,
    )
    run(options.config, place, options.hardware)


if __name__ == "__main__":
    run_stage(main)
