"""What training takes: FLOPs against PyTorch's own counter, memory against what was measured, and the refusal."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from scripts.eagle3.config import Draft
from scripts.eagle3.draft import build_draft
from scripts.eagle3.errors import StageError
from scripts.eagle3.files import read_json
from scripts.eagle3.layers import captured_layer_ids
from scripts.eagle3.packing import TrainingRows, load_pack, open_shards
from scripts.eagle3.training_cost import DraftShape, check_memory, needed_bytes, peak_flops, step_flops
from scripts.eagle3.ttt import TrainingDraft
from tests.draft_case import TTT_STEPS, make_draft_files, random_row
from tests.training_case import training, write_states

KIMI = DraftShape(7168, 18432, 64, 64, 128, 1, 3, 32000, 163840)
GQA = KIMI._replace(key_value_heads=8)


@pytest.mark.parametrize("draft", [Draft(), Draft(num_hidden_layers=2)], ids=["one layer", "two layers"])
def test_flops_of_a_training_step_are_those_that_pytorch_counts(tmp_path, tiny_llama, monkeypatch, draft):
    """A row that is all answer: dense attention then leaves out only the last positions of later TTT steps."""
    files = make_draft_files(tmp_path, tiny_llama, draft)
    path = write_states(tmp_path / "shard-0.pt", tiny_llama, [random_row(tiny_llama, 401, 0)])
    layer_ids = captured_layer_ids(tiny_llama.aux_layer_ids, tiny_llama.num_hidden_layers)
    rows = TrainingRows(open_shards([path], layer_ids), TTT_STEPS, 1024)
    shape = DraftShape.of(read_json(files.config))
    model = TrainingDraft(build_draft(*files), TTT_STEPS, 1.0, "kl_div")
    trained = sum(p.numel() for p in model.parameters() if p.ndim == 2)
    assert shape.layer_weights + shape.fc_weights == trained
    assert DraftShape.of(model.config()) == shape

    masks, make_mask = [], model._mask
    monkeypatch.setattr(model, "_mask", lambda *arguments: masks.append(make_mask(*arguments)) or masks[-1])
    with FlopCounterMode(display=False) as counter:
        model(**load_pack(rows, [0]).inputs, masked_tokens=torch.ones(TTT_STEPS))[0].backward()
    counted = counter.get_flop_counts()["Global"]
    products = sum(flops for operator, flops in counted.items() if "mm" in str(operator))
    # dense attention calculates what the mask then hides: its pairs are taken from the masks
    attention = 12 * shape.layers * shape.heads * shape.head_dim * sum(int(mask.sum()) for mask in masks)
    found = step_flops(shape, rows.positions, rows.supervised)
    assert found == pytest.approx(products + attention, rel=0.01)
    assert attention > 0.02 * found


@pytest.mark.parametrize(
    ("shape", "changes", "measured_gb"),
    [
        (KIMI, {"batch_tokens": 4096}, 26.4),
        (KIMI, {"batch_tokens": 8192}, 30.2),
        (KIMI, {"batch_tokens": 16384}, 38.1),
        (KIMI, {"batch_tokens": 8192, "zero_stage": 3}, 31.3),
        (KIMI, {"batch_tokens": 4096, "zero_stage": 0, "dtype": "float32"}, 29.0),
        (GQA, {"batch_tokens": 8192}, 23.7),
    ],
)
def test_memory_of_training_is_as_fitted(shape, changes, measured_gb):
    """docs/kimi-k2.5.md: one H200, 4 TTT steps, recomputation."""
    settings = training(**{"ttt_steps": 4, "dtype": "bfloat16", "zero_stage": 1, **changes})
    assert needed_bytes(shape, settings) / 1e9 == pytest.approx(measured_gb, rel=0.05)


@pytest.mark.parametrize(
    ("changes", "measured_gb"),
    [
        ({"batch_tokens": 4096, "zero_stage": 3}, 29.3),
        ({"batch_tokens": 16384, "zero_stage": 3}, 39.3),
        ({"batch_tokens": 8192, "zero_stage": 0, "dtype": "float32"}, 35.7),
        ({"batch_tokens": 16384, "zero_stage": 0, "dtype": "float32"}, 50.0),
    ],
)
def test_memory_of_training_is_near_what_was_measured_afterwards(changes, measured_gb):
    settings = training(**{"ttt_steps": 4, "dtype": "bfloat16", **changes})
    assert needed_bytes(KIMI, settings) / 1e9 == pytest.approx(measured_gb, rel=0.1)


def test_memory_of_training_is_shared_out_as_zero_does():
    trained = KIMI.layer_weights + KIMI.fc_weights
    sizes = {stage: needed_bytes(KIMI, training(zero_stage=stage, dtype="bfloat16"), 4) for stage in (1, 2, 3)}
    alone = needed_bytes(KIMI, training(zero_stage=1, dtype="bfloat16"))
    saved = {1: 12, 2: 18, 3: 20}  # bytes of a weight that three of four ranks spare
    for stage, size in sizes.items():
        assert alone - size == pytest.approx(trained * saved[stage] * 3 / 4)
    muon = training(zero_stage=1, dtype="bfloat16", optimizer="muon")
    assert alone - needed_bytes(KIMI, muon) == 4 * trained


def test_training_that_does_not_fit_is_refused_with_the_needed_figure():
    settings = training(ttt_steps=4, dtype="bfloat16", zero_stage=1, batch_tokens=8192)
    words = r"batch_tokens 8192 needs about 30.3 GB on each of 1 GPUs, of which one has 24.0 GB; lower training.batch_tokens"
    with pytest.raises(StageError, match=words):
        check_memory(KIMI, settings, 1, 24 * 10**9)
    assert "about 30.3 GB" in check_memory(KIMI, settings, 1, 32 * 10**9)


def test_peak_of_a_gpu_is_that_of_its_name():
    assert peak_flops("NVIDIA H200", "bfloat16") == 9.89e14
    assert peak_flops("NVIDIA RTX PRO 6000 Blackwell Server Edition", "bfloat16") == 5e14
    assert peak_flops("NVIDIA B300 SXM6 AC", "bfloat16") == 2.25e15
    for unknown in ("NVIDIA A100-SXM4-80GB", "NVIDIA H200 MIG 1g.18gb", "NVIDIA GH200 480GB"):
        assert peak_flops(unknown, "bfloat16") is None
    assert peak_flops("NVIDIA H200", "float32") is None
