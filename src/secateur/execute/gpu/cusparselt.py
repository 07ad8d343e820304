"""The formats `cusparselt` and `cusparselt8`: 2:4 for many tokens, multiplied by NVIDIA's cuSPARSELt library that torch ships.

`cusparselt` holds bfloat16. `cusparselt8` holds float8_e4m3fn, with a scale for each row, and rounds the inputs to float8 at
each call, with a scale for each input row. The library cannot multiply float8 products by scales of rows, so that a kernel
does so afterwards. float16 is not offered: searching for the library's fastest float16 kernel has crashed the GPU.

The library's packed form is opaque, except that the values come first, row by row. The formats therefore also store the place
of each value, so that the matrix can be unpacked on any device.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from ...values import Values
from ..find import Zeros
from ..formats import Buffers, Format, FormatOptions, Scales, Use, register, with_values
from . import cusparselt_api as api
from .present import float8_kernels, missing
from .sparse24_mma import is_two_of_four, spread, two_of_four

TOKENS = 64  # with fewer, the library is slower than dense
MULTIPLE, SMALLEST = 64, 256  # of rows and columns; other sizes were not tested
DTYPE, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
BITS = {DTYPE: torch.int16, FLOAT8: torch.uint8}  # as what packed matrices are stored: `.to(dtype)` leaves integers alone
BYTES = {DTYPE: 18, FLOAT8: 10}  # of a packed matrix, which torch allocates for 16 weights
SIZES = f"at least {SMALLEST} rows and columns, in multiples of {MULTIPLE}"


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind != "linear" or use.device != "cuda" or missing() is not None or matrix.dtype != DTYPE:
        return
    if min(use.rows) < TOKENS or not torch.backends.cusparselt.is_available() or not _size_works(matrix, DTYPE):
        return
    if is_two_of_four(matrix, zeros):
        yield ()


def _fits8(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if why_not_float8(matrix, zeros, use) is None:
        yield ()


def why_not_float8(matrix: Tensor, zeros: Zeros, use: Use) -> str | None:
    """Returns why `cusparselt8` does not suit a layer, or None if it does."""
    if use.kind != "linear":
        return "float8 inputs are for linear layers"
    if use.device != "cuda":
        return f"float8 inputs are for NVIDIA GPUs, and the layer is on the device {use.device}"
    if (reason := missing() or _why_not_here()) is not None:
        return reason
    if use.values is not None and use.values.group:
        return f"float8 inputs need one scale for each row, not group={use.values.group}"
    if matrix.dtype != DTYPE:
        return f"float8 inputs are for layers in bfloat16, not {str(matrix.dtype).removeprefix('torch.')}"
    if min(use.rows) < TOKENS:
        return f"float8 inputs are for {TOKENS} or more input rows, not {min(use.rows)}"
    if not _size_works(matrix, FLOAT8):
        return f"float8 inputs need {SIZES}"
    return None if is_two_of_four(matrix, zeros) else "float8 inputs need 2:4 zeros"


@cache
def _why_not_here() -> str | None:
    """Returns why cuSPARSELt cannot multiply float8 numbers on this machine, or None if a small product is right."""
    here = torch.cuda.current_device()
    if not _has_float8(here):
        major, minor = torch.cuda.get_device_capability(here)
        return f"float8 inputs need compute capability 8.9, and this GPU has {major}.{minor}"
    if api.library() is None:
        return "float8 inputs need a torch with cuSPARSELt 0.6 or later"
    weight = torch.tensor([[1.0, 0.0, -0.5, 0.0], [0.0, 3.0, 0.0, 0.0]], dtype=DTYPE, device="cuda").repeat(128, 64)
    x, bias = torch.eye(256, dtype=DTYPE, device="cuda"), torch.arange(256, device="cuda").to(DTYPE)
    form = with_values(CUSPARSELT8, Values("float8_e4m3fn"))
    try:
        held = form.pack(weight, ())
        y = form.linear(x, held, bias, 256, ())
    except (RuntimeError, ValueError) as error:
        return f"cuSPARSELt does not multiply float8 numbers here ({error})"
    expected = (form.unpack(held, 256, 256, ()) + bias.float().unsqueeze(1)).t()
    right = y is not None and torch.allclose(y.float(), expected, rtol=2.0**-8, atol=0.0)
    return None if right else "cuSPARSELt multiplies float8 numbers wrongly here"


@cache
def _has_float8(device: int) -> bool:
    return torch.cuda.get_device_capability(device) >= (8, 9)


def _size_works(matrix: Tensor, kind: torch.dtype) -> bool:
    """Returns True if the library takes matrices of this size and needs no more memory than torch allocates for it."""
    rows, columns = matrix.shape
    if rows % MULTIPLE or columns % MULTIPLE or min(rows, columns) < SMALLEST:
        return False
    return api.library() is None or api.needed(rows, columns, kind) <= matrix.numel() * BYTES[kind] // 16


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    """Returns a one in the matrix's dtype, the places, and the library's packed form as integers.

    `.to(dtype)` changes the dtype of the one, which tells the layer's dtype, and leaves the integers alone. The bits of float8
    come as uint8.
    """
    kind = FLOAT8 if matrix.dtype == torch.uint8 else DTYPE
    if matrix.device.type != "cuda" or matrix.dtype not in (DTYPE, torch.uint8) or not _size_works(matrix, kind):
        name = "float8" if kind == FLOAT8 else "bfloat16"
        raise ValueError(
            f"cuSPARSELt packs {name} matrices on a GPU with {SIZES}, "
            f"not {tuple(matrix.shape)} {matrix.dtype} on {matrix.device}"
        )
    values, places = two_of_four(matrix)
    packed = torch._cslt_compress(matrix.view(kind)).view(BITS[kind])
    stored = packed.flatten()[: values.numel()].view(matrix.dtype).view_as(values)
    # The library may store a single weight in the second place of a group.
    swapped = (stored[..., 0] != values[..., 0]) | (stored[..., 1] != values[..., 1])
    places = torch.where(swapped.unsqueeze(-1), places.flip(-1), places)
    codes = (places[..., 0] | places[..., 1] << 2).to(torch.uint8)
    codes = codes[:, 0::2] | codes[:, 1::2] << 4
    made = torch.ones(1, dtype=matrix.dtype, device=matrix.device), codes.contiguous(), packed
    if not torch.equal(_unpack(made, len(matrix), matrix.shape[1], options), matrix):
        raise ValueError("this version of cuSPARSELt orders values in an unknown way")
    return made


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    one, codes, packed = buffers
    values = packed.flatten()[: rows * columns // 2].view(DTYPE if packed.dtype == BITS[DTYPE] else packed.dtype)
    both = torch.stack([codes & 15, codes >> 4], -1).flatten(1)
    places = torch.stack([both & 3, both >> 2], -1).long()
    return spread(values.view(rows, columns // 4, 2), places).to(one.dtype)


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


def _linear8(
    x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions, scales: Scales | None = None
) -> Tensor | None:
    packed = buffers[2]
    if scales is None or not x.is_cuda or x.get_device() != packed.get_device() or x.dtype != DTYPE:
        return None
    if missing() is not None or api.library() is None or not _has_float8(x.get_device()):
        return None
    tokens = x.shape[0]
    more = -tokens % (16 if tokens < 512 else 64)
    kernels = float8_kernels()
    small, own = kernels.rounded(x, tokens + more)
    y = api.product(small, packed, None, rows)  # at most 448 * 448 * columns, which bfloat16 can hold
    return kernels.scaled_(y[:tokens], own, scales.bits, bias)


def _stored(buffers: Buffers) -> int:
    return 4 * buffers[1].numel()  # a byte holds the places of four values


CUSPARSELT = register(Format("cusparselt", ("one", "places", "packed"), _fits, _pack, _unpack, _linear, stored=_stored))
CUSPARSELT8 = register(
    replace(
        CUSPARSELT, name="cusparselt8", fits=_fits8, linear=_linear8, takes=("float8_e4m3fn",), inputs="float8_e4m3fn"
    )
)  # fmt: skip
