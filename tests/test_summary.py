"""`sc.summary`: the sparsity and the pattern of every weight of a model, and what was done to it."""

import json
from html.parser import HTMLParser

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

import secateur as sc


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Conv2d(4, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 16))


X = torch.randn(2, 4, 4, 4, generator=torch.Generator().manual_seed(0))

PATTERNS = {
    "unstructured": {"sparsity": 0.6},
    "2:4": {"pattern": "2:4"},
    "1:4": {"pattern": "1:4"},
    "8:16": {"pattern": "8:16"},
    "16x1": {"pattern": "16x1", "sparsity": 0.5},
    "4x4": {"pattern": "4x4", "sparsity": 0.5},
    "out": {"pattern": "out", "sparsity": 0.5},
    "in": {"pattern": "in", "sparsity": 0.5},
}


def pattern_of(model, name):
    return {layer.name: layer.pattern for layer in sc.summary(model).layers}[name]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_the_pattern_of_a_loaded_model_is_recognized(pattern, tmp_path):
    """Nothing told what a loaded model was pruned like; its recipe had to be known."""
    model = net()
    plan = sc.prune_(model, include="3", **PATTERNS[pattern])
    sc.save(model, tmp_path)
    found = sc.summary(sc.load(tmp_path, net))
    by_name = {layer.name: layer for layer in found.layers}
    assert by_name["3.weight"].pattern == pattern
    assert by_name["3.weight"].sparsity == pytest.approx(plan.metrics()["sparsity"])
    assert by_name["0.weight"].pattern == by_name["5.weight"].pattern == "dense"
    assert found.history == [("prune", plan.recipe)]


@pytest.mark.parametrize("columns", [5, 17, 18, 31])
def test_n_of_m_is_recognized_where_groups_do_not_divide_the_rows(columns):
    layer = nn.Linear(columns, 12)
    sc.prune_(layer, pattern="2:4")
    assert pattern_of(layer, "weight") == "2:4"
    other = nn.Linear(columns, 12)
    sc.prune_(other, sparsity=0.6)
    assert pattern_of(other, "weight") == "unstructured"


def test_a_few_zeros_and_only_zeros():
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight[0, 0] = 0
    (row,) = sc.summary(layer).layers
    assert (row.zeros, row.pattern) == (1, "dense")
    nn.init.zeros_(layer.weight)
    assert pattern_of(layer, "weight") == "all zero"


def test_a_transposed_convolution_is_read_along_its_inputs():
    layer = nn.ConvTranspose2d(8, 16, 1)
    sc.prune_(layer, pattern="2:4")
    assert pattern_of(layer, "weight") == "2:4"


def test_what_the_forward_pass_uses_counts():
    """The parameters under masks (ste=True, torch.nn.utils.prune, parametrizations) are dense."""
    soft = net()
    sc.Pruner(soft, sparsity=0.5, ste=True).step()
    torch_way = net()
    torch_prune.l1_unstructured(torch_way[3], "weight", amount=0.5)
    for model, names in ((soft, ["0.weight", "3.weight", "5.weight"]), (torch_way, ["3.weight"])):
        found = {layer.name: layer.sparsity for layer in sc.summary(model).layers}
        assert list(found) == ["0.weight", "3.weight", "5.weight"]
        assert {name for name, sparsity in found.items() if sparsity == 0.5} == set(names)


def test_compressed_layers_show_their_format_in_their_place():
    model = nn.Sequential(nn.Linear(32, 64), nn.Sequential(nn.Linear(64, 64)), nn.Linear(64, 8)).eval()
    sc.prune_(model, sparsity=0.95)
    sc.compress_(model[1], torch.randn(2, 64), objective="size")
    before = {name: p.clone() for name, p in model.named_parameters()}
    found = sc.summary(model)
    assert [layer.name for layer in found.layers] == ["0.weight", "1.0.weight", "2.weight"]
    assert found.layers[1].sparsity == pytest.approx(0.95, abs=0.001)
    formats = [layer.format for layer in found.layers]
    assert formats[0] == formats[2] == "dense"
    assert formats[1] == model[1][0].form
    assert "format" in str(found).splitlines()[1]
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_a_compiled_model_has_the_names_of_the_bare_one():
    model = net()
    sc.prune_(model, sparsity=0.5)
    found = sc.summary(torch.compile(model, backend="eager"))
    assert found == sc.summary(model)
    assert found.model == "Sequential"


def test_what_cannot_be_read_is_listed():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4))
    model.append(nn.LazyLinear(3))
    found = sc.summary(model)
    assert found.layers == []
    assert found.skipped == {"0.weight": "on the meta device", "1.weight": "not initialised", "1.bias": "not initialised"}
    assert found.metrics()["sparsity"] == 0.0


def test_the_result_prints_counts_and_becomes_plain_data():
    model = net()
    sc.prune_(model, pattern="2:4")
    found = sc.summary(model)
    lines = str(found).splitlines()
    assert lines[0] == "Sequential"
    assert lines[1].split() == ["weight", "shape", "zeros", "of", "sparsity", "pattern"]
    assert lines[4].split() == ["3.weight", "32x64", "1,024", "2,048", "50.00%", "2:4"]
    assert lines[-1] == "1. prune: abs(weight), 2:4"
    assert found.metrics()["sparsity"] == 0.5
    assert found.metrics()["sparsity/5.weight"] == 0.5
    data = json.loads(json.dumps(found.to_dict()))
    assert data["history"] == [["prune", "abs(weight), 2:4"]]
    assert data["layers"][1]["pattern"] == "2:4"
    page = found._repr_html_()
    HTMLParser().feed(page)
    assert "<td>2:4</td>" in page
    assert "1. prune: abs(weight), 2:4" in page
