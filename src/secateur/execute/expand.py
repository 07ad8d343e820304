"""The format `expand`: one bit for each weight, and the nonzero values in int8 or int4, on CPUs with AVX-512 VNNI.

It is for one input row and up to about 90 % zeros. Four rows are stored in turn, 64 columns of each. The values of these 64
columns are an even number, so that two int4 share a byte; a zero is added where it is odd. Inputs are rounded to integers of 23
bits times a power of two; products and sums are exact.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import pack_bits, unpack_bits
from ..values import GROUPS
from .find import Zeros
from .formats import Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .single import UNIT, by_rows, padded, scales_of, stored_as, usable
from .tiled import scratch

TOGETHER = 4  # rows that are stored in turn
PAST = 64  # the kernel reads up to 64 values past the end
SCRATCH = 384  # bytes for 64 inputs as integers (`native.fixed_point`)
EXPANDS = ("avx512f", "avx512bw", "avx512vbmi2", "avx512vnni")


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if usable(use, *EXPANDS) and 0.1 < zeros.sparsity < 0.9:
        yield ()


def _in_turn(matrix: Tensor) -> Tensor:
    """Returns 64 columns of each of four rows in turn, as rows of 64 columns. Zeros fill up rows and columns."""
    wide = F.pad(matrix, (0, -matrix.shape[1] % UNIT, 0, -len(matrix) % TOGETHER))
    return wide.view(-1, TOGETHER, wide.shape[1] // UNIT, UNIT).transpose(1, 2).reshape(-1, UNIT)


def _places(kept: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the place of each value among the stored values, and where each row of 64 columns ends."""
    counts = kept.sum(1)
    ends = (counts + counts % 2).cumsum(0)
    row = kept.nonzero()[:, 0]
    gaps = ends - counts.cumsum(0)  # zeros that were added up to the end of a row
    return torch.arange(len(row), device=row.device) + (gaps - counts % 2)[row], ends


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    rows, groups = _in_turn(matrix), -(-len(matrix) // TOGETHER)
    kept = rows != 0
    places, ends = _places(kept)
    values = matrix.new_zeros(int(ends[-1]) + PAST)
    values[places] = rows[kept]
    return values, pack_bits(kept).view(groups * TOGETHER, -1), F.pad(ends.view(groups, -1)[:, -1], (1, 0))


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, masks, _ = buffers
    kept = unpack_bits(masks.view(-1, UNIT // 8), UNIT)
    matrix = torch.zeros(kept.shape, dtype=values.dtype, device=values.device)
    matrix[kept] = values[_places(kept)[0]]
    four = matrix.view(-(-rows // TOGETHER), -1, TOGETHER, UNIT).transpose(1, 2)
    return four.reshape(len(four) * TOGETHER, -1)[:rows, :columns].contiguous()


def _linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    stored = stored_as(x, buffers[0], scales)
    if scales is None or stored is None or not build.has(*EXPANDS):
        return None
    units, odd = buffers[1].shape[1] // (UNIT // 8), array("q", [0])
    room = (units + 1) * SCRATCH  # for each thread
    memory = scratch(torch.get_num_threads() * room // 4)
    held = rows, units, *map(Tensor.data_ptr, buffers), *scales_of(scales), memory.data_ptr(), room, odd.buffer_info()[0]
    y = by_rows(build.kernel("expand.expand", *stored), held, x, bias, rows, padded(x, UNIT))
    return None if odd[0] else y  # integers cannot hold some of the inputs


EXPAND = register(
    Format(
        "expand", ("values", "masks", "starts"), _fits, _pack, _unpack, _linear,
        takes=tuple(f"{kind}{group}" for kind in ("int8", "int4") for group in ("", *(f"/{each}" for each in GROUPS))),
    )
)  # fmt: skip
