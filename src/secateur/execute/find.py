"""What zeros are there: the pattern of a matrix, in the words that patterns have, read off the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..masks import pack_bits, unpack_bits  # noqa: F401 - for the formats

SQUARES = (128, 64, 32, 16, 8, 4)
BLOCKS = (*((n, n) for n in SQUARES), (16, 1), (1, 16), (8, 1), (1, 8), (4, 1), (1, 4))
FULL = 0.98  # a block pattern is named when the blocks that are there are this full
GROUPS = (4, 8, 16, 2)


@dataclass(frozen=True)
class Zeros:
    """The zeros of a matrix: how many, and the pattern that they make."""

    sparsity: float
    pattern: str


def zeros_of(matrix: Tensor) -> Zeros:
    """Whole rows or columns, blocks, 2:4 and other n:m, an equal count per row, or unstructured; dense when none is zero."""
    kept = matrix != 0
    count, size = int(torch.count_nonzero(kept)), kept.numel()
    if count == size:
        return Zeros(0.0, "dense")
    return Zeros(1 - count / size, _pattern(kept, count) if count else "all zero")


def _pattern(kept: Tensor, count: int) -> str:
    rows, columns = kept.shape
    if count < FULL * kept.numel():  # with fewer zeros, no block need be empty
        for name, height, width in (("out", 1, columns), ("in", rows, 1)):
            if height * width > 1 and fill(kept, height, width, count) >= FULL:
                return name
        # A block is no fuller than the blocks that it is made of.
        tall, wide = fill(kept, 4, 1, count) >= FULL, fill(kept, 1, 4, count) >= FULL
        for height, width in BLOCKS:
            if (tall or height == 1) and (wide or width == 1) and fill(kept, height, width, count) >= FULL:
                return f"{height}x{width}"
    few = kept[:64]  # mostly the first rows say no
    for m in GROUPS:
        if columns % m == 0 and not bool(few.unflatten(1, (-1, m)).all(-1).any()):
            most = int(kept.unflatten(1, (-1, m)).sum(-1, dtype=torch.uint8).max())
            if most < m and count >= 0.9 * kept.numel() * most / m:  # few groups hold less: the rule was n of m
                return f"{most}:{m}"
    each = count // rows
    alike = rows > 1 and bool((few.sum(1) == each).all()) and bool((kept.sum(1) == each).all())
    return f"{each} per row" if alike else "unstructured"


def fill(kept: Tensor, height: int, width: int, count: int | None = None) -> float:
    """The part of the weights in blocks with any weight at all that are not zero; 0 where blocks do not divide the matrix."""
    rows, columns = kept.shape
    if rows % height or columns % width or not kept.numel():
        return 0.0
    # Of bytes, torch finds the largest much faster than whether any is true.
    blocks = kept.view(torch.uint8).view(rows // height, height, columns // width, width).amax(1).amax(-1)
    inside = int(torch.count_nonzero(blocks)) * height * width
    return (int(torch.count_nonzero(kept)) if count is None else count) / max(1, inside)


def negative_zeros(weight: Tensor) -> Tensor | None:
    """One bit for each weight that is -0.0, which a format does not store; None where there is none."""
    found = (weight == 0) & torch.signbit(weight)
    if not bool(found.any()):
        return None
    return pack_bits(found.reshape(-1))


def owners(starts: Tensor, count: int) -> Tensor:
    """The number of the row that each of `count` places belongs to. torch would write past the end for starts that go back."""
    each = starts.long().diff()
    if bool((each < 0).any()):
        raise ValueError("starts go back")
    return torch.arange(len(each), device=starts.device).repeat_interleave(each, output_size=count)
