"""Structured pruning of recurrent layers: returned states, and masks per gate."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import torch.ao.pruning._experimental.pruner as theirs
from torch import nn
from torch.testing._internal.common_pruning import LSTMLayerNormLinearModel, LSTMLinearModel
from torch.utils._pytree import tree_leaves

import secateur.drop_in.ao_pruning._experimental.pruner as ours

RETURNS = {
    "output": lambda model, out, h, c: model.head(out),
    "state": lambda model, out, h, c: (h, c),
    "both": lambda model, out, h, c: (model.head(out), (h, c)),
    "hidden sequence and state": lambda model, out, h, c: (out, (h, c)),
    "state read by a layer": lambda model, out, h, c: (model.read(torch.relu(h)), h),
    "state of the last layer": lambda model, out, h, c: model.read(h[-1]),
    "joined states": lambda model, out, h, c: torch.cat([h, c], -1),
    "state with the batch first": lambda model, out, h, c: (h.transpose(0, 1), c.transpose(0, 1).flatten(1)),
}


class Recurrent(nn.Module):
    def __init__(self, returns="output", kind=nn.LSTM, **settings):
        super().__init__()
        self.rnn = kind(3, 4, **settings)
        self.head = nn.Linear(8 if self.rnn.bidirectional else 4, 2)
        self.read = nn.Linear(4, 2)
        self.returns = RETURNS[returns]

    def forward(self, x):
        out, state = self.rnn(x)
        h, c = (state[0], state[1]) if isinstance(self.rnn, nn.LSTM) else (state, state)
        return self.returns(self, out, h, c)


def prepared(library, model, kind, level=0.5):
    torch.manual_seed(0)
    model = copy.deepcopy(model).double().eval()
    pruner = getattr(library, kind)({"sparsity_level": level})
    names = [name for name, _ in model.named_parameters() if "weight_ih" in name or "weight_hh" in name]
    pruner.prepare(model, [{"tensor_fqn": name} for name in names])
    pruner.step()
    return model, pruner


def masks(pruner):
    return {name: entry["mask"] for name, entry in pruner.state.items()}


def without_units(tensor, kept):
    """Removes the hidden units from the last dimension, which may hold the units of several layers."""
    return tensor[..., kept.repeat(tensor.shape[-1] // len(kept))] if tensor.shape[-1] % len(kept) == 0 else tensor


@pytest.mark.parametrize("returns", RETURNS)
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_models_may_return_the_state_of_a_recurrent_layer(kind, num_layers, bidirectional, batch_first, returns):
    settings = {"num_layers": num_layers, "bidirectional": bidirectional, "batch_first": batch_first}
    model, pruner = prepared(ours, Recurrent(returns, kind, **settings), "SaliencyPruner")
    x, kept = torch.randn(5, 2, 3, dtype=torch.float64), masks(pruner)["rnn.weight_ih_l0"][:4]
    before = tree_leaves(model(x))
    pruned = pruner.prune()
    assert pruned.rnn.hidden_size == 2
    for small, large in zip(tree_leaves(pruned(x)), before, strict=True):
        torch.testing.assert_close(small, without_units(large, kept), rtol=1e-9, atol=1e-9)


class DropsUnits(ours.BaseStructuredSparsifier):
    """Masks the units `drops[layer]` in all gates of each layer."""

    def __init__(self, drops):
        super().__init__({})
        self.drops = drops

    def update_mask(self, module, tensor_name, **kwargs):
        for gate in module.parametrizations[tensor_name][0].mask.split(module.hidden_size):
            gate[self.drops[int(tensor_name[-1])]] = False


@pytest.mark.parametrize("second", [[2, 3], [1, 2, 3]], ids=["as many", "more"])
def test_layers_may_lose_different_units_of_a_returned_state(second):
    torch.manual_seed(0)
    model = Recurrent("state", num_layers=2).double().eval()
    pruner = DropsUnits([[0, 1], second])
    pruner.prepare(model, [{"tensor_fqn": f"rnn.weight_{k}_l{i}"} for i in (0, 1) for k in ("ih", "hh")])
    pruner.step()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    before = model(x)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*could not remove all")
        pruned = pruner.prune()
    assert pruned.rnn.hidden_size == 2
    for small, large in zip(pruned(x), before, strict=True):
        for layer, drops in enumerate(pruner.drops):
            alive = [unit for unit in range(4) if unit not in drops]
            found = small[layer][..., small[layer].abs().amax(0) > 0]
            torch.testing.assert_close(found, large[layer][..., alive], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", [LSTMLinearModel, LSTMLayerNormLinearModel])
def test_the_recurrent_models_that_torch_tests_with_can_be_pruned(kind, num_layers):
    class BottomHalf(ours.BaseStructuredSparsifier):
        def update_mask(self, module, tensor_name, **kwargs):
            for one in module.parametrizations[tensor_name]:
                for gate in one.mask.split(len(one.mask) // 4):
                    gate[len(gate) // 2 :] = False

    model = kind(8, 8, 8, num_layers).eval()
    pruner = BottomHalf({})
    names = [f"lstm.weight_{k}_l{i}" for i in range(num_layers) for k in ("ih", "hh")]
    pruner.prepare(model, [{"tensor_fqn": name} for name in names])
    pruner.step()
    x = torch.ones(1, 8)
    before = model(x)[0]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="(?s).*a layer norm")
        pruned = pruner.prune()
    assert model.lstm.hidden_size == 4
    assert pruned(x)[0].shape == before.shape
    if kind is LSTMLinearModel:
        torch.testing.assert_close(pruned(x)[0], before)


# --- masks per gate ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", [0.0, 0.3, 0.5, 1.0])
@pytest.mark.parametrize("settings", [{}, {"num_layers": 2}, {"bidirectional": True}], ids=str)
def test_each_gate_chooses_its_rows_as_in_torch(settings, level):
    (_, mine), (_, other) = [
        prepared(library, Recurrent(**settings), "LSTMSaliencyPruner", level) for library in (ours, theirs)
    ]
    assert masks(mine).keys() == masks(other).keys()
    assert all(torch.equal(mask, masks(other)[name]) for name, mask in masks(mine).items())
    assert all(int((~gate).sum()) == int(4 * level) for mask in masks(mine).values() for gate in mask.split(4))


def test_the_three_gates_of_a_gru_choose_their_rows():
    _, pruner = prepared(ours, Recurrent(kind=nn.GRU), "LSTMSaliencyPruner")
    assert all(int((~gate).sum()) == 2 for mask in masks(pruner).values() for gate in mask.split(4))


def with_smallest(units_of_gates):
    """Makes an LSTM of one layer in which these units have the smallest rows of each gate, in both weights."""
    model = Recurrent()
    for name in ("weight_ih_l0", "weight_hh_l0"):
        weight = getattr(model.rnn, name).data
        weight.uniform_(1, 2)
        for gate, units in zip(weight.split(4), units_of_gates, strict=True):
            gate[units] /= 10
    return model


def test_the_cut_removes_the_units_that_all_gates_mask():
    model, pruner = prepared(ours, with_smallest([[0, 1], [0, 2], [0, 3], [0, 1]]), "LSTMSaliencyPruner")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    before = model(x)
    with pytest.warns(UserWarning, match=r"rnn\.weight_ih_l0: .*SaliencyPruner"):
        pruned = pruner.prune()
    assert pruned.rnn.hidden_size == 3
    torch.testing.assert_close(pruned(x), before, rtol=1e-9, atol=1e-9)
    assert pruner.skipped.keys() == {"rnn.weight_ih_l0", "rnn.weight_hh_l0"}


def test_units_stay_where_the_gates_do_not_agree_on_any():
    model, pruner = prepared(ours, with_smallest([[0, 1], [2, 3], [0, 1], [2, 3]]), "LSTMSaliencyPruner")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    before = model(x)
    with pytest.warns(UserWarning, match="could not remove all masked units"):
        pruned = pruner.prune()
    torch.testing.assert_close(pruned(x), before, rtol=1e-9, atol=1e-9)
    assert pruned.rnn.hidden_size == 4


def test_gates_that_agree_are_removed_without_a_warning():
    model, pruner = prepared(ours, with_smallest([[0, 3]] * 4), "LSTMSaliencyPruner")
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    before = model(x)
    pruned = pruner.prune()
    assert pruned.rnn.hidden_size == 2
    torch.testing.assert_close(pruned(x), before, rtol=1e-9, atol=1e-9)
