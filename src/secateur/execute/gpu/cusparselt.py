"""The format `cusparselt`: 2:4 in bfloat16 for many tokens, multiplied by NVIDIA's cuSPARSELt library that torch ships.

The library's packed form is opaque, except that the values come first, row by row. The format therefore also stores the place
of each value, so that the matrix can be unpacked on any device. float16 is not offered: searching for the library's fastest
float16 kernel has crashed the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import Buffers, Format, FormatOptions, Use, register
from . import cusparselt_api as api
from .present import missing
from .sparse24_mma import is_two_of_four, spread, two_of_four

TOKENS = 64  # with fewer, the library is slower than dense
MULTIPLE, SMALLEST = 64, 256  # of rows and columns; other sizes were not tested
DTYPE = torch.bfloat16


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cuda" or missing() is not None or matrix.dtype != DTYPE:
        return
    if min(use.rows) < TOKENS or not torch.backends.cusparselt.is_available() or not _size_works(matrix):
        return
    if is_two_of_four(matrix, zeros):
        yield ()


def _size_works(matrix: Tensor) -> bool:
    """Returns True if the library takes matrices of this size and needs no more memory than torch allocates for it."""
    rows, columns = matrix.shape
    if rows % MULTIPLE or columns % MULTIPLE or min(rows, columns) < SMALLEST:
        return False
    return api.library() is None or api.needed(rows, columns) <= matrix.nbytes * 9 // 16


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    """Returns a one in the layer's dtype, the places, and the library's packed form as integers.

    `.to(dtype)` changes the dtype of the one, which tells the layer's dtype, and leaves the integers alone.
    """
    if matrix.device.type != "cuda" or matrix.dtype != DTYPE or not _size_works(matrix):
        sizes = f"with at least {SMALLEST} rows and columns, in multiples of {MULTIPLE}"
        raise ValueError(
            f"cuSPARSELt packs bfloat16 matrices on a GPU {sizes}, not {tuple(matrix.shape)} {matrix.dtype} on {matrix.device}"
        )
    values, places = two_of_four(matrix)
    packed = torch._cslt_compress(matrix)
    stored = packed.flatten()[: values.numel()].view_as(values)
    # The library may store a single weight in the second place of a group.
    swapped = (stored[..., 0] != values[..., 0]) | (stored[..., 1] != values[..., 1])
    places = torch.where(swapped.unsqueeze(-1), places.flip(-1), places)
    codes = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    codes = codes[:, 0::2] | codes[:, 1::2] << 4
    made = torch.ones(1, dtype=matrix.dtype, device=matrix.device), codes.contiguous(), packed.view(torch.int16)
    if not torch.equal(_unpack(made, len(matrix), matrix.shape[1], options), matrix):
        raise ValueError("this version of cuSPARSELt orders values in an unknown way")
    return made


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    one, codes, packed = buffers
    values = packed.flatten()[: rows * columns // 2].view(DTYPE).view(rows, columns // 4, 2)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    return spread(values, torch.stack([both & 3, both >> 2], -1).long()).to(one.dtype)


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    one, _, packed = buffers
    if not x.is_cuda or x.get_device() != packed.get_device() or not x.dtype == one.dtype == DTYPE:
        return None
    tokens = x.shape[0]
    more = -tokens % (8 if tokens < 512 else 64)  # rows must have 16 bytes; coarser steps for many tokens need fewer plans
    x = F.pad(x, (0, 0, 0, more)) if more else x.contiguous()
    if api.library() is not None:
        y = api.product(x, packed, bias, rows)
    else:
        y = torch._cslt_sparse_mm(packed.view(DTYPE), x.t(), bias, transpose_result=True)
    return y[:tokens] if more else y


CUSPARSELT = register(Format("cusparselt", ("one", "places", "packed"), _fits, _pack, _unpack, _linear))
