"""User code for torch.nn.utils.prune runs with only the import changed."""

from __future__ import annotations

import copy
import pickle
from unittest import mock

import pytest
import torch
from torch import nn

from secateur.drop_in import prune

from .conftest import distinct

PATH = "secateur.drop_in.prune"


# --- methods of one's own -------------------------------------------------------------------------------------------


class EveryOther(prune.BasePruningMethod):
    """Prunes every other element, as the method in torch's pruning tutorial does."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.view(-1)[::2] = 0
        return mask


def every_other(module, name):
    EveryOther.apply(module, name)
    return module


class Below(prune.BasePruningMethod):
    """Writes to the mask that it receives, as user code does."""

    PRUNING_TYPE = "unstructured"

    def __init__(self, threshold):
        self.threshold = threshold

    def compute_mask(self, tensor, default_mask):
        default_mask[tensor.abs() < self.threshold] = 0
        return default_mask


class FirstRows(prune.BasePruningMethod):
    PRUNING_TYPE = "structured"

    def __init__(self, count, dim=0):
        self.count, self.dim = count, dim

    def compute_mask(self, t, default_mask):
        mask = default_mask.clone()
        mask.index_fill_(self.dim, torch.arange(self.count), 0)
        return mask

    @classmethod
    def apply(cls, module, name, count, dim=0):
        return super().apply(module, name, count=count, dim=dim)


class Gentler(prune.L1Unstructured):
    """Calls the method of its base class."""

    def compute_mask(self, t, default_mask):
        mask = super().compute_mask(t, default_mask)
        mask[..., 0] = 1
        return mask


class Scaled(prune.L1Unstructured):
    """Overrides `apply_mask`."""

    def apply_mask(self, module):
        return super().apply_mask(module) * 2


def test_tutorial_method():
    module = every_other(nn.Linear(4, 3), "bias")
    assert module.bias_mask.tolist() == [0.0, 1.0, 0.0]
    every_other(module, "bias")
    assert module.bias_mask.tolist() == [0.0, 0.0, 0.0]


def test_method_that_writes_into_the_default_mask():
    module = nn.Linear(3, 2, bias=False)
    module.weight.data = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]])
    prune.custom_from_mask(module, "weight", torch.tensor([[1, 1, 1], [1, 1, 0]]))
    before = module.weight_mask
    Below.apply(module, "weight", 3)
    assert module.weight_mask.tolist() == [[0.0, 0.0, 1.0], [1.0, 1.0, 0.0]]
    assert before.sum() == 5


def test_structured_method_sees_only_channels_that_are_left():
    module = nn.Linear(3, 4)
    FirstRows.apply(module, "weight", 1)
    FirstRows.apply(module, "weight", 1)
    assert module.weight_mask.sum(1).tolist() == [0.0, 0.0, 3.0, 3.0]


def test_subclass_that_calls_super():
    module = nn.Linear(4, 4)
    Gentler.apply(module, "weight", 1.0)
    assert module.weight_mask.sum(0).tolist() == [4.0, 0.0, 0.0, 0.0]


def test_own_apply_mask_is_used_everywhere():
    module = nn.Linear(4, 4)
    Scaled.apply(module, "weight", 0.5)
    twice = 2 * module.weight_mask * module.weight_orig
    for m in (module, copy.deepcopy(module), pickle.loads(pickle.dumps(module)), module.to(torch.float32)):
        assert torch.equal(m.weight, twice)
    prune.remove(module, "weight")
    assert torch.equal(module.weight, twice)


@pytest.mark.parametrize("method", [EveryOther, lambda: Below(0.1)])
def test_own_method_in_a_global_call(method):
    layers = [nn.Linear(5, 3), nn.Linear(3, 3)]
    flat = torch.cat([layer.weight.detach().flatten() for layer in layers])
    made = method()
    made._tensor_name = "flat"
    expected = made.compute_mask(flat, torch.ones_like(flat))
    prune.global_unstructured([(layer, "weight") for layer in layers], method)
    assert torch.equal(torch.cat([layer.weight_mask.flatten() for layer in layers]), expected)


# --- tests that patch -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("L1Unstructured", lambda m: prune.l1_unstructured(m, "weight", 0.9)),
        ("RandomUnstructured", lambda m: prune.random_unstructured(m, "weight", 0.9)),
        ("LnStructured", lambda m: prune.ln_structured(m, "weight", 0.9, 2, 0)),
    ],
)
def test_patched_compute_mask_decides(name, call):
    module = nn.Linear(5, 2)
    mask = torch.ones(2, 5)
    mask[1, 0] = 0
    with mock.patch(f"{PATH}.{name}.compute_mask", return_value=mask):
        call(module)
    assert module.weight_mask is mask


@pytest.mark.parametrize("name", ["L1Unstructured", "RandomUnstructured"])
def test_patched_compute_mask_decides_in_a_global_call(name):
    module = nn.Linear(5, 2)
    mask = torch.tensor([1.0, 1, 1, 1, 1, 0, 1, 1, 1, 1])
    with mock.patch(f"{PATH}.{name}.compute_mask", return_value=mask):
        prune.global_unstructured([(module, "weight")], getattr(prune, name), amount=0.9)
    assert torch.equal(module.weight_mask, mask.view(2, 5))


def test_patched_failure_rolls_back():
    module = nn.Linear(5, 2)
    failing = mock.patch(f"{PATH}.L1Unstructured.compute_mask", side_effect=RuntimeError("HA!"))
    with failing, pytest.raises(RuntimeError, match="HA!"):
        prune.l1_unstructured(module, "weight", 0.5)
    assert list(dict(module.named_parameters())) == ["weight", "bias"]
    assert not dict(module.named_buffers())


# --- looking at hooks -----------------------------------------------------------------------------------------------


def test_hook_and_container_are_where_users_look():
    module = nn.Conv2d(2, 4, 3)
    hook = prune.L1Unstructured.apply(module, "weight", amount=0.1)
    assert next(iter(module._forward_pre_hooks.values())) is hook
    assert (hook._tensor_name, hook.amount) == ("weight", 0.1)
    container = prune.LnStructured.apply(module, "weight", 0.3, n=2, dim=0)
    (found,) = module._forward_pre_hooks.values()
    assert found is container
    assert isinstance(container, prune.PruningContainer)
    assert (len(container), container[0], container[-1].n, next(iter(container))) == (2, hook, 2, hook)
    assert prune.RandomUnstructured.apply(module, "weight", 0.1) is container
    assert [type(method).__name__ for method in container] == ["L1Unstructured", "LnStructured", "RandomUnstructured"]
    assert container[1:] == tuple(container)[1:]


def test_hooks_of_others_keep_their_place():
    module, seen = nn.Linear(4, 4), []
    prune.l1_unstructured(module, "weight", 0.1)
    module.register_forward_pre_hook(lambda m, inputs: seen.append(m.weight.detach().clone()))
    prune.l1_unstructured(module, "weight", 0.5)
    with torch.no_grad():
        module.weight_orig.mul_(3)
    module(torch.ones(1, 4))
    assert torch.equal(seen[0], module.weight_orig * module.weight_mask)


def test_original_is_the_same_parameter_with_its_gradient():
    module = nn.Linear(4, 4)
    parameter = module.weight
    module(torch.ones(1, 4)).sum().backward()
    grad = parameter.grad
    prune.l1_unstructured(module, "weight", 0.5)
    assert module.weight_orig is parameter
    assert parameter.grad is grad
    assert not module.weight.is_leaf
    assert "weight" in vars(module)
    prune.remove(module, "weight")
    assert module.weight is parameter


def test_gradient_of_the_masked_weight_is_dense():
    module = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    (grad,) = torch.autograd.grad(module(torch.ones(2, 4)).sum(), module.weight)
    assert grad.ne(0).all()


def test_is_pruned_looks_inside():
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4)))
    assert not prune.is_pruned(model)
    prune.identity(model[0][0], "bias")
    assert prune.is_pruned(model)
    assert prune.remove(model[0][0], "bias") is model[0][0]
    assert not prune.is_pruned(model)


def test_lottery_ticket_rewinding():
    model = nn.Sequential(nn.Linear(6, 5), nn.Linear(5, 2))
    start = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        model(torch.randn(4, 6)).pow(2).sum().backward()
        optimizer.step()
        pairs = [(m, "weight") for m in model.modules() if type(m) is nn.Linear]
        prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.2)
        with torch.no_grad():
            for name, layer in model.named_children():
                layer.weight_orig.copy_(start[f"{name}.weight"])
    left = sum(int(layer.weight_mask.sum()) for layer in model)
    assert left == 40 - 8 - 6 - 5
    for layer in model:
        prune.remove(layer, "weight")
    assert sum(int(layer.weight.ne(0).sum()) for layer in model) == left


# --- other parts of torch -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind):
    module = kind(4, 4)
    prune.l1_unstructured(module, "weight_ih_l0", 1.0)
    plain = kind(4, 4)
    state = {key.replace("_orig", ""): value for key, value in module.state_dict().items() if not key.endswith("_mask")}
    plain.load_state_dict(state | {"weight_ih_l0": torch.zeros_like(state["weight_ih_l0"])})
    x = torch.randn(3, 2, 4)
    assert torch.equal(module(x)[0], plain(x)[0])
    assert sum(isinstance(w, nn.Parameter) for w in module._flat_weights) == 3
    prune.remove(module, "weight_ih_l0")
    assert sum(isinstance(w, nn.Parameter) for w in module._flat_weights) == 4
    assert torch.equal(module(x)[0], plain(x)[0])


def test_transformer_encoder_layer_trains_with_everything_pruned():
    model = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    pairs = [(m, n) for m in model.modules() for n, p in list(m._parameters.items()) if p is not None and p.dim() > 1]
    prune.global_unstructured(pairs, prune.L1Unstructured, amount=0.5)
    optimizer = torch.optim.Adam(model.parameters())
    x = torch.randn(2, 3, 8)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).pow(2).sum().backward()
        optimizer.step()
    assert all(getattr(m, n + "_orig").grad.ne(0).any() for m, n in pairs)
    model.eval()
    with torch.no_grad():
        out = model(x)
    for m, n in pairs:
        prune.remove(m, n)
    assert torch.allclose(model.train()(x), out, atol=1e-6)


def build():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.ln_structured(model[0], "weight", 0.5, 2, 0)
    return model


def test_compile_without_graph_breaks():
    model, x = build(), torch.randn(2, 8)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(2):
        loss = compiled(x).pow(2).sum()
        assert torch.allclose(loss, model(x).pow(2).sum())
        loss.backward()
        optimizer.step()
    assert torch.equal(model[0].weight, model[0].weight_orig * model[0].weight_mask)
    compiled(x)
    assert torch.equal(copy.deepcopy(model)(x), model(x))


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_export_and_trace():
    model, x = build().eval(), torch.randn(2, 8)
    assert torch.allclose(torch.export.export(model, (x,)).module()(x), model(x))
    assert torch.allclose(torch.jit.trace(model, x)(x), model(x))


def test_functional_call_uses_the_parameters_given():
    model, x = build(), torch.randn(2, 8)
    zero = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, zero, (x,)), torch.zeros(2, 4))
    grads = torch.func.grad(lambda p: torch.func.functional_call(model, p, (x,)).sum())(zero)
    assert grads.keys() == zero.keys()
    copy.deepcopy(model)(x).sum().backward()


def test_meta_tensors():
    module = nn.Linear(4, 4, device="meta")
    prune.l1_unstructured(module, "weight", 0.5)
    prune.random_unstructured(module, "bias", 0.5)
    assert module.weight_mask.is_meta
    assert module.weight.is_meta
    module.to_empty(device="cpu")
    assert module.weight.device.type == "cpu"


def test_frozen_parameters():
    module = nn.Linear(4, 4).requires_grad_(False)
    prune.l1_unstructured(module, "weight", 0.5)
    assert not module.weight.requires_grad
    assert int(module.weight.ne(0).sum()) == 8


def test_tied_weights_are_pruned_in_both_places():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    a.weight.data = distinct((4, 4), torch.float32)
    b.weight = a.weight
    prune.global_unstructured([(a, "weight"), (b, "weight")], prune.L1Unstructured, amount=0.5)
    assert torch.equal(a.weight_mask, b.weight_mask)
    assert a.weight_orig is b.weight_orig
    new = copy.deepcopy(nn.ModuleList([a, b]))
    assert new[0].weight_orig is new[1].weight_orig


@pytest.mark.parametrize("amount", [0, 0.5])
def test_masks_have_memory_of_their_own(amount):
    for call in (
        lambda m: prune.identity(m, "weight"),
        lambda m: prune.l1_unstructured(m, "weight", amount),
        lambda m: prune.random_unstructured(m, "weight", amount),
        lambda m: prune.ln_structured(m, "weight", amount, 2, 0),
        lambda m: prune.random_structured(m, "weight", amount, 1),
        lambda m: prune.global_unstructured([(m, "weight")], prune.L1Unstructured, amount=amount),
    ):
        module = nn.Linear(4, 6)
        call(module)
        assert module.weight_mask.is_contiguous()
        module.weight_mask[0, 0] = 5  # would change every element of an expanded mask
        assert int((module.weight_mask == 5).sum()) == 1


def test_a_shallow_copy_works_and_keeps_itself_fresh():
    layer = prune.l1_unstructured(nn.Linear(6, 5), "weight", 0.5)
    twin = copy.copy(layer)
    x = torch.randn(2, 6)
    assert torch.equal(twin(x), layer(x))
    assert twin.weight_orig is layer.weight_orig
    assert torch.equal(pickle.loads(pickle.dumps(twin))(x), layer(x))
