"""Averages of weights keep zeros, and Accelerate saves and restores a pruner."""

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, get_swa_multi_avg_fn

import secateur as sc
from secateur.integrations.averaging import keep_zeros


def build(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(model, optimizer, steps, first=0, after=lambda: None, backward=lambda loss: loss.backward()):
    for step in range(first, first + steps):
        torch.manual_seed(100 + step)
        optimizer.zero_grad()
        backward(model(torch.randn(4, 8)).square().mean())
        optimizer.step()
        after()


@pytest.mark.parametrize("rule", [None, get_ema_multi_avg_fn(0.9)], ids=["swa", "ema"])
def test_an_average_has_the_zeros_of_the_model(rule):
    def run(average):
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        averaged = AveragedModel(model, multi_avg_fn=average)
        pruner = sc.Pruner(model, sparsity=sc.linear(0.5, start=0, end=6)).attach(optimizer)
        train(model, optimizer, 8, after=lambda: averaged.update_parameters(model))
        pruner.finish()
        return model, averaged.module

    model, averaged = run(keep_zeros(rule))
    _, plain = run(rule or get_swa_multi_avg_fn())
    for now, mean, other in zip(model.parameters(), averaged.parameters(), plain.parameters(), strict=True):
        zero = now == 0
        assert torch.equal(mean == 0, zero)
        assert torch.equal(mean[~zero], other[~zero])  # the rule itself
    assert (plain[0].weight != 0).sum() > (model[0].weight != 0).sum()  # without keep_zeros there are fewer zeros


@pytest.mark.parametrize("sparsity", [sc.cubic(0.75, start=1, end=8), 0.5], ids=str)
def test_accelerate_saves_and_restores_a_pruner(sparsity, tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def start(seed):
        accelerate.state.AcceleratorState._reset_state(True)
        accelerator = accelerate.Accelerator(cpu=True)
        model = build(seed)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
        pruner = sc.Pruner(model, sc.magnitude, sparsity=sparsity).attach(optimizer)
        accelerator.register_for_checkpointing(pruner)
        return accelerator, model, optimizer, pruner

    accelerator, model, optimizer, pruner = start(0)
    train(model, optimizer, 4, backward=accelerator.backward)
    accelerator.save_state(str(tmp_path))
    train(model, optimizer, 6, first=4, backward=accelerator.backward)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    pruner.finish()

    accelerator, model, optimizer, pruner = start(3)
    accelerator.load_state(str(tmp_path))
    train(model, optimizer, 6, first=4, backward=accelerator.backward)
    pruner.verify()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_state_is_refused_where_attach_has_removed_weights_that_it_keeps():
    saved = build()
    pruner = sc.Pruner(saved, sparsity=0.5).attach(torch.optim.SGD(saved.parameters(), lr=0.1))
    state = pruner.state_dict()
    other = build(seed=3)
    late = sc.Pruner(other, sparsity=0.5).attach(torch.optim.SGD(other.parameters(), lr=0.1))
    with pytest.raises(RuntimeError, match="load the model's state before that of the pruner"):
        late.load_state_dict(state)
    other.load_state_dict(saved.state_dict())
    late.load_state_dict(state)
    assert all(torch.equal(late.masks[name], mask) for name, mask in pruner.masks.items())
