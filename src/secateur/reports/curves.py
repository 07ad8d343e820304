"""The chart of a sweep: a metric against the share of zeros, as SVG paths and positions in percent."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from .charts import short
from .document import Line, Sweep, wilson
from .figures import percent, shorter

_FEW = 5  # so many lines are told apart by dash and marker; of more, those that change most are named
_NAMED = 3
_SPOKEN = 12  # lines whose figures a screen reader reads


@dataclass(frozen=True)
class Dot:
    x: float
    y: float
    text: str
    here: bool = False


@dataclass
class Drawn:
    """One line: its path, its points, and where its label stands, to the right or to the left of that place."""

    label: str
    style: str
    path: str
    dots: list[Dot]
    x: float = 0.0
    y: float = 0.0
    left: bool = False


@dataclass(frozen=True)
class Curve:
    """Everything that is drawn, with places in percent from the left and from the bottom."""

    lines: list[Drawn]
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    band: str
    dense: tuple[float, str] | None
    chosen: tuple[float, str] | None
    spoken: str
    say: str


@dataclass(frozen=True)
class Axes:
    """Where a share of zeros and a value lie, in percent."""

    across: Callable[[float], float]
    up: Callable[[float], float]
    unit: str

    def value(self, value: float) -> str:
        return f"{value:.4g} {self.unit}".strip()


def curve(sweep: Sweep) -> Curve:
    """The chart of a sweep with at least one line."""
    points = [point for line in sweep.lines for point in line.points]
    values = [point.value for point in points] + ([] if sweep.dense is None else [sweep.dense])
    up, y_ticks = _scale(values, sweep.unit)
    end = min(1.0, math.ceil(20 * max((point.sparsity for point in points), default=1.0) + 0.5) / 20)
    axes = Axes(lambda share: 100 * share / end, up, sweep.unit)
    few = len(sweep.lines) <= _FEW
    lines = [_drawn(line, f"k{i + 1}" if few else "k0", axes, sweep.chosen) for i, line in enumerate(sweep.lines)]
    named = lines if few else sorted(lines, key=_change, reverse=True)[:_NAMED]
    _spread(named)
    for line in lines:
        line.label = line.label if line in named else ""
    step = 0.2 if end > 0.5 else 0.1
    return Curve(
        lines,
        x_ticks=[(axes.across(i * step), percent(i * step)) for i in range(int(end / step + 1e-9) + 1)],
        y_ticks=y_ticks,
        band=_band(sweep.lines[0], axes, sweep.samples) if few else "",
        dense=None if sweep.dense is None else (up(sweep.dense), f"before: {sweep.dense:.4g}"),
        chosen=None if sweep.chosen is None else (axes.across(sweep.chosen), f"chosen: {percent(sweep.chosen)}"),
        spoken=". ".join(_spoken(line, axes) for line in sweep.lines[:_SPOKEN]),
        say=_steepest(sweep.lines[0], axes) if few else "",
    )


def _spoken(line: Line, axes: Axes) -> str:
    return f"{line.label}: " + ", ".join(f"{percent(p.sparsity)} zeros {axes.value(p.value)}" for p in line.points)


def _steepest(line: Line, axes: Axes) -> str:
    """Says between which two points the metric changes most."""
    pairs = list(itertools.pairwise(line.points))
    if not pairs:
        return ""
    a, b = max(pairs, key=lambda pair: abs(pair[1].value - pair[0].value))
    return (
        f"{line.label[:1].upper()}{line.label[1:]} changes most between {percent(a.sparsity)} and {percent(b.sparsity)} zeros: "
        f"{axes.value(a.value)} becomes {axes.value(b.value)}."
    )


def _drawn(line: Line, style: str, axes: Axes, chosen: float | None) -> Drawn:
    dots = [
        Dot(
            axes.across(point.sparsity),
            axes.up(point.value),
            f"{line.label}, {percent(point.sparsity)} zeros: {axes.value(point.value)}",
            here=style == "k1" and chosen is not None and abs(point.sparsity - chosen) < 0.005,
        )
        for point in line.points
    ]
    path = "M" + "L".join(f"{short(dot.x)} {short(100 - dot.y)}" for dot in dots) if len(dots) > 1 else ""
    # The label stands at the last point that is not at the bottom, where all lines end.
    last = next((dot for dot in reversed(dots) if dot.y > 8), dots[-1] if dots else Dot(0.0, 0.0, ""))
    return Drawn(shorter(line.label, 24), style, path, dots, last.x, last.y)


def _change(line: Drawn) -> float:
    """How far apart the first and the last point lie."""
    return abs(line.dots[-1].y - line.dots[0].y) if line.dots else 0.0


def _spread(lines: Iterable[Drawn]) -> None:
    """Moves labels down that would cover each other, and those of steep lines to the side where there is room."""
    placed: list[Drawn] = []
    for line in sorted(lines, key=lambda line: -line.y):
        crossed = any(other is not line and other.x > line.x and abs(other.y - line.y) < 25 for other in lines)
        line.left = crossed and line.x > 30
        near = [other.y for other in placed if other.left == line.left and abs(other.x - line.x) < 30]
        line.y = max(2.0, min([line.y, *(y - 7 for y in near)]))
        placed.append(line)


def _band(line: Line, axes: Axes, samples: int | None) -> str:
    """The 95 % interval around a line of percentages."""
    if axes.unit != "%" or not samples or len(line.points) < 2:
        return ""
    ends = [(axes.across(point.sparsity), *map(axes.up, wilson(point.value, samples))) for point in line.points]
    top = "L".join(f"{short(x)} {short(100 - high)}" for x, _, high in ends)
    bottom = "L".join(f"{short(x)} {short(100 - low)}" for x, low, _ in reversed(ends))
    return f"M{top}L{bottom}Z"


def _scale(values: Sequence[float], unit: str) -> tuple[Callable[[float], float], list[tuple[float, str]]]:
    """From values to heights, and the ticks. Values that span a factor of 20 get a logarithmic scale, unless in percent."""
    low, high = min(values, default=0.0), max(values, default=1.0)
    if unit != "%" and low > 0 and high / low > 20:
        a, b = math.floor(math.log10(low)), math.ceil(math.log10(high))
        ticks = [(100 * (p - a) / (b - a), f"{10.0**p:g}") for p in range(a, b + 1)]
        return lambda value: 100 * (math.log10(max(value, low)) - a) / (b - a), ticks
    step = _step((high - low) / 4 or 1.0)
    first = math.floor(low / step)
    marks = [i * step for i in range(first, max(math.ceil(high / step), first + 1) + 1)]
    span = marks[-1] - marks[0]
    ticks = [
        (100 * (mark - marks[0]) / span, f"{mark:g}" + (f" {unit}" if unit and mark == marks[-1] else "")) for mark in marks
    ]
    return lambda value: min(100.0, max(0.0, 100 * (value - marks[0]) / span)), ticks


def _step(rough: float) -> float:
    """The next of 1, 2, 2.5, 5 and 10 times a power of ten."""
    size = 10.0 ** math.floor(math.log10(rough))
    return next(size * each for each in (1, 2, 2.5, 5, 10) if size * each >= 0.999 * rough)
