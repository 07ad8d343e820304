"""Scores by reconstruction: the formulas against brute force, and the units that the output needs stay."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.surgery import shrink
from secateur.surgery.calibrate.elimination import Normed, Plain, Surgeon, eliminate
from secateur.surgery.calibrate.norms import reestimate_
from secateur.surgery.calibrate.reconstruct import reconstruction, unit_errors
from secateur.surgery.calibrate.refit import refit_
from secateur.surgery.masked import make
from secateur.trace.run import trace


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def parts(units=6, span=2, outputs=4, seed=0):
    """Correlated inputs without a mean, a weight, and the columns of each unit, in no particular order."""
    x = draw(200, units * span, seed=seed) @ draw(units * span, units * span, seed=seed + 1)
    columns = torch.randperm(units * span, generator=torch.Generator().manual_seed(seed)).view(units, span)
    return x - x.mean(0), draw(outputs, units * span, seed=seed + 2), columns


def state_of(kind, x, weight, columns):
    return kind(x.T @ x / len(x), weight, columns, *([0.0] if kind is Surgeon else []))


def error_without(kind, x, weight, kept):
    """By brute force: the error of the outputs when only these columns are left, after the repair."""
    target = x @ weight.T
    if kind is Surgeon:
        found = x[:, kept] @ torch.linalg.lstsq(x[:, kept], target).solution
    else:
        found = x[:, kept] @ weight[:, kept].T
    if kind is Normed:
        found = found * target.std(0) / found.std(0)
    return float((found - target).square().sum(1).mean())


KINDS = [Surgeon, Plain, Normed]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_those_of_the_models_without_the_units(kind):
    x, weight, columns = parts()
    order = eliminate([state_of(kind, x, weight, columns)], 6)
    true, highest = [], 0.0
    for n in range(1, 6):
        gone = columns[order.units[:n]].reshape(-1).tolist()
        true.append(error_without(kind, x, weight, [c for c in range(12) if c not in gone]))
    for found, error, before in zip(order.errors, true, [0.0, *true]):  # an error that falls counts as one that stays
        highest = highest + max(0.0, error - before)
        assert found == pytest.approx(highest, rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_each_step_takes_the_unit_that_hurts_least(kind):
    x, weight, columns = parts(units=4, seed=5)
    first = eliminate([state_of(kind, x, weight, columns)], 4)
    rest = [[c for u, row in enumerate(columns.tolist()) if u != unit for c in row] for unit in range(4)]
    errors = [error_without(kind, x, weight, kept) for kept in rest]
    assert first.units[0] == min(range(4), key=errors.__getitem__)
    assert first.errors[0] == pytest.approx(min(errors), rel=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_that_belong_to_no_unit_stay(kind):
    """A reader of a concatenation: only half of its columns can go; one of its outputs never varies."""
    x, weight, columns = parts(units=8)
    weight[3] = 0
    order = eliminate([state_of(kind, x, weight, columns[:4])], 4)
    gone = columns[order.units[:2]].reshape(-1).tolist()
    true = error_without(kind, x, weight[:3], [c for c in range(16) if c not in gone])
    assert order.errors[1] == pytest.approx(true, rel=1e-8)


def test_several_consumers_add_up():
    one, two = (state_of(Surgeon, *parts(seed=seed)) for seed in (3, 8))
    rises = one.rise() + two.rise()
    both = eliminate([one, two], 6)
    assert len(both.units) == len(set(both.units)) == 5
    assert both.errors == sorted(both.errors)
    assert both.units[0] == int(rises.argmin())


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


def test_zero_and_duplicate_units_are_removed_first_and_the_fit_corrects_the_rest():
    torch.manual_seed(0)
    m = Net().double().eval()
    x = draw(300, 12)
    t = trace(m, x)
    (group,), (scores,) = t.prunable, unit_errors(t, t.prunable, [x[:200], x[200:]], "refit").values()
    lowest = scores.argsort()[:4].tolist()
    assert {6, 7} < set(lowest)
    assert len({0, 4} & set(lowest)) == len({1, 5} & set(lowest)) == 1
    keep = {group.atom: torch.ones(8, dtype=torch.bool).index_fill(0, torch.tensor(lowest), False)}
    made = make(m, t, keep)
    refit_(made.small, m, made.cuts, [x], ridge=1e-10)
    assert F.mse_loss(made.small(x), m(x)) < 1e-12
    plain = unit_errors(t, t.prunable, [x], "none")[group]
    assert set(plain.argsort()[:2].tolist()) == {6, 7}
    assert float(plain.sort().values[2]) > 1e-4  # a copy is missed when nothing is fitted


def test_scores_are_what_the_output_loses():
    """The first unit to go, and the first half of them: the sum of their scores is the error of the model without them."""
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(12, 9), nn.Sigmoid(), nn.Linear(9, 5)).double().eval()
    x = draw(60, 12)
    t = trace(m, x)
    (group,), (scores,) = t.prunable, unit_errors(t, t.prunable, [x], "none").values()
    gone = scores.argsort()[:4]
    made = make(m, t, {group.atom: torch.ones(9, dtype=torch.bool).index_fill(0, gone, False)})
    assert float(scores[gone].sum()) == pytest.approx(float(F.mse_loss(made.small(x), m(x)).detach()), rel=0.05)


class Two(nn.Module):
    """Two alike branches, one of which the output hardly hears."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(12, 16), nn.Linear(16, 5)
        self.c, self.d = nn.Linear(12, 16), nn.Linear(16, 5)

    def forward(self, x):
        return self.b(torch.tanh(self.a(x))) + 0.1 * self.d(torch.tanh(self.c(x)))


@pytest.mark.parametrize("repair", ["refit", "none"])
def test_groups_compete_by_their_effect_on_the_output(repair):
    m = Two().double().eval()
    m.c.load_state_dict(m.a.state_dict())
    m.d.load_state_dict(m.b.state_dict())
    x = draw(400, 12)
    t = trace(m, x)
    loud, quiet = unit_errors(t, t.prunable, [x], repair).values()
    assert torch.allclose(loud, quiet * 100, rtol=1e-6)
    _, plan = shrink(m, x, reconstruction, flops=0.6, data=[x], refit=repair == "refit")
    after = {row.name: row.after for row in plan.groups}
    assert after["c.weight[0]"] < after["a.weight[0]"]


def test_of_equally_important_units_the_more_expensive_are_removed_first():
    """Two branches of the same say, one over inputs eight times as wide: its units save more FLOPs, and as many channels."""

    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = nn.Linear(8, 16), nn.Linear(16, 5), nn.Linear(64, 16), nn.Linear(16, 5)
            with torch.no_grad():
                self.c.weight.zero_()[:, :8] = self.a.weight
                self.c.bias.copy_(self.a.bias)
                self.d.load_state_dict(self.b.state_dict())

        def forward(self, x):
            return self.b(torch.tanh(self.a(x[:, :8]))) + self.d(torch.tanh(self.c(x)))

    m, x = Wide().double().eval(), draw(300, 64)
    after = {}
    for what, target in (("flops", 0.6), ("channels", 0.5)):
        _, plan = shrink(m, x, reconstruction, data=[x], **{what: target})
        after[what] = {row.name: row.after for row in plan.groups}
    assert after["flops"]["c.weight[0]"] < after["flops"]["a.weight[0]"]
    assert abs(after["channels"]["c.weight[0]"] - after["channels"]["a.weight[0]"]) <= 1


class Normalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.b, self.k, self.o = nn.Conv2d(12, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x):
        return self.o(F.relu(self.k(self.b(F.relu(self.n(self.a(x)))))).mean((2, 3)))


@pytest.mark.parametrize("repair", ["none", "reestimate", "refit"])
def test_the_choice_is_made_for_the_repair_that_follows(repair):
    """What is chosen for a repair leaves the reader, after that repair, no worse than what is chosen for another."""
    torch.manual_seed(3)
    m = Normalised().double().eval()
    x = draw(64, 3, 8, 8) + draw(64, 3, 1, 1, seed=5)
    reestimate_(m, [x])
    t = trace(m, x)
    (group,) = (g for g in t.prunable if g.size == 12)

    def heard(model):  # the reader's output, in the dense model's scale
        inner = model.b(F.relu(model.n(model.a(x))))
        return model.k(inner) * m.k.running_var.sqrt()[:, None, None] if repair == "reestimate" else inner

    errors = {}
    for chosen in ("none", "reestimate", "refit"):
        scores = unit_errors(t, [group], [x], chosen)[group]
        keep = {group.atom: torch.ones(12, dtype=torch.bool).index_fill(0, scores.argsort()[:6], False)}
        made = make(m, t, keep)
        if repair == "reestimate":
            reestimate_(made.small, [x])
        if repair == "refit":
            refit_(made.small, m, made.cuts, [x])
        errors[chosen] = float(F.mse_loss(heard(made.small), heard(m)).detach())
    assert errors[repair] <= 1.05 * min(errors.values())


def test_convolutions_flatten_and_weights_stored_as_in_by_out():
    class Turned(nn.Module):
        def __init__(self, i, o):
            super().__init__()
            self.weight, self.bias = nn.Parameter(torch.randn(i, o) / 4), nn.Parameter(torch.zeros(o))

        def forward(self, x):
            return x @ self.weight + self.bias

    layers = [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 6, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(96, 10),
        nn.Tanh(),
    ]
    m = nn.Sequential(*layers, Turned(10, 5)).double().eval()
    x = draw(20, 3, 6, 6)
    before = {k: v.clone() for k, v in m.state_dict().items()}
    for target in (0.8, 0.5, 0.3):
        _, plan = shrink(m, x, reconstruction, flops=target, data=[x], refit=True)
        assert plan.metrics()["flops"] == pytest.approx(target, rel=0.02)
        assert len(plan.groups) == 3
    assert all(torch.equal(v, before[k]) for k, v in m.state_dict().items())


def test_groups_that_cannot_be_scored_are_named():
    m = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, groups=2), nn.Conv2d(8, 5, 1)).double().eval()
    x = draw(4, 3, 6, 6)
    _, plan = shrink(m, x, reconstruction, channels=0.5, data=[x])
    assert "1.weight reads these units" in plan.skipped["0.weight[0]#2"]  # the units within a group; whole groups can be scored
    assert [row.name for row in plan.groups] == ["0.weight[0]", "1.weight[0]"]


class Direct(nn.Module):
    """Uses the weight of `dt` without a call of `dt`, as Mamba does."""

    def __init__(self):
        super().__init__()
        self.first, self.dt, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x):
        return self.last(F.linear(self.first(x).tanh(), self.dt.weight).tanh())


def test_a_layer_that_is_used_without_a_call_is_named_with_the_reason():
    m, x = Direct().double().eval(), draw(40, 6)
    with pytest.raises(ValueError, match=r"dt: the model did not call this layer on data= .*use another criterion, such as"):
        shrink(m, x, reconstruction, channels=0.5, data=[x])
    plan = shrink(m, x, channels=0.5, data=[x], refit=True)[1]
    assert "the model did not call it on the first batch; it may use the weight" in plan.skipped["dt"]


def test_reconstruction_needs_data():
    with pytest.raises(ValueError, match="pass data="):
        shrink(Net(), torch.randn(4, 12), reconstruction, flops=0.5)


def test_data_that_is_not_finite_is_refused():
    x = draw(50, 12)
    x[3, 4] = torch.nan
    with pytest.raises(ValueError, match=r"its inputs are not finite on data="):
        shrink(Net().double(), draw(4, 12), reconstruction, flops=0.5, data=[x])


def test_modes_and_hooks_are_as_they_were():
    m = Net().double().train()
    x = draw(50, 12)
    t = trace(m, x)
    for repair in ("none", "reestimate", "refit"):
        unit_errors(t, t.prunable, [x], repair)
    assert all(layer.training for layer in m.modules())
    assert not list(itertools.chain.from_iterable((*k._forward_hooks, *k._forward_pre_hooks) for k in m.modules()))
