"""Defects of torch's `ActivationSparsifier` that are fixed here. Each test in `FIXED` passes for ours and fails for torch's."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Theirs

from secateur.drop_in.ao_pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Ours

FIXED = {}


def fixed(test):
    FIXED[test.__name__] = test
    return test


def add(data, x):
    return data + x


def mean(data):
    return data.mean(0)


def above_median(data):
    return (data.abs() > data.abs().median()).to(data.dtype)


def nothing(data):
    return torch.zeros_like(data)


def made(library, mask_fn=above_median, layers=(0, 2), **config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    sparsifier = library(model, add, mean, mask_fn, **config)
    for layer in layers:
        sparsifier.register_layer(model[layer])
    return model, sparsifier


def squashed(library, mask_fn=above_median, **config):
    model, sparsifier = made(library, mask_fn, **config)
    model(torch.randn(3, 4))
    sparsifier.step()
    sparsifier.squash_mask()
    return model, sparsifier


def hooks(layer):
    return len(layer._forward_pre_hooks)


FEATURES = {"features": [0, 2], "feature_dim": 1}
COMPILED = [("eager", FEATURES), ("aot_eager", {})]


@fixed
def the_input_of_the_caller_is_not_changed(library):
    model, _ = squashed(library, nothing, **FEATURES)
    x = torch.ones(3, 4)
    y = model(x)
    assert torch.equal(x, torch.ones(3, 4))
    assert not torch.equal(y, model[2](model[1](nn.functional.linear(x, model[0].weight, model[0].bias))))


@fixed
def gradients_reach_the_features_that_are_kept(library):
    model, _ = squashed(library, nothing, layers=(0,), **FEATURES)
    x = torch.ones(3, 4, requires_grad=True)
    model(x).sum().backward()
    assert x.grad is not None
    assert not x.grad[:, [0, 2]].any()
    assert x.grad[:, [1, 3]].any()


@fixed
def further_inputs_reach_the_layer(library):
    model = nn.ModuleDict({"both": nn.Bilinear(4, 4, 2)})
    sparsifier = library(model, add, mean, nothing)
    sparsifier.register_layer(model["both"])
    x = torch.ones(3, 4)
    model["both"](x, x)
    sparsifier.step()
    sparsifier.squash_mask()
    assert torch.equal(model["both"](x, x), model["both"].bias.expand(3, 2))


@fixed
def loading_a_state_replaces_the_hooks(library):
    model, sparsifier = made(library)
    model(torch.ones(3, 4))
    sparsifier.load_state_dict(sparsifier.state_dict())
    assert hooks(model[0]) == hooks(model[2]) == 1
    model(torch.ones(3, 4))
    assert torch.equal(sparsifier.data_groups["0"]["data"], torch.full((3, 4), 2.0))


@fixed
def loading_leaves_the_state_as_it_was(library):
    state = made(library)[1].state_dict()
    before = copy.deepcopy(state)
    first, second = (made(library, layers=())[1] for _ in range(2))
    first.load_state_dict(state)
    second.load_state_dict(state)
    first.model(torch.ones(3, 4))
    assert "data" not in second.data_groups["0"]
    assert state == before


@fixed
def a_smaller_last_batch_is_aggregated(library):
    model, sparsifier = made(library)
    a, b = torch.randn(4, 4), torch.randn(3, 4)
    model(a)
    model(b)
    assert torch.equal(sparsifier.data_groups["0"]["data"], torch.cat([a[:3] + b, a[3:]]))
    sparsifier.step()


@fixed
def a_last_batch_of_one_counts_once(library):
    model, sparsifier = made(library)
    a, b = torch.randn(4, 4), torch.randn(1, 4)
    model(a)
    model(b)
    assert torch.equal(sparsifier.data_groups["0"]["data"], torch.cat([a[:1] + b, a[1:]]))


@fixed
def a_larger_batch_is_aggregated_feature_by_feature(library):
    model, sparsifier = made(library, features=[3], feature_dim=1)
    a, b = torch.randn(2, 4), torch.randn(5, 4)
    model(a)
    model(b)
    assert torch.equal(sparsifier.data_groups["0"]["data"][0], torch.cat([a[:, 3:] + b[:2, 3:], b[2:, 3:]]))


@fixed
def what_is_aggregated_keeps_no_graph(library):
    model, sparsifier = made(library)
    model(torch.randn(3, 4, requires_grad=True))
    for name in ("0", "2"):
        assert not sparsifier.data_groups[name]["data"].requires_grad


@fixed
def data_gathered_under_inference_mode_gives_masks(library):
    model, sparsifier = made(library)
    with torch.inference_mode():
        model(torch.randn(3, 4))
    model(torch.randn(3, 4))
    sparsifier.step()
    sparsifier.squash_mask()
    model(torch.randn(3, 4)).sum().backward()


@fixed
def masks_follow_the_model_to_another_dtype(library):
    model, _ = squashed(library)
    assert model.to(torch.bfloat16)(torch.ones(3, 4, dtype=torch.bfloat16)).dtype == torch.bfloat16


@fixed
def masks_follow_the_model_to_another_device(library):
    model, _ = squashed(library, **FEATURES)
    assert model.to("meta")(torch.ones(3, 4, device="meta")).is_meta


@fixed
def a_feature_may_be_a_list_of_indices(library):
    model, _ = squashed(library, nothing, layers=(0,), features=[0, [2, 3]], feature_dim=1)
    x = torch.randn(3, 4)
    model[0].weight.data.copy_(torch.eye(4))
    model[0].bias.data.zero_()
    assert torch.equal(model[0](x), x * torch.tensor([0.0, 1, 0, 0]))


@fixed
def squash_without_hooks_says_so_and_can_be_followed_by_another(library):
    model, sparsifier = made(library)
    model(torch.randn(3, 4))
    sparsifier.step()
    sparsifier.squash_mask(attach_sparsify_hook=False)
    assert sparsifier.data_groups["0"]["hook_state"] == "None"
    sparsifier.load_state_dict(sparsifier.state_dict())
    assert hooks(model[0]) == 0
    sparsifier.squash_mask()
    assert hooks(model[0]) == 1
    sparsifier.squash_mask(attach_sparsify_hook=False)
    sparsifier.unregister_layer("0")
    assert list(sparsifier.data_groups) == list(sparsifier.state) == ["2"]


@fixed
def a_mask_function_that_fails_leaves_every_mask_as_it_was(library):
    model, sparsifier = made(library)
    model(torch.randn(3, 4))
    sparsifier.step()
    model(torch.randn(3, 4))
    before = {name: sparsifier.get_mask(name).clone() for name in ("0", "2")}
    sparsifier.data_groups["2"]["mask_fn"] = lambda data: 1 / 0
    with pytest.raises(ZeroDivisionError) as raised:
        sparsifier.step()
    for name, mask in before.items():
        assert torch.equal(sparsifier.get_mask(name), mask)
    assert "layer '2'" in raised.value.__notes__[0]
    sparsifier.data_groups["2"]["mask_fn"] = above_median
    sparsifier.step()


@fixed
def registering_again_with_a_wrong_argument_keeps_the_layer(library):
    model, sparsifier = made(library)
    with pytest.raises(AssertionError):
        sparsifier.register_layer(model[0], mask_fn=3)
    assert hooks(model[0]) == 1
    assert "0" in sparsifier.data_groups


@fixed
def an_early_squash_leaves_the_layers_aggregating(library):
    model, sparsifier = made(library)
    with pytest.raises(ValueError, match=r".*"):
        sparsifier.squash_mask()
    model(torch.randn(3, 4))
    sparsifier.step()


@fixed
def a_pickled_sparsifier_goes_on_with_its_own_model(library):
    model, sparsifier = made(library)
    x = torch.randn(3, 4)
    model(x)
    goes_on_alone(pickle.loads(pickle.dumps(sparsifier)), sparsifier, x)
    file = io.BytesIO()
    torch.save(sparsifier, file)
    file.seek(0)
    goes_on_alone(torch.load(file, weights_only=False), sparsifier, x)


@fixed
def a_copied_sparsifier_goes_on_with_its_own_model(library):
    model, sparsifier = made(library)
    x = torch.randn(3, 4)
    model(x)
    goes_on_alone(copy.deepcopy(sparsifier), sparsifier, x)


def goes_on_alone(new, old, x):
    before = old.data_groups["2"]["data"].clone()
    new.model(x)
    assert torch.equal(old.data_groups["2"]["data"], before)
    assert torch.equal(new.data_groups["2"]["data"], 2 * before)
    new.step()
    new.squash_mask()
    assert hooks(new.model[0]) == hooks(old.model[0]) == 1
    twin = copy.deepcopy(new)
    assert torch.equal(twin.model(x), new.model(x))
    twin.get_mask("0").zero_()
    assert new.get_mask("0").any()
    assert not torch.equal(twin.model(x), new.model(x))


@fixed
def a_copied_model_does_not_feed_the_sparsifier_of_the_first(library):
    model, sparsifier = made(library)
    model(torch.ones(3, 4))
    new = copy.deepcopy(model)
    new(torch.ones(3, 4))
    assert torch.equal(sparsifier.data_groups["0"]["data"], torch.ones(3, 4))


@fixed
def a_model_with_masked_inputs_can_be_saved_whole(library):
    model, _ = squashed(library, lambda data: data.gt(0).float())  # a lambda, which cannot be pickled
    new = pickle.loads(pickle.dumps(model))
    x = torch.randn(3, 4)
    assert torch.equal(new(x), model(x))


@pytest.mark.parametrize("name", FIXED)
def test_fixed(name):
    FIXED[name](Ours)


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.filterwarnings("ignore")
def test_the_same_fails_on_torch(name):
    with pytest.raises(BaseException, match=r".*"):
        FIXED[name](Theirs)


@settings(max_examples=60, deadline=None)
@given(sizes=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4)), min_size=1, max_size=6))
def test_a_sum_over_inputs_of_any_sizes_is_exact(sizes):
    """Compares with a table of the largest size, to which every input is added at its own positions."""
    model = nn.Sequential(nn.Identity())
    sparsifier = Ours(model, add, mean, above_median)
    sparsifier.register_layer(model[0])
    table = torch.zeros(5, 4, 3)
    for number, (batch, length) in enumerate(sizes):
        x = torch.arange(batch * length * 3.0).reshape(batch, length, 3) + number
        model(x)
        table[:batch, :length] += x
    batch, length = map(max, zip(*sizes, strict=True))
    assert torch.equal(sparsifier.data_groups["0"]["data"], table[:batch, :length])


def test_positions_that_an_input_does_not_have_stay_as_they_are():
    model, sparsifier = made(Ours, layers=())
    sparsifier.register_layer(model[0], aggregate_fn=lambda data, x: 0.5 * data + x)
    model(torch.ones(3, 4))
    model(torch.ones(1, 4))
    assert sparsifier.data_groups["0"]["data"][:, 0].tolist() == [1.5, 1.0, 1.0]


def test_a_function_that_takes_any_sizes_is_simply_called():
    model, sparsifier = made(Ours, layers=())
    sparsifier.register_layer(model[0], aggregate_fn=lambda data, x: data + x.sum(0))
    for rows in (3, 1, 2):
        model(torch.ones(rows, 4))
    assert torch.equal(sparsifier.data_groups["0"]["data"], torch.full((3, 4), 6.0))


@pytest.mark.parametrize(("backend", "features"), COMPILED, ids=["eager-features", "aot_eager-whole"])
def test_a_masked_model_compiles_in_one_graph_and_exports(backend, features):
    torch._dynamo.reset()
    model, _ = squashed(Ours, **features)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (3, 5):
        x = torch.randn(rows, 4, requires_grad=True)
        assert torch.equal(compiled(x), model(x))
    for strict in (False, True):
        program = torch.export.export(model, (x,), dynamic_shapes=({0: torch.export.Dim("batch")},), strict=strict)
        y = torch.randn(7, 4)
        assert torch.equal(program.module()(y), model(y))


@pytest.mark.parametrize(("backend", "features"), COMPILED, ids=["eager-features", "aot_eager-whole"])
def test_a_model_that_aggregates_compiles_in_one_graph(backend, features):
    torch._dynamo.reset()
    (model, mine), (plain, reference) = made(Ours, **features), made(Ours, **features)
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for rows in (3, 3, 5, 1):
        x = torch.randn(rows, 4)
        compiled(x).sum().backward()
        plain(x)
    for name in ("0", "2"):
        a, b = mine.data_groups[name]["data"], reference.data_groups[name]["data"]
        assert all(map(torch.equal, a, b))
    mine.step()
    mine.squash_mask()
    x = torch.randn(2, 4)
    assert torch.equal(compiled(x), model(x))


@pytest.mark.parametrize("strict", [False, True])
def test_exporting_a_model_that_aggregates_leaves_its_sparsifier_alone(strict):
    model, sparsifier = made(Ours)
    x = torch.randn(3, 4)
    program = torch.export.export(model, (x,), strict=strict)
    assert "data" not in sparsifier.data_groups["0"]
    assert torch.equal(program.module()(x), model(x))
    assert torch.equal(sparsifier.data_groups["0"]["data"], x)
