"""Which integers in the arguments of a Python function are sizes of which axes.

In `x.view(b, n, self.heads, -1)` the integer `self.heads` has to be the size of dim 2 of the result. A reader is called after
the function, with the function's name, its arguments and its result, and states such facts. Readers are part of the records of
Python functions, whose names begin with `python::`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ..axes import Expr, Prod, freeze, reshape, split_at, take
from .record import register


class SizeUses(Protocol):
    """What a reader can state about the integers of a call."""

    def axes(self, tensor: Any) -> list[Expr]:
        """The axes of a tensor."""
        ...

    def use(self, call: str, value: Any, axis: Expr | None) -> None:
        """`value`, an argument of `call`, is the size of `axis`."""
        ...

    def sized(self, value: int, axis: Expr) -> Any:
        """An integer that is known to be the size of an axis."""
        ...

    def is_tagged(self, value: Any) -> bool:
        """Whether the origin of an integer is known."""
        ...

    def in_formula(self, value: Any, call: str) -> None:
        """`value` is used as a number."""
        ...

    def compared(self, function: Callable[[Any, Any], Any], left: Any, right: Any, outcome: bool) -> None:
        """The outcome of a comparison must stay the same."""
        ...

    def equal_counts(self, parts: Sequence[Expr]) -> None:
        """These axes must keep equally many units."""
        ...

    def uses_size(self, e: Expr, how: str) -> None:
        """The size of an axis enters a formula."""
        ...


IntegerReader = Callable[[SizeUses, str, tuple[Any, ...], dict[str, Any], Any], None]


def reads(names: str) -> Callable[[IntegerReader], IntegerReader]:
    """Decorator for readers: registers the reader for these Python functions."""

    def decorate(reader: IntegerReader) -> IntegerReader:
        register(" ".join(f"python::{name}" for name in names.split()), integers=reader)
        return reader

    return decorate


def _flat(values: Sequence[Any]) -> list[Any]:
    return list(values[0]) if len(values) == 1 and isinstance(values[0], tuple | list) else list(values)


def argument(a: tuple[Any, ...], k: dict[str, Any], position: int, *names: str, default: Any = None) -> Any:
    return a[position] if len(a) > position else next((k[n] for n in names if n in k), default)


def view_sizes(a: Sequence[Any], k: dict[str, Any]) -> list[Any]:
    return _flat(a[1:]) if len(a) > 1 else list(k.get("shape", k.get("size", ())))


def _factory_sizes(name: str, a: tuple[Any, ...], k: dict[str, Any]) -> list[Any]:
    rest = a[1:] if a and isinstance(a[0], Tensor) else a
    if name in ("full", "new_full"):
        rest = rest[:1]
    elif name == "randint":
        rest = tuple(x for x in rest if isinstance(x, tuple | list))[:1]
    return _flat(rest) or list(k.get("size", ()))


_OPERATORS = ["mul", "truediv", "add", "sub", "pow", "floordiv"]


@reads(
    "mul div add sub true_divide pow mul_ div_ add_ sub_ rsub floor_divide remainder masked_fill clamp sqrt tensor as_tensor"
)
@reads("scalar_tensor " + " ".join(f"__{r}{name}__" for name in _OPERATORS for r in ("", "r")))
def in_formula(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for value in (*a, *k.values()):
        s.in_formula(value, name)


@reads("zeros ones empty full rand randn randint new_zeros new_ones new_full new_empty")
def _factory(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    if isinstance(out, Tensor):
        for value, axis in zip(_factory_sizes(name, a, k), s.axes(out)):
            s.use(name, value, axis)


@reads("view reshape expand broadcast_to view_copy expand_copy sum_to_size")
def _view(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    sizes = view_sizes(a, k)
    if isinstance(out, Tensor) and all(isinstance(n, int) for n in sizes):
        for value, axis in zip(sizes, s.axes(out)):
            s.use(name, value, axis)


@reads("unflatten")
def _unflatten(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    first = int(argument(a, k, 1, "dim")) % a[0].dim()
    for i, value in enumerate(argument(a, k, 2, "sizes")):
        s.use(name, value, s.axes(out)[first + i])


@reads("split split_with_sizes unsafe_split unsafe_split_with_sizes split_copy split_with_sizes_copy")
def _split(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    sizes = argument(a, k, 1, "split_size_or_sections", "split_size", "split_sizes")
    d = int(argument(a, k, 2, "dim", default=0))
    for value, piece in zip(sizes if isinstance(sizes, tuple | list) else [sizes] * len(out), out):
        s.use(name, value, s.axes(piece)[d])


@reads("tensor_split hsplit vsplit dsplit")
def _tensor_split(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """Splits at given indices, or into a given number of pieces. This mode does not see the slices that torch makes."""
    where = argument(a, k, 1, "indices_or_sections", "indices", "sections")
    given = {"vsplit": 0, "hsplit": min(1, a[0].dim() - 1), "dsplit": 2}.get(name)
    d = int(argument(a, k, 2, "dim", default=0) if given is None else given)
    parts = [s.axes(piece)[d] for piece in out]
    if isinstance(where, tuple | list):
        for bound in where:
            _bounds(s, name, slice(bound, None), s.axes(a[0])[d])
    elif len({e.size for e in parts}) == 1 and isinstance(where, int):
        s.equal_counts(parts)
    else:
        for part in parts:
            freeze(part, "split into uneven pieces by one number")


@reads("expand_as view_as reshape_as")
def _as(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for axis, other in zip(s.axes(out), s.axes(argument(a, k, 1, "other"))):
        s.use(name, s.sized(other.size, other), axis)


@reads("broadcast_tensors meshgrid")
def _broadcast(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for column in zip(*(reversed(s.axes(t)) for t in out)):
        sources = [e for t in _flat(a) for e in s.axes(t) if any(e is other for other in column)]
        for axis in column if sources else ():
            s.use(name, s.sized(axis.size, sources[0]), axis)


@reads("numpy __array__ tolist")
def _leaves(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for axis in s.axes(a[0]):
        freeze(axis, "values are read into Python")


@reads("narrow")
def _narrow(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    d, start, length = (argument(a, k, i + 1, n) for i, n in enumerate(("dim", "start", "length")))
    s.use(name, length, s.axes(out)[int(d)])
    if not isinstance(start, int):
        freeze(s.axes(a[0])[int(d)], "a tensor says where a slice begins")
    elif int(start) > 0:
        s.use(name, start, take(s.axes(a[0])[int(d)], 0, int(start)))


@reads("__getitem__ __setitem__")
def _getitem(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
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


def _bounds(s: SizeUses, name: str, i: slice, axis: Expr) -> None:
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
        elif at >= axis.size > 1 and s.is_tagged(bound):  # past the end, where it has to stay
            s.compared(operator.ge, bound, s.sized(axis.size, axis), True)


@reads("layer_norm rms_norm native_layer_norm")
def _layer_norm(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    shape = argument(a, k, 1, "normalized_shape")
    for value, axis in zip(shape, s.axes(a[0])[-len(shape) :]):
        s.use(name, value, axis)


@reads("group_norm")
def _group_norm(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = argument(a, k, 1, "num_groups")
    channels = s.axes(a[0])[1]
    s.use(name, groups, reshape([channels], [int(groups), channels.size // int(groups)])[0])
    everything = Prod(s.axes(a[0]))
    s.compared(operator.ne, s.sized(everything.size, everything), groups, True)  # torch refuses one value per group


@reads("native_group_norm")
def _native_group_norm(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for tensor in (v for v in (*a[:3], *k.values()) if isinstance(v, Tensor)):
        for axis in s.axes(tensor):
            freeze(axis, "native_group_norm is given the sizes as numbers")


@reads("instance_norm")
def _instance_norm(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    spatial = Prod(s.axes(a[0])[2:])
    if spatial.size > 1:  # torch refuses statistics of one value
        s.compared(operator.ne, s.sized(spatial.size, spatial), 1, True)


@reads("pad constant_pad_nd")
def _pad(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """Padding that repeats entries, and negative padding, say by numbers which entries those are."""
    pads, plain = argument(a, k, 1, "pad"), argument(a, k, 2, "mode", default="constant") == "constant"
    for i in range(len(pads) // 2):
        low, high = int(pads[2 * i]), int(pads[2 * i + 1])
        if min(low, high) < 0 or (max(low, high) > 0 and not plain):
            freeze(s.axes(a[0])[-1 - i], f"padded by position ({name})")


@reads("kl_div cross_entropy cross_entropy_loss")
def _mean_loss(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """A loss that is averaged is divided by sizes, where this mode does not see it."""
    for tensor in (v for v in a[:2] if isinstance(v, Tensor) and out.dim() == 0):
        for axis in s.axes(tensor):
            s.uses_size(axis, name)


@reads("diff")
def _diff(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """Torch compares the shapes of what is prepended and appended, even where it does not use it."""
    others = [t for t in (argument(a, k, 3, "prepend"), argument(a, k, 4, "append")) if isinstance(t, Tensor)]
    for tensor in (a[0], *others) if others else ():
        for axis in s.axes(tensor):
            freeze(axis, "compared with what diff prepends or appends")


@reads("slice slice_copy")
def _slice(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    d = int(argument(a, k, 1, "dim", default=0))
    _bounds(s, name, slice(argument(a, k, 2, "start"), argument(a, k, 3, "end")), s.axes(a[0])[d])


@reads("slice_scatter")
def _slice_scatter(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    d = int(argument(a, k, 2, "dim", default=0))
    _bounds(s, name, slice(argument(a, k, 3, "start"), argument(a, k, 4, "end")), s.axes(a[0])[d])


@reads("batch_norm")
def _batch_norm(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    if argument(a, k, 5, "training", default=False):  # torch raises an error for statistics of a single value
        rest = Prod([e for i, e in enumerate(s.axes(a[0])) if i != 1])
        s.compared(operator.ne, s.sized(rest.size, rest), 1, True)


@reads("conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d")
def _conv(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = argument(a, k, 6, "groups", default=1)
    first = s.axes(argument(a, k, 1, "weight"))[0]
    if isinstance(groups, int) and int(groups) > 1:
        s.use(name, groups, reshape([first], [int(groups), first.size // int(groups)])[0])


@reads("channel_shuffle native_channel_shuffle")
def _channel_shuffle(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    groups = argument(a, k, 1, "groups")
    channels = s.axes(a[0])[1]
    s.use(name, groups, reshape([channels], [int(groups), channels.size // int(groups)])[0])


@reads("repeat_interleave")
def _repeat_interleave(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    times, d = argument(a, k, 1, "repeats"), argument(a, k, 2, "dim")
    if isinstance(times, int) and d is not None and isinstance(out, Tensor):
        axis = s.axes(out)[int(d)]
        s.use(name, times, reshape([axis], [axis.size // int(times), int(times)])[1])


@reads("repeat tile")
def _repeat(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    for value, axis in zip(reversed(_flat(a[1:])), reversed(s.axes(out))):
        if isinstance(value, int) and int(value) > 1 and axis.size % int(value) == 0:
            s.use(name, value, reshape([axis], [int(value), axis.size // int(value)])[0])


@reads("scaled_dot_product_attention")
def _sdpa(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    if argument(a, k, 6, "scale") is None:  # this mode does not see how torch computes the scale
        s.uses_size(s.axes(argument(a, k, 0, "query"))[-1], "scaled_dot_product_attention(scale=None)")


@reads("multi_head_attention_forward")
def _mha(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """States what the function, whose inside this mode does not see, relies on: the query and each projection have the same
    width, and the heads divide it."""
    query, width, heads = a[0], argument(a, k, 3, "embed_dim_to_check"), argument(a, k, 4, "num_heads")
    axis = s.axes(query)[-1]
    s.use(name, width, axis)
    packed = argument(a, k, 5, "in_proj_weight")
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
        s.use(name, s.sized(n, axis) // heads, inside)
        if part is not parts[2]:
            s.uses_size(inside, "multi_head_attention_forward")


@reads("linalg_vander vander")
def _vander(s: SizeUses, name: str, a: tuple[Any, ...], k: dict[str, Any], out: Any) -> None:
    """By default there are as many powers as numbers, which torch counts out of sight."""
    for axis in s.axes(a[0]):
        freeze(axis, f"its size is a number of powers ({name})")
