"""Dialogues: which turns are asked, and how an answer becomes history."""

import pytest

from scripts.eagle3.generation import Completion, Dialogue, Request, Sampling, answer_message, request_seed, token_texts
from scripts.eagle3.target import load_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tiny_llama):
    return load_tokenizer(tiny_llama)


def ids(tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def answer(tokenizer, text: str) -> Completion:
    return Completion(ids(tokenizer, text), "length")


def dialogue(tokenizer, *messages: tuple[str, str]) -> Dialogue:
    return Dialogue({"messages": [{"role": role, "content": content} for role, content in messages]}, tokenizer)


def test_given_answers_are_dropped_and_two_user_messages_are_two_turns(tokenizer):
    talk = dialogue(tokenizer, ("system", "s"), ("user", "one"), ("assistant", "given"), ("user", "two"), ("user", "three"))
    prompts = []
    while talk.open:
        prompts.append(talk.next_prompt())
        talk.take(prompts[-1], answer(tokenizer, f"own {len(prompts)}"))
    texts = [tokenizer.decode(prompt) for prompt in prompts]
    assert len(texts) == 3 and not any("given" in text for text in texts)
    assert texts[2].index("own 1") < texts[2].index("two") < texts[2].index("own 2") < texts[2].index("three")
    assert all(text.startswith("<|im_start|>system\ns<|im_end|>") for text in texts)


def test_next_prompt_can_be_asked_again(tokenizer):
    talk = dialogue(tokenizer, ("user", "one"), ("user", "two"))
    assert talk.next_prompt() == talk.next_prompt()


def test_conversation_without_a_user_turn_is_closed(tokenizer):
    talk = dialogue(tokenizer, ("assistant", "hello"))
    assert not talk.open and talk.problem == "no user turn"


def test_stop_token_is_no_text(tokenizer):
    stop = ids(tokenizer, "x")
    assert answer_message(tokenizer, [], Completion([*ids(tokenizer, "yes"), *stop], "stop"))["content"] == "yes"


@pytest.mark.parametrize(
    ("prompt", "text", "content", "thinking"),
    [
        ("ask", "plain", "plain", None),
        ("ask<think>", "so and so</think>\n\nthe answer", "the answer", "so and so"),
        ("ask", "<think>so</think>the answer", "the answer", "so"),
        ("ask<think>\n", "never ends", "", "never ends"),
        ("ask", "<think>never ends", "", "never ends"),
    ],
)
def test_thinking_is_kept_apart_from_the_content(tokenizer, prompt, text, content, thinking):
    message = answer_message(tokenizer, ids(tokenizer, prompt), answer(tokenizer, text))
    assert (message["content"], message.get("reasoning_content")) == (content, thinking)


@pytest.mark.parametrize(
    ("text", "fault"),
    [("fine", None), ("  \n", "empty answer"), ("<think>never ends", "answer ended in its thinking")],
)
def test_poor_history_is_named(tokenizer, text, fault):
    talk = dialogue(tokenizer, ("user", "one"))
    assert talk.take(talk.next_prompt(), answer(tokenizer, text)) == fault


def test_key_depends_on_everything_that_decides_the_answer():
    base = {"prompt_ids": [1, 2], "max_tokens": 5, "sampling": Sampling(0.5, 0.9, 3, (7,))}
    variants = [
        base,
        {**base, "prompt_ids": [1, 3]},
        {**base, "max_tokens": 6},
        *({**base, "sampling": Sampling(*other)} for other in ((0.6, 0.9, 3, (7,)), (0.5, 0.8, 3, (7,)), (0.5, 0.9, 4, (7,)))),
        {**base, "sampling": Sampling(0.5, 0.9, 3, (8,))},
    ]
    assert len({Request(**variant).key for variant in variants}) == len(variants)
    assert Request(**base, owner="somebody", traced=True).key == Request(**base).key


def test_each_sampled_request_has_a_seed_of_its_own_and_greedy_ones_none():
    sampled = [Request([token], 5, Sampling(1.0)) for token in range(3)]
    assert len({request_seed(request) for request in sampled}) == 3
    assert request_seed(Request([0], 5, Sampling(0.0))) is None


def test_texts_of_tokens_add_up_and_broken_characters_wait(tokenizer):
    text = "naïve 日本 café"
    tokens = ids(tokenizer, text)
    texts = token_texts(tokenizer, tokens)
    assert len(texts) == len(tokens) and "".join(texts) == text
    assert not any("\ufffd" in piece for piece in texts)
