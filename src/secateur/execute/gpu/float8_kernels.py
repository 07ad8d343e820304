# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportOperatorIssue=false
"""Triton kernels that round inputs to float8_e4m3fn, for `cusparselt8`. Imported when first run, as Triton may be missing.

All inputs of a call share one scale: the smallest power of two with which the largest input is at most 448, the largest
number in float8. Dividing by a power of two is exact, so a number is rounded in the same way whatever the scale is, unless it
is so small that float8 has fewer digits for it (2**-6 after scaling). The scale stays on the device.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import launch
from .triton_kernels import _early, _multiprocessors

SIZE, WARPS = 8192, 8  # inputs that a program takes at once
PARTS = 1024  # most programs of the first kernel
SMALLEST = 32  # exponent bits: with the smallest scale, 2**-103, no product of a scale and an input is subnormal


@triton.jit
def _largest_kernel(x, parts, tokens, columns, blocks, EARLY: tl.constexpr, SIZE: tl.constexpr):
    """Writes the largest finite magnitude that each program has found."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    count = columns.to(tl.int64) * tokens
    largest = tl.zeros([SIZE], tl.float32)
    for block in range(tl.program_id(0), blocks, tl.num_programs(0)):
        at = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
        size = tl.abs(tl.load(x + at, mask=at < count, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.where(size < float("inf"), size, 0.0))
    tl.store(parts + tl.program_id(0), tl.max(largest, 0))


@triton.jit
def _round_kernel(
    x, parts, scales, out, factors, tokens, padded, columns, rows, found,
    EARLY: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, SMALLEST: tl.constexpr,
):  # fmt: skip
    """Rounds x, and multiplies the scale of each row of the weight (the bits of bfloat16) by that of the inputs."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    part = tl.arange(0, PARTS)
    largest = tl.max(tl.load(parts + part, mask=part < found, other=0.0), 0)
    # The exponent bits of the scale are those of the largest input less 8, or less 7 where its mantissa is above 1.75.
    exponent = tl.maximum((largest.to(tl.int32, bitcast=True) + 0x1FFFFF) >> 23, SMALLEST)
    scale = ((exponent - 8) << 23).to(tl.float32, bitcast=True)
    inverse = ((262 - exponent) << 23).to(tl.float32, bitcast=True)
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the inputs that were read last are still in the cache
    at = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    seen = tl.load(x + at, mask=at < columns.to(tl.int64) * tokens, other=0.0).to(tl.float32) * inverse
    seen = tl.where(tl.abs(seen) < float("inf"), seen, float("nan"))  # float8 has no infinity
    tl.store(out + at, seen.to(out.dtype.element_ty), mask=at < columns.to(tl.int64) * padded)
    for first in range(tl.program_id(0) * 256, rows, tl.num_programs(0) * 256):
        row = first + tl.arange(0, 256)
        own = (tl.load(scales + row, mask=row < rows, other=0).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        tl.store(factors + row, own * scale, mask=row < rows)


def rounded(x: Tensor, scales: Tensor, padded: int) -> tuple[Tensor, Tensor]:
    """Returns contiguous inputs in float8, with rows of zeros up to `padded`, and a factor for each row of the weight.

    `scales` are the bits of bfloat16 [rows, 1]. The product of the weight's and the inputs' float8 numbers, times the factor of
    the row, is the product of the rounded weight and inputs. Inputs that are not finite become NaN, and do not count for the
    scale.
    """
    (tokens, columns), rows = x.shape, len(scales)
    blocks, early = -(-x.numel() // SIZE), _early(x.device)
    programs = min(blocks, 4 * _multiprocessors(x.device), PARTS)
    sizes = tokens, padded, columns, rows, programs
    parts = torch.empty(programs, dtype=torch.float32, device=x.device)
    factors = torch.empty(rows, dtype=torch.float32, device=x.device)
    out = torch.empty(padded, columns, dtype=torch.float8_e4m3fn, device=x.device)
    launch(_largest_kernel, (programs, 1), (x, parts), (tokens, columns, blocks), (early, SIZE), num_warps=WARPS)
    launch(
        _round_kernel, (-(-out.numel() // SIZE), 1), (x, parts, scales, out, factors), sizes,
        (early, SIZE, PARTS, SMALLEST), num_warps=WARPS, launch_pdl=early,
    )  # fmt: skip
    return out, factors
