"""Layer numbers. Canonical k = the residual stream after k decoder layers; n = the final state before the final norm.

Canonical k equals HF `hidden_states[k]` for k < n and vLLM's `eagle_aux_hidden_state_layer_ids`. SGLang, SpecForge and
TorchSpec name the same state by the index of the layer that produced it: k - 1.
"""

from collections.abc import Sequence

from scripts.eagle3.errors import StageError


def default_aux_layer_ids(num_hidden_layers: int) -> list[int]:
    """EAGLE-3's low, middle and high states for a target of n layers: 2, n // 2, n - 3. Needs n >= 7."""
    if num_hidden_layers < 7:
        raise StageError(
            f"target.num_hidden_layers is {num_hidden_layers}: the default auxiliary layers 2, n // 2, n - 3 need at least 7 "
            "layers; set target.aux_layer_ids"
        )
    return [2, num_hidden_layers // 2, num_hidden_layers - 3]


def check_aux_layer_ids(aux_layer_ids: Sequence[int], num_hidden_layers: int) -> None:
    """Raises StageError unless the ids are distinct, ascending and 1 <= k < n."""
    ids = list(aux_layer_ids)
    if not ids or ids != sorted(set(ids)):
        raise StageError(f"target.aux_layer_ids is {ids}: expected distinct numbers in ascending order, e.g. [2, 15, 27]")
    if ids[0] < 1 or ids[-1] >= num_hidden_layers:
        raise StageError(
            f"target.aux_layer_ids is {ids}: expected 1 <= k < {num_hidden_layers} (the target's number of layers; state k is "
            "the residual stream after k layers)"
        )


def captured_layer_ids(aux_layer_ids: Sequence[int], num_hidden_layers: int) -> list[int]:
    """The canonical ids of the states in a shard, in storage order: the auxiliary ones, then the final one."""
    check_aux_layer_ids(aux_layer_ids, num_hidden_layers)
    return [*aux_layer_ids, num_hidden_layers]


def to_layer_indices(aux_layer_ids: Sequence[int]) -> list[int]:
    """Canonical ids -> indices of the producing layers (SGLang, SpecForge, TorchSpec)."""
    return [k - 1 for k in aux_layer_ids]


def from_layer_indices(layer_indices: Sequence[int]) -> list[int]:
    """Indices of the producing layers (SGLang, SpecForge, TorchSpec) -> canonical ids."""
    return [i + 1 for i in layer_indices]
