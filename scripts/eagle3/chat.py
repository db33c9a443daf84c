"""The target's chat template: conversations to token ids, and answered turns to training rows with a loss mask.

In: messages as [{role, content}] and the target's own tokenizer, or turns as token ids. Out: lists of token ids;
masks are true on what the target says, its stop token included, and false on everything that the template wrote.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from scripts.eagle3.errors import RowRejected

Messages = Sequence[Mapping[str, str]]


def render_prompt(tokenizer: Any, messages: Messages) -> list[int]:
    """Token ids of the conversation with the opening of the answer; RowRejected where the template refuses it."""
    return _encode(tokenizer, _render(tokenizer, messages, add_generation_prompt=True))


def split_given_turns(tokenizer: Any, messages: Messages, stop_ids: Sequence[int]) -> list[dict[str, Any]]:
    """The data set's own answers as turns {prompt_ids, response_ids, finish_reason: "given"}, one per answer.

    An answer ends with the first stop id after its prompt; what the template appends to that is not part of it. A user
    message after the last answer is left out. RowRejected where a user message before that has no answer, the template
    refuses the conversation, or its rendering of an answer does not continue the prompt.
    """
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise RowRejected("no assistant message, and `responses: given` takes the answers from the data")
    for index in range(1, answers[-1]):
        if messages[index]["role"] == messages[index - 1]["role"] == "user":
            raise RowRejected(f"message {index} has no answer, and `responses: given` takes the answers from the data")
    return [_split_turn(tokenizer, messages[: index + 1], stop_ids) for index in answers]


def _split_turn(tokenizer: Any, messages: Messages, stop_ids: Sequence[int]) -> dict[str, Any]:
    prompt = _render(tokenizer, messages[:-1], add_generation_prompt=True)
    full = _render(tokenizer, messages, add_generation_prompt=False)
    if not full.startswith(prompt):
        raise RowRejected(f"message {len(messages)}: the chat template changes the prompt when the answer follows it")
    prompt_ids, full_ids = _encode(tokenizer, prompt), _encode(tokenizer, full)
    if full_ids[: len(prompt_ids)] == prompt_ids:
        rest = full_ids[len(prompt_ids) :]
    else:  # a token spans the border, as where an answer begins with a line break: a served answer begins with its own
        rest = _encode(tokenizer, full[len(prompt) :])
    ends = [position for position, token in enumerate(rest) if token in stop_ids]
    return {"prompt_ids": prompt_ids, "response_ids": rest[: ends[0] + 1] if ends else rest, "finish_reason": "given"}


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


def _render(tokenizer: Any, messages: Messages, add_generation_prompt: bool) -> str:
    from jinja2 import TemplateError

    plain = [dict(message) for message in messages]
    try:
        return tokenizer.apply_chat_template(plain, tokenize=False, add_generation_prompt=add_generation_prompt)
    except TemplateError as error:
        raise RowRejected(f"the chat template refuses it: {(str(error).splitlines() or ['no reason given'])[0]}") from None


def _encode(tokenizer: Any, text: str) -> list[int]:
    # as `apply_chat_template` does it: the template has written the special tokens already
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])
