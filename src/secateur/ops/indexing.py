"""Operators that look entries up: axes that data addresses keep all their units, the others pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..axes import ONE, Expr, closed, freeze, fresh, norm, split_at, unify
from .record import MOVES, Axes, Call, broadcast, freeze_all, frozen_like, operator

BY_VALUE = "units are addressed by value"


@operator("embedding", values="moves", zero=True)
def embedding(c: Call) -> Axes:
    w = c.axes(c.weight)
    freeze(w[0], f"{BY_VALUE} (rows of a lookup table)")
    c.produce(c.weight, 1)
    return [*c.axes(c.indices), *w[1:]]


@operator("_embedding_bag _embedding_bag_forward_only", values="computes", zero=True, positions=(1, 2, 3))
def embedding_bag(c: Call) -> list[Axes]:
    w = c.axes(c.weight)
    freeze(w[0], f"{BY_VALUE} (rows of a lookup table)")
    c.produce(c.weight, 1)
    freeze_all(c.axes(c.get("per_sample_weights")), "one weight per index")
    return [[fresh(c.out[0].shape[0]), w[1]], *([fresh(s) for s in o.shape] for o in c.out[1:])]


@operator("index_select", **MOVES)
def index_select(c: Call) -> Axes:
    x = c.axes(c.self)
    d = c.dim % len(x) if x else 0
    if x:
        freeze(x[d], f"{BY_VALUE} (index_select)")
        x[d] = c.axes(c.index)[0] if c.index.dim() else ONE
    return x


def _walk(indices: list[Tensor | None], x: Axes, why: str) -> tuple[list[tuple[int, Expr]], list[int]]:
    """The axes that no index touches, with their places, and the places of the indices; touched axes freeze."""
    kept: list[tuple[int, Expr]] = []
    places: list[int] = []
    d = 0
    for index in [*indices, *[None] * len(x)]:
        if d >= len(x):
            break
        if index is None:
            kept.append((d, x[d]))
            d += 1
            continue
        width = index.dim() if index.dtype in (torch.bool, torch.uint8) else 1
        freeze_all(x[d : d + width], why)
        places.append(d)
        d += width
    return kept, places


def _by_position(c: Call, indices: list[Tensor | None]) -> Axes | None:
    """Indexing with a list that stands in the code: only as much of the axis is fixed as the numbers count over, from
    either end."""
    numbers, used = c.ledger.literal_index, [d for d, i in enumerate(indices) if i is not None]
    if len(used) != 1 or len(numbers) != c.out.shape[used[0]] or not (max(numbers) < 0 or min(numbers) >= 0):
        return None
    x, d = c.axes(c.self), used[0]
    halves = split_at(x[d], max(numbers) + 1 if numbers[0] >= 0 else x[d].size + min(numbers))
    if halves is None:
        return None
    freeze(halves[0] if numbers[0] >= 0 else halves[1], "addressed by position")
    return [*x[:d], fresh(len(numbers), "addressed by position"), *x[d + 1 :]]


@operator("index _unsafe_index", values="moves", zero=True)
def index(c: Call) -> Axes | None:
    indices = list(c.indices)
    placed = _by_position(c, indices) if c.ledger.literal_index else None
    if placed is not None:
        return placed
    kept, places = _walk(indices, c.axes(c.self), f"{BY_VALUE} (indexing)")
    used = [i for i in indices if i is not None]
    masks = [i for i in used if i.dtype in (torch.bool, torch.uint8)]
    if masks and len(used) > 1:
        return None
    before = [e for d, e in kept if d < places[0]]
    if masks:
        got: Axes = [fresh(c.out.shape[len(before)], f"{BY_VALUE} (boolean mask)")]
    else:
        got = broadcast(*[c.axes(i) for i in used])
    positions = [i for i, t in enumerate(indices) if t is not None]
    adjacent = positions == list(range(positions[0], positions[0] + len(positions)))
    if adjacent:
        return [*before, *got, *(e for d, e in kept if d > places[0])]
    return [*got, *(e for _, e in kept)]


@operator("index_put index_put_ _index_put_impl_ _unsafe_index_put", values="computes", zero=True)
def index_put(c: Call) -> Axes:
    x, values = c.axes(c.self), c.axes(c.values)
    kept, _ = _walk(list(c.indices), x, f"{BY_VALUE} (written by index)")
    rest = [e for _, e in kept]
    while rest and values and values[-1].size in (1, rest[-1].size):
        last, target = values.pop(), rest.pop()
        if last.size != 1:
            unify(closed(last), closed(target))
    freeze_all([*values, *(rest if values else [])], f"{BY_VALUE} (written by index)")
    return [norm(e) for e in x]


@operator("gather take_along_dim", values="moves", zero=True)
def gather(c: Call) -> Axes:
    x, i = c.axes(c.self), c.axes(c.get("index", "indices"))
    d = c.dim % len(x) if x else 0
    for k in range(len(x)):
        if k == d:
            freeze(x[k], f"{BY_VALUE} (gather)")
        elif x[k].size == i[k].size:
            unify(x[k], i[k])
        else:
            freeze_all((x[k], i[k]), "gathered in part")
    return [norm(e) for e in i]


def _writes_zero(given: Mapping[str, Any]) -> bool:
    """True unless a number other than zero is written."""
    return isinstance(given.get("value", 0), int | float) and not given.get("value", 0)


@operator("scatter scatter_ index_fill index_fill_", values="computes", zero=_writes_zero)
@operator("scatter_add scatter_add_ scatter_reduce scatter_reduce_", values="computes", zero=True)
@operator("index_add index_add_ index_copy index_copy_ index_reduce index_reduce_", values="computes", zero=True)
def scatter(c: Call) -> Axes:
    x = c.axes(c.self)
    if not x:
        return x
    d = c.dim % len(x)
    freeze(x[d], f"{BY_VALUE} ({c.name})")
    for t in (c.get("src", "source"), c.get("index")):
        if isinstance(t, Tensor) and t.dim() == len(x):
            for k, e in enumerate(c.axes(t)):
                if k != d and e.size == x[k].size:
                    unify(e, x[k])
                else:
                    freeze_all([e] if k == d else [e, x[k]], f"{BY_VALUE} ({c.name})")
    return [norm(e) for e in x]


@operator(
    "nonzero nonzero_static unique_consecutive _unique _unique2 unique_dim bincount histc masked_select repeat_interleave"
)
@operator("searchsorted masked_scatter masked_scatter_ put put_ take _pack_padded_sequence")
def by_data(c: Call) -> Axes | list[Axes]:
    """The size or the order of the result depends on the data."""
    for t in c.tensors():
        freeze_all(c.axes(t), f"{BY_VALUE} ({c.name})")
    made = [frozen_like(o, f"{BY_VALUE} ({c.name})") if isinstance(o, Tensor) else [] for o in c.outputs()]
    return made if isinstance(c.out, list | tuple) else made[0]


@operator("isin", values="computes")
def isin(c: Call) -> Axes:
    return c.axes(c.elements) if isinstance(c.get("elements"), Tensor) else [fresh(s) for s in c.out.shape]


@operator("bucketize", values="computes")
def bucketize(c: Call) -> Axes:
    freeze_all(c.axes(c.boundaries), f"{BY_VALUE} (bucketize)")
    return c.axes(c.self) if isinstance(c.self, Tensor) else []


@operator("one_hot", values="computes")
def one_hot(c: Call) -> Axes:
    return [*c.axes(c.self), fresh(c.out.shape[-1], f"{BY_VALUE} (one-hot)")]


@operator("_local_scalar_dense equal is_nonzero item is_same_size allclose")
def read_out(c: Call) -> Axes:
    """A value that Python reads may steer anything, so what it was computed from must stay as it is."""
    for t in c.tensors():
        freeze_all(c.axes(t), "values are read into Python")
    return []


@operator("_assert_async _assert_tensor_metadata sym_size sym_stride sym_numel _functional_assert_async")
def ignored(c: Call) -> Axes:
    return []
