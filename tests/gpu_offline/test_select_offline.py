"""The Triton kernels that rank magnitudes, compiled for an H200 and run by an emulator of PTX. They need Triton, and no GPU."""

from __future__ import annotations

import contextlib

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")

from offline import Driver  # noqa: E402

from secateur.kernels import NaNFound, cuda, one_pass  # noqa: E402
from secateur.patterns import Pattern  # noqa: E402
from secateur.scores import Scores  # noqa: E402
from secateur.select import select  # noqa: E402

DRIVER = Driver()  # one for all tests, since compiled kernels keep it
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(scope="module", autouse=True)
def compiled(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_CACHE_DIR", str(tmp_path_factory.mktemp("triton")))
        yield


@pytest.fixture(autouse=True)
def driver(monkeypatch):
    """A driver that emulates launches on CPU tensors."""
    DRIVER.launches, DRIVER.tensors, DRIVER.change, DRIVER.seen, DRIVER.ran = 0, None, str, [], []
    monkeypatch.setattr(triton.runtime.driver, "_active", DRIVER)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(cuda, "_ONE", 0)
    return DRIVER


def expected(tensors: list[Tensor], drop: int, masks: list[Tensor | None]) -> list[Tensor]:
    """What the CPU keeps."""
    pool = {str(i): Scores.magnitude(x, under=under) for i, (x, under) in enumerate(zip(tensors, masks))}
    return list(select(pool, Pattern(), scope="global", count=drop).values())


def sample_of(tensors: list[Tensor], masks: list[Tensor | None], size: int = 4000) -> Tensor:
    every = [(x if under is None else x * under).reshape(-1).abs() for x, under in zip(tensors, masks)]
    dtypes = {x.dtype for x in every}
    whole = torch.cat([x if len(dtypes) == 1 else x.float() for x in every])
    return whole[:: max(whole.numel() // size, 1) | 1].contiguous()


def check(
    tensors: list[Tensor], drop: int, masks: list[Tensor | None] | None = None, sample: Tensor | None = None, ran: str = ""
) -> None:
    """Compares with the CPU. `ran` is a kernel that must have run."""
    DRIVER.ran.clear()
    masks = masks or [None] * len(tensors)
    got = cuda.keep_magnitudes(list(zip(tensors, masks)), lambda: sample_of(tensors, masks) if sample is None else sample, drop)
    assert got is not None
    for mine, theirs in zip(got, expected(tensors, drop, masks)):
        assert torch.equal(mine, theirs)
    assert not ran or ran in DRIVER.ran
    assert DRIVER.ran.count("_sweep_kernel") == sum(tensor.numel() > 0 for tensor in tensors)


def weights(dtype: torch.dtype, *sizes: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(len(sizes))
    return [torch.randn(size, generator=generator).to(dtype).view(1, -1) for size in sizes]


ONE_PASS, TIES, SEARCH, AGAIN = "_drop_kernel", "_mask_kernel", "_count_kernel", "_again_kernel"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("share", [0.001, 0.5, 0.93])
def test_one_pass_finds_the_mask(dtype, share):
    (weight,) = weights(dtype, 5 * one_pass.BLOCK)
    check([weight], int(share * weight.numel()), ran=ONE_PASS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_several_tensors_of_any_size(dtype, masked):
    pool = weights(dtype, one_pass.BLOCK + 77, 1, 2 * one_pass.BLOCK, 513, 4001)
    pool.insert(2, torch.empty(1, 0, dtype=dtype))
    pool[3][0, 1000:1400] = 0.5
    masks = [(torch.rand(x.shape) > 0.3).to(dtype) for x in pool] if masked else None
    total = sum(x.numel() for x in pool)
    for drop in (1, 2 * total // 5, total - 1):
        check(pool, drop, masks, ran=TIES if masked and drop == 1 else ONE_PASS)


def test_tensors_of_different_dtypes_and_addresses():
    pool = [x for dtype in DTYPES for x in weights(dtype, 3000)]
    pool.append(torch.randn(1, 2050)[:, 1:2002])  # four bytes off
    check(pool, 5000, ran=ONE_PASS)
    check(pool, 5000, [None, *((torch.rand(x.shape) > 0.5).to(x.dtype) for x in pool[1:])], ran=ONE_PASS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_that_many_elements_have(dtype):
    generator = torch.Generator().manual_seed(7)
    pool = [torch.randint(-3, 4, (1, n), generator=generator).to(dtype) for n in (one_pass.BLOCK, 2 * one_pass.BLOCK + 500)]
    every = torch.cat(pool, 1).abs().float()
    for value in (0, 1, 2, 3):
        below, upto = int((every < value).sum()), int((every <= value).sum())
        for drop in (max(below, 1), below + 1, (below + upto) // 2, min(upto, every.numel() - 1)):
            check(pool, drop)
    check(pool, every.numel() // 2, ran=TIES)
    same = [torch.full((1, n), -2.5, dtype=dtype) for n in (one_pass.BLOCK + 9, 700)]
    for drop in (1, one_pass.BLOCK, one_pass.BLOCK + 8, one_pass.BLOCK + 11, one_pass.BLOCK + 708):
        check(same, drop, ran=TIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zeros_and_infinities(dtype):
    pool = weights(dtype, one_pass.BLOCK + 100, 3000)
    pool[0][0, ::2] = 0
    pool[0][0, 2::6] = -0.0
    pool[1][0, ::5] = torch.inf
    pool[1][0, 1::5] = -torch.inf
    zeros, finite = (int(sum(test(x).sum() for x in pool)) for test in (lambda x: x == 0, torch.isfinite))
    for drop in (zeros - 700, zeros, zeros + 1, zeros + 300, finite - 1, finite):
        check(pool, drop)
    check(pool, finite + 1, sample=torch.tensor([1.0, torch.inf, torch.inf], dtype=dtype).repeat(100))
    check(pool, finite + 500, sample=torch.full((300,), torch.inf, dtype=dtype), ran=TIES)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("off", [-1.0, 1.0])
def test_a_bracket_beside_the_threshold(dtype, off):
    pool = weights(dtype, one_pass.BLOCK + 100, 3000)
    check(pool, 5000, sample=(sample_of(pool, [None, None]) + off).abs(), ran=SEARCH)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_bracket_that_ends_at_the_threshold(dtype):
    (weight,) = weights(dtype, one_pass.BLOCK + 100)
    weight[weight.abs() < 0.3] = 0.25
    ordered = weight.abs().float().view(-1).sort().values
    ties, below = int((ordered == 0.25).sum()), int((ordered < 0.25).sum())
    assert not below
    for first, drop in ((ties - 30, ties - 30), (ties, ties - 1), (ties, ties + 1), (ties - 5, ties)):
        check([weight], drop, sample=ordered[max(first - 2000, 0) :].to(dtype))
        check([weight], drop, sample=ordered[: first + 2000].to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_more_candidates_than_a_block_has_memory_for(dtype, masked):
    """All candidates are in one block, in the middle of the pool."""
    pool = [x * 0.2 for x in weights(dtype, 4 * one_pass.BLOCK + 5, one_pass.BLOCK)]
    block = pool[0][0, one_pass.BLOCK : 2 * one_pass.BLOCK]
    block[1::3] = (1 + torch.rand(block[1::3].shape, generator=torch.Generator().manual_seed(8))).to(dtype)
    masks = [torch.ones_like(x) for x in pool] if masked else None
    every = torch.cat(pool, 1).abs()
    drop = int((every < 1).sum() + (every >= 1).sum() // 2)
    below = int(4000 * drop / every.numel()) - 100
    sample = torch.cat([torch.zeros(below), torch.linspace(1, 2, 200), torch.full((3800 - below,), 9.0)])
    check(pool, drop, masks, sample=sample.to(dtype), ran=AGAIN)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_is_found(dtype, masked):
    pool = weights(dtype, one_pass.BLOCK + 100, 3000, 500)
    pool[1][0, 2999] = -torch.nan
    masks = [torch.ones_like(x) if masked else None for x in pool]
    with pytest.raises(NaNFound) as caught:
        cuda.keep_magnitudes(list(zip(pool, masks)), lambda: sample_of(pool, masks), 5000)
    assert caught.value.position == 1


@pytest.mark.parametrize("size", [1000, one_pass.BLOCK + 1])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_kernels_of_one_small_tensor(dtype, size, monkeypatch):
    monkeypatch.setattr(cuda, "_ONE", 1 << 20)
    (weight,) = weights(dtype, size)
    for x in (weight, (weight * 4).round() / 4):
        for drop in (1, size // 2, size - 1):
            (mask,) = cuda.keep_magnitudes([(x, None)], x.clone, drop) or [None]
            assert mask is not None
            assert torch.equal(mask, expected([x], drop, [None])[0])
    assert "_sweep_kernel" not in DRIVER.ran
