"""What a run will write and how long it will take, stage by stage, before it starts or while it is under way.

In: the configuration, the facts of `estimate_facts`, the rows and tokens of `estimate_data`, what the run's folder holds.
Out: `StagePlan` in the order of the pipeline. Finished work counts as written, its measured speed is used for what is left.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from scripts.eagle3.config import Config
from scripts.eagle3.estimate_data import (
    ZERO,
    Figure,
    PartData,
    RunData,
    response_counts,
    tokens_made,
    total,
)
from scripts.eagle3.estimate_done import STATES_STAGE, Finished, benchmark_seconds, unique_bytes
from scripts.eagle3.estimate_facts import Rate, Table, TargetFacts, active_parameters, draft_size, rate
from scripts.eagle3.shards import bytes_per_state

# of the target by the canary: for answers, states, and serving without and with the head
CANARY_LOADS = 4
ITEMSIZE = {"bfloat16": 2, "float32": 4}
# of a stored token besides its states: id and loss mask; of a row: key, offset and checksum
TOKEN_BYTES, ROW_BYTES = 5, 60


@dataclass(frozen=True)
class Place:
    """Where a run works: its folder, the store of hidden states, and the hardware of its jobs."""

    run: Path
    states: Path
    hardware: str
    gpus: int
    nodes: int
    max_num_seqs: int
    training_gpus: int
    # training.rolling.parts_on_disk, which reruns nothing and so is no part of the configuration that stages are given
    parts_on_disk: int = 2


@dataclass
class Job:
    """One job: `seconds` it will take, or has taken where `done`."""

    name: str
    seconds: float
    done: bool = False


@dataclass
class StagePlan:
    """One stage. `bytes_`: of all its files when it has ended; `written`: of them already; `extra`: besides while it runs.

    extra_written: of these already; moved: all that it writes, deleted files included.
    """

    name: str
    jobs: list[Job]
    rows_in: Figure = ZERO
    rows_out: Figure = ZERO
    tokens_in: Figure = ZERO
    tokens_out: Figure = ZERO
    bytes_: Figure = ZERO
    written: float = 0
    extra: float = 0
    extra_written: float = 0
    moved: float = 0
    on_states_disk: bool = False
    gpus: int = 0
    width: int = 1
    rate: Rate | None = None

    @property
    def left(self) -> list[Job]:
        """Jobs that are still to run."""
        return [job for job in self.jobs if not job.done]

    @property
    def seconds_left(self) -> float:
        """From the start of the first job to the end of the last, `width` of them at a time, the longest first."""
        ends = [0.0] * max(1, self.width)
        for job in sorted(self.left, key=lambda job: -job.seconds):
            ends[ends.index(min(ends))] += job.seconds
        return max(ends)

    @property
    def gpu_seconds_left(self) -> float:
        """Seconds of reserved GPUs."""
        return self.gpus * sum(job.seconds for job in self.left)

    @property
    def bytes_left(self) -> float:
        """Bytes still to be written that stay."""
        return max(0.0, self.bytes_.value - self.written) if self.left else 0.0


def keep_parts(stage: StagePlan, sizes: Sequence[float], written: Sequence[float], parts_on_disk: int) -> None:
    """Of an extraction whose parts are deleted after training: validation, the last of `sizes`, is all that stays."""
    *parts, validation = sizes
    to_come = [size for size, have, job in zip(parts, written, stage.jobs, strict=False) if have or not job.done]
    stage.extra += sum(sorted(to_come)[-parts_on_disk:])
    stage.extra_written, stage.written = sum(written[:-1]), written[-1]
    stage.bytes_ = Figure(validation, stage.bytes_.measured)


@dataclass
class Estimator:
    """Builds the stages of one run."""

    config: Config
    facts: TargetFacts
    table: Table
    place: Place
    data: RunData
    stages: list[StagePlan] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.machine = self.table.machine(self.place.hardware)
        self.disk, self.cpu = self.table.disk, self.table.cpu_work
        self.draft = draft_size(
            self.facts, self.config.draft, self.config.vocabulary.draft_vocab_size, len(self.config.target.aux_layer_ids)
        )
        self.active = active_parameters(self.facts.config)
        self.finished = Finished(self.config, self.place.run, self.place.states)
        self.layers = self.finished.layers
        self.engine_s = self.machine.engine_start_s + self.facts.weight_bytes / self.machine.weight_bytes_per_s
        self.state_bytes = len(self.layers) * bytes_per_state(self.facts.hidden_size, self.config.extraction.dtype)
        self.shards = self.config.scatter.shards_per_part
        self.rolling = self.config.training.rolling

    def plan(self) -> list[StagePlan]:
        """All stages in order."""
        for make in (
            self._fetch, self._collect, self._canary, self._regenerate, self._tokenize, self._extract, self._prepare_draft,
            self._train, self._select, self._export, self._evaluate, self._simulate, self._report,
        ):  # fmt: skip
            stage = make()
            if stage is not None:
                self.stages.append(stage)
        return self.stages

    # -- stages -------------------------------------------------------------------------------------------------------

    def _fetch(self) -> StagePlan | None:
        path = Path(self.config.target.path)
        if not self.config.target.path.startswith("results/targets/"):
            return None
        done = (path / "manifest.json").is_file()
        benchmark = path.parent / "benchmarks/fetch_demo_target.tsv"
        job = self._job("fetch_demo_target", benchmark, self.machine.job_start_s + self.cpu.fetch_demo_target_s, done)
        written = unique_bytes([path])
        size = Figure(written if done else self.facts.weight_bytes, done)
        return StagePlan("fetch_demo_target", [job], bytes_=size, written=written)

    def _collect(self) -> StagePlan:
        parts, disk = self.data.every_part, self.disk
        rows, characters = total(part.conversations for part in parts), total(part.characters for part in parts)
        done = all(path.is_file() for path in self._shards("conversations")) and rows.measured
        files = len(parts) * self.shards + len(self.config.conversations.evaluation)
        size = disk.conversation_per_character * (characters.value + self.data.evaluation.characters.value) + disk.file * files
        seconds = self.machine.job_start_s + rows.value / self.cpu.collect_rows_per_s
        jobs = [self._job("collect_conversations", self._benchmark("collect_conversations"), seconds, done)]
        return self._stage("collect_conversations", jobs, size, ["conversations"], rows_in=rows, rows_out=rows)

    def _regenerate(self) -> StagePlan | None:
        if self.config.responses == "given":
            return None
        parts = self.data.every_part
        done = [len(list(response_counts(self.config, self.place.run, part.name))) == self.shards for part in parts]
        work = [part.answer_tokens.value for part in parts]
        name, disk = "regenerate_responses", self.disk
        speed = self._measured_rate(name, parts, done, work, self._decode(self.place.max_num_seqs))
        jobs = self._engine_jobs(name, parts, done, work, speed)
        prompts, answers = total(part.prompt_tokens for part in parts), total(part.answer_tokens for part in parts)
        turns = total(part.turns for part in parts)
        size = (prompts.value + answers.value) * disk.response_per_token + len(parts) * self.shards * disk.file
        size += answers.value * disk.answer_record_per_token + turns.value * disk.answer_record
        rows = total(part.conversations for part in parts)
        return self._stage(
            name, jobs, size, ["responses", f"store/{name}"], rate=speed, gpus=self.place.gpus, width=self.place.nodes,
            rows_in=turns, rows_out=rows, tokens_in=prompts, tokens_out=answers,
        )  # fmt: skip

    def _tokenize(self) -> StagePlan:
        parts, disk = self.data.every_part, self.disk
        done = [tokens_made(self.config, self.place.run, part.name) for part in parts]
        jobs = [
            self._job(
                part.name,
                self._benchmark("tokenize_conversations", part.name),
                self.machine.job_start_s + part.tokens.value / self.cpu.tokenize_tokens_per_s,
                finished,
            )
            for part, finished in zip(parts, done, strict=True)
        ]
        rows, tokens = total(part.rows for part in parts), total(part.tokens for part in parts)
        size = tokens.value * disk.row_per_token + rows.value * disk.row + len(parts) * self.shards * disk.file
        # distinct tokens grow slowly with the text (Heaps' law, exponent one half)
        distinct = sum(min(self.facts.vocab_size, 12 * math.sqrt(part.tokens.value)) for part in parts)
        size += distinct * disk.count_per_distinct_token
        return self._stage(
            "tokenize_conversations", jobs, size, ["tokens"], width=self.place.nodes, tokens_in=tokens, tokens_out=tokens,
            rows_in=total(part.conversations for part in parts), rows_out=rows,
        )  # fmt: skip

    def _extract(self) -> StagePlan:
        name, parts = STATES_STAGE, self.data.every_part
        done = [self.finished.extracted(part) for part in parts]
        per_part = [
            part.tokens.value * (self.state_bytes + TOKEN_BYTES) + part.rows.value * ROW_BYTES - self._spared_bytes(part)
            for part in parts
        ]
        written = [self.finished.states_bytes(part) for part in parts]
        tokens, rows = total(part.tokens for part in parts), total(part.rows for part in parts)
        work = [part.tokens.value for part in parts]
        speed = self._measured_rate(name, parts, done, work, self._capture())
        open_share = [max(0.0, 1 - have / max(size, 1)) for have, size in zip(written, per_part, strict=True)]
        jobs = self._engine_jobs(name, parts, done, [a * b for a, b in zip(work, open_share, strict=True)], speed)
        # a shard with rejected rows is copied without them; at most one such shard for each job that runs
        shard_sizes = sorted((size / self.shards for size, end in zip(per_part, done, strict=True) if not end), reverse=True)
        stage = self._stage(
            name, jobs, sum(per_part), [], rate=speed, gpus=self.place.gpus, width=self.place.nodes,
            rows_in=rows, rows_out=rows, tokens_in=tokens, tokens_out=tokens, extra=sum(shard_sizes[: self.place.nodes]),
            moved=sum(per_part), on_states_disk=True,
        )  # fmt: skip
        stage.written = sum(written)
        stage.bytes_ = Figure(stage.written, True) if all(done) else Figure(sum(per_part), tokens.measured)
        if self.rolling:
            keep_parts(stage, per_part, written, self.place.parts_on_disk)
        return stage

    def _spared_bytes(self, part: PartData) -> float:
        """Of final states that are not stored: those of prompts, and of the last token of each answer."""
        if self.config.extraction.final_states == "all":
            return 0
        needed = max(part.answer_tokens.value - part.turns.value, 0)
        return max(part.tokens.value - needed, 0) * self.state_bytes / len(self.layers)

    def _prepare_draft(self) -> StagePlan:
        names, run = ("build_vocab_mapping", "draft_config", "extract_target_head"), self.place.run
        outputs = (run / "vocab/coverage.json", run / "draft/config.json", run / "target/head.safetensors")
        head = 2 * self.facts.vocab_size * self.facts.hidden_size * self.facts.head_itemsize
        reading = (0.0, 0.0, head / self.cpu.read_bytes_per_s)
        jobs = [
            self._job(name, self._benchmark(name), self.machine.job_start_s + seconds, output.is_file())
            for name, output, seconds in zip(names, outputs, reading, strict=True)
        ]
        size = head + self.facts.vocab_size + 8 * self.config.vocabulary.draft_vocab_size + self.disk.file
        return self._stage("prepare_draft", jobs, size, ["target", "vocab", "draft"])

    def _train(self) -> StagePlan:
        settings, name = self.config.training, "train_draft"
        extraction = next(stage for stage in self.stages if stage.name == STATES_STAGE)
        earlier = any(stage.left for stage in self.stages if stage is not extraction or not self.rolling)
        segments = range(settings.segments)
        done = [
            self.finished.trained(segment) and not earlier and (not self.rolling or extraction.jobs[segment].done)
            for segment in segments
        ]
        rows, tokens = total(part.rows for part in self.data.parts), total(part.tokens for part in self.data.parts)
        passes = self.rolling.passes if self.rolling else settings.segments
        validation = self.data.validation.tokens.value / self.table.scaling.validation_speedup
        trained = [passes * part.tokens.value for part in self.data.parts] if self.rolling else [tokens.value] * len(segments)
        work = [each + validation for each in trained]
        passed = settings.ttt_steps * self.draft.passed
        speed = rate(self.table, "train", self.place.hardware, self.place.training_gpus, self.facts.name, passed)
        start = self.machine.job_start_s + self.machine.training_start_s
        spent = [benchmark_seconds(self._benchmark(name, str(segment))) for segment in segments]
        whole = [end and not self.finished.continued(segment) for segment, end in zip(segments, done, strict=True)]
        known = [(each, took) for each, took, end in zip(work, spent, whole, strict=True) if end and took]
        if known:
            seconds = sum(max(took - start, 0.1 * took) for _, took in known)
            speed = Rate(sum(each for each, _ in known) / seconds, "this run", f"{len(known)} finished segments")
        jobs = [
            self._job(str(segment), self._benchmark(name, str(segment)), start + each / speed.tokens_per_s, end)
            for segment, each, end in zip(segments, work, done, strict=True)
        ]
        copies = 4 + ITEMSIZE[settings.dtype] + (12 if settings.zero_stage else 8)
        steps = math.ceil(tokens.value / settings.batch_tokens / settings.gradient_accumulation) * passes
        size = settings.segments * copies * self.draft.trained + steps * self.disk.metrics_per_step
        return self._stage(
            name, jobs, size, ["checkpoints", "metrics"], rate=speed, gpus=self.place.training_gpus,
            rows_in=rows.times(passes), tokens_in=tokens.times(passes),
        )  # fmt: skip

    def _select(self) -> StagePlan:
        tokens = self.data.validation.tokens
        work = tokens.value * self.config.training.segments / self.table.scaling.validation_speedup
        start = self.machine.job_start_s + self.machine.training_start_s
        done = (self.place.run / "selected.json").is_file() and not self.stages[-1].left
        one = rate(
            self.table, "train", self.place.hardware, self._one_gpu, self.facts.name,
            self.config.evaluation.methods["eagle3"].num_speculative_tokens * self.draft.passed,
        )  # fmt: skip
        job = self._job("select_checkpoint", self._benchmark("select_checkpoint"), start + work / one.tokens_per_s, done)
        return self._stage(
            "select_checkpoint", [job], 0, ["selected.json"], gpus=min(self.place.training_gpus, self.place.gpus), rate=one,
            tokens_in=tokens, rows_in=self.data.validation.rows,
        )  # fmt: skip

    def _export(self) -> StagePlan:
        facts, vocabulary = self.facts, self.config.vocabulary.draft_vocab_size
        exported = self.draft.trained + facts.hidden_size * (facts.vocab_size + vocabulary)
        size = exported * ITEMSIZE[self.config.target.dtype] + facts.vocab_size + 8 * vocabulary
        done = (self.place.run / "export/manifest.json").is_file() and not self.stages[-1].left
        seconds = self.machine.job_start_s + self.machine.training_start_s + 4 * size / self.cpu.read_bytes_per_s
        job = self._job("export_draft", self._benchmark("export_draft"), seconds, done)
        return self._stage("export_draft", [job], size, ["export"])

    def _evaluate(self) -> StagePlan:
        name, data = "evaluate_method", self.data.evaluation
        methods = list(self.config.evaluation.methods)
        head_changed = bool(self.stages[-1].left)
        done = [self.finished.evaluated(method) and not (head_changed and method == "eagle3") for method in methods]
        speed = self._decode(self.config.evaluation.max_num_seqs)
        parts = [PartData(method, *[data.conversations] * 7) for method in methods]
        work = [data.answer_tokens.value] * len(methods)
        speed = self._measured_rate(name, parts, done, work, speed)
        jobs = self._engine_jobs(name, parts, done, work, speed)
        size = 2 * len(methods) * (data.tokens.value * self.disk.evaluation_per_token + self.disk.file)
        times = len(methods)
        rows, prompts, answers = (figure.times(times) for figure in (data.turns, data.prompt_tokens, data.answer_tokens))
        folders = [*(f"evaluation/{method}" for method in methods), f"store/{name}"]
        return self._stage(
            name, jobs, size, folders, rate=speed, gpus=self.place.gpus, width=min(2, self.place.nodes), rows_in=rows,
            rows_out=rows, tokens_in=prompts, tokens_out=answers,
        )  # fmt: skip

    def _simulate(self) -> StagePlan:
        tokens, suites = self.data.evaluation.tokens, self.config.conversations.evaluation
        done = all((self.place.run / f"evaluation/simulated/{suite}.json").is_file() for suite in suites)
        done = done and not self.stages[-1].left
        speed = self._capture()
        seconds = self.machine.job_start_s + self.engine_s + self.machine.training_start_s + tokens.value / speed.tokens_per_s
        job = self._job("simulate_acceptance", self._benchmark("simulate_acceptance"), seconds, done)
        states = tokens.value * len(self.layers) * self.facts.hidden_size * ITEMSIZE[self.config.target.dtype]
        return self._stage(
            "simulate_acceptance", [job], len(suites) * self.disk.file, ["evaluation/simulated"], rate=speed,
            gpus=self.place.gpus, extra=states, rows_in=self.data.evaluation.turns, tokens_in=tokens,
        )  # fmt: skip

    def _canary(self) -> StagePlan | None:
        if not self.config.canary_first:
            return None
        done = (self.place.run / "canary/result.json").is_file()
        seconds = self.machine.job_start_s + CANARY_LOADS * self.engine_s + self.machine.training_start_s
        job = self._job("canary", self._benchmark("canary"), seconds, done)
        checkpoint = (4 + 3 * 4) * self.draft.trained  # weights, and what they are resumed from, in float32
        return self._stage("canary", [job], checkpoint, ["canary"], gpus=self.place.gpus)

    def _report(self) -> StagePlan:
        names = {"compare_methods": "evaluation/summary.json", "report": "report.html", "check_gate": "gate.passed"}
        upstream = any(stage.left for stage in self.stages)
        done = [(self.place.run / output).is_file() and not upstream for output in names.values()]
        jobs = [
            self._job(name, self._benchmark(name), self.machine.job_start_s, end) for name, end in zip(names, done, strict=True)
        ]
        size = self.disk.report + self.disk.job * sum(len(stage.jobs) for stage in self.stages)
        return self._stage("report", jobs, size, ["evaluation/plots", "report.html", "logs", "benchmarks"])

    # -- what they share ----------------------------------------------------------------------------------------------

    def _stage(self, name: str, jobs: list[Job], size: float, paths: Iterable[str], **values: object) -> StagePlan:
        written = unique_bytes(self.place.run / path for path in paths)
        done = all(job.done for job in jobs)
        return StagePlan(name, jobs, bytes_=Figure(written if done else size, done), written=written, **values)  # type: ignore[arg-type]

    def _job(self, name: str, benchmark: Path, seconds: float, done: bool) -> Job:
        return Job(name, (benchmark_seconds(benchmark) or 0.0) if done else seconds, done)

    def _engine_jobs(self, stage: str, parts: list[PartData], done: list[bool], work: list[float], speed: Rate) -> list[Job]:
        fixed = self.machine.job_start_s + self.engine_s
        return [
            self._job(part.name, self._benchmark(stage, part.name), fixed + tokens / speed.tokens_per_s, end)
            for part, tokens, end in zip(parts, work, done, strict=True)
        ]

    def _measured_rate(self, stage: str, parts: list[PartData], done: list[bool], work: list[float], other: Rate) -> Rate:
        """The speed of the parts that one undisturbed job has finished; `other` where there is none."""
        tokens = seconds = 0.0
        count = 0
        for part, end, amount in zip(parts, done, work, strict=True):
            took = benchmark_seconds(self._benchmark(stage, part.name))
            if end and took and self.finished.undisturbed(stage, part.name):
                tokens, count = tokens + amount, count + 1
                seconds += max(took - self.engine_s - self.machine.job_start_s, 0.1 * took)
        return Rate(tokens / seconds, "this run", f"{count} finished jobs") if tokens and seconds else other

    @property
    def _one_gpu(self) -> int:
        return min(1, self.place.gpus)

    def _decode(self, concurrency: int) -> Rate:
        return rate(self.table, "decode", self.place.hardware, self.place.gpus, self.facts.name, self.active, concurrency)

    def _capture(self) -> Rate:
        """Of a job that stores states: the engine's speed, or that of the writers of states where it is slower."""
        engine = rate(self.table, "prefill", self.place.hardware, self.place.gpus, self.facts.name, self.active)
        writer = self.table.capture
        bound = writer.bytes_per_s / self.state_bytes
        if engine.tokens_per_s <= bound:
            return engine._replace(source=f"the engine: {engine.source}")
        said = f"the writers of states: {writer.bytes_per_s / 1e9:.2f} GB/s, {self.state_bytes:,} bytes a token"
        return Rate(bound, "scaled", f"{said}; {writer.source}")

    def _benchmark(self, *names: str) -> Path:
        return self.place.run / "benchmarks" / ("/".join(names) + ".tsv")

    def _shards(self, folder: str) -> list[Path]:
        names = [part.name for part in self.data.every_part]
        return [self.place.run / f"{folder}/{name}/shard-{shard}.parquet" for name in names for shard in range(self.shards)]
