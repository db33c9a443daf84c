"""Conversations: read from their sources, normalised, de-duplicated, decontaminated, split and dealt.

In: sources (JSON Lines, Parquet, `datasets` folders and ids). Out: rows of the schema `rows.CONVERSATIONS`, in source
order, and one ledger entry for each row that was not kept.
"""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, TypeVar

from scripts.eagle3.config import Source
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.files import sha256_file, sha256_json
from scripts.eagle3.messages import MEDIA_COLUMNS, WithImages, conversation_id, normalise, normalise_tools, stored

Row = dict[str, Any]
Item = TypeVar("Item")
COLUMNS = ("id", "messages", "conversations", "tools", *MEDIA_COLUMNS)
# Rows that are read at once where a file has images beside its text: those columns are looked at, and are large.
MEDIA_BATCH = 64
GRAM = 5
# A run of letters and digits is a word; so is each character of the scripts that are written without spaces.
UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
WORD = re.compile(rf"[{UNSPACED}]|[^\W{UNSPACED}]+")


# -- sources ----------------------------------------------------------------------------------------------------------


def check_source(source: Source) -> None:
    """Raises StageError where a source is a file or folder that is not there, or a file of an unknown kind."""
    path = Path(source.path)
    if path.is_file():
        if path.suffix not in (".jsonl", ".parquet"):
            raise StageError(
                f"{path}: expected a .jsonl or .parquet file or a `datasets` folder, found {path.suffix or 'no suffix'}"
            )
    elif not path.is_dir() and (path.suffix in (".jsonl", ".parquet", ".json") or path.is_absolute() or len(path.parts) > 2):
        raise StageError(f"{path}: no such file or folder; mend the source's path in `conversations:`")


def source_name(source: Source) -> str:
    """What the ledger calls a source: the file's or folder's own name, or the data set's id; no folders."""
    path = Path(source.path)
    return path.name if path.exists() else source.path


def source_record(source: Source) -> dict[str, Any]:
    """What identifies a source in the ledger: name, revision and split or sha256 of the file."""
    record: dict[str, Any] = {"source": source_name(source), "limit": source.limit}
    if Path(source.path).is_file():
        return {**record, "sha256": sha256_file(Path(source.path))}
    return {**record, "revision": source.revision, "split": source.split}


def read_source(source: Source) -> Iterator[tuple[int, Any]]:
    """(row number from 1, raw row) for each row; in place of a row that cannot be parsed, a RowRejected."""
    check_source(source)
    path = Path(source.path)
    if path.is_file():
        rows = _read_jsonl(path) if path.suffix == ".jsonl" else _read_parquet(path)
    else:
        rows = enumerate(_load_dataset(source), start=1)
    return islice(rows, source.limit)


def _read_jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                yield number, json.loads(line.decode("utf-8-sig"))
            except UnicodeDecodeError:
                yield number, RowRejected("not UTF-8")
            except json.JSONDecodeError as error:
                yield number, RowRejected(f"not JSON ({error.msg})")
            except RecursionError:
                yield number, RowRejected("not JSON (nested too deeply)")


def _read_parquet(path: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    number = 0
    try:
        with pq.ParquetFile(path) as file:
            columns = [name for name in file.schema_arrow.names if name in COLUMNS]
            size = MEDIA_BATCH if set(columns) & set(MEDIA_COLUMNS) else 65536
            for batch in file.iter_batches(batch_size=size, columns=columns):
                for row in batch.to_pylist():
                    number += 1
                    yield number, row
    except (pa.ArrowInvalid, OSError) as error:
        raise StageError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from error


def _load_dataset(source: Source) -> Iterable[Any]:
    from datasets import load_dataset
    from datasets.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        return load_dataset(source.path, split=source.split, revision=source.revision)
    except Exception as error:  # the library raises a dozen kinds: builders, hub client, Arrow
        cause = error.__cause__ or error  # a DatasetGenerationError says nothing itself
        said = (str(cause).splitlines() or ["no reason given"])[0][:200]
        raise StageError(
            f"{source.path}: `datasets` cannot load split {source.split} ({type(cause).__name__}: {said}); mend path, "
            "split or revision of the source, or fetch the data set where there is a network"
        ) from error


# -- rows ---------------------------------------------------------------------------------------------------------------


def prompt_key(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """Equal for conversations with the same tools whose user turns are equal up to case and white space."""
    turns = [" ".join(message["content"].lower().split()) for message in messages if message["role"] == "user"]
    return sha256_json([*turns, tools] if tools else turns)


# -- decontamination --------------------------------------------------------------------------------------------------


def words(text: str) -> list[str]:
    """Lower-cased words."""
    return WORD.findall(text.lower())


def grams(text: str) -> set[str]:
    """The word 5-grams of a text; empty for fewer than five words."""
    found = words(text)
    return {" ".join(found[start : start + GRAM]) for start in range(len(found) - GRAM + 1)}


def _short_key(text: str) -> str:
    return " ".join(words(text)) or text.strip()


class Decontamination:
    """Finds evaluation prompts in training conversations.

    Each user message of an evaluation row is looked for on its own. A message of fewer than five words counts only
    where it opens its row, and then only an equal user message is a match: "Why?" as a follow-up is nobody's
    property.
    """

    def __init__(self, evaluation: Iterable[Row], overlap: float) -> None:
        self.overlap = overlap
        self._sources: list[str] = []
        self._sizes: list[int] = []
        self._by_gram: dict[str, list[int]] = defaultdict(list)
        self._short: dict[str, str] = {}
        for row in evaluation:
            user = [message["content"] for message in row["messages"] if message["role"] == "user"]
            for number, text in enumerate(user):
                found = grams(text)
                if found:
                    for gram in found:
                        self._by_gram[gram].append(len(self._sizes))
                    self._sizes.append(len(found))
                    self._sources.append(row["source"])
                elif number == 0:
                    self._short.setdefault(_short_key(text), row["source"])

    def match(self, messages: Sequence[Mapping[str, Any]]) -> tuple[str, float] | None:
        """(source of the evaluation row, share of its 5-grams found) of the worst match; None below the limit."""
        seen: set[str] = set()
        for message in messages:
            text = message["content"]
            if message["role"] == "user":
                exact = self._short.get(_short_key(text))
                if exact is not None:
                    return exact, 1.0
            if message["role"] != "system":
                seen |= grams(text)
        shared = Counter(prompt for gram in seen for prompt in self._by_gram.get(gram, ()))
        shares = {prompt: count / self._sizes[prompt] for prompt, count in sorted(shared.items())}
        worst = max(shares, key=shares.__getitem__, default=None)
        return (self._sources[worst], shares[worst]) if worst is not None and shares[worst] >= self.overlap else None


# -- collecting -------------------------------------------------------------------------------------------------------


@dataclass
class Ledger:
    """Accounts of one group of sources: read = kept + duplicates + contaminated + rejected."""

    read: int = 0
    kept: int = 0
    duplicates: list[dict[str, Any]] = field(default_factory=list)
    contaminated: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[dict[str, Any]] = field(default_factory=list)
    with_images: int = 0  # of the rejected

    def counts(self) -> dict[str, int]:
        """The figures; that they add up is checked here. Rows with images are some of the rejected."""
        dropped = {name: len(getattr(self, name)) for name in ("duplicates", "contaminated", "rejected")}
        if self.read != self.kept + sum(dropped.values()):
            raise AssertionError(f"the ledger does not close: {self.read} read, {self.kept} kept, {dropped}")
        return {"read": self.read, "kept": self.kept, **dropped, "with_images": self.with_images}

    def check_rejected(self, limit: float) -> None:
        """Raises StageError, naming the first malformed row, where their share is above `limit`."""
        if len(self.rejected) > limit * self.read:
            first = self.rejected[0]
            images = f" ({self.with_images} of them for their images or videos)" if self.with_images else ""
            raise StageError(
                f"{first['source']}: row {first['row']}: {first['reason']}; {len(self.rejected)} of {self.read} rows "
                f"are malformed{images}, conversations.max_rejected_fraction allows a share of {limit:g}; mend or remove them"
            )


def collect(sources: Iterable[Source], ledger: Ledger, split: str, decontamination: Decontamination | None = None) -> list[Row]:
    """The rows to keep, in source order, `split` filled in; every other row is entered in `ledger` with its reason.

    Of rows with the same user turns the first is kept, so that appended rows never change earlier ones.
    """
    rows: list[Row] = []
    first_with: dict[str, str] = {}
    for source in sources:
        name = source_name(source)
        for number, raw in read_source(source):
            ledger.read += 1
            given = raw.get("id") if isinstance(raw, Mapping) else None
            place: dict[str, Any] = {
                "source": name,
                "row": number,
                "id": given if isinstance(given, str | int) else None,
            }
            origin = f"{name}#{number if place['id'] is None else place['id']}"
            try:
                messages = normalise(raw)
                tools = normalise_tools(raw)
            except RowRejected as reason:
                ledger.rejected.append({**place, "reason": str(reason)})
                ledger.with_images += isinstance(reason, WithImages)
                continue
            key = prompt_key(messages, tools)
            if key in first_with:
                ledger.duplicates.append({**place, "first": first_with[key]})
                continue
            first_with[key] = origin
            found = decontamination.match(messages) if decontamination else None
            if found:
                ledger.contaminated.append({**place, "evaluation": found[0], "overlap": round(found[1], 4)})
                continue
            ledger.kept += 1
            identity = conversation_id(messages, tools)
            rows.append({"conversation_id": identity, "source": origin, "split": split, **stored(messages, tools)})
    return rows


# -- splitting and dealing --------------------------------------------------------------------------------------------


def in_validation(identity: str, fraction: float) -> bool:
    """Whether a conversation is held out: decided by its id alone, so neither other rows nor the parts matter."""
    digest = hashlib.sha256(b"validation\0" + identity.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def deal(items: Sequence[Item], shares: int) -> list[list[Item]]:
    """`items` in order as `shares` contiguous lists whose lengths differ by one at most."""
    bounds = [share * len(items) // shares for share in range(shares + 1)]
    return [list(items[start:end]) for start, end in pairwise(bounds)]
