"""Spreads: a sparsity for each tensor, with the total that was asked for."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import secateur as sc
from secateur._layers import Layout
from secateur.budgets import least_error
from secateur.scores import Scores


def scores_like(shapes, seed=0):
    generator = torch.Generator().manual_seed(seed)
    made = {}
    for i, shape in enumerate(shapes):
        layout = Layout(tuple(shape))
        values = torch.rand(layout.rows, layout.cols, generator=generator) ** (1 + 8 * i)
        made[f"t{i}"] = Scores.of(values, layout)
    return made


def pruned(scores, shares):
    return sum(shares[name] * one.numel for name, one in scores.items()), sum(one.numel for one in scores.values())


shapes = st.lists(st.lists(st.integers(1, 12), min_size=2, max_size=4), min_size=1, max_size=5)


@pytest.mark.parametrize("spread", [sc.uniform, sc.erk, sc.owl(), sc.owl(0.3, 3.0)], ids=["uniform", "erk", "owl", "owl wide"])
@settings(max_examples=40, deadline=None, derandomize=True)
@given(shapes=shapes, sparsity=st.floats(0, 1), seed=st.integers(0, 9))
def test_a_spread_keeps_the_whole_at_what_was_asked(spread, shapes, sparsity, seed):
    scores = scores_like(shapes, seed)
    shares = spread(scores, sparsity)
    assert shares.keys() == scores.keys()
    assert all(0 <= share <= 1 for share in shares.values())
    gone, total = pruned(scores, shares)
    assert gone == pytest.approx(sparsity * total, abs=1e-6 * total + 1e-9)


def test_uniform_gives_all_the_same():
    assert sc.uniform(scores_like([(3, 3), (9, 9)]), 0.4) == {"t0": 0.4, "t1": 0.4}


def test_erk_densities_go_as_the_sum_of_dimensions_over_their_product():
    sizes = {"t0": (64, 32, 3, 3), "t1": (128, 64, 3, 3), "t2": (256, 256)}
    shares = sc.erk(scores_like(sizes.values()), 0.9)
    raw = {name: sum(shape) / math.prod(shape) for name, shape in sizes.items()}
    ratios = [(1 - shares[name]) / raw[name] for name in sizes]
    assert ratios == pytest.approx([ratios[0]] * 3)


def test_erk_leaves_a_tensor_dense_rather_than_more_than_dense():
    shares = sc.erk(scores_like([(2, 2), (200, 200)]), 0.5)
    assert shares["t0"] == pytest.approx(0)
    assert shares["t1"] == pytest.approx(0.5 * (4 + 40_000) / 40_000)


def test_owl_keeps_more_where_there_are_more_outliers():
    calm = Scores.of(torch.ones(40, 40))
    wild = torch.ones(40, 40)
    wild[:, 0] = 1000
    shares = sc.owl(0.08)({"calm": calm, "wild": Scores.of(wild)}, 0.6)
    assert shares["calm"] - shares["wild"] == pytest.approx(0.16)
    assert shares["calm"] + shares["wild"] == pytest.approx(1.2)


def test_owl_without_outliers_is_uniform():
    assert sc.owl()(scores_like([(4, 4)]), 0.3) == {"t0": pytest.approx(0.3)}


@pytest.mark.parametrize("make", [lambda: sc.owl(1.5), lambda: sc.owl(-0.1), lambda: sc.owl("a"), lambda: sc.owl(math.nan)])
def test_owl_refuses_a_strength_that_no_sparsity_can_follow(make):
    with pytest.raises((TypeError, ValueError), match="strength"):
        make()


# --- in a plan --------------------------------------------------------------------------------------------------------


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))


@pytest.mark.parametrize("spread", [sc.uniform, sc.erk, sc.owl(), sc.owl(0.2, 2.0)])
@pytest.mark.parametrize("sparsity", [0.0, 0.37, 0.9, 1.0])
def test_a_plan_with_a_spread_has_the_sparsity_asked_but_for_rounding(spread, sparsity):
    plan = sc.plan(net(), sparsity=sparsity, spread=spread)
    total = plan.metrics()["total"]
    assert abs(plan.metrics()["pruned"] - sparsity * total) <= 1.5


def test_a_mapping_gives_each_tensor_its_own_number():
    plan = sc.plan(net(), spread={"0.weight": 0.25, "2.*": 0.5, "4.weight": 1.0})
    assert [layer.sparsity for layer in plan.layers] == [0.25, 0.5, 1.0]


def test_what_a_mapping_does_not_name_gets_the_rest():
    plan = sc.plan(net(), sparsity=0.75, spread={"0.weight": 0.25})
    assert [layer.sparsity for layer in plan.layers] == [0.25, 0.75, 0.75]
    with pytest.raises(ValueError, match=r"no number for '2\.weight'"):
        sc.plan(net(), spread={"0.weight": 0.25})


def test_the_last_glob_that_matches_counts():
    plan = sc.plan(net(), spread={"*": 0.5, "4.weight": 0.25})
    assert [layer.sparsity for layer in plan.layers] == [0.5, 0.5, 0.25]


def test_a_mapping_of_a_tensor_that_is_not_pruned_is_an_error_that_suggests():
    with pytest.raises(ValueError, match=r"'0\.wieght'.*Did you mean '0\.weight'"):
        sc.plan(net(), sparsity=0.5, spread={"0.wieght": 0.1})


def test_a_users_own_spread_is_a_function():
    plan = sc.plan(net(), sparsity=0.5, spread=lambda scores, sparsity: dict.fromkeys(scores, sparsity / 2))
    assert [layer.sparsity for layer in plan.layers] == [0.25, 0.25, 0.25]


@pytest.mark.parametrize(
    "spread",
    [
        lambda scores, sparsity: dict.fromkeys(scores, 1.5),
        lambda scores, sparsity: dict.fromkeys(scores, -0.5),
        lambda scores, sparsity: dict.fromkeys(scores, math.nan),
        lambda scores, sparsity: dict.fromkeys(scores, "0.5"),
        lambda scores, sparsity: {},
        lambda scores, sparsity: None,
        sc.owl,
    ],
    ids=["over one", "negative", "nan", "text", "a tensor missing", "nothing", "owl not called"],
)
def test_a_spread_that_gives_no_sparsities_is_refused_in_words(spread):
    with pytest.raises((TypeError, ValueError), match="spread"):
        sc.plan(net(), sparsity=0.5, spread=spread)


def test_a_number_of_a_mapping_may_be_a_schedule_or_is_refused_at_once():
    spread = {"0.weight": sc.linear(0.5, end=4)}
    try:
        pruner = sc.Pruner(net(), sparsity=0.25, spread=spread)
    except (TypeError, ValueError) as error:
        assert "spread" in str(error)  # noqa: PT017
        return
    for _ in range(5):
        pruner.step()
    assert pruner.plan().layers[0].sparsity == 0.5


# --- by_loss ----------------------------------------------------------------------------------------------------------


def brute_force(sizes, curves, levels, asked):
    """The cheapest choice of one level for each tensor that prunes at least what is asked."""
    best = None
    for chosen in itertools.product(range(len(levels)), repeat=len(sizes)):
        pruned = sum(levels[i] * size for i, size in zip(chosen, sizes.values(), strict=True))
        cost = sum(curves[name][i] for name, i in zip(sizes, chosen, strict=True))
        if pruned >= asked - 1e-9 and (best is None or cost < best):
            best = cost
    return best


def test_shares_by_error_are_cheaper_than_any_choice_of_levels_and_exact():
    draw = torch.Generator().manual_seed(0)
    levels = [0.2, 0.35, 0.5, 0.65, 0.8]
    for _ in range(10):
        sizes = {f"t{i}": int(torch.randint(50, 500, (1,), generator=draw)) for i in range(4)}
        rates = torch.rand(4, generator=draw).mul(6).add(2).tolist()
        curves = {
            name: [size * math.exp(rate * s) for s in levels] for (name, size), rate in zip(sizes.items(), rates, strict=True)
        }
        shares = least_error(sizes, levels, curves, 0.5)
        assert all(0.2 - 0.02 <= share <= 0.8 + 0.02 for share in shares.values())
        counts = {name: share * sizes[name] for name, share in shares.items()}
        assert all(abs(count - round(count)) < 1e-6 for count in counts.values())
        assert round(sum(counts.values())) == round(0.5 * sum(sizes.values()))
        cost = sum(size * math.exp(rate * shares[name]) for (name, size), rate in zip(sizes.items(), rates, strict=True))
        assert cost <= 1.02 * brute_force(sizes, curves, levels, 0.5 * sum(sizes.values()))


def test_a_tensor_without_a_curve_gets_what_is_asked():
    curves = {"a": [1.0, 2.0, 4.0], "b": [1.0, 10.0, 100.0]}
    shares = least_error({"a": 100, "b": 100, "c": 100}, [0.3, 0.5, 0.7], curves, 0.5)
    assert shares["c"] == 0.5
    assert shares["a"] > 0.5 > shares["b"]
    assert shares["a"] + shares["b"] == pytest.approx(1.0)


def quiet_and_loud():
    """Two layers of one shape, of which the loss hardly reacts to the first."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.quiet, self.loud, self.head = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 5)

        def forward(self, x):
            return self.head(0.05 * self.quiet(x).tanh() + 3 * self.loud(x).tanh())

    torch.manual_seed(0)
    return Net(), [torch.randn(64, 16) for _ in range(4)]


@pytest.mark.parametrize("method", [None, "sparsegpt", "admm"])
def test_by_loss_prunes_more_where_the_loss_reacts_less(method):
    model, data = quiet_and_loud()
    plan = sc.plan(model, sparsity=0.5, spread=sc.by_loss(0.3), data=data, exclude="head", method=method)
    sparsity = {layer.name: layer.sparsity for layer in plan.layers}
    assert sparsity["quiet.weight"] > 0.7
    assert sparsity["quiet.weight"] <= 0.8 + 1 / 256  # whole weights
    assert plan.metrics()["pruned"] == 256
    assert "by_loss(0.3)" in str(plan)


def test_by_loss_looks_at_sparsities_within_its_reach_that_leave_something():
    assert sc.by_loss(0.2).levels(0.5) == pytest.approx([0.3, 0.4, 0.5, 0.6, 0.7])
    few, many = sc.by_loss(0.3).levels(0.1), sc.by_loss(0.3).levels(0.8)
    assert (few[0], few[-1]) == pytest.approx((0.025, 0.4))
    assert (many[0], many[-1]) == pytest.approx((0.5, 0.95))
    assert sc.by_loss(0.3).levels(0.98)[-1] == pytest.approx(0.99)


def test_by_loss_prunes_more_where_fewer_tokens_come_by():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.often, self.rarely = nn.Linear(16, 16), nn.Linear(16, 16)

        def forward(self, x):
            return torch.cat([self.often(x), self.rarely(x[: len(x) // 16])])

    torch.manual_seed(0)
    model, data = Net(), [torch.randn(256, 16) for _ in range(4)]
    model.rarely.load_state_dict(model.often.state_dict())
    plan = sc.plan(model, sparsity=0.5, spread=sc.by_loss(0.3), data=data)
    sparsity = {layer.name: layer.sparsity for layer in plan.layers}
    assert sparsity["rarely.weight"] > 0.6 > 0.4 > sparsity["often.weight"]


def test_without_gradients_by_loss_compares_relative_errors_and_says_so():
    model, data = quiet_and_loud()
    plan = sc.plan(model, sparsity=0.5, spread=sc.by_loss(curvature="none"), data=data, exclude="head")
    assert abs(plan.layers[0].sparsity - 0.5) < 0.1
    assert plan.metrics()["pruned"] == 256
    assert "no gradients were taken" in str(plan)


def test_by_loss_needs_data_and_goes_with_pruning_once():
    model, data = quiet_and_loud()
    with pytest.raises(ValueError, match="pass data="):
        sc.plan(model, sparsity=0.5, spread=sc.by_loss())
    with pytest.raises(TypeError, match="made by calling it"):
        sc.plan(model, sparsity=0.5, spread=sc.by_loss, data=data)
    with pytest.raises(ValueError, match="reach=2"):
        sc.by_loss(2)
    with pytest.raises(ValueError, match="'none', 'diag' or 'fisher'"):
        sc.by_loss(curvature="full")


def test_by_loss_can_be_text():
    model, data = quiet_and_loud()
    given = {"sparsity": 0.5, "data": data, "exclude": "head"}
    one = sc.plan(model, spread='by_loss(0.2, curvature="diag")', **given)
    other = sc.plan(model, spread=sc.by_loss(0.2, "diag"), **given)
    assert [layer.kept for layer in one.layers] == [layer.kept for layer in other.layers]
    assert one.recipe == other.recipe


@pytest.mark.parametrize(("name", "spread"), [("uniform", sc.uniform), ("erk", sc.erk), ("owl", sc.owl())])
def test_a_spread_is_accepted_by_name(name, spread):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    assert sc.plan(model, sparsity=0.7, spread=name).masks == sc.plan(model, sparsity=0.7, spread=spread).masks


def test_an_unknown_name_of_a_spread_gets_the_nearest():
    with pytest.raises(ValueError, match=r"spread='erg' is not one of 'uniform', 'erk', 'owl', 'by_loss'.*'erk'"):
        sc.plan(nn.Linear(4, 4), sparsity=0.5, spread="erg")
