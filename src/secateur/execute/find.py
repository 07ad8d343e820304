"""Recognizes the pattern of the zeros in a matrix and names it in the grammar of `Pattern`."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import pack_bits

SQUARES = (128, 64, 32, 16, 8, 4)
BLOCKS = (*((n, n) for n in SQUARES), (16, 1), (1, 16), (8, 1), (1, 8), (4, 1), (1, 4))
FULL = 0.98  # a block pattern is reported if this fraction of the elements in nonzero blocks is nonzero
GROUPS = (4, 8, 16, 2)  # values of m that are tried for n:m
FEW = 64  # first rows, which rule out most patterns before the whole matrix is read


@dataclass(frozen=True)
class Zeros:
    """The zeros of a matrix: their fraction, and the name of their pattern."""

    sparsity: float
    pattern: str


def zeros_of(matrix: Tensor) -> Zeros:
    """Returns the fraction of zeros and their pattern.

    The pattern is "out" or "in" (whole rows or columns), a block such as "16x1", n:m, "k per row", "unstructured", "dense" (no
    zeros) or "all zero".
    """
    kept = matrix != 0
    count, size = int(torch.count_nonzero(kept)), kept.numel()
    if count == size:
        return Zeros(0.0, "dense")
    return Zeros(1 - count / size, _pattern(kept, count) if count else "all zero")


def _pattern(kept: Tensor, count: int) -> str:
    return _block_pattern(kept, count) or _group_pattern(kept, count) or _row_pattern(kept, count) or "unstructured"


def _block_pattern(kept: Tensor, count: int) -> str | None:
    """Returns "out", "in", or the largest block that the zeros are made of."""
    rows, columns = kept.shape
    if count >= FULL * kept.numel():  # with so few zeros, every block may hold a nonzero element
        return None
    for name, height, width in (("out", 1, columns), ("in", rows, 1)):
        if height * width > 1 and fill(kept, height, width, count) >= FULL:
            return name
    # A large block cannot be fuller than the smaller blocks inside it, so these rule out most candidates.
    tall, wide = fill(kept, 4, 1, count) >= FULL, fill(kept, 1, 4, count) >= FULL
    for height, width in BLOCKS:
        if (tall or height == 1) and (wide or width == 1) and fill(kept, height, width, count) >= FULL:
            return f"{height}x{width}"
    return None


def _group_pattern(kept: Tensor, count: int) -> str | None:
    """Returns "n:m" if no group of m neighbours has more than n nonzeros, and most have n."""
    few = kept[:FEW]
    for m in GROUPS:
        if kept.shape[1] % m == 0 and not bool(few.unflatten(1, (-1, m)).all(-1).any()):
            most = int(kept.unflatten(1, (-1, m)).sum(-1, dtype=torch.uint8).max())
            if most < m and count >= 0.9 * kept.numel() * most / m:  # nearly every group keeps all of its n
                return f"{most}:{m}"
    return None


def _row_pattern(kept: Tensor, count: int) -> str | None:
    """Returns "k per row" if every row has the same number of nonzeros."""
    rows, each = len(kept), count // len(kept)
    alike = rows > 1 and bool((kept[:FEW].sum(1) == each).all()) and bool((kept.sum(1) == each).all())
    return f"{each} per row" if alike else None


def fill(kept: Tensor, height: int, width: int, count: int | None = None) -> float:
    """Returns the nonzero fraction of the elements in blocks that are not all zero; 0 if blocks do not divide the matrix."""
    rows, columns = kept.shape
    if rows % height or columns % width or not kept.numel():
        return 0.0
    # torch's amax over bytes is much faster than any() over booleans.
    blocks = kept.view(torch.uint8).view(rows // height, height, columns // width, width).amax(1).amax(-1)
    inside = int(torch.count_nonzero(blocks)) * height * width
    return (int(torch.count_nonzero(kept)) if count is None else count) / max(1, inside)


def negative_zeros(weight: Tensor) -> Tensor | None:
    """Returns a bit for each element that tells if it is -0.0, which formats do not store; None if there is none."""
    found = (weight == 0) & torch.signbit(weight)
    if not bool(found.any()):
        return None
    return pack_bits(found.reshape(-1))


def owners(starts: Tensor, count: int) -> Tensor:
    """Returns the row that each of `count` entries belongs to, given the index of each row's first entry.

    Raises ValueError for decreasing starts, for which torch would write past the end of memory.
    """
    each = starts.long().diff()
    if bool((each < 0).any()):
        raise ValueError("the starts of rows decrease")
    return torch.arange(len(each), device=starts.device).repeat_interleave(each, output_size=count)
