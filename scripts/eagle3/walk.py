"""The simulated walk: the draft over a known row, accepted and advanced as the server does it.

In: rows of token ids and loss mask, and the draft's tokens of one teacher-forced forward. Out: drafts, accepted tokens
by position, acceptance length: the figures that vLLM counts, without serving.

What vLLM 0.22 to 0.32 counts (v1/core/sched/scheduler.py, v1/spec_decode/metrics.py), at temperature 0:
- prefill gives the answer's first token, and a draft from the position before it. A draft counts when it is verified,
  so
  never after a token that ends the request;
- one verification counts one draft, and the number n of leading drafted tokens that equal the target's own; the request
  advances by n + 1, as the target's own next token comes with them;
- n is counted before the answer is cut at its stop token or at max_tokens: the last draft of an answer can be credited
  with tokens that nobody sees, and that a recorded answer does not hold. Here they are no acceptance; how many
  positions are concerned is reported as `unknown_by_position`. Served figures lie between those without and those with
  all of them.
Not modelled: drafts cut short near max_model_len, preemption, and rejected structured output.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from scripts.eagle3.acceptance import acceptance
from scripts.eagle3.draft import draft_inputs, forward, single_row_batch, target_ids
from scripts.eagle3.engine import visible_gpus
from scripts.eagle3.shards import StateRow

if TYPE_CHECKING:
    from speculators.models.eagle3 import Eagle3DraftModel


@dataclass
class WalkResult:
    """Counts over all rows walked; lists are by draft position 0 .. K - 1."""

    num_speculative_tokens: int
    drafts: int = 0
    accepted_by_position: list[int] = field(default_factory=list)
    unknown_by_position: list[int] = field(default_factory=list)
    rows: int = 0
    answer_tokens: int = 0
    answer_tokens_in_vocabulary: int = 0

    def __post_init__(self) -> None:
        for counts in (self.accepted_by_position, self.unknown_by_position):
            counts.extend([0] * (self.num_speculative_tokens - len(counts)))

    @property
    def acceptance_length(self) -> float:
        """Tokens per verification: 1 + accepted / drafts; 1 where nothing was drafted."""
        return 1 + sum(self.accepted_by_position) / max(self.drafts, 1)

    @property
    def acceptance_length_upper(self) -> float:
        """Acceptance length if every unknown position were accepted."""
        return self.acceptance_length + sum(self.unknown_by_position) / max(self.drafts, 1)

    @property
    def coverage(self) -> float:
        """Share of the answers' tokens that the draft vocabulary holds."""
        return self.answer_tokens_in_vocabulary / max(self.answer_tokens, 1)

    def figures(self) -> dict[str, Any]:
        """Counts and rates as JSON values, under the names of the served ones (`acceptance.Counters`)."""
        return {
            "num_speculative_tokens": self.num_speculative_tokens,
            "rows": self.rows,
            "drafts": self.drafts,
            "drafted_tokens": self.drafts * self.num_speculative_tokens,
            "accepted_tokens": sum(self.accepted_by_position),
            "accepted_by_position": self.accepted_by_position,
            "unknown_by_position": self.unknown_by_position,
            **acceptance(self.drafts, self.accepted_by_position),
            "acceptance_length_upper": self.acceptance_length_upper,
            "answer_tokens": self.answer_tokens,
            "coverage": self.coverage,
        }


def walk_rows(model: "Eagle3DraftModel", rows: Iterable[StateRow], num_speculative_tokens: int) -> WalkResult:
    """Walks every answer of every row with K = num_speculative_tokens; one forward per row."""
    result = WalkResult(num_speculative_tokens)
    in_vocabulary = vocabulary_mask(model)
    for row in rows:
        drafted = drafted_tokens(model, row, num_speculative_tokens)
        add_row(result, row.token_ids.long(), row.loss_mask, drafted)
        answer = row.token_ids[row.loss_mask].long()
        result.answer_tokens += len(answer)
        result.answer_tokens_in_vocabulary += int(in_vocabulary[answer].sum())
        result.rows += 1
    return result


def drafted_tokens(model: "Eagle3DraftModel", row: StateRow, num_speculative_tokens: int) -> torch.Tensor:
    """[K, T - 1] target ids: the proposal for x[t+2+k] at step k from position t, given the true x[..t+1+k]."""
    inputs = draft_inputs(row)
    length = len(inputs["input_ids"])
    model.eval()
    # rows differ in length: compiling speculators' forward for each of them would cost more than it gains
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        steps, _, _ = forward(model, single_row_batch(inputs), num_speculative_tokens)
    drafted = torch.stack([step[0, :length] for step in steps]).cpu()
    return drafted if model.d2t is None else target_ids(model.d2t.cpu())[drafted]


def walk_device() -> torch.device:
    """Where a walk runs: the GPU where this job has one."""
    return torch.device("cuda" if visible_gpus() else "cpu")


def vocabulary_mask(model: "Eagle3DraftModel") -> torch.Tensor:
    """[target vocabulary] bool: what the draft can propose."""
    if model.t2d is None:
        return torch.ones(model.verifier_vocab_size, dtype=torch.bool)
    return model.t2d.cpu()


def add_row(result: WalkResult, token_ids: torch.Tensor, loss_mask: torch.Tensor, drafted: torch.Tensor) -> None:
    """Adds one row: token_ids and loss_mask [T], drafted [K, T - 1] as from `drafted_tokens`.

    Each span of the mask is one answer and one walk: it starts at the position before the answer's first token, and
    ends where the next token is the answer's last one.
    """
    steps = range(result.num_speculative_tokens)
    for first, last in answer_spans(loss_mask):
        position = first - 1
        # a row that starts with its answer has no prompt to draft from
        while 0 <= position < last - 1:
            accepted = 0
            for step in steps:
                predicts = position + 2 + step
                if predicts > last:
                    for unknown in steps[step:]:
                        result.unknown_by_position[unknown] += 1
                    break
                if drafted[step, position] != token_ids[predicts]:
                    break
                result.accepted_by_position[step] += 1
                accepted += 1
            result.drafts += 1
            position += accepted + 1


def answer_spans(loss_mask: torch.Tensor) -> Iterator[tuple[int, int]]:
    """(first, last) token index of each run of True in loss_mask [T], both inclusive."""
    padded = torch.nn.functional.pad(loss_mask.to(torch.int8), (1, 1))
    change = padded.diff()
    starts, ends = (change == 1).nonzero().flatten(), (change == -1).nonzero().flatten() - 1
    yield from zip(starts.tolist(), ends.tolist(), strict=True)
