"""A third-party head with latent attention, made at test time, is served and measured on the target that has it too."""

import json
from pathlib import Path

import pytest

from scripts import evaluate_method
from scripts.eagle3.config import Evaluation, Method, Target
from tests.foreign_case import IDS, latent_config, latent_tensors, write_foreign
from tests.generation_case import HARDWARE, conversation, write_conversations

pytestmark = pytest.mark.slow


def test_a_head_with_latent_attention_drafts_and_changes_no_output(tiny_kimi: Target, tmp_path: Path) -> None:
    target = tiny_kimi.model_copy(update={"dtype": "float32"})
    config = latent_config(target, [2, 4, 5])
    head = write_foreign(tmp_path / "latent", config, latent_tensors(config))
    assert json.loads((head / "config.json").read_text())["eagle_config"][IDS] == [2, 4, 5]
    methods = {
        "baseline": Method(kind="baseline"),
        "eagle3": Method(kind="eagle3"),
        "latent": Method(kind="eagle3", model=str(head), aux_layer_ids=[2, 4, 5]),
    }
    evaluation = Evaluation(methods=methods, max_tokens=12, max_num_seqs=2)
    write_conversations(tmp_path / "conversations/suite.parquet", [conversation(f"s{i}", [f"say {i}"]) for i in range(2)])
    found = {}
    for name in ("baseline", "latent"):
        baseline = None if name == "baseline" else tmp_path / "baseline"
        output = tmp_path / name
        evaluate_method.run(
            *(target, evaluation, name, None, baseline, tmp_path / "conversations", ["suite"], tmp_path / "store", output),
            HARDWARE,
        )
        found[name] = json.loads((output / "suite.json").read_text())
    assert found["latent"]["drafts"] > 0 and len(found["latent"]["accepted_by_position"]) == 3
    assert not found["latent"]["differences"]
    outputs = [[entry["output_ids"] for entry in found[name]["requests"]] for name in found]
    assert outputs[0] == outputs[1] and all(len(ids) == 12 for ids in outputs[0])
