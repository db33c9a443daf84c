"""Chat templates to token ids, and turns to rows with a loss mask, with a real tokenizer."""

import copy
from typing import Any

import pytest
from transformers import AutoTokenizer

from scripts.eagle3.chat import render_prompt, rows_from_turns, split_given_turns
from scripts.eagle3.config import Target
from scripts.eagle3.errors import RowRejected
from scripts.eagle3.target import load_tokenizer, stop_token_ids

Messages = list[dict[str, str]]
SPEAKERS = {"u": "user", "a": "assistant", "s": "system"}
# drops what an earlier answer thought, as templates of reasoning models do
FORGETFUL = (
    "{%- for message in messages -%}"
    "{%- set content = message['content'].split('</think>')[-1] if not loop.last else message['content'] -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
WITHOUT_SYSTEM = (
    "{%- if messages[0]['role'] == 'system' -%}{{- raise_exception('System role not supported') -}}{%- endif -%}"
    "{%- for message in messages -%}{{- message['content'] + '<|im_end|>' -}}{%- endfor -%}"
)
UNSTABLE = (
    "{%- for message in messages -%}{{- message['content'] + '<|im_end|>' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- 'assistant, think:' -}}{%- else -%}{{- 'end' -}}{%- endif -%}"
)


@pytest.fixture(scope="session")
def stop_ids(tiny_llama: Target) -> list[int]:
    return stop_token_ids(tiny_llama)


@pytest.fixture(scope="session")
def tokenizer(tiny_llama: Target) -> AutoTokenizer:
    return load_tokenizer(tiny_llama)


def with_template(tokenizer: Any, template: str) -> Any:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = template
    return changed


def messages(*lines: str) -> Messages:
    """`messages("u: Hello", "a: Hi")`."""
    return [{"role": SPEAKERS[line[0]], "content": line[3:]} for line in lines]


def spans(tokenizer: Any, row: tuple[list[int], list[bool]]) -> list[str]:
    """The texts of the row's masked spans."""
    ids, mask = row
    found: list[list[int]] = []
    for position, masked in enumerate(mask):
        if masked and (position == 0 or not mask[position - 1]):
            found.append([])
        if masked:
            found[-1].append(ids[position])
    return [tokenizer.decode(span) for span in found]


def test_a_prompt_is_what_the_template_makes_of_it(tokenizer: Any) -> None:
    history = messages("s: Be brief.", "u: Hello, how are you?", "a: Well.", "u: Why?")
    expected = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
    assert render_prompt(tokenizer, history) == expected
    assert tokenizer.decode(expected).endswith("Why?<|im_end|>\n<|im_start|>assistant\n")


def test_given_answers_end_with_the_stop_token_and_not_with_the_line_break_after_it(
    tokenizer: Any, stop_ids: list[int]
) -> None:
    turns = split_given_turns(tokenizer, messages("u: Hello", "a: Hi there", "u: Bye", "a: So long"), stop_ids)
    assert [tokenizer.decode(turn["response_ids"]) for turn in turns] == ["Hi there<|im_end|>", "So long<|im_end|>"]
    assert [turn["response_ids"][-1] in stop_ids for turn in turns] == [True, True]
    assert {turn["finish_reason"] for turn in turns} == {"given"}
    assert turns[1]["prompt_ids"] == render_prompt(tokenizer, messages("u: Hello", "a: Hi there", "u: Bye"))


def test_a_template_that_keeps_history_gives_one_row_with_a_span_for_each_answer(tokenizer: Any, stop_ids: list[int]) -> None:
    conversation = messages("s: Be brief.", "u: Hello", "a: Hi there", "u: Bye", "a: So long", "u: never answered")
    (row,) = rows_from_turns(split_given_turns(tokenizer, conversation, stop_ids))
    assert spans(tokenizer, row) == ["Hi there<|im_end|>", "So long<|im_end|>"]
    rendered = tokenizer.apply_chat_template(conversation[:5], return_dict=False)
    assert row[0] == rendered[: len(row[0])]
    assert len(row[0]) == len(row[1])


def test_a_template_that_rewrites_history_gives_one_row_for_each_answer(tokenizer: Any, stop_ids: list[int]) -> None:
    forgetful = with_template(tokenizer, FORGETFUL)
    conversation = messages("u: Hello", "a: a greeting</think>Hi there", "u: Bye", "a: leaving</think>So long")
    rows = rows_from_turns(split_given_turns(forgetful, conversation, stop_ids))
    assert [spans(tokenizer, row) for row in rows] == [
        ["a greeting</think>Hi there<|im_end|>"],
        ["leaving</think>So long<|im_end|>"],
    ]
    assert "a greeting" not in tokenizer.decode(rows[1][0])


def test_an_answer_that_would_merge_with_its_prompt_starts_with_a_token_of_its_own(tokenizer: Any, stop_ids: list[int]) -> None:
    fused = with_template(
        tokenizer, "{{- messages[0]['content'] -}}{%- for m in messages[1:] -%}{{- m['content'] -}}{%- endfor -%}"
    )
    (turn,) = split_given_turns(fused, messages("u: t", "a: h"), stop_ids)
    assert len(tokenizer("th")["input_ids"]) == 1
    assert (tokenizer.decode(turn["prompt_ids"]), tokenizer.decode(turn["response_ids"])) == ("t", "h")


@pytest.mark.parametrize(
    ("template", "conversation", "reason"),
    [
        (WITHOUT_SYSTEM, ["s: Be brief.", "u: Hello", "a: Hi"], "refuses it: System role not supported"),
        (UNSTABLE, ["u: Hello", "a: Hi"], "message 2: the chat template changes the prompt"),
        (None, ["u: Hello"], "no assistant message"),
        (None, ["u: Hello", "u: Are you there?", "a: Yes"], "message 1 has no answer"),
    ],
)
def test_a_conversation_that_cannot_be_split_is_rejected(
    tokenizer: Any, stop_ids: list[int], template: str | None, conversation: list[str], reason: str
) -> None:
    chosen = with_template(tokenizer, template) if template else tokenizer
    with pytest.raises(RowRejected, match=reason):
        split_given_turns(chosen, messages(*conversation), stop_ids)


def turn(prompt: list[int], response: list[int]) -> dict[str, Any]:
    return {"prompt_ids": prompt, "response_ids": response, "finish_reason": "stop"}


def test_turns_merge_only_where_prompt_and_response_both_continue() -> None:
    first, follows, rewritten = turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 5], [6]), turn([1, 2, 9, 4, 5], [6])
    assert rows_from_turns([first, follows]) == [([1, 2, 3, 4, 5, 6], [False, False, True, True, False, True])]
    assert rows_from_turns([first, rewritten]) == [
        ([1, 2, 3, 4], [False, False, True, True]),
        ([1, 2, 9, 4, 5, 6], [False, False, False, False, False, True]),
    ]
    assert first == turn([1, 2], [3, 4])


def test_an_empty_response_is_rejected() -> None:
    with pytest.raises(RowRejected, match="turn 2: the response is empty"):
        rows_from_turns([turn([1], [2]), turn([1, 2, 3], [])])
