"""The format `amx_tiles`: bfloat16 in any pattern, for CPUs with AMX, which multiply tiles of 16 rows by 32 columns.

A tile is stored as one bit per weight and the nonzero values; tiles that are all zero are not stored. Eight tiles side by side
form a block of columns, and sixteen panels of 16 rows form a piece of work. Tiles are stored in the order in which the kernel
reads them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import pack_bits, unpack_bits
from .find import Zeros
from .formats import Buffers, Format, FormatOptions, Use, register
from .native import build
from .tiled import as_float, no_bias, scratch

SIDE, WIDE = 16, 32  # rows and columns of a tile
PANELS, TILES = 16, 8  # panels of a piece of work, tiles of a block of columns
RING, LEAD = 16, 2  # tiles in the kernel's ring of expanded tiles, and tiles that it reads ahead (padded at the end)
STRIP, SHORT = 512, 64  # largest and smallest number of input rows for one piece of work
# The configuration of the tile registers: eight registers of 16 rows with 64 bytes.
CONFIG = (ctypes.c_uint8 * 64)(1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[SIDE] * 8)


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cpu" or matrix.dtype != torch.bfloat16 or max(use.rows) < 4:
        return
    if zeros.sparsity > 0.1 and build.has_tiles():
        yield ()


def _counts(rows: int, columns: int) -> tuple[int, int]:
    """Returns the number of pieces of work and of blocks of columns."""
    return -(-rows // (SIDE * PANELS)), -(-columns // (WIDE * TILES))


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    (rows, columns), (pieces, blocks) = matrix.shape, _counts(*matrix.shape)
    whole = F.pad(matrix, (0, blocks * TILES * WIDE - columns, 0, pieces * PANELS * SIDE - rows))
    tiles = whole.view(pieces, PANELS, SIDE, blocks, TILES, WIDE // 2, 2).permute(0, 3, 1, 4, 5, 2, 6)
    tiles = tiles.reshape(-1, TILES, SIDE * WIDE)  # [piece, block, panel; tile; pair of columns, row, one of the pair]
    kept = tiles != 0
    there = kept.any(-1)
    counts = there.sum(-1)
    before = F.pad(kept.sum((1, 2)).cumsum(0), (1, 0))[:-1], F.pad(counts.cumsum(0), (1, 0))[:-1]
    starts = torch.stack([each[:: blocks * PANELS] for each in before], 1).flatten()
    index, masks = there.nonzero()[:, 1].to(torch.uint8), pack_bits(kept[there])
    return tiles[kept], F.pad(masks, (0, 0, 0, LEAD)).flatten(), index, counts.to(torch.uint8), starts


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, masks, index, counts, _ = buffers
    pieces, blocks = _counts(rows, columns)
    tiles = values.new_zeros(len(counts) * TILES, SIDE * WIDE)
    kept = unpack_bits(masks.view(-1, SIDE * WIDE // 8)[:-LEAD], SIDE * WIDE)
    first = torch.arange(len(counts), device=index.device).repeat_interleave(counts.long(), output_size=len(index)) * TILES
    tiles[first + index] = values.new_zeros(kept.shape).masked_scatter_(kept, values)
    whole = tiles.view(pieces, blocks, PANELS, TILES, WIDE // 2, SIDE, 2).permute(0, 2, 5, 1, 3, 4, 6)
    return whole.reshape(pieces * PANELS * SIDE, -1)[:rows, :columns].contiguous()


@lru_cache(maxsize=1024)
def _plan(batch: int, rows: int, columns: int, threads: int) -> tuple[int, int, int, int]:
    """Returns the padded number of input rows, the input rows of a strip, and the floats of scratch memory for the inputs and
    for each thread."""
    pieces, blocks = _counts(rows, columns)
    lines = -(-batch // SIDE) * SIDE
    strips = max(-(-lines // STRIP), min(-(-2 * threads // pieces) if threads > 1 else 1, -(-lines // SHORT)))
    strip = -(-lines // (strips * SHORT)) * SHORT
    return lines, strip, lines * blocks * TILES * SIDE, (RING * SIDE + PANELS * strip) * SIDE


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    here = x.is_cpu and buffers[0].is_cpu and x.dtype == buffers[0].dtype == torch.bfloat16
    if not here or not build.has_tiles():
        return None
    (batch, columns), threads, more = x.shape, torch.get_num_threads(), -rows % SIDE
    x = x if x.stride(1) == 1 else x.contiguous()
    lines, strip, inputs, room = _plan(batch, rows, columns, threads)
    memory, y = scratch(inputs + threads * room).data_ptr(), torch.empty((batch, rows), dtype=x.dtype, device="cpu")
    extra = no_bias(rows + more) if bias is None else F.pad(as_float(bias, rows), (0, more))
    held = [each.data_ptr() for each in buffers]
    seen = (ctypes.addressof(CONFIG), x.data_ptr(), x.stride(0) * 2, batch, columns, memory)
    matrix = (rows, -(-rows // SIDE), PANELS, _counts(rows, columns)[1], TILES, *held, extra.data_ptr())
    work = (y.data_ptr(), memory + inputs * 4, room * 4, strip, -(-lines // strip))
    build.run_in_steps(build.kernel("amx_tiles.multiply", RING, LEAD), (*seen, *matrix, *work), threads)
    return y


AMX_TILES = register(Format("amx_tiles", ("values", "masks", "index", "counts", "starts"), _fits, _pack, _unpack, _linear))
