"""What a format is, the list of them, and the operators that run them.

A format packs a matrix into named plain tensors and computes with those. Everything else (operators, modules, the chooser)
knows formats only through this list, so one for another device joins by adding a line to it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input
from torch.utils.flop_counter import register_flop_formula

from .find import Zeros

Buffers = Sequence[Tensor]
Options = Sequence[int]


@dataclass(frozen=True)
class Use:
    """How a layer was used: its kind, the rows of its inputs (positions, for a convolution), the part of them that is zero."""

    kind: str  # "linear", "conv" or "embedding"
    device: str
    rows: tuple[int, ...]
    input_zeros: float = 0.0


@dataclass(frozen=True)
class Window:
    """How a convolution moves over its input, always in two dimensions."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @lru_cache(maxsize=256)  # noqa: B019 - windows are few and small
    def out(self, height: int, width: int) -> tuple[int, int]:
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation)
        y, x = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return y, x


@dataclass(frozen=True)
class Format:
    """One way to hold a matrix.

    `fits` gives the options worth a try, none if the format does not fit; `store` is the dtype asked for the values. `linear`
    and `conv` return None where they cannot run here (no kernels, another device); the matrix is then unpacked for the call.
    `allowed` lists all that `fits` may give: options from a file are not believed.
    """

    name: str
    buffers: tuple[str, ...]
    fits: Callable[[Tensor, Zeros, Use], Iterable[tuple[int, ...]]]
    pack: Callable[[Tensor, Options], tuple[Tensor, ...]]
    unpack: Callable[[Buffers, int, int, Options], Tensor]
    linear: Callable[[Tensor, Buffers, Tensor | None, int, Options], Tensor | None]
    conv: Callable[[Tensor, Buffers, Tensor | None, int, Options, Window], Tensor | None] | None = None
    embedding: Callable[[Tensor, Buffers, int, Options], Tensor] | None = None
    allowed: tuple[tuple[int, ...], ...] = ((),)


FORMATS: dict[str, Format] = {}


def register(form: Format) -> Format:
    FORMATS[form.name] = form
    return form


# ---------------------------------------------------------------- grouped convolutions


def as_matrix(weight: Tensor, groups: int = 1) -> Tensor:
    """The matrix of a layer. A grouped convolution becomes one matrix with the groups along its diagonal: zeros are free."""
    rows = weight.flatten(1)
    if groups == 1:
        return rows
    return torch.block_diag(*rows.chunk(groups))


def as_weight(matrix: Tensor, shape: Sequence[int], groups: int = 1) -> Tensor:
    """The other way round."""
    if groups > 1:
        height, width = shape[0] // groups, matrix.shape[1] // groups
        matrix = torch.cat([matrix[g * height : (g + 1) * height, g * width : (g + 1) * width] for g in range(groups)])
    return matrix.reshape(tuple(shape))


# ---------------------------------------------------------------- operators

_LIBRARY = torch.library.Library("secateur", "DEF")
_HELD = "str format, int rows, int columns, int[] options"
for _signature in (
    f"linear(Tensor x, Tensor[] buffers, Tensor? bias, {_HELD}) -> Tensor",
    f"conv(Tensor x, Tensor[] buffers, Tensor? bias, {_HELD}, int[] window) -> Tensor",
    # The same with gradients for x and bias: apart, since the bookkeeping takes as long as a small layer.
    f"linear_grad(Tensor x, Tensor[] buffers, Tensor? bias, {_HELD}) -> Tensor",
    f"conv_grad(Tensor x, Tensor[] buffers, Tensor? bias, {_HELD}, int[] window) -> Tensor",
    f"embedding(Tensor x, Tensor[] buffers, {_HELD}) -> Tensor",
    f"unpack(Tensor[] buffers, {_HELD}) -> Tensor",
):
    _LIBRARY.define(_signature, tags=(torch.Tag.pt2_compliant_tag,))


def linear(x: Tensor, buffers: Buffers, bias: Tensor | None, form: str, rows: int, columns: int, options: Options) -> Tensor:
    shape = x.shape
    if not shape or shape[-1] != columns:
        raise ValueError(f"the compressed layer takes {columns} features in the last dimension, and got {tuple(shape)}")
    if bias is not None and bias.numel() != rows:  # kernels read as many as there are rows
        bias = bias.expand(rows)
    flat = x if len(shape) == 2 else x.reshape(-1, columns)
    y = None if 0 in shape else FORMATS[form].linear(flat, buffers, bias, rows, options)
    if y is None:
        y = F.linear(flat, *_as_seen(x, FORMATS[form].unpack(buffers, rows, columns, options), bias))
    return y if len(shape) == 2 else y.reshape(*shape[:-1], rows)


def _as_seen(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias in the dtype of the inputs; whole numbers are left to torch, which refuses them."""
    dtype = x.dtype if x.is_floating_point() else weight.dtype
    return weight.to(dtype), bias if bias is None else bias.to(dtype)


def _linear_fake(x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, columns: int, options: Options) -> Tensor:
    return x.new_empty(*x.shape[:-1], rows)


@lru_cache(maxsize=256)
def _cached_window(numbers: tuple[int, ...]) -> Window:
    pairs = [(numbers[i], numbers[i + 1]) for i in range(0, 8, 2)]
    return Window(*pairs)


def _window(numbers: Sequence[int]) -> Window:
    return _cached_window(tuple(numbers))


def conv(
    x: Tensor,
    buffers: Buffers,
    bias: Tensor | None,
    form: str,
    rows: int,
    columns: int,
    options: Options,
    window: Sequence[int],
) -> Tensor:
    move, run = _window(window), FORMATS[form].conv
    channels = columns // (move.kernel[0] * move.kernel[1])
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(f"the compressed convolution takes [batch, {channels}, height, width], and got {tuple(x.shape)}")
    if bias is not None and bias.numel() != rows:
        bias = bias.expand(rows)
    y = run(x, buffers, bias, rows, options, move) if run is not None and x.numel() else None
    if y is None:
        weight = FORMATS[form].unpack(buffers, rows, columns, options).reshape(rows, channels, *move.kernel)
        y = F.conv2d(x, *_as_seen(x, weight, bias), move.stride, move.padding, move.dilation)
    return y.contiguous()


def _conv_fake(
    x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, columns: int, options: Options, window: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape[0], rows, *_window(window).out(x.shape[2], x.shape[3]))


def _embedding(x: Tensor, buffers: Buffers, form: str, rows: int, columns: int, options: Options) -> Tensor:
    inside = ((x >= 0) & (x < rows)).all()  # a wrong number would read the buffers somewhere else, without a word
    if x.is_cpu and not inside:
        raise IndexError(f"the compressed embedding has rows 0 to {rows - 1}, and got {int(x.min())} to {int(x.max())}")
    torch._assert_async(inside)
    look_up = FORMATS[form].embedding
    if look_up is None:
        return F.embedding(x, FORMATS[form].unpack(buffers, rows, columns, options))
    return look_up(x.reshape(-1), buffers, columns, options).reshape(*x.shape, columns)


def _embedding_fake(x: Tensor, buffers: Buffers, form: str, rows: int, columns: int, options: Options) -> Tensor:
    return buffers[0].new_empty(*x.shape, columns)  # by custom, the first buffer holds the values


# ---------------------------------------------------------------- gradients of inputs and biases; packed weights have none


def _unpack(buffers: Buffers, form: str, rows: int, columns: int, options: Options) -> Tensor:
    return FORMATS[form].unpack(buffers, rows, columns, options)


def _unpack_fake(buffers: Buffers, form: str, rows: int, columns: int, options: Options) -> Tensor:
    return buffers[0].new_empty(rows, columns)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, buffers, bias, *ctx.rest = inputs
    ctx.save_for_backward(*buffers)
    ctx.shape, ctx.dtype, ctx.bias = x.shape, x.dtype, bias is not None


def _dense(ctx: Any, grad: Tensor) -> Tensor:
    form, rows, columns, options, *_ = ctx.rest
    return torch.ops.secateur.unpack(list(ctx.saved_tensors), form, rows, columns, options).to(grad.dtype)


def _nothing(rest: Sequence[Any]) -> list[Any]:
    """No gradients for what is no tensor. torch takes an empty list for a list of tensors, of which none is none."""
    return [[] if each == [] else None for each in rest]


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    bias = grad.flatten(0, -2).sum(0) if ctx.bias else None
    return (grad @ _dense(ctx, grad), [None] * len(ctx.saved_tensors), bias, *_nothing(ctx.rest))


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    move = _window(ctx.rest[-1])
    weight = _dense(ctx, grad).reshape(grad.shape[1], ctx.shape[1], *move.kernel)
    x = conv2d_input(ctx.shape, weight, grad, move.stride, move.padding, move.dilation)  # type: ignore[arg-type]
    return (x, [None] * len(ctx.saved_tensors), grad.sum((0, 2, 3)) if ctx.bias else None, *_nothing(ctx.rest))


for _name, _body, _fake in (
    ("linear", linear, _linear_fake),
    ("conv", conv, _conv_fake),
    ("linear_grad", linear, _linear_fake),
    ("conv_grad", conv, _conv_fake),
    ("embedding", _embedding, _embedding_fake),
    ("unpack", _unpack, _unpack_fake),
):
    _LIBRARY.impl(_name, _body, "CompositeExplicitAutograd")
    torch.library.register_fake(f"secateur::{_name}", _fake, lib=_LIBRARY)
torch.library.register_autograd("secateur::linear_grad", _linear_backward, setup_context=_remember, lib=_LIBRARY)
torch.library.register_autograd("secateur::conv_grad", _conv_backward, setup_context=_remember, lib=_LIBRARY)


@register_flop_formula(
    [getattr(torch.ops.secateur, name) for name in ("linear", "linear_grad", "conv", "conv_grad")], get_raw=True
)
def _flops(x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, *_: Any, out_val: Tensor, **__: Any) -> int:
    """For torch's counter: a product and a sum for each stored value and position; whole numbers are pairs of values."""
    pairs = 1 if buffers[0].is_floating_point() else 2
    return 2 * pairs * buffers[0].numel() * (out_val.numel() // rows)
