"""The format `pairs`: the tiled format over pairs of bfloat16 columns, for CPUs that multiply pairs (avx512bf16).

The options are the number of rows that share a list of columns, and a mode. Mode 0 pairs neighbouring columns (blocks of even
width). Mode 1 is for 2:4: each group of four inputs is stored as its six possible pairs, so that the two weights of a group
form one pair wherever they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from .find import Zeros, fill
from .formats import Buffers, Format, FormatOptions, Use, register
from .native import build
from .tiled import TILED, product

SIX = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cpu" or matrix.dtype != torch.bfloat16 or max(use.rows) < 4:
        return
    if not build.has("avx512f", "avx512bf16") or zeros.sparsity <= 0.1:
        return
    kept = matrix != 0
    if zeros.pattern == "2:4":
        yield (1, 1)
    if fill(kept, 1, 2) > 0.45:
        yield (1, 0)
    if fill(kept, 4, 2) > 0.45:
        yield (4, 0)


def _paired(matrix: Tensor) -> Tensor:
    """Views pairs of columns as int32. Slices with an odd offset or row stride are copied, because torch cannot view them."""
    whole = matrix.contiguous()
    odd = (whole.storage_offset() | whole.stride(0)) & 1
    return (whole.clone(memory_format=torch.contiguous_format) if odd else whole).view(torch.int32)


@cache
def _places(device: torch.device) -> Tensor:
    return torch.tensor(SIX, device=device).flatten()


def _six(matrix: Tensor) -> Tensor:
    """Returns each group of four columns as its six pairs."""
    rows, columns = matrix.shape
    return _paired(matrix.view(rows, columns // 4, 4)[..., _places(matrix.device)].reshape(rows, columns * 3))


def _one_of_six(matrix: Tensor) -> Tensor:
    """Returns each group of four weights as six pairs: the first that holds all nonzeros of the group, and five zeros."""
    rows, columns = matrix.shape
    kept = (matrix != 0).view(rows, columns // 4, 4)
    if int(kept.sum(-1).max()) > 2:
        raise ValueError("a group of four columns holds more than two weights, so it is not a pair")
    holds = torch.stack([kept[..., i].int() + kept[..., j] for i, j in SIX], -1)
    first = holds.argmax(-1, keepdim=True)  # a group without weights becomes a pair of zeros
    pairs = _six(matrix).view(rows, columns // 4, 6)
    return torch.zeros_like(pairs).scatter_(-1, first, pairs.gather(-1, first)).view(rows, -1)


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    height, mode = options
    matrix = matrix + 0.0  # turns -0.0 into 0.0, because a pair is recognized as empty by its bits
    return TILED.pack(_one_of_six(matrix) if mode else _paired(matrix), (height,))


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    height, mode = options
    wide = TILED.unpack(buffers, rows, columns // 4 * 6 if mode else columns // 2, (height,))
    if not mode:
        return wide.view(torch.bfloat16)
    pairs = wide.view(torch.bfloat16).view(rows, columns // 4, 12)
    groups = torch.zeros(rows, columns // 4, 4, dtype=torch.bfloat16, device=wide.device)
    for number, place in enumerate(_places(wide.device).tolist()):
        groups[..., place] = torch.where(pairs[..., number] != 0, pairs[..., number], groups[..., place])
    return groups.view(rows, columns)


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    if not (x.is_cpu and buffers[0].is_cpu) or x.dtype != torch.bfloat16 or build.target() is None:
        return None
    height, mode = options
    seen = _paired(x).view(torch.float32)  # only moved as bits; no arithmetic is done in float32
    return product(seen, buffers, bias, rows, height, "six" if mode else "float32", "pair").to(x.dtype)


PAIRS = register(Format("pairs", TILED.buffers, _fits, _pack, _unpack, _linear, allowed=((1, 0), (1, 1), (4, 0))))
