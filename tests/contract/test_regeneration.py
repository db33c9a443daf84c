"""regenerate_responses in the real engine: prompts, stop tokens, seeds, and what a killed job repeats."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scripts import regenerate_responses
from scripts.eagle3.chat import render_prompt, template_variables
from scripts.eagle3.config import Regeneration, Rows, Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.messages import normalise, normalise_tools, stored
from scripts.eagle3.rows import RESPONSES, read_provenance, read_rows
from scripts.eagle3.target import load_tokenizer
from tests.generation_case import HARDWARE, HARDWARE_OPTIONS, conversation, make_stopping_target, write_conversations

MAX_TOKENS, MAX_LENGTH = 32, 256
STOP_IDS = list(range(300, 312))
DEADLINE_S = 180


class Run:
    """One part in a folder, answered by the command line or by `run`."""

    def __init__(self, target: Target, folder: Path, shards: list[list[dict[str, Any]]]) -> None:
        self.target, self.folder, self.shards = target, folder, len(shards)
        for shard, rows in enumerate(shards):
            write_conversations(folder / "conversations" / "part-0" / f"shard-{shard}.parquet", rows)

    def answer(self, max_length: int = MAX_LENGTH, fraction: float = 0.001, **settings: Any) -> dict[str, Any]:
        responses = Regeneration(**{"max_tokens": MAX_TOKENS, **settings})
        rows, source, output = Rows(max_length=max_length), self.folder / "conversations" / "part-0", self.output
        store = self.folder / "store"
        return regenerate_responses.run(self.target, responses, rows, source, self.shards, store, output, HARDWARE, fraction)

    def command(self) -> list[str]:
        return [
            *("--target", self.target.model_dump_json(), "--responses", json.dumps({"max_tokens": MAX_TOKENS})),
            *("--rows", json.dumps({"max_length": MAX_LENGTH}), "--shards", str(self.shards)),
            *("--conversations", str(self.folder / "conversations" / "part-0"), "--store", str(self.folder / "store")),
            *("--output", str(self.output), *HARDWARE_OPTIONS),
        ]

    @property
    def output(self) -> Path:
        return self.folder / "responses" / "part-0"

    def rows(self) -> list[dict[str, Any]]:
        paths = [self.output / f"shard-{shard}.parquet" for shard in range(self.shards)]
        return [row for path in paths for row in read_rows(path, RESPONSES)]

    def stored_keys(self) -> list[str]:
        """One key for each answer that the engine gave and the store took, in order."""
        lines = [
            line
            for path in (self.folder / "store").glob("**/answers.jsonl")
            for line in path.read_bytes().splitlines(keepends=True)
        ]
        return [json.loads(line)["key"] for line in lines if line.endswith(b"\n")]


def two_turns(count: int, prefix: str = "c") -> list[dict[str, Any]]:
    return [conversation(f"{prefix}{i}", [f"what is {prefix} {i}", f"and why {i}"], "be brief", "given") for i in range(count)]


@pytest.fixture(scope="module")
def target(tiny_llama: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_stopping_target(tiny_llama, tmp_path_factory.mktemp("target") / "stopping", STOP_IDS)


@pytest.fixture(scope="module")
def whole(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Answered without interruption."""
    run = Run(target, tmp_path_factory.mktemp("whole"), [two_turns(12, "a"), two_turns(12, "b")])
    run.answer()
    return run


def test_every_user_turn_is_answered_and_rows_keep_their_order(whole: Run) -> None:
    rows = whole.rows()
    assert [row["conversation_id"] for row in rows] == [*(f"a{i}" for i in range(12)), *(f"b{i}" for i in range(12))]
    assert {len(row["turns"]) for row in rows} == {2}
    _, counts = read_provenance(whole.output / "shard-0.parquet")
    assert counts["in"] == counts["out"] == 12 and counts["turns_in"] == counts["turns_out"] == 24
    assert sum(counts["finish_reasons"].values()) == 24


def test_next_prompt_holds_the_targets_own_answer_and_not_the_given_one(whole: Run) -> None:
    tokenizer = load_tokenizer(whole.target)
    for row in whole.rows():
        name = row["conversation_id"]
        first, second = row["turns"]
        ids = first["response_ids"][:-1] if first["finish_reason"] == "stop" else first["response_ids"]
        answer = tokenizer.decode(ids, skip_special_tokens=True)
        messages = [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": f"what is {name[0]} {name[1:]}"},
            {"role": "assistant", "content": answer},
            {"role": "user", "content": f"and why {name[1:]}"},
        ]
        assert first["prompt_ids"] == render_prompt(tokenizer, messages[:2])
        assert second["prompt_ids"] == render_prompt(tokenizer, messages)


def test_answer_ends_with_the_stop_token_or_at_the_limit(whole: Run) -> None:
    turns = [turn for row in whole.rows() for turn in row["turns"]]
    stopped = [turn["response_ids"] for turn in turns if turn["finish_reason"] == "stop"]
    cut = [turn["response_ids"] for turn in turns if turn["finish_reason"] == "length"]
    assert stopped and cut, "the case must have both kinds"
    ends = {*STOP_IDS, load_tokenizer(whole.target).eos_token_id}
    for ids in stopped:
        assert ids[-1] in ends and not set(ids[:-1]) & ends
    assert any(ids[-1] in STOP_IDS for ids in stopped), "generation_config.json names stop tokens besides the tokenizer's"
    for ids in cut:
        assert len(ids) == MAX_TOKENS and not set(ids) & ends


def test_killed_regeneration_repeats_only_the_requests_in_flight(whole: Run, tmp_path: Path) -> None:
    run = Run(whole.target, tmp_path, [two_turns(12, "a"), two_turns(12, "b")])
    process = subprocess.Popen([sys.executable, "-m", "scripts.regenerate_responses", *run.command()])
    deadline = time.monotonic() + DEADLINE_S
    while len(run.stored_keys()) < 10:
        assert process.poll() is None, "it ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    before = run.stored_keys()
    assert len(before) < len(whole.stored_keys()) and not run.output.exists()
    run.answer()
    after = run.stored_keys()
    assert after[: len(before)] == before
    assert len(after) == len(set(after)), "an answer that was stored was made again"
    assert set(after) == set(whole.stored_keys())
    assert run.rows() == whole.rows()


def test_finished_regeneration_starts_no_engine(whole: Run) -> None:
    outputs = {path: path.read_bytes() for path in whole.output.iterdir()}
    for path in outputs:
        path.unlink()
    code = "import sys; from scripts.regenerate_responses import main; main(); assert 'vllm' not in sys.modules"
    subprocess.run([sys.executable, "-c", code, *whole.command()], check=True)
    assert {path: path.read_bytes() for path in whole.output.iterdir()} == outputs


def test_equal_prompts_are_answered_once(target: Target, tmp_path: Path) -> None:
    same = [conversation(f"c{i}", ["the same question", f"another one {i}"]) for i in range(3)]
    run = Run(target, tmp_path, [same])
    run.answer()
    assert len(run.stored_keys()) == 4
    assert len({tuple(row["turns"][0]["response_ids"]) for row in run.rows()}) == 1


def test_rejections_are_counted_and_fail_the_stage_only_after_the_rest(target: Target, tmp_path: Path) -> None:
    long = "word " * 60
    rows = [
        *two_turns(3),
        conversation("long", [long]),
        conversation("cut", ["short", long]),
        {**conversation("mute", []), "messages": [{"role": "assistant", "content": "hello"}]},
    ]
    run = Run(target, tmp_path, [rows])
    with pytest.raises(StageError, match=r"2 of 6 conversations were rejected \(1 x no user turn, 1 x over-long prompt\)"):
        run.answer(max_length=120)
    assert len(run.stored_keys()) == 7 and not run.output.exists()
    counts = run.answer(max_length=120, fraction=0.5)
    assert len(run.stored_keys()) == 7, "the second run had nothing left to answer"
    assert counts["in"] == counts["out"] + sum(counts["rejected"].values()) == 6
    assert counts["turns_in"] == counts["turns_out"] + counts["turns_dropped"] == 9
    assert counts["cut"] == {"over-long prompt": 1}
    assert [entry["conversation_id"] for entry in counts["ledger"]] == ["long", "cut", "mute"]
    assert [row["conversation_id"] for row in run.rows()] == ["c0", "c1", "c2", "cut"]


def test_sampled_answers_depend_on_the_seed_and_on_nothing_else(target: Target, tmp_path: Path) -> None:
    answers = {}
    for name, seed, count in (("first", 1, 6), ("fewer", 1, 3), ("other", 2, 6)):
        run = Run(target, tmp_path / name, [two_turns(count)])
        run.answer(temperature=1.0, seed=seed)
        answers[name] = [turn["response_ids"] for row in run.rows() for turn in row["turns"]]
    assert answers["fewer"] == answers["first"][:6]
    assert answers["other"] != answers["first"]


def test_dropped_cut_answers_end_their_conversation_and_are_no_rejections(whole: Run, tmp_path: Path) -> None:
    run = Run(whole.target, tmp_path, [two_turns(12, "a"), two_turns(12, "b")])
    shutil.copytree(whole.folder / "store", tmp_path / "store")
    counts = run.answer(cut_answers="drop", fraction=0.0)
    assert run.stored_keys() == whole.stored_keys(), "the answers are the same ones, and no engine was needed"
    expected = []
    for row in whole.rows():
        reasons = [turn["finish_reason"] for turn in row["turns"]]
        kept = row["turns"][: reasons.index("length")] if "length" in reasons else row["turns"]
        expected += [{**row, "turns": kept}] if kept else []
    assert run.rows() == expected
    assert 0 < counts["dropped"] < counts["in"] == counts["out"] + counts["dropped"] and counts["rejected"] == {}
    assert counts["turns_in"] == counts["turns_out"] + counts["turns_dropped"] == 48
    assert counts["finish_reasons"].keys() == {"stop"}
    reason = "answer cut at its limit, and responses.cut_answers is drop"
    assert {(entry["action"], entry["reason"]) for entry in counts["ledger"]} <= {("dropped", reason), ("cut", reason)}


def test_what_the_targets_files_decide_stands_in_the_provenance(whole: Run) -> None:
    responses = read_provenance(whole.output / "shard-0.parquet")[0]["responses"]
    assert Regeneration(max_tokens=MAX_TOKENS).temperature is None
    assert responses == Regeneration(max_tokens=MAX_TOKENS, temperature=0).model_dump()


def test_thinking_that_the_template_does_not_know_is_refused_before_the_engine(target: Target, tmp_path: Path) -> None:
    run = Run(target, tmp_path, [two_turns(1)])
    with pytest.raises(StageError, match=r"responses\.thinking is 0\.5, but .* `thinking` true and false"):
        run.answer(thinking=0.5)
    assert not (tmp_path / "store").exists()


SWITCHED = (
    "{%- if tools -%}{{- tools | tojson -}}{%- endif -%}{%- for m in messages -%}"
    "{{- '<|im_start|>' + m['role'] + '\n' + m['content'] + (m['tool_calls'] | tojson if m['tool_calls'] else '') -}}"
    "{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' + ('think' if thinking else 'instant') -}}{%- endif -%}"
)


@pytest.mark.slow
def test_modes_are_mixed_by_conversation_and_calls_are_answered_on_the_given_history(target: Target, tmp_path: Path) -> None:
    switched = target.model_copy(update={"path": str(tmp_path / "switched")})
    shutil.copytree(target.path, switched.path)
    settings = Path(switched.path) / "tokenizer_config.json"
    settings.write_text(json.dumps({**json.loads(settings.read_text()), "chat_template": SWITCHED}))
    call = {"function": {"name": "look", "arguments": {"at": "it"}}}
    raw = {
        "tools": [{"name": "look"}],
        "messages": [
            {"role": "user", "content": "what is it"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42"},
            {"role": "assistant", "content": "it is 42"},
        ],
    }
    called = {"conversation_id": "called", "source": "test", "split": "train", **stored(normalise(raw), normalise_tools(raw))}
    run = Run(switched, tmp_path, [[*two_turns(12), called]])
    counts = run.answer(thinking=0.5)
    assert (counts["in"], counts["out"], counts["turns_out"]) == (13, 13, 26)
    tokenizer, asked = load_tokenizer(switched), Regeneration(thinking=0.5)
    modes = set()
    for row in run.rows():
        variables = template_variables(asked, row["conversation_id"])
        modes.add(variables["thinking"])
        end = "assistant\n" + ("think" if variables["thinking"] else "instant")
        assert all(tokenizer.decode(turn["prompt_ids"]).endswith(end) for turn in row["turns"])
    assert modes == {True, False}
    turns = run.rows()[-1]["turns"]
    variables = template_variables(asked, "called")
    for turn, messages in zip(turns, (normalise(raw)[:1], normalise(raw)[:3]), strict=True):
        assert turn["prompt_ids"] == render_prompt(tokenizer, messages, normalise_tools(raw), variables)


def test_row_longer_than_the_target_takes_is_refused_before_anything_is_read(target: Target, tmp_path: Path) -> None:
    with pytest.raises(StageError, match=r"rows.max_length is 4096, the target takes at most 2048"):
        Run(target, tmp_path, []).answer(max_length=4096)
