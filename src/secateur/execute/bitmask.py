"""The format `bitmask`: one bit for each weight, and the nonzero values. For one input row, up to about 80 % zeros."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ..masks import pack_bits, unpack_bits
from .expand import EXPANDS
from .find import Zeros
from .formats import PLAIN, Buffers, Format, FormatOptions, Scales, Use, register
from .native import build
from .single import by_rows, scales_of, stored_as, usable


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    better = use.values is not None and build.has(*EXPANDS)  # the format `expand` stores the same bytes
    if (use.kind == "embedding" and zeros.sparsity > 0.1) or (
        usable(use, "avx2") and 0.1 < zeros.sparsity < 0.9 and not better
    ):
        yield ()


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    kept = matrix != 0
    values = F.pad(matrix[kept], (0, 16))  # the kernel reads up to 16 values past the end
    return values, _interleave(pack_bits(kept)), F.pad(kept.sum(1).cumsum(0), (1, 0))


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
    matrix = torch.zeros(rows, columns, dtype=values.dtype, device=values.device)
    matrix[unpack_bits(_deinterleave(masks), columns)] = values[:-16]
    return matrix


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
    held = rows, masks.shape[1], *map(Tensor.data_ptr, (*buffers, _table(stored[0]))), *scales_of(scales)
    return by_rows(build.kernel("bitmask.bitmask", *stored), held, x, bias, rows)


def _embedding(x: Tensor, buffers: Buffers, columns: int, options: FormatOptions) -> Tensor:
    values, masks, starts = buffers
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
        embedding=_embedding, takes=(PLAIN, "int8", "int8/64", "int8/128"),
    )
)  # fmt: skip
