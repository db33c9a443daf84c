"""Every preset through training, export and stock vLLM, at the width of tiny-kimi: one layer, four layers, shared keys."""

import pytest
import torch

from scripts import canary, simulate_acceptance
from scripts.eagle3.config import Evaluation
from scripts.eagle3.engine import load_engine, unload_engine
from scripts.eagle3.export import WEIGHTS, export_config, export_tensors, write_export
from scripts.eagle3.files import read_json
from tests.contract.test_canary import HARDWARE, run_canary
from tests.draft_case import make_draft_case
from tests.kimi_config import PRESET_NAMES, scaled_preset


class DraftWeights:
    """Worker extension: what the engine holds of the draft."""

    def draft_layers(self) -> dict[str, torch.Tensor]:
        layers = self.model_runner.drafter.model.model.layers
        return {f"layers.{name}": weight.detach().clone() for name, weight in layers.named_parameters()}


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


@pytest.mark.slow
def test_every_layer_of_the_draft_is_loaded_into_its_place(tiny_kimi, tmp_path):
    draft = scaled_preset("kimi-k2.5-llama-4layer", tiny_kimi)
    case = make_draft_case(tmp_path, tiny_kimi, draft)
    tensors = export_tensors(case.checkpoints / "0" / WEIGHTS, case.files)
    generator = torch.Generator().manual_seed(3)
    for name, tensor in tensors.items():
        if "layernorm" in name:  # untrained they are all ones
            tensors[name] = (1 + 0.2 * torch.randn(tensor.shape, generator=generator)).to(tensor.dtype)
    export = tmp_path / "export"
    write_export(export, tensors, export_config(tiny_kimi, case.files), "", {})
    llm = load_engine(
        tiny_kimi,
        HARDWARE,
        max_model_len=128,
        eager=True,
        speculative={"method": "eagle3", "model": str(export), "num_speculative_tokens": canary.NUM_SPECULATIVE_TOKENS},
        worker_extension="tests.contract.test_canary_presets.DraftWeights",
    )
    (held,) = llm.collective_rpc("draft_layers")
    unload_engine(llm)
    layers = {int(name.split(".")[1]) for name in held}
    assert layers == set(range(draft.num_hidden_layers))
    # the engine fuses and packs matrices; norms it holds as they are
    norms = {name: weight for name, weight in held.items() if "layernorm" in name}
    assert len(norms) == 2 * draft.num_hidden_layers
    for name, weight in norms.items():
        assert torch.equal(weight, tensors[name]), name
