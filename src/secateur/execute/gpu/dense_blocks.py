"""The format `dense_blocks`: the blocks that are not all zero, each stored densely. For many tokens."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros, fill, owners
from ..formats import Buffers, Format, FormatOptions, Use, register
from .present import kernels, runs, suits

WIDTH = 64  # columns of a block: what the tensor cores take at a time; the height (64 or 128) is the option


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not suits(matrix, use) or min(use.rows) < 64 or zeros.sparsity < 0.3:
        return
    yield from ((height,) for height in (128, 64) if fill(matrix != 0, height, WIDTH) > 0.7)


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    (height,), (rows, columns) = options, matrix.shape
    if rows % height or columns % WIDTH:
        raise ValueError(f"blocks of {height}x{WIDTH} do not divide a matrix of {rows}x{columns}")
    blocks = matrix.view(rows // height, height, columns // WIDTH, WIDTH).transpose(1, 2)
    row, column = (blocks != 0).any(-1).any(-1).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=rows // height)
    order = counts.argsort(descending=True, stable=True)  # longest rows first, so that no long one starts last
    starts = F.pad(counts.cumsum(0), (1, 0))
    return blocks[row, column].contiguous(), column.to(torch.int32), starts.to(torch.int32), order.to(torch.int32)


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    (height,), (values, index, starts, _) = options, buffers
    row = owners(starts, len(index))
    blocks = torch.zeros(rows // height, columns // WIDTH, height, WIDTH, dtype=values.dtype, device=values.device)
    blocks[row, index.long()] = values
    return blocks.transpose(1, 2).reshape(rows, columns)


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    values, index, starts, order = buffers
    if not values.numel() or not runs(x, values):
        return None
    return kernels().dense_blocks(x.contiguous(), values, index, starts, order, bias, rows)


DENSE_BLOCKS = register(
    Format(
        "dense_blocks", ("values", "index", "starts", "order"), _fits, _pack, _unpack, _linear, allowed=((128,), (64,))
    )
)  # fmt: skip
