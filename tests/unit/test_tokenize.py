"""tokenize_conversations: rows, masks, cuts and accounts of one part."""

import shutil
from pathlib import Path
from typing import Any

import pytest

from scripts import tokenize_conversations
from scripts.eagle3.config import Regeneration, Rows, Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.messages import conversation_id
from scripts.eagle3.rows import CONVERSATIONS, RESPONSES, TOKENS, read_provenance, read_rows, row_key, write_rows
from scripts.eagle3.target import fingerprint, load_tokenizer

GREEDY = Regeneration(temperature=0)


def conversation(*contents: str) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[n % 2], "content": content} for n, content in enumerate(contents)]
    identity = conversation_id(messages)
    return {"conversation_id": identity, "source": f"rows.jsonl#{contents[0]}", "split": "train", "messages": messages}


def answered(name: str, *turns: tuple[list[int], list[int], str]) -> dict[str, Any]:
    made = [{"prompt_ids": prompt, "response_ids": response, "finish_reason": reason} for prompt, response, reason in turns]
    return {"conversation_id": name, "source": f"rows.jsonl#{name}", "split": "train", "turns": made}


class Part:
    """One part's inputs on disk and the stage run on them."""

    def __init__(self, folder: Path, target: Target) -> None:
        self.source, self.output, self.target = folder / "source", folder / "tokens", target

    def write_responses(self, *shards: list[dict[str, Any]], **changed: Any) -> None:
        provenance = {
            "target": fingerprint(self.target),
            "responses": GREEDY.model_dump(),
            "conversations": {"format": 1},
        }
        for shard, rows in enumerate(shards):
            write_rows(self.source / f"shard-{shard}.parquet", rows, RESPONSES, {**provenance, **changed}, {})

    def write_conversations(self, *shards: list[dict[str, Any]]) -> None:
        for shard, rows in enumerate(shards):
            write_rows(self.source / f"shard-{shard}.parquet", rows, CONVERSATIONS, {"conversations": {"format": 1}}, {})

    def run(self, responses: Any = GREEDY, shards: int = 1, max_length: int = 64, limit: float = 0.001) -> dict[str, Any]:
        return tokenize_conversations.run(
            self.target, Rows(max_length=max_length), responses, self.source, shards, self.output, limit
        )

    def rows(self, shard: int = 0) -> list[dict[str, Any]]:
        return read_rows(self.output / f"shard-{shard}.parquet", TOKENS)


@pytest.fixture
def part(tmp_path: Path, tiny_llama: Target) -> Part:
    return Part(tmp_path, tiny_llama)


def test_regenerated_answers_become_rows_without_a_tokenizer_in_between(part: Part) -> None:
    part.write_responses(
        [answered("a", ([5, 6], [7, 8], "stop"), ([5, 6, 7, 8, 9], [10], "length"))],
        [answered("b", ([5], [6], "stop"))],
    )
    record = part.run(shards=2)
    (row,) = part.rows()
    assert row["input_ids"] == [5, 6, 7, 8, 9, 10]
    assert row["loss_mask"] == [False, False, True, True, False, True]
    assert row["row_key"] == row_key(row["input_ids"])
    assert (row["conversation_id"], row["source"], row["split"]) == ("a", "rows.jsonl#a", "train")
    assert [other["conversation_id"] for other in part.rows(1)] == ["b"]
    assert record["finish_reasons"] == {"stop": 2, "length": 1}
    assert record["token_counts"] == {"6": 1, "7": 1, "8": 1, "10": 1}
    assert (record["rows"], record["tokens"], record["masked_tokens"]) == (2, 8, 4)
    assert read_json(part.output / "counts.json") == record


def test_given_answers_are_taken_from_the_conversations(part: Part) -> None:
    part.write_conversations([conversation("Hello there", "Hi", "Bye", "So long")])
    record = part.run("given", max_length=200)
    (row,) = part.rows()
    tokenizer = load_tokenizer(part.target)
    said = [token for token, masked in zip(row["input_ids"], row["loss_mask"], strict=True) if masked]
    assert tokenizer.decode(said) == "Hi<|im_end|>So long<|im_end|>"
    assert record["finish_reasons"] == {"given": 2}
    assert read_provenance(part.output / "shard-0.parquet")[0]["responses"] == {"given": {"conversations": {"format": 1}}}


def test_long_rows_are_cut_at_the_end_and_counted(part: Part) -> None:
    part.write_responses([answered("a", ([5] * 10, [7] * 20, "stop"))])
    record = part.run(max_length=16)
    (row,) = part.rows()
    assert (len(row["input_ids"]), sum(row["loss_mask"])) == (16, 6)
    assert (record["rows_cut"], record["tokens_cut"], record["token_counts"]) == (1, 14, {"7": 6})


def test_a_row_that_loses_its_whole_answer_is_rejected_and_named(part: Part) -> None:
    part.write_responses([answered("a", ([5] * 16, [7], "stop")), answered("b", ([5], [7], "stop"))])
    with pytest.raises(StageError, match=r"rows\.jsonl#a: nothing of the answer is within rows\.max_length 16; 1 of 2 rows"):
        part.run(max_length=16)
    record = part.run(max_length=16, limit=0.5)
    assert [row["conversation_id"] for row in part.rows()] == ["b"]
    assert (record["rows_made"], record["rows_rejected"], record["rows"]) == (2, 1, 1)
    assert [(entry["kind"], entry["conversation_id"]) for entry in record["ledger"]] == [("rows_rejected", "a")]


def test_rows_with_equal_token_ids_are_kept_once_in_a_part(part: Part) -> None:
    part.write_responses([answered("a", ([5], [7], "stop"))], [answered("b", ([5], [7], "stop"))])
    record = part.run(shards=2)
    assert [len(part.rows(shard)) for shard in (0, 1)] == [1, 0]
    assert (record["rows_made"], record["rows_duplicate"], record["rows"]) == (2, 1, 1)
    assert record["token_counts"] == {"7": 1}


def test_conversations_that_cannot_be_split_fail_above_the_limit_and_are_listed_below_it(part: Part) -> None:
    part.write_conversations([conversation("Hello", "Hi"), conversation("Only a question")])
    with pytest.raises(StageError, match=r"rows\.jsonl#Only a question: no assistant message.*1 of 2 rows") as error:
        part.run("given")
    assert "\n" not in str(error.value)
    record = part.run("given", limit=0.5)
    assert (record["conversations"], record["conversations_rejected"], record["rows"]) == (2, 1, 1)


def test_a_part_of_which_nothing_is_left_fails(part: Part) -> None:
    part.write_responses([answered("a", ([5], [], "stop"))])
    with pytest.raises(StageError, match="no row is left of 1 conversations"):
        part.run(limit=1.0)


def test_responses_of_another_target_or_of_other_settings_are_refused(part: Part) -> None:
    part.write_responses([answered("a", ([5], [7], "stop"))], target={**fingerprint(part.target), "weights": "0" * 64})
    with pytest.raises(StageError, match=r"shard-0\.parquet: target\.weights is 0000"):
        part.run()
    part.write_responses([answered("a", ([5], [7], "stop"))])
    with pytest.raises(StageError, match=r"responses\.temperature is 0\.0, expected 0\.7"):
        part.run(Regeneration(temperature=0.7))


def test_answers_are_compared_with_what_the_targets_files_decide_now(part: Part) -> None:
    part.write_responses([answered("a", ([5], [7], "stop"))])
    part.run(Regeneration())  # generation_config.json: greedy
    folder = part.output.parent / "target"
    shutil.copytree(part.target.path, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 1018, "temperature": 0.6}')
    part.target = part.target.model_copy(update={"path": str(folder)})
    with pytest.raises(StageError, match=r"responses\.temperature is 0\.0, expected 0\.6"):
        part.run(Regeneration())
    part.run(GREEDY)


def test_ids_outside_the_targets_vocabulary_are_refused(part: Part) -> None:
    part.write_responses([answered("a", ([5], [70000], "stop"))])
    with pytest.raises(StageError, match="token 70000 is outside the target's vocabulary of"):
        part.run()


def test_the_same_input_gives_the_same_bytes(part: Part) -> None:
    part.write_conversations([conversation("Hello", "Hi"), conversation("Bye", "So long")])
    contents = []
    for _ in range(2):
        part.run("given")
        contents.append([path.read_bytes() for path in sorted(part.output.iterdir())])
    assert contents[0] == contents[1]


@pytest.mark.parametrize("responses", ["given", '"given"', GREEDY.model_dump_json()])
def test_the_command_line_takes_given_or_a_section(part: Part, responses: str, capsys: pytest.CaptureFixture[str]) -> None:
    if "given" in responses:
        part.write_conversations([conversation("Hello", "Hi")])
    else:
        part.write_responses([answered("a", ([5], [7], "stop"))])
    options = ["--target", part.target.model_dump_json(), "--rows", "{}", "--responses", responses, "--shards", "1"]
    options += ["--max-rejected-fraction", "0", "--input", str(part.source), "--output", str(part.output)]
    tokenize_conversations.main(options)
    assert "1 rows of 1 conversations" in capsys.readouterr().out


def test_responses_that_are_neither_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        tokenize_conversations.main(["--responses", '{"temperatur": 1}'])
    assert "expected `given` or the responses section" in capsys.readouterr().err
