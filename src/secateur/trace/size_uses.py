"""Finds where integers in the model's code are used as sizes: a function mode that sees calls as the model wrote them.

In `x.view(b, n, self.heads, -1)` the integer `self.heads` has to be the size of dim 2 of the result. That is a `SizeUse`. The
mode also returns tagged sizes from `x.shape`, `x.size()` and `x.numel()`, so that arithmetic on them is recorded.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ..axes import AxisSize, Expr, Prod, SizeUse, attr_place, attributes_in
from ..ops import argument, in_formula, lookup_function, reads, view_sizes
from . import recurrent
from .provenance import Tagged, source_of
from .tracer import Tracer

_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_SMALL = 8  # a plain number up to this, used as a size, is taken to number the parts of a fused axis


class SizeUseMode(TorchFunctionMode):
    """Returns tagged sizes, and records each integer that a call uses as the size of an axis."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer, self.journal = tracer, tracer.journal

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "").partition(".")[0]  # of torch.ops.aten.slice.Tensor: slice
        self.tracer.literal_sizes, self.tracer.literal_index = _literals(name, args, kwargs), _listed(name, args)
        if name in recurrent.LAYERS:
            with torch._C.DisableTorchFunction():
                recurrent.separate_layers(self.tracer, tuple(args))
        given = args
        if name == "multi_head_attention_forward":  # its checks compare sizes with each other; the reader states what it needs
            given = [int(v) if isinstance(v, Tagged) else v for v in args]
        try:
            out = func(*given, **kwargs)
        finally:
            self.tracer.literal_sizes, self.tracer.literal_index = frozenset(), ()
        try:
            return self.read(func, name, tuple(args), kwargs, out)
        except Exception as error:
            self.tracer.record.errors.append(f"reading the integers of {name}: {type(error).__name__}: {error}")
            return out

    def use(self, call: str, value: Any, axis: Expr | None) -> None:
        """Records that `value`, an argument of `call`, is the size of `axis`."""
        if isinstance(value, int) and not isinstance(value, bool) and int(value) > 1 and axis is not None:
            if int(value) != axis.size:
                raise ValueError(f"{int(value)} met an axis of size {axis.size}")
            self.tracer.record.size_uses.append(SizeUse(self.journal.module, call, source_of(value), axis, int(value)))

    def axes(self, tensor: Any) -> list[Expr]:
        return self.tracer.axes_of(tensor)

    def is_tagged(self, value: Any) -> bool:
        return isinstance(value, Tagged)

    def in_formula(self, value: Any, call: str) -> None:
        if isinstance(value, Tagged):
            self.journal.used(value.source, call)

    def compared(self, function: Callable[[Any, Any], Any], left: Any, right: Any, outcome: bool) -> None:
        self.journal.compared(function, left, right, outcome)

    def equal_counts(self, parts: Sequence[Expr]) -> None:
        self.tracer.equal_counts(parts)

    def uses_size(self, e: Expr, how: str) -> None:
        self.tracer.uses_size(e, how)

    def sized(self, value: int, axis: Expr) -> Tagged:
        return Tagged(int(value), AxisSize(axis), self.journal)

    def read(self, func: Any, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> Any:
        """Reads the integers among the arguments of a call, and returns its result, with tagged sizes."""
        reader = lookup_function(name).integers
        if reader is in_formula:
            in_formula(self, name, a, k, out)
            return out
        if name in ("__get__", "size", "numel", "nelement"):
            return self.tagged_sizes(func, name, a, k, out)
        for value in (*a, *k.values()):
            for number in value if isinstance(value, tuple | list) else (value,):
                for attr in attributes_in(number.source) if isinstance(number, Tagged) else ():
                    self.tracer.record.passed[attr_place(attr, self.journal.module)] = attr
        if reader is not None:
            reader(self, name, a, k, out)
        return out

    def tagged_sizes(self, func: Any, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> Any:
        """Returns the result of `shape`, `size` or `numel` with tagged integers."""
        if not a or not isinstance(a[0], Tensor) or (name == "__get__" and func != _SHAPE):
            return out
        axes = self.axes(a[0])
        if name in ("numel", "nelement"):
            return self.sized(out, Prod(axes))
        if isinstance(out, int):
            return self.sized(out, axes[int(a[1] if len(a) > 1 else k["dim"])])
        return torch.Size([self.sized(s, e) for s, e in zip(out, axes)])


def _literals(name: str, a: Sequence[Any], k: dict[str, Any]) -> frozenset[int]:
    """Returns the positions of small sizes that are plain numbers in the code."""
    if name in ("view", "reshape"):
        sizes, first = view_sizes(a, k), 0
    elif name == "unflatten":
        first, sizes = int(argument(tuple(a), k, 1, "dim")), argument(tuple(a), k, 2, "sizes")
        first %= a[0].dim()
    else:
        return frozenset({2}) if name == "multi_head_attention_forward" else frozenset()
    return frozenset(first + i for i, s in enumerate(sizes) if type(s) is int and 1 < s <= _SMALL)


def _listed(name: str, a: Sequence[Any]) -> tuple[int, ...]:
    """Returns the list of plain numbers in an index such as `x[..., [-1]]`, if it is the only list among slices."""
    indices = (a[1] if isinstance(a[1], tuple) else (a[1],)) if name == "__getitem__" else ()
    lists = [i for i in indices if isinstance(i, list) and i and all(type(v) is int for v in i)]
    rest = [i for i in indices if not isinstance(i, list)]
    return tuple(lists[0]) if len(lists) == 1 and all(isinstance(i, slice) or i is Ellipsis for i in rest) else ()


@reads(" ".join(recurrent.LAYERS | recurrent.CELLS))
def _recurrent(s: Any, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """States narrower than the cells mean a projection in an LSTM, so they have to stay narrower."""
    recurrent.unify_states(s.tracer, name, a, out)
    if name != "lstm":
        return
    hidden, cell = recurrent.states_of(a)
    if hidden.shape[-1] < cell.shape[-1]:
        h, c = (s.sized(t.shape[-1], s.axes(t)[-1]) for t in (hidden, cell))
        s.compared(operator.lt, h, c, True)
