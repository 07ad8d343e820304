"""The `Format` record, the table of all formats, and the functions of the operators (`torch.ops.secateur`) that run them.

A format packs a matrix into named plain tensors and computes with those. The operators, the modules and the chooser know
formats only through the table `FORMATS`, so adding a format means adding one entry. Values in fewer bits (`Values`) are an axis
of every format: `with_values` makes a format that packs the rounded matrix of another one and adds the buffer `scales`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.grad import conv2d_input
from torch.utils.flop_counter import register_flop_formula

from ..values import Values, parse
from .find import Zeros

Buffers = Sequence[Tensor]
FormatOptions = Sequence[int]
PLAIN = ""  # in `Format.takes`: the weights as they are, without scales


@dataclass(frozen=True)
class Use:
    """How the model calls a layer."""

    kind: str  # "linear", "conv" or "embedding"
    device: str
    rows: tuple[int, ...]  # input rows (output positions of a convolution) of each distinct input shape
    input_zeros: float = 0.0  # fraction of input elements that are zero
    values: Values | None = None  # how the weights are rounded


class Scales(NamedTuple):
    """The scales of a packed matrix whose values are stored in fewer bits, for the kernels of a format."""

    values: Values
    bits: Tensor  # the buffer `scales`


@dataclass(frozen=True)
class Window:
    """Kernel size, stride, padding and dilation of a convolution, always in two dimensions."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]

    @lru_cache(maxsize=256)  # noqa: B019 - windows are few and small
    def out(self, height: int, width: int) -> tuple[int, int]:
        """Returns the output height and width for an input of this height and width."""
        sizes = zip((height, width), self.kernel, self.stride, self.padding, self.dilation)
        y, x = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes)
        return y, x


@dataclass(frozen=True)
class Format:
    """One way to store a sparse matrix and to multiply with it.

    `fits` yields the options worth measuring for a layer, and nothing if the format does not suit it. `pack` turns a matrix
    into the tensors named in `buffers`, and `unpack` restores it. `linear` and `conv` return None if no kernel can run the
    call (for example on another device); the caller then unpacks the matrix and uses torch's dense operator. `allowed` lists
    every tuple that `fits` may yield, so that options read from a file can be checked.

    `any_rank`: `linear` takes inputs of any number of dimensions and returns as many; other formats get matrices. It saves the
    host two views in a call, which take as long as the rest of its work on a GPU.

    `takes` names the kinds of values that the kernels of `linear` multiply with: `PLAIN`, and the text of `Values` that are
    stored in fewer bits. For the latter, `linear` gets a `Scales` as its last argument. `numbers` names further buffers that
    depend on the values, not only on where they are. `inputs` is "int8" or "float8_e4m3fn" if the kernels round inputs to
    that; such a format is used only if the user asks for it. `stored` counts the stored values, for formats whose first buffer
    does not hold them. `base` and `values` are set by `with_values`.
    """

    name: str
    buffers: tuple[str, ...]
    fits: Callable[[Tensor, Zeros, Use], Iterable[tuple[int, ...]]]
    pack: Callable[[Tensor, FormatOptions], tuple[Tensor, ...]]
    unpack: Callable[[Buffers, int, int, FormatOptions], Tensor]
    linear: Callable[..., Tensor | None]  # (x, buffers, bias, rows, options) and perhaps scales
    conv: Callable[[Tensor, Buffers, Tensor | None, int, FormatOptions, Window], Tensor | None] | None = None
    embedding: Callable[[Tensor, Buffers, int, FormatOptions], Tensor] | None = None
    allowed: tuple[tuple[int, ...], ...] = ((),)
    takes: tuple[str, ...] = (PLAIN,)
    numbers: tuple[str, ...] = ()
    inputs: str | None = None
    any_rank: bool = False
    stored: Callable[[Buffers], int] | None = None
    base: Format | None = None
    values: Values | None = None


# Former names of formats, which saved files, exported programs and pickled models may still contain.
FORMER_NAMES = {
    "mosaic": "amx_tiles",
    "bricks": "sparse24_mma",
    "lists": "padded_rows",
    "squares": "dense_blocks",
    "skips": "input_sparse",
}


class _Formats(dict[str, Format]):
    """The formats by name.

    Indexing also accepts former names and formats with values in fewer bits ("gather int8"); iteration yields neither.
    """

    def __missing__(self, name: str) -> Format:
        found = find_format(name)
        if found is None:
            raise KeyError(name)
        return found


FORMATS: dict[str, Format] = _Formats()


def register(form: Format) -> Format:
    """Adds a format to the table and returns it."""
    FORMATS[form.name] = form
    _format.cache_clear()
    return form


@lru_cache(maxsize=256)
def _format(name: str) -> Format:
    """The format with this name, found without hashing a `Format` at every call."""
    return FORMATS[name]


def find_format(name: str) -> Format | None:
    """Returns the format with this current or former name, with values in fewer bits if it names them; None if unknown."""
    own, _, text = name.partition(" ")
    form, values = FORMATS.get(FORMER_NAMES.get(own, own)), parse(text) if text else None
    if form is None or not text:
        return form
    return with_values(form, values) if values is not None and str(values) in form.takes else None


@cache
def with_values(form: Format, values: Values) -> Format:
    """Returns the format with its values in fewer bits. It packs the rounded matrix, and its last buffer holds the scales."""

    def pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
        q, scales = values.quantize(matrix)
        first, *rest = form.pack(q, options)
        return values.shrink(first), *rest, scales

    def unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
        first, *rest, scales = buffers
        return values.dequantize(form.unpack([values.widen(first), *rest], rows, columns, options), scales)

    def linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
        return form.linear(x, buffers[:-1], bias, rows, options, Scales(values, buffers[-1]))

    name, buffers = f"{form.name} {values}", (*form.buffers, "scales")
    own = {"conv": None, "embedding": None, "base": form, "values": values}
    return replace(form, name=name, buffers=buffers, pack=pack, unpack=unpack, linear=linear, **own)


# ---------------------------------------------------------------- grouped convolutions


def as_matrix(weight: Tensor, groups: int = 1) -> Tensor:
    """Returns a layer's weight as a matrix. The groups of a convolution become blocks along the diagonal of one matrix."""
    rows = weight.flatten(1)
    if groups == 1:
        return rows
    return torch.block_diag(*rows.chunk(groups))


def as_weight(matrix: Tensor, shape: Sequence[int], groups: int = 1) -> Tensor:
    """Undoes `as_matrix`."""
    if groups > 1:
        height, width = shape[0] // groups, matrix.shape[1] // groups
        matrix = torch.cat([matrix[g * height : (g + 1) * height, g * width : (g + 1) * width] for g in range(groups)])
    return matrix.reshape(tuple(shape))


# ---------------------------------------------------------------- operators


def linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, form: str, rows: int, columns: int, options: FormatOptions
) -> Tensor:
    """Returns x @ matrix.T + bias for a packed matrix of shape [rows, columns]."""
    shape = x.shape
    if not shape or shape[-1] != columns:
        raise ValueError(
            f"expected an input with {columns} features in the last dimension for this compressed layer, "
            f"got shape {tuple(shape)}"
        )
    if bias is not None and (bias.numel() != rows or not bias.is_contiguous()):  # kernels read `rows` neighbouring elements
        bias = bias.expand(rows).contiguous()
    found = _format(form)
    flat = x if len(shape) == 2 or found.any_rank else x.reshape(-1, columns)
    y = None if 0 in shape else found.linear(flat, buffers, bias, rows, options)
    if y is None:
        y = F.linear(flat, *_in_input_dtype(x, found.unpack(buffers, rows, columns, options), bias))
    return y if y.dim() == len(shape) else y.reshape(*shape[:-1], rows)


def _in_input_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """Casts weight and bias to the input's dtype. Integer inputs are passed on as they are, so that torch raises its error."""
    dtype = x.dtype if x.is_floating_point() else weight.dtype
    return weight.to(dtype), bias if bias is None else bias.to(dtype)


def _linear_fake(x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, columns: int, options: FormatOptions) -> Tensor:
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
    options: FormatOptions,
    window: Sequence[int],
) -> Tensor:
    """Returns the 2d convolution of x with a packed matrix of shape [out channels, in channels * kernel size]."""
    move, run = _window(window), FORMATS[form].conv
    channels = columns // (move.kernel[0] * move.kernel[1])
    if x.dim() != 4 or x.shape[1] != channels:
        raise ValueError(
            f"expected an input of shape [batch, {channels}, height, width] for this compressed convolution, "
            f"got {tuple(x.shape)}"
        )
    if bias is not None and bias.numel() != rows:
        bias = bias.expand(rows)
    y = run(x, buffers, bias, rows, options, move) if run is not None and x.numel() else None
    if y is None:
        weight = FORMATS[form].unpack(buffers, rows, columns, options).reshape(rows, channels, *move.kernel)
        y = F.conv2d(x, *_in_input_dtype(x, weight, bias), move.stride, move.padding, move.dilation)
    return y.contiguous()


def _conv_fake(
    x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, columns: int, options: FormatOptions, window: Sequence[int]
) -> Tensor:
    return x.new_empty(x.shape[0], rows, *_window(window).out(x.shape[2], x.shape[3]))


def _embedding(x: Tensor, buffers: Buffers, form: str, rows: int, columns: int, options: FormatOptions) -> Tensor:
    inside = ((x >= 0) & (x < rows)).all()  # an index out of range would read other rows' values without an error
    if x.is_cpu and not inside:
        raise IndexError(
            f"expected indices from 0 to {rows - 1} for this compressed embedding, got {int(x.min())} to {int(x.max())}"
        )
    torch._assert_async(inside)
    look_up = FORMATS[form].embedding
    if look_up is None:
        return F.embedding(x, FORMATS[form].unpack(buffers, rows, columns, options))
    return look_up(x.reshape(-1), buffers, columns, options).reshape(*x.shape, columns)


def _embedding_fake(x: Tensor, buffers: Buffers, form: str, rows: int, columns: int, options: FormatOptions) -> Tensor:
    return buffers[0].new_empty(*x.shape, columns)  # by convention, the first buffer holds the values


# ---------------------------------------------------------------- gradients of inputs and biases; packed weights have none


def _unpack(buffers: Buffers, form: str, rows: int, columns: int, options: FormatOptions) -> Tensor:
    return FORMATS[form].unpack(buffers, rows, columns, options)


def _unpack_fake(buffers: Buffers, form: str, rows: int, columns: int, options: FormatOptions) -> Tensor:
    dtype = torch.float32 if FORMATS[form].values is not None else buffers[0].dtype
    return buffers[0].new_empty(rows, columns, dtype=dtype)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, buffers, bias, *ctx.rest = inputs
    ctx.save_for_backward(*buffers)
    ctx.shape, ctx.dtype, ctx.bias = x.shape, x.dtype, bias is not None


def _dense(ctx: Any, grad: Tensor) -> Tensor:
    form, rows, columns, options, *_ = ctx.rest
    return torch.ops.secateur.unpack(list(ctx.saved_tensors), form, rows, columns, options).to(grad.dtype)


def _no_gradients(rest: Sequence[Any]) -> list[Any]:
    """Gradients for non-tensor arguments: None, or [] where torch takes the argument for a list of tensors."""
    return [[] if each == [] else None for each in rest]


def _linear_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    bias = grad.flatten(0, -2).sum(0) if ctx.bias else None
    return (grad @ _dense(ctx, grad), [None] * len(ctx.saved_tensors), bias, *_no_gradients(ctx.rest))


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    move = _window(ctx.rest[-1])
    weight = _dense(ctx, grad).reshape(grad.shape[1], ctx.shape[1], *move.kernel)
    x = conv2d_input(ctx.shape, weight, grad, move.stride, move.padding, move.dilation)  # type: ignore[arg-type]
    return (x, [None] * len(ctx.saved_tensors), grad.sum((0, 2, 3)) if ctx.bias else None, *_no_gradients(ctx.rest))


@dataclass(frozen=True)
class Operator:
    """The functions behind one operator of `torch.ops.secateur`, which `secateur.torch_ops` registers."""

    run: Callable[..., Tensor]
    fake: Callable[..., Tensor]
    backward: Callable[..., tuple[Any, ...]] | None = None
    setup_context: Callable[..., None] = _remember


OPERATORS = {
    "linear": Operator(linear, _linear_fake),
    "conv": Operator(conv, _conv_fake),
    "linear_grad": Operator(linear, _linear_fake, _linear_backward),
    "conv_grad": Operator(conv, _conv_fake, _conv_backward),
    "embedding": Operator(_embedding, _embedding_fake),
    "unpack": Operator(_unpack, _unpack_fake),
}


@register_flop_formula(
    [getattr(torch.ops.secateur, name) for name in ("linear", "linear_grad", "conv", "conv_grad")], get_raw=True
)
def _flops(x: Tensor, buffers: Buffers, bias: Any, form: str, rows: int, *_: Any, out_val: Tensor, **__: Any) -> int:
    """FLOPs for torch's counter: two for each stored value and output position."""
    first, known = buffers[0], FORMATS[form]
    if known.stored is not None:
        stored = known.stored(buffers)
    elif known.values is not None:
        stored = 8 * first.nbytes // known.values.bits  # `quads` stores four int8 as one int32
    else:
        stored = first.numel() if first.is_floating_point() else 2 * first.numel()  # integers hold pairs of bfloat16
    return 2 * stored * (out_val.numel() // rows)
