"""The README.md of an export: what it is for, how to serve it, how good it is, how it was made.

In: the target section, draft/config.json, selected.json. Out: Markdown with the hub's metadata block.
"""

from collections.abc import Mapping
from typing import Any

from scripts.eagle3.config import Target
from scripts.eagle3.layers import to_layer_indices

CARD = """---
library_name: vllm
tags: [eagle3, speculative-decoding, speculators]
---

# EAGLE-3 draft head for {name}

Drafts tokens for `{path}` ({architectures}), which verifies them: the output is the target's own, it comes in fewer
steps. The head fits this target only; its fingerprint is in `provenance.json`.

## Serve

```
vllm serve {path} \\
  --speculative-config '{{"method": "eagle3", "model": "FOLDER OR ID OF THIS HEAD", "num_speculative_tokens": {k}}}'
```

Checked with vLLM 0.22 and 0.32.{norm_output}

## What it reads

| convention | auxiliary layers |
|---|---|
| state after k layers (vLLM, HF `hidden_states[k]`; `eagle_aux_hidden_state_layer_ids`) | {layer_ids} |
| index of the producing layer (SGLang, SpecForge, TorchSpec) | {layer_indices} |

## Figures

Simulated on validation rows, greedy, {k} tokens per draft: the draft runs over the target's own answers and is accepted
and advanced as a server does it.

| acceptance length | accepted at position 0, 1, ... | drafts | rows | answer tokens in the draft vocabulary |
|---|---|---|---|---|
| {acceptance_length:.3f} | {by_position} | {drafts} | {rows} | {coverage:.1%} |

## Architecture

{num_hidden_layers} Llama layer(s), hidden {hidden_size}, MLP {intermediate_size}, {num_attention_heads} query heads and
{num_key_value_heads} key and value heads of {head_dim}; draft vocabulary {draft_vocab_size} of {vocab_size}; {dtype}.
Embedding and `lm_head` are copies of the target's rows and were not trained{initial_head}. Norms: {norms}.

## Training

Checkpoint of segment {segment}, step {step}; {ttt_steps} TTT steps.

| setting | value |
|---|---|
{settings}

Made by eagle3-flow, on answers that the target gave or that came with the data set.

## License

This head contains copies of the target's embedding and head and was trained on the target's states: the target's
license applies to it, and those of the training data may. Fill in `license:` above before publishing.
"""


INITIAL = "; rows of `lm_head` that came with the head that training started from are that head's"


def model_card(target: Target, config: Mapping[str, Any], selected: Mapping[str, Any]) -> str:
    """config: the export's config.json; selected: `selected` of selected.json, with figures and training settings."""
    layer, figures = config["transformer_layer_config"], selected["simulated"]
    ids = config["eagle_aux_hidden_state_layer_ids"]
    flags = [flag for flag in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output") if config[flag]]
    return CARD.format(
        **{key: layer[key] for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "head_dim", "vocab_size")},
        **{key: layer[key] for key in ("num_attention_heads", "num_key_value_heads")},
        name=target.path.rstrip("/").rsplit("/", 1)[-1],
        path=target.path,
        architectures=", ".join(config["speculators_config"]["verifier"]["architectures"]) or "unknown class",
        k=figures["num_speculative_tokens"],
        norm_output=" `norm_output` is on, which 0.22 ignores: serve with a newer one." if config["norm_output"] else "",
        layer_ids=ids,
        layer_indices=to_layer_indices(ids),
        acceptance_length=figures["acceptance_length"],
        by_position=", ".join(f"{rate:.3f}" for rate in figures["acceptance_by_position"]),
        drafts=figures["drafts"],
        rows=figures["rows"],
        coverage=figures["coverage"],
        draft_vocab_size=config["draft_vocab_size"],
        dtype=config["dtype"],
        initial_head=INITIAL if "initial_head" in selected["training"] else "",
        norms=", ".join(flags) or "none of the optional ones",
        segment=selected["segment"],
        step=selected["step"],
        ttt_steps=selected["training"]["ttt_steps"],
        settings="\n".join(f"| {key} | {value} |" for key, value in sorted(selected["training"].items())),
    )
