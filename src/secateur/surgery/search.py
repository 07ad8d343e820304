"""The search: how many units each group keeps so that the measure of the remaining model comes closest to the target.

The search has one variable, the share of units that is removed. In each pool the units with the lowest scores go first, so this
share determines the count of every group. The planner makes the counts legal, and a bisection finds the share.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..axes import Atom, Group
from ..progress import Progress
from ..select import keep_largest
from ..trace import Trace, plan_counts
from .calibrate import UnitScores, comparable, structure
from .names import label
from .sizes import LatencyRatio

SCOPES = ("global", "tensor", "isomorphic")
TOLERANCE = 0.02  # of the target
_TIMED = 0.05  # tolerance for latency, of the target
_BUSY = 0.1  # the same where the measurement is no more precise than that
_CLOSE = 0.1  # of the tolerance: close enough to end the search
_HELD = 16  # groups that are held at another count while the others are searched again


def tolerance(target: float, spread: float | None = None) -> float:
    """The distance from the target that counts as met: 2 % of it; for latency 5 %, or its spread if larger, at most 10 %."""
    return TOLERANCE * target if spread is None else min(max(_TIMED * target, spread), _BUSY * target)


def met(found: float, target: float, spread: float | None = None) -> bool:
    """True if `found` is the target within the tolerance."""
    return abs(found - target) <= tolerance(target, spread)


def percent(target: float, spread: float | None = None) -> str:
    """The tolerance in percent of the target."""
    return f"{tolerance(target, spread) / target:.0%}"


def figure(found: float, spread: float | None = None) -> str:
    """The fraction that remains, with its spread if it was measured."""
    return f"{found:.4g}" if spread is None else f"{found:.3g} ± {spread:.2g}"


def busy(target: float, spread: float | None) -> str:
    """A sentence on noise, where the spread is too wide for the target."""
    wide = spread is not None and spread > _TIMED * target
    return "Other work on this machine makes its times vary: try again when it is idle, or ask for flops=. " if wide else ""


def tells(timing: LatencyRatio, target: float) -> bool:
    """True if the measurement is precise enough: it is clear on which side of the target the latency is, or that it is met."""
    return timing.spread <= max(0.2 * _TIMED * target, abs(timing.ratio - target) / 2)


@dataclass(frozen=True)
class ChosenCounts:
    """The units that each group keeps, and what then remains of the model.

    `spread`: the spread of `remains`, if it was measured. `moved`: groups with another count than the ranking gives them, with
    the reason. `missed`: why the target is not met, if so.
    """

    counts: dict[Group, int]
    remains: float
    spread: float | None
    moved: dict[Group, str]
    missed: str = ""


@dataclass
class Ranking:
    """The count of each group as a function of the share of removed units. With `costs`, score per cost is ranked."""

    trace: Trace
    scores: UnitScores
    floors: dict[Group, int]
    scope: str
    multiple_of: int
    costs: Mapping[Group, float] | None = None

    def __post_init__(self) -> None:
        modules = dict(self.trace.model.named_modules())
        alike: dict[object, list[Group]] = {}
        for group in self.scores if self.scope != "global" else ():
            alike.setdefault(structure(self.trace, group, modules), []).append(group)
        alone = [[group] for group in self.scores]
        pools = {"global": [list(self.scores)], "tensor": alone, "isomorphic": list(alike.values())}[self.scope]
        self.pools = [(groups, self._ranked(groups) if len(groups) > 1 else None) for groups in pools]
        self.teams = list(alike.values()) if self.scope == "tensor" else alone  # groups whose counts change together

    def _ranked(self, groups: Sequence[Group]) -> Tensor:
        """The scores of a pool, infinite for the units that the floors protect."""
        parts = []
        for group in groups:
            scores = self.scores[group]
            if self.costs is not None:
                scores = scores / self.costs[group]
            elif self.scope == "global":
                scores = comparable(scores)
            safe = keep_largest(scores, group.size - self.floors[group])
            parts.append(scores.masked_fill(safe, torch.inf))
        return torch.cat(parts)

    def counts(self, share: float) -> dict[Group, int]:
        """The units that each group keeps when this share of all removable units is removed."""
        found: dict[Group, int] = {}
        for groups, ranking in self.pools:
            drop = round(share * sum(g.size - self.floors[g] for g in groups))
            if ranking is None:
                found[groups[0]] = groups[0].size - drop
                continue
            kept = keep_largest(ranking, drop).split([g.size for g in groups])
            found |= {group: int(mask.sum()) for group, mask in zip(groups, kept)}
        return found


def keep_of(scores: UnitScores, counts: Mapping[Group, int]) -> dict[Atom, Tensor]:
    """Masks of the units that stay: those with the highest scores, for each group that loses units."""
    return {g.atom: keep_largest(scores[g], g.size - n) for g, n in counts.items() if n < g.size}


Measure = Callable[[Mapping[Group, int]], float | LatencyRatio]


class CountSearch:
    """Searches for legal counts for which `measure` comes closest to the target."""

    def __init__(self, ranking: Ranking, measure: Measure, target: float, progress: Progress) -> None:
        self.ranking, self.measure, self.target, self.progress = ranking, measure, target, progress
        self.share = 0.5
        self.seen: dict[tuple[int, ...], ChosenCounts] = {}

    def at(self, wanted: Mapping[Group, int]) -> ChosenCounts:
        """The legal counts nearest to the wanted ones, measured."""
        legal = plan_counts(self.ranking.trace, wanted, self.ranking.multiple_of)
        key = tuple(legal.counts[g] for g in self.ranking.scores)
        if key not in self.seen:
            self.progress(f"try {len(self.seen) + 1}")
            found = self.measure(legal.counts)
            figures = (found.ratio, found.spread) if isinstance(found, LatencyRatio) else (found, None)
            self.seen[key] = ChosenCounts(legal.counts, *figures, legal.moved)
        return self.seen[key]

    @property
    def allowed(self) -> list[ChosenCounts]:
        """The counts seen so far that respect the floors."""
        return [c for c in self.seen.values() if all(n >= self.ranking.floors[g] for g, n in c.counts.items())]

    @property
    def best(self) -> ChosenCounts | None:
        return min(self.allowed, key=self.error, default=None)

    def error(self, choice: ChosenCounts) -> float:
        return abs(choice.remains - self.target)

    def fits(self, choice: ChosenCounts | None, part: float = 1.0) -> bool:
        """True if the choice meets the target within this part of the tolerance."""
        return choice is not None and self.error(choice) <= part * tolerance(self.target, choice.spread)

    def bisect(self, steps: int, fixed: Mapping[Group, int] | None = None) -> None:
        """Bisect the share of removed units. Groups in `fixed` keep their count."""
        low, high = 0.0, 1.0
        self.at({**self.ranking.counts(0.0), **(fixed or {})})
        if self.at({**self.ranking.counts(1.0), **(fixed or {})}).remains > self.target:
            return
        for _ in range(steps):
            middle = (low + high) / 2
            choice = self.at({**self.ranking.counts(middle), **(fixed or {})})
            if self.fits(choice, _CLOSE if choice.spread is None else 0.5):
                self.share = middle
                return
            low, high = (middle, high) if choice.remains > self.target else (low, middle)
        self.share = (low + high) / 2

    def settle(self) -> None:
        """Try shares on both sides of the bisection's result: latency is not monotonic in the sizes."""
        for offset in (0.005, -0.005, 0.01, -0.01, 0.02, -0.02, 0.04, -0.04):
            if self.fits(self.best, 0.5):
                return
            self.at(self.ranking.counts(min(1.0, max(0.0, self.share + offset))))

    @property
    def sides(self) -> list[ChosenCounts]:
        """The nearest counts that leave at most the target, then the nearest that leave more."""
        less = [c for c in self.allowed if c.remains <= self.target]
        more = [c for c in self.allowed if c.remains > self.target]
        return [*sorted(less, key=self.error)[:1], *sorted(more, key=self.error)[:1]]

    def polish(self, rounds: int = 16) -> None:
        """Where the bisection steps over the target: move single groups, or hold one group and bisect the others."""
        for _ in range(rounds):
            if self.fits(self.best, _CLOSE):
                return
            sides = self.sides
            self._step_groups(sides)
            if self.sides == sides and not self.fits(self.best):
                self._hold_groups(sides)
            if self.sides == sides:
                return

    def _step_groups(self, sides: Sequence[ChosenCounts]) -> None:
        for choice in sides:
            way = 1 if choice.remains < self.target else -1
            for team, step in product(self.ranking.teams[:64], dict.fromkeys((1, self.ranking.multiple_of))):
                counts = {**choice.counts, **{g: choice.counts[g] + way * step for g in team}}
                if self._possible({g: counts[g] for g in team}):
                    self.at(counts)

    def hold_jump(self, sides: Sequence[ChosenCounts]) -> None:
        """Hold groups that only change together, such as heads and the width, at their lower counts, and bisect the others."""
        if len(sides) == 2:
            less, more = (side.counts for side in sides)
            self.bisect(16, {g: n for g, n in less.items() if n != more[g]})

    def _hold_groups(self, sides: Sequence[ChosenCounts]) -> None:
        size = self.ranking.multiple_of
        for choice, team, step in product(sides, self.ranking.teams[:_HELD], (size, -size)):
            held = {g: choice.counts[g] + step for g in team}
            if not self.fits(self.best) and self._possible(held):
                self.bisect(16, held)

    def _possible(self, counts: Mapping[Group, int]) -> bool:
        return all(self.ranking.floors[g] <= n <= g.size for g, n in counts.items())


def search_counts(ranking: Ranking, measure: Measure, target: float, what: str) -> ChosenCounts:
    """Counts that leave `target` within the tolerance; else the nearest that leave less (or more), with the reason."""
    measured = what == "latency"
    with Progress(f"search for {what}={target:g}") as progress:
        search = CountSearch(ranking, measure, target, progress)
        search.bisect(9 if measured else 40)
        sides = search.sides
        search.settle() if measured else search.polish()
        if not measured and not search.fits(search.best):
            search.hold_jump(sides)
    best = search.best
    if best is None:
        raise ValueError(_why_missed(search, what))
    return best if search.fits(best) else replace(search.sides[0], missed=_why_missed(search, what))


def _why_missed(search: CountSearch, what: str) -> str:
    ranking, target, sides = search.ranking, search.target, search.sides
    spread = max((c.spread for c in sides if c.spread is not None), default=None)
    text = f"{what}={target:g} cannot be met within {percent(target, spread)} of it"
    if sides:
        text += f"; what can be met is {' or '.join(f'{what}={figure(c.remains, c.spread)}' for c in sides)}"
    lowest, reasons = search.at(ranking.counts(1.0)), []
    if lowest.remains > target:
        floored = [g for g, n in lowest.counts.items() if n <= ranking.floors[g]]
        reasons += [f"floor= holds {len(floored)} of {len(lowest.counts)} groups"] if floored else []
        frozen = Counter(ranking.trace.skipped.values()).most_common(3)
        reasons += [f"{number} axes stay whole ({why})" for why, number in frozen]
    if ranking.multiple_of > 1:
        reasons.append(f"multiple_of={ranking.multiple_of} makes the steps coarse")
    reasons += [f"{label(g)}: {why}" for g, why in list(lowest.moved.items())[:2]]
    return f"{text}. In the way: {'; '.join(reasons) or 'units are whole'}. {busy(target, spread)}The model is unchanged."
