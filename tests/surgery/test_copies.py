"""What the small model takes over: hooks of parameters, and states of earlier runs in their new sizes."""

import pytest
import torch
from torch import nn

import secateur as sc


class Counting(nn.Module):
    """Keeps its last hidden state, for a step at a time; a whole sequence starts anew, without a cache it forgets."""

    def __init__(self):
        super().__init__()
        self.i, self.o, self.state = nn.Linear(6, 16), nn.Linear(16, 4), None

    def forward(self, x, cache=True):
        h = torch.tanh(self.i(x))
        if x.shape[1] == 1 and self.state is not None:
            h = h + self.state[:, None]
        self.state = h[:, -1] if cache else None
        return self.o(h)


@pytest.mark.parametrize("graph", [False, True], ids=["plain", "with a graph behind it"])
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_a_state_of_an_earlier_run_is_cut_as_what_a_run_leaves(in_place, graph):
    model, x = Counting().double(), torch.randn(2, 5, 6, dtype=torch.float64)
    with torch.set_grad_enabled(graph):
        model(x)
    state = model.state.detach().clone()
    small, plan = (sc.shrink_ if in_place else sc.shrink)(model, x, channels=0.5)
    kept = plan.cuts.tensors["i.weight"][0]
    assert torch.equal(small.state, state[:, kept])
    assert small(x[:, :1]).shape == (2, 1, 4)
    assert in_place or torch.equal(model.state, state)


@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_a_state_that_a_run_clears_is_not_in_the_small_model(in_place):
    model, x = Counting(), torch.randn(2, 5, 6)
    model(x)
    small, _ = (sc.shrink_ if in_place else sc.shrink)(model, {"x": x, "cache": False}, channels=0.5)
    assert small.state is None
    assert small(x[:, :1]).shape == (2, 1, 4)
    assert in_place or model.state.shape == (2, 16)


def test_a_model_with_old_style_weight_norm_is_cut_after_a_run():
    model, x = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)), torch.randn(3, 6)
    with pytest.warns(FutureWarning):
        torch.nn.utils.weight_norm(model[0])
    model(x)
    small, plan = sc.shrink(model, x, channels=0.5)
    assert small[0].weight.shape == (8, 6)
    assert plan.verify().max_error < 1e-6


@pytest.mark.parametrize("options", [{"channels": 0.5}, {"depth": 0.5}], ids=str)
@pytest.mark.parametrize("in_place", [False, True], ids=["copy", "in place"])
def test_hooks_of_parameters_go_on_with_the_small_model(in_place, options):
    blocks = [nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 6)) for _ in range(2)]
    model, x, seen = nn.Sequential(*blocks), torch.randn(3, 6), []
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda p, name=name: seen.append((name, tuple(p.grad.shape))))
        parameter.register_hook(lambda g, name=name: seen.append((name, tuple(g.shape))))
    small, _ = (sc.shrink_ if in_place else sc.shrink)(model, x, **options)
    small(x).sum().backward()
    shapes = sorted(tuple(p.shape) for p in small.parameters())
    assert sorted(shape for _, shape in seen) == sorted([*shapes, *shapes])
