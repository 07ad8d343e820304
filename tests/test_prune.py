"""`prune_`: zeros in plain weights, nothing else; and the defects of older ways that must not come back."""

import copy

import pytest
import torch
from torch import nn

import secateur as sc


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))


def test_the_state_dict_of_a_pruned_model_loads_in_the_dense_one():
    model = net()
    sc.prune_(model, sparsity=0.5)
    dense = net()
    assert list(model.state_dict()) == list(dense.state_dict())
    dense.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(dense[0].weight, model[0].weight)


def test_a_pruned_model_is_copied_saved_and_loaded_like_any_other(tmp_path):
    model = net()
    sc.prune_(model, sparsity=0.5)
    twin = copy.deepcopy(model)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    loaded = net()
    loaded.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    x = torch.randn(3, 16)
    assert torch.equal(twin(x), model(x))
    assert torch.equal(loaded(x), model(x))


def test_parameters_stay_the_same_objects_with_their_gradients_and_order():
    model = net()
    before = [(name, id(p), p.requires_grad) for name, p in model.named_parameters()]
    model[0].weight.grad = torch.ones(32, 16)
    sc.prune_(model, sparsity=0.5)
    assert [(name, id(p), p.requires_grad) for name, p in model.named_parameters()] == before
    assert (model[0].weight.grad == 1).all()
    assert all(not module._forward_pre_hooks for module in model.modules())


def test_a_sparsity_is_a_fraction_of_the_original_however_often_it_is_asked():
    model = net()
    first = sc.prune_(model, sparsity=0.5)
    second = sc.prune_(model, sparsity=0.5)
    assert second.masks == first.masks
    third = sc.prune_(model, sparsity=0.75)
    assert third.metrics()["sparsity"] == 0.75
    assert third.masks & first.masks == third.masks


def test_second_prune_keeps_first_mask_under_a_pattern():
    model = net()
    first = sc.prune_(model, sparsity=0.25)
    second = sc.prune_(model, pattern="2:4")
    zeros = {name: model.get_parameter(name) != 0 for name in first.masks}
    assert sc.Masks(zeros) & first.masks == sc.Masks(zeros)
    assert second.masks.sparsity == 0.5


def test_sparsity_zero_and_one_are_nothing_and_everything():
    model = net()
    before = model[0].weight.detach().clone()
    sc.prune_(model, sparsity=0.0)
    assert torch.equal(model[0].weight, before)
    sc.prune_(model, sparsity=1.0)
    assert not model[0].weight.any()
    assert not model[2].weight.any()


@pytest.mark.filterwarnings("ignore:nothing is left of")  # 0.999 leaves nothing of a row
@pytest.mark.parametrize("scope", ["tensor", "global", "row"])
@pytest.mark.parametrize("sparsity", [0.1, 1 / 3, 0.5, 0.999])
def test_counts_are_exact(scope, sparsity):
    model = net()
    plan = sc.prune_(model, sparsity=sparsity, scope=scope)
    wanted = {
        "tensor": round(sparsity * 512) + round(sparsity * 256),
        "global": round(sparsity * 768),
        "row": 32 * round(sparsity * 16) + 8 * round(sparsity * 32),
    }[scope]
    assert plan.metrics()["pruned"] == wanted
    assert sum(int((p == 0).sum()) for name, p in model.named_parameters() if name in plan.masks) == wanted


def test_a_thousand_ties_do_not_all_go():
    layer = nn.Linear(100, 100)
    nn.init.ones_(layer.weight)
    plan = sc.prune_(layer, sparsity=0.25)
    assert int((layer.weight == 0).sum()) == 2500
    assert not plan.masks["weight"].reshape(-1)[:2500].any()


def test_optimizers_see_the_zeros_at_once():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sc.prune_(model, sparsity=0.5)
    assert optimizer.param_groups[0]["params"][0] is model[0].weight
    model(torch.randn(4, 16)).sum().backward()
    optimizer.step()
    out = torch.nn.functional.linear(torch.ones(1, 16), model[0].weight, model[0].bias)
    assert torch.equal(model[0](torch.ones(1, 16)), out)


def test_a_pruned_model_compiles_exports_and_scripts_as_before():
    model = net().eval()
    sc.prune_(model, sparsity=0.5)
    x = torch.randn(3, 16)
    exported = torch.export.export(model, (x,)).module()
    torch.testing.assert_close(exported(x), model(x))
    assert all(node.op != "call_function" or "mul" not in str(node.target) for node in exported.graph.nodes)
