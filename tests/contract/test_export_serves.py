"""The export in the real engine: stock vLLM serves it, what it counts is what the simulated walk says, the draft
receives the states that it was trained on, and rotary embeddings of training and serving agree.

States come from a plain Hugging Face forward, so that nothing here rests on our own capture.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from scripts import export_draft, select_checkpoint, simulate_acceptance
from scripts.draft_config import rope_parameters
from scripts.eagle3.acceptance import Counters, read_counters
from scripts.eagle3.config import Draft, Evaluation, Target
from scripts.eagle3.draft import build_draft, draft_inputs, forward, save_trainable, single_row_batch, trainable_state
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.engine import Hardware, load_engine, unload_engine
from scripts.eagle3.export import check_export, export_config, export_tensors, load_export, write_export
from scripts.eagle3.files import read_json, write_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.rows import row_key
from scripts.eagle3.shards import StateRow, write_shard
from scripts.eagle3.target import fingerprint
from scripts.eagle3.walk import WalkResult, walk_rows
from tests.draft_case import (
    DRAFT_VOCAB_SIZE,
    TTT_STEPS,
    DraftCase,
    make_draft_case,
    make_draft_files,
    write_record,
    write_vocabulary,
)

PROMPTS, PROMPT_TOKENS, NEW_TOKENS = 8, 12, 40
TRAIN_STEPS = 150
HARDWARE = Hardware(batch_tokens=256, max_num_seqs=4, kv_cache_gb=1)


class RecordInputs:
    """Worker extension: keeps what reaches the draft's `fc`, or the norm in front of it."""

    def record_install(self) -> None:
        draft = self.model_runner.drafter.model.model
        self._fc_inputs: list[torch.Tensor] = []
        (draft.input_norm or draft.fc).register_forward_pre_hook(
            lambda _, inputs: self._fc_inputs.append(inputs[0].detach().float().cpu().clone())
        )

    def record_take(self) -> list[torch.Tensor]:
        taken, self._fc_inputs = self._fc_inputs, []
        return taken


@dataclass(frozen=True)
class Served:
    """What the engine did with and without the draft, and the walk over the same answers."""

    export: Path
    baseline: list[list[int]]
    outputs: list[list[int]]
    counters: Counters
    walk: WalkResult
    rows: list[StateRow]
    simulated: dict[str, Any]
    fc_inputs: list[torch.Tensor]


def prompts(vocab_size: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(0, vocab_size - 8, (PROMPTS, PROMPT_TOKENS), generator=generator).tolist()


def generate(llm: Any, ids: list[list[int]], new_tokens: int) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=new_tokens)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in ids], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def reference_rows(target: Target, ids: list[list[int]], answers: list[list[int]]) -> list[StateRow]:
    """Rows with the states of Hugging Face's own forward; the last one is taken before the final norm."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target.path, dtype=torch.float32)
    final: list[torch.Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, inputs: final.append(inputs[0][0]))
    rows = []
    for prompt, answer in zip(ids, answers, strict=True):
        tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)
        final.clear()
        with torch.no_grad():
            states = model(tokens.long()[None], output_hidden_states=True).hidden_states
        kept = torch.stack([*(states[k][0] for k in target.aux_layer_ids), final[0]], dim=1)
        rows.append(StateRow(row_key(tokens.numpy()), tokens, torch.arange(len(tokens)) >= len(prompt), kept))
    return rows


def train_and_export(folder: Path, target: Target, options: Draft, rows: list[StateRow]) -> Path:
    """A draft that has learnt some of the rows by heart: acceptance must be far from 0 and from 1."""
    case = DraftCase(target, make_draft_files(folder, target, options), folder / "checkpoints")
    answered = {token for row in rows for token in row.token_ids[row.loss_mask].tolist()}
    # every tenth token of the answers is outside the draft vocabulary
    known = [token for index, token in enumerate(sorted(answered)) if index % 10]
    free = [token for token in range(DRAFT_VOCAB_SIZE) if token not in answered]
    ids = sorted([*known, *free[: DRAFT_VOCAB_SIZE - len(known)]])
    write_vocabulary(case.files.d2t.parent, target, torch.tensor(ids))
    draft = build_draft(*case.files, attention="sdpa")
    optimizer = torch.optim.AdamW([weight for weight in draft.parameters() if weight.requires_grad], lr=2e-3)
    for step in range(TRAIN_STEPS):
        batch = single_row_batch(draft_inputs(rows[step % len(rows)]), 1)
        loss = forward(draft, batch, TTT_STEPS, loss="ce")[1]
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
    save_trainable(trainable_state(draft), case.checkpoints / "0" / WEIGHTS)
    write_record(case, 0, "0")
    layer_ids = captured_layer_ids(target.aux_layer_ids, target.num_hidden_layers)
    write_shard(folder / "val/shard-0.pt", rows, layer_ids, {"target": fingerprint(target)})
    selected = folder / "selected.json"
    select_checkpoint.run(target, case.files, case.checkpoints, 1, folder / "val", 1, TTT_STEPS, selected)
    export_draft.run(target, case.files, case.checkpoints, selected, folder / "export")
    return folder / "export"


CASES = {
    "defaults": (Draft(), [2, 4, 5]),
    "every option": (
        Draft(norm_before_residual=False, norm_before_fc=True, norm_output=True, num_hidden_layers=2, head_dim=32),
        [1, 3, 4, 6],
    ),
}


# the defaults are served by the whole tiny run as well
@pytest.fixture(scope="module", params=[pytest.param("defaults", marks=pytest.mark.slow), "every option"])
def served(request, tmp_path_factory, tiny_llama) -> Served:
    from scripts.eagle3.target import text_config

    options, layers = CASES[request.param]
    tiny_llama = tiny_llama.model_copy(update={"aux_layer_ids": layers})
    ids = prompts(text_config(tiny_llama)["vocab_size"])
    llm = load_engine(tiny_llama, HARDWARE, max_model_len=128, eager=True)
    baseline = generate(llm, ids, NEW_TOKENS)
    unload_engine(llm)
    rows = reference_rows(tiny_llama, ids, baseline)
    folder = train_and_export(tmp_path_factory.mktemp("served"), tiny_llama, options, rows)
    llm = load_engine(
        tiny_llama,
        HARDWARE,
        max_model_len=128,
        eager=True,
        speculative={"method": "eagle3", "model": str(folder), "num_speculative_tokens": TTT_STEPS},
        worker_extension="tests.contract.test_export_serves.RecordInputs",
        disable_log_stats=False,
    )
    before = read_counters(llm)
    outputs = generate(llm, ids, NEW_TOKENS)
    counters = read_counters(llm) - before
    llm.collective_rpc("record_install")
    for row in rows:
        generate(llm, [row.token_ids.tolist()], 1)
    (fc_inputs,) = llm.collective_rpc("record_take")
    unload_engine(llm)
    simulated = simulate(folder, tiny_llama, ids, baseline)
    return Served(
        folder, baseline, outputs, counters, walk_rows(load_export(folder), rows, TTT_STEPS), rows, simulated, fc_inputs
    )


def simulate(export: Path, target: Target, ids: list[list[int]], answers: list[list[int]]) -> dict[str, Any]:
    """What the stage simulate_acceptance writes for these answers."""
    requests = [
        {"id": str(index), "turn": 0, "prompt_ids": prompt, "output_ids": answer}
        for index, (prompt, answer) in enumerate(zip(ids, answers, strict=True))
    ]
    baseline, output = export.parent / "baseline", export.parent / "simulated"
    write_json(baseline / "suite.json", {"requests": requests, "provenance": {"target": fingerprint(target)}})
    simulate_acceptance.run(target, Evaluation(), export, baseline, ["suite"], output, HARDWARE)
    assert [path.name for path in output.iterdir()] == ["suite.json"]
    return read_json(output / "suite.json")


def test_speculative_outputs_are_the_baselines(served):
    assert served.outputs == served.baseline


def test_served_counts_are_the_simulated_ones(served):
    walk, counters = served.walk, served.counters
    assert 1.2 < walk.acceptance_length < 3.8  # else the comparison would show little
    assert walk.drafts == counters.drafts
    # the engine also counts what it accepts behind an answer's end, at most the unknown positions
    for accepted, unknown, found in zip(
        walk.accepted_by_position, walk.unknown_by_position, counters.accepted_by_position, strict=True
    ):
        assert accepted <= found <= accepted + unknown


def test_walk_over_states_one_token_late_is_not_what_was_served(served):
    # swapped auxiliary states can pass here: only the comparison of the states themselves is sure to find them
    rows = [replace(row, hidden_states=row.hidden_states.roll(1, 0)) for row in served.rows]
    walk = walk_rows(load_export(served.export), rows, TTT_STEPS)
    assert tuple(walk.accepted_by_position) != served.counters.accepted_by_position


def test_stage_simulates_on_captured_states_what_reference_states_give(served):
    expected = served.walk.figures()
    assert {name: served.simulated[name] for name in expected} == expected


def test_states_that_reach_the_draft_in_serving_are_those_of_training(served):
    assert len(served.fc_inputs) == len(served.rows)
    for row, found in zip(served.rows, served.fc_inputs, strict=True):
        expected = row.hidden_states[:, :-1].flatten(1)
        torch.testing.assert_close(found[: len(expected)], expected, rtol=1e-3, atol=1e-3)


def test_wrapped_latent_attention_target_is_served_with_a_llama_draft(tmp_path, tiny_kimi):
    case = make_draft_case(tmp_path, tiny_kimi)
    weights = case.checkpoints / "0" / WEIGHTS
    write_export(tmp_path / "export", export_tensors(weights, case.files), export_config(tiny_kimi, case.files), "", {})
    check_export(tmp_path / "export", tiny_kimi, case.files)
    llm = load_engine(
        tiny_kimi,
        HARDWARE,
        max_model_len=128,
        eager=True,
        speculative={"method": "eagle3", "model": str(tmp_path / "export"), "num_speculative_tokens": TTT_STEPS},
        disable_log_stats=False,
    )
    before = read_counters(llm)
    outputs = generate(llm, prompts(1000)[:2], 8)
    counters = read_counters(llm) - before
    unload_engine(llm)
    assert [len(output) for output in outputs] == [8, 8]
    assert counters.drafts > 0


@pytest.mark.parametrize(
    "text",
    [
        {"rope_theta": 5e4},
        {"rope_theta": 5e4, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {
            "rope_theta": 5e5,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 512,
            },
        },
        {
            "rope_theta": 5e4,
            "rope_scaling": {
                "type": "yarn",
                "factor": 64.0,
                "original_max_position_embeddings": 512,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
            },
        },
    ],
    ids=["default", "linear", "llama3", "yarn"],
)
def test_rotary_embeddings_of_training_and_serving_agree(text):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding import get_rope

    parameters = rope_parameters(text)
    config = LlamaConfig(head_dim=64, max_position_embeddings=4096, rope_parameters=dict(parameters))
    positions = torch.tensor([[0, 1, 7, 500, 511, 3000]])
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(64, 4096, rope_parameters=parameters, dtype=torch.float32)
    cached = rope.cos_sin_cache[positions[0]]
    torch.testing.assert_close(torch.cat([cos[0, :, :32], sin[0, :, :32]], dim=-1), cached, rtol=1e-4, atol=1e-4)
