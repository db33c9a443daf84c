"""The target answers prompts: requests go through the engine's step loop, each finished answer is handed over at once.

In: prompts as token ids, or conversations whose user turns are to be answered in order. Out: completions as token ids,
keyed by what decides them (prompt and sampling), so that a killed job finds the finished ones again. For vLLM 0.22 to
0.32.
"""

import hashlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from scripts.eagle3.chat import render_prompt, template_messages, tools_of
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import sha256_json
from scripts.eagle3.messages import has_tool_messages

# openings of a tool call in an answer: Kimi's, and the one of Hermes and Qwen
TOOL_CALLS = ("<|tool_calls_section_begin|>", "<tool_call>")
THINK_START, THINK_END = "<think>", "</think>"
# Tokens of a prompt's end that show whether the answer starts inside a thinking block.
PROMPT_TAIL_TOKENS = 8


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn; temperature 0 is greedy."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class Request:
    """One prompt to answer. `owner` travels along; `traced` records how many tokens each engine step gave."""

    prompt_ids: list[int]
    max_tokens: int
    sampling: Sampling
    owner: Any = None
    traced: bool = False

    @cached_property
    def key(self) -> str:
        """32 hex digits of everything that decides the answer."""
        settings = [self.max_tokens, self.sampling.temperature, self.sampling.top_p, self.sampling.seed]
        return sha256_json([list(self.prompt_ids), *settings, list(self.sampling.stop_token_ids)])[:32]


@dataclass(frozen=True)
class Completion:
    """An answer: its ids, the stop token included, and why it ended (stop or length). `steps` sum up to its length."""

    output_ids: list[int]
    finish_reason: str
    steps: list[int] | None = None


@dataclass
class Answered:
    """One turn of a dialogue: the whole rendered prompt, and the answer."""

    prompt_ids: list[int]
    completion: Completion


@dataclass
class Dialogue:
    """A conversation whose user turns are answered in order, each on top of the answers before it.

    Given assistant messages are dropped. The next prompt is rendered from the answers' text, as a server would. A
    `problem` ends it. A conversation with tool messages is answered wherever it has an assistant message, each time on top
    of the data's own history: calls that the target makes itself would have no result. `variables` go to the template.
    """

    row: dict[str, Any]
    tokenizer: Any
    variables: dict[str, Any] = field(default_factory=dict)
    history: list[dict[str, Any]] = field(default_factory=list)
    answered: list[Answered] = field(default_factory=list)
    problem: str | None = None

    def __post_init__(self) -> None:
        messages = template_messages(self.row["messages"])
        self.keeps_history = has_tool_messages(messages)
        self._tools = tools_of(self.row)
        # what is added to the history before each answer
        self._waiting = deque(_given_segments(messages) if self.keeps_history else _user_segments(messages))
        self._asked = False
        self.user_turns = len(self._waiting)
        if not self.user_turns:
            self.problem = "no user turn"

    @property
    def open(self) -> bool:
        """Whether a turn is still to be answered."""
        return self.problem is None and len(self.answered) < self.user_turns

    def next_prompt(self) -> list[int]:
        """The rendered prompt of the next user turn, answered by `take`; RowRejected where the template refuses it."""
        if not self._asked:
            self.history += self._waiting.popleft()
            self._asked = True
        return render_prompt(self.tokenizer, self.history, self._tools, self.variables)

    def take(self, prompt_ids: list[int], completion: Completion) -> str | None:
        """Adds the answer to `next_prompt`; returns what makes it a poor history for further turns, or None."""
        message = answer_message(self.tokenizer, prompt_ids, completion)
        self.answered.append(Answered(prompt_ids, completion))
        self._asked = False
        if not self.keeps_history:
            self.history.append(message)
        if not message["content"].strip() and not message.get("reasoning_content"):
            return "empty answer"
        if self.keeps_history:
            return None
        if self._tools and any(mark in self.tokenizer.decode(completion.output_ids) for mark in TOOL_CALLS):
            return "answer calls a tool, and the data has no result"
        return None if message["content"].strip() else "answer ended in its thinking"


def _user_segments(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Up to and with each user message, without assistant messages."""
    segment: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] != "assistant":
            segment.append(message)
        if message["role"] == "user":
            yield segment
            segment = []


def _given_segments(messages: Sequence[dict[str, Any]]) -> Iterator[list[dict[str, Any]]]:
    """Up to each assistant message, which opens the next one; and what follows the last of them."""
    segment: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            yield segment
            segment = []
        segment.append(message)
    if segment and segment[-1]["role"] != "assistant":
        yield segment


def answer_message(tokenizer: Any, prompt_ids: Sequence[int], completion: Completion) -> dict[str, str]:
    """The answer as a message of the chat template: text without special tokens, thinking apart from the content."""
    # the stop token is part of the answer's ids and not of its text, whether the tokenizer calls it special or not
    ids = completion.output_ids[:-1] if completion.finish_reason == "stop" else completion.output_ids
    text = _text(tokenizer, ids)
    opened = tokenizer.decode(list(prompt_ids)[-PROMPT_TAIL_TOKENS:]).rstrip().endswith(THINK_START)
    end = tokenizer.convert_tokens_to_ids(THINK_END)
    if isinstance(end, int) and end != tokenizer.unk_token_id and end in ids:
        # the marker is a token of its own: it may be a special one, which the text above lacks
        thinking, content = _text(tokenizer, ids[: ids.index(end)]), _text(tokenizer, ids[ids.index(end) + 1 :])
    elif THINK_END in text:
        thinking, content = text.split(THINK_END, 1)
    elif opened or text.lstrip().startswith(THINK_START):
        thinking, content = text, ""
    else:
        return {"role": "assistant", "content": text}
    thinking = thinking.strip().removeprefix(THINK_START).strip()
    return {"role": "assistant", "content": content.lstrip("\n"), "reasoning_content": thinking}


def _text(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def token_texts(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; a character of several tokens comes with its last one."""
    texts, shown = [], ""
    for end in range(1, len(ids) + 1):
        text = tokenizer.decode(list(ids[:end]), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        unfinished = text.endswith("\ufffd") and end < len(ids)
        texts.append("" if unfinished else text[len(shown) :])
        shown = shown if unfinished else text
    return texts


def request_seed(request: Request) -> int | None:
    """The request's own sampling seed, from the run's seed and its key; None when greedy."""
    if request.sampling.temperature == 0:
        return None
    return int.from_bytes(hashlib.sha256(f"{request.sampling.seed}:{request.key}".encode()).digest()[:4], "little")


def run_requests(
    llm: Any, requests: Iterable[Request], in_flight: int, finished: Callable[[Request, Completion], Iterable[Request]]
) -> None:
    """Answers `requests` with at most `in_flight` of them in the engine; `finished` may return follow-up requests.

    Follow-ups go first, so that the cache still holds their history. StageError where the engine gives an answer up.
    """
    engine = llm.llm_engine
    source: Iterator[Request] = iter(requests)
    follow_ups: deque[Request] = deque()
    running: dict[str, tuple[Request, list[list[int]]]] = {}
    names = itertools.count()

    def refill() -> None:
        while len(running) < in_flight:
            request = follow_ups.popleft() if follow_ups else next(source, None)
            if request is None:
                return
            name = f"request-{next(names)}"
            running[name] = (request, [])
            engine.add_request(name, {"prompt_token_ids": request.prompt_ids}, _sampling_params(request))

    refill()
    while running:
        for output in engine.step():
            request, pieces = running[output.request_id]
            answer = output.outputs[0]
            pieces.append(list(answer.token_ids))
            if not output.finished:
                continue
            if answer.finish_reason not in ("stop", "length"):
                raise StageError(f"the engine ended a request with {answer.finish_reason}, expected stop or length")
            del running[output.request_id]
            steps = [len(piece) for piece in pieces if piece] if request.traced else None
            completion = Completion(list(itertools.chain(*pieces)), answer.finish_reason, steps)
            follow_ups.extend(finished(request, completion))
        refill()


def top_logprobs(llm: Any, prompt_ids: list[int], count: int = 8) -> dict[int, float]:
    """The `count` best next tokens after a prompt with their log-probabilities, from one prefill."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=1, temperature=0.0, logprobs=count, detokenize=False)
    output = llm.generate({"prompt_token_ids": prompt_ids}, params, use_tqdm=False)[0].outputs[0]
    return {token: entry.logprob for token, entry in output.logprobs[0].items()}


def _sampling_params(request: Request) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=request.sampling.temperature,
        top_p=request.sampling.top_p,
        max_tokens=request.max_tokens,
        seed=request_seed(request),
        stop_token_ids=list(request.sampling.stop_token_ids),
        detokenize=False,
        output_kind=RequestOutputKind.DELTA if request.traced else RequestOutputKind.FINAL_ONLY,
    )
