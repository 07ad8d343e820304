"""Tensors with many zeros, stored as a bit for each element and the values that are not zero."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..masks import pack_bits, unpack_bits
from .files import BadFile, Entry, shaped

BITMASK, VALUES, SHAPE = "#bitmask", "#values", "#shape"
PARTS = (BITMASK, VALUES, SHAPE)
_OVERHEAD = 512  # about the bytes that three entries in a header need more than one
_WHOLE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SLAB = 1 << 20


def bits_of(tensor: Tensor) -> Tensor:
    """The tensor as one row of integers of the same width. Only +0.0 is zero there, so -0.0 and NaN are stored as values."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1).view(_WHOLE[tensor.dtype.itemsize])


def count_values(tensor: Tensor) -> int:
    """The number of elements whose bits are not all zero."""
    return int(torch.count_nonzero(bits_of(tensor))) if tensor.numel() else 0


def entries(name: str, tensor: Tensor, values: int, again: Callable[[], Tensor] | None = None) -> dict[str, Entry] | None:
    """The entries to write instead of a tensor that has `values` nonzero elements. None if they would not be smaller.

    `again` makes the tensor when it is written, if it should not stay in memory until then.
    """
    size, item, shape = tensor.numel(), tensor.dtype.itemsize, tuple(tensor.shape)
    if -(-size // 8) + values * item + _OVERHEAD >= size * item:
        return None
    read = again or (lambda: tensor)
    mask: Callable[[], Tensor] = lambda: pack_bits(bits_of(read()) != 0)  # noqa: E731
    return {
        name + BITMASK: Entry(torch.uint8, (-(-size // 8),), mask),
        name + VALUES: Entry(tensor.dtype, (values,), lambda: _values(read())),
        name + SHAPE: Entry(torch.int64, (len(shape),), lambda: torch.tensor(shape, dtype=torch.int64)),
    }


def _values(tensor: Tensor) -> Tensor:
    flat = bits_of(tensor)
    return flat[flat != 0].view(tensor.dtype)


def check(name: str, mask: Tensor, values: int, shape: tuple[int, ...]) -> None:
    """Raises BadFile unless the bitmask has the length of this shape, and as many bits set as there are values."""
    ones = count_bits(name, mask, shape)
    if ones != values:
        raise BadFile(f"the bitmask of {name!r} keeps {ones} elements and there are {values} values")


def count_bits(name: str, mask: Tensor, shape: tuple[int, ...]) -> int:
    """The number of bits set in a bitmask. Raises BadFile if the bitmask does not have the length of this shape."""
    size = math.prod(shape)
    if mask.dtype != torch.uint8 or mask.dim() != 1 or mask.numel() != -(-size // 8):
        raise BadFile(f"the bitmask of {name!r} should hold {-(-size // 8)} bytes for shape {shape}, not {tuple(mask.shape)}")
    if size % 8 and int(mask[-1]) >> (size % 8):
        raise BadFile(f"the bitmask of {name!r} has bits beyond its {size} elements")
    return sum(int(torch.count_nonzero(unpack_bits(slab, 8 * len(slab)))) for slab in mask.split(_SLAB))


def unpack(name: str, mask: Tensor, values: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Unpacks a tensor, bit for bit."""
    check(name, mask, values.numel(), shape)
    kept = unpack_bits(mask, math.prod(shape))
    whole = torch.zeros(kept.numel(), dtype=_WHOLE[values.dtype.itemsize])
    whole[kept] = bits_of(values)
    return shaped(whole.view(values.dtype), shape, name)
