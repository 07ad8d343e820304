"""Scores by reconstruction: the formulas against brute force, and the units that the output needs stay."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.graph import trace
from secateur.surgery.masked import make
from secateur.surgery.reconstruct import eliminate, keep_for_flops, unit_errors
from secateur.surgery.refit import refit_
from secateur.surgery.sizes import Model


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(units=6, span=2, outputs=4, seed=0):
    """Second moments of correlated inputs, a weight, and the columns of each unit, in no particular order."""
    x = draw(200, units * span, seed=seed) @ draw(units * span, units * span, seed=seed + 1)
    columns = torch.randperm(units * span, generator=torch.Generator().manual_seed(seed)).view(units, span)
    return x, (x.T @ x / len(x), draw(outputs, units * span, seed=seed + 2), columns)


@pytest.mark.parametrize("refit", [True, False])
def test_errors_are_those_of_the_models_without_the_units(refit):
    x, part = parts()
    order = eliminate([part], refit, ridge=0.0)
    target = x @ part[1].T
    for n in range(1, 6):
        gone = part[2][order.units[:n]].reshape(-1)
        kept = [c for c in range(12) if c not in gone.tolist()]
        weight = torch.linalg.lstsq(x[:, kept], target).solution.T if refit else part[1][:, kept]
        error = (x[:, kept] @ weight.T - target).square().sum(1).mean()
        assert order.errors[n - 1] == pytest.approx(float(error), rel=1e-8)


@pytest.mark.parametrize("refit", [True, False])
def test_each_step_takes_the_unit_that_hurts_least(refit):
    x, part = parts(units=4, seed=5)
    first = eliminate([part], refit, ridge=0.0)
    target = x @ part[1].T
    errors = []
    for unit in range(4):
        kept = [c for u, row in enumerate(part[2].tolist()) if u != unit for c in row]
        weight = torch.linalg.lstsq(x[:, kept], target).solution.T if refit else part[1][:, kept]
        errors.append(float((x[:, kept] @ weight.T - target).square().sum(1).mean()))
    assert first.units[0] == min(range(4), key=errors.__getitem__)
    assert first.errors[0] == pytest.approx(min(errors), rel=1e-8)


def test_several_consumers_add_up():
    _, one = parts(seed=3)
    _, two = parts(seed=8)
    both = eliminate([one, two], True, 0.0)
    assert len(both.units) == len(set(both.units)) == 5
    assert both.errors == sorted(both.errors)
    assert both.errors[0] <= eliminate([one], True, 0.0).errors[-1] + eliminate([two], True, 0.0).errors[-1]


class Net(nn.Module):
    """Units of `a`: the first four matter, two copy others, two say nothing."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 8, bias=False), nn.Linear(8, 5)
        with torch.no_grad():
            self.a.weight[4:6] = self.a.weight[0:2]
            self.b.weight[:, 6:] = 0

    def forward(self, x):
        return self.b(F.relu(self.a(x)))


def test_silent_and_copied_units_go_first_and_the_fit_makes_good():
    m = Net().double().eval()
    x = draw(300, 12)
    t = trace(m, x)
    scores, left = unit_errors(t, t.prunable, [x[:200], x[200:]], ridge=1e-10)
    assert left == {}
    (group,) = scores
    lowest = scores[group].argsort()[:4].tolist()
    assert {6, 7} < set(lowest)
    assert len({0, 4} & set(lowest)) == len({1, 5} & set(lowest)) == 1
    keep = {group.atom: torch.ones(8, dtype=torch.bool).index_fill(0, torch.tensor(lowest), False)}
    made = make(m, t, keep, (x,), {})
    refit_(made.small, m, made.cuts, [x], ridge=1e-10)
    assert F.mse_loss(made.small(x), m(x)) < 1e-12
    plain, _ = unit_errors(t, t.prunable, [x], refit=False)
    assert set(plain[group].argsort()[:2].tolist()) == {6, 7}
    assert float(plain[group].sort().values[2]) > 1e-3  # a copy is missed when nothing is fitted


class Two(nn.Module):
    """Two alike branches, one of which the output hardly hears."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)
        self.c, self.d = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + 0.1 * self.d(torch.tanh(self.c(x)))


@pytest.mark.parametrize("refit", [True, False])
def test_what_the_output_hears_decides_between_groups(refit):
    m = Two().double().eval()
    m.c.load_state_dict(m.a.state_dict())
    m.d.load_state_dict(m.b.state_dict())
    x = draw(400, 12)
    t = trace(m, x)
    scores, _ = unit_errors(t, t.prunable, [x], refit=refit)
    loud, quiet = (next(s for g, s in scores.items() if g.members[0].tensor == name) for name in ("a.weight", "c.weight"))
    assert torch.allclose(loud, quiet * 100, rtol=1e-6)
    keep = keep_for_flops(t, scores, 0.6)
    kept = {t.by_atom[a].members[0].tensor: int(mask.sum()) for a, mask in keep.items()}
    assert kept["c.weight"] < kept.get("a.weight", 16)


def test_convolutions_and_flatten_and_the_target_in_flops():
    m = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(96, 5))
    m = m.double().eval()
    x = draw(20, 3, 6, 6)
    t = trace(m, x)
    before = {k: v.clone() for k, v in m.state_dict().items()}
    scores, left = unit_errors(t, t.prunable, [x])
    assert left == {}
    assert sorted(len(s) for s in scores.values()) == [6, 8]
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())
    for target in (0.8, 0.5, 0.3):
        keep = keep_for_flops(t, scores, target)
        remains = Model(t).flops({a: int(k.sum()) for a, k in keep.items()}) / Model(t).flops({})
        assert target - 0.2 < remains <= target
    with pytest.raises(ValueError, match="cannot be reached"):
        keep_for_flops(t, scores, 1e-3)


def test_groups_that_cannot_be_scored_are_named():
    m = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 5, 1)).double().eval()
    x = draw(4, 3, 6, 6)
    t = trace(m, x)
    scores, left = unit_errors(t, t.prunable, [x])
    inner = [g for g in t.prunable if "1.weight" in {n.tensor for n in g.members if n.role == "consume"}]
    assert list(left) == inner
    assert "1.weight reads these units" in left[inner[0]]
    assert scores.keys() == set(t.prunable) - set(inner)


def test_modes_and_hooks_are_as_they_were():
    m = Net().double().train()
    x = draw(50, 12)
    t = trace(m, x)
    unit_errors(t, t.prunable, [x])
    assert all(layer.training for layer in m.modules())
    assert not list(itertools.chain.from_iterable((*k._forward_hooks, *k._forward_pre_hooks) for k in m.modules()))
