"""States captured from the real Kimi-K2.5 class against a plain PyTorch forward; engines that are refused.

Apart from test_capture.py, because one process holds one engine at a time.
"""

from pathlib import Path

import pytest
import torch

from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.extraction import open_extractor
from scripts.eagle3.shards import StateRow
from tests.capture_case import HARDWARE, LAYERS, LENGTHS, assert_neighbours_differ, captured, make_rows, relative_error
from tests.kimi_reference import KimiReference

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def kimi_states(tiny_kimi: Target, tmp_path_factory: pytest.TempPathFactory) -> dict[bool, list[StateRow]]:
    """The same rows through the wrapper as a text model, and as a multimodal one that is handed embeddings."""
    folder, found = tmp_path_factory.mktemp("kimi"), {}
    for text_only in (True, False):
        options = {"language_model_only": text_only, "skip_mm_profiling": True}
        with open_extractor(tiny_kimi, HARDWARE, max(LENGTHS), "bfloat16", **options) as extractor:
            assert extractor.installed["model"] == "KimiK25ForConditionalGeneration"
            assert extractor.llm.llm_engine.model_config.supports_multimodal_inputs is not text_only
            extractor.prove(make_rows(), folder)
            found[text_only] = captured(extractor, make_rows(), folder / f"{text_only}.pt")[0]
    return found


def test_kimi_states_equal_a_plain_reference(kimi_states: dict[bool, list[StateRow]], tiny_kimi: Target) -> None:
    reference = KimiReference(Path(tiny_kimi.path))
    errors: dict[int, list[torch.Tensor]] = {layer: [] for layer in LAYERS}
    for found in kimi_states[True]:
        expected = reference.states(found.token_ids)
        assert_neighbours_differ(expected)
        for index, layer in enumerate(LAYERS):
            errors[layer].append(relative_error(found.hidden_states[:, index], expected[layer]))
    # bfloat16 may send a token to another expert: the median is what rounding does everywhere
    medians = {layer: float(torch.cat(values).median()) for layer, values in errors.items()}
    assert max(medians.values()) < 0.02, medians


def test_kimi_states_are_the_same_when_embeddings_are_handed_in(kimi_states: dict[bool, list[StateRow]]) -> None:
    for text_only, multimodal in zip(kimi_states[True], kimi_states[False], strict=True):
        assert text_only.key == multimodal.key and torch.equal(text_only.hidden_states, multimodal.hidden_states)


def test_an_engine_with_prefix_caching_is_refused(tiny_llama: Target) -> None:
    with (
        pytest.raises(StageError, match="prefix caching is on"),
        open_extractor(tiny_llama, HARDWARE, 64, "float32", enable_prefix_caching=True),
    ):
        pass
