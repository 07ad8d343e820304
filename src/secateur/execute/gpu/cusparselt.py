"""Two of four for many tokens: NVIDIA's cuSPARSELt, as torch brings it.

What the library packs is opaque, except that the values come first, row by row; so the places are kept beside it, and the
matrix can be had back anywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import Buffers, Format, Options, Use, register
from . import lt
from .bricks import is_two_of_four, spread, two_of_four
from .present import HALVES, missing

TOKENS = 64  # below, the library is slower than dense
MULTIPLE = 64  # of rows and columns


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cuda" or missing() is not None or matrix.dtype not in HALVES:
        return
    if min(use.rows) < TOKENS or not torch.backends.cusparselt.is_available() or not _whole(matrix):
        return
    if is_two_of_four(matrix, zeros):
        yield (HALVES.index(matrix.dtype),)


def _whole(matrix: Tensor) -> bool:
    """Whether torch gives the library as much room as it takes for a matrix of this size: with small ones, it does not."""
    rows, columns = matrix.shape
    if rows % MULTIPLE or columns % MULTIPLE:
        return False
    if lt.library() is None:
        return min(rows, columns) >= 1024
    return lt.needed(rows, columns, matrix.dtype) <= matrix.nbytes * 9 // 16


def _pack(matrix: Tensor, options: Options) -> tuple[Tensor, ...]:
    """A one in the dtype of the layer, the places, and the library's own form, as bits that no `.to(dtype)` touches."""
    if matrix.device.type != "cuda" or matrix.dtype != HALVES[options[0]]:
        raise ValueError(f"cuSPARSELt packs {HALVES[options[0]]} on a GPU, not {matrix.dtype} on {matrix.device}")
    if not _whole(matrix):
        raise ValueError(f"cuSPARSELt cannot hold {len(matrix)} by {matrix.shape[1]} in nine bits for each weight")
    values, places = two_of_four(matrix)
    packed = torch._cslt_compress(matrix)
    stored = packed.flatten()[: values.numel()].view_as(values)
    turned = (stored[..., 0] != values[..., 0]) | (stored[..., 1] != values[..., 1])  # a lone weight may lie in the other half
    places = torch.where(turned.unsqueeze(-1), places.flip(-1), places)
    codes = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    codes = codes[:, 0::2] | codes[:, 1::2] << 4
    made = torch.ones(1, dtype=matrix.dtype, device=matrix.device), codes.contiguous(), packed.view(torch.int16)
    if not torch.equal(_unpack(made, len(matrix), matrix.shape[1], options), matrix):
        raise ValueError("cuSPARSELt orders values in a way that is not known here")
    return made


def _unpack(buffers: Buffers, rows: int, columns: int, options: Options) -> Tensor:
    one, codes, packed = buffers
    values = packed.flatten()[: rows * columns // 2].view(HALVES[options[0]]).view(rows, columns // 4, 2)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    return spread(values, torch.stack([both & 3, both >> 2], -1).long()).to(one.dtype)


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    one, _, packed = buffers
    kind = HALVES[options[0]]
    if x.device.type != "cuda" or x.device != packed.device or not x.dtype == one.dtype == kind:
        return None
    tokens = len(x)
    x = F.pad(x, (0, 0, 0, -tokens % 8)) if tokens % 8 else x.contiguous()  # the library wants rows of 16 bytes
    if lt.library() is not None:
        return lt.product(x, packed, bias, rows)[:tokens]
    return torch._cslt_sparse_mm(packed.view(kind), x.t(), bias, transpose_result=True)[:tokens]


CUSPARSELT = register(Format("cusparselt", ("one", "places", "packed"), _fits, _pack, _unpack, _linear, allowed=((0,), (1,))))
