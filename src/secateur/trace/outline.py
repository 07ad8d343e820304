"""Runs without the arithmetic: heavy operators return a tensor of the right shape without computing its values.

`Outlined()(aten.mm.default, (a, b), {})` checks the shapes and returns zeros of shape (a.shape[0], b.shape[1]). Reading a value
that is computed from such a result raises `ValueRead`.
"""

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
_OTHER_DTYPE = {
    f"aten::{n}"
    for n in ["_to_copy", "eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite", "logical_not", "signbit"]
}  # element-wise operators whose result can have another dtype
_MANY = (list, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # types of most arguments; isinstance(..., Tensor) is slow for them
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class _Unfit(Exception):
    """An outline does not cover these shapes. The operator itself is run: it returns a result or raises its own error."""


class ValueRead(RuntimeError):
    """The run reads a value that was not computed."""


def outlines(names: str) -> Callable[[Outline], Outline]:
    """Registers a function that returns the results of these operators by their shapes alone."""

    def register(function: Outline) -> Outline:
        _OUTLINES.update(dict.fromkeys((f"aten::{n}" for n in names.split()), function))
        return function

    return register


class Blank:
    """Zeros of any shape. Those of one dtype and device share memory, because no value is computed from them."""

    def __init__(self) -> None:
        self.blocks: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        size, key = math.prod(shape), (like.dtype, like.device)
        if key not in self.blocks or self.blocks[key].numel() < size:
            self.blocks[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self.blocks[key][:size].view(shape)


class Outlined:
    """Calls operators, heavy ones by their shapes alone, and keeps track of tensors made from such results."""

    def __init__(self) -> None:
        self.empty: set[int] = set()  # storages whose values were not computed
        self.blank = Blank()

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        name, plain, reads = _facts(func)
        blank = any(t.untyped_storage()._cdata in self.empty for t in tensors_of((*args, *kwargs.values())))
        if blank and reads:
            raise ValueRead(f"{func} reads values that were not computed")
        short, made = _OUTLINES.get(name), None
        if short is not None or (blank and plain):
            with torch._C.DisableTorchFunction(), contextlib.suppress(_Unfit):
                made = self.alike(args) if short is None else short(self.blank, *args, **kwargs)
        out = func(*args, **kwargs) if made is None else made
        if blank or made is not None:
            self.empty.update(t.untyped_storage()._cdata for t in tensors_of(out if isinstance(out, _MANY) else (out,)))
        return out

    def alike(self, args: Sequence[Any]) -> Tensor | None:
        """Returns a blank result for an element-wise operator on blank inputs of one shape and dtype, else None."""
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.is_contiguous():
            return None
        alike = all(a.dtype == x.dtype and a.shape == x.shape for a in args[1:] if isinstance(a, Tensor))
        return self.blank(x, *x.shape) if alike else None


@functools.cache
def _facts(func: Any) -> tuple[str, bool, bool]:
    """Returns the operator's name, whether it is element-wise and keeps the dtype, and whether it reads values."""
    tags, schema = getattr(func, "tags", ()), getattr(func, "_schema", None)
    if schema is None:
        return "", False, False
    single = torch.Tag.pointwise in tags and not schema.is_mutable and len(schema.returns) == 1
    return schema.name, single and schema.name not in _OTHER_DTYPE, not _READS.isdisjoint(tags)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among these values and inside lists and tuples."""
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
    """Raises _Unfit unless the condition holds."""
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
    transposed: bool,
    output_padding: Any,
    groups: int,
) -> Tensor | None:
    n = weight.dim() - 2
    if x.dim() != n + 2 or x.dtype != weight.dtype:
        return None
    options = (stride, padding, dilation, output_padding)
    stride, padding, dilation, output_padding = (v if len(v) == n else list(v) * n for v in options)
    ins, outs = (weight.shape[0], weight.shape[1] * groups) if transposed else (weight.shape[1] * groups, weight.shape[0])
    _fits(x.shape[1] == ins and outs % groups == 0 and (bias is None or len(bias) == outs))
    sizes = []
    for i, k in enumerate(weight.shape[2:]):
        reach = dilation[i] * (k - 1)
        if transposed:
            sizes.append((x.shape[2 + i] - 1) * stride[i] - 2 * padding[i] + reach + output_padding[i] + 1)
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
    order = sorted(range(4), key=lambda d: -query.stride(d))  # the result has the memory layout of the query
    out = blank(query, *(query.shape[d] for d in order)).permute([order.index(d) for d in range(4)])
    return out, torch.zeros(b, n, h, dtype=wide, device=query.device).transpose(1, 2)
