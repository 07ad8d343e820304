# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Triton kernels before and after a product in float8, for `cusparselt8`. Imported when first run, as Triton may be missing.

Before the product, each input row is rounded to float8_e4m3fn. Its scale is the smallest power of two with which its largest
input is at most 448, the largest number in float8. Dividing by a power of two is exact, so that only small inputs (below 2**-6
after scaling) depend on the scale: float8 has fewer digits for them. After the product, a pass over the outputs multiplies by
the scales of input row and weight row, and adds the bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .triton_kernels import _early

HELD = 16384  # columns that a program keeps in registers; wider rows are read twice
HIGH, WIDE = 32, 256  # the tile of outputs of a program of the second kernel
SMALLEST = 32  # exponent bits of the largest input: the smallest scale is then 2**-103, and its inverse is finite


@triton.jit
def _largest(seen):
    size = tl.abs(seen)
    return tl.max(tl.where(size < float("inf"), size, 0.0), 0)


@triton.jit
def _small(seen, exponent, kind: tl.constexpr):
    """Divides by the scale and rounds. Inputs that are not finite become NaN, as float8 has no infinity."""
    seen = seen * ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    return tl.where(tl.abs(seen) < float("inf"), seen, float("nan")).to(kind)


@triton.jit
def _round_kernel(
    x, out, token_scales, tokens, columns, stride,
    EARLY: tl.constexpr, ONCE: tl.constexpr, HELD: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Rounds one row of x, or writes a row of zeros after the last one."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, HELD)
    x += row * stride
    out += row * columns
    kind: tl.constexpr = out.dtype.element_ty
    there = row < tokens
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the inputs are written
    if ONCE:
        seen = tl.load(x + at, mask=(at < columns) & there, other=0.0).to(tl.float32)
        largest = _largest(seen)
    else:
        largest = 0.0
        for first in range(0, columns, HELD):
            part = tl.load(x + first + at, mask=(first + at < columns) & there, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, _largest(part))
    # The exponent bits of the scale are those of the largest input less 8, or less 7 where its mantissa is above 1.75.
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23, SMALLEST)
    tl.store(token_scales + row, ((exponent - 8) << 23).to(tl.float32, bitcast=True), mask=there)
    if ONCE:
        tl.store(out + at, _small(seen, exponent, kind), mask=at < columns)
    else:
        for first in range(0, columns, HELD):
            part = tl.load(x + first + at, mask=(first + at < columns) & there, other=0.0).to(tl.float32)
            tl.store(out + first + at, _small(part, exponent, kind), mask=first + at < columns)


@triton.jit
def _scale_kernel(
    y, token_scales, scales, bias, tokens, rows, EARLY: tl.constexpr, BIAS: tl.constexpr, HIGH: tl.constexpr, WIDE: tl.constexpr
):
    """Multiplies a tile of y by the scales of its rows (tokens) and columns (the bits of bfloat16), and adds the bias."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # the outputs that were written last may still be in the cache
    across = tl.cdiv(rows, WIDE)
    token, row = tile // across * HIGH + tl.arange(0, HIGH), tile % across * WIDE + tl.arange(0, WIDE)
    own = (tl.load(scales + row, mask=row < rows, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    if BIAS:
        added = tl.load(bias + row, mask=row < rows, other=0.0).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_wait()  # until the product is written
    factor = tl.load(token_scales + token, mask=token < tokens, other=0.0)
    place = y + token.to(tl.int64)[:, None] * rows + row[None, :]
    inside = (token < tokens)[:, None] & (row < rows)[None, :]
    # Two numbers of bfloat16 have an exact product in float32. The power of two is last, so that it overflows only if y does.
    seen = tl.load(place, mask=inside, other=0.0).to(tl.float32) * own[None, :] * factor[:, None]
    if BIAS:
        seen += added[None, :]
    tl.store(place, seen.to(y.dtype.element_ty), mask=inside)


def rounded(x: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Returns x in float8, with rows of zeros up to `padded`, and the scale of each row of x in float32.

    Inputs that are not finite become NaN, and do not count for the scale.
    """
    (tokens, columns), early = x.shape, _early(x.device)
    if x.stride(1) != 1:
        x = x.contiguous()
    held = min(max(triton.next_power_of_2(columns), 256), HELD)
    scales = torch.empty(tokens, dtype=torch.float32, device=x.device)
    out = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    launch(
        _round_kernel, (padded, 1), (x, out, scales), (tokens, columns, x.stride(0)),
        (early, columns <= HELD, held, SMALLEST), num_warps=max(1, held // 1024), launch_pdl=early,
    )  # fmt: skip
    return out, scales


def scaled_(y: Tensor, token_scales: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """Multiplies a contiguous y [tokens, rows] by the scales of its rows and columns, adds the bias, and returns y.

    `scales` are the bits of bfloat16 [rows, 1]. Results are computed in float32 and rounded once.
    """
    (tokens, rows), early = y.shape, _early(y.device)
    launch(
        _scale_kernel, (-(-tokens // HIGH) * -(-rows // WIDE), 1), (y, token_scales, scales, scales if bias is None else bias),
        (tokens, rows), (early, bias is not None, HIGH, WIDE), num_warps=4, launch_pdl=early,
    )  # fmt: skip
    return y
