"""The budget: chooses how many units each group keeps, and judges whether the finished model meets the target.

Parameters, FLOPs and channels are predicted. Latency is measured, until it is clear on which side of the target it is.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from ..axes import Group
from ..edit import Inputs
from ..trace import Trace, plan_counts
from .calibrate import UnitScores
from .masked import make
from .names import names_of, ratios_by_group
from .search import ChosenCounts, Measure, Ranking, busy, figure, keep_of, met, percent, search_counts, tells, tolerance
from .sizes import LatencyRatio, SizeModel, measure_latency

_TRIES = 4  # cuts for one latency target: the speed of the machine changes from minute to minute


@dataclass(frozen=True)
class Baseline:
    """The reference for all targets: the given model, with all its blocks.

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
            self.tries.append(figure(choice.remains, choice.spread))
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
        """The cost of one unit of each group, in the quantity that the target limits (in FLOPs for latency)."""
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
            measured = f" (measured {figure(timing.ratio, timing.spread)})"
            return Reached(totals | {"latency": (timing.dense, timing.small)}, measured)
        self.tries.append(figure(timing.ratio, timing.spread))
        if len(self.tries) < _TRIES:
            return None
        raise ValueError(self._with_tries(self._miss(timing.ratio, timing.spread)))

    def _note(self, choice: ChosenCounts, found: float) -> str:
        """A note with the fraction that was reached, if it differs from the target."""
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
            f"{self.what}={self.target:g} cannot be met within {percent(self.target, spread)} of it: the cut that should "
            f"leaves {figure(found, spread)}{biases}. {busy(self.target, spread)}The model is unchanged."
        )

    def _with_tries(self, text: str) -> str:
        return f"{text} Measured, one try after the other: {', '.join(self.tries)}." if len(self.tries) > 1 else text
