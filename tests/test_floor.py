"""Layer collapse: a tensor that is pruned to nothing is flagged, warned about, and prevented by `floor=`."""

import copy
import math
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import secateur as sc


def uneven() -> nn.Module:
    """A model whose last layer has by far the smallest weights, so that a global ranking prunes all of it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    with torch.no_grad():
        model[4].weight *= 0.001
    return model


def test_a_tensor_that_is_pruned_to_nothing_is_flagged_and_warned_about():
    """A layer was pruned to 100 % without a word."""
    with pytest.warns(UserWarning, match=r"nothing is left of '4\.weight'") as seen:
        plan = sc.prune_(uneven(), sparsity=0.5, scope="global")
    assert len(seen) == 1
    assert seen[0].filename == __file__
    assert re.search(r"4\.weight .* 100\.00% +empty\n", str(plan))
    assert "empty, 1: nothing is left (layer collapse); floor= prevents it (4.weight)" in str(plan)
    assert plan.empty == ["4.weight"]
    assert "empty" in plan._repr_html_()


def test_one_warning_names_all_tensors():
    tensors = {"a": torch.randn(2, 2), "b": torch.randn(2, 2), "c": 10 + torch.randn(40, 40).abs()}
    with pytest.warns(UserWarning, match="nothing is left of 'a', 'b'") as seen:
        sc.plan(tensors, sparsity=0.1, scope="global")
    assert len(seen) == 1


def test_no_warning_where_a_sparsity_of_one_was_asked_for():
    model = uneven()
    plan = sc.prune_(model, sparsity=1.0, include="0")
    assert plan.empty == ["0.weight"]
    assert "empty" in str(plan)
    sc.prune_(model, spread={"2.*": 1.0}, sparsity=0.5)


def test_a_pruner_warns_when_a_layer_collapses_and_not_again():
    model = uneven()
    pruner = sc.Pruner(model, sparsity=sc.linear(0.6, end=3), scope="global")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(4):
            pruner.step()
    assert [str(one.message).count("'4.weight'") for one in seen] == [1]


@pytest.mark.parametrize("floor", [0.01, 0.1, 0.3])
@pytest.mark.parametrize("pattern", ["unstructured", "4x1", "3x5", "out", "in", "2x2-3"])
def test_a_floor_keeps_a_fraction_of_every_tensor_at_the_same_total(pattern, floor):
    model, sparsity = uneven(), 0.6
    plan = sc.plan(model, sparsity=sparsity, scope="global", pattern=pattern, floor=floor)
    for layer in plan.layers:
        assert layer.kept >= math.ceil(floor * layer.total), layer
    step = {"unstructured": 1, "4x1": 4, "3x5": 15, "out": 32, "in": 32, "2x2-3": 3}[pattern]
    total = plan.metrics()["total"]
    assert abs(plan.metrics()["pruned"] - sparsity * total) <= step
    assert f"floor {floor:g}" in plan.recipe


def test_a_floor_takes_the_lowest_scores_that_it_allows():
    model = uneven()
    plan = sc.plan(model, sparsity=0.6, scope="global", floor=0.25)
    last = model[4].weight.detach().abs()
    assert torch.equal(plan.masks["4.weight"], last >= last.flatten().sort().values[96])
    others = torch.cat([model[i].weight.detach().abs().flatten() for i in (0, 2)])
    kept = torch.cat([plan.masks[f"{i}.weight"].flatten() for i in (0, 2)])
    assert others[kept].min() >= others[~kept].max()
    assert plan.metrics()["pruned"] == round(0.6 * plan.metrics()["total"])


def test_a_floor_changes_nothing_where_no_tensor_comes_near_it():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 16))
    for options in ({"scope": "global", "sparsity": 0.5}, {"sparsity": 0.5}, {"sparsity": 0.5, "scope": "row"}):
        assert sc.plan(model, floor=0.1, **options).masks == sc.plan(model, **options).masks


@pytest.mark.parametrize("scope", ["tensor", "row"])
def test_rounding_does_not_empty_a_small_tensor(scope):
    tensors = {"small": torch.randn(1, 3), "large": torch.randn(8, 20)}
    with pytest.warns(UserWarning, match="nothing is left of 'small'"):
        sc.plan(tensors, sparsity=0.9, scope=scope)
    plan = sc.plan(tensors, sparsity=0.9, scope=scope, floor=0.01)
    assert [layer.kept for layer in plan.layers] == [1, 16]


def test_sparsegpt_respects_the_floor():
    model = nn.Sequential(nn.Linear(3, 1))
    plan = sc.plan(model, method="sparsegpt", sparsity=0.9, floor=0.1, data=[torch.randn(9, 3)])
    assert plan.layers[0].kept == 1


def test_a_spread_gives_what_the_floor_takes_to_the_other_tensors():
    tensors = {"a": torch.randn(10, 10), "b": torch.randn(30, 10)}

    def all_from_a(scores, sparsity):
        return {"a": 1.0, "b": (sparsity * 400 - 100) / 300}

    plan = sc.plan(tensors, sparsity=0.5, spread=all_from_a, floor=0.2)
    assert [layer.kept for layer in plan.layers] == [20, 180]


def test_training_never_goes_below_the_floor():
    model = uneven()
    pruner = sc.Pruner(model, sparsity=sc.linear(0.6, end=5), scope="global", floor=0.05)
    for _ in range(6):
        pruner.step()
        assert all(layer.kept >= 0.05 * layer.total for layer in pruner.plan().layers)
    assert pruner.plan().metrics()["pruned"] == round(0.6 * (16 * 32 + 32 * 32 + 32 * 4))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"sparsity": 0.9, "floor": 0.2}, "sparsity 0.9 leaves 0.1 of each tensor, but floor=0.2 keeps more"),
        ({"sparsity": 0.5, "spread": {"4.*": 0.95}, "floor": 0.1}, "sparsity 0.95 leaves 0.05"),
        ({"pattern": "1:4", "floor": 0.5}, "pattern '1:4' keeps less than floor=0.5"),
        (
            {"count": 500, "floor": 0.1, "include": "0"},
            r"floor=0.1 allows 460 of the 512 units in '0.weight' to be pruned",
        ),
        ({"count": 1600, "scope": "global", "floor": 0.1}, "1600 were requested"),
        ({"count": 15, "scope": "row", "include": "0", "floor": 0.1}, "count=15 is more"),
        ({"sparsity": 0.5, "floor": 1.5}, "floor=1.5 must be a fraction"),
        ({"sparsity": 0.5, "floor": "0.1"}, "must be a fraction"),
    ],
)
def test_a_budget_that_the_floor_forbids_is_an_error_that_says_so(options, says):
    model = uneven()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=says):
        sc.prune_(model, **options)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())


def test_a_schedule_that_ends_below_the_floor_is_refused_at_once():
    with pytest.raises(ValueError, match=r"floor=0\.2 keeps more"):
        sc.Pruner(uneven(), sparsity=sc.cubic(0.9, end=100), floor=0.2)


def test_the_call_that_the_readme_shows_leaves_something_of_every_tensor():
    """Without a floor, it pruned the head of this model to 100 %."""
    call = 'sc.prune_(model, sparsity=0.8, scope="global", floor=0.01)'
    assert f"`{call}`" in (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")
    plan = eval(call, {"sc": sc, "model": uneven()})
    assert plan.empty == []
    assert plan.metrics()["sparsity"] == pytest.approx(0.8, abs=0.001)
