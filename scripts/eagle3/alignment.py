"""Proof that captured states belong to their tokens, in the first seconds of an extraction.

In: a few rows, their stored final states, and what the engine itself said about the same rows (prompt logprobs). Out: the
figures, or a StageError with what was seen. The target's norm and head over the stored final state must choose the
engine's tokens and give them the engine's logprobs; rows alone and in a batch of mixed lengths must have the same states.
It proves the final state only: the auxiliary ones are proven against Hugging Face's models in tests/contract.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from scripts.eagle3.batches import TokenRow, make_row
from scripts.eagle3.config import Target
from scripts.eagle3.errors import StageError
from scripts.eagle3.shards import DTYPES
from scripts.eagle3.target import EMBEDDING_NAMES, HEAD_NAMES, NORM_NAMES, read_tensor, text_config

# the proof's batch: heads of the longest rows, of different lengths, because data of one length would hide a mix-up
HEAD_TOKENS = (512, 384, 256, 128)
MAX_CANDIDATES = 4 * len(HEAD_TOKENS)
MIN_AGREEMENT = 0.98
# the final state is rounded when it is stored, and the engine rounds its logits to its dtype
MAX_LOGPROB_DIFFERENCE = 0.1
# up to SHALLOW layers; each layer rounds anew, and like independent steps the errors grow with the square root of their number.
# Healthy engines have shown 0.025 (8 layers of Kimi-K2.5's widths, whose experts change with the rounding) and 0.029 (32 dense
# layers) in bfloat16; states of another token differ by about 1.
MAX_BATCH_DIFFERENCE = {"float32": 1e-3, "bfloat16": 0.05}
SHALLOW = 8
POSITIONS_AT_ONCE = 256


@dataclass(frozen=True)
class Proof:
    """Figures of a passed proof; argmax and logprobs over `positions` token positions.

    row_tokens: lengths of the rows. alone_batch_difference: layer -> the median over a row's tokens, of the worst row.
    """

    row_tokens: list[int]
    positions: int
    argmax_agreement: float
    median_logprob_difference: float
    alone_batch_difference: dict[str, float]

    def __str__(self) -> str:
        """In one line, for the job's log."""
        lengths = ", ".join(map(str, self.row_tokens))
        worst = max(self.alone_batch_difference.values())
        return (
            f"alignment proof: the engine's token on {self.argmax_agreement:.2%} of {self.positions} positions, logprobs "
            f"within {self.median_logprob_difference:.2g} (median); rows of {lengths} tokens alone and in a batch differ by "
            f"{worst:.2g} (median of the worst row)"
        )

    def record(self) -> dict[str, Any]:
        """As JSON, rounded so that equal runs give equal text."""
        values = asdict(self)
        values["alone_batch_difference"] = {key: float(f"{value:.3g}") for key, value in self.alone_batch_difference.items()}
        for key in ("argmax_agreement", "median_logprob_difference"):
            values[key] = round(values[key], 6)
        return values


def proof_rows(rows: Sequence[TokenRow]) -> list[TokenRow]:
    """Heads of the longest rows, in groups of one batch each, of lengths HEAD_TOKENS where the rows are long enough.

    The first group is for the proof, the others replace it where all of its rows are rejected.
    """
    longest = sorted(rows, key=lambda row: -min(len(row), HEAD_TOKENS[0]))  # stable: equal rows, equal choice
    heads: dict[str, TokenRow] = {}
    for row in longest[:MAX_CANDIDATES]:
        head = make_row(row.input_ids[: HEAD_TOKENS[len(heads) % len(HEAD_TOKENS)]].tolist())
        heads.setdefault(head.key, head)
    return list(heads.values())


@dataclass(frozen=True)
class EngineView:
    """What the engine says about one row: for each position, its best next token and the candidates' logprobs."""

    best_ids: list[int]
    logprobs: list[dict[int, float]]


def engine_view(output: Any) -> EngineView:
    """Reads a vLLM RequestOutput made with prompt_logprobs and logprobs: entry t is about the token after position t."""
    # prompt_logprobs[0] is None; entry t + 1 was predicted at position t, and the generated token at the last position
    predicted = [*output.prompt_logprobs[1:], output.outputs[0].logprobs[0]]
    logprobs = [{token: entry.logprob for token, entry in candidates.items()} for candidates in predicted]
    best = [min(candidates, key=lambda token: candidates[token].rank) for candidates in predicted]
    return EngineView(best, logprobs)


def prove(
    target: Target,
    views: Sequence[EngineView],
    in_batch: Sequence[torch.Tensor],
    alone: Sequence[torch.Tensor],
    layer_ids: Sequence[int],
) -> Proof:
    """Compares and returns the figures; raises StageError where they miss the limits.

    in_batch and alone: stored states [tokens, layers, hidden] of the same rows, computed together and one by one
    (`alone` may cover only the first rows); the last layer is the final state.
    """
    differences = _alone_against_batch(in_batch, alone, layer_ids)
    limits = {layer: MAX_BATCH_DIFFERENCE[target.dtype] * max(1.0, int(layer) / SHALLOW) ** 0.5 for layer in differences}
    for layer, difference in differences.items():
        if not difference <= limits[layer]:
            raise StageError(
                f"alignment proof: rows alone and in a batch differ by {difference:.2g} (relative, median of the worst row) in "
                f"state {layer}, expected at most {limits[layer]:.2g}; states land on the wrong rows, or the engine is not "
                "deterministic enough"
            )
    logits = _Logits(target)
    agree, gaps = [], []
    for view, states in zip(views, in_batch, strict=True):
        for start in range(0, len(states), POSITIONS_AT_ONCE):
            positions = range(start, min(start + POSITIONS_AT_ONCE, len(states)))
            ours = logits(states[start : positions.stop, -1])
            normalisers = ours.logsumexp(dim=-1)
            for row, position in enumerate(positions):
                best, candidates = view.best_ids[position], view.logprobs[position]
                agree.append(_same_choice(ours[row], best, candidates, logits.dtype))
                gaps.append(abs(float(ours[row, best] - normalisers[row]) - candidates[best]))
    agreement, gap = sum(agree) / len(agree), float(torch.tensor(gaps).median())
    if agreement < MIN_AGREEMENT:
        raise StageError(
            f"alignment proof: norm and head over the stored final state choose the engine's token on {agreement:.2%} of "
            f"{len(agree)} positions, expected {MIN_AGREEMENT:.0%}; the states are not those of their tokens, or this target's "
            "norm or head is not the plain one that training would use"
        )
    if not gap <= MAX_LOGPROB_DIFFERENCE:
        raise StageError(
            f"alignment proof: the engine's logprobs differ from norm and head over the stored final state by {gap:.3g} "
            f"(median), expected at most {MAX_LOGPROB_DIFFERENCE}; this target scales or caps its logits, which training "
            "would not know"
        )
    return Proof([len(states) for states in in_batch], len(agree), agreement, gap, differences)


def _same_choice(ours: torch.Tensor, best: int, candidates: dict[int, float], dtype: torch.dtype) -> bool:
    """Whether our argmax is the engine's token, or the two are tied in the engine's dtype or among its own logprobs."""
    choice = int(ours.argmax())
    if choice == best or candidates.get(choice) == candidates[best]:
        return True
    rounded = ours[[choice, best]].to(dtype)
    return bool(rounded[0] == rounded[1])


def _alone_against_batch(
    in_batch: Sequence[torch.Tensor], alone: Sequence[torch.Tensor], layer_ids: Sequence[int]
) -> dict[str, float]:
    """Layer -> median over a row's tokens of |alone - in batch| / |in batch|, of the row where it is largest."""
    medians = []
    for single, together in zip(alone, in_batch, strict=False):
        difference = (single.float() - together.float()).norm(dim=-1) / together.float().norm(dim=-1).clamp_min(1e-12)
        medians.append(difference.median(dim=0).values)
    worst = torch.stack(medians).amax(dim=0)
    return {str(layer): float(value) for layer, value in zip(layer_ids, worst, strict=True)}


class _Logits:
    """The target's RMSNorm and head, as plain as training uses them, in float32 on the CPU."""

    def __init__(self, target: Target) -> None:
        self.dtype = DTYPES[target.dtype]
        text = text_config(target)
        if "rms_norm_eps" not in text:
            raise StageError("alignment proof: config.json has no rms_norm_eps; only targets with a final RMSNorm can be used")
        self.eps = float(text["rms_norm_eps"])
        norm, head = read_tensor(target, NORM_NAMES), read_tensor(target, HEAD_NAMES)
        if head is None:
            head = read_tensor(target, EMBEDDING_NAMES)  # tied
        if norm is None or head is None:
            raise StageError(f"alignment proof: the checkpoint has none of {', '.join((*NORM_NAMES, *HEAD_NAMES))}")
        self.norm, self.head = norm.float(), head

    def __call__(self, final: torch.Tensor) -> torch.Tensor:
        """final [positions, hidden] -> logits [positions, vocabulary], float32."""
        x = final.float()
        x = x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + self.eps) * self.norm
        # by slices of the vocabulary: a 163,840 x 7,168 head in float32 would need 4.7 GB at once
        return torch.cat([x @ part.float().T for part in self.head.split(16384)], dim=-1)
