"""A plan touches nothing, prints as a table, and can be applied and undone bit by bit."""

import copy
import json
import math

import pytest
import torch
from torch import nn

import secateur as sc


def net(dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10), nn.Linear(10, 3)
    ).to(dtype)


def bits(model):
    return {
        name: value.detach().contiguous().view(torch.uint8).clone() if value.ndim else value.clone()
        for name, value in model.state_dict().items()
    }


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "kwargs",
    [{"sparsity": 0.5}, {"sparsity": 0.5, "scope": "global"}, {"pattern": "2:4"}, {"count": 1, "pattern": "out"}],
    ids=str,
)
def test_a_plan_touches_nothing_and_pruning_does_what_it_says(dtype, kwargs):
    model = net(dtype)
    before = bits(model)
    rng = torch.get_rng_state()
    plan = sc.plan(model, **kwargs)
    assert same(bits(model), before)
    assert torch.equal(torch.get_rng_state(), rng)
    twin = copy.deepcopy(model)
    done = sc.prune_(model, **kwargs)
    assert isinstance(done, sc.Plan)
    assert done.masks == plan.masks
    for name, value in model.state_dict().items():
        if name in plan.masks:
            dense = twin.state_dict()[name]
            assert torch.equal(value, torch.where(plan.masks[name], dense, torch.zeros((), dtype=dtype)))
        else:
            assert torch.equal(bits(model)[name], before[name])


def test_a_plan_made_for_one_model_applies_to_its_copy():
    model = net()
    plan = sc.plan(model, sparsity=0.5)
    twin = copy.deepcopy(model)
    assert plan.apply_(twin) is plan
    assert int((twin[4].weight == 0).sum()) == 80


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_undo_brings_every_bit_back(dtype):
    model = net(dtype)
    with torch.no_grad():
        model[4].weight[0, :4] = torch.tensor([-0.0, 0.0, -math.inf, 1e-7], dtype=dtype)
    before = bits(model)
    plan = sc.prune_(model, sc.random(3), sparsity=0.7, keep_dense=True)
    assert not same(bits(model), before)
    plan.undo_(model)
    assert same(bits(model), before)


def test_undo_brings_back_nan_and_its_payload():
    layer = nn.Linear(4, 4)
    with torch.no_grad():
        layer.weight.view(torch.int32)[:, 0] = 0x7FC01234
    before = bits(layer)
    plan = sc.prune_(layer, sc.random(0), sparsity=1.0, keep_dense=True)
    assert (layer.weight == 0).all()
    plan.undo_(layer)
    assert same(bits(layer), before)


def test_undo_leaves_what_was_trained_since():
    layer = nn.Linear(8, 8)
    plan = sc.prune_(layer, sparsity=0.5, keep_dense=True)
    with torch.no_grad():
        layer.weight += plan.masks["weight"] * 1.0
    trained = layer.weight.detach().clone()
    plan.undo_(layer)
    assert torch.equal(layer.weight[plan.masks["weight"]], trained[plan.masks["weight"]])


def test_applying_a_plan_again_does_not_forget_the_dense_values():
    model = net()
    before = bits(model)
    plan = sc.prune_(model, sparsity=0.5, keep_dense=True)
    plan.apply_(model, keep_dense=True)
    plan.undo_(model)
    assert same(bits(model), before)


def test_undo_without_dense_values_is_refused():
    model = net()
    with pytest.raises(ValueError, match="keep_dense=True"):
        sc.prune_(model, sparsity=0.5).undo_(model)


def test_a_plan_for_another_model_is_refused_before_anything_changes():
    plan = sc.plan(net(), sparsity=0.5)
    other = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 10), nn.Linear(10, 4))
    before = bits(other)
    with pytest.raises(ValueError, match=r"'5\.weight' is \(4, 10\) in the model and \(3, 10\)"):
        plan.apply_(other)
    with pytest.raises(ValueError, match=r"'5\.weight'"):
        plan.apply_(net()[:5])
    assert same(bits(other), before)


def test_pruned_weights_are_plus_zero_whatever_they_were():
    for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16):
        layer = nn.Linear(6, 6).to(dtype)
        with torch.no_grad():
            layer.weight[:3] = torch.tensor([-0.0, math.nan, math.inf, -math.inf, -1.0, 1e-7], dtype=dtype)
        plan = sc.prune_(layer, sc.random(1), sparsity=0.6)
        pruned = layer.weight.detach()[~plan.masks["weight"]]
        assert len(pruned) == round(0.6 * 36)
        assert (pruned.view(torch.uint8) == 0).all()


def test_weights_in_any_memory_layout_are_pruned():
    conv = nn.Conv2d(8, 8, 3)
    wanted = sc.plan(conv, sparsity=0.5).masks["weight"]
    last = copy.deepcopy(conv).to(memory_format=torch.channels_last)
    assert not last.weight.is_contiguous()
    assert torch.equal(sc.prune_(last, sparsity=0.5).masks["weight"], wanted)
    assert torch.equal(last.weight != 0, wanted)
    linear = nn.Linear(6, 4)
    linear.weight = nn.Parameter(torch.randn(6, 4).t())
    assert torch.equal(sc.prune_(linear, sparsity=0.5).masks["weight"], linear.weight != 0)


# --- reading a plan ---------------------------------------------------------------------------------------------------


def test_the_table_has_a_line_for_each_tensor_the_whole_and_what_was_left_alone():
    plan = sc.prune_(net(), sparsity=0.5, exclude="5")
    text = str(plan)
    lines = text.splitlines()
    assert lines[0] == "abs(weight), unstructured, sparsity 0.5, scope tensor"
    assert any(line.split() == ["0.weight", "4x2x3x3", "36", "72", "50.00%"] for line in lines)
    assert any(line.split() == ["in", "all", "116", "232", "50.00%"] for line in lines)
    assert any("skipped, 2: excluded (5.weight, 5.bias)" in line for line in lines)
    assert len({len(line) for line in lines if line.endswith("%")}) == 1


def test_zeros_that_were_there_before_are_shown():
    model = net()
    sc.prune_(model, sparsity=0.8, include="4")
    plan = sc.plan(model, sparsity=0.5)
    sc.prune_(model, sparsity=0.5)
    found = sc.summary(model)
    total = plan.metrics()["total"]
    assert plan.metrics()["zeros"] == found.metrics()["zeros"] == 0.5 * (total - 160) + 0.8 * 160
    assert plan.to_dict()["layers"]["4.weight"] == {"kept": 80, "total": 160, "sparsity": 0.5, "zeros": 128}
    lines = str(plan).splitlines()
    assert lines[1].split() == ["tensor", "shape", "kept", "of", "sparsity", "zeros"]
    assert any(line.split() == ["4.weight", "10x16", "80", "160", "50.00%", "80.00%"] for line in lines)
    assert any(line.startswith("0.weight") and line.endswith("50.00%  50.00%") for line in lines)
    assert any(line.startswith("in all") and line.endswith(f"{plan.metrics()['zeros'] / total:.2%}") for line in lines)
    assert any(line.startswith("zeros: ") and "48 that were zero before" in line for line in lines)
    assert "<td>80.00%</td>" in plan._repr_html_()


@pytest.mark.parametrize("rows", [3, 30])
def test_zeros_of_a_large_tensor_are_shown_wherever_they_are(rows):
    weight = torch.rand(1500, 1000) + 1
    weight[-rows:] = 0
    plan = sc.plan({"weight": weight}, sc.magnitude, count=1)
    assert plan.zeros == ({"weight": 30 * 1000 - 1} if rows == 30 else {})  # at most 1 % of zeros are taken for chance


def test_a_plan_of_a_dense_model_has_no_column_of_zeros():
    model = nn.Linear(20, 20)
    kept = sc.plan(model, sc.random(1), sparsity=0.5).masks["weight"].nonzero()[0]
    with torch.no_grad():
        model.weight[tuple(kept)] = 0  # one of 400, as in random weights
    plan = sc.plan(model, sc.random(1), sparsity=0.5)
    assert "zeros" not in str(plan)
    assert "zeros" not in plan.metrics()


def test_new_weights_of_a_sparse_model_are_counted_as_they_are():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    sc.prune_(model, sparsity=0.75)
    plan = sc.prune_(model, sparsity=0.5, method="sparsegpt", data=[torch.randn(64, 8)])
    assert plan.metrics().get("zeros", plan.metrics()["pruned"]) == sc.summary(model).metrics()["zeros"]


def test_too_few_tokens_are_noted():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    few = sc.plan(model, sparsity=0.5, method="flow", data=[torch.randn(9, 8)])
    assert list(few.notes) == ["2.weight"]
    assert few.notes["2.weight"] == "9 tokens of data= for 16 inputs do not determine its weights; pass more"
    assert few.notes["2.weight"] in str(few)
    assert not sc.plan(model, sparsity=0.5, method="flow", data=[torch.randn(16, 8)]).notes


def test_zeros_that_a_solver_fills_are_noted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64))
    data = [torch.randn(256, 64) @ torch.randn(64, 64)]
    assert not sc.plan(model, sparsity=0.8, method="flow", data=data).notes
    sc.prune_(model, sc.random(0), sparsity=0.5)
    filled = sc.plan(model, sparsity=0.8, method="flow", data=data)
    assert any(bool((weight[model.get_parameter(name) == 0] != 0).any()) for name, weight in filled.weights.items())
    assert "it had zeros, and not all of them are left" in str(filled)
    assert not sc.plan(model, sparsity=0.8, method="sparsegpt", data=data).notes


def test_metrics_are_plain_numbers():
    metrics = sc.plan(net(), sparsity=0.5).metrics()
    assert metrics["tensors"] == 3
    assert metrics["total"] == 72 + 160 + 30
    assert metrics["kept"] + metrics["pruned"] == metrics["total"]
    assert metrics["sparsity"] == pytest.approx(0.5)
    assert metrics["sparsity/4.weight"] == 0.5
    assert metrics["skipped"] == 5
    assert all(isinstance(value, int | float) for value in metrics.values())


def test_a_plan_as_a_dict_is_json():
    plan = sc.plan(net(), sparsity=0.5)
    made = json.loads(json.dumps(plan.to_dict()))
    assert made["recipe"] == plan.recipe
    assert made["skipped"] == plan.skipped
    assert made["layers"]["4.weight"] == {"kept": 80, "total": 160, "sparsity": 0.5}


def test_the_html_escapes_names():
    model = nn.ModuleDict({"<b>": nn.Linear(4, 4), "ok": nn.Linear(4, 4)})
    html = sc.plan(model, sparsity=0.5, exclude="ok")._repr_html_()
    assert "&lt;b&gt;.weight" in html
    assert "<b>" not in html
    assert "ok.weight" in html
    assert html.count("<tr>") == 3


def test_layers_and_masks_have_the_same_names_and_counts():
    plan = sc.plan(net(), sparsity=0.3)
    assert [layer.name for layer in plan.layers] == list(plan.masks)
    for layer in plan.layers:
        assert layer.shape == tuple(plan.masks[layer.name].shape)
        assert layer.kept == int(plan.masks[layer.name].sum())
        assert layer.sparsity == pytest.approx(1 - layer.kept / layer.total)


def test_a_plan_by_a_mapping_alone_prints_no_none():
    assert "None" not in str(sc.plan(net(), spread={"*": 0.5}))


def test_undoing_brings_back_what_the_last_application_replaced():
    model = net()
    plan = sc.prune_(model, sparsity=0.5, keep_dense=True)
    plan.undo_(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(10)
    before = bits(model)
    plan.apply_(model, keep_dense=True)
    plan.undo_(model)
    assert same(bits(model), before)


def test_a_plan_keeps_the_dense_values_of_one_model_at_a_time():
    one, other = net(), net()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1)
    plan = sc.prune_(one, sparsity=0.5, keep_dense=True)
    before = bits(other)
    with pytest.raises(ValueError, match="undo that first"):
        plan.apply_(other, keep_dense=True)
    assert same(bits(other), before)
