"""One row to messages: tools, thinking, parts, images; and what identifies a conversation."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from scripts.eagle3.chat import template_messages, tools_of
from scripts.eagle3.config import Source
from scripts.eagle3.conversations import Ledger, collect, prompt_key
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.estimate_data import lengths
from scripts.eagle3.messages import WithImages, conversation_id, has_tool_messages, normalise, normalise_tools, stored
from scripts.eagle3.rows import CONVERSATIONS, read_rows, write_rows

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "b": 1, "a": 2}}}
CALL = {"id": "functions.look:0", "type": "function", "function": {"name": "look", "arguments": {"z": 1, "a": "ü"}}}
QUESTION = {"role": "user", "content": "What is it?"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}
RESULT = {"role": "tool", "content": "42", "tool_call_id": "functions.look:0"}
ANSWER = {"role": "assistant", "content": "It is 42.", "reasoning_content": "easy"}
DIALOGUE = [QUESTION, CALLED, RESULT, ANSWER]
PLAIN_ID = "e9ada254e713eac50619073d7f1805d8"


def calling(arguments: Any, **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"function": {"name": "look", "arguments": arguments}}],
        **more,
    }


@pytest.mark.parametrize(
    "raw",
    [
        {"messages": DIALOGUE},
        {"messages": [QUESTION, calling({"z": 1, "a": "ü"}), {"role": "tool", "content": "42"}, ANSWER]},
        {"messages": [QUESTION, calling('{"z": 1, "a": "ü"}', name=None), {"role": "tool", "content": "42"}, ANSWER]},
        {
            "conversations": [
                {"from": "human", "value": "What is it?"},
                {"from": "function_call", "value": '{"name": "look", "arguments": {"z": 1, "a": "ü"}}'},
                {"from": "observation", "value": "42"},
                {"from": "gpt", "value": "It is 42.", "reasoning_content": "easy"},
            ]
        },
    ],
    ids=["openai", "arguments as an object", "arguments as text", "sharegpt"],
)
def test_every_way_to_write_a_call_gives_the_same_messages(raw: dict[str, Any]) -> None:
    assert normalise(raw) == DIALOGUE
    assert conversation_id(normalise(raw)) == conversation_id(DIALOGUE)


def test_calls_without_ids_are_numbered_and_results_belong_to_them_in_order() -> None:
    two = {"role": "assistant", "tool_calls": [{"function": {"name": name}} for name in ("look", "hear")]}
    result = {"role": "tool", "content": ""}
    found = normalise({"messages": [QUESTION, two, result, result, two, result]})
    assert [call["id"] for call in found[1]["tool_calls"]] == ["functions.look:0", "functions.hear:1"]
    assert [message["tool_call_id"] for message in found[2:4]] == ["functions.look:0", "functions.hear:1"]
    assert (found[4]["tool_calls"][0]["id"], found[5]["tool_call_id"]) == ("functions.look:2", "functions.look:2")
    assert found[1]["content"] == "" and found[1]["tool_calls"][0]["function"]["arguments"] == {}


@pytest.mark.parametrize(
    ("tools", "found"),
    [
        (None, None),
        ([], None),
        ("", None),
        ([TOOL], [TOOL]),
        (json.dumps([TOOL]), [TOOL]),
        ([TOOL["function"]], [TOOL]),
    ],
)
def test_declared_tools_are_taken_in_openais_form(tools: Any, found: Any) -> None:
    assert normalise_tools({"messages": [QUESTION], "tools": tools}) == found


@pytest.mark.parametrize("tools", ["{", '"look"', [1], [{"type": "function"}], [{"function": {}}]])
def test_malformed_tools_are_rejected(tools: Any) -> None:
    with pytest.raises(RowRejected, match="tools"):
        normalise_tools({"tools": tools})


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([QUESTION, calling("{")], "message 2: arguments of look: expected JSON"),
        ([QUESTION, calling("[1]")], "message 2: arguments of look are no object"),
        ([QUESTION, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}], "a tool call without a name"),
        ([QUESTION, {"role": "assistant", "content": "", "tool_calls": [1]}], "a tool call is not an object"),
        ([QUESTION, calling({"a": "\ud800"})], "not valid Unicode"),
        ([QUESTION, {"role": "assistant", "content": "", "tool_calls": []}], "message 2: content is empty"),
        ([QUESTION, RESULT], "message 2: a tool message must follow a tool call"),
        ([QUESTION, CALLED, RESULT, {"role": "tool", "content": "43"}], "message 4: a tool message that answers no call"),
        ([QUESTION, CALLED, {"role": "tool", "content": None}], "message 3: content is not text but NoneType"),
        ([QUESTION, CALLED, CALLED], "message 3: an assistant message must follow"),
        ([QUESTION, {**ANSWER, "reasoning_content": 3}], "message 2: reasoning_content: content is not text but int"),
    ],
)
def test_malformed_calls_and_results_are_rejected_with_their_reason(messages: list[Any], reason: str) -> None:
    with pytest.raises(RowRejected, match=reason):
        normalise({"messages": messages})


def test_text_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "What"}, {"type": "text", "text": "is it?"}]
    assert normalise({"messages": [{"role": "user", "content": parts}]}) == [{"role": "user", "content": "What\nis it?"}]


@pytest.mark.parametrize("kind", ["image", "image_url", "input_image", "video", "video_url"])
def test_images_and_videos_have_a_reason_of_their_own(kind: str) -> None:
    parts = [{"type": "text", "text": "What is it?"}, {"type": kind, kind: {"url": "data:"}}]
    with pytest.raises(WithImages, match=f"message 1: content has a part of type {kind}; only text is taken"):
        normalise({"messages": [{"role": "user", "content": parts}]})
    with pytest.raises(WithImages, match="images or videos beside its messages"):
        normalise({"messages": [QUESTION], "images": ["a.png"]})
    assert normalise({"messages": [QUESTION], "images": [], "video": None}) == [QUESTION]


# -- identity ---------------------------------------------------------------------------------------------------------


def test_plain_conversations_keep_the_identity_that_they_had() -> None:
    # as of format 1, before there were tools: stores and states of finished runs are named by it
    plain = [{"role": "user", "content": "How are you?"}, {"role": "assistant", "content": "Well, ü."}]
    assert conversation_id(plain) == PLAIN_ID
    nulls = [{**message, "tool_calls": None, "reasoning_content": None} for message in plain]
    assert conversation_id(nulls) == PLAIN_ID


def test_tools_calls_results_and_thinking_are_part_of_the_identity() -> None:
    other_call = json.loads(json.dumps(CALLED))
    other_call["tool_calls"][0]["function"]["arguments"]["z"] = 2
    variants = [
        (DIALOGUE, None),
        (DIALOGUE, [TOOL]),
        ([QUESTION, other_call, RESULT, ANSWER], None),
        ([QUESTION, CALLED, {**RESULT, "tool_call_id": "x"}, ANSWER], None),
        ([*DIALOGUE[:3], {**ANSWER, "reasoning_content": "hard"}], None),
    ]
    assert len({conversation_id(messages, tools) for messages, tools in variants}) == len(variants)


def test_equal_questions_with_other_tools_are_no_duplicates() -> None:
    assert prompt_key(DIALOGUE) == prompt_key([QUESTION])
    assert prompt_key(DIALOGUE, [TOOL]) != prompt_key(DIALOGUE)


# -- rows -------------------------------------------------------------------------------------------------------------


def test_calls_and_tools_come_back_from_parquet_with_the_order_of_their_keys(tmp_path: Path) -> None:
    rows = [
        {"conversation_id": "a", "source": "s", "split": "train", **stored(DIALOGUE, [TOOL])},
        {"conversation_id": "b", "source": "s", "split": "train", **stored([QUESTION], None)},
    ]
    write_rows(tmp_path / "rows.parquet", rows, CONVERSATIONS, {}, {})
    first, second = read_rows(tmp_path / "rows.parquet", CONVERSATIONS)
    assert json.dumps(template_messages(first["messages"])) == json.dumps(DIALOGUE)
    assert json.dumps(tools_of(first)) == json.dumps([TOOL])
    assert (template_messages(second["messages"]), tools_of(second)) == ([QUESTION], None)
    assert has_tool_messages(first["messages"]) and not has_tool_messages(second["messages"])


def source(path: Path, rows: list[dict[str, Any]]) -> Source:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return Source(path=str(path))


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_rows_with_images_are_rejected_and_counted_apart(tmp_path: Path, suffix: str) -> None:
    image = {"messages": [{"role": "user", "content": "<image>What is it?"}], "images": ["a.png"]}
    text = [{"messages": [{"role": "user", "content": f"Question {number}"}], "images": []} for number in range(8)]
    ledger = Ledger()
    kept = collect([source(tmp_path / f"rows{suffix}", [image, *text, image])], ledger, "train")
    counts = {"read": 10, "kept": 8, "duplicates": 0, "contaminated": 0, "rejected": 2, "with_images": 2}
    assert (len(kept), ledger.counts()) == (8, counts)
    with pytest.raises(StageError, match=r"2 of 10 rows are malformed \(2 of them for their images or videos\)"):
        ledger.check_rejected(0.1)
    ledger.check_rejected(0.2)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_tools_are_read_from_files(tmp_path: Path, suffix: str) -> None:
    rows = [{"messages": [QUESTION], "tools": json.dumps([TOOL])}]
    (row,) = collect([source(tmp_path / f"rows{suffix}", rows)], Ledger(), "train")
    assert tools_of(row) == [TOOL]


def test_a_call_counts_as_an_answer_and_its_results_as_the_next_turn() -> None:
    call = len(str([CALL]))
    assert lengths(DIALOGUE) == (0, [(11, call), (2, 9 + 4)])
    assert lengths([QUESTION, CALLED, RESULT, RESULT]) == (0, [(11, call), (4, 0)])
