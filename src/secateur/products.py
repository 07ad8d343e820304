"""Products of matrices, and sums of products of vectors, such as Gram matrices.

Sums are taken of values that were centred first, so that inputs with a large mean lose no digits, and are added up in float64.
"""

from __future__ import annotations

import contextlib
import platform
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

from .edit import has_bfloat16

_TOKENS = 4096  # products over so many inputs are taken at once
_WIDE = 2048  # Gram matrices of more columns are float32 in the end, on a GPU
_FEW = 1 << 18  # multiplications that take less time than calling another library


@dataclass
class Products:
    """The sum of u v' over pairs of vectors, given as matrices (groups, number, size).

    Keeps the sums of (u - a)(v - b)', u - a and v - b for fixed a and b (the means of the first pairs).
    """

    a: Tensor | None = None
    b: Tensor | None = None
    number: int = 0
    half: bool = False  # the vectors were in half precision
    rough: bool = False  # they may be rounded to bfloat16, v after it was centred

    def add(self, u: Tensor, v: Tensor) -> None:
        wide = torch.float32 if u.device.type == "mps" else torch.float64
        if self.a is None or self.b is None:
            self.half = self.half and u.device.type == "cuda"
            self.rough = self.rough and _rounds(u[0], v[0])
            self.a, self.b = u.mean(1, keepdim=True), v.mean(1, keepdim=True)
            if self.half:  # tensor cores take such values as they are, and centred ones would be rounded
                self.a, self.b = torch.zeros_like(self.a), torch.zeros_like(self.b)
            elif self.rough:  # without a mean in one factor, there is none in the products
                self.a = torch.zeros_like(self.a)
            self.shifted = u.new_zeros(u.shape[0], u.shape[2], v.shape[2], dtype=wide)
            self.u, self.v = torch.zeros_like(self.a, dtype=wide), torch.zeros_like(self.b, dtype=wide)
        self.number += u.shape[1]
        with tensor_cores(self.half):
            for one, other in zip(u.split(_TOKENS, 1), v.split(_TOKENS, 1), strict=True):
                self._add(one, other, u is v)

    def _add(self, one: Tensor, other: Tensor, same: bool) -> None:
        assert self.a is not None
        assert self.b is not None
        if self.half:
            one, other = one.mT, other.mT
        elif self.rough:
            self.u += one.sum(1, keepdim=True)
            one, other = one.mT, (other - self.b).mT
        else:
            one = _centred(one, self.a)
            other = one if same else _centred(other, self.b)
            self.u += (total := one.sum(2)[:, None])
            self.v += total if same else other.sum(2)[:, None]
        product = rough_matmul if self.rough else matmul
        self.shifted += _squares(one) if same else product(one, other.mT)

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


def _centred(x: Tensor, centre: Tensor) -> Tensor:
    """x - centre, transposed: the products then read memory in order."""
    return torch.sub(x.mT, centre.mT, out=x.new_empty(x.shape[0], x.shape[2], x.shape[1]))


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
    """x x'. Products of the first half of the rows with the second half are taken once, as the matrix is symmetric.

    Parts of fewer than two panels are not divided further. A GPU needs larger products to be busy.
    """
    size = x.shape[-2]
    panel = (2048 if x.is_cuda else 128) if panel is None else panel
    if size < 2 * panel:
        return matmul(x, x.mT)
    half = size // 2
    upper, lower = x[..., :half, :], x[..., half:, :]
    found = x.new_empty(*x.shape[:-2], size, size)
    found[..., :half, half:] = corner = matmul(upper, lower.mT)
    found[..., half:, :half] = corner.mT
    found[..., :half, :half] = _squares(upper, panel)
    found[..., half:, half:] = _squares(lower, panel)
    return found


def matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias) for matrices without gradients, by the faster of the two libraries that torch brings for float32.

    On AMD CPUs with AVX-512, MKL computes float32 products with AVX2, and oneDNN takes less than half of its time (measured on
    a Zen 5). A leading axis of size 1 is allowed.
    """
    one, other = (t[0] if t.ndim == 3 and t.shape[0] == 1 else t for t in (a, b))
    if not _by_onednn(one, other, bias):
        # The operators, not `a @ b`: `reads` reports products that Python code asks for.
        return torch.ops.aten.matmul(a, b) if bias is None else torch.ops.aten.addmm(bias, a, b)
    rows, columns = one.contiguous(), other.mT.contiguous()  # it has no fast code for other strides
    added = None if bias is None else bias.contiguous()  # it does not look at the stride of a bias
    found = torch.ops.mkldnn._linear_pointwise(rows, columns, added, "none", [], "")
    return found if a.ndim == 2 and b.ndim == 2 else found[None]


def rough_matmul(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b (+ bias) with factors rounded to bfloat16 on CPUs that multiply such numbers faster; elsewhere `matmul`.

    For products that may have a relative error of 0.4 %: small corrections, steps of a search, and runs of the dense model.
    """
    one, other = (t[0] if t.ndim == 3 and t.shape[0] == 1 else t for t in (a, b))
    if one.ndim != 2 or other.ndim != 2 or not _rounds(one, other) or one.numel() * other.shape[1] < _FEW:
        return matmul(a, b, bias)
    found = torch.ops.aten.mm(one.bfloat16(), other.bfloat16()).float()
    if bias is not None:
        found += bias
    return found if a.ndim == 2 and b.ndim == 2 else found[None]


def _rounds(*given: Tensor) -> bool:
    """Whether `rough_matmul` rounds these factors."""
    if torch.is_autocast_enabled("cpu") or (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return False
    return all(map(_is_plain, given)) and torch._C._get_mkldnn_enabled() and has_bfloat16("cpu")


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> bool:
    fit = a.ndim == b.ndim == 2 and a.shape[1] == b.shape[0] and (bias is None or bias.shape == b.shape[1:])
    large = fit and a.shape[0] * a.shape[1] * b.shape[1] >= _FEW
    given = (a, b) if bias is None else (a, b, bias)
    if not large or not all(map(_is_plain, given)) or (torch.is_grad_enabled() and any(t.requires_grad for t in given)):
        return False
    return torch._C._get_mkldnn_enabled() and not torch.is_autocast_enabled("cpu") and _mkl_is_slow()


def _is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, nn.Parameter) and t.dtype == torch.float32 and t.is_cpu and t.layout == torch.strided


@cache
def _mkl_is_slow() -> bool:
    """Whether torch multiplies float32 matrices with MKL on an AMD CPU that has AVX-512, and has oneDNN as well."""
    if not (torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()):
        return False
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX512") or not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        return False
    try:
        described = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        described = platform.processor()
    return "AuthenticAMD" in described
