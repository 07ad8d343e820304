"""The format `bitmask`: one bit for each weight, and the nonzero values. For one input row, up to about 80 % zeros.

Without an option, values are stored row by row. With the option 4, for int8 on CPUs with AVX-512 VNNI, four rows are stored in
turn, 64 columns of each.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import pack_bits, unpack_bits
from .find import Zeros
from .formats import PLAIN, Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .single import UNIT, by_rows, padded, scales_of, stored_as, usable
from .tiled import scratch

TOGETHER = 4  # rows that are stored in turn, with `UNIT` columns of each
PAST = 16  # zeros after the last value
SCRATCH = 384  # bytes for 64 inputs as integers (`native.fixed_point`)
EXPANDS = ("avx512f", "avx512bw", "avx512vbmi2", "avx512vnni")  # with these, packed bytes are expanded and multiplied by fours


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if (use.kind == "embedding" and zeros.sparsity > 0.1) or (usable(use, "avx2") and 0.1 < zeros.sparsity < 0.9):
        yield (TOGETHER,) if use.values is not None and build.has(*EXPANDS) else ()


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    rows = matrix if not options else _in_turn(matrix)
    kept = rows != 0
    values = F.pad(rows[kept], (0, PAST))  # the kernel reads up to 16 values past the end
    masks, counts = pack_bits(kept), kept.sum(1)
    if not options:
        return values, _interleave(masks), F.pad(counts.cumsum(0), (1, 0))
    groups = -(-len(matrix) // TOGETHER)
    counts = counts.view(groups, -1).sum(1)
    return values, masks.view(groups * TOGETHER, -1), F.pad(counts.cumsum(0), (1, 0))


def _in_turn(matrix: Tensor) -> Tensor:
    """Returns 64 columns of each of four rows in turn, as rows of 64 columns. Zeros fill up rows and columns."""
    wide = F.pad(matrix, (0, -matrix.shape[1] % UNIT, 0, -len(matrix) % TOGETHER))
    return wide.view(-1, TOGETHER, wide.shape[1] // UNIT, UNIT).transpose(1, 2).reshape(-1, UNIT)


def _interleave(masks: Tensor) -> Tensor:
    """Interleaves the bytes of every four rows, as the kernel reads them. Up to three rows at the end stay as they are."""
    whole = len(masks) // 4 * 4
    four = masks[:whole].view(-1, 4, masks.shape[1]).transpose(1, 2).reshape(whole, masks.shape[1])
    return torch.cat([four, masks[whole:]])


def _deinterleave(masks: Tensor) -> Tensor:
    whole = len(masks) // 4 * 4
    rows = masks[:whole].view(-1, masks.shape[1], 4).transpose(1, 2).reshape(whole, masks.shape[1])
    return torch.cat([rows, masks[whole:]])


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, masks, _ = buffers
    kept = unpack_bits(masks.view(-1, UNIT // 8), UNIT) if options else unpack_bits(_deinterleave(masks), columns)
    matrix = torch.zeros(kept.shape, dtype=values.dtype, device=values.device)
    matrix[kept] = values[:-PAST]
    if not options:
        return matrix
    four = matrix.view(-(-rows // TOGETHER), -1, TOGETHER, UNIT).transpose(1, 2)
    return four.reshape(len(four) * TOGETHER, -1)[:rows, :columns].contiguous()


@cache
def _table(kind: str) -> Tensor:
    """Returns, for each of the 256 masks, how the packed values of a group are moved to its eight lanes."""
    table = torch.zeros(256, 8, dtype=torch.int64, device="cpu")
    for mask in range(256):
        taken = 0
        for lane in range(8):
            there = mask >> lane & 1
            if kind == "float32":
                table[mask, lane] = taken if there else 0x80000000
            elif kind == "int8":  # three zero bytes, then the value
                table[mask, lane] = 0x808080 | taken << 24 if there else 0x80808080
            else:  # indices of a byte shuffle: two zero bytes, then the value's two bytes; 0x80 stands for zero
                table[mask, lane] = 0x8080 | (2 * taken << 16) | (2 * taken + 1 << 24) if there else 0x80808080
            taken += there
    return torch.where(table >= 1 << 31, table - (1 << 32), table).to(torch.int32).contiguous()


def _linear(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    masks, stored = buffers[1], stored_as(x, buffers[0], scales)
    if stored is None or stored[0] not in ("float32", "bfloat16", "int8") or not build.has("avx2"):
        return None
    if options:
        return _expanded(x, buffers, bias, rows, scales)
    held = rows, masks.shape[1], *map(Tensor.data_ptr, (*buffers, _table(stored[0]))), *scales_of(scales)
    return by_rows(build.kernel("bitmask.bitmask", *stored), held, x, bias, rows)


def _expanded(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, scales: Scales | None) -> Tensor | None:
    """Multiplies with int8 of four rows in turn. Returns None if integers cannot hold the inputs."""
    if scales is None or not build.has(*EXPANDS):
        return None
    units, odd = buffers[1].shape[1] // (UNIT // 8), array("q", [0])
    room = (units + 1) * SCRATCH  # for each thread
    memory = scratch(torch.get_num_threads() * room // 4)
    held = rows, units, *map(Tensor.data_ptr, buffers), *scales_of(scales), memory.data_ptr(), room, odd.buffer_info()[0]
    y = by_rows(build.kernel("bitmask.expand", scales.values.group), held, x, bias, rows, padded(x, UNIT))
    return None if odd[0] else y


def _embedding(x: Tensor, buffers: Buffers, columns: int, options: FormatOptions) -> Tensor:
    values, masks, starts = buffers
    if options:
        return _unpack(buffers, len(masks), columns, options)[x]
    four = x // 4 * 4
    whole = four + 4 <= len(masks)  # the row is in an interleaved group of four
    step = torch.where(whole, 4, 1).unsqueeze(1)  # distance between two bytes of the row
    begin = torch.where(whole, four * masks.shape[1] + x % 4, x * masks.shape[1]).unsqueeze(1)
    own = masks.flatten()[begin + step * torch.arange(masks.shape[1], device=x.device)]
    kept = unpack_bits(own, columns)
    place = starts[x].unsqueeze(1) + kept.cumsum(1) - 1
    return torch.where(kept, values[place.clamp(min=0)], torch.zeros((), dtype=values.dtype, device=values.device))


BITMASK = register(
    Format(
        "bitmask", ("values", "masks", "starts"), _fits, _pack, _unpack, _linear,
        embedding=_embedding, allowed=((), (TOGETHER,)), takes=(PLAIN, "int8", "int8/64", "int8/128"),
    )
)  # fmt: skip
