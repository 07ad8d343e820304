"""Wrong arguments raise torch's error types with a helpful message and leave the model exactly as it was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.utils.prune as theirs
from torch import nn
from torch.nn.utils import parametrizations

from secateur.drop_in import prune as ours

from .conftest import fill, snapshot


class Strange(nn.Linear):
    """A linear layer with a buffer, a missing parameter and a plain tensor."""

    def __init__(self):
        super().__init__(6, 4)
        self.register_buffer("table", torch.ones(3, 3))
        self.register_parameter("nothing", None)
        self.plain = torch.ones(2, 2)


def method_class(prune, **members):
    """Makes a user-defined method from the base class of the library."""
    members = {"compute_mask": lambda self, t, default_mask: default_mask, "__module__": __name__} | members
    return type("Mine", (prune.BasePruningMethod,), members)


def raises(error):
    def compute_mask(self, t, default_mask):
        raise error

    return compute_mask


def wrong_global(**changes):
    def call(prune, module):
        arguments = {"parameters": [(module, "weight")], "pruning_method": prune.L1Unstructured, "amount": 0.5}
        arguments |= {key: value(prune, module) if callable(value) else value for key, value in changes.items()}
        prune.global_unstructured(**arguments)

    return call


NAN, INF = float("nan"), float("inf")
WRONG = {
    "amount-str": lambda p, m: p.l1_unstructured(m, "weight", "half"),
    "amount-none": lambda p, m: p.random_unstructured(m, "weight", None),
    "amount-tensor": lambda p, m: p.l1_unstructured(m, "weight", torch.tensor(0.5)),
    "amount-complex": lambda p, m: p.ln_structured(m, "weight", 0.5j, 2, 0),
    "amount-negative-int": lambda p, m: p.l1_unstructured(m, "weight", -1),
    "amount-negative-float": lambda p, m: p.random_structured(m, "weight", -0.1, 0),
    "amount-above-one": lambda p, m: p.ln_structured(m, "weight", 1.1, 2, 0),
    "amount-inf": lambda p, m: p.random_unstructured(m, "weight", INF),
    "amount-nan": lambda p, m: p.l1_unstructured(m, "weight", NAN),
    "amount-nan-random": lambda p, m: p.random_unstructured(m, "weight", NAN),
    "amount-nan-channels": lambda p, m: p.ln_structured(m, "weight", NAN, 2, 0),
    "amount-true": lambda p, m: p.l1_unstructured(m, "weight", True),
    "amount-true-random": lambda p, m: p.random_unstructured(m, "weight", True),
    "amount-true-channels": lambda p, m: p.random_structured(m, "weight", True, 0),
    "too-many-l1": lambda p, m: p.l1_unstructured(m, "weight", 99),
    "too-many-random": lambda p, m: p.random_unstructured(m, "weight", 99),
    "too-many-channels": lambda p, m: p.ln_structured(m, "weight", 99, 2, 0),
    "too-many-random-channels": lambda p, m: p.random_structured(m, "weight", 99, 0),
    "dim-too-large": lambda p, m: p.ln_structured(m, "weight", 1, 2, 2),
    "dim-too-large-random": lambda p, m: p.random_structured(m, "weight", 1, 5),
    "dim-too-small": lambda p, m: p.ln_structured(m, "weight", 1, 2, -3),
    "dim-too-small-random": lambda p, m: p.random_structured(m, "weight", 1, -5),
    "dim-str": lambda p, m: p.ln_structured(m, "weight", 1, 2, "rows"),
    "norm-nuclear": lambda p, m: p.ln_structured(m, "weight", 1, "nuc", 0),
    "norm-unknown": lambda p, m: p.ln_structured(m, "weight", 1, "taxi", 0),
    "one-dimension": lambda p, m: p.ln_structured(m, "bias", 1, 2, 0),
    "one-dimension-random": lambda p, m: p.random_structured(m, "bias", 1, 0),
    "scores-shape": lambda p, m: p.l1_unstructured(m, "weight", 0.5, torch.rand(4)),
    "scores-shape-channels": lambda p, m: p.ln_structured(m, "weight", 0.5, 2, 0, torch.rand(4)),
    "scores-list": lambda p, m: p.l1_unstructured(m, "weight", 0.5, [1.0]),
    "scores-for-random": lambda p, m: p.RandomUnstructured.apply(m, "weight", 0.5, importance_scores=torch.rand(4, 6)),
    "mask-shape": lambda p, m: p.custom_from_mask(m, "weight", torch.ones(4)),
    "mask-list": lambda p, m: p.custom_from_mask(m, "weight", [[1]]),
    "mask-none": lambda p, m: p.custom_from_mask(m, "weight", None),
    "ln-without-dim": lambda p, m: p.LnStructured.apply(m, "weight", 0.5, 2),
    "name-missing": lambda p, m: p.l1_unstructured(m, "wieght", 0.5),
    "name-dotted": lambda p, m: p.l1_unstructured(m, "fc.weight", 0.5),
    "name-none": lambda p, m: p.l1_unstructured(m, None, 0.5),
    "buffer": lambda p, m: p.l1_unstructured(m, "table", 0.5),
    "missing-parameter": lambda p, m: p.l1_unstructured(m, "nothing", 0.5),
    "plain-tensor": lambda p, m: p.l1_unstructured(m, "plain", 0.5),
    "number": lambda p, m: p.l1_unstructured(m, "in_features", 0.5),
    "remove-unpruned": lambda p, m: p.remove(m, "plain"),
    "user-method-fails": lambda p, m: method_class(p, PRUNING_TYPE="global", compute_mask=raises(ZeroDivisionError())).apply(
        m, "weight"
    ),
    "user-method-constructor": lambda p, m: method_class(p, __init__=raises(OSError())).apply(m, "weight", 1, default_mask=2),
    "mask-not-a-tensor": lambda p, m: method_class(
        p, PRUNING_TYPE="global", compute_mask=lambda self, t, default_mask: "mask"
    ).apply(m, "weight"),
    "abstract": lambda p, m: p.BasePruningMethod.apply(m, "weight"),
    "global-not-iterable": wrong_global(parameters=3),
    "global-empty": wrong_global(parameters=[]),
    "global-not-pairs": wrong_global(parameters=[1]),
    "global-scores-number": wrong_global(importance_scores=lambda p, m: {(m, "weight"): torch.rand(4, 5)}),
    "global-scores-list": wrong_global(importance_scores=[1]),
    "global-structured": wrong_global(pruning_method=lambda p, m: p.RandomStructured),
    "global-amount-type": wrong_global(amount="half"),
    "global-amount-range": wrong_global(amount=1.5),
    "global-amount-true": wrong_global(amount=True),
    "global-too-many": wrong_global(amount=999),
    "global-missing-name": wrong_global(parameters=lambda p, m: [(m, "weight"), (m, "wieght")]),
    "global-keyword": wrong_global(colour=1),
    "global-user-method": wrong_global(
        pruning_method=lambda p, m: method_class(
            p, PRUNING_TYPE="unstructured", __init__=lambda self, amount: None, compute_mask=raises(ZeroDivisionError())
        )
    ),
}
# torch accepts these or fails half way; ours raises an error before anything has changed
STRICTER = {
    "global-buffer": (wrong_global(parameters=lambda p, m: [(m, "weight"), (m, "table")]), TypeError),
    "global-missing-parameter": (wrong_global(parameters=lambda p, m: [(m, "weight"), (m, "nothing")]), TypeError),
    "global-scores-shape": (
        wrong_global(importance_scores=lambda p, m: {(m, "weight"): torch.rand(6, 4)}),
        AssertionError,
    ),
    "global-scores-key": (wrong_global(importance_scores={"weight": torch.rand(4, 6)}), TypeError),
    "nan-scores": (lambda p, m: p.l1_unstructured(m, "weight", 0.5, torch.full((4, 6), NAN)), ValueError),
    "nan-scores-channels": (lambda p, m: p.ln_structured(m, "weight", 0.5, 2, 0, torch.full((4, 6), NAN)), ValueError),
    "global-nan-scores": (
        wrong_global(importance_scores=lambda p, m: {(m, "weight"): torch.full((4, 6), NAN)}),
        ValueError,
    ),
}
HISTORIES = {
    "fresh": lambda p, m: None,
    "pruned": lambda p, m: p.l1_unstructured(m, "weight", 2),
    "contained": lambda p, m: (p.l1_unstructured(m, "weight", 2), p.ln_structured(m, "weight", 1, 2, 0)),
}


def pruned(prune, history):
    module = fill(Strange())
    HISTORIES[history](prune, module)
    return module


def caught(prune, module, action):
    with pytest.raises(Exception) as caught:  # noqa: PT011  # which one is what the caller compares
        action(prune, module)
    return caught.value


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("wrong", WRONG)
def test_error_type_is_torchs_and_nothing_changed(wrong, history):
    module = pruned(ours, history)
    before = snapshot(module)
    error = caught(ours, module, WRONG[wrong])
    assert type(error) is type(caught(theirs, pruned(theirs, history), WRONG[wrong])), error
    assert snapshot(module) == before
    module(torch.ones(1, 6)).sum().backward()
    ours.l1_unstructured(module, "weight", 1)


@pytest.mark.parametrize("history", HISTORIES)
@pytest.mark.parametrize("wrong", STRICTER)
def test_stricter_errors_change_nothing(wrong, history):
    action, kind = STRICTER[wrong]
    module = pruned(ours, history)
    before = snapshot(module)
    assert isinstance(caught(ours, module, action), kind)
    assert snapshot(module) == before


@pytest.mark.parametrize("dim", [1, 2, -2, 1.0, "rows"])
@pytest.mark.parametrize("function", ["ln_structured", "random_structured"])
def test_a_bad_dim_of_a_pruned_vector(function, dim):
    arguments = {"n": 2, "dim": dim} if function == "ln_structured" else {"dim": dim}

    def call(prune, module):
        getattr(prune, function)(module, "bias", 1, **arguments)

    kinds = []
    for library in (ours, theirs):
        module = library.l1_unstructured(fill(nn.Linear(6, 4)), "bias", 1)
        before = snapshot(module)
        kinds.append(type(caught(library, module, call)))
        assert library is theirs or snapshot(module) == before
    assert kinds[0] is kinds[1]


RECOMPUTED = {
    "parametrizations.weight_norm": (lambda: parametrizations.weight_norm(nn.Linear(4, 4)), "parametrize"),
    "parametrizations.spectral_norm": (lambda: parametrizations.spectral_norm(nn.Linear(4, 4)), "parametrize"),
    "parametrizations.orthogonal": (lambda: parametrizations.orthogonal(nn.Linear(4, 4)), "parametrize"),
    "weight_norm": (lambda: nn.utils.weight_norm(nn.Linear(4, 4)), "weight_norm"),
    "spectral_norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), "spectral_norm"),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("kind", RECOMPUTED)
def test_a_weight_that_something_else_computes_is_named(kind):
    build, word = RECOMPUTED[kind]
    module = build()
    before = module.state_dict().keys(), list(module._forward_pre_hooks)
    for call in (
        lambda: ours.l1_unstructured(module, "weight", 0.5),
        lambda: ours.global_unstructured([(nn.Linear(2, 2), "weight"), (module, "weight")], ours.L1Unstructured, amount=0.5),
    ):
        with pytest.raises(TypeError, match=word):
            call()
    assert (module.state_dict().keys(), list(module._forward_pre_hooks)) == before


def test_missing_names_come_with_near_ones():
    with pytest.raises(AttributeError, match="weight"):
        ours.l1_unstructured(nn.Linear(4, 4), "wieght", 0.5)


def test_lazy_modules_have_nothing_to_prune_yet():
    module = nn.LazyLinear(4)
    with pytest.raises(ValueError, match="lazy"):
        ours.l1_unstructured(module, "weight", 0.5)
    assert list(module._parameters) == ["weight", "bias"]


@pytest.mark.parametrize("taken", ["weight_orig", "weight_mask"])
def test_a_name_that_is_taken_is_not_overwritten(taken):
    module = nn.Linear(4, 4)
    module.register_buffer(taken, torch.ones(1))
    with pytest.raises(KeyError, match=taken):
        ours.l1_unstructured(module, "weight", 0.5)
    assert list(module._parameters) == ["weight", "bias"]


def test_two_hooks_on_one_tensor():
    for library in (ours, theirs):
        module = nn.Linear(4, 4)
        library.identity(module, "weight")
        hook = library.Identity()
        hook._tensor_name = "weight"
        module.register_forward_pre_hook(hook)
        with pytest.raises(AssertionError):
            library.identity(module, "weight")


def test_scores_that_are_not_used_are_mentioned():
    a, b = nn.Linear(4, 4), nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="not among the parameters"):
        ours.global_unstructured([(a, "weight")], ours.L1Unstructured, {(b, "weight"): torch.rand(4, 4)}, amount=0.5)
    assert ours.is_pruned(a)


CONTAINERS = {
    "two-arguments": lambda p: p.PruningContainer(p.Identity(), p.Identity()),
    "list": lambda p: p.PruningContainer([p.Identity()]),
    "untold": lambda p: p.PruningContainer(p.Identity()),
    "no-name": lambda p: p.PruningContainer()._tensor_name,
    "not-a-method": lambda p: p.PruningContainer().add_pruning_method(3),
    "no-dim": lambda p: contained(p, PRUNING_TYPE="structured").compute_mask(torch.ones(2, 2), torch.ones(2, 2)),
    "far-dim": lambda p: contained(p, PRUNING_TYPE="structured", dim=-3).compute_mask(torch.ones(2, 2), torch.ones(2, 2)),
    "type": lambda p: contained(p, PRUNING_TYPE="odd").compute_mask(torch.ones(2, 2), torch.ones(2, 2)),
    "no-type": lambda p: contained(p).compute_mask(torch.ones(2, 2), torch.ones(2, 2)),
    "prune-scores": lambda p: p.L1Unstructured(1).prune(torch.ones(2, 2), importance_scores=torch.ones(4)),
    "hook-unnamed": lambda p: p.L1Unstructured(1).apply_mask(nn.Linear(2, 2)),
    "hook-none": lambda p: none_named(p).apply_mask(nn.Linear(2, 2)),
    "remove-none": lambda p: none_named(p).remove(nn.Linear(2, 2)),
    "init-type": lambda p: p._validate_pruning_amount_init("x"),
    "init-range": lambda p: p._validate_pruning_amount_init(-1),
    "size": lambda p: p._validate_pruning_amount(3, 2),
    "structured": lambda p: p._validate_structured_pruning(torch.ones(2)),
    "dim": lambda p: p._validate_pruning_dim(torch.ones(2, 2), 2),
}


def contained(prune, **members):
    method = method_class(prune, **members)()
    method._tensor_name = "t"
    return prune.PruningContainer(method)


def none_named(prune):
    method = prune.Identity()
    method._tensor_name = None
    return method


@pytest.mark.parametrize("wrong", CONTAINERS)
def test_errors_of_methods_and_containers_are_torchs(wrong):
    kinds = []
    for library in (ours, theirs):
        with pytest.raises(Exception) as caught:  # noqa: PT011
            CONTAINERS[wrong](library)
        kinds.append(type(caught.value))
    assert kinds[0] is kinds[1]
