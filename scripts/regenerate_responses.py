"""The target answers the prompts of one part itself: the draft is to learn what this target says, not what others said.

In: `conversations/{part}/shard-{s}.parquet`. Out: `responses/{part}/shard-{s}.parquet`, one row per conversation, each
user turn with its whole rendered prompt and its answer as token ids (the stop token included). Finished answers are
kept in the store; a job that finds all of them there starts no engine.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.chat import check_thinking_variable, template_variables
from scripts.eagle3.config import Regeneration, Rows, Target
from scripts.eagle3.engine import Hardware, engine_version, load_engine, unload_engine
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.generation import Completion, Dialogue, Request, Sampling, run_requests
from scripts.eagle3.progress import Progress
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, read_provenance, read_rows, write_rows
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.store import RecordStore, open_store
from scripts.eagle3.target import fingerprint, load_tokenizer, resolve_sampling, stop_token_ids, text_config

LEDGER_LINES_SHOWN = 20
CUT_ANSWER = "answer cut at its limit, and responses.cut_answers is drop"


class Regenerator:
    """All dialogues of one part, and the store of their answers."""

    def __init__(
        self,
        dialogues: list[Dialogue],
        records: RecordStore,
        sampling: Sampling,
        responses: Regeneration,
        max_length: int,
    ) -> None:
        self.dialogues, self.records, self.sampling = dialogues, records, sampling
        self.max_tokens, self.max_length = responses.max_tokens, max_length
        self.drops_cut_answers = responses.cut_answers == "drop"
        # key of an unanswered request -> the dialogues that wait for it: equal prompts are answered once
        self.waiting: dict[str, list[Dialogue]] = {}

    def next_request(self, dialogue: Dialogue) -> Request | None:
        """Takes answers from the store as far as they go; the request of the first turn that has none.

        None where the dialogue has ended, or waits for a request that another one has made.
        """
        while dialogue.open:
            try:
                prompt_ids = dialogue.next_prompt()
            except RowRejected as rejection:
                dialogue.problem = str(rejection)
                return None
            room = self.max_length - len(prompt_ids)
            if room < 1:
                dialogue.problem = "over-long prompt"
                return None
            request = Request(prompt_ids, min(self.max_tokens, room), self.sampling)
            record = self.records.get(request.key)
            if record is None:
                dialogues = self.waiting.setdefault(request.key, [])
                dialogues.append(dialogue)
                return request if len(dialogues) == 1 else None
            self._take(dialogue, prompt_ids, Completion(record["output_ids"], record["finish_reason"]))
        return None

    def _take(self, dialogue: Dialogue, prompt_ids: list[int], completion: Completion) -> None:
        fault = dialogue.take(prompt_ids, completion)
        if self.drops_cut_answers and completion.finish_reason == "length":
            fault = CUT_ANSWER
        if fault in ("empty answer", CUT_ANSWER):
            dialogue.answered.pop()
        if fault and dialogue.open:
            dialogue.problem = fault

    def answer(self, llm: Any, pending: list[Request], in_flight: int) -> None:
        """Runs the pending requests and what follows from them; each answer is on disk before the next step."""
        turns = sum(dialogue.user_turns for dialogue in self.dialogues)
        progress = Progress("regenerate_responses", turns, "turns", done=sum(len(d.answered) for d in self.dialogues))

        def finished(request: Request, completion: Completion) -> list[Request]:
            record = {"output_ids": completion.output_ids, "finish_reason": completion.finish_reason}
            self.records.put(request.key, record)
            dialogues = self.waiting.pop(request.key)
            progress.advance(len(dialogues), tokens=len(completion.output_ids))
            return [follow_up for dialogue in dialogues if (follow_up := self.next_request(dialogue))]

        run_requests(llm, pending, in_flight, finished)
        progress.finish()


def run(
    target: Target,
    responses: Regeneration,
    rows: Rows,
    conversations: Path,
    shards: int,
    store: Path,
    output: Path,
    hardware: Hardware,
    max_rejected_fraction: float = 0.001,
) -> dict[str, Any]:
    """Answers every user turn of a part; returns the counts of all shards together.

    Raises StageError where conversations are missing, rows.max_length exceeds what the target takes, `responses.thinking`
    means nothing to the chat template, or more conversations than `max_rejected_fraction` ended without any answer (after
    all others are answered and stored); those that `cut_answers: drop` leaves without one are counted apart.
    """
    longest = text_config(target).get("max_position_embeddings")
    if longest and rows.max_length > longest:
        raise StageError(f"rows.max_length is {rows.max_length}, the target takes at most {longest} tokens; lower it")
    sources = [conversations / f"shard-{shard}.parquet" for shard in range(shards)]
    made_from = [read_provenance(path)[0] for path in sources]
    tokenizer = load_tokenizer(target)
    responses = resolve_sampling(target, responses)
    check_thinking_variable(tokenizer, responses)

    def dialogue_of(row: dict[str, Any]) -> Dialogue:
        return Dialogue(row, tokenizer, template_variables(responses, row["conversation_id"]))

    dialogues = [[dialogue_of(row) for row in read_rows(path, CONVERSATIONS)] for path in sources]
    together = [dialogue for shard in dialogues for dialogue in shard]
    stop_ids = tuple(stop_token_ids(target))
    sampling = Sampling(responses.temperature or 0.0, responses.top_p or 1.0, responses.seed, stop_ids)
    origin = {"target": fingerprint(target), "engine": engine_version()}
    with open_store(store, "regenerate_responses", origin, part=output.name) as opened:
        records = opened.records("answers")
        regenerator = Regenerator(together, records, sampling, responses, rows.max_length)
        pending = [request for dialogue in together if (request := regenerator.next_request(dialogue))]
        if pending:
            # the next turn's prompt begins with this turn's: the cache saves computing it again
            llm = load_engine(target, hardware, max_model_len=rows.max_length, eager=False, enable_prefix_caching=True)
            regenerator.answer(llm, pending, hardware.max_num_seqs)
            unload_engine(llm)
    _check_rejected(together, max_rejected_fraction, conversations)
    origin = {**origin, "responses": responses.model_dump(), "rows": rows.model_dump()}
    for shard, shard_dialogues in enumerate(dialogues):
        answered = [_to_row(dialogue) for dialogue in shard_dialogues if dialogue.answered]
        provenance = {**origin, **made_from[shard]}
        write_rows(output / f"shard-{shard}.parquet", answered, RESPONSES, provenance, _count(shard_dialogues))
    return _count(together)


def _to_row(dialogue: Dialogue) -> dict[str, Any]:
    turns = [
        {
            "prompt_ids": turn.prompt_ids,
            "response_ids": turn.completion.output_ids,
            "finish_reason": turn.completion.finish_reason,
        }
        for turn in dialogue.answered
    ]
    return {**{name: dialogue.row[name] for name in ("conversation_id", "source", "split")}, "turns": turns}


def _count(dialogues: Sequence[Dialogue]) -> dict[str, Any]:
    """in = out + rejected + dropped, turns_in = turns_out + turns_dropped; the ledger names each exception with its reason.

    dropped: conversations that `cut_answers: drop` left without an answer.
    """
    turns = [turn for dialogue in dialogues for turn in dialogue.answered]
    ledger = [
        {
            "conversation_id": dialogue.row["conversation_id"],
            "reason": dialogue.problem,
            "action": "cut" if dialogue.answered else "dropped" if dialogue.problem == CUT_ANSWER else "rejected",
            "turns_dropped": dialogue.user_turns - len(dialogue.answered),
        }
        for dialogue in dialogues
        if dialogue.problem
    ]
    return {
        "in": len(dialogues),
        "out": sum(bool(dialogue.answered) for dialogue in dialogues),
        "rejected": dict(Counter(entry["reason"] for entry in ledger if entry["action"] == "rejected")),
        "cut": dict(Counter(entry["reason"] for entry in ledger if entry["action"] == "cut")),
        "dropped": sum(entry["action"] == "dropped" for entry in ledger),
        "turns_in": sum(dialogue.user_turns for dialogue in dialogues),
        "turns_out": len(turns),
        "turns_dropped": sum(entry["turns_dropped"] for entry in ledger),
        "finish_reasons": dict(Counter(turn.completion.finish_reason for turn in turns)),
        "response_tokens": sum(len(turn.completion.output_ids) for turn in turns),
        "ledger": ledger,
    }


def _check_rejected(dialogues: Sequence[Dialogue], max_rejected_fraction: float, where: Path) -> None:
    counts = _count(dialogues)
    rejected = sum(counts["rejected"].values())
    if rejected <= max_rejected_fraction * len(dialogues):
        return
    for entry in counts["ledger"][:LEDGER_LINES_SHOWN]:
        print(f"{entry['action']}: conversation {entry['conversation_id']}: {entry['reason']}", file=sys.stderr)
    reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(counts["rejected"].items()))
    raise StageError(
        f"{where}: {rejected} of {len(dialogues)} conversations were rejected ({reasons}), at most "
        f"{max_rejected_fraction:.2%} may be; mend the sources or raise conversations.max_rejected_fraction"
    )


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule regenerate_responses."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--responses", type=section(Regeneration), required=True, help="section of the config, JSON")
    parser.add_argument("--rows", type=section(Rows), required=True, help="section of the config, JSON")
    parser.add_argument("--max-rejected-fraction", type=float, default=0.001, help="of conversations; above it the stage fails")
    parser.add_argument("--conversations", type=Path, required=True, help="folder of the part's conversations")
    parser.add_argument("--shards", type=int, required=True, help="number of shard-*.parquet in it")
    parser.add_argument("--store", type=Path, required=True, help="root of the stores of finished work")
    parser.add_argument("--output", type=Path, required=True, help="folder of the part's responses")
    Hardware.add_options(parser)
    options = parser.parse_args(argv)
    counts = run(
        options.target,
        options.responses,
        options.rows,
        options.conversations,
        options.shards,
        options.store,
        options.output,
        Hardware.from_options(options),
        options.max_rejected_fraction,
    )
    ends = ", ".join(f"{count} {reason}" for reason, count in sorted(counts["finish_reasons"].items()))
    print(
        f"responses: {counts['turns_out']} of {counts['turns_in']} turns, {counts['out']} of {counts['in']}"
        f" conversations, {counts['response_tokens']} tokens; ended by {ends}"
    )


if __name__ == "__main__":
    run_stage(main)
