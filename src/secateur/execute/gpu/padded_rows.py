"""The format `padded_rows`: values and column numbers, with every row padded to the same length. For one or a few tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..find import Zeros
from ..formats import Buffers, Format, FormatOptions, Use, register
from .present import kernels, runs, suits

FEW = 4  # tokens up to which the format is tried; the weights are read again for each token
CHUNK, LANES = 256, 32
PADDING = 0xFFFF  # column number of an entry that holds no weight


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not suits(matrix, use) or max(use.rows) > FEW or zeros.sparsity < 0.6 or matrix.shape[1] >= PADDING:
        return
    counts = (matrix != 0).sum(1)
    if float(counts.max()) <= 1.3 * float(counts.float().mean()) + 64:  # otherwise most of the memory would be padding
        yield ()


def _storage_order(each: int, device: torch.device) -> Tensor:
    """Returns where each weight of a row is stored.

    A thread loads eight neighbouring entries at once, and the threads of a warp should read neighbouring columns of x.
    """
    place = torch.arange(each, device=device)
    whole = each // CHUNK * CHUNK
    moved = place // CHUNK * CHUNK + place % LANES * (CHUNK // LANES) + place % CHUNK // LANES
    return torch.where(place < whole, moved, place)


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    if matrix.shape[1] >= PADDING:
        raise ValueError(f"column numbers have two bytes, and there are {matrix.shape[1]} columns")
    kept = matrix != 0
    row, column = kept.nonzero(as_tuple=True)
    counts = kept.sum(1)
    each = -(-int(counts.max()) // 16) * 16 if len(matrix) else 0
    rank = torch.arange(len(row), device=matrix.device) - (counts.cumsum(0) - counts)[row]
    place = _storage_order(each, matrix.device)[rank] if len(row) else rank
    values = torch.zeros(len(matrix), each, dtype=matrix.dtype, device=matrix.device)
    index = torch.full((len(matrix), each), -1, dtype=torch.int16, device=matrix.device)
    values[row, place] = matrix[row, column]
    index[row, place] = column.to(torch.int16)
    return values, index


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, index = buffers
    column = index.long() & PADDING
    matrix = torch.zeros(rows, columns + 1, dtype=values.dtype, device=values.device)
    return matrix.scatter_(1, column.clamp(max=columns), values)[:, :columns].contiguous()


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    values, index = buffers
    if len(x) > FEW or not values.numel() or not runs(x, values):
        return None
    return kernels().padded_rows(x.contiguous(), values, index, bias)


PADDED_ROWS = register(Format("padded_rows", ("values", "index"), _fits, _pack, _unpack, _linear))
