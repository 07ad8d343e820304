"""`drop_in.prune` and `torch.nn.utils.prune` together: each accepts methods and pruned modules of the other."""

from __future__ import annotations

import copy
import itertools
import pickle
import subprocess
import sys

import pytest
import torch
import torch.nn.utils.prune as theirs
from torch import nn

from secateur.drop_in import prune as ours

from .conftest import MASK_SEED, fill, hook_names

LIBRARIES = {"ours": ours, "torch": theirs}
METHODS = [
    "BasePruningMethod",
    "PruningContainer",
    "Identity",
    "RandomUnstructured",
    "L1Unstructured",
    "RandomStructured",
    "LnStructured",
    "CustomFromMask",
]
STEPS = {
    "identity": lambda p, m: p.identity(m, "weight"),
    "l1": lambda p, m: p.l1_unstructured(m, "weight", 0.4),
    "random": lambda p, m: p.random_unstructured(m, "weight", 3),
    "ln": lambda p, m: p.ln_structured(m, "weight", 1, 2, 0),
    "random channels": lambda p, m: p.random_structured(m, "weight", 1, 1),
    "custom": lambda p, m: p.custom_from_mask(m, "weight", torch.arange(24).view(4, 6) % 5 != 0),
    "global": lambda p, m: p.global_unstructured([(m, "weight"), (m, "bias")], p.L1Unstructured, amount=0.3),
}


def make():
    return fill(nn.Linear(6, 4))


def run(module, steps):
    for seed, (library, step) in enumerate(steps):
        torch.manual_seed(MASK_SEED + seed)
        STEPS[step](LIBRARIES[library], module)
        module(torch.ones(1, 6))
    return module


@pytest.mark.parametrize("name", METHODS)
def test_our_classes_are_subclasses_of_torchs(name):
    assert issubclass(getattr(ours, name), getattr(theirs, name))
    assert issubclass(getattr(ours, name), theirs.BasePruningMethod)


@pytest.mark.parametrize("name", METHODS)
def test_torchs_methods_count_as_instances_of_our_base_class(name):
    assert issubclass(getattr(theirs, name), ours.BasePruningMethod)
    assert not issubclass(theirs.L1Unstructured, ours.L1Unstructured)
    assert not isinstance(nn.Linear(2, 2), ours.BasePruningMethod)


def test_a_hook_of_one_is_an_instance_for_the_other():
    for one, other in itertools.product(LIBRARIES.values(), repeat=2):
        hook = one.L1Unstructured.apply(make(), "weight", 0.5)
        assert isinstance(hook, other.BasePruningMethod)


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(("first", "second"), [("ours", "torch"), ("torch", "ours")])
def test_is_pruned_and_remove_work_on_modules_of_the_other(first, second, step):
    model = nn.Sequential(make(), nn.ReLU())
    STEPS[step](LIBRARIES[first], model[0])
    masked = model[0].weight.detach().clone()
    library = LIBRARIES[second]
    assert library.is_pruned(model)
    for name in [hook._tensor_name for hook in model[0]._forward_pre_hooks.values()]:
        library.remove(model[0], name)
    assert not ours.is_pruned(model)
    assert not theirs.is_pruned(model)
    assert dict(model[0].named_parameters()).keys() == {"weight", "bias"}
    assert torch.equal(model[0].weight, masked)
    with pytest.raises(ValueError, match="pruned"):
        library.remove(model[0], "weight")
    assert not {"_apply", "__deepcopy__", "__reduce_ex__"} & vars(model[0]).keys()
    copy.deepcopy(model)(torch.ones(1, 6))


@pytest.mark.parametrize("steps", list(itertools.permutations(STEPS, 2)), ids=" then ".join)
@pytest.mark.parametrize(("first", "second"), [("ours", "torch"), ("torch", "ours")])
def test_one_library_goes_on_where_the_other_stopped(first, second, steps):
    mixed = run(make(), [(first, steps[0]), (second, steps[1]), (first, "l1"), (second, "random")])
    pure = run(make(), [("torch", steps[0]), ("torch", steps[1]), ("torch", "l1"), ("torch", "random")])
    assert hook_names(mixed) == hook_names(pure)
    assert mixed.state_dict().keys() == pure.state_dict().keys()
    for name, value in pure.state_dict().items():
        assert torch.equal(mixed.state_dict()[name], value), name
    assert torch.equal(mixed.weight, pure.weight)


@pytest.mark.parametrize("method", ["L1Unstructured", "RandomUnstructured"])
@pytest.mark.parametrize(("function", "of"), [("ours", "torch"), ("torch", "ours")])
def test_global_pruning_accepts_the_methods_of_the_other(function, of, method):
    found = []
    for chosen in (LIBRARIES[of], LIBRARIES[function]):
        module = make()
        torch.manual_seed(MASK_SEED)
        pairs = [(module, "weight"), (module, "bias")]
        LIBRARIES[function].global_unstructured(pairs, getattr(chosen, method), amount=0.5)
        found.append(module.state_dict())
    for name, value in found[1].items():
        assert torch.equal(found[0][name], value), name


def test_a_failure_leaves_a_module_that_torch_pruned_as_it_was():
    module = run(make(), [("torch", "l1"), ("torch", "ln")])
    before, (hook,) = {k: v.clone() for k, v in module.state_dict().items()}, module._forward_pre_hooks.values()
    with pytest.raises(ValueError, match="amount"):
        ours.l1_unstructured(module, "weight", 999)
    assert list(module._forward_pre_hooks.values()) == [hook]
    assert len(hook) == 2
    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())
    theirs.remove(module, "weight")


def test_the_masked_weight_stays_up_to_date_after_torch_pruned_the_module_again():
    module = run(make(), [("ours", "l1"), ("torch", "random")])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module(torch.ones(1, 6)).sum().backward()
    optimizer.step()
    assert torch.equal(module.weight, module.weight_orig * module.weight_mask)
    again = copy.deepcopy(module)
    assert torch.equal(again.weight, module.weight)


def test_pickled_modules_refer_to_the_public_path():
    module = run(make(), [("ours", "l1"), ("ours", "ln")])
    assert b"secateur.drop_in.prune" in pickle.dumps(module)
    assert b"drop_in._methods" not in pickle.dumps(module)
    assert torch.equal(pickle.loads(pickle.dumps(module)).weight, module.weight)


def test_every_attribute_of_torchs_module_is_there():
    assert set(dir(theirs)) <= set(dir(ours))


def test_code_runs_when_ours_stands_in_the_place_of_torchs_module():
    code = """
import sys, torch
from secateur.drop_in import prune
sys.modules["torch.nn.utils.prune"] = torch.nn.utils.prune = prune
import torch.nn.utils.prune as module
assert module is prune
layer = module.l1_unstructured(torch.nn.Linear(4, 4), "weight", 0.5)
layer = module.ln_structured(layer, "weight", 1, 2, 0)
assert module.is_pruned(layer)
assert isinstance(next(iter(layer._forward_pre_hooks.values())), module.PruningContainer)
module.remove(layer, "weight")
print(float((layer.weight == 0).float().mean()) >= 0.5)
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "True"


def test_the_optimizer_of_a_model_that_torch_pruned_resumes_and_goes_on_with_ours():
    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
        theirs.l1_unstructured(model[0], "weight", 2)
        return model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(model, optimizer):
        optimizer.zero_grad()
        model(torch.ones(2, 4)).square().sum().backward()
        optimizer.step()

    model, optimizer = build()
    step(model, optimizer)
    twin, resumed = build()
    twin.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    model(torch.ones(2, 4))  # torch ranks the weights of the last forward pass
    theirs.l1_unstructured(model[0], "weight", 3)
    ours.l1_unstructured(twin[0], "weight", 3)
    for one, its in ((model, optimizer), (twin, resumed)):
        step(one, its)
    assert [name for name, _ in twin.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert torch.equal(twin[0].weight_orig, model[0].weight_orig)
    assert torch.equal(twin[0].weight_mask, model[0].weight_mask)
    assert int((twin[0].weight_mask == 0).sum()) == 5
