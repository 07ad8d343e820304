"""How many units each group keeps, so that what remains of the model is what was asked.

One knob: the share of units that go. In each pool the lowest scores go first, so every group's count follows from the knob; the
planner makes the counts legal, and a bisection finds the knob. Nothing is run while it searches, except for latency, which is
measured, each time until it tells on which side of the target it is.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..axes import Atom, Group
from ..select import keep_largest
from ..trace import Trace, plan_counts
from .calibrate import Scores, comparable, structure
from .masked import label
from .sizes import Timing

SCOPES = ("global", "tensor", "isomorphic")
TOLERANCE = 0.02  # of the target
_TIMED = 0.05  # of a time
_BUSY = 0.1  # of a time that cannot be measured any better
_CLOSE = 0.1  # of the tolerance: near enough to stop looking
_HELD = 16  # groups that are held in turn while the others look for the target


def tolerance(target: float, spread: float | None = None) -> float:
    """How far from the target is still met: 2 % of it; for a time, which has a spread, 5 %, or that, 10 % at most."""
    return TOLERANCE * target if spread is None else min(max(_TIMED * target, spread), _BUSY * target)


def met(found: float, target: float, spread: float | None = None) -> bool:
    return abs(found - target) <= tolerance(target, spread)


def within(target: float, spread: float | None = None) -> str:
    return f"{tolerance(target, spread) / target:.0%}"


def figure(found: float, spread: float | None = None) -> str:
    return f"{found:.4g}" if spread is None else f"{found:.3g} ± {spread:.2g}"


def busy(target: float, spread: float | None) -> str:
    too_wide = spread is not None and spread > _TIMED * target
    return "Other work on this machine makes its times vary: try again when it is idle, or ask for flops=. " if too_wide else ""


def tells(timing: Timing, target: float) -> bool:
    """Whether a time is known well enough to go on: on which side of the target it is, or that it is there."""
    return timing.spread <= max(0.2 * _TIMED * target, abs(timing.ratio - target) / 2)


@dataclass
class Choice:
    """Units to keep for each group, what remains then (with its spread, if measured), the groups that do not get what the
    ranking says, with why, and why it is not what was asked, if so."""

    counts: dict[Group, int]
    remains: float
    spread: float | None
    moved: dict[Group, str]
    stopped: str | None = None


@dataclass
class Knob:
    """The counts that a share of removed units means. With `costs`, of a unit of each group, scores over costs compete."""

    trace: Trace
    scores: Scores
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
        self.pools = [(groups, self._ranking(groups) if len(groups) > 1 else None) for groups in pools]
        self.teams = list(alike.values()) if self.scope == "tensor" else alone  # what moves together

    def _ranking(self, groups: Sequence[Group]) -> Tensor:
        """The scores of a pool, with what the floors protect above everything."""
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

    def wanted(self, share: float) -> dict[Group, int]:
        """Units to keep when this share of all that may go goes; a group on its own needs no ranking for that."""
        found: dict[Group, int] = {}
        for groups, ranking in self.pools:
            drop = round(share * sum(g.size - self.floors[g] for g in groups))
            if ranking is None:
                found[groups[0]] = groups[0].size - drop
                continue
            kept = keep_largest(ranking, drop).split([g.size for g in groups])
            found |= {group: int(mask.sum()) for group, mask in zip(groups, kept)}
        return found


def keep_of(scores: Scores, counts: Mapping[Group, int]) -> dict[Atom, Tensor]:
    """Which units stay: the highest scores of each group that loses some."""
    return {g.atom: keep_largest(scores[g], g.size - n) for g, n in counts.items() if n < g.size}


Measure = Callable[[Mapping[Group, int]], float | Timing]


class Search:
    """The counts for which the measure comes nearest to the target."""

    def __init__(self, knob: Knob, measure: Measure, target: float) -> None:
        self.knob, self.measure, self.target = knob, measure, target
        self.share = 0.5
        self.seen: dict[tuple[int, ...], Choice] = {}

    def at(self, wanted: Mapping[Group, int]) -> Choice:
        legal = plan_counts(self.knob.trace, wanted, self.knob.multiple_of)
        key = tuple(legal.counts[g] for g in self.knob.scores)
        if key not in self.seen:
            found = self.measure(legal.counts)
            figures = (found.ratio, found.spread) if isinstance(found, Timing) else (found, None)
            self.seen[key] = Choice(legal.counts, *figures, legal.moved)
        return self.seen[key]

    @property
    def allowed(self) -> list[Choice]:
        """What was seen and keeps to the floors."""
        return [c for c in self.seen.values() if all(n >= self.knob.floors[g] for g, n in c.counts.items())]

    @property
    def best(self) -> Choice | None:
        return min(self.allowed, key=self.error, default=None)

    def error(self, choice: Choice) -> float:
        return abs(choice.remains - self.target)

    def fits(self, choice: Choice | None, part: float = 1.0) -> bool:
        return choice is not None and self.error(choice) <= part * tolerance(self.target, choice.spread)

    def bisect(self, steps: int, fixed: Mapping[Group, int] | None = None) -> None:
        """Turn the knob until the target is near; `fixed` groups do not follow it."""
        low, high = 0.0, 1.0
        self.at({**self.knob.wanted(0.0), **(fixed or {})})
        if self.at({**self.knob.wanted(1.0), **(fixed or {})}).remains > self.target:
            return
        for _ in range(steps):
            middle = (low + high) / 2
            choice = self.at({**self.knob.wanted(middle), **(fixed or {})})
            if self.fits(choice, _CLOSE if choice.spread is None else 0.5):
                self.share = middle
                return
            low, high = (middle, high) if choice.remains > self.target else (low, middle)
        self.share = (low + high) / 2

    def settle(self) -> None:
        """Times do not fall evenly with sizes: look on both sides of where they should be right."""
        for offset in (0.005, -0.005, 0.01, -0.01, 0.02, -0.02, 0.04, -0.04):
            if self.fits(self.best, 0.5):
                return
            self.at(self.knob.wanted(min(1.0, max(0.0, self.share + offset))))

    @property
    def sides(self) -> list[Choice]:
        """The nearest choices that leave less, and more, than the target."""
        less = [c for c in self.allowed if c.remains <= self.target]
        more = [c for c in self.allowed if c.remains > self.target]
        return [*sorted(less, key=self.error)[:1], *sorted(more, key=self.error)[:1]]

    def polish(self, rounds: int = 16) -> None:
        """Whole units step over a target: move single groups, or hold one elsewhere and turn the knob for the others."""
        size, teams = self.knob.multiple_of, self.knob.teams
        for _ in range(rounds):
            if self.fits(self.best, _CLOSE):
                return
            sides = self.sides
            for choice in sides:
                way = 1 if choice.remains < self.target else -1
                for team, step in product(teams[:64], dict.fromkeys((1, size))):
                    self._move(choice, dict.fromkeys(team, way * step))
            if self.sides == sides and not self.fits(self.best):
                for choice, team, step in product(sides, teams[:_HELD], (size, -size)):
                    held = {g: choice.counts[g] + step for g in team}
                    if not self.fits(self.best) and all(self.knob.floors[g] <= n <= g.size for g, n in held.items()):
                        self.bisect(16, held)
            if self.sides == sides:
                return

    def _move(self, choice: Choice, steps: Mapping[Group, int]) -> None:
        counts = {**choice.counts, **{g: choice.counts[g] + step for g, step in steps.items()}}
        if all(self.knob.floors[g] <= counts[g] <= g.size for g in steps):
            self.at(counts)


def choose(knob: Knob, measure: Measure, target: float, what: str) -> Choice:
    """The counts that leave `target`, within the tolerance; else the nearest that leave less, with what is in the way."""
    search, measured = Search(knob, measure, target), what == "latency"
    search.bisect(9 if measured else 40)
    search.settle() if measured else search.polish()
    best = search.best
    if best is None:
        raise ValueError(_what_stopped_it(search, what))
    return best if search.fits(best) else replace(search.sides[0], stopped=_what_stopped_it(search, what))


def _what_stopped_it(search: Search, what: str) -> str:
    knob, target, sides = search.knob, search.target, search.sides
    spread = max((c.spread for c in sides if c.spread is not None), default=None)
    text = f"{what}={target:g} cannot be met within {within(target, spread)} of it"
    if sides:
        text += f"; what can be met is {' or '.join(f'{what}={figure(c.remains, c.spread)}' for c in sides)}"
    lowest, reasons = search.at(knob.wanted(1.0)), []
    if lowest.remains > target:
        floored = [g for g, n in lowest.counts.items() if n <= knob.floors[g]]
        reasons += [f"floor= holds {len(floored)} of {len(lowest.counts)} groups"] if floored else []
        frozen = Counter(knob.trace.skipped.values()).most_common(3)
        reasons += [f"{number} axes stay ({why})" for why, number in frozen]
    if knob.multiple_of > 1:
        reasons.append(f"multiple_of={knob.multiple_of} makes the steps coarse")
    reasons += [f"{label(g)}: {why}" for g, why in list(lowest.moved.items())[:2]]
    said = busy(target, spread)
    return f"{text}. In the way: {'; '.join(reasons) or 'units are whole'}. {said}The model is as it was."
