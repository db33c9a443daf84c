"""One way to decode, measured on every evaluation suite with the real engine: outputs, accepted drafts, seconds.

In: `conversations/eval/{suite}.parquet`, for eagle3 the exported head, and for every method but the baseline the
baseline's results. Out: `evaluation/{method}/{suite}.json`. Prompts run in chunks of `max_num_seqs`; a finished chunk
is kept in the store with its counters and seconds, so that a killed job repeats only the chunk in flight.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.acceptance import Counters, read_counters
from scripts.eagle3.config import Evaluation, Method, Target
from scripts.eagle3.draft_files import OTHER_STATES, check_layers
from scripts.eagle3.engine import Hardware, device_name, engine_version, load_engine, unload_engine
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.files import read_json, sha256_file, sha256_json, write_text
from scripts.eagle3.generation import Completion, Dialogue, Request, Sampling, run_requests, token_texts, top_logprobs
from scripts.eagle3.progress import Progress
from scripts.eagle3.provenance import check_provenance
from scripts.eagle3.rows import CONVERSATIONS, read_provenance, read_rows
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.store import RecordStore, open_store
from scripts.eagle3.target import fingerprint, load_tokenizer, stop_token_ids, text_config
from scripts.eagle3.third_party import ForeignHead, canonical_ids, check_fits, read_foreign_head, served_folder

Entry = dict[str, Any]
BASELINE = "baseline"
WARM_UP_TOKENS = 8
# Conversations of each suite whose engine steps are recorded, for the examples of the report.
TRACED = 2
# An answer's text may tokenise to a few more ids than it was made of; the chat template adds some per turn.
SLACK_TOKENS = 64


class Evaluator:
    """Runs chunks of prompts with one method; the engine is loaded when the first unfinished chunk needs it."""

    def __init__(self, target: Target, evaluation: Evaluation, method: Method, draft: Path | None, hardware: Hardware):
        self.target, self.evaluation, self.method, self.draft = target, evaluation, method, draft
        self.hardware = dataclasses.replace(hardware, max_num_seqs=evaluation.max_num_seqs)
        self.sampling = Sampling(evaluation.temperature, stop_token_ids=tuple(stop_token_ids(target)))
        self.tokenizer = load_tokenizer(target)
        self.max_model_len = 0
        self._llm: Any = None

    def plan(self, suites: dict[str, list[Entry]]) -> None:
        """Makes the engine's context fit the longest conversation; StageError where the target takes less."""
        longest = text_config(self.target).get("max_position_embeddings")
        for suite, rows in suites.items():
            for row in rows:
                needed = self._most_tokens(row)
                if longest and needed > longest:
                    raise StageError(
                        f"suite {suite}, {row['conversation_id']}: may need {needed} tokens, the target takes {longest}"
                        "; lower evaluation.max_tokens or drop the prompt"
                    )
                self.max_model_len = max(self.max_model_len, needed)

    def _most_tokens(self, row: dict[str, Any]) -> int:
        dialogue = Dialogue(row, self.tokenizer)
        if not dialogue.open:
            raise StageError(f"{row['conversation_id']}: an evaluation prompt without a user turn; mend the suite")
        given = sum(len(self.tokenizer.encode(message["content"])) for message in row["messages"])
        return len(next_prompt(dialogue)) + given + dialogue.user_turns * (self.evaluation.max_tokens + SLACK_TOKENS)

    def engine(self, rows: list[Entry]) -> Any:
        """The engine, warmed up with the first turns of `rows` when it is loaded."""
        if self._llm is None:
            self._llm = load_engine(
                self.target,
                self.hardware,
                max_model_len=self.max_model_len,
                eager=False,
                speculative=speculative_config(self.method, self.draft),
                disable_log_stats=False,
            )
            prompts = [next_prompt(Dialogue(row, self.tokenizer)) for row in rows]
            warm_up = [Request(prompt, WARM_UP_TOKENS, self.sampling) for prompt in prompts]
            run_requests(self._llm, warm_up, self.evaluation.max_num_seqs, lambda *_: [])
        return self._llm

    def close(self) -> None:
        """Shuts the engine down, where one was loaded."""
        if self._llm is not None:
            unload_engine(self._llm)
            self._llm = None

    def run_chunk(self, rows: list[Entry], traced: int) -> dict[str, Any]:
        """Answers all turns of `rows`, the first `traced` conversations step by step; returns the chunk's record."""
        llm = self.engine(rows)
        dialogues = [Dialogue(row, self.tokenizer) for row in rows]

        def ask(dialogue: Dialogue, is_traced: bool) -> Request:
            prompt_ids = next_prompt(dialogue)
            return Request(prompt_ids, self.evaluation.max_tokens, self.sampling, owner=dialogue, traced=is_traced)

        def finished(request: Request, completion: Completion) -> list[Request]:
            request.owner.take(request.prompt_ids, completion)
            return [ask(request.owner, request.traced)] if request.owner.open else []

        before, started = read_counters(llm), time.perf_counter()
        first = [ask(dialogue, index < traced) for index, dialogue in enumerate(dialogues)]
        run_requests(llm, first, self.evaluation.max_num_seqs, finished)
        wall_s = time.perf_counter() - started
        requests = [entry for dialogue in dialogues for entry in self._entries(dialogue)]
        return {"requests": requests, "wall_s": wall_s, "counters": (read_counters(llm) - before).as_record()}

    def _entries(self, dialogue: Dialogue) -> Iterator[dict[str, Any]]:
        questions = [message["content"] for message in dialogue.row["messages"] if message["role"] == "user"]
        for turn, answered in enumerate(dialogue.answered):
            completion = answered.completion
            entry = {
                "id": dialogue.row["conversation_id"],
                "turn": turn,
                "prompt_ids": answered.prompt_ids,
                "output_ids": completion.output_ids,
                "finish_reason": completion.finish_reason,
            }
            if completion.steps is not None:
                # tokens of each engine step, the text of each token, the question: an example for the report
                texts = token_texts(self.tokenizer, completion.output_ids)
                entry |= {"steps": completion.steps, "texts": texts, "question": questions[turn]}
            yield entry


def next_prompt(dialogue: Dialogue) -> list[int]:
    """The dialogue's next prompt; StageError where the chat template refuses it, for no suite may lose prompts."""
    try:
        return dialogue.next_prompt()
    except RowRejected as rejection:
        raise StageError(f"evaluation prompt {dialogue.row['conversation_id']}: {rejection}; mend the suite") from None


def speculative_config(method: Method, draft: Path | None) -> dict[str, Any] | None:
    """What vLLM takes as `speculative_config`; None for the baseline."""
    if method.kind == "baseline":
        return None
    config: dict[str, Any] = {"method": method.kind, "num_speculative_tokens": method.num_speculative_tokens}
    if method.kind == "ngram":
        return {**config, "prompt_lookup_min": method.prompt_lookup_min, "prompt_lookup_max": method.prompt_lookup_max}
    return {**config, "model": str(draft)}


def find_differences(requests: list[Entry], baseline: list[Entry], where: str) -> list[Entry]:
    """The first differing token of each output that is not the baseline's: id, turn, position, both tokens.

    `position` is None where only the length differs. A turn whose prompt differs because an earlier answer of the same
    conversation did is `follows`. StageError where the two did not answer the same prompts.
    """
    differences: list[Entry] = []
    if [(entry["id"], entry["turn"]) for entry in requests] != [(entry["id"], entry["turn"]) for entry in baseline]:
        raise StageError(f"{where}: {len(baseline)} answers, not to the {len(requests)} prompts of this suite; remake it")
    for mine, theirs in zip(requests, baseline, strict=True):
        place = {"id": mine["id"], "turn": mine["turn"]}
        if mine["prompt_ids"] != theirs["prompt_ids"]:
            if not any(item["id"] == mine["id"] for item in differences):
                raise StageError(f"{where}: {mine['id']}, turn {mine['turn']}: the prompt differs; remake the baseline")
            differences.append({**place, "follows": True})
        elif mine["output_ids"] != theirs["output_ids"]:
            pairs = enumerate(zip(mine["output_ids"], theirs["output_ids"], strict=False))
            position, tokens = next(((index, pair) for index, pair in pairs if pair[0] != pair[1]), (None, (None, None)))
            differences.append({**place, "position": position, "token": tokens[0], "baseline_token": tokens[1]})
    return differences


def measure_gaps(evaluator: Evaluator, result: Entry, records: RecordStore, rows: list[Entry]) -> None:
    """Adds `logit_gap` to each difference: the target's logit of the baseline's token minus that of the method's.

    Where the gap is tiny both tokens are right: a tie. None where one of the two is not among the best tokens.
    """
    outputs = {(entry["id"], entry["turn"]): entry for entry in result["requests"]}
    for difference in result["differences"]:
        if difference.get("position") is None:
            continue
        entry = outputs[difference["id"], difference["turn"]]
        context = entry["prompt_ids"] + entry["output_ids"][: difference["position"]]
        key = "gap-" + sha256_json(context)[:32]
        best = records.get(key)
        if best is None:
            found = top_logprobs(evaluator.engine(rows), context)
            best = {str(token): logprob for token, logprob in found.items()}
            records.put(key, best)
        pair = [best.get(str(difference[name])) for name in ("baseline_token", "token")]
        difference["logit_gap"] = pair[0] - pair[1] if pair[0] is not None and pair[1] is not None else None


def run(
    target: Target,
    evaluation: Evaluation,
    name: str,
    export: Path | None,
    baseline: Path | None,
    conversations: Path,
    suites: Sequence[str],
    store: Path,
    output: Path,
    hardware: Hardware,
) -> None:
    """Measures method `name` on all suites with one engine load and writes one file per suite.

    Raises StageError where a suite, the head or the baseline's results are missing, before the engine is loaded.
    """
    if name not in evaluation.methods:
        raise StageError(f"evaluation.methods: no method {name}, there are {', '.join(evaluation.methods)}")
    method = evaluation.methods[name]
    rows = {suite: read_rows(conversations / f"{suite}.parquet", CONVERSATIONS) for suite in suites}
    made_from = {suite: read_provenance(conversations / f"{suite}.parquet")[0] for suite in suites}
    compared = _read_baseline(method, baseline, suites)
    draft, identity = find_draft(target, method, name, export, store)
    settings = {
        **evaluation.model_dump(include={"max_tokens", "temperature", "max_num_seqs"}),
        "method": method.model_dump(include=_settings_of(method)),
    }
    origin = {
        "target": fingerprint(target),
        "engine": engine_version(),
        "settings": settings,
        "draft": identity,
    }
    evaluator = Evaluator(target, evaluation, method, draft, hardware)
    evaluator.plan(rows)
    # seconds of different machines do not add up, so the device is part of the store's name
    with open_store(store, "evaluate_method", {**origin, "device": device_name()}, part=name) as opened:
        records = opened.records("chunks")
        results = {suite: _measure(evaluator, suite, rows[suite], records) for suite in suites}
        for suite, result in results.items():
            if suite in compared:
                where = f"{baseline}/{suite}.json"
                result["differences"] = find_differences(result["requests"], compared[suite]["requests"], where)
                measure_gaps(evaluator, result, records, rows[suite])
    for suite, result in results.items():
        provenance = {**origin, "conversations": made_from[suite]}
        about = {
            "method": name,
            "suite": suite,
            "settings": settings,
            "device": device_name(),
            "provenance": provenance,
        }
        # one line: indented, each token id would take a line of its own
        write_text(output / f"{suite}.json", json.dumps({**about, **result}, sort_keys=True) + "\n")
    evaluator.close()


def find_draft(
    target: Target, method: Method, name: str, export: Path | None, store: Path
) -> tuple[Path | None, dict[str, Any] | None]:
    """(folder that vLLM gets, what identifies the head), checked against the target; None for methods without a head."""
    if method.kind != "eagle3":
        return None, None
    third_party = read_third_party(target, method)
    if third_party is not None:
        head, ids = third_party
        folder = served_folder(head, target, ids, store / "heads" / name)
        return folder, {**draft_fingerprint(head.folder, target), "layer_ids": ids}
    if export is None:
        raise StageError(f"method {name} decodes with this run's head: --export is missing")
    from scripts.eagle3.export import check_manifest

    found = draft_fingerprint(export, target)
    check_manifest(export)
    check_layers(export / "config.json", target, OTHER_STATES)
    return export, {**found}


def read_third_party(target: Target, method: Method) -> tuple[ForeignHead, list[int]] | None:
    """The head that the method lists, and its auxiliary states; StageError where it does not fit. None for other methods."""
    if method.kind != "eagle3" or method.model is None:
        return None
    head = read_foreign_head(Path(method.model))
    check_fits(head, target)
    return head, canonical_ids(head, target, method.aux_layer_ids)


def _settings_of(method: Method) -> set[str]:
    if method.kind == BASELINE:
        return {"kind"}
    lookup = {"prompt_lookup_min", "prompt_lookup_max"} if method.kind == "ngram" else set()
    return {"kind", "num_speculative_tokens"} | lookup


def _read_baseline(method: Method, baseline: Path | None, suites: Sequence[str]) -> dict[str, Any]:
    if method.kind == BASELINE:
        return {}
    if baseline is None:
        raise StageError("--baseline is missing: the outputs are compared with the baseline's, so measure it first")
    return {suite: read_json(baseline / f"{suite}.json") for suite in suites}


def draft_fingerprint(folder: Path, target: Target) -> dict[str, str]:
    """What identifies a head: sha256 of config.json and safetensors files, and the trained weights of an own export.

    StageError where there is no head, or it was exported for another target.
    """
    weights = sorted(folder.glob("*.safetensors"))
    if not weights or not (folder / "config.json").is_file():
        raise StageError(f"{folder}: no head there (config.json, *.safetensors); run export_draft or mend the method's model")
    found = {path.name: sha256_file(path) for path in [folder / "config.json", *weights]}
    if (folder / "provenance.json").is_file():
        exported = read_json(folder / "provenance.json")
        check_provenance({"target": fingerprint(target)}, exported, folder / "provenance.json")
        found["weights"] = exported["weights"]
    return found


def _measure(evaluator: Evaluator, suite: str, rows: list[Entry], records: RecordStore) -> dict[str, Any]:
    """All chunks of one suite: those of an earlier run from the store, the others from the engine; their sums."""
    size = evaluator.evaluation.max_num_seqs
    chunks = [rows[start : start + size] for start in range(0, len(rows), size)]
    keys = [sha256_json({"suite": suite, "chunk": index, "rows": chunk})[:32] for index, chunk in enumerate(chunks)]
    done = sum(len(chunk) for key, chunk in zip(keys, chunks, strict=True) if key in records)
    if done < len(rows):
        evaluator.engine(rows[:size])  # before the clock of the progress line starts
    progress = Progress(f"evaluate_method {suite}", len(rows), "prompts", done=done)
    requests: list[Entry] = []
    counters, wall_s = Counters(), 0.0
    for index, (key, chunk) in enumerate(zip(keys, chunks, strict=True)):
        record = records.get(key)
        if record is None:
            record = evaluator.run_chunk(chunk, traced=0 if index else TRACED)
            records.put(key, record)
            progress.advance(len(chunk), tokens=sum(len(entry["output_ids"]) for entry in record["requests"]))
        requests += record["requests"]
        counters += Counters.from_record(record["counters"])
        wall_s += record["wall_s"]
    progress.finish()
    tokens = sum(len(entry["output_ids"]) for entry in requests)
    return {"requests": requests, **counters.as_record(), "wall_s": wall_s, "output_tokens": tokens}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule evaluate_method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--evaluation", type=section(Evaluation), required=True, help="section of the config, JSON")
    parser.add_argument("--method", required=True, help="name of one of its methods")
    parser.add_argument("--export", type=Path, help="folder of this run's exported head; only for methods that decode with it")
    parser.add_argument("--baseline", type=Path, help="folder of the baseline's results; not for the baseline itself")
    parser.add_argument("--conversations", type=Path, required=True, help="folder of the suites' conversations")
    parser.add_argument("--suites", nargs="+", required=True, help="names of the suites")
    parser.add_argument("--store", type=Path, required=True, help="root of the stores of finished work")
    parser.add_argument("--output", type=Path, required=True, help="folder of the method's results")
    Hardware.add_options(parser)
    options = parser.parse_args(argv)
    run(
        options.target,
        options.evaluation,
        options.method,
        options.export,
        options.baseline,
        options.conversations,
        options.suites,
        options.store,
        options.output,
        Hardware.from_options(options),
    )


if __name__ == "__main__":
    run_stage(main)
