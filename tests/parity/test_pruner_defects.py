"""Defects of torch's structured pruner that are fixed here. Each test in `FIXED` passes for ours and fails for torch's."""

from __future__ import annotations

import copy
import pickle
import warnings

import pytest
import torch
import torch.ao.pruning._experimental.pruner as theirs
import torch.nn.functional as F
from torch import nn

import secateur.drop_in.ao_pruning._experimental.pruner as ours

FIXED = {}


def fixed(test):
    FIXED[test.__name__] = test
    return test


class Net(nn.Module):
    """A module with these layers and this forward function."""

    def __init__(self, forward, **layers):
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.way = forward

    def forward(self, *x):
        return self.way(self, *x)


class Recurrent(nn.Module):
    def __init__(self, kind=nn.LSTM, **settings):
        super().__init__()
        self.rnn = kind(8, 8, **settings)
        self.head = nn.Linear(settings.get("proj_size", 8) * (2 if settings.get("bidirectional") else 1), 4)

    def forward(self, x):
        return self.head(self.rnn(x)[0])


def images():
    return torch.randn(2, 3, 8, 8, dtype=torch.float64)


def rows(*shape):
    return torch.randn(*(shape or (2, 8)), dtype=torch.float64)


def prepared(library, model, layers, kind="SaliencyPruner", **settings):
    """Prepares a double-precision copy with random BatchNorm statistics, and masks half of the rows of these layers."""
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().eval()
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            for tensor in (module.running_mean, module.weight.data, module.bias.data):
                tensor.normal_()
            module.running_var.uniform_(0.5, 2.0)
    pruner = getattr(library, kind)({"sparsity_level": 0.5, **settings})
    config = layers and [one if isinstance(one, dict) else {"tensor_fqn": one} for one in layers]
    pruner.prepare(model, config)
    pruner.step()
    return model, pruner


def shrinks_exactly(library, model, layers, x, smaller=True, **settings):
    """Asserts that prune() keeps the output of the masked model and removes parameters."""
    model, pruner = prepared(library, model, layers, **settings)
    before, size = model(x), sum(p.numel() for p in model.parameters())
    pruned = pruner.prune()
    torch.testing.assert_close(pruned(x), before, rtol=1e-9, atol=1e-9)
    assert not smaller or sum(p.numel() for p in pruned.parameters()) < size
    return pruned


# --- the bias of a prepared layer -------------------------------------------------------------------------------------


@fixed
def a_bias_gets_its_gradient(library):
    model, _ = prepared(library, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ["0.weight"])
    model(rows()).sum().backward()
    assert model[0]._bias.grad.count_nonzero() > 0


@fixed
def a_frozen_bias_stays_frozen(library):
    layer = nn.Linear(8, 8)
    layer.bias.requires_grad_(False)
    model, pruner = prepared(library, nn.Sequential(layer, nn.ReLU(), nn.Linear(8, 4)), ["0.weight"])
    assert not model[0]._bias.requires_grad
    assert not pruner.prune().get_submodule("0").bias.requires_grad


@fixed
def a_forward_pass_leaves_the_values_of_a_bias_alone(library):
    model, _ = prepared(library, nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), ["0.weight"])
    before = model[0]._bias.clone()
    model(rows())
    assert torch.equal(model[0]._bias, before)


@fixed
def a_bias_belongs_to_the_features_of_a_sequence(library):
    plain = nn.Sequential(nn.Linear(8, 6)).double()
    model, _ = prepared(library, plain, ["0.weight"], sparsity_level=0.0)
    x = rows(2, 6, 8)
    torch.testing.assert_close(model(x), plain(x))


@fixed
def unbatched_inputs_run(library):
    for plain, x in ((nn.Linear(8, 6), rows(8)), (nn.Conv2d(3, 5, 1), rows(3, 4, 4))):
        model, _ = prepared(library, nn.Sequential(plain), ["0.weight"], sparsity_level=0.0)
        torch.testing.assert_close(model(x), copy.deepcopy(plain).double()(x))


# --- what lies between, after and beside layers -----------------------------------------------------------------------

CONV, NEXT = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
CHAINS = {
    "batch_norm": (nn.Sequential(CONV, nn.BatchNorm2d(8), nn.ReLU(), NEXT), images),
    "dropout": (nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(), nn.Linear(8, 4)), rows),
    "conv_transpose": (nn.Sequential(CONV, nn.ReLU(), nn.ConvTranspose2d(8, 4, 2)), images),
    "conv1d": (nn.Sequential(nn.Conv1d(3, 8, 3), nn.ReLU(), nn.Conv1d(8, 4, 1)), lambda: rows(2, 3, 9)),
    "conv3d": (nn.Sequential(nn.Conv3d(3, 8, 2), nn.ReLU(), nn.Conv3d(8, 4, 1)), lambda: rows(2, 3, 4, 4, 4)),
    "depthwise": (nn.Sequential(CONV, nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8, padding=1), nn.ReLU(), NEXT), images),
    "prelu_with_channels": (nn.Sequential(CONV, nn.PReLU(8), NEXT), images),
    "activation_then_pool_then_flatten": (
        nn.Sequential(CONV, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4)),
        images,
    ),
    "sigmoid": (nn.Sequential(nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 4)), rows),
    "softplus_without_bias": (nn.Sequential(nn.Linear(8, 8, bias=False), nn.Softplus(), nn.Linear(8, 4, bias=False)), rows),
    "sigmoid_of_a_convolution": (nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.Sigmoid(), NEXT), images),
    "sequence": (nn.Sequential(nn.Linear(8, 6), nn.GELU(), nn.Linear(6, 4)), lambda: rows(2, 5, 8)),
    "padded_successor": (nn.Sequential(CONV, nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)), images),
}


def _chain(name):
    def test(library):
        model, x = CHAINS[name]
        pruned = shrinks_exactly(library, model, ["0.weight"], x())
        assert len(pruned.get_submodule("0").weight) == model[0].weight.shape[0] // 2

    FIXED[f"units_before_{name}_go"] = test


for _name in CHAINS:
    _chain(_name)


@fixed
def every_reader_of_a_layer_follows(library):
    model = Net(lambda s, x: s.b(s.a(x)) + s.c(s.a(x)), a=nn.Conv2d(3, 8, 1), b=nn.Conv2d(8, 4, 1), c=nn.Conv2d(8, 4, 1))
    twice = Net(lambda s, x: s.b(y := s.a(x)) + s.c(y), a=model.a, b=model.b, c=model.c)
    for one in (model, twice):
        shrinks_exactly(library, one, ["a.weight"], images())


@fixed
def both_sides_of_a_sum_lose_what_both_have_masked(library):
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(3, 8, 1), "c": nn.Conv2d(8, 4, 1)}
    layers["b"].weight.data = layers["a"].weight.data * 2
    model = Net(lambda s, x: s.c(F.relu(s.a(x) + s.b(x))), **layers)
    shrinks_exactly(library, model, ["a.weight", "b.weight"], images())


@fixed
def the_parts_of_a_concatenation_go_one_by_one(library):
    model = Net(
        lambda s, x: s.c(torch.cat([s.a(x), s.b(x)], 1)), a=nn.Conv2d(3, 4, 1), b=nn.Conv2d(3, 6, 1), c=nn.Conv2d(10, 4, 1)
    )
    pruned = shrinks_exactly(library, model, ["a.weight", "b.weight"], images())
    assert pruned.c.in_channels == 5


@fixed
def a_grouped_convolution_loses_the_same_channels_in_each_group(library):
    first = nn.Conv2d(3, 8, 1)
    first.weight.data[[0, 1, 4, 5]] *= 0.01
    model = nn.Sequential(first, nn.Conv2d(8, 6, 1, groups=2), nn.ReLU(), nn.Conv2d(6, 3, 1))
    pruned = shrinks_exactly(library, model, ["0.weight"], images())
    assert pruned.get_submodule("1").weight.shape == (6, 2, 1, 1)


@fixed
def a_separable_block_loses_what_its_depthwise_layer_has_masked(library):
    block = [nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8), nn.ReLU6()]
    model = nn.Sequential(nn.Conv2d(3, 8, 1), *block, nn.Conv2d(8, 4, 1))
    assert shrinks_exactly(library, model, ["3.weight"], images()).get_submodule("0").out_channels == 4


@fixed
def a_unit_that_a_masked_layer_multiplies_goes(library):
    def gated(s, x):
        y = F.silu(s.a(x))
        return s.out(y * torch.sigmoid(s.up(F.relu(s.down(y.mean((2, 3), keepdim=True))))))

    layers = {
        "a": nn.Conv2d(3, 8, 1),
        "down": nn.Conv2d(8, 4, 1),
        "up": nn.Conv2d(4, 8, 1),
        "out": nn.Conv2d(8, 4, 3, padding=1),
    }
    assert shrinks_exactly(library, Net(gated, **layers), ["a.weight"], images()).out.in_channels == 4


@fixed
def a_unit_that_something_else_makes_stays_even_if_these_inputs_do_not_show_it(library):
    layers = {"a": nn.Conv2d(3, 8, 1), "b": nn.Conv2d(3, 8, 1), "c": nn.Conv2d(8, 4, 1)}
    layers["b"].weight.data.abs_()
    layers["b"].bias.data.fill_(-100.0)  # the ReLU after it is zero for ordinary inputs
    model, pruner = prepared(library, Net(lambda s, x: s.c(F.relu(s.a(x) + s.b(x))), **layers), ["a.weight"])
    loud = images().abs() * 1000
    model(images())
    before = model(loud)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.testing.assert_close(pruner.prune()(loud), before)


@fixed
def under_padding_units_go_whose_constant_an_activation_shuts(library):
    shift = nn.BatchNorm2d(8)
    model, pruner = prepared(
        library, nn.Sequential(CONV, shift, nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1)), ["0.weight"], prune_bias=False
    )
    x, mask = images(), model[0].parametrizations.weight[0].mask
    model[1].running_mean.zero_()
    model[1].weight.data.fill_(1.0)
    model[1].bias.data.fill_(5.0)
    model[1].bias.data[(~mask).nonzero()[:2, 0]] = -5.0
    before = model(x)
    with pytest.warns(UserWarning, match="zero padding of 3"):
        pruned = pruner.prune()
    torch.testing.assert_close(pruned(x), before, rtol=1e-9, atol=1e-9)
    assert pruned.get_submodule("3").in_channels == 6


@fixed
def a_constant_that_an_average_with_padding_changes_keeps_its_unit(library):
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.AvgPool2d(3, 1, 1), nn.ReLU(), nn.Conv2d(8, 4, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shrinks_exactly(library, model, ["0.weight"], images(), smaller=False, prune_bias=False)


@fixed
def a_pool_after_a_layer_without_bias_has_no_constant(library):
    model = nn.Sequential(nn.Conv2d(3, 8, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
    shrinks_exactly(library, model, ["0.weight"], images(), prune_bias=False)


@fixed
def the_last_layer_keeps_the_bias_of_what_it_keeps(library):
    for plain, x in ((nn.Linear(8, 8), rows()), (nn.Conv2d(3, 8, 1), images())):
        model, pruner = prepared(library, nn.Sequential(plain), ["0.weight"], prune_bias=False)
        expected = model(x)[:, model[0].parametrizations.weight[0].mask]
        torch.testing.assert_close(pruner.prune()(x), expected)


@fixed
def layers_may_differ_in_prune_bias(library):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    for first, second in ((False, True), (True, False)):
        config = [{"tensor_fqn": "0.weight", "prune_bias": first}, {"tensor_fqn": "2.weight", "prune_bias": second}]
        shrinks_exactly(library, model, config, rows())


@fixed
def a_failing_conversion_leaves_the_model_as_it_was(library):
    def fail(*_):
        raise ValueError("no")

    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Dropout(), nn.Linear(8, 4)).double().eval()
    pruner = library.SaliencyPruner({"sparsity_level": 0.5})
    pruner.patterns = {
        (nn.Linear, nn.Linear): library.prune_functions.prune_linear_linear,
        (nn.Linear, nn.Dropout, nn.Linear): fail,
    }
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "1.weight"}])
    pruner.step()
    x = rows()
    before, state = model(x), {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="no"):
        pruner.prune()
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert torch.equal(model(x), before)
    assert model[0].out_features == 8


# --- recurrent layers -------------------------------------------------------------------------------------------------

HIDDEN = ["rnn.weight_ih_l0", "rnn.weight_hh_l0"]


def _recurrent(name, layers=None, kind=nn.LSTM, **settings):
    def test(library):
        pruned = shrinks_exactly(library, Recurrent(kind, **settings), layers, rows(5, 2, 8))
        assert pruned.rnn.hidden_size == 4

    FIXED[f"units_of_{name}_go"] = test


_recurrent("an_lstm", HIDDEN)
_recurrent("an_lstm_without_bias", HIDDEN, bias=False)
_recurrent("a_bidirectional_lstm", [*HIDDEN, "rnn.weight_ih_l0_reverse", "rnn.weight_hh_l0_reverse"], bidirectional=True)
_recurrent("an_lstm_with_projection", HIDDEN, proj_size=3)
_recurrent("an_lstm_of_two_layers", [*HIDDEN, "rnn.weight_ih_l1", "rnn.weight_hh_l1"], num_layers=2)
_recurrent("a_gru", HIDDEN, kind=nn.GRU)


@fixed
def an_lstm_needs_no_config(library):
    model = Recurrent(num_layers=2)
    model.head = nn.Identity()
    model, pruner = prepared(library, model, None)
    assert [group["tensor_name"] for group in pruner.groups] == [f"weight_{k}_l{i}" for i in (0, 1) for k in ("ih", "hh")]
    x = rows(5, 2, 8)
    before, kept = model(x), model.rnn.parametrizations.weight_ih_l0[0].mask[:8]
    torch.testing.assert_close(pruner.prune()(x), before[..., kept], rtol=1e-9, atol=1e-9)


@fixed
def one_masked_matrix_of_an_lstm_is_no_reason_to_fail(library):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        shrinks_exactly(library, Recurrent(), HIDDEN[1:], rows(5, 2, 8), smaller=False, kind="LSTMSaliencyPruner")


# --- life with masks --------------------------------------------------------------------------------------------------


@fixed
def a_prepared_model_loads_what_it_saved(library):
    for plain, name in ((nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), "0.weight"), (Recurrent(), HIDDEN[0])):
        model, _ = prepared(library, plain, [name])
        model.load_state_dict(model.state_dict())


@fixed
def prepared_models_and_pruners_can_be_pickled(library):
    model, pruner = prepared(library, nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), ["0.weight"])
    x = rows()
    again = pickle.loads(pickle.dumps(pruner))
    assert torch.equal(again.model(x), model(x))
    torch.testing.assert_close(again.prune()(x), model(x), rtol=1e-9, atol=1e-9)


@fixed
def filters_nearest_to_all_others_are_pruned_once(library):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 10, 1, bias=False), nn.Conv2d(10, 2, 1))
    model[0].weight.data[:, 0, 0, 0] = torch.tensor([5.0, 5.1, 5.2, 5.3, 5.4, 5.5, 5.6, 5.7, 5.8, 5.9])
    pruner = library.FPGMPruner(0.3)
    pruner.prepare(model, [{"tensor_fqn": "0.weight"}])
    for _ in range(5):
        pruner.step()
        assert int((~model[0].parametrizations.weight[0].mask).sum()) == 3


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name):
    FIXED[name](ours)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.filterwarnings("ignore")
def test_torch_has_the_defect(name):
    with pytest.raises((Exception, pytest.fail.Exception)):
        FIXED[name](theirs)
