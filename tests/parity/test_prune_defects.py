"""Defects of torch.nn.utils.prune that are fixed here. Each test in `FIXED` passes for ours and fails for torch's."""

from __future__ import annotations

import copy
import gc
import pickle
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
import torch.nn.utils.prune as theirs
from torch import nn

from secateur.drop_in import prune as ours

FIXED = {}


def fixed(test):
    FIXED[test.__name__] = test
    return test


def is_fresh(module, name="weight"):
    return torch.equal(getattr(module, name), getattr(module, name + "_mask") * getattr(module, name + "_orig"))


@fixed
def deepcopy_of_a_pruned_model_is_independent(prune):
    model = nn.Sequential(nn.Linear(4, 4), nn.LSTM(4, 4))
    prune.l1_unstructured(model[0], "weight", 0.5)
    prune.l1_unstructured(model[1], "weight_hh_l0", 0.5)
    model(torch.randn(2, 4))
    new = copy.deepcopy(model)
    x = torch.randn(2, 4)
    assert torch.equal(new(x)[0], model(x)[0])
    assert new[0].weight_orig is not model[0].weight_orig
    with torch.no_grad():
        new[0].weight_orig.zero_()
    assert new(x)[0].ne(model(x)[0]).any()
    new[1].double()
    assert model[1].weight_hh_l0.dtype == torch.float32
    assert new[1].weight_hh_l0.dtype == torch.float64


@fixed
def weight_is_fresh_after_an_optimizer_step(prune):
    module = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=1.0)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert is_fresh(module)


@fixed
def weight_is_fresh_after_load_state_dict(prune):
    a, b = (prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5) for _ in range(2))
    nn.Sequential(a).load_state_dict(nn.Sequential(b).state_dict())
    assert torch.equal(a.weight, b.weight)


@fixed
def weight_follows_the_module_to_another_dtype(prune):
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)).to(torch.float64)
    assert model[0].weight.dtype == torch.float64
    model[0].forward(torch.ones(1, 4, dtype=torch.float64)).sum().backward()
    assert model[0].weight_orig.grad is not None


@fixed
def weight_leads_to_the_original_after_unpickling(prune):
    module = pickle.loads(pickle.dumps(prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)))
    module.forward(torch.ones(1, 4)).sum().backward()
    assert module.weight_orig.grad is not None


@fixed
def second_call_ranks_the_weights_as_they_are_now(prune):
    module = nn.Linear(4, 1, bias=False)
    module.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    prune.l1_unstructured(module, "weight", 1)
    with torch.no_grad():
        module.weight_orig.copy_(torch.tensor([[9.0, 9.0, 9.0, 0.5]]))
    prune.l1_unstructured(module, "weight", 1)
    assert module.weight_mask.tolist() == [[0.0, 1.0, 1.0, 0.0]]


@fixed
def failed_second_call_restores_hook_and_state(prune):
    module = prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
    with pytest.raises(ValueError, match="amount"):
        prune.ln_structured(module, "weight", 9, 2, 0)
    assert prune.is_pruned(module)
    prune.remove(module, "weight")


@fixed
def failed_third_call_is_not_in_the_container(prune):
    module = nn.Linear(4, 4)
    for _ in range(2):
        prune.l1_unstructured(module, "weight", 1)
    (hook,) = module._forward_pre_hooks.values()
    with pytest.raises(ValueError, match="amount"):
        prune.l1_unstructured(module, "weight", 99)
    assert len(hook) == 2
    assert hook in module._forward_pre_hooks.values()


@fixed
def failed_global_call_prunes_nothing(prune):
    good, bad = nn.Linear(4, 4), nn.Linear(4, 4)
    bad.register_buffer("table", torch.ones(2))
    with pytest.raises(TypeError):
        prune.global_unstructured([(good, "weight"), (bad, "table")], prune.L1Unstructured, amount=0.5)
    assert not prune.is_pruned(good)


@fixed
def a_missing_bias_is_refused_before_anything_changes(prune):
    module = nn.Linear(4, 4, bias=False)
    with pytest.raises(TypeError):
        prune.l1_unstructured(module, "bias", 0.5)
    assert list(module._parameters) == ["weight", "bias"]


@fixed
def a_pruned_recurrent_layer_can_be_copied(prune):
    module = prune.l1_unstructured(nn.LSTM(4, 4), "weight_hh_l0", 0.5)
    new = copy.deepcopy(module)
    assert all(flat is getattr(new, name) for flat, name in zip(new._flat_weights, new._flat_weights_names, strict=True))
    x = torch.randn(3, 2, 4)
    assert torch.equal(new(x)[0], module(x)[0])


@fixed
def attention_output_projection_trains(prune):
    module = nn.MultiheadAttention(8, 2)
    prune.l1_unstructured(module.out_proj, "weight", 0.5)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.randn(3, 1, 8)
    for _ in range(3):
        before = module.out_proj.weight_orig.detach().clone()
        optimizer.zero_grad()
        for _ in range(2):  # accumulation: the projection is never called, so its graph is renewed after each backward pass
            module(x, x, x)[0].pow(2).sum().backward()
        optimizer.step()
        assert is_fresh(module.out_proj)
        assert not torch.equal(module.out_proj.weight_orig, before)


@fixed
def global_pruning_takes_a_generator(prune):
    layers = [nn.Linear(4, 4), nn.Linear(4, 4)]
    prune.global_unstructured(((layer, "weight") for layer in layers), prune.L1Unstructured, amount=0.5)
    assert sum(int((layer.weight_mask == 0).sum()) for layer in layers) == 16


@fixed
def hooks_hold_no_masks(prune):
    layers = [nn.Linear(100, 100, bias=False) for _ in range(4)]
    for _ in range(5):
        prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.1)
    (hook,) = layers[0]._forward_pre_hooks.values()
    assert len(hook) == 5
    assert all(method.mask is None for method in hook)
    assert len(pickle.dumps(layers[0])) < 2.2 * 40_000  # weight and mask, without their product


@fixed
def given_masks_are_not_kept(prune):
    module = nn.Linear(100, 100, bias=False)
    for step in range(3):
        mask = torch.ones(100, 100)
        mask[step] = 0
        prune.custom_from_mask(module, "weight", mask)
    assert int((module.weight_mask == 0).sum()) == 300
    reference = weakref.ref(mask)
    del mask
    gc.collect()
    assert reference() is None


@fixed
def global_scores_of_another_shape_are_refused(prune):
    module = nn.Linear(4, 4)
    with pytest.raises(AssertionError):
        prune.global_unstructured(
            [(module, "weight")], prune.L1Unstructured, {(module, "weight"): torch.rand(2, 8)}, amount=0.5
        )


@fixed
def a_misspelt_scores_key_is_refused(prune):
    with pytest.raises(TypeError):
        prune.global_unstructured([(nn.Linear(4, 4), "weight")], prune.L1Unstructured, {"typo": 1}, amount=0.5)


@fixed
def container_does_not_write_into_the_mask_it_is_given(prune):
    method = prune.L1Unstructured(2)
    method._tensor_name = "t"
    given = torch.ones(2, 4)
    prune.PruningContainer(method).compute_mask(torch.rand(2, 4), given)
    assert given.sum() == 8


@fixed
def parameters_keep_their_order(prune):
    module = nn.Linear(4, 2)
    prune.l1_unstructured(module, "weight", 0.5)
    assert [name for name, _ in module.named_parameters()] == ["weight_orig", "bias"]
    assert list(module.state_dict()) == ["weight_orig", "bias", "weight_mask"]
    prune.remove(module, "weight")
    assert [name for name, _ in module.named_parameters()] == ["weight", "bias"]


@fixed
def an_optimizer_checkpoint_fits_after_prune_and_remove(prune):
    a, b = nn.Linear(4, 2), nn.Linear(4, 2)
    first = torch.optim.Adam(a.parameters())
    a(torch.randn(1, 4)).sum().backward()
    first.step()
    prune.identity(b, "weight")
    prune.remove(b, "weight")
    second = torch.optim.Adam(b.parameters())
    second.load_state_dict(first.state_dict())
    b(torch.randn(1, 4)).sum().backward()
    second.step()


@fixed
def equal_scores_go_from_the_lowest_index(prune):
    module = nn.Linear(4, 1, bias=False)
    module.weight.data.fill_(1.0)
    prune.l1_unstructured(module, "weight", 2)
    assert module.weight_mask.tolist() == [[0.0, 0.0, 1.0, 1.0]]


@fixed
def nan_is_an_error_that_names_the_tensor(prune):
    module = nn.Linear(4, 4)
    module.weight.data[0, 0] = float("nan")
    for call in (
        lambda: prune.l1_unstructured(module, "weight", 0.5),
        lambda: prune.ln_structured(module, "weight", 0.5, 2, 0),
        lambda: prune.global_unstructured([(module, "weight")], prune.L1Unstructured, amount=0.5),
    ):
        with pytest.raises(ValueError, match=r"weight.*NaN"):
            call()
    assert not prune.is_pruned(module)


@fixed
def a_channels_last_weight_can_be_pruned(prune):
    module = nn.Conv2d(4, 6, 3).to(memory_format=torch.channels_last)
    prune.l1_unstructured(module, "weight", 0.5)
    prune.random_unstructured(module, "weight", 0.5)
    assert int((module.weight_mask == 0).sum()) == 162


@fixed
def a_shared_graph_transform_can_be_copied(prune):
    model = nn.Sequential(prune.l1_unstructured(nn.Linear(8, 8), "weight", 0.5), nn.ReLU())
    x = torch.randn(2, 8)
    assert torch.equal(copy.deepcopy(torch.fx.symbolic_trace(model))(x), model(x))


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name):
    FIXED[name](ours)


@pytest.mark.parametrize("name", FIXED)
def test_torch_has_the_defect(name):
    with pytest.raises((Exception, pytest.fail.Exception)):
        FIXED[name](theirs)


PEAK = """
import sys
sys.path.insert(0, {tests!r})
from peak_memory import peak
import torch
from torch import nn
from {library} import prune
layers = [nn.Linear(1024, 1024, bias=False) for _ in range(16)]
warm = nn.Linear(64, 64)
prune.global_unstructured([(warm, "weight")], prune.L1Unstructured, amount=0.5)
base = peak()
prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.5)
print((peak() - base) / (16 * 1024 * 1024 * 4))
"""


@pytest.mark.slow
def test_global_pruning_needs_no_copy_of_the_weights():
    growth = {}
    for library in ("secateur.drop_in", "torch.nn.utils"):
        code = PEAK.format(library=library, tests=str(Path(__file__).parents[1]))
        growth[library] = float(subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout)
    assert growth["secateur.drop_in"] < 3  # mask and masked weight take one each, as in torch
    assert growth["torch.nn.utils"] > 2 * growth["secateur.drop_in"]


def test_a_pruned_module_dies_with_its_last_reference():
    gc.disable()
    try:
        module = ours.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
        module(torch.ones(1, 4)).sum().backward()
        reference = weakref.ref(module)
        del module
        assert reference() is None
    finally:
        gc.enable()


def test_remove_leaves_a_plain_module():
    module = nn.Linear(4, 4)
    before = set(vars(module))
    ours.l1_unstructured(module, "weight", 0.5)
    ours.l1_unstructured(module, "bias", 0.5)
    ours.remove(module, "bias")
    assert is_fresh(module.double())
    ours.remove(module, "weight")
    assert set(vars(module)) == before
    assert not module._forward_pre_hooks
    assert not module._load_state_dict_post_hooks
    nn.Linear(4, 4).load_state_dict(module.state_dict())


def test_a_refresh_has_a_graph_even_without_grad_mode():
    with torch.no_grad():
        module = ours.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)
        module.load_state_dict(module.state_dict())
        module.double()
    assert module.weight.grad_fn is not None
    assert type(module) is nn.Linear


def test_a_step_of_another_optimizer_does_not_touch_the_module():
    module, other = ours.l1_unstructured(nn.Linear(4, 4), "weight", 0.5), nn.Linear(4, 4)
    weight = module.weight
    other(torch.ones(1, 4)).sum().backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    assert module.weight is weight
