"""Our token ids against vLLM's own rendering of the same messages, as its server does it, without an engine."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scripts.collect_conversations import run as collect
from scripts.eagle3.chat import render_prompt
from scripts.eagle3.checks import Fault, Skipped, check
from scripts.eagle3.checks_rendering import (
    SAME_IDS,
    Renderer,
    check_same_ids,
    collected_conversations,
    rendering_lines,
    vllm_renderer,
)
from scripts.eagle3.config import Conversations, Parts, Source, Target
from scripts.eagle3.messages import normalise, normalise_tools
from scripts.eagle3.target import load_tokenizer
from tests.preflight_case import assert_red, config_for, copy_target, edit_json

pytestmark = pytest.mark.slow  # importing vLLM alone takes 15 s
DATA = Path(__file__).parents[2] / "config" / "data" / "train"
NOWHERE = Path("nothing-collected")
QWEN_TOOLS = '<tool_call>{"name": "f"}</tool_call>'
SPECIALS = [
    "<|im_end|>",
    "<|media_pad|>",
    "<think>",
    "</think>",
    "<|tool_calls_section_begin|>",
    "[EOS]",
    "## Return of x",
    QWEN_TOOLS,
]

texts = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"]), max_size=40),
    st.lists(st.sampled_from([*SPECIALS, " ", "\n", "\n\n", "héllo", "你好", "🙂", "ﬀ", "e\u0301"]), max_size=4).map("".join),
)
written = texts.filter(lambda text: bool(text.strip()))
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=4,
)
names = st.sampled_from(["look", "a.b", "überall"])
arguments = st.dictionaries(texts, values, max_size=3)
calls = st.lists(
    st.builds(
        lambda name, given, as_text: {"function": {"name": name, "arguments": json.dumps(given) if as_text else given}},
        *(names, arguments, st.booleans()),
    ),
    min_size=1,
    max_size=2,
)


@st.composite
def rounds(draw: st.DrawFn) -> list[dict[str, Any]]:
    """A question, perhaps calls with results, an answer."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": draw(written)}]
    for made in draw(st.lists(calls, max_size=2)):
        messages.append({"role": "assistant", "content": draw(texts), "reasoning_content": draw(written), "tool_calls": made})
        messages += [{"role": "tool", "content": draw(texts)} for _ in made]
    thinking = draw(st.none() | written)
    return [*messages, {"role": "assistant", "content": draw(written), "reasoning_content": thinking}]


@st.composite
def conversations(draw: st.DrawFn) -> dict[str, Any]:
    system = [{"role": "system", "content": draw(written)}] if draw(st.booleans()) else []
    said = [message for part in draw(st.lists(rounds(), max_size=3)) for message in part]
    tools = [{"name": draw(names), "parameters": draw(arguments)}] if draw(st.booleans()) else None
    return {"messages": [*system, *said, {"role": "user", "content": draw(written)}], "tools": tools}


@pytest.fixture(scope="module")
def theirs(kimi_text: Target) -> Renderer:
    return vllm_renderer(kimi_text, 100_000)


@pytest.fixture(scope="module")
def tokenizer(kimi_text: Target) -> Any:
    return load_tokenizer(kimi_text)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(raw=conversations(), variables=st.sampled_from([{}, {"thinking": True}, {"thinking": False}]))
def test_our_ids_are_vllms(theirs: Renderer, tokenizer: Any, raw: dict[str, Any], variables: dict[str, bool]) -> None:
    messages, tools = normalise(raw), normalise_tools(raw)
    assert render_prompt(tokenizer, messages, tools, variables) == theirs(messages, tools, variables)


def config(target: Target, path: Path, **sections: Any) -> Any:
    sources = {"train": [{"path": str(path)}], "evaluation": {"suite": {"path": "eval.jsonl"}}}
    return config_for(target, conversations=sources, rows={"max_length": 1024}, **sections)


def test_preflight_compares_the_runs_own_conversations(kimi_text: Target) -> None:
    for responses in ({}, {"thinking": 0.5}):
        (only,) = rendering_lines(kimi_text, config(kimi_text, DATA / "dialogues.jsonl", responses=responses), NOWHERE)
        assert only.state == "green", only
        assert "conversations of the local sources give the ids that vLLM serves" in only.found
        assert int(only.found.split()[0]) >= 20


def test_what_vllm_refuses_is_named_and_stops_nothing_unless_it_is_much(kimi_text: Target, tmp_path: Path) -> None:
    texts = ["one", "a long question " * 20, *map(str, range(10))]
    rows = [json.dumps({"messages": [{"role": "user", "content": text}]}) for text in texts]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows))
    (tmp_path / "long.jsonl").write_text(rows[1])
    theirs = vllm_renderer(kimi_text, 64)  # takes shorter prompts than the rows are
    found = check_same_ids(kimi_text, config(kimi_text, tmp_path / "rows.jsonl"), NOWHERE, theirs)
    assert found.startswith("11 conversations") and "vLLM refuses rows.jsonl: row 2 (" in found
    with pytest.raises(Fault, match=r"vLLM refuses 1 of 1 conversations: long\.jsonl: row 1"):
        check_same_ids(kimi_text, config(kimi_text, tmp_path / "long.jsonl"), NOWHERE, theirs)


def test_another_template_in_vllm_is_red(kimi_text: Target, tmp_path: Path) -> None:
    served = copy_target(kimi_text, tmp_path / "served")
    template = Path(served.path) / "chat_template.jinja"
    template.write_text(template.read_text().replace("assistant<|im_middle|>", "kimi<|im_middle|>"))
    asked = config(kimi_text, DATA / "dialogues.jsonl")
    theirs = vllm_renderer(served, 1025)
    found = check("tokenizer", SAME_IDS, lambda: check_same_ids(kimi_text, asked, NOWHERE, theirs))
    assert_red(found, "dialogues.jsonl: row 1: token ", "'assist", "'kimi<|im_middle|>", "the same chat template")
    assert check_same_ids(served, asked, NOWHERE, theirs).startswith("4")


def test_another_tokenizer_in_vllm_is_red(kimi_text: Target, tmp_path: Path) -> None:
    served = copy_target(kimi_text, tmp_path / "served")

    def shift(values: dict[str, Any]) -> None:
        added = values["added_tokens_decoder"]
        values["added_tokens_decoder"] = {str(int(number) - 3): token for number, token in added.items()}

    edit_json(Path(served.path) / "tokenizer_config.json", shift)
    asked = config(kimi_text, DATA / "questions.jsonl")
    theirs = vllm_renderer(served, 1025)
    with pytest.raises(Fault, match=r"questions\.jsonl: row 1: token 0 .* chat template and tokenizer files"):
        check_same_ids(kimi_text, asked, NOWHERE, theirs)


def test_without_local_sources_nothing_is_compared_and_the_line_says_so(kimi_text: Target) -> None:
    with pytest.raises(Skipped, match="local file"):
        check_same_ids(kimi_text, config(kimi_text, Path("somebody/some-set")), NOWHERE)


def test_what_the_run_has_collected_is_compared_whatever_its_source_was(kimi_text: Target, tmp_path: Path) -> None:
    train, suite = Source(path=str(DATA / "dialogues.jsonl")), Source(path=str(DATA / "questions.jsonl"), limit=2)
    collect(Conversations(train=[train], evaluation={"suite": suite}, validation_fraction=0.1), Parts(), tmp_path)
    (only,) = rendering_lines(kimi_text, config(kimi_text, Path("somebody/some-set"), responses={"thinking": 0.5}), tmp_path)
    assert only.state == "green" and "conversations collected give the ids" in only.found
    assert int(only.found.split()[0]) >= 20
    compared = [conversation.name for conversation in collected_conversations(tmp_path)]
    assert {name.split("/")[0] for name in compared} == {"part-0", "val", "eval"}
    first = next(name for name in compared[4:] if name.startswith("part-0"))
    assert int(first.split()[-1]) >= 1  # the file's rows are not taken from its head alone
