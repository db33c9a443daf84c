"""The messages of one conversation: from what data sets write to one form, tools and thinking included.

In: a raw row with `messages` (OpenAI's form) or `conversations` (ShareGPT's). Out: messages as chat templates take them, the
declared tools, the identity of the conversation; RowRejected says what is wrong with a row.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from scripts.eagle3.errors import RowRejected
from scripts.eagle3.files import sha256_json

Message = dict[str, Any]
FORMS = {"messages": ("role", "content"), "conversations": ("from", "value")}
ROLES = {
    **{"user": "user", "human": "user", "system": "system", "assistant": "assistant", "gpt": "assistant"},
    **{"tool": "tool", "observation": "tool", "function_call": "assistant"},
}
MEDIA_COLUMNS = ("images", "image", "videos", "video")


class WithImages(RowRejected):
    """A row with an image or a video: the draft is trained on text."""


def normalise(raw: Any) -> list[Message]:
    """The row's messages as [{role, content, ...}], roles system, user, assistant, tool.

    Taken are `messages` (role, content) and ShareGPT's `conversations` (from, value). A system message may only come
    first, then a user message; assistant messages follow user and tool messages, tool messages an assistant message that
    calls tools. User messages in a row are turns still to be answered. Content is always text, and empty only beside tool
    calls or as the result of a tool. Assistant messages may have `reasoning_content` and `tool_calls` (id, type, function:
    name, arguments as an object), tool messages have `tool_call_id`; where the data has no ids, calls are numbered as
    Kimi-K2.5 does it, `functions.name:0`, and results belong to them in order.
    """
    if isinstance(raw, RowRejected):
        raise raw
    if not isinstance(raw, Mapping):
        raise RowRejected(f"expected an object, found {type(raw).__name__}")
    key = next((key for key in FORMS if raw.get(key) is not None), None)
    if key is None:
        raise RowRejected('neither `messages` nor `conversations`, e.g. {"messages": [{"role": "user", "content": "..."}]}')
    if not isinstance(raw[key], list) or not raw[key]:
        raise RowRejected(f"`{key}` is empty" if raw[key] == [] else f"`{key}` is not a list of messages")
    if any(raw.get(column) for column in MEDIA_COLUMNS):
        raise WithImages("has images or videos beside its messages; only text is taken")
    role_key, content_key = FORMS[key]
    messages: list[Message] = []
    unanswered: list[str] = []  # ids of calls without a result, in order
    calls = 0
    for number, item in enumerate(raw[key], start=1):
        where = f"message {number}"
        if not isinstance(item, Mapping):
            raise RowRejected(f"{where}: expected an object, found {type(item).__name__}")
        role = _role(item.get(role_key), where)
        _check_order(role, messages, where)
        message: Message = {"role": role}
        if item.get(role_key) == "function_call":
            message |= {"content": "", "tool_calls": _calls(_parsed(item.get(content_key), where), calls, where)}
        elif role == "assistant" and item.get("tool_calls"):
            message["content"] = _content(item.get(content_key) or "", where, may_be_empty=True)
            message["tool_calls"] = _calls(item["tool_calls"], calls, where)
        else:
            message["content"] = _content(item.get(content_key), where, may_be_empty=role == "tool")
        if role == "assistant" and item.get("reasoning_content"):
            message["reasoning_content"] = _content(item["reasoning_content"], f"{where}: reasoning_content")
        if "tool_calls" in message:
            calls += len(message["tool_calls"])
            unanswered = [call["id"] for call in message["tool_calls"]]
        if role == "tool":
            message |= _result_of(item, unanswered, where)
        messages.append(message)
    if messages[-1]["role"] == "system":
        raise RowRejected("no user message")
    return messages


def normalise_tools(raw: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The declared tools in OpenAI's form ([{type: function, function: {name, ...}}]); None without any."""
    found = raw.get("tools")
    if isinstance(found, str) and found.strip():
        found = _parsed(found, "tools")
    if not found:
        return None
    if not isinstance(found, list) or not all(isinstance(tool, Mapping) for tool in found):
        raise RowRejected("`tools` is not a list of objects")
    tools = [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in found]
    if not all(isinstance(tool["function"], Mapping) and tool["function"].get("name") for tool in tools):
        raise RowRejected("`tools` has a tool without a name")
    return tools


def stored(messages: Sequence[Message], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
    """The columns `messages` and `tools` of a row of conversations: what has no fixed form is JSON text there."""
    flat = [{**message} for message in messages]
    for message in flat:
        if "tool_calls" in message:
            message["tool_calls"] = json.dumps(message["tool_calls"], ensure_ascii=False)
    return {"messages": flat, "tools": json.dumps(tools, ensure_ascii=False) if tools else None}


def has_tool_messages(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether tools are called in it, or answer."""
    return any(message["role"] == "tool" or message.get("tool_calls") for message in messages)


def conversation_id(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> str:
    """32 hex digits: the identity of a conversation is its messages, and the tools where it has any."""
    parts: list[Any] = []
    for message in messages:
        more = {key: value for key, value in message.items() if key not in ("role", "content") and value is not None}
        parts.append([message["role"], message["content"], *([more] if more else [])])
    return sha256_json([*parts, {"tools": tools}] if tools else parts)[:32]


def _role(value: Any, where: str) -> str:
    if not isinstance(value, str) or value not in ROLES:
        raise RowRejected(f"{where}: unknown role {str(value)[:40]!r}")
    return ROLES[value]


def _content(value: Any, where: str, may_be_empty: bool = False) -> str:
    if isinstance(value, list):
        value = "\n".join(_part(part, where) for part in value)
    if not isinstance(value, str):
        raise RowRejected(f"{where}: content is not text but {type(value).__name__}")
    if not value.strip() and not may_be_empty:
        raise RowRejected(f"{where}: content is empty")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RowRejected(f"{where}: content is not valid Unicode (a lone surrogate)") from None
    return value


def _part(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if isinstance(kind, str) and ("image" in kind or "video" in kind):
        raise WithImages(f"{where}: content has a part of type {kind}; only text is taken")
    if kind != "text" or not isinstance(part.get("text"), str):
        raise RowRejected(f"{where}: content has a part that is not text but {str(kind)[:40]}")
    return str(part["text"])


def _parsed(value: Any, where: str) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except (json.JSONDecodeError, RecursionError):
        raise RowRejected(f"{where}: expected JSON, found {value[:40]!r}") from None


def _calls(value: Any, before: int, where: str) -> list[dict[str, Any]]:
    """Tool calls in OpenAI's form; `before` calls came earlier in the conversation."""
    calls = []
    for number, item in enumerate(_parsed(value, where) if isinstance(value, str | list) else [value], start=before):
        if not isinstance(item, Mapping):
            raise RowRejected(f"{where}: a tool call is not an object")
        function = item.get("function", item)
        name = function.get("name") if isinstance(function, Mapping) else None
        if not isinstance(name, str) or not name:
            raise RowRejected(f"{where}: a tool call without a name")
        # as vLLM hands them to a template, except that it takes what is no object for an empty one
        arguments = _parsed(function.get("arguments") or {}, f"{where}: arguments of {name[:40]}")
        if not isinstance(arguments, Mapping):
            raise RowRejected(f"{where}: arguments of {name[:40]} are no object")
        identity = item.get("id") if isinstance(item.get("id"), str) and item["id"] else f"functions.{name}:{number}"
        calls.append({"id": identity, "type": "function", "function": {"name": name, "arguments": dict(arguments)}})
    if not calls:
        raise RowRejected(f"{where}: no tool call")
    try:
        json.dumps(calls, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise RowRejected(f"{where}: a tool call is not valid Unicode (a lone surrogate)") from None
    return calls


def _result_of(item: Mapping[str, Any], unanswered: list[str], where: str) -> dict[str, str]:
    """The id of the call that a tool message answers, taken from `unanswered`."""
    identity = item.get("tool_call_id")
    if not isinstance(identity, str) or not identity:
        if not unanswered:
            raise RowRejected(f"{where}: a tool message that answers no call")
        identity = unanswered[0]
    if identity in unanswered:
        unanswered.remove(identity)
    name = item.get("name")
    return {"tool_call_id": identity, **({"name": name} if isinstance(name, str) and name else {})}


def _check_order(role: str, before: Sequence[Mapping[str, Any]], where: str) -> None:
    previous = before[-1] if before else {"role": None}
    if role == "system" and before:
        raise RowRejected(f"{where}: a system message may only come first")
    if role == "assistant" and previous["role"] not in ("user", "tool"):
        raise RowRejected(f"{where}: an assistant message must follow a user message")
    if role == "tool" and previous["role"] != "tool" and not previous.get("tool_calls"):
        raise RowRejected(f"{where}: a tool message must follow a tool call")
