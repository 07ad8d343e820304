"""The format `tiled`: any pattern, about eight or more input rows, for linear layers and convolutions.

Columns are grouped in blocks of 192, and a column is stored as one byte, its place in the block. `height` rows (1 or 4) share
a list of columns.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .find import Zeros, fill
from .formats import Buffers, Format, FormatOptions, Use, Window, register
from .native import build

WIDTH = 192  # columns of a block (a row's count must fit in a byte); with 32 positions, these inputs fill most of the L1 cache
CHUNK = 256  # rows that are processed together, so that their sums stay in the L2 cache
LINE = 16  # floats of a cache line
REPACKING = 0.06  # time to repack the inputs, as a fraction of the time to multiply them with all rows
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
_MINE = threading.local()


def scratch(floats: int) -> Tensor:
    """Returns scratch memory that this thread reuses in every call, because new pages would take longer than the product."""
    held: Tensor | None = getattr(_MINE, "memory", None)
    if held is None or held.numel() < floats:
        held = _MINE.memory = torch.empty(floats, dtype=torch.float32, device="cpu")
    return held


@lru_cache(maxsize=64)
def no_bias(rows: int) -> Tensor:
    return torch.zeros(rows, dtype=torch.float32, device="cpu")


def as_float(bias: Tensor | None, rows: int) -> Tensor:
    """Returns the bias as contiguous float32 on the CPU, whose address kernels can read. Zeros if there is no bias."""
    if bias is None:
        return no_bias(rows)
    if not bias.is_cpu:
        raise RuntimeError(f"the bias is on {bias.device} and the inputs are on the CPU; move the model with .to()")
    return bias if bias.dtype == torch.float32 and bias.is_contiguous() else bias.float().contiguous()


def kernels_for(x: Tensor, values: Tensor) -> bool:
    """Returns True if the CPU kernels can multiply these tensors."""
    return x.is_cpu and values.is_cpu and _dtypes_work(x.dtype, values.dtype)


@cache
def _dtypes_work(*dtypes: torch.dtype) -> bool:
    if build.target() is None or not DTYPES.keys() >= {*dtypes}:
        return False
    return torch.float16 not in dtypes or build.reads_halves()


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind == "embedding" or use.device != "cpu" or build.target() is None or max(use.rows) < 4:
        return
    if zeros.sparsity > 0.1:
        yield (1,)
    if zeros.sparsity > 0.1 and fill(matrix != 0, 4, 1) > 0.6:
        yield (4,)


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    (height,) = options
    rows, columns = matrix.shape
    panels, blocks, per_chunk = rows // height, -(-columns // WIDTH), CHUNK // height
    chunks = -(-panels // per_chunk)
    tall = matrix.reshape(panels, height, columns)
    kept = (tall != 0).any(1)
    panel, column = kept.nonzero(as_tuple=True)
    lengths = matrix.new_zeros((chunks * per_chunk, blocks), dtype=torch.int64)
    padded = F.pad(kept, (0, blocks * WIDTH - columns))
    lengths[:panels] = padded.view(panels, blocks, WIDTH).sum(-1)
    cells = lengths.view(chunks, per_chunk, blocks).transpose(1, 2)  # [chunk, block, panel]
    counts, order = cells.sort(dim=-1, descending=True, stable=True)
    ends = counts.flatten().cumsum(0)
    begins = torch.empty_like(cells).scatter_(2, order, (ends - counts.flatten()).view_as(counts))
    begins = begins.transpose(1, 2).reshape(-1)  # new position of each list (panel, block); `lengths` gives the old one
    shift = begins - (lengths.flatten().cumsum(0) - lengths.flatten())
    place = torch.arange(len(panel), device=panel.device) + shift.repeat_interleave(lengths.flatten())
    index = matrix.new_empty(len(panel), dtype=torch.uint8)
    index[place] = (column % WIDTH).to(torch.uint8)
    values = matrix.new_empty((len(panel), height))
    values[place] = tall[panel, :, column]
    starts = ends.view(chunks * blocks, per_chunk)[:, -1].roll(1)
    starts[0] = 0
    used = (counts > 0).sum(-1).flatten().to(torch.int16)
    return values.flatten(), index, counts.flatten().to(torch.uint8), order.flatten().to(torch.uint8), used, starts.contiguous()


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    (height,) = options
    values, index, counts, order, *_ = buffers
    panels, blocks, per_chunk = rows // height, -(-columns // WIDTH), CHUNK // height
    each = counts.long()
    cell = torch.arange(len(each), device=index.device) // per_chunk
    panel = (cell // blocks * per_chunk + order).repeat_interleave(each)
    column = (cell % blocks * WIDTH).repeat_interleave(each) + index
    tall = torch.zeros(panels, columns, height, dtype=values.dtype, device=values.device)
    tall[panel, column] = values.view(-1, height)
    return tall.transpose(1, 2).reshape(rows, columns)


def _tile_of(positions: int, height: int) -> int:
    """Returns the number of positions in a tile.

    Wide tiles use each loaded weight more often; narrow ones waste less at the end and need less cache and fewer registers.
    The answer does not depend on the number of threads, so that results do not either.
    """
    if build.has("avx512f"):
        cost = {8: 3.0, 16: 1.5, 32: 1.1, 64: 1.0}  # measured time per position, relative to the best tile
    else:
        cost = {8: 1.5, 16: 1.2, 32: 1.0} if height == 1 else {8: 1.5, 16: 1.0}
    return min(cost, key=lambda size: -(-positions // size) * size * cost[size])


def _splits(tiles: int, rows: int, threads: int) -> int:
    """Returns into how many pieces the rows of a tile are split: few, because each piece repacks the inputs, but enough to
    occupy all threads evenly."""
    chunks = -(-rows // CHUNK)
    return min(
        range(1, min(chunks, threads) + 1),
        key=lambda splits: -(-tiles * splits // threads) * (-(-chunks // splits) / chunks + REPACKING),
    )


def _shape(rows: int, columns: int, height: int) -> tuple[int, ...]:
    return columns, WIDTH, -(-columns // WIDTH), rows // height, CHUNK // height


@lru_cache(maxsize=1024)  # a layer is called with few different shapes
def _rows_plan(
    batch: int, columns: int, rows: int, height: int, seen: str, stored: str, threads: int
) -> tuple[Any, int, array[int]]:
    """Returns the kernel, the floats of scratch memory it needs, and those arguments that depend on shapes only."""
    tile = _tile_of(batch, height)
    tiles, room = -(-batch // tile), (columns + CHUNK) * tile
    multiply = build.kernel("tiled.multiply_rows", height, tile, seen, stored)
    known = batch, rows, tiles, _splits(tiles, rows, threads), room * 4, *_shape(rows, columns, height)
    return multiply, threads * room, array("q", (*build.COUNTERS, *known))


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    if not kernels_for(x, buffers[0]):
        return None
    y = product(x, buffers, bias, rows, options[0], DTYPES[x.dtype], DTYPES[buffers[0].dtype])
    return y if x.dtype == torch.float32 else y.to(x.dtype)


def product(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, height: int, seen: str, stored: str) -> Tensor:
    """Returns x [batch, columns] @ matrix.T + bias as float32. With seen="six", two numbers of x (two pairs of bfloat16) are
    expanded to the six pairs that the format `pairs` uses for 2:4."""
    (batch, columns), (stride, one), threads = x.shape, x.stride(), torch.get_num_threads()
    if one != 1:
        x, stride = x.contiguous(), columns
    columns *= 3 if seen == "six" else 1
    multiply, floats, known = _rows_plan(batch, columns, rows, height, seen, stored, threads)
    memory, extra = scratch(floats), as_float(bias, rows)
    y = memory.new_empty_strided((batch, rows), (rows, 1))  # the constructor with the least overhead
    block = known[:]
    block.extend(map(Tensor.data_ptr, (*buffers, extra, x, memory, y)))
    block.append(stride * x.element_size())
    build.start(multiply, block, threads)
    return y


@lru_cache(maxsize=1024)
def _planes_plan(shape: tuple[int, ...], rows: int, height: int, stored: str, threads: int, window: Window) -> tuple[Any, ...]:
    """Returns the kernel of a convolution and those arguments that depend on shapes only."""
    (images, channels, high, wide), (pad_y, pad_x) = shape, window.padding
    out, size = window.out(high, wide), (high + 2 * pad_y, wide + 2 * pad_x)
    columns, side_by_side = channels * window.kernel[0] * window.kernel[1], max(window.stride) == 1
    places = (out[0] - 1) * (size[1] if side_by_side else out[1]) + out[1]
    tile = _tile_of(places, height)
    room = (WIDTH + 1 + CHUNK) * tile
    image = -(-(images * channels * size[0] * size[1] + tile) // LINE) * LINE  # padded, because a tile may be read past the end
    multiply = build.kernel("tiled.multiply_planes", height, tile, stored, int(side_by_side))
    y, x = (torch.arange(n, device="cpu") * step for n, step in zip(window.kernel, window.dilation))
    lines = torch.arange(channels, device="cpu").view(-1, 1, 1) * size[0] + y.view(-1, 1)
    corners = lines * size[1] + x  # offset of the first input of each column
    work = (images, rows, _splits(images * -(-places // tile), rows, threads), *out, *window.stride)
    padding = (images * channels, high, wide, pad_y, pad_x)
    planes = channels * size[0] * size[1] * 4, size[1]
    return multiply, out, _shape(rows, columns, height), room, image, (corners * 4).flatten(), planes, work, padding


def _conv(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, window: Window) -> Tensor | None:
    if not kernels_for(x, buffers[0]) or min(window.out(*x.shape[2:])) < 1:
        return None
    height, threads = options[0], torch.get_num_threads()
    plan = _planes_plan(tuple(x.shape), rows, height, DTYPES[buffers[0].dtype], threads, window)
    multiply, out, matrix, room, image, corners, planes, work, padding = plan
    source, memory = x.float().contiguous(), scratch(image + threads * room).data_ptr()
    y, bias = x.new_empty((x.shape[0], rows, *out), dtype=torch.float32), as_float(bias, rows)
    places = (
        *map(Tensor.data_ptr, buffers),
        bias.data_ptr(),
        memory,
        corners.data_ptr(),
        *planes,
        memory + image * 4,
        room * 4,
        y.data_ptr(),
    )
    build.run_in_steps(multiply, (*matrix, *places, *work, source.data_ptr(), *padding), threads)
    return y if x.dtype == torch.float32 else y.to(x.dtype)


BUFFERS = ("values", "index", "counts", "order", "used", "starts")
TILED = register(Format("tiled", BUFFERS, _fits, _pack, _unpack, _linear, _conv, allowed=((1,), (4,))))
