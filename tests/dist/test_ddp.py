"""DistributedDataParallel: every process holds the whole model, and all of them make the same masks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from where import DEVICE

import secateur as sc

pytestmark = pytest.mark.dist


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step)).to(DEVICE)


def trained(rank: int, criterion: sc.Criterion, arguments: dict, inner: bool) -> tuple:
    model = DistributedDataParallel(build())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    pruner = sc.Pruner(model.module if inner else model, criterion, **arguments)
    pruner.attach(optimizer)
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        pruner.verify()
    plan = pruner.finish()
    state = model.module.state_dict()
    held = all(bool((state[name.removeprefix("module.")][~mask] == 0).all()) for name, mask in plan.masks.items())
    return dict(plan.masks), state, plan.metrics(), held


@pytest.mark.parametrize("inner", [True, False], ids=["the model inside", "the wrapper"])
@pytest.mark.parametrize(
    ("criterion", "arguments"),
    [
        (sc.magnitude, {"sparsity": 0.5}),
        (sc.magnitude, {"pattern": "2:4"}),
        (sc.magnitude, {"sparsity": sc.cubic(0.8, end=4), "scope": "global"}),
        (sc.taylor, {"sparsity": sc.linear(0.6, start=1, end=4)}),
        (sc.random(2), {"sparsity": 0.5, "scope": "row"}),
    ],
    ids=["magnitude", "2:4", "gradual", "taylor", "random"],
)
def test_masks_are_equal_on_all_processes_and_zeros_are_held(pair, criterion, arguments, inner):
    found = pair.both(trained, criterion, arguments, inner)
    masks, state, metrics, _ = found[0]
    assert 0.4 < metrics["sparsity"] < 0.9
    for other_masks, other_state, _, held in found:
        assert held
        assert all(torch.equal(masks[name], other_masks[name]) for name in masks)
        assert all(torch.equal(state[name], other_state[name]) for name in state)


def test_the_saved_state_loads_into_the_dense_model(pair):
    _, state, _, _ = pair.both(trained, sc.magnitude, {"sparsity": 0.5}, False)[0]
    model = build()
    model.load_state_dict(state, strict=True)
    assert sum(int((p == 0).sum()) for p in model.parameters()) == 96


def swapped(rank: int) -> tuple:
    model = DistributedDataParallel(build())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    pruner = sc.Pruner(model, sparsity=0.5, grow=abs(sc.grad), swap=sc.cosine(0.0, initial=0.3, end=5)).attach(optimizer)
    first = {}
    for step in range(5):
        optimizer.zero_grad()
        model(batch(rank, step)).square().mean().backward()
        optimizer.step()
        first = first or {name: mask.clone() for name, mask in pruner.masks.items()}
    return first, dict(pruner.masks)


def test_rigl_moves_the_masks_alike_on_all_processes(pair):
    (first, masks), *others = pair.both(swapped)
    assert all(torch.equal(masks[name], other[name]) for _, other in others for name in masks)
    assert any(not torch.equal(masks[name], first[name]) for name in masks)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == {"module.0.weight": 64, "module.2.weight": 32}


def square(output: Tensor, _: Tensor) -> Tensor:
    return output.square().mean()


def with_data(rank: int, criterion: sc.Criterion) -> dict[str, Tensor]:
    model = DistributedDataParallel(build())
    plan = sc.prune_(model, criterion, sparsity=0.5, data=[batch(0, step) for step in range(3)], loss=square)
    model(batch(rank, 0)).sum().backward()  # and the wrapper still trains
    return dict(plan.masks)


@pytest.mark.parametrize("criterion", [sc.wanda, sc.taylor], ids=str)
def test_the_same_data_gives_the_same_masks(pair, criterion):
    masks, *others = pair.both(with_data, criterion)
    assert all(torch.equal(masks[name], other[name]) for other in others for name in masks)
