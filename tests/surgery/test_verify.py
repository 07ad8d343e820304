"""What `verify` compares, also for models that do not run in float64."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import secateur as sc


class OnlyInFloat32(nn.Module):
    """A model whose answer in double precision is no number, or an error."""

    def __init__(self, fails: bool):
        super().__init__()
        self.first, self.last, self.fails = nn.Linear(8, 16), nn.Linear(16, 4), fails

    def forward(self, x):
        y = self.last(self.first(x).relu())
        if x.dtype == torch.float64:
            if self.fails:
                raise TypeError("float32 only")
            y = y * torch.nan
        return y


def verified(fails: bool):
    torch.manual_seed(0)
    _, plan = sc.shrink(OnlyInFloat32(fails), torch.randn(5, 8), channels=0.5)
    return plan.verify()


def test_a_model_that_is_nan_in_float64_is_verified_in_its_own_dtype():
    found = verified(fails=False)
    assert (found.dtype, found.moved) == ("float32", True)
    assert found.max_error < 1e-5
    assert "not in float64" in str(found)


def test_a_model_that_does_not_run_in_float64_is_verified_in_its_own_dtype():
    found = verified(fails=True)
    assert found.dtype == "float32"
    assert "float32 only" in found.note


class Gain(nn.Module):
    """A number made of two vectors of weights, as differential attention has one."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(self.first(x).relu()) * (self.left * self.right).sum().exp()


def test_units_that_are_summed_among_weights_alone_are_not_called_exact():
    torch.manual_seed(0)
    model, x = Gain().double(), torch.randn(5, 8, dtype=torch.float64)
    _, plan = sc.shrink(model, x, channels=0.5)
    assert {row.name: row.why is None for row in plan.groups} == {"first.weight[0]": True, "left[0]": False}
    _, careful = sc.shrink(model, x, channels=0.5, exact_only=True)
    assert careful.verify().max_error < 1e-12


class Caches(nn.Module):
    """As decoders do: what was kept from before, nothing so far, then what is new."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x):
        return self.last(torch.cat([torch.tensor([], dtype=x.dtype), self.first(x)], dim=-2))


def test_constants_pass_a_cache_that_is_empty():
    torch.manual_seed(0)
    _, plan = sc.shrink(Caches().double(), torch.randn(2, 5, 8, dtype=torch.float64), channels=0.5)
    assert all(row.why is None for row in plan.groups)
    assert plan.verify().max_error < 1e-12


def test_a_wrapper_that_keeps_buckets_is_refused():
    with pytest.raises(ValueError, match="cut the module under it"):
        sc.shrink(nn.DataParallel(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))), torch.randn(2, 4), channels=0.5)


@dataclass
class Answer:
    logits: torch.Tensor
    hidden: list


class Packs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 16), nn.Linear(16, 4)

    def forward(self, x):
        h = torch.tanh(self.a(x))
        return Answer(self.b(h), [h])


def test_answers_in_a_dataclass_are_compared():
    """The hidden units beside the logits may go; what is compared is the logits."""
    torch.manual_seed(0)
    model, x = Packs(), torch.randn(3, 6)
    small, plan = sc.shrink(model, x, channels=0.5)
    found = plan.verify()
    assert found.moved
    assert found.max_error < 1e-6
    with torch.no_grad():
        small.b.weight.add_(1.0)
    assert plan.verify().max_error > 0.1


class Waves(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(6, 16, bias=False)
        self.w, self.v = (nn.Parameter(torch.randn(s, dtype=torch.cfloat)) for s in ((16, 12), (12, 5)))

    def forward(self, x):
        h = self.a(x)
        return torch.complex(h, torch.zeros_like(h)) @ self.w @ self.v


def test_complex_weights_stay_complex_in_float64():
    torch.manual_seed(0)
    _, plan = sc.shrink(Waves(), torch.randn(3, 6), channels=0.5)
    found = plan.verify()
    assert (found.dtype, found.note) == ("float64", "")
    assert found.max_error < 1e-6
    assert found.moved


def test_a_refit_is_named_as_the_reason_of_a_difference():
    """The table called the cut exact, and the verdict was "differs" without a reason."""
    torch.manual_seed(0)
    x = torch.randn(64, 8)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    _, plan = sc.shrink(model, x, sc.reconstruction, channels=0.5, data=[x], refit=True)
    assert str(plan.verify()).endswith(
        "refit changed it after the cut, on purpose; verify(groups=True) also measures the cut alone"
    )
    assert str(plan.verify(groups=True)).endswith("refit changed it after the cut, on purpose")
    _, plan = sc.shrink(model, x, channels=0.5)
    assert "on purpose" not in str(plan.verify())
