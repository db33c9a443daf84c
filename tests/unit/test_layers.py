"""Layer numbers: defaults, bounds, and the other convention."""

import pytest

from scripts.eagle3 import layers
from scripts.eagle3.errors import StageError


def test_defaults_are_low_middle_and_high():
    assert layers.default_aux_layer_ids(61) == [2, 30, 58]
    assert layers.default_aux_layer_ids(30) == [2, 15, 27]


def test_captured_layers_end_with_the_final_state():
    assert layers.captured_layer_ids([2, 30, 58], 61) == [2, 30, 58, 61]


def test_other_convention_names_the_producing_layer():
    assert layers.to_layer_indices([2, 30, 58]) == [1, 29, 57]
    assert layers.from_layer_indices([1, 29, 57]) == [2, 30, 58]


@pytest.mark.parametrize("ids", [[], [0, 1], [3, 2], [2, 2], [2, 8]])
def test_impossible_ids_are_refused(ids):
    with pytest.raises(StageError):
        layers.check_aux_layer_ids(ids, 8)
