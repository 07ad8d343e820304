"""Outputs of heavy operators without the work: tensors of the right shape whose values mean nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .record import register


class Unfit(Exception):
    """These shapes are not covered; the operator itself says what is wrong with them, or runs."""


class Blank:
    """Zeros of any shape that all share one block of memory: nothing is ever computed from them."""

    def __init__(self) -> None:
        self.blocks: dict[Any, Tensor] = {}
        self.made: dict[Any, Tensor] = {}

    def __call__(self, like: Tensor, *shape: int) -> Tensor:
        key = (shape, like.dtype, like.device)
        if key not in self.made:
            self.made[key] = self._made(like, shape)
        return self.made[key].detach()  # a new tensor each time

    def _made(self, like: Tensor, shape: tuple[int, ...]) -> Tensor:
        size, key = math.prod(shape), (like.dtype, like.device)
        if key not in self.blocks or self.blocks[key].numel() < size:
            if like.is_cpu:  # unlike torch.zeros, NumPy takes no pages until they are read
                self.blocks[key] = torch.from_numpy(np.zeros(size * like.itemsize, np.uint8)).view(like.dtype)
            else:
                self.blocks[key] = torch.zeros(size, dtype=like.dtype, device=like.device)
        return self.blocks[key][:size].view(shape)


def _shapes(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        register(names, shapes=function)
        return function

    return decorate


def _fits(holds: bool) -> None:
    if not holds:
        raise Unfit


@_shapes("mm bmm")
def _product(blank: Blank, a: Tensor, b: Tensor) -> Tensor:
    _fits(a.dtype == b.dtype and a.shape[-1] == b.shape[-2] and a.shape[:-2] == b.shape[:-2])
    return blank(a, *a.shape[:-1], b.shape[-1])


@_shapes("addmm baddbmm")
def _sum_and_product(blank: Blank, c: Tensor, a: Tensor, b: Tensor, *, beta: Any = 1, alpha: Any = 1) -> Tensor:
    out = _product(blank, a, b)
    _fits(c.dtype == out.dtype and c.dim() <= out.dim())
    _fits(all(size in (1, whole) for size, whole in zip(reversed(c.shape), reversed(out.shape))))
    return out


@_shapes("linear")
def _linear(blank: Blank, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _fits(x.dtype == weight.dtype and x.shape[-1] == weight.shape[-1] and (bias is None or bias.shape == weight.shape[:1]))
    return blank(x, *x.shape[:-1], weight.shape[0])


@_shapes("convolution")
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


@_shapes("native_batch_norm")
def _batch_norm(
    blank: Blank, x: Tensor, weight: Any, bias: Any, mean: Any, var: Any, training: bool, *_: Any
) -> tuple[Tensor, ...] | None:
    _fits(x.is_contiguous() and (training or mean is not None))
    channels = x.shape[1]
    _fits(all(t is None or t.shape[0] == channels for t in (weight, bias, mean, var)))
    kept = channels if training else 0
    return blank(x, *x.shape), blank(x, kept), blank(x, kept)


@_shapes("max_pool2d_with_indices")
def _max_pool(
    blank: Blank, x: Tensor, kernel: Any, stride: Any = (), padding: Any = 0, dilation: Any = 1, ceil: bool = False
) -> tuple[Tensor, Tensor]:
    kernel, stride, padding, dilation = (_pair(v) for v in (kernel, stride or kernel, padding, dilation))
    _fits(x.is_contiguous() and x.dim() in (3, 4) and all(2 * p <= k for p, k in zip(padding, kernel)))
    sizes = []
    for size, k, s, p, d in zip(x.shape[-2:], kernel, stride, padding, dilation):
        left = size + 2 * p - d * (k - 1) - 1
        out = (left + (s - 1 if ceil else 0)) // s + 1
        sizes.append(
            out - 1 if ceil and (out - 1) * s >= size + p else out
        )  # the last window begins inside or in the left padding
    _fits(min(sizes) > 0)
    shape = (*x.shape[:-2], *sizes)
    return blank(x, *shape), blank(torch.empty(0, dtype=torch.int64, device=x.device), *shape)


def _pair(value: Any) -> Sequence[int]:
    return (value, value) if isinstance(value, int) else value if len(value) == 2 else (*value, *value)


@_shapes("_scaled_dot_product_flash_attention_for_cpu")
def _attention(blank: Blank, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    same = query.shape[:2] == key.shape[:2] and query.shape[-1] == key.shape[-1]
    _fits(same and key.shape[:3] == value.shape[:3])
    b, h, n = query.shape[:3]
    wide = query.dtype if query.dtype == torch.float64 else torch.float32
    order = sorted(range(4), key=lambda d: -query.stride(d))  # the result lies in memory as the queries do
    out = blank(query, *(query.shape[d] for d in order)).permute([order.index(d) for d in range(4)])
    return out, torch.zeros(b, n, h, dtype=wide, device=query.device).transpose(1, 2)
