"""The draft's vocabulary: which of the target's tokens the draft can propose, and what share of the answers that is.

In: how often each token occurs under the loss mask, the special tokens. Out: the ranking of all tokens, the maps d2t
and t2d, and shares of tokens inside a vocabulary of a given size.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.int64]


def special_token_ids(tokenizer: Any, stop_ids: Iterable[int], vocab_size: int) -> list[int]:
    """All special and added tokens and the stop ids that are below the target's vocab_size, ascending.

    Added tokens that are not special count too: <think> and tool markers are often of that kind.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return sorted(token for token in {*tokenizer.all_special_ids, *added, *stop_ids} if 0 <= token < vocab_size)


def rank(counts: Counts, special_ids: Iterable[int]) -> Counts:
    """All ids [vocabulary] in the order in which they enter a draft vocabulary that grows.

    Special tokens first; then by falling count, equal counts by rising id. So free places go to the lowest ids, which
    BPE merged first.
    """
    special = np.zeros(len(counts), dtype=bool)
    special[list(special_ids)] = True
    return np.lexsort((np.arange(len(counts)), -counts, ~special)).astype(np.int64)


def maps(ranking: Counts, draft_vocab_size: int) -> tuple[Counts, NDArray[np.bool_]]:
    """(d2t [draft], t2d [target]): target_id = draft_id + d2t[draft_id], t2d[target_id] is true."""
    chosen = np.sort(ranking[:draft_vocab_size])
    t2d = np.zeros(len(ranking), dtype=bool)
    t2d[chosen] = True
    return chosen - np.arange(draft_vocab_size), t2d


def coverage(ranking: Counts, counts: Counts) -> NDArray[np.float64]:
    """Share of the counted tokens inside the first k ids of the ranking, for k = 1 .. vocabulary; not for no tokens."""
    return np.cumsum(counts[ranking]) / counts.sum()


def smallest_size(covered: NDArray[np.float64], floor: float) -> int:
    """The smallest vocabulary whose coverage reaches `floor`."""
    return int(np.searchsorted(covered, floor)) + 1
