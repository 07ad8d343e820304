"""A model with the masks of the drop-in for torch.ao.pruning in DistributedDataParallel: all processes have the same."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from where import DEVICE

from secateur.drop_in.ao_pruning import CubicSL, WeightNormSparsifier

pytestmark = pytest.mark.dist


def build() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).to(DEVICE)


def batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * rank + step)).to(DEVICE)


def trained(rank: int, settings: dict, when: str, compiled: bool) -> tuple:
    model, sparsifier = build(), WeightNormSparsifier(**settings)
    if when == "before wrapping":
        sparsifier.prepare(model, None)
    wrapped = DistributedDataParallel(model)
    if when == "after wrapping":
        sparsifier.prepare(model, None)
    call = torch.compile(wrapped, backend="eager") if compiled else wrapped
    scheduler = CubicSL(sparsifier, delta_t=1, total_t=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    held = True
    for step in range(5):
        optimizer.zero_grad()
        call(batch(rank, step)).square().mean().backward()
        optimizer.step()
        sparsifier.step()
        scheduler.step()
        held &= all(bool((g["module"].weight == 0).any()) for g in sparsifier.groups) or step == 0
    wrapped.load_state_dict(wrapped.state_dict())
    new = pickle.loads(pickle.dumps(copy.deepcopy(sparsifier)))
    x = batch(0, 9)
    same = torch.equal(new.model(x), model(x))
    sparsifier.squash_mask()
    zeros = [float((layer.weight == 0).float().mean()) for layer in (model[0], model[2])]
    squashed = torch.equal(new.model(x), model(x))
    if when == "before wrapping":  # this wrapper broadcasts buffers, and cannot do without any
        wrapped = DistributedDataParallel(model)
    for step in range(3):
        wrapped(batch(rank, step)).square().mean().backward()
        optimizer.step()
    return model.state_dict(), zeros, held and same and squashed


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("when", ["before wrapping", "after wrapping"])
@pytest.mark.parametrize("settings", [{}, {"zeros_per_block": 2, "sparsity_level": 1.0}], ids=["blocks", "2:4"])
def test_two_processes_train_one_sparse_model(pair, settings, when, compiled):
    found = pair.both(trained, settings, when, compiled)
    state = found[0][0]
    for other, zeros, held in found:
        assert held
        assert zeros == [0.5, 0.5]
        assert list(state) == list(other)
        assert all(torch.equal(state[name], other[name]) for name in state)
    build().load_state_dict(state)
