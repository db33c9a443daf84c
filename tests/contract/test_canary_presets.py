"""Every preset through training, export and stock vLLM, at the width of tiny-kimi: one layer, four layers, shared keys."""

import pytest
import torch
from safetensors.torch import load_file

from scripts import canary, simulate_acceptance
from scripts.eagle3.config import Evaluation
from scripts.eagle3.engine import load_engine, unload_engine
from scripts.eagle3.export import WEIGHTS
from scripts.eagle3.files import read_json
from tests.contract.test_canary import HARDWARE, run_canary
from tests.kimi_config import PRESET_NAMES, scaled_preset


class DraftWeights:
    """Worker extension: what the engine holds of the draft."""

    def draft_layers(self) -> dict[str, torch.Tensor]:
        model = self.model_runner.drafter.model.model
        return {f"layers.{i}.mlp.down_proj.weight": layer.mlp.down_proj.weight.clone() for i, layer in enumerate(model.layers)}


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESET_NAMES)
def test_preset_passes_the_canary_and_is_served_whole(name, tiny_kimi, tmp_path):
    # in bfloat16 the random target's best logits often tie, and speculative decoding then ends in other answers
    target = tiny_kimi.model_copy(update={"dtype": "float32"})
    draft = scaled_preset(name, target)
    made, result = run_canary(target, tmp_path, draft)
    assert result["acceptance_length"] >= 3.5
    assert result["identical"] == canary.ROWS
    export = made.folder / "export"
    layer = read_json(export / "config.json")["transformer_layer_config"]
    assert layer["num_hidden_layers"] == draft.num_hidden_layers
    assert layer["rope_parameters"]["rope_type"] == "yarn"
    assert (layer["num_key_value_heads"] < layer["num_attention_heads"]) == (name == "kimi-k2.5-gqa")

    served = read_json(made.folder / f"evaluation/eagle3/{canary.SUITE}.json")
    simulate_acceptance.run(
        target, Evaluation(), export, made.folder / "evaluation/baseline", [canary.SUITE], tmp_path / "simulated", HARDWARE
    )
    simulated = read_json(tmp_path / f"simulated/{canary.SUITE}.json")
    assert simulated["drafts"] == served["drafts"]
    # the engine also counts what it accepts behind an answer's end, at most the unknown positions
    positions = zip(
        simulated["accepted_by_position"], simulated["unknown_by_position"], served["accepted_by_position"], strict=True
    )
    for accepted, unknown, counted in positions:
        assert accepted <= counted <= accepted + unknown

    if draft.num_hidden_layers == 1:
        return
    # a layer that was dropped, or loaded into another's place, would show here and in what follows
    llm = load_engine(
        target,
        HARDWARE,
        max_model_len=128,
        eager=True,
        speculative={"method": "eagle3", "model": str(export), "num_speculative_tokens": canary.NUM_SPECULATIVE_TOKENS},
        worker_extension="tests.contract.test_canary_presets.DraftWeights",
    )
    (held,) = llm.collective_rpc("draft_layers")
    unload_engine(llm)
    exported = load_file(export / WEIGHTS)
    assert len(held) == draft.num_hidden_layers
    assert all(torch.equal(weight, exported[name]) for name, weight in held.items())
