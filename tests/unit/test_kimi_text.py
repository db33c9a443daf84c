"""Kimi-K2.5's text side on a synthetic folder: tiktoken vocabulary with the real special ids, turns, thinking, tools, masks."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scripts.eagle3.chat import (
    check_thinking_variable,
    render_prompt,
    rows_from_turns,
    split_given_turns,
    template_variables,
)
from scripts.eagle3.checks_tokenizer import is_kimi, tokenizer_lines
from scripts.eagle3.config import Regeneration, Target
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.generation import Completion, Dialogue, answer_message
from scripts.eagle3.messages import normalise, normalise_tools, stored
from scripts.eagle3.target import load_tokenizer, resolve_sampling, stop_token_ids
from scripts.eagle3.vocabulary import special_token_ids
from scripts.tiny_kimi import SPECIAL_TOKENS
from tests.preflight_case import assert_red, config_for, copy_target, edit_json, line

EOS, END, USER, ASSISTANT, SYSTEM = 163585, 163586, 163587, 163588, 163594
CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END = 163595, 163596, 163597, 163598, 163599
MIDDLE, THINK, THINK_END = 163601, 163606, 163607
MODULE = "tokenization_tiny_kimi.py"


@pytest.fixture(scope="session")
def tokenizer(kimi_text: Target) -> Any:
    return load_tokenizer(kimi_text)


@pytest.fixture
def copy(kimi_text: Target, tmp_path: Path) -> Target:
    return copy_target(kimi_text, tmp_path / "target")


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str, thinking: str | None = None) -> dict[str, Any]:
    return {"role": "assistant", "content": text, **({"reasoning_content": thinking} if thinking else {})}


class Spelled:
    """Expected ids, put together by hand from special ids and plain text."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def text(self, text: str) -> list[int]:
        """Plain text has no special ids."""
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert max(ids) < 163584
        return list(ids)

    def user(self, text: str) -> list[int]:
        return [USER, *self.text("user"), MIDDLE, *self.text(text), END]

    def opening(self) -> list[int]:
        return [ASSISTANT, *self.text("assistant"), MIDDLE]


@pytest.fixture
def spelled(tokenizer: Any) -> Spelled:
    return Spelled(tokenizer)


# -- vocabulary -------------------------------------------------------------------------------------------------------


def test_special_tokens_stand_at_their_ids_and_the_folder_is_one_of_python_code(tokenizer: Any, kimi_text: Target) -> None:
    assert not (Path(kimi_text.path) / "tokenizer.json").exists()
    names = {"<|im_end|>": END, "<|im_user|>": USER, "<think>": THINK, "</think>": THINK_END, "[PAD]": 163839}
    assert {name: tokenizer.convert_tokens_to_ids(name) for name in names} == names
    assert max(tokenizer.get_vocab().values()) == 163839
    assert stop_token_ids(kimi_text) == [END]
    assert json.loads((Path(kimi_text.path) / "config.json").read_text())["eos_token_id"] == EOS


def test_all_special_and_added_tokens_are_in_the_drafts_vocabulary(tokenizer: Any) -> None:
    assert special_token_ids(tokenizer, [END], 163840) == sorted(SPECIAL_TOKENS)


@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_every_text_survives_the_vocabulary(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_ranks_are_sparse_up_to_the_special_tokens(tokenizer: Any) -> None:
    ids = tokenizer("the th", add_special_tokens=False)["input_ids"]
    assert len(ids) == 3 and ids[-1] > 163000 and ids[0] < 1000


def test_python_code_of_a_tokenizer_is_refused_by_name_until_it_is_trusted(copy: Target) -> None:
    distrusted = copy.model_copy(update={"trust_remote_code": False})
    with pytest.raises(StageError, match=r"TinyKimiTokenizer.*set target\.trust_remote_code: true") as error:
        load_tokenizer(distrusted)
    assert "\n" not in str(error.value)
    (only,) = tokenizer_lines(distrusted, config_for(distrusted))
    assert_red(only, "Python code", "trust_remote_code")
    assert type(load_tokenizer(copy)).__name__ == "TinyKimiTokenizer"


def test_code_beside_a_tokenizer_json_is_not_needed(tiny_llama: Target, tmp_path: Path) -> None:
    target = copy_target(tiny_llama, tmp_path / "target")
    named = {"AutoTokenizer": ["somewhere.Something", None]}
    edit_json(Path(target.path) / "tokenizer_config.json", lambda config: config.update(auto_map=named))
    assert load_tokenizer(target).is_fast


# -- fingerprint of the ids -------------------------------------------------------------------------------------------


def shift_ids(folder: Path, renumber: str) -> None:
    """The folder's own tokenizer numbers its special tokens otherwise; `renumber` maps `number` and its place `index`."""
    module = folder / MODULE
    planted = "added = settings['added_tokens_decoder']\n        " + (
        f"settings['added_tokens_decoder'] = {{{renumber}: added[number] for index, number in enumerate(sorted(added))}}\n"
    )
    text, place = module.read_text(), "        super().__init__(**settings)\n"
    assert place in text
    module.write_text(text.replace(place, f"        {planted}{place}"))


def test_ids_as_published_are_green(copy: Target) -> None:
    lines = tokenizer_lines(copy, config_for(copy))
    assert [each for each in lines if each.state != "green"] == []
    assert "23 declared ids are right" in line(lines, "special tokens").found
    assert "17 ids are as published" in line(lines, "Kimi's ids").found


def test_a_missing_vocabulary_is_named(copy: Target) -> None:
    (Path(copy.path) / "tiktoken.model").unlink()
    found = line(tokenizer_lines(copy, config_for(copy)), "vocabulary")
    assert_red(found, f"{copy.path}: no vocabulary, none of tokenizer.json, tekken.json, *.model", "fetch the target again")


def test_one_other_id_is_no_shift_and_a_k2_target_needs_no_ids_for_thinking(copy: Target) -> None:
    shift_ids(Path(copy.path), "number if number != 163607 else 163608")
    found = line(tokenizer_lines(copy, config_for(copy)), "Kimi's ids")
    assert_red(found, "1 of 17 tokens", "</think> is 163608, published as 163607")
    assert "shifted by" not in found.found and "of another release" in found.advice
    edit_json(
        Path(copy.path) / "config.json", lambda config: config.update({**config.pop("text_config"), "model_type": "kimi_k2"})
    )
    assert "14 ids are as published" in line(tokenizer_lines(copy, config_for(copy)), "Kimi's ids").found


@pytest.mark.parametrize("native", [False, True])
def test_a_folder_that_a_library_has_saved_again_is_asked_too(copy: Target, native: bool) -> None:
    shift_ids(Path(copy.path), "number - 3")
    if native:  # transformers' own class for the text model
        edit_json(Path(copy.path) / "config.json", lambda config: config["text_config"].update(model_type="deepseek_v3"))
    else:
        (Path(copy.path) / "tiktoken.model").rename(Path(copy.path) / "other.model")
    assert is_kimi(copy)


@pytest.mark.parametrize("distance", [-1, -2, -3, 1, 2, 3])
def test_shifted_ids_are_red_and_the_shift_is_named(copy: Target, distance: int) -> None:
    shift_ids(Path(copy.path), f"number + {distance}")
    lines = tokenizer_lines(copy, config_for(copy))
    for name in ("special tokens", "Kimi's ids"):
        assert_red(line(lines, name), f"shifted by {distance:+d}, as releases of transformers 5", "transformers (`make env`)")


def test_ids_numbered_without_their_gaps_are_red(copy: Target) -> None:
    # what a conversion did to the published files: <think> became 163603
    shift_ids(Path(copy.path), "163584 + index if number < 163838 else number")
    found = line(tokenizer_lines(copy, config_for(copy)), "special tokens")
    assert_red(found, "16 of 23 tokens", "<|start_header_id|> is 163589, declared 163590", "shifted by -3 to -1")


def test_a_folder_that_was_saved_with_shifted_ids_is_red_though_its_files_agree(copy: Target) -> None:
    def shift(config: dict[str, Any]) -> None:
        added = config["added_tokens_decoder"]
        config["added_tokens_decoder"] = {str(int(number) - 2): token for number, token in added.items()}

    edit_json(Path(copy.path) / "tokenizer_config.json", shift)
    lines = tokenizer_lines(copy, config_for(copy))
    assert line(lines, "special tokens").state == "green"
    assert_red(line(lines, "Kimi's ids"), "17 of 17", "<|im_end|> is 163584, published as 163586", "shifted by -2")


def test_a_turn_that_ends_with_the_wrong_token_is_red(copy: Target) -> None:
    edit_json(Path(copy.path) / "generation_config.json", lambda config: config.update(eos_token_id=EOS))
    assert_red(line(tokenizer_lines(copy, config_for(copy)), "Kimi's ids"), "163586", "163585", "generation_config.json")


# -- template ---------------------------------------------------------------------------------------------------------


def test_prompt_ends_in_open_thinking_or_in_empty_thinking(tokenizer: Any, spelled: Spelled) -> None:
    before = [*spelled.user("hello"), *spelled.opening()]
    assert render_prompt(tokenizer, [user("hello")]) == [*before, THINK]
    assert render_prompt(tokenizer, [user("hello")], variables={"thinking": True}) == [*before, THINK]
    assert render_prompt(tokenizer, [user("hello")], variables={"thinking": False}) == [*before, THINK, THINK_END]


def test_thinking_is_kept_after_the_last_question_only(tokenizer: Any, spelled: Spelled) -> None:
    history = [user("one"), said("first", "so"), user("two")]
    assert render_prompt(tokenizer, history) == [
        *spelled.user("one"),
        *(*spelled.opening(), THINK, THINK_END, *spelled.text("first"), END),
        *spelled.user("two"),
        *(*spelled.opening(), THINK),
    ]


RAW = {
    "tools": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "messages": [
        {"role": "system", "content": "be brief"},
        user("what is it"),
        {
            "role": "assistant",
            "content": None,
            "reasoning_content": "look it up",
            "tool_calls": [{"type": "function", "function": {"name": "look", "arguments": '{"at": "ü"}'}}],
        },
        {"role": "tool", "content": "42"},
        said("it is 42", "easy"),
    ],
}


def row_of(raw: dict[str, Any]) -> dict[str, Any]:
    return {"conversation_id": "c", "source": "s", "split": "train", **stored(normalise(raw), normalise_tools(raw))}


def called(spelled: Spelled) -> list[int]:
    name, arguments = spelled.text("functions.look:0"), spelled.text('{"at": "ü"}')
    return [CALLS, CALL, *name, ARGUMENTS, *arguments, CALL_END, CALLS_END]


def before_call(spelled: Spelled) -> list[int]:
    declared = '[{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]'
    return [
        *(SYSTEM, *spelled.text("tool_declare"), MIDDLE, *spelled.text(declared), END),
        *(SYSTEM, *spelled.text("system"), MIDDLE, *spelled.text("be brief"), END),
        *spelled.user("what is it"),
        *(*spelled.opening(), THINK),
    ]


def after_call(spelled: Spelled) -> list[int]:
    return [
        *(SYSTEM, *spelled.text("tool"), MIDDLE, *spelled.text("## Return of functions.look:0\n42"), END),
        *(*spelled.opening(), THINK),
    ]


def test_given_calls_and_results_become_one_row_with_the_call_and_the_answer_under_the_mask(
    tokenizer: Any, spelled: Spelled
) -> None:
    row = row_of(RAW)
    turns = split_given_turns(tokenizer, row["messages"], [END], json.loads(row["tools"]))
    ((ids, mask),) = rows_from_turns(turns)
    call = [*spelled.text("look it up"), THINK_END, *called(spelled), END]
    answer = [*spelled.text("easy"), THINK_END, *spelled.text("it is 42"), END]
    parts = [(before_call(spelled), False), (call, True), (after_call(spelled), False), (answer, True)]
    assert ids == [token for part, _ in parts for token in part]
    assert mask == [masked for part, masked in parts for _ in part]


# -- masks ------------------------------------------------------------------------------------------------------------


def test_thinking_in_each_answer_gives_a_row_for_each_answer(tokenizer: Any, spelled: Spelled) -> None:
    conversation = [user("one"), said("first", "so"), user("two"), said("second", "thus")]
    rows = rows_from_turns(split_given_turns(tokenizer, conversation, [END]))
    first = [*spelled.text("so"), THINK_END, *spelled.text("first"), END]
    second = [*spelled.text("thus"), THINK_END, *spelled.text("second"), END]
    prompts = [render_prompt(tokenizer, conversation[:1]), render_prompt(tokenizer, conversation[:3])]
    assert prompts[0][-1] == prompts[1][-1] == THINK
    assert rows == [
        (prompts[0] + first, [False] * len(prompts[0]) + [True] * len(first)),
        (prompts[1] + second, [False] * len(prompts[1]) + [True] * len(second)),
    ]


def test_empty_thinking_before_given_answers_is_never_supervised_and_one_row_holds_them_all(
    tokenizer: Any, spelled: Spelled
) -> None:
    conversation = [user("one"), said("first"), user("two"), said(" second")]
    ((ids, mask),) = rows_from_turns(split_given_turns(tokenizer, conversation, [END]))
    answers = [[*spelled.text("first"), END], [*spelled.text(" second"), END]]
    prompts = [
        [*spelled.user("one"), *spelled.opening(), THINK, THINK_END],
        [*spelled.user("two"), *spelled.opening(), THINK, THINK_END],
    ]
    assert ids == [*prompts[0], *answers[0], *prompts[1], *answers[1]]
    assert mask == [
        *([False] * len(prompts[0]) + [True] * len(answers[0])),
        *([False] * len(prompts[1]) + [True] * len(answers[1])),
    ]
    assert prompts[0] == render_prompt(tokenizer, conversation[:1], variables={"thinking": False})


def test_thinking_within_the_content_of_a_given_answer_is_rejected(tokenizer: Any) -> None:
    # the template would write its empty thinking before it: such an answer was never sampled
    with pytest.raises(RowRejected, match=r"message 2: its thinking stands in its content; give it as `reasoning_content`"):
        split_given_turns(tokenizer, [user("one"), said("<think>so</think>first")], [END])


def test_a_call_without_thinking_is_supervised_from_its_first_token(tokenizer: Any, spelled: Spelled) -> None:
    raw = json.loads(json.dumps(RAW))
    del raw["messages"][2]["reasoning_content"]
    row = row_of({**raw, "messages": raw["messages"][:3]})
    (turn,) = split_given_turns(tokenizer, row["messages"], [END], json.loads(row["tools"]))
    assert turn["prompt_ids"] == [*before_call(spelled), THINK_END]
    assert turn["response_ids"] == [*called(spelled), END]


QWEN_LIKE = (
    "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\n' -}}"
    "{%- if m['role'] == 'assistant' and loop.last -%}"
    "{{- '<think>\n' + (m['reasoning_content'] or '') + '\n</think>\n\n' + m['content'].lstrip('\n') -}}"
    "{%- else -%}{{- m['content'] -}}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}"
    "{%- if enable_thinking is defined and not enable_thinking -%}{{- '<think>\n\n</think>\n\n' -}}{%- endif -%}{%- endif -%}"
)


@pytest.mark.parametrize(
    ("message", "prompt_end", "response"),
    [
        (said("Hi"), "</think>\n\n", "Hi<|im_end|>"),
        (said("  Hi"), "</think>\n\n", "  Hi<|im_end|>"),
        (said("Hi", "so"), "<|im_start|>assistant\n", "<think>\nso\n</think>\n\nHi<|im_end|>"),
    ],
)
def test_empty_thinking_that_stands_in_the_answers_rendering_alone_belongs_to_the_prompt(
    tiny_llama: Target, message: dict[str, Any], prompt_end: str, response: str
) -> None:
    tokenizer = load_tokenizer(tiny_llama)
    tokenizer.chat_template = QWEN_LIKE
    (turn,) = split_given_turns(tokenizer, [user("Hello"), message], stop_token_ids(tiny_llama))
    assert tokenizer.decode(turn["prompt_ids"]).endswith(prompt_end)
    assert tokenizer.decode(turn["response_ids"]) == response


# -- answers of the target --------------------------------------------------------------------------------------------


def test_an_answer_in_thinking_mode_becomes_history_without_its_thinking(tokenizer: Any, spelled: Spelled) -> None:
    talk = Dialogue({"messages": [user("one"), user("two")]}, tokenizer)
    first = [*spelled.text("so"), THINK_END, *spelled.text("first"), END]
    assert talk.take(talk.next_prompt(), Completion(first, "stop")) is None
    assert talk.next_prompt() == render_prompt(tokenizer, [user("one"), said("first"), user("two")])


def test_an_answer_in_instant_mode_is_its_content(tokenizer: Any, spelled: Spelled) -> None:
    talk = Dialogue({"messages": [user("one")]}, tokenizer, {"thinking": False})
    prompt = talk.next_prompt()
    assert prompt[-2:] == [THINK, THINK_END]
    message = answer_message(tokenizer, prompt, Completion([*spelled.text("first"), END], "stop"))
    assert message == {"role": "assistant", "content": "first"}


def test_a_conversation_with_tool_messages_is_answered_on_its_own_history(tokenizer: Any, spelled: Spelled) -> None:
    row = row_of(RAW)
    talk = Dialogue(row, tokenizer)
    assert talk.user_turns == 2
    own = Completion([*spelled.text("no idea"), THINK_END, *spelled.text("none"), END], "stop")
    assert talk.next_prompt() == talk.next_prompt() == before_call(spelled)
    assert talk.take(talk.next_prompt(), own) is None and talk.open
    given_call = [*spelled.text("look it up"), THINK_END, *called(spelled), END]
    assert talk.next_prompt() == [*before_call(spelled), *given_call, *after_call(spelled)]
    assert talk.take(talk.next_prompt(), own) is None and not talk.open


def test_a_conversation_that_ends_with_a_result_is_answered_there_too(tokenizer: Any) -> None:
    row = row_of({**RAW, "messages": RAW["messages"][:4]})
    assert Dialogue(row, tokenizer).user_turns == 2


def test_an_own_call_without_a_result_ends_the_conversation(tokenizer: Any, spelled: Spelled) -> None:
    raw = {"tools": RAW["tools"], "messages": [user("one"), user("two")]}
    talk = Dialogue(row_of(raw), tokenizer)
    call = Completion([*spelled.text("so"), THINK_END, *called(spelled), END], "stop")
    assert talk.take(talk.next_prompt(), call) == "answer calls a tool, and the data has no result"


def test_declared_tools_alone_are_rendered_and_history_is_the_targets_own(tokenizer: Any) -> None:
    raw = {"tools": RAW["tools"], "messages": [user("one"), said("given"), user("two")]}
    talk = Dialogue(row_of(raw), tokenizer)
    assert talk.user_turns == 2
    assert talk.next_prompt() == render_prompt(tokenizer, [user("one")], RAW["tools"])
    assert talk.next_prompt() != render_prompt(tokenizer, [user("one")])


# -- options of the answers -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "asked", "temperature", "top_p"),
    [
        ({"temperature": 0.6}, {}, 0.6, 1.0),
        ({"temperature": 0.6, "top_p": 0.95}, {}, 0.6, 0.95),
        ({"temperature": 0.6, "top_p": 0.95}, {"temperature": 0.2}, 0.2, 0.95),
        ({"temperature": 0.6, "top_p": 0.95}, {"top_p": 0.5}, 0.6, 0.5),
        ({"temperature": 0.6, "top_p": 0.95, "do_sample": False}, {}, 0.0, None),
        ({"do_sample": False}, {"temperature": 0.7}, 0.7, 1.0),
        ({"top_p": 0.95}, {"temperature": 0}, 0.0, None),
        ({}, {}, 1.0, 1.0),
        (None, {}, 1.0, 1.0),
    ],
)
def test_temperature_and_top_p_are_the_targets_own_unless_they_are_set(
    copy: Target, generation: dict[str, Any] | None, asked: dict[str, Any], temperature: float, top_p: float | None
) -> None:
    path = Path(copy.path) / "generation_config.json"
    path.unlink()
    if generation is not None:
        path.write_text(json.dumps(generation))
    resolved = resolve_sampling(copy, Regeneration(**asked))
    assert (resolved.temperature, resolved.top_p) == (temperature, top_p)
    assert resolve_sampling(copy, resolved) == resolved


def test_settings_without_effect_change_nothing() -> None:
    plain = Regeneration(temperature=0)
    assert Regeneration(temperature=0, seed=7, top_p=0.5, thinking_variable="other") == plain
    assert Regeneration(temperature=0.5, seed=7) != Regeneration(temperature=0.5)
    assert Regeneration(thinking=1, thinking_variable="other") != Regeneration(thinking=1)
    assert Regeneration.model_validate_json(Regeneration(thinking=0.5, seed=3).model_dump_json()).seed == 3


def test_each_conversation_has_its_mode_whatever_the_others_are() -> None:
    names = [f"conversation {number}" for number in range(2000)]
    chosen = {
        share: [name for name in names if template_variables(Regeneration(thinking=share), name) == {"thinking": True}]
        for share in (0.0, 0.3, 0.7, 1.0)
    }
    assert chosen[0.0] == [] and chosen[1.0] == names
    assert set(chosen[0.3]) < set(chosen[0.7])
    assert len(chosen[0.3]) == pytest.approx(600, abs=80)
    assert template_variables(Regeneration(), names[0]) == {}
    asked = Regeneration(thinking=1.0, thinking_variable="enable_thinking")
    assert template_variables(asked, names[0]) == {"enable_thinking": True}


def test_a_share_of_thinking_needs_a_template_that_knows_its_variable(copy: Target, tokenizer: Any) -> None:
    check_thinking_variable(tokenizer, Regeneration(thinking=0.5))
    check_thinking_variable(tokenizer, Regeneration())
    other = Regeneration(thinking=0.5, thinking_variable="enable_thinking")
    with pytest.raises(StageError, match=r"`enable_thinking` true and false; name its variable in responses\."):
        check_thinking_variable(tokenizer, other)
    found = tokenizer_lines(copy, config_for(copy, responses=other.model_dump()))
    assert_red(line(found, "thinking"), "enable_thinking", "responses.thinking_variable")
    known = tokenizer_lines(copy, config_for(copy, responses={"thinking": 0.5}))
    assert line(known, "thinking").state == "green"


def test_the_folder_is_made_the_same_each_time(kimi_text: Target, tmp_path: Path) -> None:
    from scripts import make_tiny_target

    make_tiny_target.main(["--kind", "kimi-text", "--output", str(tmp_path / "again")])
    made = {path.name: path.read_bytes() for path in (tmp_path / "again").iterdir()}
    assert made == {path.name: path.read_bytes() for path in Path(kimi_text.path).iterdir() if path.is_file()}
    shutil.rmtree(tmp_path / "again")
