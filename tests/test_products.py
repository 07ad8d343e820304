"""Products of matrices by the faster of torch's libraries."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from secateur import products
from secateur.products import Products, matmul, rough_matmul


@pytest.fixture(params=[False, True], ids=["torch", "oneDNN"])
def onednn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if request.param and not torch.backends.mkldnn.is_available():
        pytest.skip("this build of torch has no oneDNN")
    monkeypatch.setattr(products, "_mkl_is_slow", lambda: request.param)
    return request.param


def operands(rows: int, inner: int, columns: int) -> list[tuple[Tensor, Tensor]]:
    """The same product with several ways in which the matrices can lie in memory."""
    a, b = torch.randn(rows, inner), torch.randn(inner, columns)
    wide = torch.randn(inner, rows + columns + 3)
    return [
        (a, b),
        (a, torch.randn(columns, inner).mT),
        (torch.randn(inner, rows).mT, b),
        (wide[:, :rows].mT, wide[:, rows + 3 :]),
        (a[None], b[None]),
    ]


@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 5, 2), (144, 1453, 97), (288, 700, 288)])
def test_matmul_is_the_product_of_any_two_matrices(sizes: tuple[int, int, int], onednn: bool) -> None:
    torch.manual_seed(0)
    for a, b in operands(*sizes):
        wanted = a.double() @ b.double()
        found = matmul(a, b)
        assert found.dtype == torch.float32
        assert found.shape == wanted.shape
        # Each sum of n products is right to n roundings of the sum of their magnitudes.
        bound = sizes[1] * torch.finfo(torch.float32).eps * (a.double().abs() @ b.double().abs())
        assert bool(((found.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("able", [False, True], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("sizes", [(3, 5, 2), (144, 1453, 97), (288, 700, 288)])
def test_rough_products_have_the_precision_of_bfloat16_at_least(
    sizes: tuple[int, int, int], able: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(products, "has_bfloat16", lambda kind: able)
    for a, b in operands(*sizes):
        wanted, found = a.double() @ b.double(), rough_matmul(a, b)
        assert found.dtype == torch.float32
        assert found.shape == wanted.shape
        # Two factors and the result are rounded to 8 bits, and the sums to 24.
        size = a.double().abs() @ b.double().abs()
        share = 3 * 2.0**-8 if able else sizes[1] * torch.finfo(torch.float32).eps
        assert bool(((found.double() - wanted).abs() <= share * size).all())
        if a.ndim == b.ndim == 2:
            bias = torch.randn(b.shape[1])
            torch.testing.assert_close(rough_matmul(a, b, bias), found + bias, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("able", [False, True], ids=["float32", "bfloat16"])
def test_rough_sums_of_zeros_are_zero_and_others_are_close(able: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(products, "has_bfloat16", lambda kind: able)
    zero, near = Products(rough=True), Products(rough=True)
    u, v = torch.randn(1, 5000, 96) + 1, torch.randn(1, 5000, 64) + 3
    for one, other in zip(u.split(1250, 1), v.split(1250, 1)):
        zero.add(torch.zeros_like(one), other)
        near.add(one, other)
    assert not zero.total().any()
    wanted = u[0].double().T @ v[0].double()
    assert float((near.total() - wanted).norm() / wanted.norm()) < (2e-3 if able else 1e-6)


def test_rough_sums_are_precise_beside_a_large_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(products, "has_bfloat16", lambda kind: True)
    v = torch.randn(1, 5000, 64)
    u = v[:, :, :32] + torch.randn(32)
    v = v + 30 * torch.randn(64)
    sums = Products(rough=True)
    for one, other in zip(u.split(1250, 1), v.split(1250, 1)):
        sums.add(one, other)
    means = u[0].double().mean(0)[:, None] * v[0].double().mean(0)
    wanted = u[0].double().T @ v[0].double() - 5000 * means
    assert float((sums.total() - 5000 * means - wanted).norm() / wanted.norm()) < 4e-3


def test_matmul_adds_a_bias_as_addmm_does(onednn: bool) -> None:
    a, b = torch.randn(200, 300), torch.randn(300, 100)
    strided = (torch.randn(200)[::2], torch.randn(1).expand(100))  # oneDNN read past the end of these
    for bias in (torch.randn(100), torch.randn(1, 100), torch.randn(200, 100), *strided):
        torch.testing.assert_close(matmul(a, b, bias), torch.addmm(bias, a, b), rtol=1e-4, atol=1e-4)


def test_matmul_passes_gradients_and_other_dtypes_to_torch(onednn: bool) -> None:
    a, b = torch.randn(200, 300, requires_grad=True), torch.randn(300, 100)
    matmul(a, b).sum().backward()
    assert a.grad is not None
    torch.testing.assert_close(a.grad, b.sum(1).expand(200, 300))
    wide = matmul(a.detach().double(), b.double())
    assert torch.equal(wide, a.detach().double() @ b.double())


@pytest.mark.filterwarnings("ignore:TF32 acceleration")
def test_matmul_passes_what_onednn_does_not_take_to_torch(onednn: bool) -> None:
    a, b = torch.randn(200, 300), torch.randn(300, 100)
    torch.testing.assert_close(matmul(a.to_sparse(), b), a @ b, rtol=1e-4, atol=1e-4)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        matmul(a, b[1:])
    for bias in (torch.randn(100).double(), torch.randn(100, device="meta")):
        with pytest.raises(RuntimeError, match=r"same dtype|device"):
            matmul(a, b, bias)
    with torch.backends.mkldnn.flags(enabled=False):
        assert torch.equal(matmul(a, b), a @ b)


def test_slices_of_a_matrix_are_multiplied_as_fast_as_whole_matrices(onednn: bool) -> None:
    """oneDNN takes a thousand times longer for views with other strides, so they are copied first."""
    x = torch.randn(1453, 288)
    left, right = x[:, :144], x[:, 144:]
    whole, other = left.mT.contiguous(), right.contiguous()

    def best(run: Callable[[], Tensor]) -> float:
        times = []
        for _ in range(5):
            begin = time.perf_counter()
            run()
            times.append(time.perf_counter() - begin)
        return min(times)

    assert best(lambda: matmul(left.mT, right)) < 50 * best(lambda: whole @ other)
