"""Two of four for up to a few dozen tokens: the sparse tensor cores, fed from memory without a detour.

A brick is 16 rows by 256 columns: eight steps of the instruction (mma.sp, m16n8k32; layout of its fragments: NVIDIA, PTX ISA).
Values and two-bit indices lie in the order in which the threads of a warp want them: 9 bits for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import Buffers, Format, Options, Use, register
from .present import HALVES, kernels, missing, runs

ROWS, COLUMNS = 16, 256
TOGETHER = 32  # rows that one program computes
FEW, TOKENS = 16, 1024  # tokens for which it is tried, and for which it runs: beyond 16, the weights are read again


@cache
def _choices(device: torch.device) -> Tensor:
    """For each set of weights in a group of four (as bits), the two places that are stored; -1 where there are three."""
    table = []
    for kept in range(16):
        places = [i for i in range(4) if kept >> i & 1]
        free = [i for i in (0, 1, 2, 3) if i not in places]
        both = sorted((places + free)[:2])
        table.append(both if len(places) < 3 else [-1, -1])
    return torch.tensor(table, device=device)


def two_of_four(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """The two values of each group of four columns, and their places in it, in order: [rows, groups, 2] each."""
    rows, columns = matrix.shape
    if columns % 4:
        raise ValueError(f"{columns} columns are not groups of four")
    groups = matrix.reshape(rows, columns // 4, 4)
    bits = ((groups != 0).to(torch.uint8) << torch.arange(4, dtype=torch.uint8, device=matrix.device)).sum(-1)
    places = _choices(matrix.device)[bits]
    if matrix.numel() and int(places.min()) < 0:
        raise ValueError("a group of four columns holds more than two weights")
    return groups.gather(-1, places), places


def spread(values: Tensor, places: Tensor) -> Tensor:
    """The matrix again."""
    rows, groups, _ = values.shape
    matrix = torch.zeros(rows, groups, 4, dtype=values.dtype, device=values.device)
    return matrix.scatter_(-1, places, values).view(rows, groups * 4)


def is_two_of_four(matrix: Tensor, zeros: Zeros) -> bool:
    """Also where the pattern has another name, such as 1:4 or blocks."""
    if zeros.pattern == "2:4":
        return True
    rows, columns = matrix.shape
    return zeros.sparsity >= 0.5 and columns % 4 == 0 and int((matrix != 0).view(rows, -1, 4).sum(-1).max()) <= 2


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cuda" or missing() is not None or matrix.dtype not in HALVES:
        return
    if max(use.rows) <= FEW and is_two_of_four(matrix, zeros):
        yield ()


def _pack(matrix: Tensor, options: Options) -> tuple[Tensor, ...]:
    rows, columns = matrix.shape
    padded = F.pad(matrix, (0, -columns % COLUMNS, 0, -rows % TOGETHER))
    tiles, bricks = len(padded) // ROWS, padded.shape[1] // COLUMNS
    values, places = two_of_four(padded)
    # row = 8 * half + lane // 4; column = 256 * brick + 32 * step + 16 * part + 4 * (lane % 4) + place
    cut = values.view(tiles, 2, 8, bricks, 8, 2, 4, 2)  # tile, half, row, brick, step, part, group, value
    ordered = cut.permute(0, 3, 4, 2, 6, 5, 1, 7).reshape(tiles, bricks, 8, 32, 8)
    codes = (places[..., 0] | places[..., 1] << 2).view(tiles, 2, 8, bricks, 4, 2, 2, 4)  # ..., word, step, part, group
    shifts = 16 * torch.arange(2, device=matrix.device)[:, None] + 4 * torch.arange(4, device=matrix.device)
    words = (codes.permute(0, 3, 2, 5, 6, 4, 1, 7) << shifts).sum((-1, -2)).to(torch.int32)  # wraps, as bits should
    return ordered.contiguous(), words.reshape(tiles, bricks, 32, 4).contiguous()


def _unpack(buffers: Buffers, rows: int, columns: int, options: Options) -> Tensor:
    values, words = buffers
    tiles, bricks = values.shape[:2]
    cut = values.view(tiles, bricks, 8, 8, 4, 2, 2, 2).permute(0, 6, 3, 1, 2, 5, 4, 7)
    shifts = 16 * torch.arange(2, device=words.device)[:, None] + 4 * torch.arange(4, device=words.device)
    codes = (words.view(tiles, bricks, 8, 2, 2, 4, 1, 1) >> shifts).to(torch.uint8) & 15
    codes = codes.permute(0, 6, 2, 1, 5, 3, 4, 7).reshape(tiles * ROWS, -1)
    places = torch.stack([codes & 3, codes >> 2], -1).long()
    return spread(cut.reshape(tiles * ROWS, -1, 2), places)[:rows, :columns].contiguous()


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    values, words = buffers
    if len(x) > TOKENS or not runs(x, values):
        return None
    return kernels().bricks(x.contiguous(), values, words, bias, rows)


BRICKS = register(Format("bricks", ("values", "words"), _fits, _pack, _unpack, _linear))
