"""`sensitivity`: the metric against sparsity for each layer or group, and the budget that follows from it."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import pairwise, takewhile
from numbers import Real
from typing import Any

from torch import Tensor, nn

from .._hints import hints
from .._tree import nearest, nearest_glob
from ..blocks import repeated_blocks
from ..budgets import bisected
from ..criteria import Criterion, magnitude
from ..display import Shown, Table
from ..masks import Masks
from ..patterns import Pattern
from ..plans import Plan, plan
from ..progress import Progress
from ..stats import Loss
from ..surgery import UnitCriterion, shrink
from ..targeting import Globs
from .measuring import Evaluate, Journal, check_evaluate, fingerprint, loss_of, measured, measured_before

AnyCriterion = Criterion | UnitCriterion | Callable[..., Tensor] | str


@dataclass(frozen=True, repr=False)
class Sensitivity(Shown):
    """The metric with one layer or group pruned at a time. `print` shows a table, the most sensitive group first.

    `dense`: the metric of the model as it is. `curves`: for each group, {sparsity: metric}. `members`: the tensors of each
    group (or, for removed units, the name of the group). `sizes`: its weights. `better`: "higher" or "lower". `around`: the
    sparsity of all other groups meanwhile, and `base` the metric with every group at it.
    """

    dense: float
    curves: dict[str, dict[float, float]]
    members: dict[str, tuple[str, ...]]
    sizes: dict[str, int]
    better: str = "higher"
    removed: bool = False
    around: float | None = None
    base: float | None = None

    def drop(self, group: str, sparsity: float) -> float:
        """How much the metric drops at a sparsity of one group: as measured, and along a cubic between the measurements.

        A cubic because the weights near zero are removed first: with a density that is even around zero, the energy of the
        fraction s of the smallest ones grows with s cubed.
        """
        points = self._points(group)
        for (low, before), (high, after) in pairwise(points):
            if sparsity <= high + 1e-12:
                return before + (after - before) * max(0.0, sparsity**3 - low**3) / (high**3 - low**3)
        return math.inf

    def _points(self, group: str) -> list[tuple[float, float]]:
        """(sparsity, drop) from low to high: never falling, and convex in the cube of the sparsity."""
        start = self.dense if self.base is None else self.base
        found = [(0.0, 0.0)] if self.around is None else []
        for level, value in sorted(self.curves[group].items()):
            drop = max(loss_of(value, start, self.better), found[-1][1] if found else -math.inf)
            if math.isinf(drop):
                break
            while len(found) > 1 and _slope(found[-2], found[-1]) >= _slope(found[-1], (level, drop)):
                found.pop()
            found.append((level, drop))
        return found

    @hints
    def recommend(self, *, sparsity: float | None = None, drop: float | None = None) -> dict[str, float]:
        """A budget by name, for `spread=` of `prune_` or `channels=` of `shrink` (then the fractions that remain).

        `sparsity`: the total over all groups, with the smallest sum of drops. `drop`: the most sparsity whose sum of drops
        stays within it. Adding up the drops of single groups is an estimate: pruned together, they may drop more. Curves
        that were measured `around` a sparsity near the total are closer to that.
        """
        if (sparsity is None) == (drop is None):
            raise ValueError("recommend needs one of sparsity= (the total) and drop= (of the metric)")
        total = sum(self.sizes.values())
        points = {group: self._points(group) for group in self.curves}
        if empty := [group for group, found in points.items() if not found]:
            raise ValueError(f"the metric of {empty[0]!r} is NaN or infinite at every level; measure lower levels=")
        first = {group: found[0][0] for group, found in points.items()}

        def at(price: float) -> dict[str, float]:
            return {group: _level(found, price * self.sizes[group]) for group, found in points.items()}

        def reached(levels: Mapping[str, float]) -> float:
            if sparsity is not None:
                return sum(level * self.sizes[group] for group, level in levels.items()) / total
            spent = sum(self.drop(group, level) for group, level in levels.items())
            return spent + (0.0 if self.base is None else loss_of(self.base, self.dense, self.better))

        asked = sparsity if sparsity is not None else drop
        assert asked is not None
        if reached(first) > asked + 1e-9:
            raise ValueError(f"the lowest levels give {reached(first):.3g}, and {asked:g} was asked; measure lower levels=")
        if sparsity is not None and reached(at(math.inf)) < sparsity - 1e-9:
            raise ValueError(
                f"the measured levels reach a sparsity of {reached(at(math.inf)):.3g}, and {sparsity:g} was asked; add higher "
                "levels="
            )
        levels = _between(first, at, reached, asked)
        return {name: 1 - level if self.removed else level for group, level in levels.items() for name in self.members[group]}

    def sweep(self, most: int = 5) -> dict[str, Any]:
        """The curves of the most sensitive groups, for `sweep=` of `sc.report`."""
        lines = [
            {
                "label": group,
                "points": [{"sparsity": level, "value": value} for level, value in sorted(self.curves[group].items())],
            }
            for group in self._ordered()[:most]
        ]
        return {"lines": lines, "dense": self.dense}

    def _ordered(self) -> list[str]:
        def worst(group: str) -> float:
            return max(loss_of(value, self.dense, self.better) for value in self.curves[group].values())

        return sorted(self.curves, key=worst, reverse=True)

    def metrics(self) -> dict[str, float]:
        """The metrics as a flat dictionary: "dense", and "group/sparsity" for each measurement."""
        flat = {f"{group}/{level:g}": value for group, curve in self.curves.items() for level, value in curve.items()}
        return {"dense": self.dense, **flat}

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain values that JSON can hold."""
        curves = {group: [[level, value] for level, value in sorted(curve.items())] for group, curve in self.curves.items()}
        members = {group: list(names) for group, names in self.members.items()}
        sizes = {"members": members, "sizes": dict(self.sizes), "around": self.around, "base": self.base}
        return {"dense": self.dense, "better": self.better, "curves": curves, **sizes}

    def _table(self) -> Table:
        levels = sorted({level for curve in self.curves.values() for level in curve})
        rows = [
            (group, f"{self.sizes[group]:,}", *(_cell(self.curves[group].get(level)) for level in levels))
            for group in self._ordered()
        ]
        what = "units removed" if self.removed else "weights zero"
        others = "" if self.around is None else f"; all others at {self.around:.0%}: {self.base:.6g}"
        return Table(
            ("group", "weights", *(f"{level:.0%}" for level in levels)),
            rows,
            right=range(1, len(levels) + 2),
            title=f"metric with one group at a time ({what}); {self.dense:.6g} before{others}; {self.better} is better",
        )


def _slope(low: tuple[float, float], high: tuple[float, float]) -> float:
    """The drop for each unit of the cube of the sparsity."""
    return (high[1] - low[1]) / (high[0] ** 3 - low[0] ** 3)


def _level(points: Sequence[tuple[float, float]], price: float) -> float:
    """The highest sparsity at which the drop grows by at most `price` for each unit of sparsity."""
    level = points[0][0]
    for low, high in pairwise(points):
        slope = 3 * _slope(low, high)  # of the drop by the sparsity, over the square of the sparsity
        most = high[0] if slope * high[0] ** 2 <= price else math.sqrt(price / slope)
        level = max(level, min(most, high[0]))
        if level < high[0]:
            break
    return level


def _between(
    first: dict[str, float],
    at: Callable[[float], dict[str, float]],
    reached: Callable[[Mapping[str, float]], float],
    asked: float,
) -> dict[str, float]:
    """The levels that reach what is asked: the price of a drop is found by bisection, and what costs nothing comes first."""
    free = at(0.0)
    if reached(free) > asked + 1e-12:

        def mixed(part: float) -> dict[str, float]:
            return {group: start + part * (free[group] - start) for group, start in first.items()}

        return mixed(bisected(0.0, 1.0, lambda part: reached(mixed(part)) < asked)[0])
    high = 1e-12
    while reached(at(high)) < asked and high < 1e12:
        high *= 4
    return at(bisected(0.0, high, lambda price: reached(at(price)) < asked, 80)[0])


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


@hints
def sensitivity(
    model: nn.Module,
    evaluate: Evaluate,
    criterion: AnyCriterion = magnitude,
    *,
    levels: Sequence[float] = (0.3, 0.5, 0.7, 0.9),
    by: str | Mapping[str, Globs] = "tensor",
    around: float | None = None,
    pattern: str | Pattern = "unstructured",
    include: Globs = (),
    exclude: Globs = (),
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    example_inputs: Any = None,
    better: str | None = None,
    journal: str | os.PathLike[str] | None = None,
) -> Sensitivity:
    """Measures the metric with one layer or group pruned at a time, at several sparsities. The model is unchanged.

    `evaluate(model)` returns the metric, one number. It is called once for each group and level, and once before.
    `by`: "tensor" (every weight alone), "block" (the repeated blocks of the model), or a mapping of labels to globs. With
    `example_inputs`, units are removed by `shrink` instead of weights set to zero, and the groups are those of `shrink`.
    `around`: a sparsity that all other groups have meanwhile (by default they are whole), near the total that is wanted;
    it must be one of `levels`. `better`: "higher" for accuracy, "lower" for perplexity or a loss; by default, "higher" if
    the metric is lower at the highest level, over all groups, and "lower" otherwise. `journal`: a file to which every
    measurement is written; a run that was stopped continues from it. The other arguments are those of `prune_`.

    `result.recommend(sparsity=0.6)` is a budget by name: `prune_(model, spread=result.recommend(sparsity=0.6))`.
    """
    check_evaluate(evaluate, better)
    levels = _checked_levels(levels)
    data = list(data) if data is not None and iter(data) is data else data
    if example_inputs is None:
        variants: _Variants = _Zeroed(model, criterion, levels, by, pattern, include, exclude, data, loss, around)
    else:
        if by != "tensor" or str(pattern) != "unstructured" or include or around is not None:
            raise ValueError(
                "by=, pattern=, include= and around= go with zeros; with example_inputs the groups are those of shrink"
            )
        variants = _Removed(model, criterion, levels, example_inputs, exclude, data, loss)
    about = {"call": "sensitivity", "model": fingerprint(model), "settings": variants.settings}
    kept = Journal(journal, about)
    dense = kept.get("dense", lambda: {"value": measured_before(evaluate, model)})["value"]
    curves: dict[str, dict[float, float]] = {group: {} for group in variants.members}
    base = None

    def measure(group: str, level: float) -> dict[str, Any]:
        with variants.pruned(group, level) as changed:
            return {"value": measured(evaluate, changed)}

    if around is not None:
        base = kept.get("base", lambda: measure(next(iter(curves)), around))["value"]
    with Progress("sensitivity", len(curves) * len(variants.levels)) as progress:
        for level in variants.levels:
            for group, curve in curves.items():
                progress(f"{group} at {level:.0%}")
                if level == around and base is not None:
                    curve[level] = base
                else:
                    curve[level] = kept.get(f"{group} {level!r}", partial(measure, group, level))["value"]
    better = better or _worse_way(dense if base is None else base, curves, variants.levels[-1])
    return Sensitivity(dense, curves, variants.members, variants.sizes, better, example_inputs is not None, around, base)


def _worse_way(start: float, curves: Mapping[str, Mapping[float, float]], level: float) -> str:
    """The direction of a metric that pruning makes worse: "higher" is better if it falls at this level, over all groups."""
    changes = [curve[level] - start for curve in curves.values()]
    return "lower" if sum(change for change in changes if math.isfinite(change)) > 0 else "higher"


def _checked_levels(levels: Sequence[float]) -> tuple[float, ...]:
    if not isinstance(levels, Iterable) or not all(isinstance(level, Real) for level in levels):
        raise TypeError(f"levels={levels!r} must be several sparsities above 0 and below 1, such as (0.5, 0.7, 0.9)")
    found = tuple(sorted({float(level) for level in levels}))
    if not found or not all(0 < level < 1 for level in found):
        raise ValueError(f"levels={levels!r} must be sparsities above 0 and below 1, such as (0.5, 0.7, 0.9)")
    return found


# --- zeros --------------------------------------------------------------------------------------------------------------


class _Zeroed:
    """The model with the weights of one group set to zero. One plan for each level serves all groups."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Any,
        levels: tuple[float, ...],
        by: str | Mapping[str, Globs],
        pattern: str | Pattern,
        include: Globs,
        exclude: Globs,
        data: Any,
        loss: Any,
        around: float | None,
    ) -> None:
        shape = Pattern.parse(pattern)
        if around is not None and (around not in levels or shape.keep):
            raise ValueError(f"around={around!r} must be one of levels={levels}, and n:m patterns have one level alone")
        self.model = model
        self.levels = (1 - shape.keep[0] / shape.keep[1],) if shape.keep else levels
        options: dict[str, Any] = {"pattern": shape, "include": include, "exclude": exclude, "data": data, "loss": loss}
        self._make = lambda level: plan(model, criterion, sparsity=level, **options)
        self._level, self._plan = self.levels[0], self._make(self.levels[0])
        self._others: dict[str, Tensor] = {} if around is None else dict(self._make(around).masks)
        sizes = {layer.name: layer.total for layer in self._plan.layers}
        self.members = _groups(model, by, sizes)
        self.sizes = {group: sum(sizes[name] for name in names) for group, names in self.members.items()}
        arguments = self._plan.arguments
        arguments = {k: v for k, v in arguments.items() if k != "sparsity"} if isinstance(arguments, dict) else arguments
        self.settings = {"arguments": arguments, "levels": self.levels, "groups": self.members, "around": around}

    @contextmanager
    def pruned(self, group: str, level: float) -> Iterator[nn.Module]:
        if level != self._level:
            self._level, self._plan = level, self._make(level)
        own = {name: self._plan.masks[name] for name in self.members[group]}
        part = Plan(Masks({**self._others, **own}), {}, f"{group} {level}")
        part.apply_(self.model, keep_dense=True)
        try:
            yield self.model
        finally:
            part.undo_(self.model)


def _groups(model: nn.Module, by: str | Mapping[str, Globs], sizes: Mapping[str, int]) -> dict[str, tuple[str, ...]]:
    if by == "tensor":
        return {name: (name,) for name in sizes}
    if by == "block":
        return {_label(block.names): tuple(block.names) for block in repeated_blocks(model, sizes)}
    if not isinstance(by, Mapping) or not by:
        hint = nearest(str(by), ["tensor", "block"])
        raise ValueError(f"by={by!r} must be 'tensor', 'block' or a mapping of labels to globs.{hint}")
    found = {}
    for label, globs in by.items():
        globs = [globs] if isinstance(globs, str) else list(globs or ())
        found[label] = tuple(name for name in sizes if any(fnmatchcase(name, glob) for glob in globs))
        if not found[label]:
            hint = nearest_glob(globs[0], sizes) if globs else ""
            raise ValueError(f"by={{{label!r}: ...}} matches no tensor that is pruned.{hint}")
    return found


def _label(names: Sequence[str]) -> str:
    """The path that all names share, or the first name."""
    parts = [name.split(".") for name in names]
    shared = list(takewhile(lambda column: len(set(column)) == 1, zip(*parts, strict=False)))
    return ".".join(column[0] for column in shared) or f"{names[0]} and {len(names) - 1} more"


# --- removed units ------------------------------------------------------------------------------------------------------


class _Removed:
    """The model without a part of the units of one group."""

    def __init__(
        self,
        model: nn.Module,
        criterion: Any,
        levels: tuple[float, ...],
        example_inputs: Any,
        exclude: Globs,
        data: Any,
        loss: Any,
    ) -> None:
        self.levels = levels
        options: dict[str, Any] = {"exclude": exclude or (), "data": data, "loss": loss, "floor": 0.0}

        def make(channels: Any) -> Any:
            return shrink(model, example_inputs, criterion, channels=channels, scope="tensor", **options)

        self._make = make
        _, found = make(1 - levels[0])
        tensors = dict(model.named_parameters())
        names = [group.name for group in found.groups if group.after < group.before]
        makers = {group.name: group.members for group in found.groups}
        self.members = {name: (name,) for name in names}
        self.sizes = {name: sum(tensors[t].numel() for t in makers[name][:1] if t in tensors) or 1 for name in names}
        self.settings = {"arguments": found.arguments, "levels": levels, "groups": names}

    @contextmanager
    def pruned(self, group: str, level: float) -> Iterator[nn.Module]:
        yield self._make({group: 1 - level})[0]


_Variants = _Zeroed | _Removed
