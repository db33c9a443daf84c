"""States of one model per family from vLLM's own class, against transformers' class of that family; families that are refused.

Slow: one engine per family. docs/compatibility.md repeats the verdicts.
"""

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version

from scripts.eagle3.alignment import Proof
from scripts.eagle3.capture import refuse_uncapturable
from scripts.eagle3.checks import Fault
from scripts.eagle3.checks_software import check_eagle3_interface
from scripts.eagle3.config import Target
from scripts.eagle3.engine import engine_version
from scripts.eagle3.errors import StageError
from scripts.eagle3.extraction import open_extractor
from scripts.eagle3.shards import StateRow
from scripts.eagle3.target import text_config
from scripts.extract_target_head import read_head_tensors
from tests.capture_case import HARDWARE, LAYERS, LENGTHS, assert_neighbours_differ, captured, make_rows, relative_error
from tests.families import CAPTURED, FAMILIES, WITHOUT_INTERFACE, Reference, make_family

Maker = Callable[..., Target]


@pytest.fixture
def make(tiny_llama: Target, tmp_path: Path) -> Maker:
    """Makes a family's target with tiny-llama's tokenizer."""
    return lambda name, **changes: make_family(name, tmp_path / name, Path(tiny_llama.path), **changes)


def capture(target: Target, vllm_class: str, folder: Path) -> tuple[Proof, list[StateRow]]:
    """The alignment proof's figures, and the states of rows of mixed lengths."""
    with open_extractor(target, HARDWARE, max(LENGTHS), target.dtype) as extractor:
        assert extractor.installed["model"] == vllm_class
        proof = extractor.prove(make_rows(seed=1), folder)
        return proof, captured(extractor, make_rows(), folder / "rows.pt")[0]


def logits_difference(target: Target) -> float:
    """Transformers' logits against those that training rebuilds from the final state; relative, of the worst token."""
    (row,) = make_rows(lengths=(60,))
    states, logits = Reference(Path(target.path)).states_and_logits(torch.tensor(row.input_ids.tolist()))
    text = text_config(target)
    head = {name: tensor.float() for name, tensor in read_head_tensors(target, text).items()}
    normed = torch.nn.functional.rms_norm(states[-1], states[-1].shape[-1:], head["norm.weight"], text["rms_norm_eps"])
    return float(relative_error(normed @ head["lm_head.weight"].T, logits).max())


@pytest.mark.slow
@pytest.mark.parametrize("name", CAPTURED)
def test_states_equal_transformers_own(name: str, make: Maker, tmp_path: Path) -> None:
    family, target = FAMILIES[name], make(name)
    if Version(engine_version().split()[1]) < Version(family.since):
        with pytest.raises(StageError, match="lacks vLLM's EAGLE-3 interface"):
            capture(target, family.vllm_class, tmp_path)
        return
    proof, states = capture(target, family.vllm_class, tmp_path)
    gc.collect()
    reference, errors = Reference(Path(target.path)), []
    for row in states:
        expected = reference.states(row.token_ids)
        assert_neighbours_differ(expected)
        errors.append(torch.stack([relative_error(row.hidden_states[:, i], expected[k]) for i, k in enumerate(LAYERS)], dim=-1))
    medians, worst = torch.stack([error.median(dim=0).values for error in errors]), torch.cat(errors).amax(dim=0)
    print(f"\n{name}: medians of the worst row {medians.amax(dim=0).tolist()}, worst token {worst.tolist()}\n{name}: {proof}")
    if family.dtype == "float32":
        assert worst.max() < 1e-3
    else:
        # rounding may send a token to another expert: the median is what rounding does everywhere
        assert torch.cat(errors).median(dim=0).values.max() < 0.02
    assert proof.argmax_agreement >= 0.99 and len(set(proof.row_tokens)) == 4


@pytest.mark.parametrize("name", CAPTURED)
def test_training_rebuilds_the_logits_of_every_captured_family(name: str, make: Maker) -> None:
    target = make(name)
    refuse_uncapturable(target, max(LENGTHS))
    assert logits_difference(target) < 1e-4


@pytest.mark.parametrize(("name", "changes"), [("gemma3", {}), ("granite", {"logits_scaling": 8.0})])
def test_logits_of_refused_families_cannot_be_rebuilt(name: str, changes: dict[str, Any], make: Maker) -> None:
    assert logits_difference(make(name, **changes)) > 0.1


@pytest.mark.parametrize("name", WITHOUT_INTERFACE)
def test_families_without_the_interface_are_refused(name: str) -> None:
    with pytest.raises(Fault, match="lacks vLLM's EAGLE-3 interface"):
        check_eagle3_interface(FAMILIES[name].vllm_class)


@pytest.mark.parametrize(
    ("name", "changes", "cause"),
    [
        ("gemma3", {}, "model_type gemma3_text has a final norm that multiplies by 1 [+] weight"),
        ("granite", {"logits_scaling": 8.0}, "logits_scaling is 8.0, which changes the logits"),
        ("llama", {"logit_scale": 0.0625}, "logit_scale is 0.0625"),
        ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
    ],
)
def test_logits_that_training_would_not_know_are_refused_by_name_before_loading(
    name: str, changes: dict[str, Any], cause: str, make: Maker
) -> None:
    target = make(name, **changes)
    with pytest.raises(StageError, match=rf"config\.json: {cause}"):
        refuse_uncapturable(target)


@pytest.mark.slow
def test_states_that_depend_on_the_batch_fail_the_proof(make: Maker, tmp_path: Path) -> None:
    # vLLM 0.32's latent attention on CPUs with a plain rotary embedding: what a row gets depends on the rows beside it.
    # A release that mends it lets this test fail: then the line about it in docs/compatibility.md goes too.
    target = make("deepseek-v2", rope_parameters={"rope_type": "default", "rope_theta": 1e4})
    with pytest.raises(StageError, match="rows alone and in a batch differ by"):
        capture(target, "DeepseekV2ForCausalLM", tmp_path)
