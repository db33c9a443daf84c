"""collect_conversations on local files: what is kept, what is not and why, how rows are split and dealt."""

import json
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts import collect_conversations
from scripts.eagle3.config import Conversations, Parts, Source
from scripts.eagle3.conversations import Decontamination, deal, grams, in_validation, read_source, words
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.messages import normalise
from scripts.eagle3.rows import CONVERSATIONS, read_rows

DATA = Path(__file__).parents[2] / "config" / "data"
EVALUATION = "Explain in two short sentences how a heat pump warms a house during a cold winter night."


def user(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": content} for content in contents]}


def write_jsonl(path: Path, rows: Sequence[Any]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows), encoding="utf-8")
    return str(path)


def questions(count: int) -> list[dict[str, Any]]:
    return [{"id": f"q-{n}", **user(f"What is the answer to question number {n}?")} for n in range(count)]


class Collected:
    """One run of the stage, and its outputs read back."""

    def __init__(
        self,
        folder: Path,
        rows: Sequence[Any],
        evaluation: Sequence[Any] = (),
        parts: int = 1,
        shards: int = 1,
        **settings: Any,
    ) -> None:
        self.output = folder / "conversations"
        conversations = Conversations(
            train=[Source(path=write_jsonl(folder / "train.jsonl", rows))],
            evaluation={"suite": Source(path=write_jsonl(folder / "suite.jsonl", evaluation or [user(EVALUATION)]))},
            **{"validation_fraction": 0.5, **settings},
        )
        self.ledger = collect_conversations.run(conversations, Parts(parts=parts, shards_per_part=shards), self.output)
        self.parts = [self.read(f"part-{part}", shards) for part in range(parts)]
        self.val = self.read("val", shards)
        self.kept = [row for part in [*self.parts, self.val] for shard in part for row in shard]

    def read(self, part: str, shards: int) -> list[list[dict[str, Any]]]:
        return [read_rows(self.output / part / f"shard-{shard}.parquet", CONVERSATIONS) for shard in range(shards)]


# -- sources


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "How are you?"},
    {"role": "assistant", "content": "Well."},
]
SHAREGPT = [
    {"from": "system", "value": "Be brief."},
    {"from": "human", "value": "How are you?"},
    {"from": "gpt", "value": "Well."},
]


@pytest.mark.parametrize("form", [{"messages": MESSAGES}, {"conversations": SHAREGPT}], ids=["messages", "sharegpt"])
@pytest.mark.parametrize("kind", ["jsonl", "parquet", "datasets"])
def test_every_form_in_every_kind_of_source_gives_the_same_messages(
    tmp_path: Path, form: dict[str, Any], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    rows = [{"id": "a", **form}, {"id": "b", **form}]
    if kind == "parquet":
        source = Source(path=str(tmp_path / "rows.parquet"))
        pq.write_table(pa.Table.from_pylist(rows), source.path)
    elif kind == "jsonl":
        source = Source(path=write_jsonl(tmp_path / "rows.jsonl", rows))
    else:
        write_jsonl(tmp_path / "set" / "train.jsonl", [{"id": "not this split", **form}])
        write_jsonl(tmp_path / "set" / "test.jsonl", rows)
        source = Source(path=str(tmp_path / "set"), split="test")
    read = list(read_source(source))
    assert [number for number, _ in read] == [1, 2]
    assert [row["id"] for _, row in read] == ["a", "b"]
    assert [normalise(row) for _, row in read] == [MESSAGES, MESSAGES]


def test_limit_takes_the_first_rows(tmp_path: Path) -> None:
    source = Source(path=write_jsonl(tmp_path / "rows.jsonl", questions(5)), limit=2)
    assert [row["id"] for _, row in read_source(source)] == ["q-0", "q-1"]


def test_a_split_that_a_data_set_does_not_have_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    write_jsonl(tmp_path / "set" / "train.jsonl", questions(1))
    with pytest.raises(StageError, match=r"split holdout.*holdout") as error:
        list(read_source(Source(path=str(tmp_path / "set"), split="holdout")))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("missing.jsonl", None, "no such file or folder"),
        ("a/b/folder", None, "no such file or folder"),
        ("rows.csv", "a,b\n", r"expected a \.jsonl or \.parquet"),
        ("rows.parquet", "not parquet", "not a readable Parquet file"),
    ],
)
def test_a_source_that_cannot_be_read_is_named(tmp_path: Path, name: str, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(StageError, match=f"{name}.*{found}"):
        list(read_source(Source(path=str(tmp_path / name))))


def test_a_missing_file_stops_the_stage_before_anything_is_read_or_written(tmp_path: Path) -> None:
    conversations = Conversations(
        train=[Source(path=write_jsonl(tmp_path / "bad.jsonl", ["{"])), Source(path=str(tmp_path / "missing.jsonl"))],
        evaluation={"suite": Source(path=write_jsonl(tmp_path / "suite.jsonl", [user(EVALUATION)]))},
    )
    with pytest.raises(StageError, match=r"missing\.jsonl: no such file"):
        collect_conversations.run(conversations, Parts(), tmp_path / "out")
    assert not (tmp_path / "out").exists()


# -- rows


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        ("text", "expected an object, found str"),
        ({"prompt": "Hello"}, "neither `messages` nor `conversations`"),
        ({"messages": []}, "`messages` is empty"),
        ({"messages": "Hello"}, "not a list"),
        ({"messages": ["Hello"]}, "message 1: expected an object, found str"),
        ({"messages": [{"role": "user", "content": " \n"}]}, "message 1: content is empty"),
        ({"messages": [{"role": "user"}]}, "message 1: content is not text but NoneType"),
        ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "a part that is not text but audio"),
        ({"messages": [{"role": "tool", "content": "42"}]}, "message 1: a tool message must follow a tool call"),
        ({"messages": [{"role": "critic", "content": "42"}]}, "message 1: unknown role 'critic'"),
        ({"messages": [{"role": "user", "content": "\ud800"}]}, "not valid Unicode"),
        ({"messages": [{"role": "assistant", "content": "Hi"}]}, "must follow a user message"),
        (
            {"messages": [*MESSAGES, {"role": "assistant", "content": "Hi"}]},
            "message 4: an assistant message must follow",
        ),
        (
            {"messages": [*MESSAGES, {"role": "system", "content": "Hi"}]},
            "message 4: a system message may only come first",
        ),
        ({"messages": MESSAGES[:1]}, "no user message"),
        ({"conversations": [{"role": "user", "content": "Hi"}]}, "message 1: unknown role 'None'"),
    ],
)
def test_malformed_rows_are_rejected_with_their_reason(raw: Any, reason: str) -> None:
    with pytest.raises(RowRejected, match=reason):
        normalise(raw)


def test_user_messages_in_a_row_are_kept_as_turns_to_be_answered(tmp_path: Path) -> None:
    collected = Collected(tmp_path, [*questions(20), user("Name a river.", "And a longer one?")])
    assert any(
        [message["content"] for message in row["messages"]] == ["Name a river.", "And a longer one?"] for row in collected.kept
    )


def test_too_many_malformed_rows_fail_with_the_first_one_and_their_count(tmp_path: Path) -> None:
    rows = [*questions(7), "{not json", {"messages": []}, "", *questions(9)[7:]]
    with pytest.raises(StageError, match=r"train\.jsonl: row 8: not JSON .*; 2 of 11 rows are malformed.*0\.001") as error:
        Collected(tmp_path, rows)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "conversations").exists()


def test_a_tolerated_malformed_row_stands_in_the_ledger(tmp_path: Path) -> None:
    collected = Collected(tmp_path, [*questions(20), {"id": 7, "messages": []}], max_rejected_fraction=0.05)
    assert collected.ledger["rows"]["rejected"] == [
        {"source": "train.jsonl", "row": 21, "id": 7, "reason": "`messages` is empty"}
    ]
    counts = {"read": 21, "kept": 20, "duplicates": 0, "contaminated": 0, "rejected": 1, "with_images": 0}
    assert collected.ledger["counts"] == counts
    assert read_json(collected.output / "ledger.json") == collected.ledger


def test_an_evaluation_source_tolerates_no_malformed_row(tmp_path: Path) -> None:
    evaluation = [user(f"Evaluation prompt number {n} of many?") for n in range(50)]
    with pytest.raises(StageError, match=r"suite suite: suite\.jsonl: row 51: `messages` is empty"):
        Collected(tmp_path, questions(20), [*evaluation, {"messages": []}], max_rejected_fraction=0.5)


def test_an_evaluation_prompt_has_no_tool_messages(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look"}}]}
    called = {"id": "called", "messages": [*user(EVALUATION)["messages"], call, {"role": "tool", "content": "42"}]}
    with pytest.raises(StageError, match=r"suite suite: suite\.jsonl#called: has tool messages"):
        Collected(tmp_path, questions(20), [called])


# -- duplicates and decontamination


def test_the_first_of_rows_with_equal_user_turns_is_kept(tmp_path: Path) -> None:
    again = {"id": "again", "messages": [{"role": "user", "content": " what is the  ANSWER to question number 3?"}]}
    collected = Collected(tmp_path, [*questions(20), again])
    assert collected.ledger["rows"]["duplicates"] == [
        {"source": "train.jsonl", "row": 21, "id": "again", "first": "train.jsonl#q-3"}
    ]
    assert "train.jsonl#q-3" in {row["source"] for row in collected.kept}


def test_a_planted_copy_of_an_evaluation_prompt_is_dropped_and_counted(tmp_path: Path) -> None:
    planted = {"id": "planted", **user("Please help me. " + EVALUATION.upper(), "And in summer?")}
    collected = Collected(tmp_path, [*questions(20), planted], [{"id": "e1", **user(EVALUATION)}])
    assert collected.ledger["counts"]["contaminated"] == 1
    assert collected.ledger["rows"]["contaminated"] == [
        {"source": "train.jsonl", "row": 21, "id": "planted", "evaluation": "suite.jsonl#e1", "overlap": 1.0}
    ]
    assert len(collected.kept) == 20


def evaluation_rows(*contents: str) -> list[dict[str, Any]]:
    return [{"source": "e", **user(*contents)}]


def test_the_share_of_5_grams_decides() -> None:
    spoken = words(EVALUATION)
    half = " ".join(spoken[: 4 + (len(spoken) - 4 + 1) // 2])
    less = " ".join(spoken[: 4 + (len(spoken) - 4 + 1) // 2 - 1])
    decontamination = Decontamination(evaluation_rows(EVALUATION), 0.5)
    assert decontamination.match(user(half)["messages"]) == ("e", pytest.approx(0.5, abs=0.05))
    assert decontamination.match(user(less)["messages"]) is None


def test_a_prompt_that_stands_in_an_answer_is_found() -> None:
    messages = [{"role": "user", "content": "Give me a question."}, {"role": "assistant", "content": EVALUATION}]
    assert Decontamination(evaluation_rows(EVALUATION), 0.5).match(messages) == ("e", 1.0)


def test_prompts_of_fewer_than_five_words_match_exactly_and_only_where_they_open() -> None:
    decontamination = Decontamination(evaluation_rows("Who was Ada Lovelace?", "Why?"), 0.5)
    assert decontamination.match(user("who was  Ada Lovelace")["messages"]) == ("e", 1.0)
    assert decontamination.match(user("Who was Ada Lovelace's father?")["messages"]) is None
    assert decontamination.match(user("Name a poet.", "Why?")["messages"]) is None


def test_scripts_without_spaces_are_compared_by_character() -> None:
    text = "请用两句话解释热泵在冬夜如何给房子供暖"
    assert Decontamination(evaluation_rows(text), 0.5).match(user(f"你好。{text}。")["messages"]) == ("e", 1.0)
    assert Decontamination(evaluation_rows(text), 0.5).match(user("请用两句话介绍一下你自己")["messages"]) is None


# -- splitting and dealing


def test_the_split_depends_neither_on_the_parts_nor_on_appended_rows(tmp_path: Path) -> None:
    held_out = [
        {row["conversation_id"] for shard in collected.val for row in shard}
        for collected in (
            Collected(tmp_path / "a", questions(40)),
            Collected(tmp_path / "b", questions(40), parts=3, shards=2),
            Collected(tmp_path / "c", questions(60)),
        )
    ]
    assert held_out[0] == held_out[1]
    assert 0 < len(held_out[0]) < 40
    assert held_out[0] == held_out[2] & {row["conversation_id"] for row in Collected(tmp_path / "d", questions(40)).kept}


def test_the_validation_share_is_about_the_fraction() -> None:
    assert sum(in_validation(str(number), 0.1) for number in range(5000)) == pytest.approx(500, abs=100)
    assert not any(in_validation(str(number), 0.0) for number in range(100))
    assert all(in_validation(str(number), 1.0) for number in range(100))


def test_training_rows_are_dealt_in_source_order(tmp_path: Path) -> None:
    collected = Collected(tmp_path, questions(40), parts=2, shards=3)
    shards = [shard for part in collected.parts for shard in part]
    dealt = [row["source"] for shard in shards for row in shard]
    assert dealt == sorted(dealt, key=lambda source: int(source.rsplit("-", 1)[1]))
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    assert {row["split"] for shard in shards for row in shard} == {"train"}
    assert {row["split"] for shard in collected.val for row in shard} == {"val"}


@given(st.integers(1, 200), st.integers(1, 40))
def test_dealing_keeps_order_and_evens_out(count: int, shares: int) -> None:
    dealt = deal(range(count), shares)
    assert [item for share in dealt for item in share] == list(range(count))
    assert len(dealt) == shares
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


def test_more_rows_with_more_parts_append() -> None:
    assert deal(range(150), 6)[:4] == deal(range(100), 4)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"parts": 50}, r"training conversations for 50 parts x 1 shards.*lower scatter\.parts"),
        ({"shards": 3, "validation_fraction": 0.0}, r"0 validation conversations for 3 shards.*raise conversations\."),
    ],
)
def test_a_shard_without_a_row_is_refused(tmp_path: Path, settings: dict[str, Any], said: str) -> None:
    with pytest.raises(StageError, match=said):
        Collected(tmp_path, questions(40), **settings)
    assert not (tmp_path / "conversations").exists()


def test_the_same_sources_give_the_same_bytes(tmp_path: Path) -> None:
    outputs = [Collected(tmp_path / name, questions(30), parts=2).output for name in ("a", "b")]
    contents = [{str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.*")} for out in outputs]
    assert contents[0] == contents[1]
    assert len(contents[0]) == 5


def test_the_command_line_takes_sections_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    conversations = {
        "train": [{"path": write_jsonl(tmp_path / "train.jsonl", questions(30))}],
        "evaluation": {"suite": {"path": write_jsonl(tmp_path / "suite.jsonl", [user(EVALUATION)])}},
        "validation_fraction": 0.5,
    }
    options = ["--conversations", json.dumps(conversations), "--scatter", "{}", "--output", str(tmp_path / "out")]
    collect_conversations.main(options)
    assert "30 read, 30 kept" in capsys.readouterr().out
    assert read_rows(tmp_path / "out" / "eval" / "suite.parquet", CONVERSATIONS)[0]["split"] == "eval"


# -- the demo's own prompts


def test_the_demo_has_enough_prompts_and_no_two_of_them_are_alike() -> None:
    rows = {
        kind: [
            (path.name, row["id"], normalise(row))
            for path in sorted((DATA / kind).glob("*.jsonl"))
            for _, row in read_source(Source(path=str(path)))
        ]
        for kind in ("train", "eval")
    }
    assert len(rows["train"]) >= 400
    assert len(rows["eval"]) >= 60
    everything = [*rows["train"], *rows["eval"]]
    assert len({identity for _, identity, _ in everything}) == len(everything)
    found = [
        (identity, set().union(*(grams(message["content"]) for message in messages))) for _, identity, messages in everything
    ]
    alike = [
        (one, other)
        for (one, left), (other, right) in combinations(found, 2)
        if left and right and 2 * len(left & right) >= min(len(left), len(right))
    ]
    assert alike == []
