"""How many units each group keeps, so that what remains of the model is what was asked.

One knob: the share of units that go. In each pool the lowest scores go first, so every group's count follows from the knob; the
planner makes the counts legal, and a bisection finds the knob. Nothing is run while it searches, except for latency.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..graph import Atom, Group, Trace, plan_counts
from ..select import keep_largest
from .importance import Scores, comparable, structure
from .masked import label

SCOPES = ("global", "tensor", "isomorphic")
TOLERANCE = 0.02  # of the original
_CLOSE = 0.002  # near enough to stop looking


@dataclass
class Choice:
    """Units to keep for each group, what remains then, and the groups that do not get what the ranking says, with why."""

    counts: dict[Group, int]
    remains: float
    moved: dict[Group, str]


@dataclass
class Knob:
    """The counts that a share of removed units means."""

    trace: Trace
    scores: Scores
    floors: dict[Group, int]
    scope: str
    multiple_of: int

    def __post_init__(self) -> None:
        pools: dict[object, list[Group]] = {}
        modules = dict(self.trace.model.named_modules())
        for group in self.scores:
            alike = structure(self.trace, group, modules) if self.scope == "isomorphic" else group
            pools.setdefault(None if self.scope == "global" else alike, []).append(group)
        self.pools = [(groups, self._ranking(groups)) for groups in pools.values()]

    def _ranking(self, groups: Sequence[Group]) -> Tensor:
        """The scores of a pool, with what the floors protect above everything."""
        parts = []
        for group in groups:
            scores = comparable(self.scores[group]) if self.scope == "global" else self.scores[group]
            safe = keep_largest(scores, group.size - self.floors[group])
            parts.append(scores.masked_fill(safe, torch.inf))
        return torch.cat(parts)

    def wanted(self, share: float) -> dict[Group, int]:
        """Units to keep when this share of all that may go goes."""
        found: dict[Group, int] = {}
        for groups, ranking in self.pools:
            drop = round(share * (len(ranking) - sum(self.floors[g] for g in groups)))
            if len(groups) == 1:
                found[groups[0]] = groups[0].size - drop
                continue
            kept = keep_largest(ranking, drop).split([g.size for g in groups])
            found |= {group: int(mask.sum()) for group, mask in zip(groups, kept)}
        return found


def keep_of(scores: Scores, counts: Mapping[Group, int]) -> dict[Atom, Tensor]:
    """Which units stay: the highest scores of each group that loses some."""
    return {g.atom: keep_largest(scores[g], g.size - n) for g, n in counts.items() if n < g.size}


Measure = Callable[[Mapping[Group, int]], float]


class Search:
    """The counts for which the measure comes nearest to the target."""

    def __init__(self, knob: Knob, measure: Measure, target: float) -> None:
        self.knob, self.measure, self.target = knob, measure, target
        self.best: Choice | None = None
        self.share = 0.5
        self.seen: dict[tuple[int, ...], Choice] = {}

    def at(self, wanted: Mapping[Group, int]) -> Choice:
        legal = plan_counts(self.knob.trace, wanted, self.knob.multiple_of)
        key = tuple(legal.counts[g] for g in self.knob.scores)
        if key not in self.seen:
            self.seen[key] = Choice(legal.counts, self.measure(legal.counts), legal.moved)
        choice = self.seen[key]
        low = any(n < self.knob.floors[g] for g, n in choice.counts.items())
        if not low and (self.best is None or self.error(choice) < self.error(self.best)):
            self.best = choice
        return choice

    def error(self, choice: Choice) -> float:
        return abs(choice.remains - self.target)

    def bisect(self, steps: int, close: float) -> None:
        low, high = 0.0, 1.0
        self.at(self.knob.wanted(0.0))
        if self.at(self.knob.wanted(1.0)).remains > self.target:
            return
        for _ in range(steps):
            middle = (low + high) / 2
            choice = self.at(self.knob.wanted(middle))
            if self.error(choice) <= close:
                return
            low, high = (middle, high) if choice.remains > self.target else (low, middle)
        self.share = (low + high) / 2

    def around(self) -> None:
        """Times are noisy and do not fall evenly with sizes: look on both sides of where the bisection ended."""
        for offset in (0.01, -0.01, 0.02, -0.02, 0.04, -0.04, 0.06, -0.06):
            if self.best is not None and self.error(self.best) <= TOLERANCE:
                return
            self.at(self.knob.wanted(min(1.0, max(0.0, self.share + offset))))

    def polish(self, rounds: int = 8) -> None:
        """Whole units, and multiples of them, step over a target: move single groups until it is near."""
        for _ in range(rounds):
            best = self.best
            if best is None or self.error(best) <= _CLOSE:
                return
            step = self.knob.multiple_of if best.remains < self.target else -self.knob.multiple_of
            for group, count in list(best.counts.items())[:64]:
                if self.knob.floors[group] <= count + step <= group.size:
                    self.at({**best.counts, group: count + step})
            if self.best is best:
                return


def choose(knob: Knob, measure: Measure, target: float, what: str, *, measured: bool = False) -> Choice:
    """The counts that leave `target`, within 2 % of the original; or an error that says what is in the way."""
    search = Search(knob, measure, target)
    search.bisect(9 if measured else 40, TOLERANCE / 2 if measured else _CLOSE)
    search.around() if measured else search.polish()
    if search.best is None or search.error(search.best) > TOLERANCE:
        raise ValueError(_what_stopped_it(search, what))
    return search.best


def _what_stopped_it(search: Search, what: str) -> str:
    knob = search.knob
    reached = sorted(c.remains for c in search.seen.values())
    near = f"{min(reached, key=lambda r: abs(r - search.target)):.3g}" if reached else "nothing"
    text = f"{what}={search.target:g} cannot be met within {TOLERANCE:g}: the nearest that legal counts give is {near}"
    if reached:
        text += f" (between {reached[0]:.3g} and {reached[-1]:.3g})"
    lowest, reasons = search.at(knob.wanted(1.0)), []
    if lowest.remains > search.target:
        floored = [g for g, n in lowest.counts.items() if n <= knob.floors[g]]
        reasons += [f"floor= holds {len(floored)} of {len(lowest.counts)} groups"] if floored else []
        frozen = Counter(knob.trace.skipped.values()).most_common(3)
        reasons += [f"{number} axes stay ({why})" for why, number in frozen]
    if knob.multiple_of > 1:
        reasons.append(f"multiple_of={knob.multiple_of} makes the steps coarse")
    reasons += [f"{label(g)}: {why}" for g, why in list(lowest.moved.items())[:2]]
    return f"{text}. In the way: {'; '.join(reasons) or 'units are whole'}. The model is as it was."
