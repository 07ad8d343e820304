"""Moments: the Gram matrix of a layer's inputs, and their cross matrix with the inputs of another run.

Products are taken of values that were centred first, so that inputs with a large mean lose no digits, and are added up in
float64 on the device of the layer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._layers import Layout, features_axis
from .reads import listen
from .stats import bare_layer, is_float
from .targeting import Target

_TOKENS = 4096  # products over so many inputs are taken at once
_ELEMENTS = 1 << 24  # patches of a convolution are cut out in parts of about this size


@dataclass
class Products:
    """The sum of u v' over pairs of vectors, given as matrices (groups, number, size).

    Keeps the sum of (u - a)(v - b)' for fixed a and b (the means of the first pairs), and the sums of u and v.
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
            self.shifted += (one - self.a).mT @ (other - self.b)
            self.u += one.sum(1, keepdim=True, dtype=wide)
            self.v += other.sum(1, keepdim=True, dtype=wide)

    def total(self) -> Tensor:
        """The sum of u v', as (size, size), or with a leading axis if there are several groups."""
        assert self.a is not None
        assert self.b is not None
        a, b = self.a.to(self.u.dtype), self.b.to(self.u.dtype)
        whole = self.shifted + a.mT @ self.v + self.u.mT @ b - self.number * (a.mT @ b)
        return whole if whole.shape[0] > 1 else whole[0]


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


class Moments:
    """Collects `gram` (sum of x x') and `cross` (sum of x° x') of layers, while `listen` is active and the model runs.

    For `cross`, run the dense model with `dense` set to True first, then the pruned one with False, batch by batch.
    """

    def __init__(self, targets: Sequence[Target], needs: frozenset[str]):
        self.targets, self.needs = targets, needs
        self.dense = False
        self._sums = {target.name: {kind: _Sums(target.layout.groups) for kind in needs} for target in targets}
        self._inputs: dict[str, list[Tensor]] = {target.name: [] for target in targets}  # of the dense run, in order

    def listen(self) -> contextlib.AbstractContextManager[None]:
        """Collects inside this context; the model comes out without hooks."""
        return listen(self.targets, self._called, self._add)

    def next_batch(self) -> None:
        """Forgets what the dense run of the batch before left."""
        for inputs in self._inputs.values():
            inputs.clear()

    def table(self) -> dict[str, dict[str, Tensor]]:
        """The sums, by layer and kind; the collector holds them no longer."""
        if unseen := [name for name, sums in self._sums.items() if not all(one.parts for one in sums.values())]:
            raise ValueError(f"{unseen[0]!r} saw no input while the data ran through; exclude it, or use another method")
        sums, self._sums = self._sums, {}
        return {name: {kind: one.total() for kind, one in own.items()} for name, own in sums.items()}

    def _called(self, target: Target, attribute: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._add(target, slice(None), self._read(module, attribute, target, args, kwargs))

    def _add(self, target: Target, groups: slice, x: Tensor) -> None:
        """Adds inputs (groups, number, columns), or one input that some groups of rows have in common."""
        x = x if x.ndim == 3 and groups == slice(None) else _wide(x).reshape(1, -1, target.layout.cols)
        if self.dense:
            self._inputs[target.name].append(x)
            return
        sums = self._sums[target.name]
        if "gram" in sums:
            sums["gram"].add(groups, x, x)
        if "cross" in sums:
            before = self._inputs[target.name]
            if not before or before[0].shape != x.shape:
                raise ValueError(f"{target.name!r} read inputs of another number or shape in the dense model")
            sums["cross"].add(groups, before.pop(0), x)

    def _read(self, module: nn.Module, attribute: str, target: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        try:
            return layer_inputs(module, attribute, target.layout, args, kwargs)
        except Exception as error:
            kind = type(module).__name__
            raise ValueError(f"the inputs of {target.name!r} cannot be read: {kind} is not linear in it") from error


def layer_inputs(module: nn.Module, attribute: str, layout: Layout, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """What the rows of a weight matrix are multiplied with in one call of its layer, as (groups, number, columns) in float32.

    A layer that is linear in its weight returns exactly that when the identity is its weight (for a convolution: the unfolded
    patches), so no layer type needs code of its own here. Layers that multiply their input with a matrix are spared that
    product: `nn.Linear`, and types that store a matrix as (in, out).
    """
    inputs = [value for value in (*args, *kwargs.values()) if is_float(value)]
    if (layout.product or (len(layout.shape) == 2 and isinstance(module, nn.Linear))) and len(inputs) == 1:
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
