"""The format `sparse24_mma`: 2:4 for few tokens, multiplied by the sparse tensor cores (the PTX instruction `mma.sp`).

The matrix is stored in tiles of 16 rows by 256 columns, which are eight steps of the instruction (m16n8k32; the layout of its
fragments: NVIDIA, PTX ISA). Values and two-bit indices are stored in the order in which the threads of a warp read them. That
takes 9 bits per weight in half precision, 5 with values of 8 bits, 3 with values of 4 bits.

The option is the number of bits of a value, for the kernel that stages inputs in shared memory (bfloat16 inputs). Without an
option, the first kernel is used, which also takes float16.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import PLAIN, Buffers, Format, FormatOptions, Scales, Use, register
from .present import kernels, missing, runs, staged_kernels, suits

ROWS, COLUMNS = 16, 256  # of a tile
TOGETHER = 32  # rows that one Triton program computes
FEW, TOKENS = 16, 1024  # most tokens for which it is measured, and for which it runs; every 16 tokens read the weights again
# By bits of a value: the eight steps as [parts, steps of a part], and the order in which a lane's values are stored. A part is
# what a lane loads at once, 16 bytes. Dimensions: tile down, half, row, tile across, part, step, part of a step, group, value.
LAYOUTS = {
    16: ((8, 1), (0, 3, 4, 2, 7, 5, 6, 1, 8)),
    8: ((4, 2), (0, 3, 4, 2, 7, 5, 6, 8, 1)),
    4: ((2, 4), (0, 3, 4, 2, 7, 5, 8, 6, 1)),
}


@cache
def _choices(device: torch.device) -> Tensor:
    """Returns, for each of the 16 sets of nonzero places in a group of four, the two places to store; -1 for larger sets."""
    table = []
    for kept in range(16):
        places = [i for i in range(4) if kept >> i & 1]
        free = [i for i in (0, 1, 2, 3) if i not in places]
        both = sorted((places + free)[:2])
        table.append(both if len(places) < 3 else [-1, -1])
    return torch.tensor(table, device=device)


def two_of_four(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the two stored values of each group of four columns and their places in it, each [rows, groups, 2]."""
    rows, columns = matrix.shape
    if columns % 4:
        raise ValueError(f"{columns} columns cannot be divided into groups of four")
    groups = matrix.reshape(rows, columns // 4, 4)
    bits = ((groups != 0).to(torch.uint8) << torch.arange(4, dtype=torch.uint8, device=matrix.device)).sum(-1)
    places = _choices(matrix.device)[bits]
    if matrix.numel() and int(places.min()) < 0:
        raise ValueError("a group of four columns holds more than two weights")
    return groups.gather(-1, places), places


def spread(values: Tensor, places: Tensor) -> Tensor:
    """Undoes `two_of_four`."""
    rows, groups, _ = values.shape
    matrix = torch.zeros(rows, groups, 4, dtype=values.dtype, device=values.device)
    return matrix.scatter_(-1, places, values).view(rows, groups * 4)


def is_two_of_four(matrix: Tensor, zeros: Zeros) -> bool:
    """Returns True if no group of four columns has more than two nonzeros, whatever the pattern is called (1:4, blocks)."""
    if zeros.pattern == "2:4":
        return True
    rows, columns = matrix.shape
    return zeros.sparsity >= 0.5 and columns % 4 == 0 and int((matrix != 0).view(rows, -1, 4).sum(-1).max()) <= 2


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not suits(matrix, use) or max(use.rows) > FEW or not is_two_of_four(matrix, zeros):
        return
    if use.values is None:
        yield from ((), (16,)) if matrix.dtype == torch.bfloat16 else ((),)
    elif matrix.dtype == torch.bfloat16 and len(matrix) % TOGETHER == 0 and matrix.shape[1] % COLUMNS == 0:
        yield (use.values.bits,)


def _layout(options: FormatOptions, down: int, across: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns the shape of the values before they are put in order, and the order."""
    steps, order = LAYOUTS[options[0] if options else 16]
    return (down, 2, 8, across, *steps, 2, 4, 2), order


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % COLUMNS, 0, -rows % TOGETHER))
    down, across = len(padded) // ROWS, padded.shape[1] // COLUMNS  # tiles
    values, places = two_of_four(padded)
    # row = 16 * down + 8 * half + lane // 4; column = 256 * across + 32 * step + 16 * part + 4 * (lane % 4) + place
    shape, order = _layout(options, down, across)
    ordered = values.view(shape).permute(order).reshape(down, across, shape[4], 32, 8 * shape[5])
    codes = (places[..., 0] | places[..., 1] << 2).view(down, 2, 8, across, 4, 2, 2, 4)  # ..., word, step, part, group
    shifts = 16 * torch.arange(2, device=matrix.device)[:, None] + 4 * torch.arange(4, device=matrix.device)
    words = (codes.permute(0, 3, 2, 5, 6, 4, 1, 7) << shifts).sum((-1, -2)).to(torch.int32)  # the top bit wraps to the sign
    return ordered.contiguous(), words.reshape(down, across, 32, 4).contiguous()


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, words = buffers
    down, across = values.shape[:2]
    shape, order = _layout(options, down, across)
    cut = values.view([shape[d] for d in order]).permute([order.index(d) for d in range(len(order))])
    shifts = 16 * torch.arange(2, device=words.device)[:, None] + 4 * torch.arange(4, device=words.device)
    codes = (words.view(down, across, 8, 2, 2, 4, 1, 1) >> shifts).to(torch.uint8) & 15
    codes = codes.permute(0, 6, 2, 1, 5, 3, 4, 7).reshape(down * ROWS, -1)
    places = torch.stack([codes & 3, codes >> 2], -1).long()
    return spread(cut.reshape(down * ROWS, -1, 2), places)[:rows, :columns].contiguous()


def _linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    values, words = buffers
    if x.numel() > TOKENS * x.shape[-1] or not (runs(x, values) if scales is None else _runs_scaled(x, values, rows)):
        return None
    if not options:
        y = kernels().sparse24_mma(x.reshape(-1, x.shape[-1]).contiguous(), values, words, bias, rows)
        return y.view(*x.shape[:-1], rows)
    if x.dtype != torch.bfloat16:
        return None
    held, group = (None, 0) if scales is None else (scales.bits, scales.values.group)
    return staged_kernels().staged(x, values, words, held, bias, rows, options[0], group)


def _runs_scaled(x: Tensor, values: Tensor, rows: int) -> bool:
    """Returns True if the kernel can multiply bfloat16 inputs with these values, whose rows and columns fill whole tiles."""
    whole = rows % TOGETHER == 0 and x.shape[-1] % COLUMNS == 0
    return whole and x.dtype == torch.bfloat16 and x.is_cuda and x.device == values.device and missing() is None


SPARSE24_MMA = register(
    Format(
        "sparse24_mma", ("values", "words"), _fits, _pack, _unpack, _linear, allowed=((), (16,), (8,), (4,)),
        takes=(PLAIN, "int8", "int8/64", "int8/128", "int4/64", "int4/128"), any_rank=True,
    )
)  # fmt: skip
