"""What the results of `prune_`, `shrink_`, `compress_` and `gate_` have in common, and what they print."""

import copy
import pickle

import pytest
import torch
from torch import nn

import secateur as sc


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).eval()


X = torch.randn(3, 8)


def by_prune(model):
    return sc.prune_(model, sparsity=0.5, keep_dense=True)


def by_shrink(model):
    return sc.shrink_(model, X, channels=0.5, keep_dense=True)[1]


def by_compress(model):
    return sc.compress_(model, X, objective="size")


def by_gate(model):
    return sc.gate_(model, method="topk")


def sparse_net():
    model = net()
    sc.prune_(model, sparsity=0.9, include="2")
    return model


@pytest.mark.parametrize("change", [by_prune, by_shrink, by_compress, by_gate])
@pytest.mark.parametrize("named", [False, True], ids=["undo_()", "undo_(model)"])
def test_every_result_is_undone_with_and_without_the_model(change, named):
    model = sparse_net()
    before, expected = str(model), model(X)
    result = change(model)
    result.undo_(*([model] if named else []))
    assert str(model) == before
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize("change", [by_prune, by_shrink, by_compress, by_gate])
def test_results_show_their_table_in_an_interactive_session(change):
    result = change(sparse_net())
    assert repr(result) == str(result)


def test_a_result_that_is_taken_for_the_model_says_that_it_is_not():
    plan = sc.prune_(nn.Linear(4, 4), sparsity=0.5)
    for name in ("generate", "eval", "state_dict"):
        with pytest.raises(AttributeError, match=r"'Plan' .* is a result and not the model"):
            getattr(plan, name)
    with pytest.raises(AttributeError, match=r"no attribute 'mask'$"):
        _ = plan.mask
    assert copy.deepcopy(plan).masks.keys() == pickle.loads(pickle.dumps(plan)).masks.keys() == plan.masks.keys()


def test_measurements_show_their_table_in_an_interactive_session():
    small, cut = sc.shrink(net(), X, channels=0.5)
    timed = sc.bench({"before": net(), "after": small}, X, seconds=0.01)
    for result in (cut.verify(), sc.summary(small), sc.report(before=net(), after=small), timed):
        assert repr(result) == str(result)


@pytest.mark.parametrize("change", [by_prune, by_shrink, by_compress, by_gate])
def test_undoing_another_model_is_refused(change):
    result = change(sparse_net())
    with pytest.raises(ValueError, match=r"another model"):
        result.undo_(nn.Linear(5, 2))


@pytest.mark.parametrize("change", [by_prune, by_compress])
def test_a_copied_result_holds_no_model_and_asks_for_it(change):
    model = sparse_net()
    result = change(model)
    size = len(pickle.dumps(result))
    for twin in (copy.deepcopy(result), pickle.loads(pickle.dumps(result))):
        with pytest.raises(ValueError, match=r"call undo_\(model\)"):
            twin.undo_()
    assert size < len(pickle.dumps(model)) + 10_000
    twin.undo_(model)


def test_compress_in_train_mode_says_that_the_model_does_not_run():
    model = sparse_net().train()
    result = sc.compress_(model, X, objective="size")
    assert result.compressed
    assert "call model.eval()" in str(result)
    assert "call model.eval()" in result._repr_html_()
    model.eval()
    assert "eval()" not in str(result)
    model(X)


def test_gates_print_the_sparsity_also_where_it_was_not_given():
    assert str(sc.gate_(net(), method="topk")).startswith("gates (topk) that zero 50.00% of the inputs")


class Heads(nn.Module):
    """Attention with 4 heads of 8 channels."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out, self.heads, self.width = nn.Linear(32, 96), nn.Linear(32, 32), 4, 8

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, self.heads, self.width).permute(2, 0, 3, 1, 4)
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_the_table_of_shrink_says_what_a_unit_is():
    _, plan = sc.shrink(Heads(), torch.randn(2, 5, 32), channels=0.75)
    rows = {line.split()[0]: line for line in str(plan).splitlines() if line.startswith("qkv")}
    assert "24 rows" in rows["qkv.weight[0]"]  # the queries, keys and values of one head
    assert {group.name: group.each for group in plan.groups}["qkv.weight[0]"] == 24
    assert "fc.weight[0] are the rows of fc.weight" in str(plan)
    assert plan.to_dict()["groups"][0]["each"]


def test_the_table_of_shrink_says_what_a_block_is():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3)))
    _, plan = sc.shrink(model, X, depth=0.67)
    assert "1 block" in str(plan)
    assert "fc.weight" not in str(plan)


def test_the_tables_call_what_they_skip_skipped():
    plans = sc.plan(net(), sparsity=0.5, exclude="0"), sc.shrink(net(), X, channels=0.5, exclude="0")[1]
    for plan in plans:
        assert "\nskipped, " in str(plan)
        assert " skipped</summary>" in plan._repr_html_()


def test_verify_prints_a_verdict_and_its_scale():
    model = net()
    _, plan = sc.shrink(model, X, channels=0.5)
    good = plan.verify()
    assert good.exact
    assert str(good).startswith("the small model equals the masked one up to rounding: max_error ")
    assert "(rounding of the weights: 1.2e-07)" in str(good)
    with torch.no_grad():
        plan.small[4].bias += 1
    bad = plan.verify()
    assert not bad.exact
    assert str(bad).startswith("the small model differs from the masked one: max_error ")


def test_the_verdict_of_verify_goes_by_the_dtype_of_the_model():
    model = net().double()
    _, plan = sc.shrink(model, X.double(), channels=0.5)
    assert plan.verify().exact
    with torch.no_grad():
        plan.small[4].bias += 1e-9
    assert not plan.verify().exact
