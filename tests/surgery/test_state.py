"""Models that keep something from one run to the next, or compute with the sizes of their inputs."""

import copy

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.surgery.masked import mask_
from secateur.surgery.verify import kept_units
from secateur.trace import trace


class Counter(nn.Module):
    """Counts its calls; from the second on, it takes another branch."""

    def __init__(self):
        super().__init__()
        self.first, self.last, self.calls = nn.Linear(8, 16), nn.Linear(16, 4), 0

    def forward(self, x):
        self.calls += 1
        return self.last(self.first(x).relu()) * (1 if self.calls == 1 else 2)


def test_a_model_that_counts_its_calls_is_not_called_exact():
    model, x = Counter(), torch.randn(3, 8)
    _, plan = sc.shrink(model, x, channels=0.5)
    assert not plan.metrics()["exact"]
    assert "every run changes calls" in str(plan)
    assert model.calls == 0
    with pytest.raises(ValueError, match="every run changes calls"):
        sc.shrink(model, x, channels=0.5, exact_only=True)


class Remembers(Counter):
    """Stores the size of its inputs, which the next run with the same inputs does not change."""

    def forward(self, x):
        self.calls = len(x)
        return self.last(self.first(x).relu())


def test_a_number_that_is_the_same_after_every_run_is_no_counter():
    _, plan = sc.shrink(Remembers(), torch.randn(3, 8), channels=0.5)
    assert plan.metrics()["exact"]


class Cache(nn.Module):
    """Attention over a cache of fixed size, which is filled by slices, by index_copy_ or by an index."""

    def __init__(self, how, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8, bias=bias) for _ in range(3))
        self.out, self.how = nn.Linear(8, 8), how
        self.register_buffer("keys", torch.zeros(3, 12, 8))
        self.register_buffer("values", torch.zeros(3, 12, 8))

    def put(self, cache, x):
        at = torch.arange(x.shape[1])
        if self.how == "slice":
            cache[:, : x.shape[1]] = x
        elif self.how == "index_copy_":
            cache.index_copy_(1, at, x)
        else:
            cache[:, at] = x

    def forward(self, x):
        self.put(self.keys, self.k(x))
        self.put(self.values, self.v(x))
        return self.out((self.q(x) @ self.keys.mT).softmax(-1) @ self.values)


@pytest.mark.parametrize("how", ["slice", "index_copy_", "index"])
def test_a_static_cache_is_exact_in_every_run(how):
    torch.manual_seed(0)
    model, x = Cache(how).double(), torch.randn(3, 5, 8).double()
    small, plan = sc.shrink(model, x, channels=0.5)
    assert plan.metrics()["exact"]
    assert plan.verify().max_error < 1e-14
    traced = trace(model, x)
    masked = mask_(copy.deepcopy(model), traced, kept_units(traced, plan.cuts))
    for length in (7, 2, 5):  # a shorter input reads what the one before left
        x = torch.randn(3, length, 8).double()
        torch.testing.assert_close(small(x), masked(x))


def test_a_cache_that_is_not_empty_is_not_called_exact():
    torch.manual_seed(0)
    model, x = Cache("slice"), torch.randn(3, 5, 8)
    model(torch.randn(3, 9, 8))
    _, plan = sc.shrink(model, x, channels=0.5)
    assert {g.name: g.why is None for g in plan.groups}["v.weight[0]"] is False


class ReadsFirst(nn.Module):
    """Adds what the run before left, and leaves constants of removed units for the next."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False)
        self.register_buffer("before", torch.zeros(3, 8))

    def forward(self, x):
        hidden = self.first(x).sigmoid()
        y = self.last(hidden + self.before)
        self.before.copy_(hidden)
        return y


def test_zeros_that_a_run_overwrites_with_constants_are_not_called_exact():
    _, plan = sc.shrink(ReadsFirst(), torch.randn(3, 8), channels=0.5)
    assert plan.groups[0].why == "what its removed units give is kept in before for the next run"


class Scaled(nn.Module):
    def __init__(self, bias):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=bias), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x).relu() * x.shape[0] ** 0.5)


def test_the_plan_names_sizes_of_inputs_that_constants_depend_on():
    torch.manual_seed(0)
    _, plan = sc.shrink(Scaled(bias=True), torch.randn(3, 8), channels=0.5)
    assert plan.note == "exact for inputs of this size: the model computes with the sizes 3 (pow in the model)"
    assert plan.note in str(plan)
    assert plan.verify().exact
    assert not plan.verify(torch.randn(7, 8)).exact


def test_without_constants_the_sizes_of_inputs_do_not_matter():
    _, plan = sc.shrink(Scaled(bias=False), torch.randn(3, 8), channels=0.5)
    assert plan.note == ""
    assert plan.verify(torch.randn(7, 8)).exact
