"""The target's chat template: conversations to token ids, and answered turns to training rows with a loss mask.

In: rows of conversations and the target's own tokenizer, or turns as token ids. Out: lists of token ids; masks are true on
what the target says, its stop token included, and false on everything that the template wrote.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.eagle3.config import Regeneration
from scripts.eagle3.errors import RowRejected, StageError

Messages = Sequence[Mapping[str, Any]]
# what a template writes before an answer without thinking; it may stand in the answer's rendering and not in the prompt's
EMPTY_THINKING = re.compile(r"\s*(?:<think>\s*)?</think>\s*")


def tools_of(row: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The tools that a row of conversations declares (`tools` is JSON text there); None without any."""
    found = row.get("tools")
    return json.loads(found) if isinstance(found, str) else found or None


def template_messages(messages: Messages) -> list[dict[str, Any]]:
    """Messages as templates take them, and as vLLM hands them over: no empty keys, tool calls with arguments as objects."""
    plain = [{key: value for key, value in message.items() if value is not None} for message in messages]
    for message in plain:
        if isinstance(message.get("tool_calls"), str):
            message["tool_calls"] = json.loads(message["tool_calls"])
    return plain


def template_variables(responses: Regeneration, conversation_id: str) -> dict[str, bool]:
    """The variables that the template is rendered with for one conversation; none where `responses.thinking` is null.

    Its id alone decides, so that other rows do not matter.
    """
    if responses.thinking is None:
        return {}
    number = int.from_bytes(hashlib.sha256(b"thinking\0" + conversation_id.encode()).digest()[:8], "big")
    return {responses.thinking_variable: number < responses.thinking * 2**64}


def check_thinking_variable(tokenizer: Any, responses: Regeneration) -> None:
    """Raises StageError where `responses.thinking` is set and the template does not know its variable."""
    if responses.thinking is None:
        return
    name, question = responses.thinking_variable, [{"role": "user", "content": "Name a colour."}]
    try:
        prompts = [render_prompt(tokenizer, question, variables={name: switch}) for switch in (True, False)]
    except RowRejected as reason:
        raise StageError(f"a question with `{name}`: {reason}; mend the chat template, or responses.thinking") from None
    if prompts[0] == prompts[1]:
        raise StageError(
            f"responses.thinking is {responses.thinking:g}, but the target's chat template renders the same prompt with "
            f"`{name}` true and false; name its variable in responses.thinking_variable, or remove responses.thinking"
        )


def render_prompt(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> list[int]:
    """Token ids of the conversation with the opening of the answer; RowRejected where the template refuses it."""
    return _encode(tokenizer, _render(tokenizer, messages, tools, True, variables))


def split_given_turns(
    tokenizer: Any, messages: Messages, stop_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """The data set's own answers as turns {prompt_ids, response_ids, finish_reason: "given"}, one per answer.

    An answer ends with the first stop id after its prompt; what the template appends to that is not part of it, nor is the
    empty thinking that it writes before an answer that has none. What follows the last answer is left out. RowRejected
    where a user message before that has no answer, the template refuses the conversation, or its rendering of an answer
    does not continue the prompt.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowRejected("no assistant message, and `responses: given` takes the answers from the data")
    for index in range(1, answers[-1]):
        if messages[index]["role"] == messages[index - 1]["role"] == "user":
            raise RowRejected(f"message {index} has no answer, and `responses: given` takes the answers from the data")
    return [_split_turn(tokenizer, messages[: index + 1], stop_ids, tools) for index in answers]


def _split_turn(
    tokenizer: Any, messages: Messages, stop_ids: Sequence[int], tools: Sequence[Mapping[str, Any]] | None
) -> dict[str, Any]:
    prompt = _render(tokenizer, messages[:-1], tools, add_generation_prompt=True)
    full = _render(tokenizer, messages, tools, add_generation_prompt=False)
    if not full.startswith(prompt):
        raise RowRejected(f"message {len(messages)}: the chat template changes the prompt when the answer follows it")
    if not messages[-1].get("reasoning_content"):
        written = _empty_thinking(full[len(prompt) :], messages[-1]["content"])
        prompt, answer = full[: len(prompt) + written], full[len(prompt) + written :]
        if written and answer.lstrip().startswith("<think>"):
            raise RowRejected(f"message {len(messages)}: its thinking stands in its content; give it as `reasoning_content`")
    prompt_ids, full_ids = _encode(tokenizer, prompt), _encode(tokenizer, full)
    if full_ids[: len(prompt_ids)] == prompt_ids:
        rest = full_ids[len(prompt_ids) :]
    else:  # a token spans the border, as where an answer begins with a line break: a served answer begins with its own
        rest = _encode(tokenizer, full[len(prompt) :])
    ends = [position for position, token in enumerate(rest) if token in stop_ids]
    return {"prompt_ids": prompt_ids, "response_ids": rest[: ends[0] + 1] if ends else rest, "finish_reason": "given"}


def _empty_thinking(rest: str, content: str) -> int:
    """Characters of an empty thinking block that opens `rest`; white space with which the answer itself begins stays."""
    found = EMPTY_THINKING.match(rest)
    if found is None:
        return 0
    tag_end = found.end() - (len(found.group()) - len(found.group().rstrip()))
    own = len(content) - len(content.lstrip())
    return max(tag_end, found.end() - own)


def rows_from_turns(turns: Sequence[Mapping[str, Any]]) -> list[tuple[list[int], list[bool]]]:
    """Training rows (input_ids, loss_mask) of one conversation's turns.

    Where a turn's prompt begins with the turn before it, prompt and response, both stand in one row with a mask of
    several spans; where the template rewrites history (thinking is dropped from earlier turns), a new row begins.
    RowRejected where a turn's response is empty.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    for number, turn in enumerate(turns, start=1):
        prompt, response = list(turn["prompt_ids"]), list(turn["response_ids"])
        if not response:
            raise RowRejected(f"turn {number}: the response is empty")
        ids, mask = rows[-1] if rows else ([], [])
        if rows and prompt[: len(ids)] == ids:
            mask += [False] * (len(prompt) - len(ids))
            ids += prompt[len(ids) :]
        else:
            ids, mask = prompt, [False] * len(prompt)
            rows.append((ids, mask))
        ids += response
        mask += [True] * len(response)
    return rows


def _render(
    tokenizer: Any,
    messages: Messages,
    tools: Sequence[Mapping[str, Any]] | None,
    add_generation_prompt: bool,
    variables: Mapping[str, Any] | None = None,
) -> str:
    from jinja2 import TemplateError

    given: dict[str, Any] = {**(variables or {}), **({"tools": [dict(tool) for tool in tools]} if tools else {})}
    try:
        return tokenizer.apply_chat_template(
            template_messages(messages), tokenize=False, add_generation_prompt=add_generation_prompt, **given
        )
    except TemplateError as error:
        raise RowRejected(f"the chat template refuses it: {(str(error).splitlines() or ['no reason given'])[0]}") from None


def _encode(tokenizer: Any, text: str) -> list[int]:
    # as `apply_chat_template` does it: the template has written the special tokens already
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
