"""How many drafted tokens the target accepted: the engine's counters, and the figures that follow from them.

In: an engine with statistics on, or counts from files. Out: `Counters`, and acceptance length and rates as a dict.
Counters belong to the process, not to an engine: only differences between two readings mean something.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from scripts.eagle3.errors import StageError

COUNTER_PREFIX = "vllm:spec_decode_num_"


@dataclass(frozen=True)
class Counters:
    """Drafts verified, tokens drafted, tokens accepted: in all and at each position of a draft (position 0 first)."""

    drafts: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    accepted_by_position: tuple[int, ...] = ()

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Counters":
        """Reads what `as_record` wrote; further keys are ignored."""
        by_position = tuple(record["accepted_by_position"])
        return cls(record["drafts"], record["drafted_tokens"], record["accepted_tokens"], by_position)

    def as_record(self) -> dict[str, Any]:
        """JSON values, keys as the fields."""
        return {**asdict(self), "accepted_by_position": list(self.accepted_by_position)}

    def __add__(self, other: "Counters") -> "Counters":
        return self._combine(other, 1)

    def __sub__(self, other: "Counters") -> "Counters":
        return self._combine(other, -1)

    def _combine(self, other: "Counters", sign: int) -> "Counters":
        width = max(len(self.accepted_by_position), len(other.accepted_by_position))
        mine, theirs = (_padded(counters.accepted_by_position, width) for counters in (self, other))
        return Counters(
            self.drafts + sign * other.drafts,
            self.drafted_tokens + sign * other.drafted_tokens,
            self.accepted_tokens + sign * other.accepted_tokens,
            tuple(left + sign * right for left, right in zip(mine, theirs, strict=True)),
        )


def _padded(values: Sequence[int], width: int) -> tuple[int, ...]:
    return tuple(values) + (0,) * (width - len(values))


def read_counters(llm: Any) -> Counters:
    """The counters so far, summed over engines; all zero where nothing drafts. Needs disable_log_stats=False."""
    metrics = [metric for metric in llm.get_metrics() if metric.name.startswith(COUNTER_PREFIX)]

    def total(name: str) -> int:
        return sum(int(metric.value) for metric in metrics if metric.name == COUNTER_PREFIX + name)

    by_position = [metric.values for metric in metrics if metric.name == COUNTER_PREFIX + "accepted_tokens_per_pos"]
    positions = tuple(sum(map(int, counts)) for counts in zip(*by_position, strict=True))
    return Counters(total("drafts"), total("draft_tokens"), total("accepted_tokens"), positions)


def acceptance(drafts: int, accepted_by_position: Sequence[int]) -> dict[str, Any]:
    """Acceptance length (1 + accepted / drafts); acceptance by position: of all drafts, and of those that came so far.

    Without drafts the length is 1 and the rates are empty: each step gives the target's own token.
    """
    if not drafts:
        return {"acceptance_length": 1.0, "acceptance_by_position": [], "conditional_acceptance_by_position": []}
    for before, after in zip((drafts, *accepted_by_position), accepted_by_position, strict=False):
        if after > before:
            raise StageError(f"accepted by position: {list(accepted_by_position)} of {drafts} drafts; it must not rise")
    reached = [drafts, *accepted_by_position][:-1]
    return {
        "acceptance_length": 1 + sum(accepted_by_position) / drafts,
        "acceptance_by_position": [count / drafts for count in accepted_by_position],
        "conditional_acceptance_by_position": [
            count / before if before else 0.0 for count, before in zip(accepted_by_position, reached, strict=True)
        ],
    }
