"""Two of four for many tokens, in bfloat16: NVIDIA's cuSPARSELt, as torch brings it.

What the library packs is opaque, except that the values come first, row by row; so the places are kept beside it, and the
matrix can be had back anywhere. float16 is left out: there, looking for the library's fastest kernel has crashed the GPU.
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
from .present import missing

TOKENS = 64  # below, the library is slower than dense
MULTIPLE, SMALLEST = 64, 256  # of rows and columns: what was tried
DTYPE = torch.bfloat16


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cuda" or missing() is not None or matrix.dtype != DTYPE:
        return
    if min(use.rows) < TOKENS or not torch.backends.cusparselt.is_available() or not _has_room(matrix):
        return
    if is_two_of_four(matrix, zeros):
        yield ()


def _has_room(matrix: Tensor) -> bool:
    """Whether the library takes matrices of this size, and no more bytes than torch gives it."""
    rows, columns = matrix.shape
    if rows % MULTIPLE or columns % MULTIPLE or min(rows, columns) < SMALLEST:
        return False
    return lt.library() is None or lt.needed(rows, columns) <= matrix.nbytes * 9 // 16


def _pack(matrix: Tensor, options: Options) -> tuple[Tensor, ...]:
    """A one in the dtype of the layer, the places, and the library's own form, as bits that no `.to(dtype)` touches."""
    if matrix.device.type != "cuda" or matrix.dtype != DTYPE or not _has_room(matrix):
        sizes = f"of at least {SMALLEST} rows and columns, multiples of {MULTIPLE}"
        raise ValueError(
            f"cuSPARSELt packs bfloat16 on a GPU, {sizes}, not {tuple(matrix.shape)} {matrix.dtype} on {matrix.device}"
        )
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
    values = packed.flatten()[: rows * columns // 2].view(DTYPE).view(rows, columns // 4, 2)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    return spread(values, torch.stack([both & 3, both >> 2], -1).long()).to(one.dtype)


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: Options) -> Tensor | None:
    one, _, packed = buffers
    if not x.is_cuda or x.get_device() != packed.get_device() or not x.dtype == one.dtype == DTYPE:
        return None
    tokens = x.shape[0]
    more = -tokens % (8 if tokens < 512 else 64)  # rows of 16 bytes; and not a new plan for every number of tokens
    x = F.pad(x, (0, 0, 0, more)) if more else x.contiguous()
    if lt.library() is not None:
        y = lt.product(x, packed, bias, rows)
    else:
        y = torch._cslt_sparse_mm(packed.view(DTYPE), x.t(), bias, transpose_result=True)
    return y[:tokens] if more else y


CUSPARSELT = register(Format("cusparselt", ("one", "places", "packed"), _fits, _pack, _unpack, _linear))
