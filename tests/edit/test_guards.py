"""Guards around running and editing a model: whatever happens inside, what they protect is restored."""

import random

import numpy
import pytest
import torch
from torch import nn

from secateur.edit import all_or_nothing, eval_mode, guards, half_products, preserve_rng, split_inputs


def draws():
    return torch.rand(1).item(), random.random(), numpy.random.rand()


def test_eval_mode_gives_every_module_its_own_mode_back():
    one, two = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)), nn.Dropout()
    one[1].eval()
    with eval_mode(one, two):
        assert not any(m.training for m in (*one.modules(), two))
    assert one.training
    assert one[0].training
    assert not one[1].training
    assert two.training


def test_eval_mode_ends_with_an_error_too():
    model = nn.Dropout()
    with pytest.raises(KeyError), eval_mode(model):
        raise KeyError
    assert model.training


def test_draws_inside_the_guard_are_drawn_again():
    with preserve_rng():
        first = draws()
    assert draws() == first


def test_draws_are_kept_on_request_and_by_that_guard_only():
    torch.manual_seed(0)
    with preserve_rng() as outer:
        kept = torch.rand(1).item()
        with preserve_rng() as inner:
            later = torch.rand(1).item()
            inner.keep_draws()
            after = torch.rand(1).item()
        assert torch.rand(1).item() == after  # the inner guard kept `later`
        outer.restore()
        assert torch.rand(1).item() == kept  # the outer one keeps nothing unless asked
        outer.keep_draws()
    assert torch.rand(1).item() == later


def test_inputs_are_split_into_arguments():
    x, y = torch.ones(1), torch.ones(2)
    assert split_inputs(x) == ((x,), {})
    assert split_inputs([x, y]) == ((x, y), {})
    assert split_inputs((x,), {"y": y}) == ((x,), {"y": y})
    assert split_inputs({"x": x}, {"y": y}) == ((), {"x": x, "y": y})
    assert split_inputs({"x": x, "y": y}, {"y": x}) == ((), {"x": x, "y": x})


def test_an_error_leaves_tensors_attributes_and_gradients_as_they_were():
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    model(torch.randn(5, 4)).sum().backward()
    weight, grad = model[0].weight, model[0].weight.grad
    before = weight.detach().clone()

    def fail():
        with all_or_nothing(model):
            weight.grad = None
            weight.data = torch.zeros(1, 4)
            model[0].out_features = 1
            del model[1]
            model.register_buffer("extra", torch.ones(1))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert model[0].weight is weight
    assert torch.equal(weight, before)
    assert weight.grad is grad
    assert model[0].out_features == 3
    assert len(model) == 2
    assert not hasattr(model, "extra")


@pytest.mark.parametrize("able", [True, False])
def test_large_models_multiply_in_bfloat16_where_the_processor_can(monkeypatch, able):
    monkeypatch.setattr(guards, "has_bfloat16", lambda kind: able)
    for width, dtype in ((1024, torch.float32), (16, torch.float32), (1024, torch.float64)):
        model = nn.Linear(width, width, dtype=dtype)
        with half_products(model):
            fewer = able and width == 1024 and dtype == torch.float32
            assert model(torch.ones(1, width, dtype=dtype)).dtype == (torch.bfloat16 if fewer else dtype)
        assert model.weight.dtype == dtype
        assert not torch.is_autocast_enabled("cpu")
