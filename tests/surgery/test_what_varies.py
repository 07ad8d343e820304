"""Values that are not constant are reported: several groups at once, random numbers, sums over positions of the inputs."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from folding import check, conv
from probes import Lam, image, tokens


def gated(s, x):
    """A gate for each head, as attention and state-space layers have."""
    return s.o((s.a(x).view(*x.shape[:2], s.h, -1) * torch.sigmoid(s.g(x))[..., None]).flatten(2))


def outer(combine):
    return lambda s, x: s.o(combine(F.softplus(s.a(x))[..., None], F.softplus(s.g(x))[..., None, :]).flatten(2))


@pytest.mark.parametrize("forward", [gated, *map(outer, (torch.mul, torch.add, torch.div))], ids=["gate", "mul", "add", "div"])
def test_products_of_removed_units_with_kept_units_of_another_group_are_not_exact(forward):
    parts = {"a": nn.Linear(12, 16), "g": nn.Linear(12, 4), "o": nn.Linear(16 if forward is gated else 64, 5)}
    check(Lam(forward, **parts, h=4), tokens(), report="varies with the inputs, from")


def test_a_head_that_outputs_zeros_does_so_behind_any_gate():
    parts = {"a": nn.Linear(12, 16, bias=False), "g": nn.Linear(12, 4), "o": nn.Linear(16, 5)}
    check(Lam(gated, **parts, h=4), tokens(), constants=False)


@pytest.mark.parametrize("draw", [torch.randn_like, lambda h: torch.randn(h.shape[-1])], ids=["like", "alone"])
def test_random_numbers_are_not_constants(draw):
    model = Lam(lambda s, x: s.o(s.a(x).exp() * draw(s.a(x))), a=nn.Linear(12, 16), o=nn.Linear(16, 5))
    check(model, tokens(), report="what its removed units give")


def picks_the_last(s, x):
    places = torch.arange(x.shape[1], dtype=x.dtype)
    return s.o((s.a(x) + places[:, None])[:, -1])


@pytest.mark.parametrize(
    ("forward", "why"),
    [
        (lambda s, x: s.o(torch.cat([s.t.expand(len(x), -1, -1), s.a(x)], 1).mean(1)), "from place to place before mean"),
        (lambda s, x: s.o(F.pad(s.a(x).exp(), (0, 0, 0, 2)).mean(1)), "from place to place before mean"),
        (picks_the_last, "from place to place before select"),
        (lambda s, x: s.o(s.a(x).exp().prod(1)), "grows with the size of the inputs, in prod"),
    ],
    ids=["token", "padding", "position", "product"],
)
def test_a_constant_that_depends_on_the_size_of_the_inputs_is_not_folded(forward, why):
    parts = {"a": nn.Linear(12, 16), "t": nn.Parameter(torch.ones(1, 1, 16)), "o": nn.Linear(16, 5)}
    said = reasons(Lam(forward, **parts), tokens())
    assert any(why in text for text in said), said


def test_a_padded_average_pool_before_the_mean_of_all_pixels_is_reported():
    parts = (conv(3, 8), nn.Softplus(), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    assert any("from place to place before mean" in text for text in reasons(nn.Sequential(*parts), image()))


def reasons(model, x):
    plan = sc.shrink(model.double().eval(), x.double(), sc.random(0), channels=0.5)[1]
    return [row.why or "" for row in plan.groups]


@pytest.mark.parametrize("scaled", [{"beta": 0.5}, {"alpha": 0.5}])
def test_the_constant_behind_a_scaled_sum_includes_its_scaled_bias(scaled):
    def forward(s, x):
        return s.o(torch.addmm(s.b, x[0], s.w, **scaled))

    parts = {"b": nn.Parameter(torch.ones(16)), "w": nn.Parameter(torch.ones(12, 16)), "o": nn.Linear(16, 5)}
    check(Lam(forward, **parts), tokens())


def test_pooling_with_random_windows_per_channel_is_not_exact():
    model = nn.Sequential(conv(3, 8), nn.FractionalMaxPool2d(2, output_size=3), conv(8, 5)).double()
    plan = sc.shrink(model, image().double(), sc.random(0), channels=0.5)[1]
    assert "is drawn at random" in plan.groups[0].why


class _AddsNumber(nn.Module):
    """Adds a number to what the first layer returns, computed from the input."""

    def __init__(self, number):
        super().__init__()
        self.first, self.last, self.number = nn.Linear(6, 8), nn.Linear(8, 3), number

    def forward(self, x):
        return self.last(torch.sigmoid(self.first(x) + self.number(x)))


@pytest.mark.parametrize(
    ("number", "exact"),
    [
        (lambda x: torch.ones(x.shape[0]).sum(), False),
        (lambda x: torch.arange(x.shape[0]).float().mean(), False),
        (lambda x: len(torch.zeros(x.shape[0], 2)), False),
        (lambda x: float(x.shape[0]), False),
        (lambda x: 5.0, True),
        (lambda x: torch.ones(5).mean(), True),
        (lambda x: torch.ones(x.shape[0]).mean(), True),
    ],
    ids=["ones", "arange", "len", "float", "constant of that size", "tensor of that size", "mean"],
)
def test_constants_that_depend_on_the_batch_size_are_not_exact(number, exact):
    torch.manual_seed(0)
    model = _AddsNumber(number).eval()
    _, plan = sc.shrink(model, torch.randn(5, 6), channels=0.5)
    assert [group.why is None for group in plan.groups] == [exact]
    assert plan.verify(torch.randn(11, 6)).exact == exact
