"""Checks that rescaling some weights leaves the model's output unchanged.

The power of the factor is followed through the run, until it is zero again everywhere.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops import Attention, Contraction
from ...trace import Step
from .values import once, operands, run_step
from .weights import MaskedWeights


class Scaled(Protocol):
    """Rows of a parameter that are multiplied by the factor."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def rows(self) -> Tensor | None: ...


class _Lost(Exception):
    """The factor cannot be followed any further."""


def balanced(flow: MaskedWeights, scales: Sequence[Scaled], shares: Mapping[int, float]) -> bool:
    """Whether the output stays the same when these rows are multiplied by the factor, and step i by its power `shares[i]`."""
    powers: dict[int, Tensor] = {}
    for scale in scales:
        number = flow.numbers[scale.name]
        sizes = [e.size for e in flow.trace.axes[number]]
        rows = torch.ones(sizes[scale.dim]) if scale.rows is None else scale.rows.to(torch.get_default_dtype())
        powers[number] = rows.reshape([-1 if d == scale.dim else 1 for d in range(len(sizes))]).expand(sizes)
    queue = sorted({*shares, *(i for n in powers for i in flow.readers.get(n, ()))})
    seen = set(queue)
    try:
        while queue:
            i = heapq.heappop(queue)
            step = flow.trace.steps[i]
            for number, power in zip(step.outs, _after(flow, step, powers, shares.get(i))):
                if bool(once(power).any()):
                    powers[number] = power
                    fresh = [j for j in flow.readers.get(number, ()) if j not in seen]
                    if not flow.readers.get(number):
                        return False  # the model may return it
                    seen.update(fresh)
                    for j in fresh:
                        heapq.heappush(queue, j)
    except (_Lost, RuntimeError):
        return False
    return True


def _after(flow: MaskedWeights, step: Step, powers: Mapping[int, Tensor], share: float | None) -> list[Tensor]:
    """The powers of the factor in the outputs of a step."""
    operator = step.operator
    shapes = [[e.size for e in flow.trace.axes[n]] for n in step.outs]

    def power(number: int) -> Tensor:
        return powers.get(number, torch.zeros(()).expand([e.size for e in flow.trace.axes[number]]))

    given = [power(n) for n in step.inputs]
    if isinstance(operator.values, Attention):
        return _attention(given, shapes, share or 0.0)
    if isinstance(operator.values, Contraction):
        values = operator.values
        left, right, bias = (None if n is None else power(n) for n in operands(step, values.left, values.right, values.bias))
        if left is None or right is None:
            raise _Lost
        return [_product(left, right, bias, values.inner, shapes[0])]
    if operator.factor in ("product", "quotient"):
        signs = [1.0, -1.0 if operator.factor == "quotient" else 1.0]
        total = sum((s * once(p) for s, p in zip(signs, given)), torch.zeros(())) + (share or 0.0)
        return [total.expand(shapes[0])]
    if operator.factor == "equal":
        one, *others = [once(p) for p in given if p.numel()]
        if any(not torch.equal(*torch.broadcast_tensors(one, o)) for o in others) or len(given) < 2:
            raise _Lost
        return [torch.broadcast_tensors(one, *others)[0].expand(shapes[0])]
    if operator.factor == "same":
        out: Any = given[0] if operator.values == "elementwise" else run_step(step, dict(zip(step.inputs, given)))
        return list(out) if isinstance(out, list | tuple) else [out]
    raise _Lost


def _attention(given: Sequence[Tensor], shapes: Sequence[Sequence[int]], share: float) -> list[Tensor]:
    query, key, value, *rest = given
    if _number(query) + _number(key) + share or any(bool(once(p).any()) for p in rest):
        raise _Lost  # also where queries are part of the bias of the attention
    out = _even(value, 2)
    if out.shape[1] not in (1, shapes[0][1]):  # heads that share keys and values
        out = out.repeat_interleave(shapes[0][1] // out.shape[1], 1)
    return [out.expand(shapes[0]), *(torch.zeros(()).expand(s) for s in shapes[1:])]


def _product(left: Tensor, right: Tensor, bias: Tensor | None, inner: tuple[int, int], shape: Sequence[int]) -> Tensor:
    right = right.mT if inner[1] == -1 else right
    out = (once(_even(left, -1)) + once(_even(right, -2))).expand(shape)
    if bias is not None and not torch.equal(bias.expand(shape), out):
        raise _Lost
    return out


def _even(power: Tensor, dim: int) -> Tensor:
    """The power with one entry along the dim that is summed over; it has to be the same all along it."""
    first = power.narrow(dim, 0, 1)
    if power.stride(dim) and not bool((power == first).all()):
        raise _Lost
    return first


def _number(power: Tensor) -> float:
    small = once(power)
    if not bool((small == small.flatten()[0]).all()):
        raise _Lost
    return float(small.flatten()[0])
