"""Structurally pruned models in use: copies, compilation, custom patterns, and errors that change nothing."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from secateur.drop_in.ao_pruning._experimental.pruner import (
    FakeStructuredSparsity,
    FPGMPruner,
    LSTMSaliencyPruner,
    SaliencyPruner,
)
from secateur.drop_in.ao_pruning._experimental.pruner.prune_functions import (
    prune_conv2d_pool_flatten_linear,
    prune_linear_linear,
)


def convolutional():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).double().eval()


def linear():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Dropout(), nn.Linear(6, 4)).double().eval()


def prepared(model, *names, **settings):
    pruner = SaliencyPruner({"sparsity_level": 0.5, **settings})
    pruner.prepare(model, [{"tensor_fqn": name} for name in names or ["0.weight"]])
    pruner.step()
    return pruner


def picture(model):
    """Returns everything that an error must not change."""
    return [
        (type(m), {k: v for k, v in vars(m).items() if not isinstance(v, dict)}, dict(m._parameters), list(m._forward_hooks))
        for m in model.modules()
    ], {name: value.clone() for name, value in model.state_dict().items()}


def same(one, other):
    shapes = [(kind, plain, {k: id(p) for k, p in own.items()}, hooks) for kind, plain, own, hooks in one[0]]
    return shapes == [(kind, plain, {k: id(p) for k, p in own.items()}, hooks) for kind, plain, own, hooks in other[0]] and all(
        torch.equal(value, other[1][name]) for name, value in one[1].items()
    )


IMAGES, ROWS = torch.randn(2, 3, 8, 8, dtype=torch.float64), torch.randn(3, 8, dtype=torch.float64)


# --- copies and compilation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))], ids=["deepcopy", "pickle"])
def test_copies_are_pruned_by_themselves(copied):
    model = convolutional()
    pruner = prepared(model)
    before = model(IMAGES)
    again = copied(pruner)
    small = copied(again.prune())
    torch.testing.assert_close(small(IMAGES), before, rtol=1e-9, atol=1e-9)
    assert again.model[0].out_channels == 4
    assert model[0].out_channels == 8
    assert torch.equal(model(IMAGES), before)
    assert torch.equal(copied(model)(IMAGES), before)
    assert again.patterns == pruner.patterns


def test_prepared_and_pruned_models_compile():
    model = convolutional()
    pruner = prepared(model)
    before = model(IMAGES)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(IMAGES), before)
    small = torch.compile(pruner.prune(), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(small(IMAGES), before)


def test_nothing_of_the_pruner_is_left():
    model = convolutional()
    first, second = model[0].weight, model[0].bias
    keys = list(model.state_dict())
    small = prepared(model).prune()
    assert list(model.state_dict()) == list(small.state_dict()) == keys
    assert not model._forward_hooks
    assert not model[0]._forward_hooks
    assert not hasattr(model[0], "prune_bias")
    assert type(model[0]) is nn.Conv2d
    assert model[0].weight is first  # the same object, which optimizers hold
    assert model[0].bias is second


def test_modes_hooks_and_gradients_survive():
    model = convolutional().train()
    model[1].eval()
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append(1))
    model[0].weight.requires_grad_(False)
    prepared(model, prune_bias=False).prune()
    assert [m.training for m in model] == [True, False, True, True, True]
    assert not model[0].weight.requires_grad
    calls.clear()
    model(IMAGES).sum().backward()
    assert calls == [1]
    assert model[0].bias.grad.shape == (4,)


def test_squashing_writes_the_zeros_and_puts_the_bias_back():
    model = convolutional()
    pruner = prepared(model)
    before, mask = model(IMAGES), model[0].parametrizations.weight[0].mask
    pruner.squash_mask()
    assert not model[0].weight[~mask].any()
    assert not model[0].bias[~mask].any()
    torch.testing.assert_close(model(IMAGES), before)
    assert not model[0]._forward_hooks
    assert not model._forward_hooks


def test_a_second_prepare_adds_to_the_first():
    model = linear()
    pruner = prepared(model, "0.weight")
    mask = model[0].parametrizations.weight[0].mask
    pruner.prepare(model, [{"tensor_fqn": "2.weight"}])
    assert model[0].parametrizations.weight[0].mask is mask
    assert len(model[0]._forward_hooks) == len(model._forward_hooks) == 1
    assert len(pruner.groups) == 2


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 6), nn.Linear(6, 4), nn.Linear(8, 6)
        self.c.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(x)) + self.c(x).mean(-1, keepdim=True)


def test_a_tied_weight_keeps_its_values_elsewhere():
    model = Tied().double()
    before = model.c.weight.clone()
    pruner = prepared(model, "a.weight")
    expected = model(ROWS)
    torch.testing.assert_close(pruner.prune()(ROWS), expected, rtol=1e-9, atol=1e-9)
    assert torch.equal(model.c.weight, before)
    assert model.b.in_features == 3


# --- inputs -----------------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    def __init__(self, *between):
        super().__init__()
        self.a, self.between, self.b = nn.Linear(8, 6), nn.Sequential(*between), nn.Linear(6, 4)

    def forward(self, x, *, scale):
        return self.b(self.between(self.a(x))) * scale


def test_inputs_of_any_kind_are_remembered():
    model = TwoInputs(nn.Dropout()).double().eval()
    pruner = prepared(model, "a.weight")
    expected = model(ROWS, scale=torch.ones(3, 1))
    torch.testing.assert_close(pruner.prune()(ROWS, scale=torch.ones(3, 1)), expected)
    assert model.a.out_features == 3


def test_known_chains_need_no_inputs():
    model = TwoInputs(nn.Sigmoid()).double()
    pruner = prepared(model, "a.weight")
    expected = copy.deepcopy(model)(ROWS, scale=2.0)
    torch.testing.assert_close(pruner.prune()(ROWS, scale=2.0), expected, rtol=1e-9, atol=1e-9)
    assert model.b.in_features == 3


def test_a_model_that_was_never_called_says_so_and_is_left_alone():
    model = TwoInputs(nn.Tanh(), nn.Dropout()).double().eval()
    pruner = prepared(model, "a.weight")
    before = picture(model)
    with pytest.raises(Exception, match=r"still contains FakeStructuredSparsity parametrizations, in a: .*Call it once"):
        pruner.prune()
    assert same(before, picture(model))
    with pytest.raises(TypeError):
        model(ROWS)  # a call that fails does not record inputs
    model(ROWS, scale=2.0)
    pruner.prune()
    assert model.b.in_features == 3


@pytest.mark.parametrize(
    ("model", "x"),
    [
        (nn.Sequential(nn.Embedding(9, 8), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.tensor([[1, 2, 8]])),
        (nn.Sequential(nn.Flatten(0, 1), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 2)), torch.randn(2, 3, 8)),
        (nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 26 * 26, 2)), torch.randn(1, 3, 28, 28)),
    ],
    ids=["embedding", "sequence", "28 pixels"],
)
def test_inputs_are_guessed_from_the_first_layer(model, x):
    name = next(f"{i}.weight" for i, layer in enumerate(model) if isinstance(layer, nn.Linear | nn.Conv2d))
    pruner = prepared(model, name)
    expected = copy.deepcopy(model)(x)
    torch.testing.assert_close(pruner.prune()(x), expected)
    assert len(model.get_parameter(name)) == 3


# --- patterns of one's own --------------------------------------------------------------------------------------------


def test_a_function_of_ones_own_is_called_with_the_chain():
    model, seen = linear(), []

    def own(first, between, second):
        seen.append((first, between, second))
        prune_linear_linear(first, second)

    pruner = SaliencyPruner({"sparsity_level": 0.5}, patterns={(nn.Linear, nn.Dropout, nn.Linear): own})
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.step()
    expected = model(ROWS)
    torch.testing.assert_close(pruner.prune()(ROWS), expected)
    assert seen[-1] == tuple(model)  # the call before that was on a copy
    assert model[2].in_features == 3


def test_a_model_that_fx_cannot_trace_is_returned_itself():
    class Branching(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 6), nn.Linear(6, 4)

        def forward(self, x):
            return self.b(torch.sigmoid(self.a(x))) if x.abs().sum() > 0 else x

    model = Branching().double()
    pruner = prepared(model, "a.weight")
    expected = model(ROWS)
    assert pruner.prune() is model
    torch.testing.assert_close(model(ROWS), expected)
    assert model.b.in_features == 3


# --- what cannot go ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("between", "why"),
    [
        ([nn.Sigmoid(), nn.Conv2d(8, 4, 3, padding=1)], "a constant meets the zero padding of 2"),
        ([nn.Softmax(1), nn.Conv2d(8, 4, 3)], "_softmax in 1"),
    ],
)
def test_units_that_are_needed_stay_as_zeros_and_are_named(between, why):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), *between).double().eval()
    pruner = prepared(model)
    before = model(IMAGES)
    with pytest.warns(UserWarning, match=why):
        small = pruner.prune()
    assert list(pruner.skipped) == ["0.weight"]
    torch.testing.assert_close(small(IMAGES), before, rtol=1e-9, atol=1e-9)
    assert model[0].weight.shape == (8, 3, 3, 3)
    assert int(model[0].weight.flatten(1).any(1).sum()) == 4
    assert not parametrize.is_parametrized(model[0])


def test_one_unit_is_kept_where_all_are_masked():
    model = nn.Sequential(nn.Linear(8, 6), nn.Sigmoid(), nn.Linear(6, 4)).double()
    pruner = FPGMPruner(1.0)
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    pruner.step()
    before = model(ROWS)
    torch.testing.assert_close(pruner.prune()(ROWS), before)
    assert model[0].out_features == 1


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("entry", "error"),
    [
        ({"tensor_fqn": "2.weight", "mask": torch.ones(3, dtype=torch.bool)}, AssertionError),
        ({"tensor_fqn": "2.wieght"}, AttributeError),
        ({"tensor_fqn": "2.weight", "parametrization": lambda mask: None}, (TypeError, ValueError, AttributeError)),
    ],
)
def test_a_failing_prepare_leaves_the_model_as_it_was(entry, error):
    model = linear()
    before = picture(model)
    pruner = SaliencyPruner({"sparsity_level": 0.5})
    with pytest.raises(error):
        pruner.prepare(model, [{"tensor_fqn": "0.weight"}, entry])
    assert same(before, picture(model))
    assert not model._forward_hooks
    assert not pruner.groups
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])


def test_features_have_to_be_a_multiple_of_the_channels():
    layers = nn.Conv2d(3, 5, 1), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(21, 2)
    with pytest.raises(AssertionError, match="21 features, no multiple of the 5 channels"):
        prune_conv2d_pool_flatten_linear(*layers)


def test_a_mask_of_another_length_is_refused_when_loading():
    model = linear()
    pruner = prepared(model)
    state = pruner.state_dict()
    state["state"]["0.weight"]["mask"] = torch.ones(5, dtype=torch.bool)
    with pytest.raises(RuntimeError, match=r"'0.weight' has shape \(5,\)"):
        pruner.load_state_dict(state)
    assert FakeStructuredSparsity(torch.tensor([True, False]))(torch.ones(2, 2)).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize("pruner", [SaliencyPruner, LSTMSaliencyPruner])
def test_a_step_without_a_sparsity_level_says_which_tensor_wants_one(pruner):
    made = pruner({})
    made.prepare(linear(), None)
    with pytest.raises(KeyError, match=r"no 'sparsity_level' for '0\.weight'; give it in its config"):
        made.step()


@pytest.mark.parametrize("pruner", [SaliencyPruner, LSTMSaliencyPruner])
@pytest.mark.parametrize("level", [2.0, -1, "half", None])
def test_a_sparsity_level_that_is_no_share_is_told_with_its_tensor(pruner, level):
    made = pruner({"sparsity_level": level})
    made.prepare(linear(), None)
    with pytest.raises(ValueError, match=r"for '0\.weight' must be the fraction of its rows to prune"):
        made.step()
