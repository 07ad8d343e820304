"""Repairs from data: BatchNorm statistics are those of all data, and the fit is the least-squares one, layer after layer."""

import copy
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc
from secateur.edit.cuts import Cuts
from secateur.surgery.calibrate.norms import reestimate_
from secateur.surgery.calibrate.refit import refit_
from secateur.surgery.calibrate.regression import patches
from secateur.surgery.masked import make
from secateur.trace.run import trace


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def low_rank(n, width, rank, seed):
    """Data in few directions: units are redundant, so that fewer can say the same."""
    return draw(n, rank, seed=seed) @ draw(rank, width, seed=99)


def halved(model, x, size, drop=2):
    """The model without every second (or `drop`-th) unit of the groups of this size."""
    t = trace(model, x)
    keep = {g.atom: torch.arange(g.size) % drop != 0 for g in t.prunable if g.size == size}
    assert keep
    return make(model, t, keep)


# ---------------------------------------------------------------- BatchNorm


def test_statistics_are_those_of_all_data_together():
    m = nn.Sequential(nn.BatchNorm1d(6, momentum=0.3)).double().eval()
    batches = [draw(n, 6, seed=n) * (1 + n) + n for n in (5, 8, 13)]  # batches that differ in mean, spread and length
    whole = torch.cat(batches)
    assert reestimate_(m, batches) == 1
    assert torch.allclose(m[0].running_mean, whole.mean(0), rtol=1e-12)
    assert torch.allclose(m[0].running_var, whole.var(0), rtol=1e-12)
    average = torch.stack([b.var(0) for b in batches]).mean(0)
    assert not torch.allclose(m[0].running_var, average, rtol=1e-2)


def test_images_and_layers_that_follow_each_other():
    m = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 5, 1), nn.BatchNorm2d(5)).double().eval()
    x = draw(8, 3, 6, 6)
    reestimate_(m, [(x, None)])
    first = m[0](x)
    assert torch.allclose(m[1].running_mean, first.mean((0, 2, 3)))
    assert torch.allclose(m[1].running_var, first.transpose(0, 1).flatten(1).var(1))
    out = m(x)  # the second one was estimated behind the first one as it now is, up to n - 1 in place of n
    assert torch.allclose(out.mean((0, 2, 3)), torch.zeros(5).double(), atol=1e-2)


def learned(seed=0):
    """A model whose statistics come from much data; and a few examples."""
    torch.manual_seed(seed)
    m = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4), nn.BatchNorm1d(4)).double().eval()
    reestimate_(m, [draw(4000, 5, seed=1)])
    return m, [draw(15, 5, seed=s + seed) for s in (2, 3)]


def test_a_model_that_lost_nothing_keeps_its_statistics():
    m, few = learned()
    same, alone = copy.deepcopy(m), copy.deepcopy(m)
    assert reestimate_(same, few, m, Cuts()) == 2
    assert all(torch.allclose(v, m.state_dict()[k], rtol=1e-12) for k, v in same.state_dict().items())
    reestimate_(alone, few)
    assert not torch.allclose(alone[1].running_mean, m[1].running_mean, atol=0.01)


def test_a_few_examples_that_show_the_change_are_nearer_the_truth_than_their_own_statistics():
    wrong = {"moved": 0.0, "alone": 0.0, "cut": 0.0}
    for seed in range(8):
        m, few = learned(seed)
        made = halved(m, few[0], 8, drop=8)
        truth, moved, alone = (copy.deepcopy(made.small) for _ in range(3))
        reestimate_(truth, [draw(4000, 5, seed=1)])
        reestimate_(moved, few, m, made.cuts)
        reestimate_(alone, few)
        assert torch.allclose(moved[1].running_mean, m[1].running_mean[made.cuts.tensors["1.running_mean"][0]])
        for name, k in (("moved", moved), ("alone", alone), ("cut", made.small)):
            wrong[name] += float(
                (k[4].running_mean - truth[4].running_mean).norm() + (k[4].running_var - truth[4].running_var).norm()
            )
    assert wrong["moved"] < 0.7 * min(wrong["alone"], wrong["cut"]), wrong


def test_data_that_is_not_finite_is_refused_before_anything_changes():
    m, few = learned()
    state = {k: v.clone() for k, v in m.state_dict().items()}
    few[1][3, 2] = torch.nan
    with pytest.raises(ValueError, match=r"^1: its inputs are not finite on data="):
        reestimate_(m, few)
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())


def test_a_channel_that_was_constant_gets_the_variance_of_the_data():
    m = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    loud, x = copy.deepcopy(m), draw(20, 5)
    nn.init.zeros_(m[0].weight)
    reestimate_(m, [x])
    reestimate_(loud, [x], m)
    assert torch.allclose(loud[1].running_var, loud[0](x).var(0))


def test_modes_momentum_counters_and_other_layers_stay():
    m = nn.Sequential(nn.Dropout(0.5), nn.BatchNorm1d(6, momentum=0.3), nn.BatchNorm1d(6, track_running_stats=False)).double()
    m[1].eval()
    before = m[1].num_batches_tracked.clone()
    reestimate_(m, [draw(7, 6)])
    assert [x.training for x in m] == [True, False, True]
    assert m[1].momentum == 0.3
    assert torch.equal(m[1].num_batches_tracked, before)
    assert torch.allclose(m[1].running_mean, draw(7, 6).mean(0))  # no dropout on the way


def test_a_failing_batch_leaves_the_statistics():
    m = nn.Sequential(nn.BatchNorm1d(6)).double()
    state = {k: v.clone() for k, v in m.state_dict().items()}
    with pytest.raises((RuntimeError, ValueError)):
        reestimate_(m, [draw(7, 6), draw(7, 5)])
    assert all(torch.equal(v, state[k]) for k, v in m.state_dict().items())
    assert m[0].training
    assert not m[0]._forward_pre_hooks


@pytest.mark.parametrize("repair", [reestimate_, lambda m, data: refit_(m, m, Cuts(), data)])
def test_data_that_is_no_list_of_batches_is_refused(repair):
    m = nn.Sequential(nn.BatchNorm1d(6)).double()
    with pytest.raises(TypeError, match="pass \\[batch\\]"):
        repair(m, draw(7, 6))
    with pytest.raises(ValueError, match="gave no batch"):
        repair(m, iter([]))


# ---------------------------------------------------------------- the fit


def test_removing_redundant_units_leaves_the_output_unchanged():
    """Data of rank 4 needs 4 of 16 linear units: cutting to 8 loses nothing once the consumer is fitted."""
    m = nn.Sequential(nn.Linear(12, 16, bias=False), nn.Linear(16, 5)).double().eval()
    batches = [low_rank(40, 12, 4, seed) for seed in range(3)]
    made = halved(m, batches[0], 16)
    fresh = low_rank(40, 12, 4, 7)
    assert F.mse_loss(made.small(fresh), m(fresh)) > 1e-3
    assert refit_(made.small, m, made.cuts, batches, ridge=1e-9) == {}
    assert F.mse_loss(made.small(fresh), m(fresh)) < 1e-12


def test_the_fit_is_the_least_squares_solution():
    m = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double().eval()
    x = draw(200, 12)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x[:70], x[70:]], ridge=1e-12)
    h = made.small[1](made.small[0](x)).detach()
    best = torch.linalg.lstsq(torch.cat([h, torch.ones(200, 1).double()], 1), m(x).detach()).solution
    assert torch.allclose(made.small[2].weight, best[:-1].T, atol=1e-8)
    assert torch.allclose(made.small[2].bias, best[-1], atol=1e-8)


class Residual(nn.Module):
    """Two branches beside a stream. `read`: what the second branch gives is also read by itself, not only added."""

    def __init__(self, read=False):
        super().__init__()
        self.norm, self.branches = nn.LayerNorm(6), nn.ModuleList(nn.Sequential(nn.Linear(6, 16), nn.Tanh()) for _ in range(2))
        self.outs, self.read = nn.ModuleList(nn.Linear(16, 6, bias=False) for _ in range(2)), read

    def forward(self, x):
        x = x + self.outs[0](self.branches[0](x))
        y = self.outs[1](self.branches[1](self.norm(x)))
        return (x + y, y.sin()) if self.read else x + y


@pytest.mark.parametrize("read", [False, True])
def test_a_branch_corrects_the_loss_of_its_bypass_unless_it_is_read_by_itself(read):
    torch.manual_seed(0)
    m, x = Residual(read).double().eval(), draw(200, 6)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x[:70], x[70:]], ridge=1e-12)

    def parts(model):
        stream = x + model.outs[0](model.branches[0](x))
        hidden = model.branches[1](model.norm(stream))
        return stream.detach(), hidden.detach(), model.outs[1](hidden).detach()

    (stream, _, branch), (now, hidden, _) = parts(m), parts(made.small)
    assert not torch.allclose(stream, now, atol=1e-2)
    goal = branch if read else branch + stream - now
    best = torch.linalg.lstsq(torch.cat([hidden, torch.ones(200, 1).double()], 1), goal).solution
    assert torch.allclose(made.small.outs[1].weight, best[:-1].T, atol=1e-6)
    assert torch.allclose(made.small.outs[1].bias, best[-1], atol=1e-6)


def test_a_stream_that_lost_channels_itself_is_compared_where_it_is_left():
    torch.manual_seed(0)
    m, x = nn.Sequential(nn.Linear(5, 6), Residual(), nn.Linear(6, 3)).double().eval(), draw(200, 5)
    made = halved(m, x, 6, drop=3)
    assert made.small[1].outs[0].weight.shape == (4, 16)
    cut = F.mse_loss(made.small(x), m(x))
    assert refit_(made.small, m, made.cuts, [x]) == {}
    assert F.mse_loss(made.small(x), m(x)) < 0.5 * cut


def test_ridge_holds_the_weights_where_they_are():
    m = nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 5)).double().eval()
    x = draw(200, 12)
    made = halved(m, x, 16)
    cut = made.small[2].weight.detach().clone()
    moved = []
    for ridge in (1e-6, 1.0, 1e6):
        small = copy.deepcopy(made.small)
        refit_(small, m, made.cuts, [x], ridge=ridge)
        moved.append(float((small[2].weight - cut).norm().detach()))
    assert moved[0] > moved[1] > moved[2]
    assert moved[2] < 1e-5


@pytest.mark.parametrize(
    ("conv", "shape"),
    [
        (nn.Conv1d(8, 6, 3, stride=2, padding=1), (40, 3, 9)),
        (nn.Conv2d(8, 6, (3, 2), padding=1, dilation=2, bias=False), (40, 3, 7, 8)),
        (nn.Conv2d(8, 6, 3, padding=1, padding_mode="reflect"), (40, 3, 6, 6)),
        (nn.Conv2d(8, 6, 3, padding="same"), (40, 3, 6, 6)),
        (nn.Conv3d(8, 6, 2), (40, 3, 4, 4, 4)),
    ],
)
def test_convolutions(conv, shape):
    first = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[len(shape)](3, 8, 1)
    m = nn.Sequential(first, conv).double().eval()  # eight linear units on three channels: four are plenty
    x = draw(*shape)
    rows = patches(conv, x.new_zeros(2, 8, *shape[2:]) + draw(2, 8, *shape[2:]))
    plain = (rows.reshape(-1, conv.weight[0].numel()) @ conv.weight.flatten(1).T).unflatten(0, (2, -1)).transpose(1, 2)
    expected = conv(draw(2, 8, *shape[2:])) - (0 if conv.bias is None else conv.bias.view(-1, *[1] * (len(shape) - 2)))
    assert torch.allclose(plain, expected.flatten(2))
    made = halved(m, x[:4], 8)
    lost = F.mse_loss(made.small(x), m(x)).detach()
    refit_(made.small, m, made.cuts, [x[:20], x[20:]], ridge=1e-9)
    left = F.mse_loss(made.small(x), m(x)).detach()
    if conv.padding_mode == "zeros" and any(p for p in conv._reversed_padding_repeated_twice):
        assert left < 0.1 * lost  # at the border the bias of the first layer is not seen: that part cannot be said
    else:
        assert left < 1e-10 * lost + 1e-12


def test_later_layers_correct_the_errors_of_earlier_ones():
    layers = [nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 14), nn.Tanh(), nn.Linear(14, 5)]
    m = nn.Sequential(*layers).double().eval()
    x = draw(400, 12)
    t = trace(m, x)
    made = make(m, t, {g.atom: torch.arange(g.size) % 3 != 0 for g in t.prunable})
    alone = copy.deepcopy(made.small)
    refit_(made.small, m, made.cuts, [x], ridge=1e-9)
    for i in (2, 4):  # each from the dense model's own activations
        kept = made.cuts.tensors[f"{i}.weight"]
        h = m[:i](x).detach()[:, kept[1]]
        y = m[: i + 1](x).detach()[:, kept.get(0, list(range(5)))]
        best = torch.linalg.lstsq(torch.cat([h, torch.ones(len(h), 1).double()], 1), y).solution
        alone[i].weight.data, alone[i].bias.data = best[:-1].T.contiguous(), best[-1]
    errors = [float(F.mse_loss(s(x), m(x)).detach()) for s in (made.small, alone)]
    assert errors[0] < errors[1]
    assert made.small[2].weight.shape == alone[2].weight.shape  # only the kept outputs are targets


class Turned(nn.Module):
    """A linear layer that stores (in, out)."""

    def __init__(self, i, o):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(i, o) / 4), nn.Parameter(torch.zeros(o))

    def forward(self, x):
        return x @ self.weight + self.bias


def test_weights_stored_as_in_by_out():
    m = nn.Sequential(Turned(12, 16), Turned(16, 5)).double().eval()
    x = low_rank(60, 12, 4, 0)
    made = halved(m, x, 16)
    assert refit_(made.small, m, made.cuts, [x], ridge=1e-9) == {}
    fresh = low_rank(40, 12, 4, 7)
    assert F.mse_loss(made.small(fresh), m(fresh)) < 1e-12


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.m, self.o = nn.Linear(12, 16), nn.Linear(16, 8), nn.Linear(8, 5)

    def forward(self, x):
        return self.o(self.m(F.relu(self.a(x))) * self.m(F.relu(self.a(-x))))


def test_layers_that_have_no_single_target_are_named_and_left():
    m = Twice().double().eval()
    x = draw(30, 12)
    made = halved(m, x, 16)
    before = made.small.m.weight.detach().clone()
    assert list(refit_(made.small, m, made.cuts, [x])) == ["m"]
    assert torch.equal(made.small.m.weight, before)
    grouped = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 5, 1)).double().eval()
    image = draw(2, 3, 4, 4)
    t = trace(grouped, image)
    inner = [g for g in t.prunable if "1.weight" in {n.tensor for n in g.members if n.role == "consume"}]
    made = make(grouped, t, {g.atom: torch.arange(g.size) % 2 != 0 for g in inner})
    assert "groups=1" in refit_(made.small, grouped, made.cuts, [image])["1"]


def test_a_bias_that_is_added_is_part_of_the_cuts():
    m = nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 5, bias=False)).double().eval()
    x = draw(100, 12)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x])
    assert made.cuts.added == {"2.bias": (5,)}
    assert made.small[2].bias.requires_grad


def test_modes_stay_and_nothing_is_left_behind():
    m = nn.Sequential(nn.Linear(12, 16), nn.Dropout(0.5), nn.Linear(16, 5)).double().train()
    x = low_rank(60, 12, 4, 0)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x, x + 1])
    assert all(layer.training for layer in (*m, *made.small))
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in (*m.modules(), *made.small.modules()))
    assert not any(thread.name == "secateur paused run" for thread in threading.enumerate())
    assert F.mse_loss(made.small.eval()(x), m.eval()(x)) < 1e-3


def test_a_failure_leaves_the_small_model_as_it_was():
    layers = [nn.Linear(12, 16, bias=False), nn.Tanh(), nn.Linear(16, 14, bias=False), nn.Tanh(), nn.Linear(14, 5)]
    m = nn.Sequential(*layers).double().eval()
    x = draw(50, 12)
    t = trace(m, x)
    made = make(m, t, {g.atom: torch.arange(g.size) % 3 != 0 for g in t.prunable})
    state = {k: v.clone() for k, v in made.small.state_dict().items()}
    m[4].weight.data[:] = float("nan")  # the first fit goes through, the second cannot
    with pytest.raises(ValueError, match="4: its inputs or the dense layer's outputs are not finite"):
        refit_(made.small, m, made.cuts, [x])
    after = made.small.state_dict()
    assert after.keys() == state.keys()
    assert all(torch.equal(v, state[k]) for k, v in after.items())
    assert not any(thread.name == "secateur paused run" for thread in threading.enumerate())
    assert made.cuts.added == {}


# ---------------------------------------------------------------- inputs far from zero


@pytest.mark.parametrize("centre", [0.0, 30.0, 100.0, 3000.0])
def test_a_fit_in_float32_is_the_least_squares_solution_whatever_the_mean_of_the_inputs(centre):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 5)).eval()
    x = centre + torch.randn(1000, 48)
    made = halved(m, x, 64)
    refit_(made.small, m, made.cuts, [x[:500], x[500:] - centre / 10], ridge=1e-6)
    seen = torch.cat([x[:500], x[500:] - centre / 10]).double()
    small, dense = copy.deepcopy(made.small).double(), copy.deepcopy(m).double()
    h, y = small[0](seen).detach(), dense(seen).detach()
    h, y = h - h.mean(0), y - y.mean(0)
    best = F.mse_loss(h @ torch.linalg.lstsq(h, y).solution, y)
    found = F.mse_loss(h @ small[1].weight.T, y)
    assert found.item() == pytest.approx(best.item(), rel=0.02)


def test_images_from_0_to_255_are_fitted():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3)).eval()
    x = torch.randint(0, 256, (8, 3, 10, 10)).float()
    made = halved(m, x, 16)
    cut = F.mse_loss(made.small(x), m(x)).item()
    assert refit_(made.small, m, made.cuts, [x]) == {}
    assert F.mse_loss(made.small(x), m(x)).item() < 0.1 * cut


@pytest.mark.parametrize("examples", [1, 2])
def test_a_calibration_set_of_one_or_two_examples_gives_a_finite_fit(examples):
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)).eval()
    x = 100 + torch.randn(examples, 12)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x])
    assert torch.allclose(made.small(x), m(x), rtol=1e-3)


def test_inputs_that_depend_on_each_other_give_a_fit():
    torch.manual_seed(0)
    m = nn.Sequential(nn.Linear(12, 16), nn.Linear(16, 5)).eval()
    with torch.no_grad():
        m[0].weight[1:] = m[0].weight[0]  # every unit says the same
    x = 1000 + torch.randn(50, 12)
    made = halved(m, x, 16)
    refit_(made.small, m, made.cuts, [x], ridge=1e-12)
    assert F.mse_loss(made.small(x), m(x)) < 1e-4 * m(x).var()


def test_without_bias_a_layer_gets_none_and_is_fitted_through_zero():
    m = nn.Sequential(nn.Linear(12, 16), nn.Sigmoid(), nn.Linear(16, 5, bias=False)).double().eval()
    x = draw(100, 12)
    t = trace(m, x)
    made = make(m, t, {t.prunable[0].atom: torch.arange(16) % 2 != 0}, bias=False)
    refit_(made.small, m, made.cuts, [x[:40], x[40:]], ridge=1e-12, bias=False)
    assert made.small[2].bias is None
    assert made.cuts.added == {}
    h = made.small[:2](x).detach()
    best = torch.linalg.lstsq(h, m(x).detach()).solution
    assert torch.allclose(made.small[2].weight, best.T, atol=1e-6)


class Routed(nn.Module):
    """Rows above zero go to one expert, all others to the second."""

    def __init__(self):
        super().__init__()
        self.first, self.one, self.two = nn.Linear(12, 16), nn.Linear(16, 5), nn.Linear(16, 5)

    def forward(self, x):
        h = self.first(x).tanh()
        return torch.cat([self.one(h[x[:, 0] > 0]), self.two(h[x[:, 0] <= 0])])


def test_a_layer_that_no_row_reaches_is_left_and_named():
    m = Routed().double().eval()
    x = draw(40, 12).abs()
    made = halved(m, x, 16)
    before = made.small.two.weight.detach().clone()
    assert refit_(made.small, m, made.cuts, [x]) == {"two": "no row of data= reached it"}
    assert torch.equal(made.small.two.weight, before)


def test_a_layer_that_some_batches_do_not_run_is_left_and_the_others_are_fitted():
    class Sometimes(Routed):
        def forward(self, x):
            h = self.first(x).tanh()
            return self.one(h) + (self.two(h) if x[0, 0] > 0 else 0)

    m = Sometimes().double().eval()
    x = draw(40, 12).abs()
    made = halved(m, x, 16)
    cut, two = F.mse_loss(made.small(-x), m(-x)), made.small.two.weight.detach().clone()
    assert refit_(made.small, m, made.cuts, [x, -x]) == {"two": "it does not run once on every batch of data="}
    assert torch.equal(made.small.two.weight, two)
    assert F.mse_loss(made.small(-x), m(-x)) < 0.5 * cut


class Tokens(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 8), nn.Linear(8, 6), nn.Linear(6, 2)

    def forward(self, x, attention_mask=None):
        return self.third(self.second(self.first(x).relu()).relu())


@pytest.mark.parametrize("refit", [False, True])
@pytest.mark.parametrize("criterion", [sc.magnitude, sc.reconstruction], ids=str)
def test_padding_is_left_out(criterion, refit):
    torch.manual_seed(0)
    model, x = Tokens().double(), draw(4, 10, 3)
    mask = torch.zeros(4, 10).long()
    mask[:, :6] = 1
    padded = {"x": torch.where(mask[..., None] == 1, x, 100.0), "attention_mask": mask}
    there = {"x": x[:, :6], "attention_mask": mask[:, :6]}
    made = [sc.shrink(model, there, criterion, channels=0.5, data=[one], refit=refit)[0] for one in (padded, there)]
    for one, other in zip(*(each.state_dict().values() for each in made), strict=True):
        assert torch.allclose(one, other, rtol=1e-9)
