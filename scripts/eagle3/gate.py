"""The gate: what a summary must show, pooled over all suites, compared with the `gate:` section.

In: `evaluation/summary.json` and the section. Out: one `Check` for each requirement that is switched on.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scripts.eagle3.acceptance import acceptance
from scripts.eagle3.config import Gate
from scripts.eagle3.errors import StageError, expect

METHOD = "eagle3"


@dataclass(frozen=True)
class Check:
    """One requirement: its name, what was required and found as text, and whether that is enough."""

    name: str
    required: str
    found: str
    passed: bool


@dataclass(frozen=True)
class Pooled:
    """Drafts and accepted tokens by position of several suites together."""

    drafts: int
    accepted_by_position: tuple[int, ...]

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts."""
        return acceptance(self.drafts, self.accepted_by_position)["acceptance_length"]

    @property
    def by_position(self) -> list[float]:
        """Acceptance at each position, of all drafts."""
        return acceptance(self.drafts, self.accepted_by_position)["acceptance_by_position"]


def pool(suites: Mapping[str, Mapping[str, Any]]) -> Pooled:
    """Sums the counts of all suites; StageError where their numbers of positions differ."""
    counts = [figures["accepted_by_position"] for figures in suites.values()]
    if len({len(positions) for positions in counts}) > 1:
        raise StageError(f"suites {', '.join(suites)}: drafts of different lengths cannot be pooled; evaluate them anew")
    by_position = tuple(sum(column) for column in zip(*counts, strict=True))
    return Pooled(sum(figures["drafts"] for figures in suites.values()), by_position)


def gate_checks(summary: Mapping[str, Any], gate: Gate) -> list[Check]:
    """All checks that `gate` switches on; StageError where the summary lacks what they need."""
    methods, simulated_suites = summary["methods"], summary["simulated"]
    if METHOD not in methods:
        raise StageError(f"summary: no method {METHOD}, there are {', '.join(methods)}; the gate judges {METHOD}")
    served = pool(methods[METHOD])
    checks = []
    if gate.min_acceptance_length is not None:
        checks.append(_at_least("acceptance length", served.acceptance_length, gate.min_acceptance_length))
    if (gate.max_simulated_difference, gate.max_position_difference, gate.max_drafts_difference) != (None, None, None):
        expect(sorted(methods[METHOD]), sorted(simulated_suites), "summary: simulated suites", "simulate all of them")
        checks += _agreement(served, pool(simulated_suites), gate)
    if gate.identical_outputs:
        checks += [_identical(name, suites) for name, suites in methods.items() if name != "baseline"]
    return checks


def _agreement(served: Pooled, simulated: Pooled, gate: Gate) -> list[Check]:
    if not served.drafts:
        return [Check("drafts served", "at least 1", "0", False)]
    expect(len(served.accepted_by_position), len(simulated.accepted_by_position), "summary: simulated positions", "redo it")
    checks = []
    if gate.max_simulated_difference is not None:
        difference = abs(simulated.acceptance_length - served.acceptance_length)
        found = f"{difference:.4f} ({simulated.acceptance_length:.4f} simulated, {served.acceptance_length:.4f} served)"
        checks.append(_at_most("difference of acceptance length", difference, gate.max_simulated_difference, found))
    if gate.max_position_difference is not None:
        pairs = zip(_padded(simulated.by_position, served), _padded(served.by_position, served), strict=True)
        for position, (expected, measured) in enumerate(pairs):
            difference = abs(expected - measured)
            found = f"{difference:.4f} ({expected:.4f} simulated, {measured:.4f} served)"
            name = f"difference at position {position}"
            checks.append(_at_most(name, difference, gate.max_position_difference, found))
    if gate.max_drafts_difference is not None:
        share = abs(simulated.drafts - served.drafts) / served.drafts
        found = f"{share:.4f} ({simulated.drafts} simulated, {served.drafts} served)"
        checks.append(_at_most("difference of drafts, relative", share, gate.max_drafts_difference, found))
    return checks


def _padded(rates: Sequence[float], served: Pooled) -> list[float]:
    return [*rates, *[0.0] * (len(served.accepted_by_position) - len(rates))]


def _identical(name: str, suites: Mapping[str, Mapping[str, Any]]) -> Check:
    identical, ties, total = (sum(suite[key] for suite in suites.values()) for key in ("identical", "ties", "total"))
    found = f"{identical} of {total}" + (f", {ties} differ at a tie" if ties else "")
    return Check(f"outputs of {name} equal the baseline's", "all, ties excepted", found, 0 < total == identical + ties)


def _at_least(name: str, value: float, limit: float) -> Check:
    return Check(name, f"at least {limit:g}", f"{value:.4f}", value >= limit)


def _at_most(name: str, value: float, limit: float, found: str) -> Check:
    return Check(name, f"at most {limit:g}", found, value <= limit)
