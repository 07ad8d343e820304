"""The format `padded_rows`: values and column numbers, with every row padded to the same length. For one or a few tokens.

Without an option, a column number has two bytes. The option is the number of bits of a value, for rows stored in runs of 16
entries: a run has the number of its first column, in two bytes, and the difference of each column to the one before, in one
byte. Where a difference is larger than 255, an entry of value zero is put between. A lane of a warp reads one run at a time;
run r of a row is read in turn r % turns by lane r // turns, and stored in this order.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import PLAIN, Buffers, Format, FormatOptions, Scales, Use, register
from .present import HALVES, kernels, missing, row_kernels, runs, suits

FEW = 4  # tokens up to which the format is tried; the weights are read again for each token
CHUNK, LANES = 256, 32
PADDING = 0xFFFF  # column number of an entry that holds no weight, or of a run without entries
RUN, FAR = 16, 255  # entries of a run, and the largest difference of two columns
RUN_COLUMNS = 16384  # most columns of a row stored in runs, whose kernel keeps the inputs in shared memory


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not suits(matrix, use) or max(use.rows) > FEW or zeros.sparsity < 0.6 or matrix.shape[1] >= PADDING:
        return
    counts = (matrix != 0).sum(1)
    if float(counts.max()) <= 1.3 * float(counts.float().mean()) + 64:  # otherwise most of the memory would be padding
        if use.values is None:
            yield ()
        if matrix.shape[1] <= RUN_COLUMNS:
            yield (16 if use.values is None else use.values.bits,)


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
    if options:
        return _pack_runs(matrix, options[0])
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


def _pack_runs(matrix: Tensor, bits: int) -> tuple[Tensor, ...]:
    """Returns the values [rows, turns, parts of 16 bytes, lanes, values], and the differences, then the columns of the runs."""
    rows, device = len(matrix), matrix.device
    row, column = (matrix != 0).nonzero(as_tuple=True)
    gap = column.diff(prepend=column[:1])
    starts = row.diff(prepend=row[:1] - 1) != 0
    gap = torch.where(starts, 0, gap)
    more = (gap - 1).clamp(min=0) // FAR  # entries without a weight before this one
    entry = torch.arange(len(row), device=device).repeat_interleave(more + 1)
    left = (more + 1).cumsum(0)[entry] - 1 - torch.arange(len(entry), device=device)  # of these, still to come
    row, step = row[entry], torch.where(left == more[entry], gap[entry] - FAR * more[entry], FAR)
    counts = torch.zeros(rows, dtype=torch.long, device=device).scatter_add_(0, row, torch.ones_like(row))
    rank = torch.arange(len(row), device=device) - (counts.cumsum(0) - counts)[row]
    runs = -(-int(counts.max()) // RUN) if len(row) else 0
    turns = -(-runs // LANES)
    lanes = -(-runs // (2 * turns)) * 2 if turns else 0  # an even number, so that a turn is a multiple of 32 bytes
    run, place, parts = rank // RUN, rank % RUN, bits // 8
    turn, lane, wide = (run % turns, run // turns, RUN // parts) if turns else (run, run, RUN)
    values = torch.zeros(rows, turns, parts, lanes, wide, dtype=matrix.dtype, device=device)
    last = left == 0
    where = (row, turn, place // wide, lane, place % wide)
    values[tuple(each[last] for each in where)] = matrix[matrix != 0]
    steps = torch.zeros(rows, turns, lanes, RUN, dtype=torch.uint8, device=device)
    steps[row, turn, lane, place] = torch.where(place == 0, 0, step).to(torch.uint8)
    first = torch.full((rows, turns, lanes), -1, dtype=torch.int16, device=device)
    begins = place == 0
    first[row[begins], turn[begins], lane[begins]] = (column[entry] - FAR * left)[begins].to(torch.int16)
    return values, torch.cat([steps.flatten(), first.flatten().view(torch.uint8)])


def _unpack_runs(values: Tensor, index: Tensor, rows: int, columns: int) -> Tensor:
    _, turns, parts, lanes, wide = values.shape
    shape = (rows, turns, lanes, RUN)
    steps, first = index[: rows * turns * lanes * RUN].view(shape).long(), index[rows * turns * lanes * RUN :]
    column = (first.clone().view(torch.int16).view(shape[:3]).long() & PADDING).unsqueeze(-1) + steps.cumsum(-1)
    none = F.pad(steps[..., 1:] == 0, (1, 0))  # the columns of two weights differ
    column = column.masked_fill_(none, columns).clamp_(max=columns).view(rows, turns * lanes * RUN)
    matrix = torch.zeros(rows, columns + 1, dtype=values.dtype, device=values.device)
    held = values.transpose(2, 3).reshape(rows, turns * lanes * parts * wide)
    return matrix.scatter_(1, column, held)[:, :columns].contiguous()


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, index = buffers
    if options:
        return _unpack_runs(values, index, rows, columns)
    column = index.long() & PADDING
    matrix = torch.zeros(rows, columns + 1, dtype=values.dtype, device=values.device)
    return matrix.scatter_(1, column.clamp(max=columns), values)[:, :columns].contiguous()


def _linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    values, index = buffers
    if len(x) > FEW or not values.numel() or not (runs(x, values) if scales is None else _runs_scaled(x, values)):
        return None
    if not options:
        return kernels().padded_rows(x.contiguous(), values, index, bias) if scales is None else None
    if options[0] != 8 * values.element_size() or x.shape[1] > RUN_COLUMNS:
        return None
    return row_kernels().runs(x, values, index, None if scales is None else scales.bits, bias)


def _runs_scaled(x: Tensor, values: Tensor) -> bool:
    """Returns True if the kernel can multiply these inputs with values in 8 bits."""
    return x.is_cuda and x.device == values.device and x.dtype in HALVES and missing() is None


PADDED_ROWS = register(
    Format(
        "padded_rows", ("values", "index"), _fits, _pack, _unpack, _linear, allowed=((), (16,), (8,)), takes=(PLAIN, "int8")
    )
)  # fmt: skip
