"""The format `windows`: any pattern, int8, for one input row on x86 with AVX2.

Sixteen rows go through the columns together. In each step they share a window of neighbouring columns, and each row takes its
next weights there, up to four. A window starts at the first column that some row still needs. A place in a window of 16 columns
is stored in four bits, in a wider one in a byte. Inputs are rounded to integers of 16 bits (14 without AVX-512 VNNI) times a
power of two; products and sums are exact. The option is the width of the windows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
import torch.nn.functional as F
from torch import Tensor

from .find import Zeros, owners
from .formats import Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .single import COLUMNS, MORE, padded, usable
from .tiled import DTYPES, as_float

TOGETHER, EACH = 16, 4  # rows that share a window, and weights that a row takes from it
SLOTS = TOGETHER * EACH
NARROW = 16  # the window whose places are stored in four bits
WIDTHS = (NARROW, 64, 128)
LANES = 16  # inputs that are prepared at once
VNNI = ("avx512f", "avx512bw", "avx512vnni")
END = 1 << 30  # larger than any column


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if not usable(use, "avx2") or matrix.shape[1] > COLUMNS:
        return
    if 0.3 < zeros.sparsity < 0.85:
        yield (16,)
    if zeros.sparsity > 0.75:
        yield (64,) if zeros.sparsity < 0.9 or not build.has(*VNNI, "avx512vbmi") else (128,)


def _steps(kept: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the columns [steps, 16 rows, 4] that each step takes (-1: none), its first column, and its group of rows."""
    counts = kept.sum(1)
    row, column = kept.nonzero(as_tuple=True)
    rank = torch.arange(len(row), device=row.device) - (counts.cumsum(0) - counts)[row]
    ordered = torch.full((len(kept), int(counts.max()) + EACH), END, dtype=torch.int32, device=row.device)
    ordered[row, rank] = column.int()
    done, next_ = torch.zeros_like(counts).unsqueeze(1), torch.arange(EACH, device=row.device)
    firsts, taken = [], []
    while True:
        seen = ordered.gather(1, done + next_)
        first = seen[:, 0].view(-1, TOGETHER).amin(1)
        if not bool((first < END).any()):
            break
        take = (seen < first.repeat_interleave(TOGETHER).unsqueeze(1) + width) & (seen < END)
        done += take.sum(1, keepdim=True)
        firsts.append(first)
        taken.append(torch.where(take, seen, -1))
    if not firsts:
        return ordered.new_empty(0, TOGETHER, EACH), ordered.new_empty(0), counts.new_empty(0)
    first, columns = torch.stack(firsts, 1), torch.stack(taken).view(len(firsts), -1, TOGETHER, EACH).transpose(0, 1)
    group, step = (first < END).nonzero(as_tuple=True)
    return columns[group, step], first[group, step], group


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    """Also returns the sum of each row, by which results are corrected."""
    (width,) = options
    rows = len(matrix)
    kept = F.pad(matrix != 0, (0, 0, 0, -rows % TOGETHER))
    columns, first, group = _steps(kept, width)
    taken = columns >= 0
    row = (group.unsqueeze(1) * TOGETHER + torch.arange(TOGETHER, device=group.device)).unsqueeze(2).expand_as(columns)
    values = matrix.new_zeros(columns.shape)
    values[taken] = matrix[row[taken], columns[taken].long()]
    place = torch.where(taken, columns - first.view(-1, 1, 1), 0)
    place = place.cummax(-1).values  # a place that does not rise is empty; four empty ones are 1, 0, 0, 0
    place[..., 0] += (~taken[..., 0]).int()
    index = place.to(torch.uint8).view(-1, SLOTS)
    if width == NARROW:
        index = index[:, : SLOTS // 2] | index[:, SLOTS // 2 :] << 4
    starts = F.pad(torch.bincount(group, minlength=len(kept) // TOGETHER).cumsum(0), (1, 0))
    total = matrix.sum(1, dtype=torch.int32)
    return values.flatten(), index.flatten(), first.to(torch.int16), starts.to(torch.int32), total


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, index, first, starts, _ = buffers
    if options[0] == NARROW:
        both = index.view(-1, SLOTS // 2)
        index = torch.cat([both & 15, both >> 4], 1)
    place = index.view(-1, TOGETHER, EACH).long()
    rises = place[..., 1:] > place[..., :-1]
    there = torch.cat([place[..., 1:2] >= place[..., :1], rises], -1)
    group = owners(starts, len(first))
    row = group.view(-1, 1, 1) * TOGETHER + torch.arange(TOGETHER, device=first.device).view(-1, 1).expand_as(place)
    column = (first.long() & 0xFFFF).view(-1, 1, 1) + place
    matrix = torch.zeros(rows, columns, dtype=values.dtype, device=values.device)
    matrix[row[there], column[there]] = values.view(place.shape)[there]
    return matrix


def _linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    batch, (width,) = len(x), options
    if scales is None or batch > MORE or x.dtype not in DTYPES or not (x.is_cpu and buffers[0].is_cpu) or not build.has("avx2"):
        return None
    bits, threads, seen = 8 if build.has(*VNNI) else 7, torch.get_num_threads(), padded(x, LANES)
    wide = seen.shape[1]
    stride = wide + WIDTHS[-1]  # a window is read as a whole, past the last column
    planes, inverse = torch.empty(2 * batch * stride, dtype=torch.uint8), torch.empty(batch)
    places = planes.data_ptr(), inverse.data_ptr()
    build.run(build.kernel("quads.prepare", bits, 2), (seen.data_ptr(), batch, wide, *places, stride), threads)
    if not all(map(math.isfinite, inverse.tolist())):
        return None  # integers cannot hold some of the inputs
    extra, y = as_float(bias, rows), torch.empty(batch, rows)
    kernel = build.kernel("windows.windows", width, bits)
    held = [tensor.data_ptr() for tensor in chain(buffers, [scales.bits])]
    for i in range(batch):
        low, out = places[0] + i * stride, y.data_ptr() + i * rows * 4
        mine = low, low + batch * stride, extra.data_ptr(), out, rows, *held, places[1] + i * 4
        build.run(kernel, mine, threads)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


WINDOWS = register(
    Format(
        "windows", ("values", "index", "first", "starts", "sums"), _fits, _pack, _unpack, _linear,
        allowed=tuple((width,) for width in WIDTHS), takes=("int8",), numbers=("sums",),
    )
)  # fmt: skip
