"""The budget: how many units each group keeps so that the target is met, and whether the finished model meets it.

The search has one variable, the share of units that is removed. In each pool the units with the lowest scores go first, so
this share determines the count of every group. The planner makes the counts legal, and a bisection finds the share.
Parameters, FLOPs and channels are predicted. Latency is measured, each time until it is clear on which side of the target it
is.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

import torch
from torch import Tensor, nn

from ..axes import Atom, Group
from ..edit import Inputs
from ..select import keep_largest
from ..trace import Trace, plan_counts
from .calibrate import UnitScores, comparable, structure
from .masked import make
from .names import label, names_of, ratios_by_group
from .sizes import LatencyRatio, SizeModel, measure_latency

SCOPES = ("global", "tensor", "isomorphic")
TOLERANCE = 0.02  # of the target
_TIMED = 0.05  # tolerance for latency, of the target
_BUSY = 0.1  # the same where the measurement is no more precise than that
_CLOSE = 0.1  # of the tolerance: close enough to end the search
_HELD = 16  # groups that are held at another count while the others are searched again
_TRIES = 4  # cuts for one latency target: the speed of the machine changes from minute to minute


def tolerance(target: float, spread: float | None = None) -> float:
    """The distance from the target that counts as met: 2 % of it; for latency 5 %, or its spread if larger, at most 10 %."""
    return TOLERANCE * target if spread is None else min(max(_TIMED * target, spread), _BUSY * target)


def met(found: float, target: float, spread: float | None = None) -> bool:
    """True if `found` is the target within the tolerance."""
    return abs(found - target) <= tolerance(target, spread)


def _percent(target: float, spread: float | None = None) -> str:
    return f"{tolerance(target, spread) / target:.0%}"


def _figure(found: float, spread: float | None = None) -> str:
    return f"{found:.4g}" if spread is None else f"{found:.3g} ± {spread:.2g}"


def _busy(target: float, spread: float | None) -> str:
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

    def __init__(self, ranking: Ranking, measure: Measure, target: float) -> None:
        self.ranking, self.measure, self.target = ranking, measure, target
        self.share = 0.5
        self.seen: dict[tuple[int, ...], ChosenCounts] = {}

    def at(self, wanted: Mapping[Group, int]) -> ChosenCounts:
        """The legal counts nearest to the wanted ones, measured."""
        legal = plan_counts(self.ranking.trace, wanted, self.ranking.multiple_of)
        key = tuple(legal.counts[g] for g in self.ranking.scores)
        if key not in self.seen:
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
    search, measured = CountSearch(ranking, measure, target), what == "latency"
    search.bisect(9 if measured else 40)
    search.settle() if measured else search.polish()
    best = search.best
    if best is None:
        raise ValueError(_why_missed(search, what))
    return best if search.fits(best) else replace(search.sides[0], missed=_why_missed(search, what))


def _why_missed(search: CountSearch, what: str) -> str:
    ranking, target, sides = search.ranking, search.target, search.sides
    spread = max((c.spread for c in sides if c.spread is not None), default=None)
    text = f"{what}={target:g} cannot be met within {_percent(target, spread)} of it"
    if sides:
        text += f"; what can be met is {' or '.join(f'{what}={_figure(c.remains, c.spread)}' for c in sides)}"
    lowest, reasons = search.at(ranking.counts(1.0)), []
    if lowest.remains > target:
        floored = [g for g, n in lowest.counts.items() if n <= ranking.floors[g]]
        reasons += [f"floor= holds {len(floored)} of {len(lowest.counts)} groups"] if floored else []
        frozen = Counter(ranking.trace.skipped.values()).most_common(3)
        reasons += [f"{number} axes stay whole ({why})" for why, number in frozen]
    if ranking.multiple_of > 1:
        reasons.append(f"multiple_of={ranking.multiple_of} makes the steps coarse")
    reasons += [f"{label(g)}: {why}" for g, why in list(lowest.moved.items())[:2]]
    return f"{text}. In the way: {'; '.join(reasons) or 'units are whole'}. {_busy(target, spread)}The model is unchanged."


@dataclass(frozen=True)
class Baseline:
    """What targets are fractions of: the given model, with all its blocks.

    `units`: how many units it has for each unit of the model that is cut; 1 unless blocks were removed.
    """

    model: nn.Module
    params: int
    flops: int
    units: float = 1.0


Totals = dict[str, tuple[float, float]]  # "params", "flops", "latency" -> before and after


@dataclass(frozen=True)
class Reached:
    """The sizes of a finished model that is accepted. `measured`: its latency, if that was the target.

    `note`: what was reached, where whole units cannot meet the target.
    """

    totals: Totals
    measured: str = ""
    note: str = ""


@dataclass
class Budget:
    """Chooses counts for one request and judges the models that are cut to them."""

    sizes: SizeModel
    inputs: Inputs
    baseline: Baseline
    what: str
    target: float
    ratios: Mapping[str, float]
    scope: str
    multiple_of: int
    floor: float | None
    priced: bool
    bias: bool
    tries: list[str] = field(default_factory=list)  # measured latencies that were not accepted

    @property
    def trace(self) -> Trace:
        return self.sizes.trace

    def flops(self, choice: ChosenCounts) -> int:
        return self.sizes.flops({g.atom: n for g, n in choice.counts.items()})

    def check_baseline(self) -> None:
        """Raises ValueError where the removed blocks alone leave less than the target."""
        b, spread = self.baseline, None
        if self.ratios or b.model is self.trace.model:
            return
        if self.what == "latency":
            timing = measure_latency(
                b.model, self.trace.model, self.inputs, lambda t: tells(t, self.target), seconds=(0.1, 1.0)
            )
            left, spread = timing.ratio, timing.spread
        else:
            counted = {"params": self.sizes.params({}) / b.params, "flops": self.sizes.flops({}) / max(b.flops, 1)}
            left = counted.get(self.what, 1 / b.units)
        if self.target > left + tolerance(self.target, spread):
            raise ValueError(
                f"{self.what}={self.target:g}: without the blocks {left:.3g} remains already; ask for a larger depth= or a "
                f"smaller {self.what}="
            )

    def choose(self, scores: UnitScores) -> ChosenCounts:
        """The units that each group keeps. Raises ValueError where floors or whole axes put the target out of reach."""
        if self.ratios:
            return self._by_name(scores)
        while True:
            choice = self._search(scores)
            # parameters are judged on the finished model, because the cut may add biases
            if not choice.missed or self.what == "params":
                return choice
            if self.what != "latency" and choice.remains <= self.target:
                return choice
            self.tries.append(_figure(choice.remains, choice.spread))
            if self.what != "latency" or choice.remains > self.target or len(self.tries) >= _TRIES:
                raise ValueError(self._with_tries(choice.missed))

    def _search(self, scores: UnitScores) -> ChosenCounts:
        floor = min(0.1, self.target) if self.floor is None else float(self.floor)
        floors = {g: min(g.size, max(1, math.ceil(floor * g.size))) for g in scores}
        ranking = Ranking(self.trace, scores, floors, self.scope, self.multiple_of, self._costs(scores))
        return search_counts(ranking, self._measure(scores), self.target, self.what)

    def _measure(self, scores: UnitScores) -> Measure:
        b = self.baseline
        whole = {"params": b.params, "flops": b.flops, "channels": sum(g.size for g in scores) * b.units}
        if not whole.get(self.what, 1):
            raise ValueError(
                f"{self.what}={self.target:g}: the model has no {self.what} on these inputs; ask for another target"
            )

        def measure(counts: Mapping[Group, int]) -> float | LatencyRatio:
            if self.what == "channels":
                return sum(counts.values()) / whole["channels"]
            if self.what == "latency":
                small = make(self.trace.model, self.trace, keep_of(scores, counts), bias=self.bias).small
                return measure_latency(b.model, small, self.inputs, lambda t: tells(t, self.target), seconds=(0.1, 1.0))
            atoms = {g.atom: n for g, n in counts.items()}
            return (self.sizes.params(atoms) if self.what == "params" else self.sizes.flops(atoms)) / whole[self.what]

        return measure

    def _costs(self, scores: UnitScores) -> dict[Group, float] | None:
        """What one unit of each group adds to the quantity that the target limits (FLOPs for latency)."""
        if not self.priced:
            return None
        if self.what == "channels":
            return dict.fromkeys(scores, 1.0)
        count = self.sizes.params if self.what == "params" else self.sizes.flops
        whole = count({})
        return {g: float(max(1, whole - count({g.atom: g.size - 1}))) for g in scores}

    def _by_name(self, scores: UnitScores) -> ChosenCounts:
        """The counts of `channels={glob: ratio}`: whole units, at most the ratio; groups that are not named stay whole."""
        ratios, names = ratios_by_group(self.trace, self.ratios), names_of(self.trace)
        wanted, floor = {g: g.size for g in scores}, 0.0 if self.floor is None else float(self.floor)
        for group, ratio in ratios.items():
            if group in scores:
                wanted[group] = max(1, math.floor(ratio * group.size + 1e-9))
                if wanted[group] < floor * group.size:
                    raise ValueError(
                        f"channels={{{names[group]!r}: {ratio:g}}} is below floor={floor:g}. The model is unchanged."
                    )
        legal = plan_counts(self.trace, wanted, self.multiple_of)
        total = sum(g.size for g in scores) * self.baseline.units
        return ChosenCounts(legal.counts, sum(legal.counts.values()) / total, None, legal.moved)

    def judge(self, choice: ChosenCounts, small: nn.Module, added: Mapping[str, tuple[int, ...]], flops: int) -> Reached | None:
        """The sizes of a finished model if it is accepted; None if another choice may do better.

        A model that leaves less than the target is accepted where whole units come no closer. Otherwise raises ValueError.
        """
        b = self.baseline
        totals: Totals = {"params": (b.params, sum(p.numel() for p in small.parameters())), "flops": (b.flops, flops)}
        if self.what == "channels":
            return Reached(totals, note=self._note(choice, choice.remains))
        if self.what == "latency":
            return self._judge_latency(small, totals)
        found = totals[self.what][1] / totals[self.what][0]
        if met(found, self.target):
            return Reached(totals)
        if self.what == "params" and self.sizes.learn(added, {g.atom: n for g, n in choice.counts.items()}):
            return None
        if found <= self.target:
            return Reached(totals, note=self._note(choice, found))
        biases = f", with the {len(added)} biases that it adds ({', '.join(list(added)[:3])})" if added else ""
        raise ValueError(choice.missed or self._miss(found, None, biases if self.what == "params" else ""))

    def _judge_latency(self, small: nn.Module, totals: Totals) -> Reached | None:
        timing = measure_latency(self.baseline.model, small, self.inputs)
        if met(timing.ratio, self.target, timing.spread):
            measured = f" (measured {_figure(timing.ratio, timing.spread)})"
            return Reached(totals | {"latency": (timing.dense, timing.small)}, measured)
        self.tries.append(_figure(timing.ratio, timing.spread))
        if len(self.tries) < _TRIES:
            return None
        raise ValueError(self._with_tries(self._miss(timing.ratio, timing.spread)))

    def _note(self, choice: ChosenCounts, found: float) -> str:
        """What was reached, where that is not what was asked."""
        steps = "units are whole" if self.multiple_of == 1 else f"units are whole and multiple_of={self.multiple_of}"
        if not self.ratios:
            return "" if met(found, self.target) else f"asked {self.target:g}, reached {found:.3g}: {steps}"
        names, parts = names_of(self.trace), []
        for group, ratio in ratios_by_group(self.trace, self.ratios).items():
            share = choice.counts.get(group, group.size) / group.size
            if group in choice.counts and abs(share - ratio) > 1e-9:
                parts.append(f"asked {ratio:g} of {names[group]}, reached {share:.3g}")
        more = f" and {len(parts) - 4} more groups" if len(parts) > 4 else ""
        return f"{'; '.join(parts[:4])}{more}: {steps}" if parts else ""

    def _miss(self, found: float, spread: float | None, biases: str = "") -> str:
        return (
            f"{self.what}={self.target:g} cannot be met within {_percent(self.target, spread)} of it: the cut that should "
            f"leaves {_figure(found, spread)}{biases}. {_busy(self.target, spread)}The model is unchanged."
        )

    def _with_tries(self, text: str) -> str:
        return f"{text} Measured, one try after the other: {', '.join(self.tries)}." if len(self.tries) > 1 else text
