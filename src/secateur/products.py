"""Sums of products of vectors, such as Gram matrices.

Products are taken of values that were centred first, so that inputs with a large mean lose no digits, and are added up in
float64.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_TOKENS = 4096  # products over so many inputs are taken at once
_WIDE = 2048  # Gram matrices of more columns are float32 in the end, on a GPU


@dataclass
class Products:
    """The sum of u v' over pairs of vectors, given as matrices (groups, number, size).

    Keeps the sums of (u - a)(v - b)', u - a and v - b for fixed a and b (the means of the first pairs).
    """

    a: Tensor | None = None
    b: Tensor | None = None
    number: int = 0
    half: bool = False  # the vectors were in half precision

    def add(self, u: Tensor, v: Tensor) -> None:
        wide = torch.float32 if u.device.type == "mps" else torch.float64
        if self.a is None or self.b is None:
            self.half = self.half and u.device.type == "cuda"
            self.a, self.b = u.mean(1, keepdim=True), v.mean(1, keepdim=True)
            if self.half:  # tensor cores take such values as they are, and centred ones would be rounded
                self.a, self.b = torch.zeros_like(self.a), torch.zeros_like(self.b)
            self.shifted = u.new_zeros(u.shape[0], u.shape[2], v.shape[2], dtype=wide)
            self.u, self.v = torch.zeros_like(self.a, dtype=wide), torch.zeros_like(self.b, dtype=wide)
        self.number += u.shape[1]
        with tensor_cores(self.half):
            for one, other in zip(u.split(_TOKENS, 1), v.split(_TOKENS, 1), strict=True):
                self._add(one, other, u is v)

    def _add(self, one: Tensor, other: Tensor, same: bool) -> None:
        if not self.half:
            assert self.a is not None
            assert self.b is not None
            one = one - self.a
            other = one if same else other - self.b
        self.shifted += _squares(one) if same else one.mT @ other
        if not self.half:
            self.u += (total := one.sum(1, keepdim=True))
            self.v += total if same else other.sum(1, keepdim=True)

    def total(self) -> Tensor:
        """The sum of u v', as (size, size), or with a leading axis if there are several groups."""
        assert self.a is not None
        assert self.b is not None
        whole = self.shifted
        if not self.half:
            a, b = self.a.to(self.u.dtype), self.b.to(self.u.dtype)
            whole = whole + (a.mT @ self.v + self.u.mT @ b) + self.number * (a.mT @ b)
        if whole.is_cuda and whole.shape[-1] >= _WIDE:
            whole = whole.float()  # the sum is done, and memory is short
        return whole if whole.shape[0] > 1 else whole[0]


@contextlib.contextmanager
def tensor_cores(enabled: bool) -> Iterator[None]:
    """Lets float32 products round their factors to the 10 bits of TF32, inside the context; half precision has no more."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = before or enabled
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def _squares(x: Tensor, panel: int | None = None) -> Tensor:
    """x' x. Products of the columns' left half with the right half are taken once, as the matrix is symmetric.

    Parts of fewer than two panels are not divided further. A GPU needs larger products to be busy.
    """
    size = x.shape[-1]
    panel = (2048 if x.is_cuda else 128) if panel is None else panel
    if size < 2 * panel:
        return x.mT @ x
    half = size // 2
    left, right = x[..., :half], x[..., half:]
    found = x.new_empty(*x.shape[:-2], size, size)
    found[..., :half, half:] = corner = left.mT @ right
    found[..., half:, :half] = corner.mT
    found[..., :half, :half] = _squares(left, panel)
    found[..., half:, half:] = _squares(right, panel)
    return found
