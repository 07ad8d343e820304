"""The history of a model (shrink, prune, in order) is recorded in it, saved with it and restored."""

import copy
import json

import pytest
import torch
from saving import X, build, resign, same

import secateur as sc
from secateur import io


def steps(model):
    return sc.summary(model).history


def test_pruning_after_shrinking_records_both(tmp_path):
    """The manifest held the recipe of `shrink` only; that of `prune_` was lost unless it was passed as plan=."""
    small, cut = sc.shrink(build(), X, channels=0.5)
    pruned = sc.prune_(small, pattern="2:4")
    said = io.save(small, tmp_path)
    wanted = [["shrink", cut.recipe], ["prune", pruned.recipe]]
    assert said["history"] == wanted
    assert said["recipe"] == pruned.recipe
    again = io.load(tmp_path, build)
    assert same(again, small)
    assert [list(step) for step in steps(again)] == wanted
    assert io.save(again, tmp_path / "second")["history"] == wanted
    third, cut_again = sc.shrink(again, X, channels=0.8)
    assert io.save(third, tmp_path / "third")["history"] == [*wanted, ["shrink", cut_again.recipe]]


@pytest.mark.parametrize("given", ["prune", "shrink"])
def test_a_plan_that_is_passed_hides_nothing(tmp_path, given):
    """With plan=, the recipe of the other step was the one that was lost."""
    model, cut = sc.shrink_(build(), X, channels=0.5)
    pruned = sc.prune_(model, sparsity=0.5)
    said = io.save(model, tmp_path, plan={"prune": pruned, "shrink": cut}[given])
    assert [what for what, _ in said["history"]] == ["shrink", "prune"]


def test_a_plan_that_the_model_has_no_record_of_is_added(tmp_path):
    model = build()
    plan = sc.plan(model, sparsity=0.5)
    assert io.save(model, tmp_path)["history"] == []
    assert io.save(model, tmp_path, plan=plan)["history"] == [["prune", plan.recipe]]


def test_a_pruner_records_what_it_has_done_so_far(tmp_path):
    """A model saved in the middle of a gradual run said nothing of it."""
    model = build()
    pruner = sc.Pruner(model, sparsity=sc.linear(0.8, end=4))
    for _ in range(2):
        pruner.step()
    assert io.save(model, tmp_path)["history"] == [["prune", "abs(weight), unstructured, sparsity 0.4, scope tensor"]]
    sc.prune_(model, sparsity=0.9, include="4")
    for _ in range(2):
        pruner.step()
    pruner.finish()
    first, second = steps(model)
    assert first == ("prune", "abs(weight), unstructured, sparsity 0.8, scope tensor")
    assert "0.9" in second[1]


def test_a_resumed_pruner_records_no_second_step():
    model = build()
    pruner = sc.Pruner(model, sparsity=0.5)
    pruner.step()
    again = copy.deepcopy(model)
    sc.Pruner(again, sparsity=0.5).load_state_dict(pruner.state_dict())
    assert steps(again) == steps(model)
    assert len(steps(again)) == 1


def test_a_resumed_pruner_records_its_last_masks_not_its_last_step():
    recipe = {"sparsity": sc.linear(0.8, start=2, end=10, every=4)}
    pruner = sc.Pruner(build(), **recipe)
    for _ in range(3):
        pruner.step()
    assert steps(pruner.model) == []
    for _ in range(4):
        pruner.step()
    model = build()
    resumed = sc.Pruner(model, **recipe)
    resumed.load_state_dict(pruner.state_dict())
    assert steps(model) == steps(pruner.model)
    assert "sparsity 0.4," in steps(model)[0][1]
    for _ in range(3):
        resumed.step()
    assert [text for _, text in steps(model)] == ["abs(weight), unstructured, sparsity 0.8, scope tensor"]


def test_what_is_undone_leaves_the_history():
    model = build()
    sc.prune_(model, sparsity=0.3)
    before = steps(model)
    sc.prune_(model, sparsity=0.5, keep_dense=True).undo_(model)
    assert steps(model) == before
    pruner = sc.Pruner(model, sparsity=0.5, keep_dense=True)
    pruner.step()
    pruner.undo_()
    assert steps(model) == before
    _, plan = sc.shrink_(model, X, channels=0.5, keep_dense=True)
    assert len(steps(model)) == 2
    plan.undo_()
    assert steps(model) == before


def test_a_plan_and_a_cut_that_fail_leave_no_record():
    model = build()
    with pytest.raises(ValueError, match="floor"):
        sc.shrink_(model, X, params=0.01, floor=0.9)
    with torch.no_grad():
        model[0].weight[0, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="NaN"):
        sc.prune_(model, sparsity=0.5)
    assert steps(model) == []


def test_copies_compiled_models_and_parts_keep_their_history(tmp_path):
    model = torch.compile(build(), backend="eager")
    plan = sc.prune_(model, sparsity=0.5)
    assert io.save(model, tmp_path)["history"] == [["prune", plan.recipe]]
    part = copy.deepcopy(model._orig_mod)
    whole = torch.nn.Sequential(part, torch.nn.Linear(10, 10))
    assert steps(whole) == [("prune", f"{plan.recipe} (in 0)")]
    outer = sc.prune_(whole, sparsity=0.6)
    assert steps(whole) == [("prune", f"{plan.recipe} (in 0)"), ("prune", outer.recipe)]


def test_load_replaces_the_history_of_the_model_it_fills(tmp_path):
    io.save(build(), tmp_path)
    model = build(1)
    sc.prune_(model, sparsity=0.5)
    assert steps(io.load(tmp_path, model)) == []


def test_a_file_without_a_history_gives_the_cuts(tmp_path):
    """Files that were written before there was a history."""
    small, cut = sc.shrink(build(), X, channels=0.5)
    io.save(small, tmp_path)
    resign(tmp_path, lambda data: data["about"].pop("history"))
    assert steps(io.load(tmp_path, build)) == [("shrink", cut.recipe)]


@pytest.mark.parametrize(
    "wrong", ["prune", ["prune"], [["prune"]], [["prune", 3]], [["a", "b", "c"]], {"a": "b"}, None], ids=str
)
def test_a_history_that_is_none_is_refused(tmp_path, wrong):
    io.save(build(), tmp_path)
    resign(tmp_path, lambda data: data["about"].update(history=wrong))
    with pytest.raises(io.BadFile, match="history of the model must be"):
        io.load(tmp_path, build)


def test_the_manifest_holds_the_history(tmp_path):
    model = build()
    plan = sc.prune_(model, sparsity=0.5)
    io.save(model, tmp_path)
    about = json.loads((tmp_path / "secateur.json").read_text())["about"]
    assert about["history"] == [["prune", plan.recipe]]
