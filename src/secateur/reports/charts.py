"""The charts of a report as SVG paths and positions in percent. All text stands beside the SVGs, which stretch."""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .document import Document, Histogram, LayerRow, Mask
from .figures import count, microseconds, percent, shorter

MANY = 120  # above this number of layers, a column stands for a repeated block
_GROUPS = 12  # at most so many groups of columns on the axis, if the names allow it
_SPACED = 24  # more groups than this have no gaps between them
_FEWEST = 16  # the width of the picture is at least so many columns
_GAP = 1.0  # between two groups, in columns
_PAD = 0.09  # on both sides of a bar
_WIDER, _COSTLIER = 4, 12  # a layer so many times wider or costlier than the median is drawn at full height


# --- the network: one column per layer --------------------------------------------------------------------------------------


@dataclass
class Column:
    """One place on the axis: the layer, or the layers of a block, that it stands for."""

    name: str
    layers: list[int]
    group: str = ""
    x: float = 0.0


@dataclass(frozen=True)
class Label:
    """A name on the axis, at a place in percent. `screen`: the narrowest screen that has room for it, "" for a phone."""

    text: str
    left: float
    screen: str
    align: str = ""


@dataclass(frozen=True)
class Track:
    """One row of the picture. The outline is what there was, filled is what remains."""

    key: str
    name: str
    remark: str
    before: str
    after: str
    stay: str = ""
    range: str = ""
    budget: float | None = None


@dataclass(frozen=True)
class Network:
    columns: list[Column]
    width: float
    tracks: list[Track]
    labels: list[Label]
    blocks: bool


def network(document: Document) -> Network:
    """The picture of the network."""
    layers = document.layers
    columns = _by_block(layers) if len(layers) > MANY else [Column(layer.name, [i]) for i, layer in enumerate(layers)]
    _place(columns)
    width = max(columns[-1].x + 1, _FEWEST) if columns else 1.0
    blocks = any(len(column.layers) > 1 for column in columns)
    return Network(columns, width, _tracks(document, columns), _labels(columns, width), blocks)


def _by_block(layers: Sequence[LayerRow]) -> list[Column]:
    """One column for each entry of a repeated list, which its number in the names tells, and for each layer outside."""
    columns: dict[str, Column] = {}
    for i, layer in enumerate(layers):
        found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", layer.name)
        name = found[0] if found else layer.name
        columns.setdefault(name, Column(name, [])).layers.append(i)
    return list(columns.values())


def _place(columns: Sequence[Column]) -> None:
    """Sets the groups, by as many parts of the names as give few groups, and the positions. Too many groups are none."""
    names = [column.name.split(".") for column in columns]
    depth = 1
    for more in range(2, 1 + max(map(len, names), default=1)):
        if len({tuple(name[:more]) for name in names}) > _GROUPS:
            break
        depth = more
    if len({name[0] for name in names}) > _SPACED:
        depth = 0
    x = 0.0
    for i, (column, name) in enumerate(zip(columns, names)):
        column.group = ".".join(name[:depth])
        if i and column.group != columns[i - 1].group:
            x += _GAP
        column.x = x
        x += 1


def _runs(columns: Sequence[Column]) -> list[list[int]]:
    """The numbers of the columns, group by group."""
    return [list(run) for _, run in itertools.groupby(range(len(columns)), key=lambda i: columns[i].group)]


# The part of the axis that a character takes, in percent, on a wide screen, on one narrower than 60 rem, and on a phone.
_SCREENS = {"wide": 1.0, "middle": 1.9, "": 2.5}


def _labels(columns: Sequence[Column], width: float) -> list[Label]:
    """The names of the groups, or of columns without groups, that have room. Those of the largest groups come first.

    A name that would stick out at an end of the axis is aligned with it, if its group is the first or the last.
    """
    common = _common_path([column.group or column.name for column in columns])
    runs = _runs(columns) if any(column.group for column in columns) else [[i] for i in range(len(columns))]
    taken: dict[str, list[tuple[float, float]]] = {screen: [] for screen in _SCREENS}
    found: list[Label] = []
    for run in sorted(runs, key=lambda run: -len(run)):
        first, last = columns[run[0]], columns[run[-1]]
        text = shorter((first.group or first.name).removeprefix(common), 22)
        middle, half = 50 * (first.x + last.x + 1) / width, _SCREENS["middle"] * len(text) / 2
        align = "first" if first.x == 0 and middle < half else "last" if last.x + 1 == width and 100 - middle < half else ""
        label = None
        for screen, unit in _SCREENS.items():
            if not _has_room(middle, align, len(text), unit, taken[screen]):
                break
            label = Label(text, middle, screen, align)
        found += [label] if label else []
    return sorted(found, key=lambda label: label.left)


def _has_room(middle: float, align: str, length: int, unit: float, taken: list[tuple[float, float]]) -> bool:
    """Takes the place of a name on the axis, with a margin of one character, unless a part of it is taken."""
    start = {"first": 0.0, "last": 100 - unit * length, "": middle - unit * length / 2}[align]
    end = start + unit * length
    free = start >= 0 and end <= 100 and all(end + unit < first or last + unit < start for first, last in taken)
    if free:
        taken.append((start, end))
    return free


def _common_path(names: Sequence[str]) -> str:
    """The parts that all names begin with, with the dot behind them, such as "model."."""
    parts = [name.split(".")[:-1] for name in names]
    shared = itertools.takewhile(lambda each: len(set(each)) == 1, zip(*parts))
    return "".join(f"{each[0]}." for each in shared)


Values = Sequence[float | None]  # one for each layer, or for each column
Fold = Callable[[Sequence[float]], float]


def _tracks(document: Document, columns: Sequence[Column]) -> list[Track]:
    layers = document.layers

    def folded(values: Values, fold: Fold) -> Values:
        each = [[value for i in column.layers if (value := values[i]) is not None] for column in columns]
        return [fold(found) if found else None for found in each]

    def shares(name: str, remark: str, values: Values, budget: float | None = None) -> Track:
        whole = folded([None if value is None else 1.0 for value in values], max)
        ends = folded(values, min), folded(values, max)
        return _track("w", name, remark, columns, whole, folded(values, statistics.median), 1.0, ends=ends, budget=budget)

    tracks = [_widths(columns, *(folded([float(row.channels[i]) for row in layers], statistics.median) for i in (0, 1)))]
    pruned = [step.numbers["sparsity"] for step in document.steps if step.kind == "prune_"][-1:]
    remark = "share not zero" + "".join(f"; budget {percent(1 - sparsity)}" for sparsity in pruned)
    kept = [row.kept / row.params_after if row.params_after else 0.0 for row in layers]
    tracks.append(shares("Weights", remark, kept, *(100 - 100 * sparsity for sparsity in pruned)))
    gates = [None if row.gate is None else 1 - row.gate for row in layers]
    if any(gate is not None for gate in gates):
        tracks.append(shares("Inputs", "share that gates let through", gates))
    return [*tracks, *_costs(document, columns, folded)]


def _widths(columns: Sequence[Column], before: Values, after: Values) -> Track:
    known = [value for value in before if value is not None]
    most = _limit(known, _WIDER)
    wider = "; wider ones fill the height" if any(value > most for value in known) else ""
    return _track(
        "c", "Channels", f"outputs of each layer, up to {most:,.0f}{wider}", columns, before, after, most, mirror=True
    )


def _costs(document: Document, columns: Sequence[Column], folded: Callable[[Values, Fold], Values]) -> list[Track]:
    """The time of each layer, or its FLOPs if no time was measured, summed over a block."""
    layers = document.layers
    timed = any(row.dense_us is not None for row in layers)
    before = folded([row.dense_us if timed else row.flops_before for row in layers], sum)
    after = folded([row.now_us if timed else row.flops_after for row in layers], sum)
    known = [value for value in (*before, *after) if value]
    if not known:
        return []
    most = _limit(known, _COSTLIER)
    stays = [timed and not any(layers[i].format for i in column.layers) for column in columns]
    name, remark = ("Time", f"up to {microseconds(most)} µs") if timed else ("FLOPs", f"up to {count(most)}")
    remark += "; larger ones fill the height" if any(value > most for value in known) else ""
    return [_track("t", name, remark, columns, before, after, most, stays=stays)]


def _limit(values: Sequence[float], far: float) -> float:
    """The value at full height: the largest one that is not far above the median."""
    return max((value for value in values if value <= far * statistics.median(values)), default=1.0) or 1.0


def _track(
    key: str,
    name: str,
    remark: str,
    columns: Sequence[Column],
    before: Values,
    after: Values,
    most: float,
    *,
    mirror: bool = False,
    ends: tuple[Values, Values] | None = None,
    budget: float | None = None,
    stays: Sequence[bool] = (),
) -> Track:
    """A track whose full height is `most`. `ends`: the range inside each column; `stays`: columns in grey."""

    def heights(values: Values) -> Values:
        return [None if value is None else min(100.0, 100 * value / most) for value in values]

    now, grey = heights(after), list(stays) or [False] * len(columns)
    return Track(
        key,
        name,
        remark,
        before=_outline(columns, heights(before), mirror),
        after=_bars(columns, [None if held else value for value, held in zip(now, grey)], mirror),
        stay=_bars(columns, [value if held else None for value, held in zip(now, grey)], mirror),
        range=_whiskers(columns, *map(heights, ends)) if ends else "",
        budget=budget,
    )


def _outline(columns: Sequence[Column], values: Values, mirror: bool) -> str:
    """One closed path of steps for each group."""
    paths = []
    for run in _runs(columns):
        tall = [(columns[i].x, values[i] or 0.0) for i in run]
        start = f"M{short(tall[0][0])} {50 if mirror else 100}"
        if mirror:
            up = "".join(f"V{short(50 - v / 2)}H{short(x + 1)}" for x, v in tall)
            down = "".join(f"V{short(50 + v / 2)}H{short(x)}" for x, v in reversed(tall))
            paths.append(f"{start}{up}{down}Z")
        else:
            paths.append(f"{start}{''.join(f'V{short(100 - v)}H{short(x + 1)}' for x, v in tall)}V100Z")
    return "".join(paths)


def _bars(columns: Sequence[Column], values: Values, mirror: bool) -> str:
    paths = []
    for column, value in zip(columns, values):
        if value:
            top = 50 - value / 2 if mirror else 100 - value
            paths.append(f"M{short(column.x + _PAD)} {short(top)}h{short(1 - 2 * _PAD)}v{short(value)}h-{short(1 - 2 * _PAD)}Z")
    return "".join(paths)


def _whiskers(columns: Sequence[Column], low: Values, high: Values) -> str:
    """A vertical line from the smallest to the largest value of a block."""
    return "".join(
        f"M{short(column.x + 0.5)} {short(100 - b)}V{short(100 - a)}"
        for column, a, b in zip(columns, low, high)
        if a is not None and b is not None and b - a > 0.5
    )


def short(value: float) -> str:
    """A coordinate with two decimals at most."""
    return f"{value:.2f}".rstrip("0").rstrip(".")


# --- histograms and masks ---------------------------------------------------------------------------------------------------


def histogram(hist: Histogram) -> tuple[str, str, int]:
    """The paths before and after in a box 40 high, and its width in bins."""
    most = max(itertools.chain(hist.before or (), hist.after or ()), default=0) or 1
    before, after = hist.before or [], hist.after or []
    outline = f"M0 40{''.join(f'V{short(40 - 38 * v / most)}H{i + 1}' for i, v in enumerate(before))}V40" if before else ""
    bars = "".join(f"M{i} 40V{short(40 - 38 * v / most)}h1V40Z" for i, v in enumerate(after) if v)
    return outline, bars, max(len(before), len(after))


def mask_path(mask: Mask) -> str:
    """Each run of weights that stay, as a horizontal line of height 1."""
    paths = []
    for row in range(mask.rows):
        bits = mask.bits[row * mask.columns : (row + 1) * mask.columns]
        paths += [f"M{run.start()} {row}.5h{len(run[0])}" for run in re.finditer("1+", bits)]
    return "".join(paths)
