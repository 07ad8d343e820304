"""A recipe is checked before any model is touched."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import secateur as sc


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def third_fails(weight):
    if weight.shape == (4, 8):
        raise RuntimeError("the third layer")
    return weight.abs()


def third_is_nan(weight):
    return weight.abs() * (math.nan if weight.shape == (4, 8) else 1)


def third_has_another_shape(weight):
    return weight.abs()[:, :4] if weight.shape == (4, 8) else weight.abs()


VALUE, TYPE = ValueError, TypeError
WRONG = {
    "sparsity above one": ({"sparsity": 1.2}, VALUE, r"sparsity=1\.2.*0 to 1"),
    "sparsity below zero": ({"sparsity": -0.1}, VALUE, r"sparsity=-0\.1.*0 to 1"),
    "a percentage": ({"sparsity": 80}, VALUE, r"sparsity=80.*fraction"),
    "sparsity nan": ({"sparsity": math.nan}, VALUE, "sparsity=nan"),
    "sparsity infinite": ({"sparsity": math.inf}, VALUE, "sparsity=inf"),
    "sparsity bool": ({"sparsity": True}, TYPE, "sparsity=True.*number"),
    "sparsity text": ({"sparsity": "0.5"}, TYPE, "sparsity='0.5'.*number"),
    "sparsity list": ({"sparsity": [0.5]}, TYPE, "sparsity=.*number"),
    "sparsity complex": ({"sparsity": 0.5j}, TYPE, "sparsity=.*number"),
    "both budgets": ({"sparsity": 0.5, "count": 3}, VALUE, "give one of them"),
    "no budget": ({}, VALUE, "say how much to prune"),
    "2:4 and 0.7": ({"pattern": "2:4", "sparsity": 0.7}, VALUE, r"'2:4' is 0\.5 sparse.*0\.7"),
    "2:4 and a schedule": ({"pattern": "2:4", "sparsity": sc.cubic(0.5, end=9)}, VALUE, "'2:4'"),
    "2:4 and scope": ({"pattern": "2:4", "scope": "global"}, VALUE, "'2:4'.*scope="),
    "2:4 and count": ({"pattern": "2:4", "count": 3}, VALUE, "'2:4'.*count="),
    "2:4 and spread": ({"pattern": "2:4", "spread": sc.erk}, VALUE, "'2:4'.*spread="),
    "exclude nothing": ({"sparsity": 0.5, "exclude": "nope"}, VALUE, "exclude='nope' matches no"),
    "include nothing": ({"sparsity": 0.5, "include": "nope"}, VALUE, "include='nope' matches no"),
    "no target": ({"sparsity": 0.5, "exclude": "*"}, VALUE, "no tensor of Sequential is left"),
    "no type": ({"sparsity": 0.5, "types": [nn.Conv2d]}, VALUE, "no tensor of Sequential is left"),
    "scope": ({"sparsity": 0.5, "scope": "layer"}, VALUE, "scope='layer'.*'tensor', 'global', 'row'"),
    "scope number": ({"sparsity": 0.5, "scope": 1}, VALUE, "scope=1"),
    "spread and global": ({"sparsity": 0.5, "spread": sc.erk, "scope": "global"}, VALUE, "spread=.*drop one"),
    "spread and count": ({"count": 3, "spread": sc.erk}, VALUE, "spread=.*drop one"),
    "spread text": ({"sparsity": 0.5, "spread": "erc"}, VALUE, r"spread=.erc. is not one of .*Did you mean .erk"),
    "spread list": ({"sparsity": 0.5, "spread": ["erk"]}, TYPE, r"spread= is sc\.uniform"),
    "spread number": ({"sparsity": 0.5, "spread": {"0.weight": 2.0}}, VALUE, r"spread\['0\.weight'\]=2\.0"),
    "count too large": ({"count": 65}, VALUE, r"count=65.*'0\.weight'.*64"),
    "count too large for the third": ({"count": 33}, VALUE, r"count=33.*'4\.weight'.*32"),
    "count too large for a row": ({"count": 9, "scope": "row"}, VALUE, "count=9.*row.*8"),
    "count negative": ({"count": -1}, VALUE, "count=-1"),
    "count fraction": ({"count": 0.5}, (TYPE, VALUE), r"count=0\.5.*sparsity="),
    "count bool": ({"count": True}, (TYPE, VALUE), "count=True"),
    "count text": ({"count": "3"}, (TYPE, VALUE), "count='3'"),
    "pattern": ({"sparsity": 0.5, "pattern": "2of4"}, VALUE, "pattern '2of4' is not understood"),
    "out by row": ({"sparsity": 0.5, "pattern": "out", "scope": "row"}, VALUE, 'use scope="tensor"'),
    "criterion raises": ({"criterion": third_fails, "sparsity": 0.5}, RuntimeError, "the third layer"),
    "criterion nan": ({"criterion": third_is_nan, "sparsity": 0.5}, VALUE, r"'4\.weight'.*NaN"),
    "criterion nan globally": ({"criterion": third_is_nan, "sparsity": 0.5, "scope": "global"}, VALUE, r"'4\.weight'.*NaN"),
    "criterion nan in 2:4": ({"criterion": third_is_nan, "pattern": "2:4"}, VALUE, r"'4\.weight'.*NaN"),
    "criterion shape": (
        {"criterion": third_has_another_shape, "sparsity": 0.5},
        VALUE,
        r"must give float scores of shape \(4, 8\)",
    ),
    "criterion text": ({"criterion": "magnitudo", "sparsity": 0.5}, VALUE, "Did you mean 'magnitude'"),
    "no data": ({"criterion": sc.wanda, "sparsity": 0.5}, VALUE, "pass data="),
    "used up data": ({"criterion": sc.wanda, "sparsity": 0.5, "data": iter(())}, VALUE, "gave no batch"),
    "data is a batch": ({"criterion": sc.wanda, "sparsity": 0.5, "data": torch.ones(2, 8)}, TYPE, r"pass \[batch\]"),
    "no loss": ({"criterion": sc.taylor, "sparsity": 0.5, "data": [torch.ones(2, 8)]}, VALUE, "pass loss="),
}


def state(model):
    flat = {name: value.detach().clone().numpy().tobytes() for name, value in model.state_dict().items()}
    return flat, [module.training for module in model.modules()], [p.grad is None for p in model.parameters()]


@pytest.mark.parametrize("case", WRONG)
@pytest.mark.parametrize("verb", [sc.prune_, sc.plan])
def test_a_wrong_argument_raises_a_sentence_and_touches_nothing(verb, case):
    kwargs, error, words = WRONG[case]
    model = net()
    before = state(model)
    with pytest.raises(error, match=words):
        verb(model, **{"criterion": sc.magnitude, **kwargs})
    assert state(model) == before


@pytest.mark.parametrize(
    "case", [case for case in WRONG if "data" not in case and "loss" not in case and "2:4 and" not in case]
)
def test_a_pruner_refuses_the_same(case):
    kwargs, error, words = WRONG[case]
    model = net()
    before = state(model)
    with pytest.raises(error, match=words):
        sc.Pruner(model, **{"criterion": sc.magnitude, **kwargs}).step()
    assert state(model) == before


def test_pruning_once_by_a_schedule_is_refused():
    """At step 0 most schedules say 0, and nothing would be pruned without a word."""
    for verb in (sc.prune_, sc.plan):
        with pytest.raises((TypeError, ValueError), match=r"Pruner"):
            verb(net(), sparsity=sc.cubic(0.9, end=100))


def test_nan_weights_are_named_and_nothing_is_touched():
    model = net()
    with torch.no_grad():
        model[2].weight[3, 3] = math.nan
    before = state(model)
    with pytest.raises(ValueError, match=r"'2\.weight'.*NaN"):
        sc.prune_(model, sparsity=0.5)
    assert state(model) == before


@pytest.mark.parametrize("sparsity", [0.5, Fraction(1, 2), np.float64(0.5), np.float32(0.5), np.float16(0.5)], ids=repr)
def test_any_real_number_is_a_sparsity(sparsity):
    assert sc.plan(nn.Linear(300, 500), sparsity=sparsity).metrics()["pruned"] == 75_000


def test_whole_numbers_zero_and_one_are_sparsities():
    assert sc.plan(net(), sparsity=0).metrics()["pruned"] == 0
    assert sc.plan(net(), sparsity=1).metrics()["kept"] == 0


def test_an_n_of_m_pattern_may_repeat_its_own_sparsity():
    assert sc.plan(net(), pattern="2:4", sparsity=0.5).masks == sc.plan(net(), pattern="2:4").masks
    assert sc.plan(net(), pattern="1:3", sparsity=2 / 3).metrics()["tensors"] == 3


@pytest.mark.parametrize("count", [3, np.int64(3)])
def test_a_count_is_a_number_of_units_in_each_pool(count):
    assert [layer.total - layer.kept for layer in sc.plan(net(), count=count).layers] == [3, 3, 3]
    assert sc.plan(net(), count=count, scope="global").metrics()["pruned"] == 3
    assert sc.plan(net(), count=count, scope="row").metrics()["pruned"] == 3 * 20
    assert sc.plan(net(), count=count, pattern="out").metrics()["pruned"] == 3 * 8 * 3
