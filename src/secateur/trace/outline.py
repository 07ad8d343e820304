"""Heavy operators without the work: a result of the right shape with no values, for runs of which only the shapes matter."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Outline = Callable[..., Any]
_OUTLINES: dict[str, Outline] = {}
_OTHERWISE = {
    f"aten::{n}"
    for n in ["_to_copy", "eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite", "logical_not", "signbit"]
}  # other kinds
_MANY = (list, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # most arguments; asking whether they are tensors takes time
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Unfit(Exception):
    """Shapes that an outline has no answer for; the operator itself says what is wrong with them, or that nothing is."""


class ValueRead(RuntimeError):
    """The run looks at a number that was not computed."""


def outlines(names: str) -> Callable[[Outline], Outline]:
    def register(function: Outline) -> Outline:
        _OUTLINES.update(dict.fromkeys((f"aten::{n}" for n in names.split()), function))
        return function

    return register


class Blank:
    """Zeros of any shape that all share one block of memory: nothing is ever computed from them."""

    def __init__(self) -> None:
        self.blocks: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        size, key = math.prod(shape), (like.dtype, like.device)
        if key not in self.blocks or self.blocks[key].numel() < size:
            self.blocks[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self.blocks[key][:size].view(shape)


class Outlined:
    """Answers heavy operators by their shape alone, and keeps track of what is made from such answers."""

    def __init__(self) -> None:
        self.empty: set[int] = set()  # storages whose values mean nothing
        self.blank = Blank()

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name, plain, reads = _facts(func)
        hollow = any(t.untyped_storage()._cdata in self.empty for t in tensors_of((*args, *kwargs.values())))
        if hollow and reads:
            raise ValueRead(f"{func} reads values")
        short, made = _OUTLINES.get(name), None
        if short is not None or (hollow and plain):
            with torch._C.DisableTorchFunction(), contextlib.suppress(_Unfit):
                made = self.alike(args) if short is None else short(self.blank, *args, **kwargs)
        out = func(*args, **kwargs) if made is None else made
        if hollow or made is not None:
            self.empty.update(t.untyped_storage()._cdata for t in tensors_of(out if isinstance(out, _MANY) else (out,)))
        return out

    def alike(self, args: Sequence[Any]) -> Tensor | None:
        """What works element by element on numbers that mean nothing leaves numbers that mean nothing."""
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.is_contiguous():
            return None
        alike = all(a.dtype == x.dtype and a.shape == x.shape for a in args[1:] if isinstance(a, Tensor))
        return self.blank(x, *x.shape) if alike else None


@functools.cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """The name of an operator, whether it works element by element and keeps the kind of numbers, whether it reads values."""
    tags, schema = getattr(func, "tags", ()), getattr(func, "_schema", None)
    if schema is None:
        return "", False, False
    single = torch.Tag.pointwise in tags and not schema.is_mutable and len(schema.returns) == 1
    return schema.name, single and schema.name not in _OTHERWISE, not _READS.isdisjoint(tags)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among these values, also inside lists."""
    found: list[Tensor] = []
    for v in values:
        if type(v) in _PLAIN:
            continue
        if isinstance(v, Tensor):
            found.append(v)
        elif isinstance(v, _MANY):
            found += tensors_of(v)
    return found


def _fits(holds: bool) -> None:
    if not holds:
        raise _Unfit


@outlines("mm bmm")
def _product(blank: Blank, a: Tensor, b: Tensor) -> Tensor:
    _fits(a.dtype == b.dtype and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2])
    return blank(a, *a.shape[:-1], b.shape[-1])


@outlines("addmm baddbmm")
def _sum_and_product(blank: Blank, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = _product(blank, a, b)
    _fits(c.dtype == out.dtype and torch.broadcast_shapes(c.shape, out.shape) == out.shape)
    return out


@outlines("linear")
def _linear(blank: Blank, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _fits(x.dtype == weight.dtype and x.shape[-1] == weight.shape[-1] and (bias is None or bias.shape == weight.shape[:1]))
    return blank(x, *x.shape[:-1], weight.shape[0])


@outlines("convolution")
def _convolution(
    blank: Blank,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    turned: bool,
    extra: Any,
    groups: int,
) -> Tensor | None:
    n = weight.dim() - 2
    if x.dim() != n + 2 or x.dtype != weight.dtype:
        return None
    stride, padding, dilation, extra = (v if len(v) == n else list(v) * n for v in (stride, padding, dilation, extra))
    ins, outs = (weight.shape[0], weight.shape[1] * groups) if turned else (weight.shape[1] * groups, weight.shape[0])
    _fits(x.shape[1] == ins and outs % groups == 0 and (bias is None or len(bias) == outs))
    sizes = []
    for i, k in enumerate(weight.shape[2:]):
        reach = dilation[i] * (k - 1)
        if turned:
            sizes.append((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + extra[i] + 1)
        else:
            sizes.append((x.shape[2 + i] + 2 * padding[i] - reach - 1) // stride[i] + 1)
    _fits(min(sizes, default=1) > 0)
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous():
        return blank(x, x.shape[0], *sizes, outs).movedim(-1, 1)
    return blank(x, x.shape[0], outs, *sizes)


@outlines("native_batch_norm")
def _batch_norm(
    blank: Blank, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[Tensor, ...] | None:
    _fits(not training and x.is_contiguous() and mean is not None and len(mean) == x.shape[1])
    return blank(x, *x.shape), x.new_zeros(0), x.new_zeros(0)


@outlines("max_pool2d_with_indices")
def _max_pool(blank: Blank, x: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    _fits(x.is_contiguous())
    out, at = torch.ops.aten.max_pool2d_with_indices(x.to("meta"), *options)
    return blank(x, *out.shape), blank(torch.empty(0, dtype=at.dtype, device=x.device), *at.shape)


@outlines("_scaled_dot_product_flash_attention_for_cpu")
def _attention(blank: Blank, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    same = query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1]
    _fits(same and key.shape[:3] == value.shape[:3])
    b, h, n = query.shape[:3]
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    order = sorted(range(4), key=lambda d: -query.stride(d))  # the result lies in memory as the queries do
    out = blank(query, *(query.shape[d] for d in order)).permute([order.index(d) for d in range(4)])
    return out, torch.zeros(b, n, h, dtype=wide, device=query.device).transpose(1, 2)
