"""The canary: a few rows are overfitted, exported and served; a sound pipeline then accepts nearly every drafted token.

In: the target, the draft's architecture, one shard of conversations. Out: a folder with all artefacts of a small run, and
result.json. It calls the stages themselves, in their order, so what it proves holds for them; StageError when the served head
accepts less than a sound one would, or when a check of a stage refuses.
"""

import argparse
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from scripts import (
    build_vocab_mapping,
    draft_config,
    evaluate_method,
    export_draft,
    extract_hidden_states,
    extract_target_head,
    regenerate_responses,
    select_checkpoint,
    tokenize_conversations,
    train_draft,
)
from scripts.eagle3.config import Draft, Evaluation, Regeneration, Rows, Target, Training, Vocabulary
from scripts.eagle3.draft_files import DraftFiles
from scripts.eagle3.engine import Hardware
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.messages import has_tool_messages
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, read_provenance, read_rows, write_rows
from scripts.eagle3.stage import run_stage, section
from scripts.eagle3.target import text_config

CANDIDATES = 40
ROWS = 10
ANSWER_TOKENS = 64
RESPONSES_ASKED = Regeneration(temperature=0, max_tokens=ANSWER_TOKENS)
MIN_DISTINCT_TOKENS = 30
NUM_SPECULATIVE_TOKENS = 3
# passes over the rows per segment: the same shard under several part names
PASSES = 24
SEGMENTS = 6
MIN_ACCURACY = 0.95
MIN_ACCEPTANCE_LENGTH = 3.5
# greedy answers: the stored final state before a token must predict it
MIN_PREDICTED = 0.95
NO_REJECTIONS = 0.0
ROW_LIMIT = Rows(max_length=1024)
SUITE = "canary"


class Canary(NamedTuple):
    """What a canary works on, and where."""

    target: Target
    draft: Draft
    folder: Path
    hardware: Hardware

    @property
    def files(self) -> DraftFiles:
        """What the draft is built from."""
        vocabulary = self.folder / "vocab"
        return DraftFiles(
            self.folder / "draft/config.json",
            self.folder / "target/head.safetensors",
            vocabulary / "d2t.npy",
            vocabulary / "t2d.npy",
        )

    @property
    def training(self) -> Training:
        """Overfitting, in float32 so that a few rows are really learnt; the decay takes the last mistakes away."""
        return Training(
            segments=SEGMENTS,
            ttt_steps=NUM_SPECULATIVE_TOKENS,
            learning_rate=1e-3,
            schedule="linear",
            batch_tokens=1024,
            dtype="float32",
            zero_stage=0,
            loggers=[],
        )


def run(canary: Canary, conversations: Path) -> dict[str, Any]:
    """Runs the whole chain in `canary.folder`; returns and writes result.json. The folder is emptied first."""
    shutil.rmtree(canary.folder, ignore_errors=True)
    answer_rows(canary, conversations)
    make_inputs(canary)
    check_states(canary)
    accuracy = overfit(canary)
    export(canary)
    served = serve(canary)
    result = {"accuracy": accuracy, "rows": ROWS, **served}
    write_json(canary.folder / "result.json", result)
    if served["acceptance_length"] < MIN_ACCEPTANCE_LENGTH:
        raise StageError(
            f"canary: acceptance length {served['acceptance_length']:.2f} on rows that the draft knows by heart, expected at "
            f"least {MIN_ACCEPTANCE_LENGTH} of {NUM_SPECULATIVE_TOKENS + 1}: training and serving disagree; see {canary.folder}"
        )
    return result


def answer_rows(canary: Canary, conversations: Path) -> None:
    """The target's greedy answers to a few prompts, chosen for variety, as part-0 and val (the same rows)."""
    folder, provenance = canary.folder, read_provenance(conversations)[0]
    rows = (row for row in read_rows(conversations, CONVERSATIONS) if not has_tool_messages(row["messages"]))
    candidates = [row for row in rows if _turns(row) == 1][:CANDIDATES]

    def regenerate(rows: list[dict[str, Any]], part: str) -> None:
        write_rows(folder / f"conversations/{part}/shard-0.parquet", rows, CONVERSATIONS, provenance, {})
        regenerate_responses.run(
            canary.target,
            RESPONSES_ASKED,
            ROW_LIMIT,
            folder / f"conversations/{part}",
            1,
            folder / "store",
            folder / f"responses/{part}",
            canary.hardware,
            NO_REJECTIONS,
        )

    regenerate(candidates, "part-0")
    answers = read_rows(folder / "responses/part-0/shard-0.parquet", RESPONSES)
    distinct = {row["conversation_id"]: len(set(row["turns"][0]["response_ids"])) for row in answers}
    chosen = [row for row in candidates if distinct.get(row["conversation_id"], 0) >= MIN_DISTINCT_TOKENS][:ROWS]
    if len(chosen) < ROWS:
        raise StageError(
            f"{conversations}: {len(chosen)} of {len(candidates)} answers have {MIN_DISTINCT_TOKENS} distinct tokens, expected "
            f"{ROWS}: too few, or the target repeats itself; give more single-turn conversations"
        )
    # the answers are in the store: no engine is started for them again
    regenerate(chosen, "part-0")
    regenerate([{**row, "split": "val"} for row in chosen], "val")
    suite = folder / f"conversations/eval/{SUITE}.parquet"
    write_rows(suite, [{**row, "split": "eval"} for row in chosen], CONVERSATIONS, provenance, {})


def make_inputs(canary: Canary) -> None:
    """Token rows, hidden states, vocabulary map, the target's head, the draft's config."""
    target, folder = canary.target, canary.folder
    for part in ("part-0", "val"):
        tokens = folder / f"tokens/{part}"
        tokenize_conversations.run(target, ROW_LIMIT, RESPONSES_ASKED, folder / f"responses/{part}", 1, tokens, NO_REJECTIONS)
        extract_hidden_states.run(
            target, tokens, 1, folder / f"hidden/{part}", folder / "store", "bfloat16", canary.hardware, NO_REJECTIONS
        )
    vocabulary = Vocabulary(draft_vocab_size=min(8192, text_config(target)["vocab_size"] // 2), min_coverage=1.0)
    build_vocab_mapping.run(vocabulary, target, folder / "tokens", 1, 1, folder / "vocab")
    extract_target_head.run(target, canary.files.head)
    draft_config.run(target, canary.draft, vocabulary, NUM_SPECULATIVE_TOKENS, canary.files.config)


def check_states(canary: Canary) -> None:
    """StageError unless norm and lm_head over each stored final state give the next token of the target's greedy answer.

    Independent of the engine and of the extraction's own proof: states on another row, a token or a layer off, and the head of
    another target all end here.
    """
    import torch

    from scripts.eagle3.draft import head_metadata, read_head
    from scripts.eagle3.shards import Shard

    head, eps = read_head(canary.files.head), float(head_metadata(canary.files.head)["rms_norm_eps"])
    norm, lm_head = head["norm.weight"].float(), head["lm_head.weight"].float()
    right = total = 0
    for row in Shard(canary.folder / "hidden/part-0/shard-0.pt"):
        final = torch.nn.functional.rms_norm(row.hidden_states[:, -1].float(), norm.shape, norm, eps)
        predicted = (final @ lm_head.T).argmax(-1)[:-1]
        answered = row.loss_mask[1:]
        right += int((predicted == row.token_ids[1:])[answered].sum())
        total += int(answered.sum())
    if right < MIN_PREDICTED * total:
        raise StageError(
            f"{canary.folder}/hidden: the stored final states predict {right} of {total} tokens of the target's own greedy "
            f"answers, expected {MIN_PREDICTED:.0%}: states and tokens are misaligned, or of another target"
        )


def overfit(canary: Canary) -> list[float]:
    """Trains until the rows are known by heart; returns the accuracy by TTT step on them."""
    hidden, checkpoints = canary.folder / "hidden", canary.folder / "checkpoints"
    for part in range(1, PASSES):
        (hidden / f"part-{part}").mkdir()
        os.link(hidden / "part-0/shard-0.pt", hidden / f"part-{part}/shard-0.pt")
    inputs = train_draft.Inputs(canary.files, hidden, PASSES, 1)
    for segment in range(SEGMENTS):
        train_draft.run(canary.target, canary.training, inputs, segment, checkpoints, canary.folder / "metrics")
    accuracy: list[float] = read_json(checkpoints / f"{SEGMENTS - 1}.json")["metrics"]["validation"]["accuracy"]
    if min(accuracy) < MIN_ACCURACY:
        raise StageError(
            f"canary: accuracies by TTT step are {accuracy} after training, expected {MIN_ACCURACY} at each step: the draft "
            f"cannot learn {ROWS} rows by heart; see {canary.folder}/metrics"
        )
    return accuracy


def export(canary: Canary) -> None:
    """Selects the best checkpoint and exports it."""
    folder = canary.folder
    selected = folder / "selected.json"
    checkpoints, validation = folder / "checkpoints", folder / "hidden/val"
    select_checkpoint.run(canary.target, canary.files, checkpoints, SEGMENTS, validation, 1, NUM_SPECULATIVE_TOKENS, selected)
    export_draft.run(canary.target, canary.files, checkpoints, selected, folder / "export")


def serve(canary: Canary) -> dict[str, Any]:
    """Decodes the same prompts with and without the head; returns acceptance length and how many outputs are identical."""
    evaluation = Evaluation(max_tokens=ANSWER_TOKENS, max_num_seqs=ROWS)
    results = canary.folder / "evaluation"
    for method in ("baseline", "eagle3"):
        evaluate_method.run(
            canary.target,
            evaluation,
            method,
            canary.folder / "export",
            results / "baseline" if method != "baseline" else None,
            canary.folder / "conversations/eval",
            [SUITE],
            canary.folder / "store",
            results / method,
            canary.hardware,
        )
    baseline, served = (read_json(results / method / f"{SUITE}.json") for method in ("baseline", "eagle3"))
    accepted = served["accepted_by_position"]
    pairs = zip(baseline["requests"], served["requests"], strict=True)
    return {
        "acceptance_length": 1 + sum(accepted) / served["drafts"],
        "acceptance_by_position": [count / served["drafts"] for count in accepted],
        "identical": sum(one["output_ids"] == other["output_ids"] for one, other in pairs),
    }


def _turns(row: dict[str, Any]) -> int:
    return sum(message["role"] == "user" for message in row["messages"])


def main(argv: Sequence[str] | None = None) -> None:
    """Command line of the rule canary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", type=section(Target), required=True, help="section of the config, JSON")
    parser.add_argument("--draft", type=section(Draft), required=True, help="section of the config, JSON")
    parser.add_argument("--conversations", type=Path, required=True, help="a shard of conversations")
    parser.add_argument("--output", type=Path, required=True, help="result.json, in the canary's own folder")
    Hardware.add_options(parser)
    options = parser.parse_args(argv)
    canary = Canary(options.target, options.draft, options.output.parent, Hardware.from_options(options))
    result = run(canary, options.conversations)
    print(
        f"canary: acceptance length {result['acceptance_length']:.2f} of {NUM_SPECULATIVE_TOKENS + 1}, "
        f"{result['identical']} of {ROWS} outputs identical, accuracy by TTT step {result['accuracy']}"
    )


if __name__ == "__main__":
    run_stage(main)
