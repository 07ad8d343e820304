"""Masks made on a GPU equal those made on the CPU, also at the limits of the kernels."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.kernels import NaNFound
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import select

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def both(tensors, pattern="unstructured", **budget):
    """The masks from CPU and GPU."""
    results = []
    for device in ("cpu", "cuda"):
        scores = {name: Scores.magnitude(tensor.to(device)) for name, tensor in tensors.items()}
        results.append({n: m.cpu() for n, m in select(scores, Pattern.parse(pattern), **budget).items()})
    return results


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sparsity", [0.0, 0.001, 0.3, 0.5, 0.9, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(1, 1), (7, 13), (100, 1000), (1111, 777), (4096, 1024)])
def test_gpu_mask_equals_cpu_mask(dtype, sparsity, shape):
    generator = torch.Generator().manual_seed(shape[0])
    weight = torch.randn(shape, generator=generator).to(dtype)
    for tensor in (weight, weight.clone().masked_fill_(weight.abs() < 0.5, 0), (weight * 4).round() / 4, weight.sort().values):
        ours, theirs = both({"w": tensor}, sparsity=sparsity)
        assert torch.equal(ours["w"], theirs["w"])
        assert int((~theirs["w"]).sum()) == round(sparsity * tensor.numel())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gpu_global_mask_equals_cpu_mask(dtype):
    generator = torch.Generator().manual_seed(1)
    tensors = {str(i): (torch.randn(300 + i, 400, generator=generator) * (i + 1)).to(dtype) for i in range(7)}
    for sparsity in (0.1, 0.5, 0.95):
        ours, theirs = both(tensors, sparsity=sparsity, scope="global")
        assert all(torch.equal(ours[n], theirs[n]) for n in tensors)
    mixed = {**tensors, "half": torch.randn(100, 100, generator=generator).bfloat16()}
    ours, theirs = both(mixed, sparsity=0.5, scope="global")
    assert all(torch.equal(ours[n], theirs[n]) for n in mixed)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "3:4", "4:8", "1:2", "7:16", "2:5", "16x1/2:4", "1x4/1:2"])
def test_gpu_n_of_m_equals_cpu(dtype, pattern):
    weight = torch.randn(130, 80, generator=torch.Generator().manual_seed(2)).to(dtype)
    for tensor in (weight, weight.round(), weight[:, :77].contiguous()):
        ours, theirs = both({"w": tensor}, pattern)
        assert torch.equal(ours["w"], theirs["w"])


@pytest.mark.parametrize("pattern", ["4x4", "16x16", "out", "in", "1x7"])
@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_gpu_blocks_and_rows_equal_cpu(pattern, scope):
    if (pattern, scope) == ("out", "row"):
        pytest.skip("each row is one unit")
    weight = torch.randn(130, 84, generator=torch.Generator().manual_seed(3))
    ours, theirs = both({"w": weight}, pattern, sparsity=0.4, scope=scope)
    assert torch.equal(ours["w"], theirs["w"])


def test_infinite_threshold_falls_back_exactly():
    weight = torch.full((64, 64), torch.inf)
    weight[0] = 1
    ours, theirs = both({"w": weight}, count=1000)
    assert torch.equal(ours["w"], theirs["w"])


@pytest.mark.parametrize("budget", [{"sparsity": 0.5}, {"sparsity": 0.5, "scope": "row"}, {"pattern": "2:4"}])
def test_nan_is_named_on_the_gpu(budget):
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256)).cuda()
    with torch.no_grad():
        model[1].weight[200, 7] = torch.nan
    with pytest.raises(ValueError, match=r"1\.weight.*NaN") as caught:
        sc.prune_(model, **budget)
    assert not isinstance(caught.value, NaNFound)


def test_pruner_on_the_gpu_holds_zeros():
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    pruner = sc.Pruner(model, sparsity=sc.cubic(0.9, end=10), scope="global", floor=0.01).attach(optimizer)
    for _ in range(15):
        optimizer.zero_grad()
        model(torch.randn(32, 64, device="cuda")).square().mean().backward()
        optimizer.step()
        pruner.verify()
    assert pruner.masks.kept == (64 * 128 + 1280) - round(0.9 * (64 * 128 + 1280))


def test_criteria_agree_with_the_cpu():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, groups=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10))
    batch = torch.randn(16, 3, 8, 8)
    for criterion in (sc.wanda, sc.ria, sc.lamp, sc.random(3)):
        masks = [sc.plan(model.to(d), criterion, sparsity=0.5, data=[batch.to(d)]).masks.to("cpu") for d in ("cpu", "cuda")]
        agree = sum(int((masks[0][n] == masks[1][n]).sum()) for n in masks[0]) / masks[0].total
        assert agree > 0.999, criterion  # sums over a batch are computed in another order


@pytest.mark.parametrize("where", [0, 1, 2])
def test_an_empty_tensor_anywhere_in_a_pool_changes_nothing(where):
    generator = torch.Generator().manual_seed(4)
    tensors = [torch.randn(200, 300, generator=generator).round().bfloat16() for _ in range(2)]
    tensors.insert(where, torch.empty(0, 300, dtype=torch.bfloat16))
    ours, theirs = both({str(i): tensor for i, tensor in enumerate(tensors)}, sparsity=0.7, scope="global")
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("power", [1, 2])
@pytest.mark.parametrize("pattern", ["unstructured", "1x4", "16x16", "3x7", "1x4-2", "3x5-4", "2:4", "4:8", "out"])
def test_gpu_masks_of_masked_weights_equal_cpu(dtype, power, pattern):
    generator = torch.Generator().manual_seed(3)
    for shape in ((64, 128), (130, 77), (1, 9)):
        weight = torch.randn(shape, generator=generator).to(dtype)
        under = (torch.rand(shape, generator=generator) > 0.3).to(dtype)
        parsed = Pattern.parse(pattern)
        units = parsed.grid(Scores.of(weight).layout)
        masks = []
        for device in ("cpu", "cuda"):
            scores = Scores.magnitude(weight.to(device), power=power, under=under.to(device))
            budget = {} if parsed.keep else {"count": units[0] * units[1] // 3}
            masks.append(select({"w": scores}, parsed, **budget)["w"].cpu())
        assert torch.equal(*masks)


def test_gpu_pruning_blocks_that_lose_all_needs_no_ranking_of_blocks():
    weight = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    blocks = select({"w": Scores.magnitude(weight)}, Pattern.parse("1x4-2"), count=64 * 16)["w"]
    assert torch.equal(blocks, select({"w": Scores.magnitude(weight)}, Pattern.parse("2:4"))["w"])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
@pytest.mark.parametrize("how", [{"sparsity": 0.5}, {"pattern": "2:4"}, {"pattern": "4x4", "sparsity": 0.5}])
def test_masks_of_weights_on_another_device_than_the_current_one(how):
    torch.manual_seed(0)
    model = nn.Linear(256, 128)
    there = copy.deepcopy(model).to("cuda:1")
    want, got = (sc.prune_(each, **how).masks["weight"] for each in (model, there))
    assert torch.equal(got.cpu(), want)
    assert torch.equal(there.weight.cpu(), model.weight)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("zeros", [0, 1000, 1 << 20])
def test_zeros_that_were_there_before_are_counted_as_on_the_cpu(dtype, zeros):
    weight = torch.rand(1500, 1400, generator=torch.Generator().manual_seed(5)).add_(1).to(dtype)
    weight.view(-1)[weight.numel() - zeros :] = 0
    tensors = {"large": weight, "small": weight[-100:].contiguous(), "across": weight.t()}
    plans = [sc.plan({n: t.to(device) for n, t in tensors.items()}, sparsity=0.3) for device in ("cpu", "cuda")]
    assert plans[0].zeros == plans[1].zeros
    assert bool(plans[1].zeros) == (zeros > 1000)  # at most 1 % of zeros are taken for chance


def test_a_plan_needs_little_memory_besides_its_mask():
    weight = torch.randn(1 << 13, 1 << 13, device="cuda", dtype=torch.bfloat16)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    plan = sc.plan({"weight": weight}, pattern="2:4")
    assert plan.masks["weight"].numel() == weight.numel()
    assert torch.cuda.max_memory_allocated() - before < 1.1 * weight.numel()


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=str)
@pytest.mark.parametrize("kind", ["normal", "few values", "all equal", "concentrated", "half zero"])
def test_large_pools_equal_the_cpu(dtype, kind):
    """Pools that take one pass, pools with millions of ties, and one whose candidates are all in a small part of it."""
    generator = torch.Generator().manual_seed(6)
    sizes = {"a": (4099, 4097), "b": (1, 1), "c": (8192, 6144), "d": (0, 64), "e": (333, 77)}
    tensors = {name: torch.randn(size, generator=generator).to(dtype) for name, size in sizes.items()}
    for tensor in tensors.values():
        if kind == "few values":
            tensor.mul_(4).round_().div_(4)
        elif kind == "all equal":
            tensor.fill_(-0.75)
        elif kind == "half zero":
            tensor[tensor < 0] = 0
    if kind == "concentrated":
        tensors["a"].mul_(0.01)
        tensors["c"].mul_(100)
        tensors["a"][:200].fill_(3).add_(torch.rand(200, 4097, generator=generator).to(dtype))
    for sparsity in (0.001, 0.26, 0.5, 0.9):
        ours, theirs = both(tensors, sparsity=sparsity, scope="global")
        assert all(torch.equal(ours[n], theirs[n]) for n in tensors), sparsity


def test_a_sample_beside_the_threshold_changes_nothing():
    weight = torch.randn(4096, 8192, generator=torch.Generator().manual_seed(7))
    stride = max(weight.numel() // (1 << 16), 1) | 1  # every place that the sample is taken from
    weight.view(-1)[::stride] *= 100
    ours, theirs = both({"w": weight}, sparsity=0.5)
    assert torch.equal(ours["w"], theirs["w"])


def test_more_than_two_to_the_thirty_one_elements_are_ranked_together():
    weight = torch.randn(1 << 16, (1 << 15) + 64, device="cuda", dtype=torch.bfloat16)
    mask = select({"w": Scores.magnitude(weight)}, Pattern(), sparsity=0.5)["w"]
    kept, gone = weight.abs().masked_fill(~mask, torch.inf).amin(), weight.abs().masked_fill(mask, 0).amax()
    assert kept >= gone
    assert sum(int(part.sum()) for part in mask.split(1 << 12)) == weight.numel() - round(0.5 * weight.numel())
    if kept == gone:  # of the ties the first are pruned
        ties = (weight == kept).logical_or_(weight == -kept).view(-1)
        places = torch.cat([part.nonzero().view(-1) + i * (1 << 28) for i, part in enumerate(ties.split(1 << 28))])
        states = mask.view(-1)[places]
        assert bool((states[1:] >= states[:-1]).all())
