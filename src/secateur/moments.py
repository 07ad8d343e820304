"""Moments: the Gram matrix of a layer's inputs, and their products with those of another run and with the residual stream.

Products are taken of values that were centred first, so that inputs with a large mean lose no digits, and are added up in
float64 on the device of the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ._layers import Layout, features_axis, is_product
from .reads import listen
from .stats import bare_layer, is_float
from .targeting import Target

_TOKENS = 4096  # products over so many inputs are taken at once
_ELEMENTS = 1 << 24  # patches of a convolution are cut out in parts of about this size


@dataclass
class Products:
    """The sum of u v' over pairs of vectors, given as matrices (groups, number, size).

    Keeps the sums of (u - a)(v - b)', u - a and v - b for fixed a and b (the means of the first pairs).
    """

    a: Tensor | None = None
    b: Tensor | None = None
    number: int = 0

    def add(self, u: Tensor, v: Tensor) -> None:
        wide = torch.float32 if u.device.type == "mps" else torch.float64
        if self.a is None or self.b is None:
            self.a, self.b = u.mean(1, keepdim=True), v.mean(1, keepdim=True)
            self.shifted = u.new_zeros(u.shape[0], u.shape[2], v.shape[2], dtype=wide)
            self.u, self.v = torch.zeros_like(self.a, dtype=wide), torch.zeros_like(self.b, dtype=wide)
        self.number += u.shape[1]
        for one, other in zip(u.split(_TOKENS, 1), v.split(_TOKENS, 1), strict=True):
            one, same = one - self.a, u is v
            other = one if same else other - self.b
            self.shifted += _squares(one) if same else one.mT @ other
            self.u += (total := one.sum(1, keepdim=True))
            self.v += total if same else other.sum(1, keepdim=True)

    def total(self) -> Tensor:
        """The sum of u v', as (size, size), or with a leading axis if there are several groups."""
        assert self.a is not None
        assert self.b is not None
        a, b = self.a.to(self.u.dtype), self.b.to(self.u.dtype)
        whole = self.shifted + (a.mT @ self.v + self.u.mT @ b) + self.number * (a.mT @ b)
        return whole if whole.shape[0] > 1 else whole[0]


def _squares(x: Tensor, panel: int = 128) -> Tensor:
    """x' x. Products of the columns' left half with the right half are taken once, as the matrix is symmetric."""
    size = x.shape[-1]
    if size < 2 * panel:
        return x.mT @ x
    half = size // 2
    left, right = x[..., :half], x[..., half:]
    found = x.new_empty(*x.shape[:-2], size, size)
    found[..., :half, half:] = corner = left.mT @ right
    found[..., half:, :half] = corner.mT
    found[..., :half, :half] = _squares(left, panel)
    found[..., half:, half:] = _squares(right, panel)
    return found


@dataclass
class _Sums:
    """The products of one weight: a sum for each range of its groups of rows that had inputs in common."""

    groups: int
    parts: dict[tuple[int, int], Products] = field(default_factory=dict)

    def add(self, groups: slice, u: Tensor, v: Tensor) -> None:
        first, last, _ = groups.indices(self.groups)
        self.parts.setdefault((first, last), Products()).add(u, v)

    def total(self) -> Tensor:
        if len(self.parts) == 1 and (0, self.groups) in self.parts:
            whole = self.parts[0, self.groups].total()
            return whole if whole.ndim == 3 or self.groups == 1 else whole.expand(self.groups, *whole.shape)
        found = [(first, last, part.total()) for (first, last), part in self.parts.items()]
        whole = found[0][2].new_zeros(self.groups, *found[0][2].shape[-2:])
        for first, last, total in found:
            whole[first:last] += total
        return whole


class Seen(NamedTuple):
    """One read of a target: a call of its layer, or (with `groups`) an input `x` multiplied with some of its rows.

    `streams` holds, for targets that read this input, the tensor that their output is added to.
    """

    target: Target
    attribute: str = ""
    layer: nn.Module | None = None
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] = {}
    groups: slice | None = None
    x: Tensor | None = None
    streams: Mapping[str, Tensor] = {}


class Moments:
    """Collects `gram` (sum of x x'), `cross` (sum of x° x') and `residual` (sum of (r° - r) x') of layers.

    x is an input of a layer and r the tensor that its output is added to, x° and r° those of the dense model. Reads come in
    through `listen`, while the model runs, or through `feed`. For `cross` and `residual`, run the dense model with `dense` set
    to True first, then the pruned one with False, batch by batch. `valid`, a matrix (batch, position) of bool, leaves
    positions out, such as padding. `unplaced` names the layers whose inputs do not have these positions.
    """

    def __init__(self, targets: Sequence[Target], needs: frozenset[str]):
        self.targets, self.needs = targets, needs
        self.dense = False
        self.valid: Tensor | None = None
        self.unplaced: set[str] = set()
        self._sums = {target.name: {kind: _Sums(target.layout.groups) for kind in needs - {"residual"}} for target in targets}
        self._streams: dict[str, Products] = {}
        self._inputs: dict[str, list[tuple[Tensor, dict[str, Tensor]]]] = {target.name: [] for target in targets}
        self._tokens = dict.fromkeys(self._sums, 0)

    def listen(self) -> contextlib.AbstractContextManager[None]:
        """Collects inside this context; the model comes out without hooks."""
        return listen(self.targets, self._called, self._passed)

    def next_batch(self, valid: Tensor | None = None) -> None:
        """Forgets what the dense run of the batch before left."""
        self.valid = valid
        for inputs in self._inputs.values():
            inputs.clear()

    def feed(self, seen: Seen) -> None:
        """Adds one read."""
        if seen.groups is not None:
            assert seen.x is not None
            self._passed(seen.target, seen.groups, seen.x)
        else:
            assert seen.layer is not None
            self._called(seen.target, seen.attribute, seen.layer, seen.args, dict(seen.kwargs), seen.streams)

    def table(self) -> dict[str, dict[str, Any]]:
        """The sums, by layer and kind, and the number of inputs ("tokens"); the collector holds them no longer.

        `residual` stands only in the entries of layers for which streams were given, whether or not those are targets here.
        """
        if unseen := [name for name, sums in self._sums.items() if not all(one.parts for one in sums.values())]:
            raise ValueError(f"{unseen[0]!r} saw no input while the data ran through; exclude it, or use another method")
        sums, self._sums = self._sums, {}
        table: dict[str, dict[str, Any]] = {}
        for name, own in sums.items():
            table[name] = {kind: one.total() for kind, one in own.items()} | {"tokens": self._tokens[name]}
            _check_finite(name, table[name])
        for name, products in self._streams.items():
            table.setdefault(name, {})["residual"] = products.total()
            _check_finite(name, table[name])
        self._streams = {}
        return table

    def _called(
        self,
        target: Target,
        attribute: str,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        streams: Mapping[str, Tensor] = {},
    ) -> None:
        try:
            x = layer_inputs(module, attribute, target.layout, args, kwargs)
        except Exception as error:
            kind = type(module).__name__
            raise ValueError(f"the inputs of {target.name!r} cannot be read: {kind} is not linear in it") from error
        rows = None if self.valid is None else self._positions(target, (*args, *kwargs.values()), x.shape[1])
        axis = features_axis(module)
        flat = {name: _wide(r).movedim(axis, -1).flatten(0, -2)[None] for name, r in streams.items()}
        if rows is not None:
            x, flat = x[:, rows], {name: r[:, rows] for name, r in flat.items()}
        self._add(target, slice(None), x, flat)

    def _passed(self, target: Target, groups: slice, x: Tensor) -> None:
        wide = _wide(x).reshape(1, -1, target.layout.cols)
        rows = None if self.valid is None else self._positions(target, (x,), wide.shape[1])
        self._add(target, groups, wide if rows is None else wide[:, rows], {})

    def _positions(self, target: Target, inputs: Iterable[Any], number: int) -> Tensor | None:
        """The numbers of the inputs that count, where a layer has one for each position; None where it does not."""
        assert self.valid is not None
        shape = next(tuple(value.shape) for value in inputs if is_float(value))
        if shape[:2] == tuple(self.valid.shape) or (len(shape) == 2 and shape[0] == self.valid.numel()):
            valid = self.valid
        elif shape[:2] == tuple(self.valid.mT.shape):
            valid = self.valid.mT
        else:
            valid = None
        if valid is None or valid.numel() != number:
            self.unplaced.add(target.name)
            return None
        return valid.flatten().nonzero()[:, 0]

    def _add(self, target: Target, groups: slice, x: Tensor, streams: dict[str, Tensor]) -> None:
        """Adds inputs (groups, number, columns), or one input that some groups of rows have in common."""
        before = self._inputs[target.name]
        if self.dense:
            before.append((x, streams))
            return
        if not x.shape[1]:
            return
        sums = self._sums[target.name]
        self._tokens[target.name] += x.shape[1]
        if "gram" in sums:
            sums["gram"].add(groups, x, x)
        if not self.needs & {"cross", "residual"}:
            return
        dense, dense_streams = before.pop(0) if before else (None, {})
        if "cross" in sums:
            if dense is None or dense.shape != x.shape:
                raise ValueError(f"{target.name!r} read inputs of another number or shape in the dense model")
            sums["cross"].add(groups, dense, x)
        for name, r in streams.items():
            if name in dense_streams and dense_streams[name].shape == r.shape:
                self._streams.setdefault(name, Products()).add(dense_streams[name] - r, x)


def _check_finite(name: str, entry: Mapping[str, Any]) -> None:
    """Raises where a sum is not finite."""
    for kind in ("gram", "cross", "residual"):
        if kind in entry and not bool(entry[kind].isfinite().all()):
            raise ValueError(
                f"the inputs of {name!r} are NaN or infinite, or so large that their products are; look at the data and at "
                "the weights of the layers before it"
            )


def layer_inputs(module: nn.Module, attribute: str, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the rows of a weight matrix are multiplied with in one call of its layer, as (groups, number, columns) in float32.

    A layer that is linear in its weight returns exactly that when the identity is its weight (for a convolution: the unfolded
    patches), so no layer type needs code of its own here. Layers that multiply their input with a matrix are spared that
    product: `nn.Linear`, and types that store a matrix as (in, out).
    """
    inputs = [value for value in (*args, *kwargs.values()) if is_float(value)]
    if is_product(module, layout) and len(inputs) == 1:
        return _wide(inputs[0]).reshape(1, -1, layout.cols)
    outputs = layout.groups * layout.cols
    shape = (layout.shape[0], layout.cols, *layout.shape[2:]) if layout.flip else (outputs, *layout.shape[1:])
    identity = torch.eye(layout.cols, dtype=_wide(inputs[0]).dtype, device=inputs[0].device).repeat(layout.groups, 1)
    layer = bare_layer(module, {attribute: Layout(shape, layout.flip, layout.groups).restore(identity)})
    axis = features_axis(module)

    def read(*values: Any, **named: Any) -> Tensor:
        with torch.no_grad(), torch.autocast(inputs[0].device.type, enabled=False):
            read = layer.forward(*map(_wide, values), **{key: _wide(value) for key, value in named.items()})
        return read.movedim(axis, -1).reshape(-1, layout.groups, layout.cols).transpose(0, 1)

    batched = len(args) == 1 and not kwargs and args[0].ndim > -axis and args[0].shape[0] > 1
    if not batched:
        return read(*args, **kwargs)
    first = read(args[0][:1])
    step = max(_ELEMENTS // max(first.numel(), 1), 1)
    return torch.cat([first, *(read(part) for part in args[0][1:].split(step))], 1)


def _wide(value: Any) -> Any:
    return value.detach().to(torch.promote_types(value.dtype, torch.float32)) if is_float(value) else value
