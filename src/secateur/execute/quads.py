"""The format `quads`: the tiled format over four neighbouring columns of int8, for CPUs that multiply four at once (VNNI).

It is for about eight or more input rows and only for rounded weights (`Values`). The inputs of each row are rounded to integers
of 16 bits times a power of two, and multiplied as two planes of bytes. In `quads8`, which stores the same, they are rounded to
integers of 8 bits times the largest input over 127: one plane, half the products. Products and sums are exact. The option is
the number of rows that share a list of columns.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from .find import Zeros, fill
from .formats import Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .tiled import DTYPES, TILED, as_float, product

FEATURES = ("avx512f", "avx512bw", "avx512vnni")
COLUMNS = 1 << 16  # with more, a sum of 255 * 127 * columns would not fit in 32 bits
LANES = 16  # inputs that are prepared at once


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cpu" or max(use.rows) < 8 or not build.has(*FEATURES):
        return
    if zeros.sparsity <= 0.1 or matrix.shape[1] > COLUMNS:
        return
    kept = matrix != 0
    if matrix.shape[1] % 4 or fill(kept, 1, 4) > 0.3:
        yield (1,)
    if fill(kept, 4, 4) > 0.3:
        yield (4,)


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    """Also returns the sum of each row, by which results are corrected."""
    four = F.pad(matrix, (0, -matrix.shape[1] % 4)).contiguous()
    return *TILED.pack(four.view(torch.int32), options), matrix.sum(1, dtype=torch.int32)


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    four = TILED.unpack(buffers[:-1], rows, -(-columns // 4), options).flatten()
    return four.view(torch.int8).view(rows, -1)[:, :columns].contiguous()


def _linear(
    x: Tensor,
    buffers: Buffers,
    bias: Tensor | None,
    rows: int,
    options: FormatOptions,
    scales: Scales | None = None,
    *,
    planes: int,
) -> Tensor | None:
    (*held, sums), (batch, columns) = buffers, x.shape
    if scales is None or x.dtype not in DTYPES or not (x.is_cpu and sums.is_cpu) or not build.has(*FEATURES):
        return None
    seen, threads = F.pad(x.float(), (0, -columns % LANES)).contiguous(), torch.get_num_threads()
    parts, inverse = torch.empty(planes * batch, seen.shape[1], dtype=torch.uint8), torch.empty(batch)
    wide, places = seen.shape[1], map(Tensor.data_ptr, (parts, inverse))
    build.run(build.kernel("quads.prepare", 8, planes), (seen.data_ptr(), batch, wide, *places, wide), threads)
    if not bool(inverse.isfinite().all()):
        return None  # integers cannot hold some of the inputs
    packed = parts.view(torch.float32)  # only moved as bits; no arithmetic is done in float32
    found, extra = product(packed, held, None, rows, options[0], "float32", "quad"), as_float(bias, rows)
    y = torch.empty(batch, rows)
    places = map(Tensor.data_ptr, (sums, scales.bits, inverse, extra, y))
    build.run(build.kernel("quads.finish", planes), (found.data_ptr(), batch, rows, *places), threads)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


QUADS = register(
    Format(
        "quads", (*TILED.buffers, "sums"), _fits, _pack, _unpack, partial(_linear, planes=2), allowed=((1,), (4,)),
        takes=("int8",), numbers=("sums",),
    )
)  # fmt: skip
QUADS8 = register(replace(QUADS, name="quads8", linear=partial(_linear, planes=1), inputs="int8"))
