"""What the draft receives in serving equals what the shards hold: captured states against the inputs of the served `fc`."""

from pathlib import Path

import pytest
import torch

from scripts.eagle3.batches import make_row
from scripts.eagle3.config import Target
from scripts.eagle3.draft_files import WEIGHTS
from scripts.eagle3.engine import Hardware, load_engine, unload_engine
from scripts.eagle3.export import export_config, export_tensors, write_export
from scripts.eagle3.extraction import extract_rows
from scripts.eagle3.target import text_config
from tests.contract.test_export_serves import generate
from tests.draft_case import TTT_STEPS, make_draft_case
from tests.families import CAPTURED, make_family

HARDWARE = Hardware(batch_tokens=256, max_num_seqs=4, kv_cache_gb=1)
LENGTHS = (23, 48, 7, 61)
# relative error of a token's state, after rounding the served one to the shard's dtype
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.02}


@pytest.fixture(
    params=["tiny_llama", "tiny_kimi", *(pytest.param(name, marks=pytest.mark.slow) for name in ["smollm2", *CAPTURED])]
)
def target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    if request.param not in CAPTURED:
        return request.getfixturevalue(request.param)
    return make_family(request.param, tmp_path / request.param, Path(request.getfixturevalue("tiny_llama").path))


def test_states_that_reach_the_draft_equal_the_captured_ones(target: Target, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    limit = text_config(target)["vocab_size"] - 8
    rows = [make_row(torch.randint(0, limit, (length,), generator=generator).tolist()) for length in LENGTHS]
    captured = extract_rows(target, HARDWARE, rows, "bfloat16", tmp_path / "captured")

    case = make_draft_case(tmp_path, target)
    export = tmp_path / "export"
    write_export(
        export, export_tensors(case.checkpoints / "0" / WEIGHTS, case.files), export_config(target, case.files), "", {}
    )
    llm = load_engine(
        target,
        HARDWARE,
        max_model_len=128,
        eager=True,
        speculative={"method": "eagle3", "model": str(export), "num_speculative_tokens": TTT_STEPS},
        worker_extension="tests.contract.test_export_serves.RecordInputs",
    )
    llm.collective_rpc("record_install")
    for row in rows:
        generate(llm, [row.input_ids.tolist()], 1)
    (received,) = llm.collective_rpc("record_take")
    unload_engine(llm)

    assert len(received) == len(rows)
    for row, found in zip(captured, received, strict=True):
        stored = row.hidden_states[:, :-1].float()
        served = found[: len(stored)].reshape(stored.shape).to(torch.bfloat16).float()
        error = (served - stored).norm(dim=-1) / stored.norm(dim=-1)
        assert error.max() <= TOLERANCE[target.dtype], f"row of {len(stored)} tokens: {error.max(dim=0).values}"
