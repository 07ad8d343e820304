"""Lists of columns for one token, blocks for many tokens, and the transposed weight for inputs that are mostly zero."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros, fill, owners
from ..formats import Buffers, Format, Options, Use, register
from .present import HALVES, kernels, missing, runs

FEW = 4  # tokens up to which lists are tried: each reads the weights again
CHUNK, LANES = 256, 32
NOTHING = 0xFFFF  # the column of a place that holds no weight


def _here(matrix: Tensor, use: Use) -> bool:
    return use.kind == "linear" and use.device == "cuda" and missing() is None and matrix.dtype in HALVES


# ---------------------------------------------------------------- lists


def _lists_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not _here(matrix, use) or max(use.rows) > FEW or zeros.sparsity < 0.6 or matrix.shape[1] >= NOTHING:
        return
    counts = (matrix != 0).sum(1)
    if float(counts.max()) <= 1.3 * float(counts.float().mean()) + 64:  # rows are as long as the longest
        yield ()


def _in_turns(each: int, device: torch.device) -> Tensor:
    """Where the weights of a row go: a thread reads eight at once, and the threads of a warp look at columns side by side."""
    place = torch.arange(each, device=device)
    whole = each // CHUNK * CHUNK
    moved = place // CHUNK * CHUNK + place % LANES * (CHUNK // LANES) + place % CHUNK // LANES
    return torch.where(place < whole, moved, place)


def _lists_pack(matrix: Tensor, options: Options) -> tuple[Tensor, ...]:
    if matrix.shape[1] >= NOTHING:
        raise ValueError(f"column numbers have two bytes, and there are {matrix.shape[1]} columns")
    kept = matrix != 0
    row, column = kept.nonzero(as_tuple=True)
    counts = kept.sum(1)
    each = -(-int(counts.max()) // 16) * 16 if len(matrix) else 0
    rank = torch.arange(len(row), device=matrix.device) - (counts.cumsum(0) - counts)[row]
    place = _in_turns(each, matrix.device)[rank] if len(row) else rank
    values = torch.zeros(len(matrix), each, dtype=matrix.dtype, device=matrix.device)
    index = torch.full((len(matrix), each), -1, dtype=torch.int16, device=matrix.device)
    values[row, place] = matrix[row, column]
    index[row, place] = column.to(torch.int16)
    return values, index


def _lists_unpack(buffers: Buffers, rows: int, columns: int, options: Options) -> Tensor:
    values, index = buffers
    column = index.long() & NOTHING
    matrix = torch.zeros(rows, columns + 1, dtype=values.dtype, device=values.device)
    return matrix.scatter_(1, column.clamp(max=columns), values)[:, :columns].contiguous()


def _lists_linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    values, index = buffers
    if len(x) > FEW or not values.numel() or not runs(x, values):
        return None
    return kernels().lists(x.contiguous(), values, index, bias)


LISTS = register(Format("lists", ("values", "index"), _lists_fits, _lists_pack, _lists_unpack, _lists_linear))

# ---------------------------------------------------------------- skips


def _skips_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if _here(matrix, use) and max(use.rows) == 1 and use.input_zeros >= 0.25:
        yield ()


def _skips_linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    (weight,) = buffers
    if len(x) != 1 or not runs(x, weight):
        return F.linear(x, weight.t().to(x.dtype), bias)
    return kernels().skips(x.contiguous(), weight, bias)


SKIPS = register(
    Format(
        "skips", ("values",), _skips_fits, lambda matrix, _: (matrix.t().contiguous(),),
        lambda buffers, rows, columns, options: buffers[0].t().contiguous(), _skips_linear,
    )
)  # fmt: skip

# ---------------------------------------------------------------- squares

DEEP = 64  # columns of a piece: what the tensor cores take at a time


def _squares_fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not _here(matrix, use) or min(use.rows) < 64 or zeros.sparsity < 0.3:
        return
    yield from ((height,) for height in (128, 64) if fill(matrix != 0, height, DEEP) > 0.7)


def _squares_pack(matrix: Tensor, options: Options) -> tuple[Tensor, ...]:
    (height,), (rows, columns) = options, matrix.shape
    if rows % height or columns % DEEP:
        raise ValueError(f"{rows} by {columns} is not made of pieces of {height} by {DEEP}")
    pieces = matrix.view(rows // height, height, columns // DEEP, DEEP).transpose(1, 2)
    row, column = (pieces != 0).any(-1).any(-1).nonzero(as_tuple=True)
    counts = torch.bincount(row, minlength=rows // height)
    order = counts.argsort(descending=True, stable=True)  # long rows first, so that none is left over at the end
    starts = F.pad(counts.cumsum(0), (1, 0))
    return pieces[row, column].contiguous(), column.to(torch.int32), starts.to(torch.int32), order.to(torch.int32)


def _squares_unpack(buffers: Buffers, rows: int, columns: int, options: Options) -> Tensor:
    (height,), (values, index, starts, _) = options, buffers
    row = owners(starts, len(index))
    pieces = torch.zeros(rows // height, columns // DEEP, height, DEEP, dtype=values.dtype, device=values.device)
    pieces[row, index.long()] = values
    return pieces.transpose(1, 2).reshape(rows, columns)


def _squares_linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    values, index, starts, order = buffers
    if not values.numel() or not runs(x, values):
        return None
    return kernels().squares(x.contiguous(), values, index, starts, order, bias, rows)


SQUARES = register(
    Format(
        "squares", ("values", "index", "starts", "order"), _squares_fits, _squares_pack, _squares_unpack, _squares_linear,
        allowed=((128,), (64,)),
    )
)  # fmt: skip
