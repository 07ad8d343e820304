"""Models that were cut: loading cuts a fresh model the same way and fills it."""

import copy

import pytest
import torch
from saving import X, build, same
from torch import nn

import secateur as sc
from secateur import io
from secateur.surgery import shrink, shrink_


def test_a_shrunk_model_is_cut_again_from_a_fresh_one(tmp_path):
    small, plan = shrink(build(), X, channels=0.5)
    assert io.save(small, tmp_path)["recipe"] == plan.recipe
    back = io.load(tmp_path, lambda: build(5))
    assert same(back, small)
    assert torch.equal(back(X), small(X))
    assert back[0].out_channels == small[0].out_channels == 8
    io.save(back, tmp_path / "again")
    assert same(io.load(tmp_path / "again", build), small)


@pytest.mark.parametrize("how", ["twice", "in place", "copied", "inside another", "inside, then as a whole"])
def test_cuts_are_remembered(tmp_path, how):
    def whole():
        return build() if how in ("twice", "in place", "copied") else nn.Sequential(nn.Identity(), build()).eval()

    if how == "twice":
        model, _ = shrink(shrink(build(), X, channels=0.75)[0], X, channels=0.5)
    elif how == "in place":
        model, _ = shrink_(build(), X, channels=0.5)
    elif how == "copied":
        model = copy.deepcopy(shrink(build(), X, channels=0.5)[0])
    else:
        model = nn.Sequential(nn.Identity(), shrink(build(), X, channels=0.75)[0])
        if how != "inside another":
            model, _ = shrink(model, X, channels=0.5)
    io.save(model, tmp_path)
    back = io.load(tmp_path, whole)
    assert same(back, model)
    assert torch.equal(back(X), model(X))


def test_a_model_that_forgot_its_cuts_is_saved_with_its_plan(tmp_path):
    small, plan = shrink(build(), X, channels=0.5)
    rebuilt = nn.Sequential(*small.children()).eval()
    io.save(rebuilt, tmp_path, plan=plan)
    assert same(io.load(tmp_path, build), small)


@pytest.mark.parametrize("options", [{"channels": 0.5}, {"depth": 0.5}], ids=str)
def test_a_plan_of_another_model_is_refused_and_nothing_is_written(tmp_path, options):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(2)))
    small, plan = shrink(model, torch.randn(3, 6), **options)
    for other in (model, nn.Linear(2, 3)):
        with pytest.raises(ValueError, match=r"plan= .* this model h.*save the small model .*Nothing was written"):
            io.save(other, tmp_path / "out", plan=plan)
    assert not (tmp_path / "out").exists()
    io.save(small, tmp_path / "out", plan=plan)


def test_a_model_that_is_small_already_is_filled(tmp_path):
    small, _ = shrink(build(), X, channels=0.5)
    io.save(small, tmp_path)
    other = copy.deepcopy(small)
    with torch.no_grad():
        other[0].weight.zero_()
    assert io.load(tmp_path, other) is other
    assert same(other, small)


def test_a_shrunk_and_pruned_model_comes_back_packed(tmp_path):
    small, _ = shrink(build(), X, channels=0.5)
    sc.prune_(small, sparsity=0.9)
    io.save(small, tmp_path, packed=True)
    assert same(io.load(tmp_path, build), small)


def test_parameters_that_folding_added_come_back(tmp_path):
    def make():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 16), nn.Sigmoid(), nn.Linear(16, 5, bias=False))

    x = torch.randn(3, 6)
    small, plan = shrink(make(), x, channels=0.5)
    assert plan.cuts.added
    io.save(small, tmp_path)
    assert torch.equal(io.load(tmp_path, make)(x), small(x))
