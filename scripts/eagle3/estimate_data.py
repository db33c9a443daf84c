"""Rows and tokens of a run, part by part: read from what the run has written, estimated from its sources otherwise.

In: the configuration, the run's folder, how the target writes. Out: `PartData` for each part, for `val` and for each
evaluation suite; each figure says whether it was measured.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from scripts.eagle3.config import Config, Regeneration, Source
from scripts.eagle3.conversations import check_source, read_source, source_name
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.estimate_facts import Text
from scripts.eagle3.files import read_json
from scripts.eagle3.messages import normalise
from scripts.eagle3.rows import CONVERSATIONS, read_provenance
from scripts.eagle3.target import resolve_sampling

# rows that are read for their lengths; beyond them rows are only counted
SAMPLE_ROWS = 5000
# what a row of a data set that cannot be looked at is taken to be: one question of this many characters
UNSEEN_CHARACTERS = 600


class Figure(NamedTuple):
    """A number, and whether it was measured or counted rather than estimated."""

    value: float
    measured: bool

    def __add__(self, other: Any) -> "Figure":
        return Figure(self.value + other.value, self.measured and other.measured)

    def times(self, factor: float) -> "Figure":
        """`factor` times as many; as well known as one."""
        return Figure(self.value * factor, self.measured)


ZERO = Figure(0, True)


def total(figures: Iterable[Figure]) -> Figure:
    """The sum; measured where every summand is."""
    return sum(figures, ZERO)


@dataclass(frozen=True)
class Sample:
    """Conversations looked at: for each the characters before the first user turn, and of each turn (asked, answered)."""

    rows: Figure
    conversations: list[tuple[int, list[tuple[int, int]]]]


@dataclass(frozen=True)
class PartData:
    """One part: conversations, turns to answer, characters; generated tokens; training rows and their tokens."""

    name: str
    conversations: Figure
    turns: Figure
    characters: Figure
    prompt_tokens: Figure
    answer_tokens: Figure
    rows: Figure
    tokens: Figure


@dataclass
class RunData:
    """All parts, validation, and the evaluation suites together (their `tokens` are those of prompts and answers)."""

    parts: list[PartData]
    validation: PartData
    evaluation: PartData
    notes: list[str] = field(default_factory=list)

    @property
    def every_part(self) -> list[PartData]:
        return [*self.parts, self.validation]


@contextmanager
def finished_file(path: Path) -> Iterator[None]:
    """Around reading a file that the run has made: whatever a damaged one raises becomes a StageError that names it."""
    try:
        yield
    except PermissionError as error:
        raise StageError(f"{path}: cannot be read ({error.strerror}); mend its permissions, then run again") from error
    except (StageError, OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        missing = f"no {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{path}: ")
        said = missing.partition("\n")[0][:200] or type(error).__name__
        raise StageError(f"{path}: not as its stage writes it ({said}): damaged; delete it, then run again") from error


def run_data(config: Config, run: Path, text: Text) -> RunData:
    """Measured figures of the run where they are there and of this configuration, estimates for the rest."""
    notes: list[str] = []
    names = [f"part-{number}" for number in range(config.scatter.parts)]
    collected = read_collected(config, run, [*names, "val"])
    if collected is None:
        everything = join([sample_source(source, notes) for source in config.conversations.train])
        held_out = config.conversations.validation_fraction
        shares = {name: (1 - held_out) / len(names) for name in names} | {"val": held_out}
        # which rows are duplicates or held out is only known once they are collected
        rows = Figure(everything.rows.value, False)
        collected = {name: Sample(rows.times(share), everything.conversations) for name, share in shares.items()}
    limit = config.rows.max_length
    given = config.responses == "given"
    longest = limit if config.responses == "given" else config.responses.max_tokens
    estimates = {name: estimate(name, sample, text, longest, limit, given) for name, sample in collected.items()}
    parts = with_measurements(config, run, estimates)
    return RunData([parts[name] for name in names], parts["val"], evaluation_data(config, run, text, notes), notes)


# -- what conversations there are -------------------------------------------------------------------------------------


def read_collected(config: Config, run: Path, names: list[str]) -> dict[str, Sample] | None:
    """The collected conversations of this configuration's sources; None where there are none (yet)."""
    ledger = run / "conversations/ledger.json"
    if not ledger.is_file():
        return None
    with finished_file(ledger):
        made_of = [(source["source"], source["limit"]) for source in read_json(ledger)["sources"]]
    if made_of != [(source_name(source), source.limit) for source in config.conversations.train]:
        return None
    samples = {}
    for name in names:
        paths = [run / f"conversations/{name}/shard-{shard}.parquet" for shard in range(config.scatter.shards_per_part)]
        if not all(path.is_file() for path in paths):
            return None
        samples[name] = sample_parquet(paths)
    return samples


def sample_parquet(paths: list[Path]) -> Sample:
    """Of collected conversations: every row is counted, the first of each file are looked at."""
    import pyarrow.parquet as pq

    rows, conversations = 0, []
    for path in paths:
        with finished_file(path), pq.ParquetFile(path) as file:
            rows += file.metadata.num_rows
            batches = file.iter_batches(batch_size=1024, columns=[CONVERSATIONS.field("messages").name])
            found = (row["messages"] for batch in batches for row in batch.to_pylist())
            conversations += [lengths(messages) for messages in islice(found, SAMPLE_ROWS // len(paths))]
    return Sample(Figure(rows, True), conversations)


def sample_source(source: Source, notes: list[str]) -> Sample:
    """A file is counted, its first rows are looked at; of a data set elsewhere only `limit` is known."""
    path = Path(source.path)
    if not path.is_file():
        if source.limit is None:
            raise StageError(
                f"{source.path}: the number of rows is not known without loading the data set; set `limit` of this source "
                "in `conversations:`, to all of its rows if you want them all"
            )
        check_source(source)
        notes.append(f"{source.path}: not looked at; {source.limit} rows of one question with {UNSEEN_CHARACTERS} characters")
        return Sample(Figure(source.limit, False), [(0, [(UNSEEN_CHARACTERS, 0)])])
    check_source(source)
    conversations = []
    for _, raw in islice(read_source(source), SAMPLE_ROWS):
        try:
            conversations.append(lengths(normalise(raw)))
        except RowRejected:
            continue
    counted = count_rows(path)
    return Sample(Figure(min(counted, source.limit or counted), True), conversations)


def count_rows(path: Path) -> int:
    """Rows of a .jsonl or .parquet file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet as pq

        return int(pq.read_metadata(path).num_rows)
    with open(path, "rb") as file:
        return sum(bool(line.strip()) for line in file)


def lengths(messages: Iterable[Mapping[str, Any]]) -> tuple[int, list[tuple[int, int]]]:
    """Characters of one conversation: before its first user turn, and of each user turn and the answer given to it.

    A tool call is an answer, and its results are the next turn.
    """
    before, turns = 0, list[tuple[int, int]]()
    for message in messages:
        size = len(message["content"]) + sum(len(str(message.get(key) or "")) for key in ("reasoning_content", "tool_calls"))
        if message["role"] == "system":
            before += size
        elif message["role"] == "user" or (message["role"] == "tool" and turns[-1][1]):
            turns.append((size, 0))
        elif message["role"] == "tool":
            turns[-1] = (turns[-1][0] + size, 0)
        else:
            turns[-1] = (turns[-1][0], size)
    return before, turns


def join(samples: list[Sample]) -> Sample:
    """One sample of all sources, each weighted by its rows."""
    rows = total(sample.rows for sample in samples)
    conversations: list[tuple[int, list[tuple[int, int]]]] = []
    for sample in samples:
        share = math.ceil(sample.rows.value / max(rows.value, 1) * SAMPLE_ROWS)
        few = sample.conversations[:share]
        # a short source is repeated, so that each of its rows weighs as much as one of a long source
        conversations += (few * (share // max(len(few), 1) + 1))[:share]
    return Sample(rows, conversations)


# -- tokens of them ---------------------------------------------------------------------------------------------------


def mean_answer(text: Text, longest: float) -> float:
    """Mean tokens of an answer that is cut at `longest`: lengths fall off exponentially from the target's own mean."""
    if longest <= 0:
        return 0.0
    if text.mean_answer_tokens is None:
        return longest
    return text.mean_answer_tokens * (1 - math.exp(-longest / text.mean_answer_tokens))


def estimate(name: str, sample: Sample, text: Text, longest: int, limit: int | None, given: bool = False) -> PartData:
    """Tokens of a part. longest: tokens of one answer; limit: of a row, None without one; given: answers are the data's."""
    sums = dict.fromkeys(("turns", "characters", "prompt", "answer", "rows", "tokens"), 0.0)
    for before, turns in sample.conversations:
        history = text.template_tokens_per_conversation + before / text.characters_per_token
        sums["characters"] += before
        for asked, answered in turns:
            prompt = history + asked / text.characters_per_token + text.template_tokens_per_turn
            room = math.inf if limit is None else limit - prompt
            if room < 1 or (given and not answered):
                break
            answer = min(room, answered / text.characters_per_token) if given else mean_answer(text, min(longest, room))
            history = prompt + answer
            sums["turns"] += 1
            sums["characters"] += asked + answered
            sums["prompt"] += prompt
            sums["answer"] += answer
            if text.rewrites_history:
                sums["rows"] += 1
                sums["tokens"] += history
        if turns and not text.rewrites_history:
            sums["rows"] += 1
            sums["tokens"] += history
    scale = sample.rows.value / max(len(sample.conversations), 1)
    figure = {key: Figure(value * scale, False) for key, value in sums.items()}
    whole = len(sample.conversations) == sample.rows.value and sample.rows.measured
    turns_figure = Figure(figure["turns"].value, whole)
    characters = Figure(figure["characters"].value, whole)
    return PartData(
        name, sample.rows, turns_figure, characters, figure["prompt"], figure["answer"], figure["rows"], figure["tokens"]
    )


def evaluation_data(config: Config, run: Path, text: Text, notes: list[str]) -> PartData:
    """All suites together: turns of one method, and the tokens of their prompts and answers."""
    suites = []
    for name, source in config.conversations.evaluation.items():
        path = run / f"conversations/eval/{name}.parquet"
        sample = sample_parquet([path]) if path.is_file() else sample_source(source, notes)
        suites.append(estimate(name, sample, text, config.evaluation.max_tokens, None))
    figures = {key: total(getattr(suite, key) for suite in suites) for key in FIGURES}
    figures["rows"] = figures["turns"]
    # every request is a row of its own when states are captured for the simulation
    figures["tokens"] = figures["prompt_tokens"] + figures["answer_tokens"]
    answered = measured_evaluation(config, run)
    if answered is not None:
        figures |= answered
    return PartData("eval", **figures)


FIGURES = ("conversations", "turns", "characters", "prompt_tokens", "answer_tokens", "rows", "tokens")


def measured_evaluation(config: Config, run: Path) -> dict[str, Figure] | None:
    """Prompt and answer tokens of the baseline, where it was measured with these settings."""
    prompts = answers = turns = 0
    for suite in config.conversations.evaluation:
        path = run / f"evaluation/baseline/{suite}.json"
        if not path.is_file():
            return None
        with finished_file(path):
            record = read_json(path)
            if record["settings"]["max_tokens"] != config.evaluation.max_tokens:
                return None
            turns += len(record["requests"])
            prompts += sum(len(request["prompt_ids"]) for request in record["requests"])
            answers += sum(len(request["output_ids"]) for request in record["requests"])
    found = {"turns": turns, "rows": turns, "prompt_tokens": prompts, "answer_tokens": answers, "tokens": prompts + answers}
    return {key: Figure(value, True) for key, value in found.items()}


# -- what the run has measured ----------------------------------------------------------------------------------------


def with_measurements(config: Config, run: Path, estimates: dict[str, PartData]) -> dict[str, PartData]:
    """Each part with the figures that it has written; the others take their answers' mean length and rows from those."""
    measured = {name: measure(config, run, part) for name, part in estimates.items()}
    corrected = {}
    for name, part in estimates.items():
        values = {key: getattr(part, key) for key in FIGURES}
        for key in ("answer_tokens", "rows", "tokens"):
            known = [other for other in measured if key in measured[other]]
            expected = sum(getattr(estimates[other], key).value for other in known)
            if expected:
                ratio = sum(measured[other][key].value for other in known) / expected
                values[key] = Figure(values[key].value * ratio, False)
        corrected[name] = PartData(name, **{**values, **measured[name]})
    return corrected


def measure(config: Config, run: Path, part: PartData) -> dict[str, Figure]:
    """The figures of one part that its files hold; those of other settings do not count."""
    found: dict[str, Figure] = {}
    answered = list(response_counts(config, run, part.name))
    if len(answered) == config.scatter.shards_per_part:
        found["turns"] = Figure(sum(counts["turns_out"] for counts in answered), True)
        found["answer_tokens"] = Figure(sum(counts["response_tokens"] for counts in answered), True)
    if tokens_made(config, run, part.name):
        path = run / f"tokens/{part.name}/counts.json"
        with finished_file(path):
            counts = read_json(path)
            rows, tokens = int(counts["rows"]), int(counts["tokens"])
        check_token_shards(path.parent)
        found |= {"rows": Figure(rows, True), "tokens": Figure(tokens, True)}
    return found


def check_token_shards(folder: Path) -> None:
    """StageError for one that is cut short: what describes a Parquet file stands at its end."""
    import pyarrow.parquet as pq

    for path in sorted(folder.glob("shard-*.parquet")):
        with finished_file(path):
            pq.read_metadata(path)


def response_counts(config: Config, run: Path, part: str) -> Iterator[dict[str, int]]:
    """Turns and answer tokens of the part's answered shards that were answered as the configuration says."""
    if config.responses == "given":
        return
    for shard in range(config.scatter.shards_per_part):
        path = run / f"responses/{part}/shard-{shard}.parquet"
        if path.is_file():
            with finished_file(path):
                provenance, counts = read_provenance(path)
                responses, rows = dict(provenance["responses"]), provenance["rows"]
                counts = {name: int(counts[name]) for name in ("turns_out", "response_tokens")}
            if answered_as(config, responses) and rows == config.rows.model_dump():
                yield counts


def answered_as(config: Config, recorded: dict[str, Any]) -> bool:
    """Whether answers were made with these settings. What the target's own files decide is compared where they are here."""
    if not isinstance(config.responses, Regeneration):
        return False
    asked = config.responses
    if Path(config.target.path).is_dir():
        asked = resolve_sampling(config.target, asked)
    unknown = {name for name in ("temperature", "top_p") if getattr(asked, name) is None}
    return {**recorded, **dict.fromkeys(unknown)} == asked.model_dump()


def tokens_made(config: Config, run: Path, part: str) -> bool:
    """Whether the part's token rows are there and were made with these settings."""
    path = run / f"tokens/{part}/counts.json"
    if not path.is_file():
        return False
    with finished_file(path):
        provenance = read_json(path)["provenance"]
        longest, made_of = provenance["tokens"]["max_length"], provenance["responses"]
        responses = None if "given" in made_of else dict(made_of["responses"])
    if longest != config.rows.max_length:
        return False
    return config.responses == "given" if responses is None else answered_as(config, responses)
