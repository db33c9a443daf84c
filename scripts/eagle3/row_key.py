"""The identity of a row, and which of its final states are read, in a module that imports next to nothing."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np


def row_key(input_ids: Sequence[int] | np.ndarray[Any, Any]) -> str:
    """32 hex digits: the identity of a row is its token ids."""
    return hashlib.sha256(np.asarray(input_ids, dtype="<i4").tobytes()).hexdigest()[:32]


def final_positions(loss_mask: np.ndarray[Any, Any], starts: Sequence[int] = (0,)) -> np.ndarray[Any, Any]:
    """Mask [tokens] of rows back to back that begin at `starts` -> [tokens] bool: whose final state training reads.

    Token t's, where t and t + 1 are both the target's own answer: it predicts t + 1, and a draft has been given t. A row's
    first token is before any draft, and after its last one nothing is known. TTT steps read the same positions.
    """
    needed = loss_mask & np.roll(loss_mask, -1)
    needed[list(starts)] = False
    needed[[start - 1 for start in starts]] = False  # -1 is the end of the last row
    return needed
