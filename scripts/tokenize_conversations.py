"""Makes the training rows of one part: token ids once and for all, with a loss mask on what the target says.

In: responses/{part}/shard-{s}.parquet, or conversations/{part}/shard-{s}.parquet with `--responses given`. Out:
tokens/{part}/shard-{s}.parquet and counts.json: figures, the ledger of what was left out, and how often each token
occurs under the mask, for the vocabulary map.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from scripts.eagle3.chat import rows_from_turns, split_given_turns, tools_of
from scripts.eagle3.config import Regeneration, Rows, Target
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.files import write_json
from scripts.eagle3.progress import Progress
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, TOKENS, read_provenance, read_rows, row_key, write_rows
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import fingerprint, load_tokenizer, resolve_sampling, stop_token_ids, text_config

COUNTED = [
    *("conversations", "conversations_rejected", "rows_made", "rows_rejected", "rows_duplicate", "rows"),
    *("tokens", "masked_tokens", "rows_cut", "tokens_cut"),
]
Responses = Regeneration | Literal["given"]


@dataclass
class Tokenization:
    """Turns the conversations of one part into rows and keeps the accounts.

    conversations = conversations_rejected + those that gave rows; rows_made = rows + rows_rejected + rows_duplicate.
    """

    max_length: int
    vocab_size: int
    tokenizer: Any = None
    stop_ids: Sequence[int] = ()
    counts: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    token_counts: Counter[int] = field(default_factory=Counter)
    ledger: list[dict[str, Any]] = field(default_factory=list)
    _seen: set[str] = field(default_factory=set)

    def add(self, conversation: dict[str, Any]) -> list[dict[str, Any]]:
        """The rows of one conversation or response row."""
        self.counts["conversations"] += 1
        try:
            turns = conversation.get("turns")
            if turns is None:
                tools = tools_of(conversation)
                turns = split_given_turns(self.tokenizer, conversation["messages"], self.stop_ids, tools)
            pairs = rows_from_turns(turns)
            if not pairs:
                raise RowRejected("no turns")
        except RowRejected as reason:
            self._drop("conversations_rejected", conversation, str(reason))
            return []
        self.finish_reasons.update(turn["finish_reason"] for turn in turns)
        made = [self._row(conversation, ids, mask) for ids, mask in pairs]
        return [row for row in made if row is not None]

    def _row(self, conversation: dict[str, Any], ids: list[int], mask: list[bool]) -> dict[str, Any] | None:
        self.counts["rows_made"] += 1
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise StageError(
                f"conversation {conversation['conversation_id']}: token {max(ids)} is outside the target's vocabulary "
                f"of {self.vocab_size}; its tokenizer does not belong to its config.json"
            )
        cut = len(ids) - self.max_length
        ids, mask = ids[: self.max_length], mask[: self.max_length]
        if not any(mask):
            self._drop("rows_rejected", conversation, f"nothing of the answer is within rows.max_length {self.max_length}")
            return None
        key = row_key(ids)
        if key in self._seen:
            self._drop("rows_duplicate", conversation, f"the part has a row with the same token ids, {key}")
            return None
        self._seen.add(key)
        answer = [token for token, masked in zip(ids, mask, strict=True) if masked]
        self.token_counts.update(answer)
        self.counts.update({"rows": 1, "tokens": len(ids), "masked_tokens": len(answer)})
        self.counts.update({"rows_cut": int(cut > 0), "tokens_cut": max(cut, 0)})
        origin = {name: conversation[name] for name in ("conversation_id", "source", "split")}
        return {"row_key": key, **origin, "input_ids": ids, "loss_mask": mask}

    def _drop(self, kind: str, conversation: dict[str, Any], reason: str) -> None:
        self.counts[kind] += 1
        self.ledger.append(
            {"kind": kind, **{name: conversation[name] for name in ("conversation_id", "source")}, "reason": reason}
        )

    def check_rejected(self, limit: float, where: Path) -> None:
        """Raises StageError where more than the share `limit` was rejected; duplicates are not rejections."""
        rejected = [entry for entry in self.ledger if entry["kind"] != "rows_duplicate"]
        total = self.counts["conversations_rejected"] + self.counts["rows_made"]
        if len(rejected) > limit * total:
            raise StageError(
                f"{where}: {rejected[0]['source']}: {rejected[0]['reason']}; {len(rejected)} of {total} rows were "
                f"rejected, conversations.max_rejected_fraction allows a share of {limit:g}; mend the data, or raise "
                "the limit that the reason names"
            )
        if not self.counts["rows"]:
            raise StageError(f"{where}: no row is left of {self.counts['conversations']} conversations; give more of them")

    def record(self) -> dict[str, Any]:
        """The part's figures and ledger as JSON."""
        counts = {name: self.counts[name] for name in COUNTED}
        if counts["rows_made"] != counts["rows"] + counts["rows_rejected"] + counts["rows_duplicate"]:
            raise AssertionError(f"the accounts do not close: {counts}")
        return {**counts, "finish_reasons": dict(self.finish_reasons), "ledger": self.ledger}


def run(
    target: Target,
    rows: Rows,
    responses: Responses,
    source: Path,
    shards: int,
    output: Path,
    max_rejected_fraction: float,
) -> dict[str, Any]:
    """Writes the part's token shards and counts.json to the folder `output`; returns what counts.json holds.

    `source` is the folder of the part's responses, or conversations where `responses` is "given". StageError where an
    input is missing or was made with another target or other settings, or too much was rejected.
    """
    paths = [source / f"shard-{shard}.parquet" for shard in range(shards)]
    identity = fingerprint(target)
    origins = [read_provenance(path)[0] for path in paths]
    given = not isinstance(responses, Regeneration)
    if isinstance(responses, Regeneration):
        asked = resolve_sampling(target, responses).model_dump()
        for path, origin in zip(paths, origins, strict=True):
            check_provenance({"target": identity, "responses": asked}, origin, path)
    provenance = [
        {
            "target": {name: identity[name] for name in ("tokenizer", "chat_template")},
            "tokens": {"format": 1, "max_length": rows.max_length},
            "responses": {"given": origin} if given else origin,
        }
        for origin in origins
    ]
    part = Tokenization(rows.max_length, text_config(target)["vocab_size"])
    if given:
        part.tokenizer, part.stop_ids = load_tokenizer(target), stop_token_ids(target)
    progress = Progress("tokenize_conversations", shards, "shards")
    for shard, path in enumerate(paths):
        before = Counter(part.counts)
        made = [row for item in read_rows(path, CONVERSATIONS if given else RESPONSES) for row in part.add(item)]
        counts = dict(part.counts - before)
        write_rows(output / path.name, made, TOKENS, provenance[shard], counts)
        progress.advance(tokens=counts.get("tokens", 0))
    progress.finish()
    part.check_rejected(max_rejected_fraction, source)
    token_counts = {str(token): count for token, count in part.token_counts.items()}
    record = {**part.record(), "provenance": provenance[0], "token_counts": token_counts}
    write_json(output / "counts.json", record)
    return record


def responses_option(text: str) -> Responses:
    """An argparse type: `given`, or the `responses:` section as JSON."""
    try:
        return TypeAdapter(Responses).validate_python("given" if text.strip('"') == "given" else json.loads(text))
    except (json.JSONDecodeError, ValidationError) as error:
        raise argparse.ArgumentTypeError(f"expected `given` or the responses section as JSON, found {text}") from error


def main(argv: Sequence[str] | None = None) -> None:
    """Reads the options and runs the stage."""
    parser = argparse.ArgumentParser(description="Make the training rows of one part.")
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--rows", type=section(Rows), required=True, help="section of the config, JSON")
    parser.add_argument("--responses", type=responses_option, required=True, help="`given`, or section of the config, JSON")
    parser.add_argument("--max-rejected-fraction", type=float, required=True, help="share of rejected rows that is tolerated")
    parser.add_argument("--input", type=Path, required=True, help="the part's responses, or conversations where given")
    parser.add_argument("--shards", type=int, required=True, help="shards of the part")
    parser.add_argument("--output", type=Path, required=True, help="folder for the part's token shards and counts.json")
    options = parser.parse_args(argv)
    record = run(
        options.target,
        options.rows,
        options.responses,
        options.input,
        options.shards,
        options.output,
        options.max_rejected_fraction,
    )
    print(
        f"tokens: {record['rows']} rows of {record['conversations']} conversations, {record['tokens']} tokens, "
        f"{record['masked_tokens']} of them under the loss mask, {record['rows_cut']} rows cut"
    )


if __name__ == "__main__":
    run_stage(main)
