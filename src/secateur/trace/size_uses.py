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

from ..axes import Arithmetic, AxisSize, Expr, Prod, SizeUse, attr_place, attributes_in, freeze, reshape, split_at, take
from . import recurrent
from .provenance import Tagged, source_of
from .tracer import Tracer

_SHAPE = torch.Tensor.shape.__get__  # type: ignore[attr-defined]
_SMALL = 8  # a plain number up to this, used as a size, is taken to number the parts of a fused axis
_FACTORIES = frozenset(
    ["zeros", "ones", "empty", "full", "rand", "randn", "randint", "new_zeros", "new_ones", "new_full", "new_empty"]
)
_FORMULAS = frozenset(
    ["mul", "div", "add", "sub", "true_divide", "pow", "mul_", "div_", "add_", "sub_", "rsub", "floor_divide", "remainder"]
    + ["masked_fill", "clamp", "sqrt", "tensor", "as_tensor", "scalar_tensor"]
    + [f"__{r}{name}__" for name in ("mul", "truediv", "add", "sub", "pow", "floordiv") for r in ("", "r")]
)


class SizeUseMode(TorchFunctionMode):
    """Returns tagged sizes, and records each integer that a call uses as the size of an axis."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self.tracer, self.journal = tracer, tracer.journal

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
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

    def sized(self, value: int, axis: Expr) -> Tagged:
        return Tagged(int(value), AxisSize(axis), self.journal)

    def read(self, func: Any, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> Any:
        """Reads the integers among the arguments of a call, and returns its result, with tagged sizes."""
        if name in _FORMULAS:
            for value in (*a, *k.values()):
                if isinstance(value, Tagged):
                    self.journal.used(value.source, name)
            return out
        if name in ("__get__", "size", "numel", "nelement"):
            return self.tagged_sizes(func, name, a, k, out)
        for value in (*a, *k.values()):
            for number in value if isinstance(value, tuple | list) else (value,):
                for attr in attributes_in(number.source) if isinstance(number, Tagged) else ():
                    self.tracer.record.passed[attr_place(attr, self.journal.module)] = attr
        reader = READERS.get(name)
        if reader is not None:
            reader(self, name, a, k, out)
        elif name in _FACTORIES and isinstance(out, Tensor):
            for value, axis in zip(_factory_sizes(name, a, k), self.axes(out)):
                self.use(name, value, axis)
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


def _flat(values: Sequence[Any]) -> list[Any]:
    return list(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else list(values)


def _arg(a: tuple[Any, ...], k: dict[str, Any], position: int, *names: str, default: Any = None) -> Any:
    return a[position] if len(a) > position else next((k[n] for n in names if n in k), default)


def _view_sizes(a: Sequence[Any], k: dict[str, Any]) -> list[Any]:
    return _flat(a[1:]) if len(a) > 1 else list(k.get("shape", k.get("size", ())))


def _factory_sizes(name: str, a: tuple[Any, ...], k: dict[str, Any]) -> list[Any]:
    rest = a[1:] if a and isinstance(a[0], Tensor) else a
    if name in ("full", "new_full"):
        rest = rest[:1]
    elif name == "randint":
        rest = tuple(x for x in rest if isinstance(x, tuple | list))[:1]
    return _flat(rest) or list(k.get("size", ()))


def _literals(name: str, a: Sequence[Any], k: dict[str, Any]) -> frozenset[int]:
    """Returns the positions of small sizes that are plain numbers in the code."""
    if name in ("view", "reshape"):
        sizes, first = _view_sizes(a, k), 0
    elif name == "unflatten":
        first, sizes = int(_arg(tuple(a), k, 1, "dim")), _arg(tuple(a), k, 2, "sizes")
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


SizeReader = Callable[[SizeUseMode, str, tuple[Any, ...], dict[str, Any], Any], None]
READERS: dict[str, SizeReader] = {}


def reads(names: str) -> Callable[[SizeReader], SizeReader]:
    """Registers a reader: it says which integers in the arguments of these functions are sizes of which axes."""

    def register(reader: SizeReader) -> SizeReader:
        READERS.update(dict.fromkeys(names.split(), reader))
        return reader

    return register


@reads("view reshape expand broadcast_to")
def _view(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    sizes = _view_sizes(a, k)
    if isinstance(out, Tensor) and all(isinstance(n, int) for n in sizes):
        for value, axis in zip(sizes, s.axes(out)):
            s.use(name, value, axis)


@reads("unflatten")
def _unflatten(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    first = int(_arg(a, k, 1, "dim")) % a[0].dim()
    for i, value in enumerate(_arg(a, k, 2, "sizes")):
        s.use(name, value, s.axes(out)[first + i])


@reads("split split_with_sizes")
def _split(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    sizes = _arg(a, k, 1, "split_size_or_sections", "split_size", "split_sizes")
    d = int(_arg(a, k, 2, "dim", default=0))
    for value, piece in zip(sizes if isinstance(sizes, tuple | list) else [sizes] * len(out), out):
        s.use(name, value, s.axes(piece)[d])


@reads("tensor_split hsplit vsplit dsplit")
def _tensor_split(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """Splits at given indices, or into a given number of pieces. This mode does not see the slices that torch makes."""
    where = _arg(a, k, 1, "indices_or_sections", "indices", "sections")
    given = {"vsplit": 0, "hsplit": min(1, a[0].dim() - 1), "dsplit": 2}.get(name)
    d = int(_arg(a, k, 2, "dim", default=0) if given is None else given)
    parts = [s.axes(piece)[d] for piece in out]
    if isinstance(where, tuple | list):
        for bound in where:
            _bounds(s, name, slice(bound, None), s.axes(a[0])[d])
    elif len({e.size for e in parts}) == 1 and isinstance(where, int):
        s.tracer.equal_counts(parts)
    else:
        for part in parts:
            freeze(part, "split into uneven pieces by one number")


@reads("expand_as view_as reshape_as")
def _as(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for axis, other in zip(s.axes(out), s.axes(_arg(a, k, 1, "other"))):
        s.use(name, s.sized(other.size, other), axis)


@reads("broadcast_tensors")
def _broadcast(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for column in zip(*(reversed(s.axes(t)) for t in out)):
        sources = [e for t in _flat(a) for e in s.axes(t) if any(e is other for other in column)]
        for axis in column if sources else ():
            s.use(name, s.sized(axis.size, sources[0]), axis)


@reads("numpy __array__ tolist")
def _leaves(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for axis in s.axes(a[0]):
        freeze(axis, "values are read into Python")


@reads("narrow")
def _narrow(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    d, start, length = (_arg(a, k, i + 1, n) for i, n in enumerate(("dim", "start", "length")))
    s.use(name, length, s.axes(out)[int(d)])
    if isinstance(start, int) and int(start) > 0:
        s.use(name, start, take(s.axes(a[0])[int(d)], 0, int(start)))


@reads("__getitem__ __setitem__")
def _getitem(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    indices = a[1] if isinstance(a[1], tuple) else (a[1],)
    if any(isinstance(i, Tensor) and i.dtype == torch.bool for i in indices):
        return
    used = sum(i is not None and i is not Ellipsis and not isinstance(i, bool) for i in indices)
    d = 0
    for i in indices:
        if i is Ellipsis:
            d += a[0].dim() - used
        elif i is not None:
            if isinstance(i, slice):
                _bounds(s, name, i, s.axes(a[0])[d])
            d += 1


def _bounds(s: SizeUseMode, name: str, i: slice, axis: Expr) -> None:
    for bound in (i.start, i.stop):
        if not isinstance(bound, int):
            continue
        at = int(bound)
        if 0 < at < axis.size:
            halves = split_at(axis, at)
            s.use(name, bound, halves and halves[0])
        elif -axis.size < at < 0:
            halves = split_at(axis, axis.size + at)
            s.use(name, -bound, halves and halves[1])
        elif at >= axis.size > 1 and isinstance(bound, Tagged):  # past the end, where it has to stay
            s.journal.compared(operator.ge, bound, s.sized(axis.size, axis), True)


@reads("layer_norm rms_norm")
def _layer_norm(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    shape = _arg(a, k, 1, "normalized_shape")
    for value, axis in zip(shape, s.axes(a[0])[-len(shape) :]):
        s.use(name, value, axis)


@reads("group_norm")
def _group_norm(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = _arg(a, k, 1, "num_groups")
    channels = s.axes(a[0])[1]
    s.use(name, groups, reshape([channels], [int(groups), channels.size // int(groups)])[0])


@reads("batch_norm")
def _batch_norm(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    if _arg(a, k, 5, "training", default=False):  # torch raises an error for statistics of a single value
        rest = Prod([e for i, e in enumerate(s.axes(a[0])) if i != 1])
        s.journal.compared(operator.ne, s.sized(rest.size, rest), 1, True)


@reads("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = _arg(a, k, 6, "groups", default=1)
    first = s.axes(_arg(a, k, 1, "weight"))[0]
    if isinstance(groups, int) and int(groups) > 1:
        s.use(name, groups, reshape([first], [int(groups), first.size // int(groups)])[0])


@reads("channel_shuffle native_channel_shuffle")
def _channel_shuffle(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = _arg(a, k, 1, "groups")
    channels = s.axes(a[0])[1]
    s.use(name, groups, reshape([channels], [int(groups), channels.size // int(groups)])[0])


@reads("repeat_interleave")
def _repeat_interleave(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    times, d = _arg(a, k, 1, "repeats"), _arg(a, k, 2, "dim")
    if isinstance(times, int) and d is not None and isinstance(out, Tensor):
        axis = s.axes(out)[int(d)]
        s.use(name, times, reshape([axis], [axis.size // int(times), int(times)])[1])


@reads("repeat tile")
def _repeat(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for value, axis in zip(reversed(_flat(a[1:])), reversed(s.axes(out))):
        if isinstance(value, int) and int(value) > 1 and axis.size % int(value) == 0:
            s.use(name, value, reshape([axis], [int(value), axis.size // int(value)])[0])


@reads("scaled_dot_product_attention")
def _sdpa(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    if _arg(a, k, 6, "scale") is None:  # this mode does not see how torch computes the scale
        s.tracer.uses_size(s.axes(_arg(a, k, 0, "query"))[-1], "scaled_dot_product_attention(scale=None)")


@reads(" ".join(recurrent.LAYERS | recurrent.CELLS))
def _recurrent(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """States narrower than the cells mean a projection in an LSTM, so they have to stay narrower."""
    recurrent.unify_states(s.tracer, name, a, out)
    if name != "lstm":
        return
    hidden, cell = recurrent.states_of(a)
    if hidden.shape[-1] < cell.shape[-1]:
        h, c = (s.sized(t.shape[-1], s.axes(t)[-1]) for t in (hidden, cell))
        s.journal.compared(operator.lt, h, c, True)


@reads("multi_head_attention_forward")
def _mha(s: SizeUseMode, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """States what the function, whose inside this mode does not see, relies on: the query and each projection have the same
    width, and the heads divide it."""
    query, width, heads = a[0], _arg(a, k, 3, "embed_dim_to_check"), _arg(a, k, 4, "num_heads")
    axis = s.axes(query)[-1]
    s.use(name, width, axis)
    packed = _arg(a, k, 5, "in_proj_weight")
    n, h = int(width), int(heads)
    if not k.get("use_separate_proj_weight", False):
        rows = s.axes(packed)[0]
        parts = [take(rows, i * n, (i + 1) * n) for i in range(3)]
    else:
        parts = [s.axes(k[w])[0] for w in ("q_proj_weight", "k_proj_weight", "v_proj_weight")]
    for part in parts:
        s.use(name, s.sized(n, axis), part)
        head, inside = reshape([part], [h, n // h])
        s.use(name, heads, head)
        s.use(name, Tagged(n // h, Arithmetic(operator.floordiv, AxisSize(axis), source_of(heads)), s.journal), inside)
        if part is not parts[2]:
            s.tracer.uses_size(inside, "multi_head_attention_forward")
