"""Our token ids of a conversation against vLLM's own for the same messages, before anything is trained on them.

In: the target and the conversations that the run has collected, before that those of local sources. Out: a line of
preflight's table. vLLM renders as its server and `LLM.chat` do, without an engine; for vLLM 0.32, where an older one has no
such renderer the line is skipped.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from scripts.eagle3.chat import render_prompt, template_messages, template_variables, tools_of
from scripts.eagle3.checks import Fault, Line, Skipped, check, first_line, some
from scripts.eagle3.checks_backends import engine_config, find
from scripts.eagle3.config import Config, Regeneration, Target
from scripts.eagle3.conversations import read_source
from scripts.eagle3.errors import RowRejected
from scripts.eagle3.messages import Message, conversation_id, normalise, normalise_tools
from scripts.eagle3.rows import CONVERSATIONS, read_rows
from scripts.eagle3.target import load_tokenizer

SAME_IDS = "same ids as vLLM"
COMPARED = 100
# of those compared: what no server would take says little about what it serves
MOST_REFUSED = 0.1
T = TypeVar("T")
Renderer = Callable[[list[Message], list[dict[str, Any]] | None, Mapping[str, Any]], list[int]]


class Conversation(NamedTuple):
    """One that is compared; `name` says where it stands."""

    name: str
    conversation_id: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None


def rendering_lines(target: Target, config: Config, collected: Path) -> list[Line]:
    """One line: the first prompts of the run, as we render them and as vLLM does. collected: its folder of conversations."""
    return [check("tokenizer", SAME_IDS, lambda: check_same_ids(target, config, collected))]


def check_same_ids(target: Target, config: Config, collected: Path, theirs: Renderer | None = None) -> str:
    """Prompts of up to COMPARED conversations; Fault names the first that differs, Skipped says why none is compared.

    `theirs` renders in vLLM's place.
    """
    origin, conversations = "collected", list(islice(collected_conversations(collected), COMPARED))
    if not conversations:
        origin, conversations = "of the local sources", list(islice(local_conversations(config), COMPARED))
    if not conversations:
        raise Skipped("nothing is collected yet, and no source is a local file that can be read")
    theirs, tokenizer = theirs or vllm_renderer(target, config.rows.max_length + 1), load_tokenizer(target)
    compared, refused = 0, list[str]()
    for name, identity, messages, tools in conversations:
        variables: dict[str, bool] = {}
        if isinstance(config.responses, Regeneration):
            variables = template_variables(config.responses, identity)
        prompt = messages[:-1] if messages[-1]["role"] == "assistant" else messages
        try:
            ours = render_prompt(tokenizer, prompt, tools, variables)
        except RowRejected:  # such a row is rejected, whoever renders it
            continue
        if len(ours) > config.rows.max_length:
            continue
        try:
            found = theirs(prompt, tools, variables)
        except Exception as error:  # vLLM's own kinds, and the template's
            refused.append(f"{name} ({first_line(error)[:200]})")
            continue
        compare(name, ours, found, tokenizer)
        compared += 1
    if len(refused) > MOST_REFUSED * (len(refused) + compared):
        raise Fault(
            f"vLLM refuses {len(refused)} of {len(refused) + compared} conversations: {some(refused, 1)}",
            "mend what it names in the target's folder, or in these rows, which nobody could ask a server",
        )
    if not compared:
        raise Skipped(f"of {len(conversations)} conversations none is taken by the chat template and fits rows.max_length")
    left = f"; vLLM refuses {some(refused, 1)}" if refused else ""
    return f"{compared} conversations {origin} give the ids that vLLM serves{left}"


def compare(name: str, ours: list[int], theirs: list[int], tokenizer: Any) -> None:
    """Fault unless both are equal; it names the first place where they differ."""
    if ours == theirs:
        return
    place = next((index for index, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
    place = min(len(ours), len(theirs)) if place is None else place
    shown = [repr(tokenizer.decode(ids[place : place + 4])) if place < len(ids) else "nothing" for ids in (ours, theirs)]
    raise Fault(
        f"{name}: token {place} is {shown[0]} here and {shown[1]} in vLLM ({len(ours)} and {len(theirs)} tokens)",
        "the server would see another prompt than the draft is trained on: make sure that both read the same chat template "
        "and tokenizer files (no --chat-template, no --tokenizer), and that transformers is the locked version",
    )


def collected_conversations(folder: Path) -> Iterator[Conversation]:
    """Rows of all files that the run has collected, whatever their source was: first one of each, spread over it."""
    paths = spread(sorted(folder.glob("*/*.parquet")))
    each = -(-COMPARED // max(1, len(paths)))

    def rows(path: Path) -> Iterator[Conversation]:
        for number, row in spread([*enumerate(read_rows(path, CONVERSATIONS))])[:each]:
            name = f"{path.parent.name}/{path.name}: row {number}"
            yield Conversation(name, row["conversation_id"], row["messages"], tools_of(row))

    for together in zip_longest(*map(rows, paths)):
        yield from (conversation for conversation in together if conversation)


def spread(items: Sequence[T]) -> list[T]:
    """COMPARED of them at even distances, or all: rows are dealt in the order of their sources."""
    count = min(len(items), COMPARED)
    return [items[index * len(items) // count] for index in range(count)]


def local_conversations(config: Config) -> Iterator[Conversation]:
    """Rows that would be taken, source by source, where the source is a file: suites too."""
    sources = [*config.conversations.train, *config.conversations.evaluation.values()]
    paths = [source for source in sources if Path(source.path).is_file()]
    each = -(-COMPARED // max(1, len(paths)))
    for source in paths:
        for number, raw in islice(read_source(source), each):
            try:
                messages, tools = normalise(raw), normalise_tools(raw)
            except RowRejected:
                continue
            name = f"{Path(source.path).name}: row {number}"
            yield Conversation(name, conversation_id(messages, tools), messages, tools)


def vllm_renderer(target: Target, max_model_len: int) -> Renderer:
    """A function (messages, tools, template variables) -> token ids, by vLLM; Skipped where this vLLM has no such thing."""
    chat_params = find("vllm.renderers", "ChatParams")
    from_config = find("vllm.renderers.registry", "renderer_from_config")
    try:
        settings = engine_config(target, max_model_len, 1)
    except Fault:
        raise Skipped("vLLM refuses the target's configuration, as another line says") from None
    renderer = from_config(settings)

    def render(messages: list[Message], tools: list[dict[str, Any]] | None, variables: Mapping[str, Any]) -> list[int]:
        asked = {**variables, "add_generation_prompt": True, "continue_final_message": False, "tools": tools, "tokenize": False}
        params = chat_params(chat_template_kwargs=asked)
        # as the server does it, and `LLM.chat`: the template has written the special tokens
        encoding = renderer.default_chat_tok_params.with_kwargs(add_special_tokens=False)
        _, prompts = renderer.render_chat([as_request(messages)], params, encoding)
        return list(prompts[0]["prompt_token_ids"])

    return render


def as_request(messages: list[Message]) -> list[Message]:
    """The messages as a client sends them: vLLM 0.32 calls thinking `reasoning`."""
    sent = template_messages(messages)
    for message in sent:
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
    return sent
