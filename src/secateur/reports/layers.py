"""The rows of a report: one for each weight, with its shape and zeros before and now, its histogram, and pictures of masks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .._layers import layout_of
from .._tree import Packed, bare_name
from ..edit import history
from ..execute import Compressed, zeros_of
from ..plans import Plan
from ..summaries import FEW, unreadable, weights_of
from .document import Histogram, LayerRow, Mask
from .measure import Flops

BINS = 41  # an odd number, so that zero lies inside a bin
CROP = 32, 64  # the rows and columns that a picture of a mask shows
MANY = 120  # above this number of layers, only some get a histogram
SOME = 12
_SAMPLE = 1 << 20  # the limit of a histogram is taken from about so many weights
_SHOWN = 0.05  # a layer with fewer zeros has no picture of its mask
_TAIL = 0.005  # the share of the largest weights that lies outside


@dataclass(frozen=True)
class Weight:
    """One weight of a model, as a matrix of outputs by inputs."""

    name: str
    kind: str
    shape: tuple[int, ...]
    matrix: Tensor
    channels: int
    format: str = ""


def weights(model: nn.Module) -> dict[str, Weight]:
    """The weights of a model that can be read, by the name of their layer, in the order of the modules."""
    found = [_weight(*each) for each in weights_of(model) if unreadable(each[2]) is None]
    return {each.name: each for each in found}


def unread(model: nn.Module) -> dict[str, str]:
    """The weights that cannot be read, and why."""
    return {name: why for name, _, tensor, _ in weights_of(model) if (why := unreadable(tensor)) is not None}


def _weight(name: str, owner: nn.Module, tensor: Tensor, form: str) -> Weight:
    shape = tuple(tensor.shape)
    matrix = layout_of(owner, shape).matrix(tensor.detach())
    kind = owner.stood if isinstance(owner, Packed) else type(owner)
    table = issubclass(kind, nn.Embedding)
    form = "" if form == "dense" or not isinstance(owner, Compressed) else form
    return Weight(name.removesuffix(".weight"), kind.__name__, shape, matrix, matrix.shape[table], form)


def rows(
    before: nn.Module | None, after: nn.Module | None, flops: tuple[Flops | None, Flops | None], order: Sequence[str]
) -> list[LayerRow]:
    """One row per weight of the model before, or of the model now if the other is not known."""
    now = weights(after) if after is not None else {}
    was = weights(before) if before is not None else now
    places = _renamed(before, after, was)
    ranks = {name: rank for rank, name in reversed(list(enumerate(order)))}
    names = sorted(was, key=lambda name: ranks.get(_module(name, ranks), len(ranks)))
    drawn = set(names if len(names) <= MANY else spaced(names, SOME))
    known = before is not None
    return [
        _row(was[name], now.get(places[name]) if after is not None else was[name], places[name], flops, known, name in drawn)
        for name in names
    ]


def _row(
    was: Weight, now: Weight | None, place: str, flops: tuple[Flops | None, Flops | None], known: bool, drawn: bool
) -> LayerRow:
    alive = 0 if now is None else _alive(now)
    counted = [None if one is None else one.of_weight(name) for one, name in zip(flops, (was.name, place))]
    return LayerRow(
        name=was.name,
        kind=was.kind,
        before=list(was.shape),
        after=None if now is None else list(now.shape),
        channels=[was.channels, alive],
        kept=0 if now is None else int(torch.count_nonzero(now.matrix)),
        pattern="" if now is None else _pattern(now.matrix),
        flops_before=counted[0],
        flops_after=0 if now is None and counted[1] is not None else counted[1],
        format="" if now is None else now.format,
        hist=_histogram(was.matrix if known else None, None if now is None else now.matrix) if drawn else None,
    )


def _alive(weight: Weight) -> int:
    """The number of outputs with a weight that is not zero."""
    axis = 0 if weight.channels == weight.matrix.shape[1] and weight.kind.startswith("Embedding") else 1
    return int((weight.matrix != 0).any(axis).sum())


def _pattern(matrix: Tensor) -> str:
    found = zeros_of(matrix)
    return found.pattern if found.sparsity > FEW else "dense"


def _module(name: str, known: Mapping[str, Any]) -> str:
    """The module that owns a weight: the layer itself, or its parent for a weight with a name of its own."""
    return name if name in known else name.rpartition(".")[0]


def _renamed(before: nn.Module | None, after: nn.Module | None, names: Iterable[str]) -> dict[str, str]:
    """The name that each layer has now. Removing blocks from a list renumbers those behind them."""
    places = {name: name for name in names}
    if before is None or after is None:
        return places
    earlier = len(history(before))
    for cuts in history(after)[earlier:]:
        for path, gone in cuts.drop.items():
            places = {name: _moved(place, f"{bare_name(path)}.", set(gone)) for name, place in places.items()}
    return places


def _moved(name: str, prefix: str, gone: set[int]) -> str:
    """The name after the blocks `gone` were removed from the list; "" inside one of them."""
    number, _, rest = name.removeprefix(prefix).partition(".")
    if not name.startswith(prefix) or not number.isdecimal():
        return name
    return "" if int(number) in gone else f"{prefix}{int(number) - sum(each < int(number) for each in gone)}.{rest}".rstrip(".")


def plan_rows(plan: Plan) -> list[LayerRow]:
    """The rows that a plan gives without a model: shapes and masks."""
    found = []
    for line in plan.layers:
        mask = _as_matrix(plan.masks[line.name])
        name, shape, alive = line.name.removesuffix(".weight"), list(line.shape), int(mask.any(1).sum())
        found.append(LayerRow(name, "", shape, shape, [len(mask), alive], line.kept, _pattern(mask)))
    return found


def _as_matrix(mask: Tensor) -> Tensor:
    return mask.reshape(mask.shape[0] if mask.ndim > 1 else 1, -1)


def spaced(names: Sequence[str], count: int) -> list[str]:
    """So many of the names, evenly spaced, with the first and the last."""
    if len(names) <= count:
        return list(names)
    return [names[round(i * (len(names) - 1) / (count - 1))] for i in range(count)]


# --- histograms and masks ---------------------------------------------------------------------------------------------------


def _histogram(before: Tensor | None, after: Tensor | None) -> Histogram | None:
    first = before if before is not None else after
    if first is None or not first.is_floating_point():
        return None
    flat = first.detach().reshape(-1)
    sizes = flat[:: max(1, flat.numel() // _SAMPLE)].abs().float()
    limit = float(sizes.kthvalue(max(1, round((1 - _TAIL) * sizes.numel()))).values)
    if not 0 < limit < float("inf"):
        return None
    return Histogram(limit, _bins(before, limit), _bins(after, limit))


def _bins(values: Tensor | None, limit: float) -> list[int] | None:
    """The number of nonzero values in each bin."""
    if values is None:
        return None
    flat = values.detach().reshape(-1).float()
    return [int(count) for count in torch.histc(flat[flat != 0], BINS, -limit, limit).tolist()]


def masks_of(model: nn.Module | None, layers: Sequence[LayerRow], plan: Plan | None) -> list[Mask]:
    """Pictures of up to three layers with zeros: one for each pattern, or the first, middle and last of one pattern."""
    zeros = [layer for layer in layers if layer.zeros > _SHOWN and min(layer.channels) > 1]
    patterns = dict.fromkeys(layer.pattern for layer in zeros)
    if len(patterns) > 1:
        ranked = sorted(patterns, key=lambda pattern: -sum(layer.pattern == pattern for layer in zeros))[:3]
        chosen = [max((layer for layer in zeros if layer.pattern == pattern), key=_worth_showing) for pattern in ranked]
    else:
        chosen = [max(part, key=_worth_showing) for part in _thirds(zeros) if part]
    now = weights(model) if model is not None else {}
    found = []
    for layer in chosen:
        if layer.name in now:
            found.append(picture(layer.pattern, layer.name, now[layer.name].matrix != 0))
        elif plan is not None:
            name = next(name for name in plan.masks if name.removesuffix(".weight") == layer.name)
            found.append(picture(layer.pattern, layer.name, _as_matrix(plan.masks[name])))
    return found


def other_masks(layer: str, plans: Mapping[str, Plan]) -> list[Mask]:
    """Pictures of the same layer under other plans."""
    found = []
    for label, plan in plans.items():
        name = next((name for name in plan.masks if name.removesuffix(".weight") == layer), None)
        if name is not None:
            found.append(picture(label, layer, _as_matrix(plan.masks[name])))
    return found


def _thirds(layers: Sequence[LayerRow]) -> list[Sequence[LayerRow]]:
    size = -(-len(layers) // 3)
    return [layers[i : i + size] for i in range(0, len(layers), size)] if size else []


def _worth_showing(layer: LayerRow) -> tuple[bool, float]:
    """Wide enough to fill the picture, and about half zeros, where a pattern is easiest to see."""
    return layer.params_after >= CROP[0] * CROP[1], -abs(layer.zeros - 0.5)


def picture(label: str, layer: str, kept: Tensor) -> Mask:
    """The upper left corner of a mask."""
    corner = kept[: CROP[0], : CROP[1]]
    bits = "".join("1" if bit else "0" for bit in corner.reshape(-1).tolist())
    share = 1 - int(torch.count_nonzero(kept)) / kept.numel()
    return Mask(label, layer, *corner.shape, bits=bits, zeros=share, cropped=corner.shape != kept.shape)
