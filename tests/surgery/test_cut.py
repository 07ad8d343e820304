"""Slicing of tensors, and the attributes that change with them."""

import copy
import types

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc
from secateur._layers import right_sizes
from secateur.surgery import apply_cuts_, shrink
from secateur.surgery.exact.wiring import Wiring
from secateur.trace import plan_counts
from secateur.trace.run import trace


@pytest.mark.parametrize(
    ("small", "large"),
    [
        (nn.Linear(3, 4), nn.Linear(5, 7)),
        (nn.Bilinear(3, 4, 5), nn.Bilinear(6, 7, 8)),
        (nn.Conv2d(6, 4, 3, groups=2), nn.Conv2d(10, 8, 3, groups=2)),
        (nn.ConvTranspose1d(6, 4, 3, groups=2), nn.ConvTranspose1d(10, 8, 3, groups=2)),
        (nn.Embedding(9, 3), nn.Embedding(9, 5)),
        (nn.BatchNorm1d(3), nn.BatchNorm1d(5)),
        (nn.InstanceNorm2d(3, affine=True), nn.InstanceNorm2d(5, affine=True)),
        (nn.GroupNorm(2, 4), nn.GroupNorm(2, 6)),
        (nn.LayerNorm((3, 4)), nn.LayerNorm((5, 4))),
        (nn.RMSNorm(3), nn.RMSNorm(5)),
        (nn.PReLU(3), nn.PReLU(5)),
        (nn.LSTM(3, 5, proj_size=2), nn.LSTM(4, 7, proj_size=3)),
        (nn.GRU(3, 5), nn.GRU(4, 7)),
        (nn.RNNCell(3, 5), nn.RNNCell(4, 7)),
        (nn.MultiheadAttention(8, 2, kdim=3, vdim=5), nn.MultiheadAttention(12, 2, kdim=4, vdim=6)),
    ],
    ids=lambda m: type(m).__name__,
)
def test_size_attributes_are_those_of_a_layer_built_in_that_size(small, large):
    sizes = [(module, *size) for module in large.modules() for size in right_sizes(module)]
    assert sizes
    for new, old in zip((*small.parameters(), *small.buffers()), (*large.parameters(), *large.buffers())):
        old.data = new.data
    if isinstance(large, nn.MultiheadAttention):
        large.embed_dim = 8  # read in the forward pass, so mended from the trace
    for module, name, read in sizes:
        vars(module)[name] = read(module)
    assert str(large) == str(small)
    numbers = {k: v for k, v in vars(small).items() if isinstance(v, int | tuple)}
    assert numbers == {k: vars(large)[k] for k in numbers}


def test_attributes_that_mean_something_else_are_left():
    layer = nn.Linear(4, 6)
    layer.in_features = 99
    assert [name for name, _ in right_sizes(layer)] == ["out_features"]


class Reader(nn.Module):
    """A layer that reads its sizes from a config that it shares."""

    def __init__(self, config):
        super().__init__()
        self.config, self.p, self.o = config, nn.Linear(8, 24), nn.Linear(24, 8)

    def forward(self, x):
        h = self.p(x).view(*x.shape[:-1], self.config.heads, self.config.width)
        return x + self.o(torch.sigmoid(h).flatten(-2))


def readers():
    torch.manual_seed(0)
    config = types.SimpleNamespace(heads=4, width=6)
    return nn.Sequential(nn.Linear(5, 8), Reader(config), Reader(config), nn.Linear(8, 3)).double()


def test_layers_that_want_different_values_of_a_shared_config_get_copies():
    model, x = readers(), torch.randn(2, 5).double()
    with torch.no_grad():  # the first layer loses heads, the second what is in them
        model[1].p.weight[:12] *= 1e-3
        model[2].p.weight.view(4, 6, 8)[:, :3] *= 1e-3
    small, plan = shrink(model, x, channels=23 / 28, floor=0.5)
    first, second = small[1].config, small[2].config
    assert (first.heads, first.width, second.heads, second.width) == (2, 6, 4, 3)
    assert vars(model[1].config) == {"heads": 4, "width": 6}
    assert plan.verify().max_error < 1e-12
    fresh = apply_cuts_(readers(), plan.cuts)
    fresh.load_state_dict(small.state_dict(), strict=True)
    assert torch.equal(fresh(x), small(x))


def test_a_config_that_all_agree_on_stays_shared():
    model, x = readers(), torch.randn(2, 5).double()
    small, _ = shrink(model, x, channels=0.5, scope="tensor")
    assert small[1].config is small[2].config
    assert (small[1].config.heads, small[1].config.width) == (2, 3)


def test_memory_format_survives():
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 4, 3)).to(memory_format=torch.channels_last)
    small, _ = shrink(model, torch.randn(1, 3, 8, 8), params=0.5)
    assert small[2].weight.is_contiguous(memory_format=torch.channels_last)


def test_recurrent_weights_stay_one_with_their_layer():
    model = nn.Sequential()
    model.r, model.o = nn.LSTM(4, 16, 2, batch_first=True), nn.Linear(16, 3)
    model.forward = types.MethodType(lambda s, x: s.o(s.r(x)[0]), model)
    x = torch.randn(2, 5, 4)
    small, _ = shrink(model, x, params=0.5)
    assert all(a is b for a, b in zip(small.r._flat_weights, small.r.parameters()))
    assert small.r.hidden_size == small.r.weight_hh_l1.shape[1] < 16
    small(torch.randn(3, 7, 4)).sum().backward()


def test_projected_states_stay_narrower_than_the_cells():
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.r, self.o = nn.LSTM(4, 8, proj_size=4, batch_first=True), nn.Linear(4, 3)

        def forward(self, x):
            return self.o(self.r(x)[0])

    t = trace(Projected(), torch.randn(2, 5, 4))
    cells = next(g for g in t.prunable if g.size == 8)
    assert plan_counts(t, {cells: 4}).counts[cells] == 5


def test_units_that_other_units_speak_through_are_found():
    class Shared(nn.Module):
        """Query heads over one head of keys and values."""

        def __init__(self):
            super().__init__()
            self.q, self.v, self.o, self.h = nn.Linear(8, 12), nn.Linear(8, 3), nn.Linear(12, 2), 4

        def forward(self, x):
            q = self.q(x).view(*x.shape[:-1], self.h, -1).transpose(1, 2)
            v = self.v(x)[:, None]
            return self.o((torch.softmax(q @ v.mT, -1) @ v).transpose(1, 2).flatten(2))

    model, x = Shared().double(), torch.randn(2, 5, 8).double()
    t = trace(model, x)
    wiring = Wiring(t)
    heads = next(g for g in t.prunable if g.size == 4)
    assert wiring.depends_on_inputs(heads)
    assert not any(wiring.depends_on_inputs(g) for g in t.prunable if g.size == 3)
    _, plan = shrink(model, x, channels=4 / 7, scope="tensor")
    assert plan.verify().max_error < 1e-12


def test_layers_applied_twice_are_silenced_with_their_biases():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.i, self.m, self.o = nn.Linear(5, 16), nn.Linear(16, 16), nn.Linear(16, 3)

        def forward(self, x):
            return self.o(F.gelu(self.m(F.gelu(self.m(self.i(x))))))

    model, x = Twice().double(), torch.randn(4, 5).double()
    (group,) = trace(model, x).prunable
    assert Wiring(trace(model, x)).feeds_itself(group)
    for seed in range(3):
        _, plan = shrink(model, x, sc.random(seed), channels=0.5, exact_only=True)
        found = plan.verify()
        assert found.moved
        assert found.max_error < 1e-12


def test_a_cut_of_a_copy_does_not_touch_what_the_copy_was_made_of():
    model, x = readers(), torch.randn(2, 5).double()
    _, plan = shrink(model, x, channels=0.5, scope="tensor")
    twin = copy.deepcopy(model)
    apply_cuts_(twin, plan.cuts)
    assert model[1].p.weight.shape == (24, 8)
    assert model[1].config.heads == 4


def test_training_goes_on_after_a_cut_in_place_while_the_last_loss_is_still_there():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 3))
    x, y, calls = torch.randn(8, 6), torch.randint(3, (8,)), []
    model[0].weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad.shape))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = nn.functional.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    sc.shrink_(model, x, channels=0.5, optimizer=optimizer)
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
    assert loss.grad_fn is not None
    assert calls == [(20, 6), (10, 6)]
