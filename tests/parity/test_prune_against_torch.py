"""Compares `drop_in.prune` with the installed `torch.nn.utils.prune`: the same calls with the same seeds."""

from __future__ import annotations

import copy
import inspect
import io
import pickle

import pytest
import torch
import torch.nn.utils.prune as theirs
from torch import nn

from secateur.drop_in import prune as ours
from secateur.drop_in._masks import random_like

from .conftest import assert_same_state, both, distinct


def custom(prune, module, name="weight"):
    shape = getattr(module, name).shape
    prune.custom_from_mask(module, name, (torch.arange(shape.numel()) % 3 != 0).reshape(shape))


UNSTRUCTURED = {
    "identity": lambda p, m, n="weight": p.identity(m, n),
    "random": lambda p, m, n="weight": p.random_unstructured(m, n, 0.3),
    "random-count": lambda p, m, n="weight": p.random_unstructured(m, n, 3),
    "l1": lambda p, m, n="weight": p.l1_unstructured(m, n, 0.4),
    "l1-count": lambda p, m, n="weight": p.l1_unstructured(m, n, amount=2),
    "l1-none": lambda p, m, n="weight": p.l1_unstructured(m, n, 0.0),
    "l1-all": lambda p, m, n="weight": p.l1_unstructured(m, n, 1.0),
    "l1-scores": lambda p, m, n="weight": p.l1_unstructured(
        m, n, 0.4, importance_scores=distinct(getattr(m, n).shape, getattr(m, n).dtype, 99)
    ),
    "custom": custom,
}
STRUCTURED = {
    "random-structured": lambda p, m: p.random_structured(m, "weight", 0.4, 0),
    "random-structured-last": lambda p, m: p.random_structured(m, "weight", 1, -1),
    "ln-2-0": lambda p, m: p.ln_structured(m, "weight", 0.4, 2, 0),
    "ln-1-1": lambda p, m: p.ln_structured(m, "weight", 1, n=1, dim=1),
    "ln-inf--1": lambda p, m: p.ln_structured(m, "weight", 1, float("inf"), -1),
    "ln--inf": lambda p, m: p.ln_structured(m, "weight", 0.3, -float("inf"), 0),
    "ln-0.5": lambda p, m: p.ln_structured(m, "weight", 0.4, 0.5, 0),
    "ln-none": lambda p, m: p.ln_structured(m, "weight", 0, 2, 0),
    "ln-all": lambda p, m: p.ln_structured(m, "weight", 1.0, 2, 0),
    "ln-scores": lambda p, m: p.ln_structured(
        m, "weight", 0.4, 2, 0, importance_scores=distinct(m.weight.shape, m.weight.dtype, 98)
    ),
}
METHODS = UNSTRUCTURED | STRUCTURED
MODULES = {
    "linear": (lambda: nn.Linear(12, 8), (3, 12)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(4, 6, 3), (2, 4, 5, 5)),
    "transposed": (lambda: nn.ConvTranspose2d(4, 6, 3), (2, 4, 5, 5)),
}


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("method", METHODS)
def test_state_forward_backward_and_remove(twins, module, method):
    build, shape = MODULES[module]
    mine, other = twins(build())
    both(METHODS[method], mine, other)
    assert_same_state(mine, other)
    x = torch.randn(shape)
    for m in (mine, other):
        m(x).pow(2).sum().backward()
    assert torch.equal(mine(x), other(x))
    assert torch.equal(mine.weight_orig.grad, other.weight_orig.grad)
    both(lambda p, m: p.remove(m, "weight"), mine, other)
    assert_same_state(mine, other)
    assert torch.equal(mine(x), other(x))
    assert torch.equal(mine.weight.grad, other.weight.grad)


EMPTY = {
    "no outputs": lambda: nn.Linear(4, 0),
    "no inputs": lambda: nn.Linear(0, 4),
    "neither": lambda: nn.Linear(0, 0),
    "no filters": lambda: nn.Conv1d(2, 0, 1),
}
ON_EMPTY = {
    "l1": lambda p, m, amount, dim: p.l1_unstructured(m, "weight", amount),
    "random": lambda p, m, amount, dim: p.random_unstructured(m, "weight", amount),
    "ln": lambda p, m, amount, dim: p.ln_structured(m, "weight", amount, 2, dim),
    "random-structured": lambda p, m, amount, dim: p.random_structured(m, "weight", amount, dim),
    "global": lambda p, m, amount, dim: p.global_unstructured([(m, "weight")], p.L1Unstructured, amount=amount),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("dim", [0, 1, -1])
@pytest.mark.parametrize("amount", [0, 0.5, 1.0, 1])
@pytest.mark.parametrize("method", ON_EMPTY)
@pytest.mark.parametrize("module", EMPTY)
def test_empty_tensors(module, method, amount, dim):
    ends = []
    for library in (ours, theirs):
        made = EMPTY[module]()
        try:
            ON_EMPTY[method](library, made, amount, dim)
        except Exception as error:
            ends.append(type(error))
        else:
            ends.append({name: (tensor.shape, tensor.dtype) for name, tensor in made.state_dict().items()})
    assert ends[0] == ends[1]


@pytest.mark.parametrize("method", [*METHODS, "global", "global-random", "global-none", "global-all"])
def test_pruning_on_top_of_a_mask_with_other_values_than_0_and_1(twins, method):
    def call(p, m):
        mask = torch.ones(8, 12)
        mask[0], mask[1, 0], mask[2, 1] = 0.5, 0, 2
        p.custom_from_mask(m, "weight", mask)
        if method in METHODS:
            METHODS[method](p, m)
        else:
            kind = p.RandomUnstructured if method == "global-random" else p.L1Unstructured
            amount = {"global-none": 0, "global-all": 1.0}.get(method, 0.4)
            p.global_unstructured([(m, "weight"), (m, "bias")], kind, amount=amount)

    mine, other = twins(nn.Linear(12, 8))
    both(call, mine, other)
    assert_same_state(mine, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("method", [m for m in METHODS if m != "random"])
def test_dtypes(twins, method, dtype):
    mine, other = twins(nn.Linear(12, 8), dtype)
    both(METHODS[method], mine, other)
    assert_same_state(mine, other)


def test_frobenius_norm_of_a_matrix(twins):
    mine, other = twins(nn.Linear(12, 8))
    both(lambda p, m: p.ln_structured(m, "weight", 0.4, "fro", 0), mine, other)
    assert_same_state(mine, other)


@pytest.mark.parametrize("method", UNSTRUCTURED)
def test_bias(twins, method):
    mine, other = twins(nn.Linear(12, 8))
    both(lambda p, m: UNSTRUCTURED[method](p, m, "bias"), mine, other)
    assert_same_state(mine, other)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_draws_differ_only_among_equal_draws(dtype):
    t, ones = torch.zeros(64, 64, dtype=dtype), torch.ones(64, 64, dtype=dtype)
    masks = []
    for p in (ours, theirs):
        torch.manual_seed(0)
        masks.append(p.RandomUnstructured(0.5).compute_mask(t, ones))
    torch.manual_seed(0)
    draws = torch.rand_like(t)
    assert masks[0].sum() == masks[1].sum()
    assert draws[masks[0] != masks[1]].unique().numel() <= 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.complex64])
@pytest.mark.parametrize("shape", [(5, 3), (1 << 11, 1 << 10), (64, 64, 32, 16)])
def test_the_draws_of_large_tensors_are_those_of_torch(dtype, shape):
    t = torch.empty(shape, dtype=dtype)
    for like in (t, nn.Parameter(t), t.to(memory_format=torch.channels_last) if t.dim() == 4 else t.T):
        torch.manual_seed(0)
        mine = random_like(like)
        torch.manual_seed(0)
        assert torch.equal(mine, torch.rand_like(like))
        assert mine.stride() == like.stride()


@pytest.mark.parametrize("second", [m for m in METHODS if m != "ln--inf"])  # masked channels all have norm 0
@pytest.mark.parametrize("first", ["identity", "random", "l1", "custom", "ln-2-0", "random-structured-last"])
def test_two_calls_compound(twins, first, second):
    mine, other = twins(nn.Conv2d(4, 6, 3))
    both(METHODS[first], mine, other)
    both(METHODS[second], mine, other)
    assert_same_state(mine, other)


def test_five_calls_and_both_tensors(twins):
    mine, other = twins(nn.Conv2d(4, 6, 3))
    for method in ("l1", "ln-1-1", "random", "random-structured", "l1-count"):
        both(METHODS[method], mine, other)
        both(lambda p, m: p.l1_unstructured(m, "bias", 1), mine, other)
        assert_same_state(mine, other)
    assert len(next(iter(mine._forward_pre_hooks.values()))) == 5


@pytest.mark.parametrize("kind", ["SGD", "Adam"])
def test_training_and_pruning_in_turns(twins, kind):
    mine, other = twins(nn.Sequential(nn.Linear(12, 8), nn.Tanh(), nn.Linear(8, 4)))
    options = {"momentum": 0.9, "weight_decay": 0.01} if kind == "SGD" else {}
    optimizers = [getattr(torch.optim, kind)(m.parameters(), lr=0.01, **options) for m in (mine, other)]
    x = torch.randn(5, 12)
    for _ in range(3):
        both(lambda p, m: p.l1_unstructured(m[0], "weight", 0.2), mine, other)
        for m, optimizer in zip((mine, other), optimizers, strict=True):
            for _ in range(2):
                optimizer.zero_grad()
                m(x).pow(2).sum().backward()
                optimizer.step()
            m(x)  # torch's own attribute is stale until here
        assert_same_state(mine, other)


# --- global ---------------------------------------------------------------------------------------------------------


def pairs(model):
    return [(m, name) for m in model for name in ("weight", "bias")]


GLOBAL = {
    "l1": lambda p, m: p.global_unstructured(pairs(m), p.L1Unstructured, amount=0.4),
    "l1-count": lambda p, m: p.global_unstructured(pairs(m), pruning_method=p.L1Unstructured, amount=11),
    "l1-none": lambda p, m: p.global_unstructured(pairs(m), p.L1Unstructured, amount=0.0),
    "random": lambda p, m: p.global_unstructured(pairs(m), p.RandomUnstructured, amount=0.4),
    "identity": lambda p, m: p.global_unstructured(pairs(m), p.Identity),
    "scores": lambda p, m: p.global_unstructured(
        pairs(m), p.L1Unstructured, {(m[0], "weight"): distinct((8, 12), m[0].weight.dtype, 97) * 3.5}, amount=0.3
    ),
}


def distinct_layers(*dtypes):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 6), nn.Conv2d(2, 3, 3))
    for layer, dtype in zip(model, dtypes, strict=True):
        layer.to(dtype)
    values = torch.cat([p.detach().flatten().double().abs() for p in model.parameters()])
    assert values.unique().numel() == values.numel()
    return model


F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@pytest.mark.parametrize("dtypes", [(F32,) * 3, (F64,) * 3, (F32, F64, F32)], ids=str)
@pytest.mark.parametrize("method", GLOBAL)
def test_global(method, dtypes):
    mine = distinct_layers(*dtypes)
    other = copy.deepcopy(mine)
    both(GLOBAL[method], mine, other)
    assert_same_state(mine, other)
    both(GLOBAL["l1"], mine, other)  # on what the first call left
    both(GLOBAL["random"], mine, other)
    assert_same_state(mine, other)
    both(lambda p, m: p.remove(m[0], "weight"), mine, other)
    assert_same_state(mine, other)


def test_global_over_mixed_half_and_float():
    mine = nn.Sequential(nn.Linear(4, 4, bias=False).to(BF16), nn.Linear(6, 6, bias=False))
    mine[0].weight.data = distinct((4, 4), BF16)
    mine[1].weight.data = distinct((6, 6), F32) + 0.001
    other = copy.deepcopy(mine)
    both(lambda p, m: p.global_unstructured([(x, "weight") for x in m], p.L1Unstructured, amount=0.5), mine, other)
    assert_same_state(mine, other)


def test_global_after_one_layer_was_pruned_alone():
    mine = distinct_layers(F32, F32, F32)
    other = copy.deepcopy(mine)
    both(lambda p, m: p.ln_structured(m[0], "weight", 0.5, 2, 1), mine, other)
    both(GLOBAL["l1"], mine, other)
    assert_same_state(mine, other)


# --- tensor functions -----------------------------------------------------------------------------------------------

T = distinct((4, 6), F64)
OLD = torch.tensor([[1, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1]])
OBJECTS = {
    "identity": lambda p: p.Identity(),
    "l1": lambda p: p.L1Unstructured(3),
    "l1-none": lambda p: p.L1Unstructured(0),
    "random": lambda p: p.RandomUnstructured(3),
    "random-structured": lambda p: p.RandomStructured(1),
    "random-structured-none": lambda p: p.RandomStructured(0.0, 0),
    "ln": lambda p: p.LnStructured(1, 2),
    "ln-true": lambda p: p.LnStructured(True, 2, 0),
    "ln-none": lambda p: p.LnStructured(0, 2),
    "custom": lambda p: p.CustomFromMask(torch.eye(4, 6)),
}


@pytest.mark.parametrize("method", OBJECTS)
@pytest.mark.parametrize("contained", [False, True])
def test_compute_mask_has_torchs_values_and_dtype(method, contained):
    masks = []
    for p in (ours, theirs):
        torch.manual_seed(0)
        one = OBJECTS[method](p)
        one._tensor_name = "t"
        masks.append((p.PruningContainer(one) if contained else one).compute_mask(T, OLD.clone()))
    assert masks[0].dtype == masks[1].dtype
    assert torch.equal(*masks)


@pytest.mark.parametrize("method", OBJECTS)
def test_prune_of_a_tensor(method):
    for arguments in ({}, {"default_mask": OLD}, {"importance_scores": distinct((4, 6), F64, 5)}):
        results = []
        for p in (ours, theirs):
            torch.manual_seed(0)
            results.append(OBJECTS[method](p).prune(T, **arguments))
        assert torch.equal(*results)


def public(library):
    return {n for n, x in vars(library).items() if getattr(x, "__module__", None) == library.__name__ and not n.startswith("_")}


def test_every_public_name_is_there_with_its_parameters():
    helpers = {n for n in vars(theirs) if n.startswith(("_validate_", "_compute_"))}
    assert public(theirs) <= public(ours)
    assert helpers <= vars(ours).keys()
    for name in public(theirs) | helpers:
        a, b = getattr(ours, name), getattr(theirs, name)
        functions = [(a, b)]
        if inspect.isclass(b):
            assert getattr(a, "PRUNING_TYPE", None) == getattr(b, "PRUNING_TYPE", None)
            functions = [(getattr(a, n), x) for n, x in inspect.getmembers(b, callable) if n in vars(b) and n != "__class__"]
            functions = [(x, y) for x, y in functions if inspect.isroutine(y)]
        for x, y in functions:
            p, q = (inspect.signature(f).parameters.values() for f in (x, y))
            assert [(i.name, i.kind, i.default) for i in p] == [(i.name, i.kind, i.default) for i in q], (name, x)


# --- files ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("writer", "reader"), [(ours, theirs), (theirs, ours), (ours, ours)])
def test_state_dicts_load_in_the_other_library(writer, reader):
    def model(prune, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(12, 8), nn.LSTM(8, 4))
        prune.l1_unstructured(model[0], "weight", 0.5)
        prune.random_unstructured(model[1], "weight_hh_l0", 0.5)
        return model

    source, target = model(writer, 0), model(reader, 1)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    assert target.load_state_dict(torch.load(file)) == ([], [])
    x = torch.randn(3, 12)
    assert torch.equal(source(x)[0], target(x)[0])
    assert all(torch.equal(v, target.state_dict()[k]) for k, v in source.state_dict().items())


@pytest.mark.parametrize("calls", [1, 3])
def test_whole_model_survives_pickle_and_torch_save(calls):
    model = nn.Sequential(nn.Linear(12, 8), nn.LSTM(8, 4))
    for _ in range(calls):
        ours.l1_unstructured(model[0], "weight", 0.3)
        ours.ln_structured(model[1], "weight_hh_l0", 0.3, 2, 0)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    x = torch.randn(3, 12)
    for new in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert_same_state(new, model)
        assert torch.equal(new(x)[0], model(x)[0])
        assert len(pickle.dumps(new)) == len(pickle.dumps(pickle.loads(pickle.dumps(new))))
        new(x)[0].sum().backward()
        assert new[1].weight_hh_l0_orig.grad is not None
        ours.l1_unstructured(new[0], "weight", 0.5)
        ours.remove(new[0], "weight")
        assert not ours.is_pruned(new[0])
        assert ours.is_pruned(new)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_weight_has_the_same_values_and_gradients(dtype):
    """Large masked weights are written by other code than small ones."""
    found = []
    for prune in (ours, theirs):
        torch.manual_seed(0)
        module = nn.Linear(1100, 1000, bias=False, dtype=dtype)
        with torch.no_grad():
            module.weight[0, 0] = torch.inf  # times a zero of the mask it is NaN
        prune.custom_from_mask(module, "weight", (torch.arange(1_100_000) % 3 != 0).view(1000, 1100))
        module.weight.sum().backward()  # before any call: the attribute that pruning wrote
        found.append((module.weight.detach(), module.weight_mask, module.weight_orig.grad, module.weight.grad_fn is not None))
    for mine, other in zip(*found, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=0, equal_nan=True)
