"""What zeros are there: the pattern of a matrix, in the words that patterns have, read off the matrix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SQUARES = (128, 64, 32, 16, 8, 4)
BLOCKS = (*((n, n) for n in SQUARES), (16, 1), (1, 16), (8, 1), (1, 8), (4, 1), (1, 4))
FULL = 0.98  # a block pattern is named when the blocks that are there are this full
GROUPS = (4, 8, 16, 2)


@dataclass(frozen=True)
class Zeros:
    """The zeros of a matrix: how many, and the pattern that they make."""

    sparsity: float
    pattern: str
    block: tuple[int, int] = (1, 1)


def zeros_of(matrix: Tensor) -> Zeros:
    """2:4 and other n:m, blocks, an equal count per row, or unstructured; dense when no weight is zero."""
    kept = matrix != 0
    rows, columns = kept.shape
    count = int(kept.sum())
    sparsity = 1 - count / max(1, kept.numel())
    if count == kept.numel():
        return Zeros(0.0, "dense")
    if count == 0:
        return Zeros(1.0, "all zero", (1, 1))
    for height, width in BLOCKS if sparsity > 1 - FULL else ():  # with fewer zeros, no block need be empty
        if (height <= rows and width <= columns) and fill(kept, height, width, count) >= FULL:
            return Zeros(sparsity, f"{height}x{width}", (height, width))
    for m in GROUPS:
        if columns % m == 0:
            most = int(kept.view(rows, columns // m, m).sum(-1).max())
            if most < m and count >= 0.9 * kept.numel() * most / m:  # few groups hold less: the rule was n of m
                return Zeros(sparsity, f"{most}:{m}")
    each = kept.sum(1)
    if rows > 1 and bool((each == each[0]).all()):
        return Zeros(sparsity, f"{int(each[0])} per row")
    return Zeros(sparsity, "unstructured")


def fill(kept: Tensor, height: int, width: int, count: int | None = None) -> float:
    """The part of the weights in blocks with any weight at all that are not zero; 0 where blocks do not divide the matrix."""
    rows, columns = kept.shape
    if rows % height or columns % width:
        return 0.0
    blocks = kept.view(rows // height, height, columns // width, width).any(3).any(1)
    inside = int(blocks.sum()) * height * width
    return (int(kept.sum()) if count is None else count) / max(1, inside)


def negative_zeros(weight: Tensor) -> Tensor | None:
    """One bit for each weight that is -0.0, which a format does not store; None where there is none."""
    found = (weight == 0) & torch.signbit(weight)
    if not bool(found.any()):
        return None
    return pack_bits(found.reshape(1, -1)).reshape(-1)


def pack_bits(mask: Tensor) -> Tensor:
    """Rows of booleans as bytes, the first in the lowest bit."""
    rows, columns = mask.shape
    padded = torch.nn.functional.pad(mask.to(torch.uint8), (0, -columns % 8)).view(rows, -1, 8)
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded * powers).sum(-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, columns: int) -> Tensor:
    """The booleans again: [..., bytes] to [..., columns]."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    bits = (packed.unsqueeze(-1) >> shifts) & 1
    return bits.flatten(-2)[..., :columns].bool()
