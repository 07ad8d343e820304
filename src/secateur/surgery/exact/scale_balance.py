"""Does a factor on some weights cancel what formulas lose? Its power is followed through the run until it is zero again."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...ops import lookup, pointwise
from ...trace import Step
from .operands import aliases, call, once
from .wiring import Silence, tensors_in

_SAME = ("clone", "_to_copy", "contiguous", "detach", "alias", "neg", "dropout", "cat", "stack", "_unsafe_view", "index_select")
_EQUAL = ("add", "sub", "where", "maximum", "minimum", "rsub")


class Scaled(Protocol):
    """Rows of a parameter that are multiplied by the factor."""

    @property
    def name(self) -> str: ...
    @property
    def dim(self) -> int: ...
    @property
    def rows(self) -> Tensor | None: ...


class _Lost(Exception):
    """The factor went where it cannot be followed."""


def balanced(flow: Silence, scales: Sequence[Scaled], shares: Mapping[int, float]) -> bool:
    """Whether everything is as it was when these rows have the factor once and step i has it `shares[i]` times by itself."""
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
                        return False  # it may be what the model answers
                    seen.update(fresh)
                    for j in fresh:
                        heapq.heappush(queue, j)
    except (_Lost, RuntimeError):
        return False
    return True


def _after(flow: Silence, step: Step, powers: Mapping[int, Tensor], share: float | None) -> list[Tensor]:
    """The powers of the factor in the results of a step."""
    kind = step.kind.rstrip("_")
    shapes = [[e.size for e in flow.trace.axes[n]] for n in step.outs]

    def power(number: int) -> Tensor:
        return powers.get(number, torch.zeros(()).expand([e.size for e in flow.trace.axes[number]]))

    inputs = tensors_in(step)
    if "scaled_dot_product" in kind:
        query, key, value = (power(n) for n in inputs[:3])
        if _number(query) + _number(key) + (share or 0.0) or any(bool(once(power(n)).any()) for n in inputs[3:]):
            raise _Lost  # also where queries are part of the bias of the attention
        out = _even(value, 2)
        if out.shape[1] not in (1, shapes[0][1]):  # heads that share keys and values
            out = out.repeat_interleave(shapes[0][1] // out.shape[1], 1)
        out = out.expand(shapes[0])
        return [out, *(torch.zeros(()).expand(s) for s in shapes[1:])]
    if kind in ("mm", "bmm", "addmm", "baddbmm", "linear"):
        return [_product(kind, [power(n) for n in inputs], shapes[0])]
    if kind in ("mul", "div") and lookup(step.func) is pointwise:
        signs = [1.0, -1.0 if kind == "div" else 1.0]
        total = sum((s * once(power(n)) for s, n in zip(signs, inputs)), torch.zeros(())) + (share or 0.0)
        return [total.expand(shapes[0])]
    if kind in _EQUAL:
        first, *others = [once(power(n)) for n in inputs if power(n).numel()]
        if any(not torch.equal(*torch.broadcast_tensors(first, o)) for o in others) or len(inputs) < 2:
            raise _Lost
        return [torch.broadcast_tensors(first, *others)[0].expand(shapes[0])]
    if aliases(step.func)[1] or kind in _SAME:
        func = {"view": torch.ops.aten.reshape.default, "_unsafe_view": torch.ops.aten.reshape.default}.get(kind)
        out: Any = power(inputs[0]) if kind == "neg" else call(step, {n: power(n) for n in inputs}, func)
        return list(out) if isinstance(out, list | tuple) else [out]
    raise _Lost


def _product(kind: str, powers: list[Tensor], shape: list[int]) -> Tensor:
    bias = powers.pop(0) if "add" in kind else powers.pop(2) if kind == "linear" and len(powers) > 2 else None
    left, right = powers[0], powers[1].mT if kind == "linear" else powers[1]
    out = (once(_even(left, -1)) + once(_even(right, -2))).expand(shape)
    if bias is not None and not torch.equal(bias.expand(shape), out):
        raise _Lost
    return out


def _even(power: Tensor, dim: int) -> Tensor:
    """The power with the dim that is summed over kept once; it has to be the same all along it."""
    first = power.narrow(dim, 0, 1)
    if power.stride(dim) and not bool((power == first).all()):
        raise _Lost
    return first


def _number(power: Tensor) -> float:
    small = once(power)
    if not bool((small == small.flatten()[0]).all()):
        raise _Lost
    return float(small.flatten()[0])
