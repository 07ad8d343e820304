"""Compares the structured pruner with torch's where torch's is correct: names, states, masks, shapes, outputs."""

from __future__ import annotations

import copy
import importlib
import inspect
from operator import getitem

import pytest
import torch
import torch.ao.pruning._experimental.pruner as theirs
import torch.nn.functional as F
from torch import nn
from torch.fx import symbolic_trace

import secateur.drop_in.ao_pruning._experimental.pruner as ours

MODULES = (
    "base_structured_sparsifier saliency_pruner lstm_saliency_pruner FPGM_pruner parametrization prune_functions match_utils"
)
THEIRS, OURS = "torch.ao.pruning._experimental.pruner", "secateur.drop_in.ao_pruning._experimental.pruner"
LIBRARIES = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "torch"])


def module(library, name):
    return importlib.import_module(f"{OURS if library is ours else THEIRS}.{name}")


def twins(layers, config, level=0.5, kind="SaliencyPruner", **settings):
    """Prepares and steps a copy of the model with each library."""
    made = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        model = copy.deepcopy(layers).double().eval()
        pruner = (
            getattr(library, kind)({"sparsity_level": level, **settings}) if kind != "FPGMPruner" else library.FPGMPruner(level)
        )
        pruner.prepare(model, config if config is None else [{"tensor_fqn": name} for name in config])
        pruner.step()
        made.append((model, pruner))
    return made


def masks(pruner):
    return {name: entry["mask"] for name, entry in pruner.state.items()}


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODULES.split())
def test_every_name_and_signature_is_there(name):
    mine, other = module(ours, name), module(theirs, name)
    for key, value in vars(other).items():
        if getattr(value, "__module__", None) == other.__name__:
            found = getattr(mine, key)
            assert list(inspect.signature(found).parameters) == list(inspect.signature(value).parameters), key
            if inspect.isclass(value):
                for method in (m for m in vars(value) if inspect.isfunction(vars(value)[m]) and m != "state_dict"):
                    expected = inspect.signature(getattr(value, method)).parameters
                    parameters = inspect.signature(getattr(found, method)).parameters
                    assert list(parameters) == list(expected), f"{key}.{method}"
                    assert [p.default for p in parameters.values()] == [p.default for p in expected.values()]


def test_the_patterns_are_the_same():
    mine, other = module(ours, "base_structured_sparsifier"), module(theirs, "base_structured_sparsifier")
    assert mine._get_supported_structured_pruning_modules() == other._get_supported_structured_pruning_modules()
    assert mine._get_supported_activation_functions() == other._get_supported_activation_functions()
    assert mine._get_supported_activation_modules() == other._get_supported_activation_modules()
    expected = other._get_default_structured_pruning_patterns()
    found = mine._get_default_structured_pruning_patterns()
    assert {key: value.__name__ for key, value in found.items()} == {key: value.__name__ for key, value in expected.items()}


@LIBRARIES
def test_the_base_class_is_abstract(library):
    with pytest.raises(TypeError, match=r"BaseStructuredSparsifier.*update_mask"):
        library.BaseStructuredSparsifier({})


# --- masks and states -------------------------------------------------------------------------------------------------

DEEP = nn.Sequential(nn.Conv2d(3, 10, 3), nn.ReLU(), nn.Conv2d(10, 7, 3), nn.Flatten(), nn.Linear(112, 100), nn.Linear(100, 5))


@pytest.mark.parametrize("kind", ["SaliencyPruner", "FPGMPruner"])
@pytest.mark.parametrize("level", [0.0, 0.29, 0.5, 0.9])
def test_masks_are_the_same(kind, level):
    (_, mine), (_, other) = twins(DEEP, None, level, kind)
    assert masks(mine).keys() == masks(other).keys()
    assert all(torch.equal(mask, masks(other)[name]) for name, mask in masks(mine).items())
    assert [g["tensor_fqn"] for g in mine.groups] == [g["tensor_fqn"] for g in other.groups]


def test_a_share_of_rows_is_rounded_down():
    (_, mine), _ = twins(nn.Sequential(nn.Linear(4, 100), nn.Linear(100, 2)), ["0.weight"], 0.29)
    assert int((~masks(mine)["0.weight"]).sum()) == int(100 * 0.29) == 28


def test_masks_never_come_back():
    for _, pruner in twins(nn.Sequential(nn.Linear(4, 10), nn.Linear(10, 2)), ["0.weight"]):
        pruner.groups[0]["sparsity_level"] = 0.1
        pruner.step()
        assert int((~masks(pruner)["0.weight"]).sum()) == 5


def test_models_and_pruners_have_the_same_state():
    (mine, pruner), (other, expected) = twins(DEEP, ["0.weight", "4.weight"])
    assert list(mine.state_dict()) == list(other.state_dict())
    assert mine[0].bias is None
    assert mine[0].prune_bias is True
    assert torch.equal(mine[0]._bias, other[0]._bias)
    state, their_state = pruner.state_dict(), expected.state_dict()
    assert state["groups"] == their_state["groups"]
    assert state["state"].keys() == their_state["state"].keys()
    assert pruner.state["0.weight"]["mask"] is mine[0].parametrizations.weight[0].mask
    again = ours.SaliencyPruner({"sparsity_level": 0.5})
    fresh = copy.deepcopy(DEEP)
    again.prepare(fresh, [{"tensor_fqn": "0.weight"}])
    again.load_state_dict(their_state)
    assert torch.equal(fresh[4].parametrizations.weight[0].mask, masks(pruner)["4.weight"])
    assert fresh[4].bias is None


@pytest.mark.parametrize("x", [torch.randn(2, 8), torch.randn(2, 8, 8)], ids=["rows", "seq==features"])
def test_masked_models_give_the_same(x):
    """Equal on rows. On sequences torch adds the bias along the wrong dimension."""
    (mine, _), (other, _) = twins(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ["0.weight"])
    same = torch.allclose(mine(x.double()), other(x.double()))
    assert same is (x.dim() == 2)


# --- the smaller model ------------------------------------------------------------------------------------------------

ROWS, IMAGES = (2, 8), (2, 3, 16, 16)
CASES = {
    "linear": ([nn.Linear(8, 6), nn.Linear(6, 5), nn.Linear(5, 4)], ["0.weight", "1.weight"], ROWS),
    "linear without bias": ([nn.Linear(8, 6, bias=False), nn.Linear(6, 4)], ["0.weight"], ROWS),
    "linear relu": ([nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 4)], ["0.weight", "2.weight"], ROWS),
    "conv": ([nn.Conv2d(3, 6, 3), nn.Conv2d(6, 5, 3), nn.Conv2d(5, 4, 1)], ["0.weight", "1.weight"], IMAGES),
    "conv gelu": ([nn.Conv2d(3, 6, 3), nn.GELU(), nn.Conv2d(6, 4, 3)], ["0.weight"], IMAGES),
    "conv relu max pool": ([nn.Conv2d(3, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 4, 3)], ["0.weight"], IMAGES),
    "conv average pool elu": ([nn.Conv2d(3, 6, 3), nn.AvgPool2d(2), nn.ELU(), nn.Conv2d(6, 4, 3)], ["0.weight"], IMAGES),
    "conv pool flatten": (
        [nn.Conv2d(3, 6, 3), nn.AdaptiveAvgPool2d((2, 2)), nn.Flatten(), nn.Linear(24, 4)],
        ["0.weight"],
        IMAGES,
    ),
    "head": ([nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)], ["0.weight", "2.weight"], ROWS),
}


@pytest.mark.filterwarnings("ignore:Converting a tensor with requires_grad")  # torch's
@pytest.mark.parametrize(
    ("name", "prune_bias"),
    [
        (name, prune_bias) for name in CASES for prune_bias in (True, False) if prune_bias or name != "head"
    ],  # torch loses the bias there
)
def test_pruned_models_are_the_same(name, prune_bias):
    layers, config, shape = CASES[name]
    (mine, pruner), (other, expected) = twins(nn.Sequential(*layers), config, prune_bias=prune_bias)
    small, reference = pruner.prune(), expected.prune()
    assert isinstance(small, torch.fx.GraphModule)
    assert pruner.traced is small
    assert {n: p.shape for n, p in small.named_parameters()} == {n: p.shape for n, p in reference.named_parameters()}
    for one, another in zip(mine, other):
        assert str(one) == str(another)
    x = torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(small(x), reference(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(mine(x), small(x))


class BottomHalf:
    """A user-defined pruner that masks the second half of every gate."""

    def update_mask(self, module, tensor_name, **kwargs):
        for one in module.parametrizations[tensor_name]:
            for gate in one.mask.split(len(one.mask) // 4):
                gate[len(gate) // 2 :] = False


class Model(nn.Module):
    def __init__(self, norm=False):
        super().__init__()
        self.lstm = nn.LSTM(8, 6, 2)
        self.norm = nn.LayerNorm(6) if norm else None
        self.head = nn.Linear(6, 4)

    def forward(self, x):
        out, _ = self.lstm(x)
        return self.head(out if self.norm is None else self.norm(out)), out


@pytest.mark.parametrize("norm", [False, True])
def test_recurrent_layers_get_the_same_weights(norm):
    names = [f"lstm.weight_{k}_l{i}" for i in (0, 1) for k in ("ih", "hh")]
    found = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        model = Model(norm)
        pruner = type("Own", (BottomHalf, library.BaseStructuredSparsifier), {})({})
        pruner.prepare(model, [{"tensor_fqn": name} for name in names])
        pruner.step()
        if norm and library is ours:
            with pytest.warns(UserWarning, match="not exactly: a layer norm"):
                pruner.prune()
        else:
            pruner.prune()
        assert model.lstm.hidden_size == 3
        found.append(dict(model.named_parameters()))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, found[1][name], msg=name)


def test_returned_units_of_a_recurrent_layer_go():
    torch.manual_seed(0)
    model = Model()
    pruner = ours.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(model, [{"tensor_fqn": f"lstm.weight_{k}_l{i}"} for i in (0, 1) for k in ("ih", "hh")])
    pruner.step()
    x, kept = torch.randn(1, 8), model.lstm.parametrizations.weight_hh_l0[0].mask[:6]
    head, out = model(x)
    small_head, small_out = pruner.prune()(x)
    torch.testing.assert_close(small_head, head)
    torch.testing.assert_close(small_out, out[:, kept])


# --- the functions by name --------------------------------------------------------------------------------------------

CHAINS = {
    "prune_linear": [nn.Linear(8, 6)],
    "prune_linear_linear": [nn.Linear(8, 6), nn.Linear(6, 4)],
    "prune_linear_activation_linear": [nn.Linear(8, 6), F.relu, nn.Linear(6, 4)],
    "prune_conv2d": [nn.Conv2d(3, 6, 3)],
    "prune_conv2d_padded": [nn.Conv2d(3, 6, 3)],
    "prune_conv2d_conv2d": [nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)],
    "prune_conv2d_activation_conv2d": [nn.Conv2d(3, 6, 3), nn.Tanh(), nn.Conv2d(6, 4, 3)],
    "prune_conv2d_pool_activation_conv2d": [nn.Conv2d(3, 6, 3), F.max_pool2d, nn.ReLU(), nn.Conv2d(6, 4, 3)],
    "prune_conv2d_activation_pool_conv2d": [nn.Conv2d(3, 6, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Conv2d(6, 4, 3)],
    "prune_conv2d_pool_flatten_linear": [nn.Conv2d(3, 6, 3), nn.AdaptiveMaxPool2d(2), torch.flatten, nn.Linear(24, 4)],
    "prune_lstm_output_linear": [nn.LSTM(8, 6), getitem, nn.Linear(6, 4)],
}


@pytest.mark.parametrize("name", CHAINS)
def test_functions_change_their_modules_as_torch_does(name):
    recurrent = "lstm" in name
    names = ["0.weight_ih_l0", "0.weight_hh_l0"] if recurrent else ["0.weight"]
    found = []
    for library in (ours, theirs):
        torch.manual_seed(0)
        chain = copy.deepcopy(CHAINS[name])
        model = nn.Sequential(*(one for one in chain if isinstance(one, nn.Module))).double()
        kind = type("Own", (BottomHalf, library.BaseStructuredSparsifier), {}) if recurrent else library.SaliencyPruner
        pruner = kind({"sparsity_level": 0.5})
        pruner.prepare(model, [{"tensor_fqn": one} for one in names])
        pruner.step()
        if not recurrent:
            model[0](torch.randn((1, 3, 5, 8) if "conv" in name else (1, 8), dtype=torch.float64))  # torch zeroes the bias here
        getattr(module(library, "prune_functions"), name)(*chain)
        found.append(model)
    mine, other = found
    assert str(mine) == str(other)
    for key, value in other.named_parameters():
        torch.testing.assert_close(mine.get_parameter(key), value, msg=key)


def test_a_second_masked_layer_keeps_its_mask():
    model = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 4), nn.Linear(4, 2)).double()
    pruner = ours.SaliencyPruner({"sparsity_level": 0.5, "prune_bias": False})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight"}])
    pruner.step()
    x = torch.randn(3, 8, dtype=torch.float64)
    before, mask = model(x), model[2].parametrizations.weight[0].mask
    module(ours, "prune_functions").prune_linear_activation_linear(model[0], model[1], model[2])
    assert model[2].parametrizations.weight[0].mask is mask
    assert model[2].parametrizations.weight.original.shape == (4, 3)
    torch.testing.assert_close(model(x), before)
    torch.testing.assert_close(pruner.prune()(x), before)


@LIBRARIES
def test_the_parts_of_the_functions_do_the_same(library):
    functions = module(library, "prune_functions")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.Conv2d(6, 4, 3)).double()
    x = torch.randn(1, 3, 8, 8, dtype=torch.float64)
    pruner = library.SaliencyPruner({"sparsity_level": 0.5, "prune_bias": False})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.step()
    before, (first, second) = model(x), model
    mask = functions._prune_conv2d_helper(first)
    gone = functions._propagate_module_bias(first, mask)
    second.bias = functions._get_adjusted_next_layer_bias(second, gone, mask)
    functions._remove_bias_handles(first)
    second.weight = nn.Parameter(second.weight[:, mask])
    torch.testing.assert_close(model(x), before)
    assert (first.out_channels, len(first.bias), len(gone), len(first._forward_hooks)) == (3, 3, 3, 0)
    linear = nn.Linear(4, 6)
    pruner = library.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(nn.Sequential(linear), [{"tensor_fqn": "0.weight"}])
    pruner.step()
    functions._prune_module_bias(linear, functions._prune_linear_helper(linear))
    assert linear(torch.randn(2, 4)).shape == (2, 3)
    with pytest.raises(NotImplementedError):
        functions._get_adjusted_next_layer_bias(nn.Bilinear(4, 4, 2), torch.zeros(1), torch.tensor([True, True, True, False]))


# --- matching ---------------------------------------------------------------------------------------------------------


@LIBRARIES
def test_a_pattern_matches_types_functions_and_names(library):
    match = module(library, "match_utils")
    graph = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)))
    modules, nodes = dict(graph.named_modules()), list(graph.graph.nodes)
    names = [node.name for node in match.apply_match(modules, (nn.Linear, nn.ReLU, nn.Linear), nodes[1], [])]
    assert names == [node.name for node in nodes[1:4]]
    assert match.apply_match(modules, (nn.Linear, nn.Tanh), nodes[1], []) is None
    assert match.apply_match(modules, (nn.Linear, "output"), nodes[3], []) == nodes[3:]
    assert match.apply_match(modules, nn.Linear, nodes[1], []) == [nodes[1]]
    assert match._match(modules, nodes[0], match.MatchAllNode)
    assert not match._match(modules, "no node", nn.Linear)


@LIBRARIES
@pytest.mark.parametrize(
    ("kind", "error"),
    [("SaliencyPruner", KeyError), ("LSTMSaliencyPruner", KeyError)],
)
def test_a_level_has_to_be_given(library, kind, error):
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4))
    pruner = getattr(library, kind)({})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    with pytest.raises(error):
        pruner.step()


@LIBRARIES
def test_wrong_things_are_refused(library):
    with pytest.raises(NotImplementedError):
        library.FPGMPruner(0.3, dist=3)
    pruner = library.SaliencyPruner({"sparsity_level": 0.5})
    pruner.prepare(nn.Sequential(nn.BatchNorm1d(8)), [{"tensor_fqn": "0.weight"}])
    with pytest.raises(Exception, match=r"[Ss]tructured pruning"):
        pruner.step()
    with pytest.raises(AssertionError):
        library.FakeStructuredSparsity(torch.ones(3, dtype=torch.bool))(torch.ones(4, 2))
