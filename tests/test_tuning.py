"""`sensitivity` and `search` measure a metric, recommend from it, leave the model alone and can be resumed."""

import json
import math

import pytest
import torch
from torch import nn

import secateur as sc

torch.manual_seed(0)
X = torch.randn(64, 12)


def build():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.ReLU(), nn.Linear(24, 4)).eval()


TRUTH = build()(X).detach()


@torch.no_grad()
def agreement(model):
    """How close the outputs are to those of the dense model: 1 for equal ones."""
    return float(1 - (model(X) - TRUTH).norm() / TRUTH.norm())


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(model, before):
    return all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


class Counted:
    """An evaluation that counts its calls, and fails at one of them."""

    def __init__(self, fails_at=None, evaluate=agreement):
        self.calls, self.fails_at, self.evaluate = 0, fails_at, evaluate

    def __call__(self, model):
        self.calls += 1
        if self.calls == self.fails_at:
            raise KeyboardInterrupt
        return self.evaluate(model)


# --- sensitivity ----------------------------------------------------------------------------------------------------------


def test_sensitivity_measures_what_pruning_each_tensor_alone_does():
    model = build()
    before = state(model)
    found = sc.sensitivity(model, agreement, levels=(0.3, 0.6))
    assert same(model, before)
    assert sc.summary(model).history == []
    assert found.dense == pytest.approx(1)
    for name in ("0.weight", "2.weight", "4.weight"):
        for level in (0.3, 0.6):
            other = build()
            sc.prune_(other, sparsity=level, include=name)
            assert found.curves[name][level] == pytest.approx(agreement(other), abs=1e-6)


def test_sensitivity_uses_criteria_with_data_and_one_plan_for_each_level():
    batches = Counted(evaluate=lambda _: None)

    class Data:
        def __iter__(self):
            batches.calls += 1
            return iter([X[:32], X[32:]])

    found = sc.sensitivity(build(), agreement, sc.wanda, levels=(0.5, 0.8), data=Data())
    assert batches.calls <= 2 * 2  # each plan checks the data and runs through it
    other = build()
    sc.prune_(other, sc.wanda, sparsity=0.8, include="2", data=[X[:32], X[32:]])
    assert found.curves["2.weight"][0.8] == pytest.approx(agreement(other), abs=1e-6)


def test_groups_by_block_and_by_glob():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)) for _ in range(3))
            self.head = nn.Linear(12, 4)

        def forward(self, x):
            for block in self.blocks:
                x = x + block(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Net()
    found = sc.sensitivity(model, lambda m: float(m(X).sum()), by="block", levels=[0.5])
    assert list(found.members) == ["blocks.0", "blocks.1", "blocks.2", "head.weight"]
    assert found.members["blocks.1"] == ("blocks.1.0.weight", "blocks.1.2.weight")
    by = {"first": "blocks.0.*", "rest": ["blocks.1.*", "blocks.2.*"]}
    assert sc.sensitivity(model, lambda m: float(m(X).sum()), by=by, levels=[0.5]).sizes == {"first": 288, "rest": 576}
    with pytest.raises(ValueError, match="matches no tensor"):
        sc.sensitivity(model, agreement, by={"a": "block.*"})
    with pytest.raises(ValueError, match=r"by='blck' .*'block'"):
        sc.sensitivity(model, agreement, by="blck")


def test_an_n_of_m_pattern_has_one_level():
    assert set(sc.sensitivity(build(), agreement, pattern="2:4").curves["0.weight"]) == {0.5}


def test_units_are_removed_with_example_inputs():
    model = build()
    found = sc.sensitivity(model, agreement, example_inputs=X[:1], levels=(0.25, 0.5))
    small, _ = sc.shrink(model, X[:1], channels={"0.weight[0]": 0.5}, floor=0.0)
    assert found.curves["0.weight[0]"][0.5] == pytest.approx(agreement(small), abs=1e-6)
    ratios = found.recommend(sparsity=0.3)
    cut = sc.shrink(model, X[:1], channels=ratios)[1]
    assert {group.name: round(group.after / 24, 2) for group in cut.groups} == pytest.approx(ratios, abs=0.05)
    with pytest.raises(ValueError, match="groups are those of shrink"):
        sc.sensitivity(model, agreement, example_inputs=X[:1], by="block")


def recommended(**curves):
    """A result with these curves, and groups of 100 weights."""
    from secateur.tuning import Sensitivity

    return Sensitivity(1.0, curves, {name: (name,) for name in curves}, dict.fromkeys(curves, 100))


def test_recommended_budgets_prune_where_it_costs_least():
    found = recommended(a={0.5: 1.0, 0.9: 0.98}, b={0.5: 0.9, 0.9: 0.2})
    assert found.recommend(sparsity=0.25) == pytest.approx({"a": 0.5, "b": 0.0}, abs=1e-4)
    assert found.recommend(sparsity=0.1) == pytest.approx({"a": 0.2, "b": 0.0}, abs=1e-4)
    half = found.recommend(sparsity=0.5)
    assert half["a"] > 0.75 > 0.25 > half["b"]
    assert found.recommend(drop=0.0) == pytest.approx({"a": 0.5, "b": 0.0}, abs=1e-4)
    spent = found.recommend(drop=0.05)
    assert sum(found.drop(group, level) for group, level in spent.items()) == pytest.approx(0.05)
    assert found.recommend(drop=9) == pytest.approx({"a": 0.9, "b": 0.9})
    with pytest.raises(ValueError, match=r"reach a sparsity of 0\.9"):
        found.recommend(sparsity=0.95)
    with pytest.raises(ValueError, match=r"one of sparsity= .* and drop="):
        found.recommend()


def test_recommended_budgets_are_optimal():
    """Against all budgets in steps of one percent, for curves that are not convex."""
    a, b, c = {0.3: 0.9, 0.6: 0.88, 0.9: 0.5}, {0.3: 0.99, 0.6: 0.95, 0.9: 0.7}, {0.3: 1.0, 0.6: 0.7, 0.9: 0.69}
    found = recommended(a=a, b=b, c=c)
    best = found.recommend(sparsity=0.6)

    def cost(*levels):
        return sum(found.drop(group, level) for group, level in zip("abc", levels, strict=True))

    steps = [n / 100 for n in range(91)]
    brute = min(cost(a, b, 1.8 - a - b) for a in steps for b in steps if 0 <= 1.8 - a - b <= 0.9)
    assert sum(best.values()) == pytest.approx(1.8)
    assert cost(*best.values()) <= brute + 1e-9
    assert found.drop("b", 0.6) == pytest.approx(0.05)


def test_curves_around_a_sparsity_prune_the_other_groups_too():
    model = build()
    found = sc.sensitivity(model, agreement, levels=(0.3, 0.5, 0.7), around=0.5)
    other = build()
    sc.prune_(other, spread={"0.weight": 0.5, "2.weight": 0.7, "4.weight": 0.5})
    assert found.curves["2.weight"][0.7] == pytest.approx(agreement(other), abs=1e-6)
    even = build()
    sc.prune_(even, sparsity=0.5)
    assert found.base == pytest.approx(agreement(even), abs=1e-6)
    assert {curve[0.5] for curve in found.curves.values()} == {found.base}
    budget = found.recommend(sparsity=0.5)
    plan = sc.prune_(model, spread=budget)
    assert plan.metrics()["sparsity"] == pytest.approx(0.5, abs=0.01)
    assert agreement(model) > agreement(even)
    with pytest.raises(ValueError, match=r"lowest levels give 0\.3"):
        found.recommend(sparsity=0.2)
    with pytest.raises(ValueError, match=r"around=0\.6 must be one of levels"):
        sc.sensitivity(model, agreement, around=0.6)


@pytest.mark.parametrize("call", [sc.sensitivity, sc.search])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_metric_of_the_dense_model_must_be_finite(call, value):
    with pytest.raises(ValueError, match="for the model as it is given, so no drop can be measured"):
        call(torch.nn.Linear(8, 8), lambda model: value)


def test_a_metric_that_improves_or_is_nan_is_no_gain():
    found = recommended(a={0.5: 1.2, 0.9: math.nan}, b={0.5: 0.5, 0.9: 0.4})
    assert found.recommend(drop=0.0) == pytest.approx({"a": 0.5, "b": 0.0})
    assert found.drop("a", 0.25) == 0
    assert found.drop("a", 0.9) == math.inf


def test_the_budget_is_one_that_prune_takes():
    model = build()
    budget = sc.sensitivity(model, agreement, levels=(0.25, 0.5, 0.75)).recommend(sparsity=0.5)
    plan = sc.prune_(model, spread=budget)
    assert plan.metrics()["sparsity"] == pytest.approx(0.5, abs=0.01)
    even = build()
    sc.prune_(even, sparsity=0.5)
    assert agreement(model) > agreement(even)


def test_results_print_and_serialize():
    found = sc.sensitivity(build(), agreement, levels=(0.3, 0.6))
    assert "0.weight" in str(found)
    assert "<table>" in found._repr_html_()
    assert found.metrics()["0.weight/0.3"] == found.curves["0.weight"][0.3]
    json.dumps(found.to_dict())
    line = found.sweep()["lines"][0]
    assert [point["sparsity"] for point in line["points"]] == [0.3, 0.6]
    assert sc.report(before=build(), after=build(), sweep=found.sweep(), seconds=0, disk=False)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"levels": (0.5, 1.0)}, ValueError, "above 0 and below 1"),
        ({"levels": ()}, ValueError, "levels="),
        ({"better": "up"}, ValueError, "'higher'"),
    ],
)
def test_wrong_arguments_of_sensitivity(arguments, error, message):
    with pytest.raises(error, match=message):
        sc.sensitivity(build(), agreement, **arguments)


def test_evaluate_must_return_a_number():
    with pytest.raises(TypeError, match=r"one number.*it returned str"):
        sc.sensitivity(build(), lambda model: "good")
    assert sc.sensitivity(build(), lambda model: torch.tensor(0.5), levels=[0.5]).dense == 0.5


@pytest.mark.parametrize("call", [sc.sensitivity, sc.search], ids=["sensitivity", "search"])
def test_a_run_that_was_stopped_goes_on(tmp_path, call):
    model, file = build(), tmp_path / "journal.jsonl"
    before = state(model)
    whole = Counted()
    wanted = call(model, whole)
    first = Counted(fails_at=4)
    with pytest.raises(KeyboardInterrupt):
        call(model, first, journal=file)
    assert same(model, before)
    with file.open("a") as journal:
        journal.write('{"key": "half a li')  # the line at which it was killed
    second = Counted()
    found = call(model, second, journal=file)
    assert second.calls == whole.calls - 3
    assert str(found).split(" time")[0] == str(wanted).split(" time")[0]
    third = Counted()
    again = call(model, third, journal=file)
    assert third.calls == 0
    if call is sc.search:
        assert same(again.model, state(wanted.model))
    with torch.no_grad():
        model[0].weight[0, 0] += 1
    with pytest.raises(ValueError, match=r"belongs to another run: model differ"):
        call(model, Counted(), journal=file)


# --- search ---------------------------------------------------------------------------------------------------------------


def test_search_finds_the_border_of_the_drop():
    model = build()
    before = state(model)
    found = sc.search(model, agreement, drop=0.1, tolerance=0.005)
    assert same(model, before)
    assert found.value >= found.dense - 0.1
    sparsity = found.best.numbers["prune.sparsity"]
    assert found.recipe.stages[0].arguments["sparsity"] == sparsity
    assert agreement(found.model) == pytest.approx(found.value)
    assert agreement(found.recipe.run(model).model) == pytest.approx(found.value)
    worse = found.recipe.replace("prune.sparsity", sparsity + 0.01).run(model).model
    assert agreement(worse) < found.dense - 0.1
    assert any(not one.within for one in found.tried)


def test_search_takes_the_strongest_setting_if_it_is_good_enough():
    found = sc.search(build(), lambda model: 1.0)
    assert len(found.tried) == 1
    assert found.best.numbers == {"prune.sparsity": 0.98}


def test_search_varies_several_numbers_together():
    stages = [{"shrink": {"channels": 0.5}}, {"prune": {"sparsity": 0.5}}]
    found = sc.search(build(), agreement, stages, drop=0.3, example_inputs=X[:1], tolerance=0.05)
    channels, sparsity = found.best.numbers.values()
    assert (1 - channels) / 0.95 == pytest.approx(sparsity / 0.98)
    assert found.model[0].weight.shape[0] < 24
    alone = sc.search(
        build(), agreement, stages, drop=0.5, example_inputs=X[:1], tolerance=0.05, vary={"prune.sparsity": (0.2, 0.4)}
    )
    assert 0.2 <= alone.best.numbers["prune.sparsity"] <= 0.4
    assert alone.recipe.stages[0].arguments == {"channels": 0.5}


def test_search_for_a_metric_that_should_be_low():
    found = sc.search(build(), lambda model: -agreement(model), drop=0.1, better="lower")
    assert found.value <= found.dense + 0.1


def perplexity(model):
    return 2 - agreement(model)


def test_search_asks_which_metric_is_better_if_pruning_raises_it():
    model = build()
    with pytest.raises(ValueError, match=r"strongest setting raises the metric from 1 to .*pass better='lower'"):
        sc.search(model, perplexity, drop=0.1)
    assert sc.search(model, perplexity, drop=0.1, better="lower").value <= 1.1
    assert sc.search(model, perplexity, drop=0.1, better="higher", tolerance=0.3).best.numbers["prune.sparsity"] == 0.98


def test_search_refuses_a_drop_as_large_as_the_metric():
    with pytest.raises(ValueError, match=r"drop=5 lets the metric fall from 1 to 0 and below.*pass drop=0\.05"):
        sc.search(build(), agreement, drop=5)
    assert sc.search(build(), perplexity, drop=5, better="lower", tolerance=0.3).drop == 5  # a perplexity may rise by 5


def test_sensitivity_finds_out_which_metric_is_better():
    given = {"levels": (0.5, 0.9)}
    high, low = sc.sensitivity(build(), agreement, **given), sc.sensitivity(build(), perplexity, **given)
    assert (high.better, low.better) == ("higher", "lower")
    assert "lower is better" in str(low)
    assert low.recommend(sparsity=0.6) == pytest.approx(high.recommend(sparsity=0.6), abs=1e-3)


def test_search_counts_the_weights_of_compressed_layers():
    stages = [{"prune": {"sparsity": 0.5}}, {"compress": {"objective": "size"}}]
    options = {"drop": 0.9, "example_inputs": X[:1], "vary": {"prune.sparsity": (0.8, 0.9)}, "tolerance": 0.6}
    packed = sc.search(build(), agreement, stages, **options)
    plain = sc.search(build(), agreement, stages[:1], **options)
    assert packed.results[1].compressed
    assert [(one.parameters, one.zeros) for one in packed.tried] == [(one.parameters, one.zeros) for one in plain.tried]
    assert all(0 < one.left < one.parameters for one in packed.tried)


@pytest.mark.parametrize("call", [sc.search, sc.sensitivity])
@pytest.mark.parametrize(
    ("evaluate", "message"),
    [(0.92, "evaluate=0.92 must be a function"), (lambda: 0.92, "called with one argument, the model")],
    ids=["number", "no argument"],
)
def test_evaluate_must_be_a_function_of_a_model(call, evaluate, message):
    with pytest.raises(TypeError, match=message):
        call(build(), evaluate)


@pytest.mark.parametrize("levels", [0.5, "high"])
def test_levels_are_several_numbers(levels):
    with pytest.raises(TypeError, match=r"levels=.* must be several sparsities .*\(0.5, 0.7, 0.9\)"):
        sc.sensitivity(build(), agreement, levels=levels)


def test_search_with_a_recipe_of_the_package_and_data():
    found = sc.search(build(), agreement, "sparsegpt-50", drop=0.2, data=iter([X[:32], X[32:]]), tolerance=0.1)
    assert found.recipe.stages[0].arguments["method"] == "sparsegpt"


def test_a_search_that_finds_nothing_says_so():
    model = build()
    with pytest.raises(ValueError, match=r"even prune.sparsity=0\.0\d+ drops the metric by 1, from 1 to 0, and drop=0.01"):
        sc.search(model, lambda other: float(same(other, state(model))))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"drop": -1}, "drop=-1"),
        ({"tolerance": 0}, "tolerance=0"),
        ({"better": "up"}, "'higher'"),
        ({"vary": "prune.sparsty"}, r"Did you mean"),
        ({"vary": "prune.floor"}, r"say its range"),
        ({"recipe": [{"prune": {"pattern": "2:4"}}]}, "no sparsity and no target"),
    ],
)
def test_wrong_arguments_of_search(arguments, message):
    with pytest.raises(ValueError, match=message):
        sc.search(build(), agreement, **arguments)


def test_search_prints_and_serializes():
    found = sc.search(build(), agreement, drop=0.1, tolerance=0.1)
    assert "chosen" in str(found)
    assert "too much" in str(found)
    json.dumps(found.to_dict())
    assert all(isinstance(value, int | float) for value in found.metrics().values())
    sweep = found.sweep()
    assert sweep["chosen"] in [point["sparsity"] for point in sweep["lines"][0]["points"]]
    assert sc.report(*found.results, before=build(), after=found.model, sweep=sweep, seconds=0, disk=False)
