"""States of a real target, captured in vLLM in mixed batches, against Hugging Face's own forward."""

from pathlib import Path

import pytest
import torch

from scripts.eagle3.config import Target
from scripts.eagle3.extraction import open_extractor
from scripts.eagle3.shards import Shard
from tests.capture_case import HARDWARE, LENGTHS, make_rows, relative_error
from tests.contract.test_capture import llama_states

pytestmark = pytest.mark.slow


def test_states_of_smollm2_equal_hugging_face(smollm2: Target, tmp_path: Path) -> None:
    from transformers import LlamaForCausalLM

    rows = make_rows(seed=5)
    with open_extractor(smollm2, HARDWARE, max(LENGTHS), "float32") as extractor:
        extractor.prove(rows, tmp_path / "proof")
        extractor.write(rows, tmp_path / "rows.pt")
        states = list(Shard(tmp_path / "rows.pt", extractor.provenance, [2, 15, 27, 30]))
    model = LlamaForCausalLM.from_pretrained(smollm2.path, dtype=torch.float32).eval()
    assert [row.key for row in states] == [row.key for row in rows]
    for row, found in zip(rows, states, strict=True):
        expected = llama_states(model, row)
        for index, layer in enumerate((2, 15, 27, 30)):
            assert relative_error(found.hidden_states[:, index], expected[layer]).max() < 0.005
            # a layer off would be seen
            assert relative_error(found.hidden_states[:, index], expected[layer - 1]).max() > 0.02
