"""A preset's values are what the rules depend on: after an edit the draft is made again, and only what depends on it."""

import json

import pytest
import yaml

from tests.workflow.test_plan import jobs

PRESET = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "hidden_size": 256}


@pytest.fixture
def configured(checkout, tiny_llama):
    """(path of the preset, options that name a run with it)."""
    preset = checkout.root / "config/draft/mine.json"
    preset.write_text(json.dumps(PRESET))
    config = yaml.safe_load((checkout.root / "config/config.yaml").read_text())
    config |= {"run": "preset", "target": tiny_llama.model_dump(), "draft": {"preset": "mine"}}
    config["vocabulary"] = {"draft_vocab_size": 100}
    (checkout.root / "preset.yaml").write_text(yaml.safe_dump(config))
    return preset, ("results/preset/draft/config.json", "--cores", "1", "--configfile", "preset.yaml")


@pytest.mark.slow
def test_edited_preset_makes_the_draft_again(checkout, configured):
    preset, options = configured
    output = checkout.root / "results/preset/draft/config.json"
    checkout.snakemake(*options)
    assert json.loads(output.read_text())["transformer_layer_config"]["num_key_value_heads"] == 2
    assert "Nothing to be done" in checkout.snakemake("-n", *options)
    preset.write_text(json.dumps({**PRESET, "num_key_value_heads": 1}))
    planned = checkout.snakemake("-n", *options)
    assert jobs(planned) == {"draft_config": 1} and "Params have changed" in planned
    checkout.snakemake(*options)
    assert json.loads(output.read_text())["transformer_layer_config"]["num_key_value_heads"] == 1
    # what the target contradicts stops the job with one line
    preset.write_text(json.dumps({**PRESET, "hidden_size": 512}))
    printed = checkout.snakemake(*options, succeeds=False)
    assert "draft.preset mine: hidden_size is 512, the target's is 256" in printed
