"""The target's tokenizer and chat template, held against what the target's own files say.

In: the target and how its answers are made. Out: lines of preflight's table. The case that this is for: a tokenizer that a
newer library converts with its special ids shifted by one to three; text then looks right, and every id is wrong.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.eagle3.chat import check_thinking_variable, render_prompt, split_given_turns
from scripts.eagle3.checks import Fault, Line, check, first_line, some
from scripts.eagle3.config import Config, Regeneration, Target
from scripts.eagle3.errors import RowRejected, StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.target import chat_template, load_tokenizer, resolve_folder, stop_token_ids, text_config

# Ids of the published tokenizer_config.json, as public code quotes it. That a folder's files agree with each other is not
# enough: one that a converting library has saved again is shifted throughout.
K2_IDS = {
    **{"[BOS]": 163584, "[EOS]": 163585, "<|im_end|>": 163586, "<|im_user|>": 163587, "<|im_assistant|>": 163588},
    **{"<|im_system|>": 163594, "<|tool_calls_section_begin|>": 163595, "<|tool_calls_section_end|>": 163596},
    **{"<|tool_call_begin|>": 163597, "<|tool_call_argument_begin|>": 163598, "<|tool_call_end|>": 163599},
    **{"<|im_middle|>": 163601, "[UNK]": 163838, "[PAD]": 163839},
}
KIMI_IDS = {**K2_IDS, "<|media_pad|>": 163605, "<think>": 163606, "</think>": 163607}
KIMI_TYPES = ("kimi_k2", "kimi_k25")
KIMI_VOCABULARY = 163840
OTHER_VERSION = "install the locked transformers (`make env`), or fetch the tokenizer's files again"
DIALOGUE = (
    {"role": "user", "content": "Name a colour."},
    {"role": "assistant", "content": "Blue."},
    {"role": "user", "content": "And another one?"},
    {"role": "assistant", "content": "Green, like grass."},
)


def tokenizer_lines(target: Target, config: Config) -> list[Line]:
    """One line each: loads, special ids, bos/eos/pad, stop ids, chat template; Kimi's ids and thinking where they matter."""
    loaded: list[Any] = []

    def load() -> str:
        loaded.append(_load(target))
        return check_size(loaded[0], target)

    lines = [check("tokenizer", "vocabulary", load)]
    if not loaded:
        return lines
    tokenizer = loaded[0]
    given = config.responses == "given"
    if is_kimi(target):
        lines.append(check("tokenizer", "Kimi's ids", lambda: check_kimi_tokens(tokenizer, target)))
    if isinstance(config.responses, Regeneration) and config.responses.thinking is not None:
        responses = config.responses
        lines.append(check("tokenizer", "thinking", lambda: check_thinking(tokenizer, responses)))
    return [
        *lines,
        check("tokenizer", "special tokens", lambda: check_special_tokens(tokenizer, resolve_folder(target))),
        check("tokenizer", "bos, eos, pad", lambda: check_named_tokens(tokenizer, target)),
        check("tokenizer", "stop tokens", lambda: check_stop_tokens(tokenizer, target)),
        check("tokenizer", "chat template", lambda: check_chat_template(tokenizer, target, given)),
    ]


def _load(target: Target) -> Any:
    try:
        return load_tokenizer(target)
    except StageError:
        raise
    except Exception as error:  # transformers raises whatever its parsers raise
        raise Fault(f"the tokenizer does not load: {first_line(error)}", "fetch its files again") from error


def check_size(tokenizer: Any, target: Target) -> str:
    """The model has a row of its embedding for every token."""
    largest = max(tokenizer.get_vocab().values())
    rows = text_config(target)["vocab_size"]
    if largest >= rows:
        raise Fault(
            f"the tokenizer's largest id is {largest}, config.json has vocab_size {rows}",
            "the tokenizer is of another model: fetch the target again",
        )
    return f"{type(tokenizer).__name__}, {len(tokenizer)} tokens, vocab_size {rows}"


def declared_tokens(folder: Path) -> dict[int, tuple[str, bool]]:
    """Id -> (text, whether it is special) of the added tokens that tokenizer_config.json and tokenizer.json declare."""
    declared: dict[int, tuple[str, bool]] = {}
    path = folder / "tokenizer.json"
    if path.is_file():
        for token in read_json(path).get("added_tokens") or []:
            declared[int(token["id"])] = (token["content"], bool(token.get("special")))
    path = folder / "tokenizer_config.json"
    if path.is_file():
        for number, token in (read_json(path).get("added_tokens_decoder") or {}).items():
            entry = (token["content"], bool(token.get("special")))
            former = declared.setdefault(int(number), entry)
            if former[0] != entry[0]:
                raise Fault(
                    f"{path}: token {number} is {entry[0]!r}, tokenizer.json has {former[0]!r}", "fetch the tokenizer again"
                )
    return declared


def check_special_tokens(tokenizer: Any, folder: Path) -> str:
    """Each declared token is encoded to the id that the files give it, and a special one to nothing else."""
    declared = declared_tokens(folder)
    wrong = other_ids(tokenizer, [(text, number, special) for number, (text, special) in sorted(declared.items())])
    if wrong:
        told = [f"{text} is {found}, declared {number}" for text, number, found in wrong]
        raise Fault(
            f"{len(wrong)} of {len(declared)} tokens have other ids: {some(told)}{shift(wrong)}",
            OTHER_VERSION,
        )
    names = [text for text, special in declared.values() if special]
    return f"{len(declared)} declared ids are right, {len(names)} of them special: {some(names)}"


def other_ids(tokenizer: Any, expected: Sequence[tuple[str, int, bool]]) -> list[tuple[str, int, Any]]:
    """(text, expected id, what was found) of the tokens with other ids; a special one must be encoded to its id alone."""
    wrong = []
    for text, number, special in expected:
        found = tokenizer.convert_tokens_to_ids(text)
        if found == number and special:
            encoded = list(tokenizer(text, add_special_tokens=False)["input_ids"])
            found = number if encoded == [number] else encoded
        if found != number:
            wrong.append((text, number, found))
    return wrong


def shift(wrong: Sequence[tuple[str, int, Any]]) -> str:
    """Names the fault of transformers 5 where several ids are off by one to three, all to the same side; else nothing."""
    distances = [found - number for _, number, found in wrong if isinstance(found, int)]
    if len(distances) < 2:
        return ""
    low, high = min(distances), max(distances)
    if not (-3 <= low <= high <= -1 or 1 <= low <= high <= 3):
        return ""
    span = f"{low:+d}" if low == high else f"{low:+d} to {high:+d}"
    return f"; shifted by {span}, as releases of transformers 5 before April 2026 do where they convert a tokenizer"


def is_kimi(target: Target) -> bool:
    """Whether the target is of Kimi's K2 family with its own vocabulary (the tiny targets have a small one)."""
    types = {read_json(resolve_folder(target) / "config.json").get("model_type"), text_config(target).get("model_type")}
    return not types.isdisjoint(KIMI_TYPES) and text_config(target).get("vocab_size") == KIMI_VOCABULARY


def check_kimi_tokens(tokenizer: Any, target: Target) -> str:
    """The ids that Kimi-K2.5 was published with (K2: without those for images and thinking), and the three that its configs
    number."""
    folder = resolve_folder(target)
    config = read_json(folder / "config.json")
    published = KIMI_IDS if config.get("model_type") == "kimi_k25" else K2_IDS
    wrong = other_ids(tokenizer, [(text, number, True) for text, number in published.items()])
    if wrong:
        told = [f"{text} is {found}, published as {number}" for text, number, found in wrong]
        advice = OTHER_VERSION if shift(wrong) else "the tokenizer is of another release: fetch the target again"
        raise Fault(f"{len(wrong)} of {len(published)} tokens have other ids: {some(told)}{shift(wrong)}", advice)
    if KIMI_IDS["<|im_end|>"] not in stop_token_ids(target):
        raise Fault(
            f"<|im_end|> is {KIMI_IDS['<|im_end|>']}, eos_token_id is {stop_token_ids(target)}: answers would not end",
            "restore generation_config.json: its eos_token_id is <|im_end|>, the one in config.json is [EOS]",
        )
    placeholder = config.get("media_placeholder_token_id", KIMI_IDS["<|media_pad|>"])
    if placeholder != KIMI_IDS["<|media_pad|>"]:
        raise Fault(f"<|media_pad|> is {KIMI_IDS['<|media_pad|>']}, media_placeholder_token_id {placeholder}", OTHER_VERSION)
    return f"{len(published)} ids are as published; <|im_end|> ends a turn"


def check_thinking(tokenizer: Any, responses: Regeneration) -> str:
    """The chat template knows the variable of `responses.thinking`."""
    check_thinking_variable(tokenizer, responses)
    return f"{responses.thinking:.0%} of the conversations with {responses.thinking_variable}, which the template knows"


def check_named_tokens(tokenizer: Any, target: Target) -> str:
    """Beginning, end and padding as config.json and generation_config.json number them."""
    folder, text = resolve_folder(target), text_config(target)
    wrapper, path = read_json(folder / "config.json"), folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    said = []
    for name in ("bos", "eos", "pad"):
        own = getattr(tokenizer, f"{name}_token_id")
        files = {number for source in (text, wrapper, generation) for number in _ids(source.get(f"{name}_token_id"))}
        if own is not None and files and own not in files:
            token = getattr(tokenizer, f"{name}_token")
            raise Fault(
                f"{name} is {own} ({token}) for the tokenizer, {_listed(files)} in config.json and generation_config.json",
                OTHER_VERSION,
            )
        said.append(f"{name} {own}" if own in files else f"{name} {own} (files: {_listed(files)})")
    return ", ".join(said)


def check_stop_tokens(tokenizer: Any, target: Target) -> str:
    """The ids that end a turn are tokens of their own."""
    stops = stop_token_ids(target)
    special = declared_tokens(resolve_folder(target))
    said = []
    for number in stops:
        token = tokenizer.convert_ids_to_tokens(number)
        if token is None or (special and number not in special):
            raise Fault(
                f"eos_token_id {number} is {'no token' if token is None else f'the plain token {token!r}'}",
                "mend eos_token_id in generation_config.json: the ids that end a turn of this target",
            )
        said.append(f"{number} {token}")
    return ", ".join(said)


def check_chat_template(tokenizer: Any, target: Target, given: bool) -> str:
    """Renders two turns; an answer continues its prompt and ends with a stop id."""
    chat_template(resolve_folder(target))
    advice = "mend the chat template (chat_template.jinja, or chat_template in tokenizer_config.json)"
    try:
        prompt = render_prompt(tokenizer, DIALOGUE[:3])
    except RowRejected as error:
        raise Fault(str(error), advice) from error
    try:
        turns = split_given_turns(tokenizer, DIALOGUE, stop_token_ids(target))
    except RowRejected as error:
        if given:
            raise Fault(
                f"{error}, and `responses: given` takes answers from the rendering", "regenerate the answers"
            ) from error
        return f"two turns are {len(prompt)} tokens; with an answer the opening changes: only the target's own answers fit"
    if turns[-1]["response_ids"][-1] not in stop_token_ids(target):
        raise Fault(
            f"a rendered answer has none of the stop ids {stop_token_ids(target)}",
            "mend eos_token_id in generation_config.json: the id that the template writes after an answer is missing",
        )
    first = turns[0]["prompt_ids"] + turns[0]["response_ids"]
    kept = turns[1]["prompt_ids"][: len(first)] == first
    return f"two turns are {len(prompt)} tokens; " + (
        "one row per conversation" if kept else "earlier turns are rewritten: one row per answer"
    )


def _ids(value: Any) -> list[int]:
    return [] if value is None else [value] if isinstance(value, int) else list(value)


def _listed(numbers: set[int]) -> str:
    return " or ".join(map(str, sorted(numbers))) or "none"
