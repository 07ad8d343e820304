"""Compares `ActivationSparsifier` with torch's: aggregated data, masks, outputs, states, errors and repr."""

from __future__ import annotations

import copy
import inspect
import io
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.ao.pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Theirs

from secateur.drop_in.ao_pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Ours
from secateur.drop_in.ao_pruning._experimental.activation_sparsifier.activation_sparsifier import __all__ as names


def lowest_to_zero(data, sparsity_level=0.5):
    mask = torch.ones_like(data)
    mask.view(-1)[data.abs().reshape(-1).sort(stable=True).indices[: round(sparsity_level * data.numel())]] = 0
    return mask


def add(data, x):
    return data + x


def add_in_place(data, x):
    return data.add_(x)


def mean(data):
    return data.mean(0)


AGGREGATIONS = {
    "add": add,
    "add-in-place": add_in_place,
    "largest": lambda data, x: torch.maximum(data, x.abs()),
    "moving-average": lambda data, x: 0.9 * data + 0.1 * x,
    "last": lambda data, x: x,
    "cat": lambda data, x: torch.cat([data, x]),
    "sum-over-batch": lambda data, x: data + x.sum(0),
    "count-and-sum": lambda data, x: (1, x.sum(0)) if isinstance(data, torch.Tensor) else (data[0] + 1, data[1] + x.sum(0)),
}
STATES = ("registered", "aggregated", "stepped", "squashed")


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Identity(), nn.Linear(8, 3))


def sparsifier(library, model, aggregate_fn=add, reduce_fn=mean):
    """Makes a sparsifier with one layer masked as a whole and one masked by features."""
    made = library(model, aggregate_fn, reduce_fn, lowest_to_zero, sparsity_level=0.5)
    made.register_layer(model[0], sparsity_level=0.3)
    made.register_layer(model[2], features=[0, 3, 5], feature_dim=1)
    return made


def bring_to(state, made):
    torch.manual_seed(1)
    if state != "registered":
        for _ in range(3):
            made.model(torch.randn(5, 6))
    if state in ("stepped", "squashed"):
        made.step()
    if state == "squashed":
        made.squash_mask()
    return made


def same(a, b):
    """Returns whether two values are equal, comparing tensors inside lists, tuples and dicts by dtype and value."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.layout == b.layout and torch.equal(dense(a), dense(b))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return type(a) is type(b) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


def dense(tensor):
    return tensor.to_dense() if tensor.is_sparse else tensor


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_data_masks_and_outputs_are_torchs(aggregation):
    fn = AGGREGATIONS[aggregation]
    reduce_fn = (lambda data: data[1] / data[0]) if aggregation == "count-and-sum" else mean
    mine, other = (sparsifier(library, net(), fn, reduce_fn) for library in (Ours, Theirs))
    for _ in range(2):  # the second round of aggregation starts from zero
        for made in (mine, other):
            bring_to("aggregated", made)
        for name in ("0", "2"):
            assert same(mine.data_groups[name]["data"], other.data_groups[name]["data"])
            assert same(mine.get_mask(name), other.get_mask(name))
        for made in (mine, other):
            made.step()
        for name in ("0", "2"):
            assert same(mine.get_mask(name), other.get_mask(name))
            assert "data" not in mine.data_groups[name]
    for made in (mine, other):
        made.squash_mask()
    x = torch.randn(4, 6)
    assert torch.equal(mine.model(x.clone()), other.model(x.clone()))


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    dim=st.integers(0, 3),
    whole=st.booleans(),
    level=st.floats(0, 1),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16]),
)
def test_any_shape_dimension_level_and_dtype_gives_torchs_mask_and_output(shape, dim, whole, level, dtype):
    dim %= len(shape)
    features = None if whole else list(range(0, shape[dim], 2))
    results = []
    for library in (Ours, Theirs):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Identity())
        made = library(model, add, lambda data: data, lowest_to_zero, sparsity_level=level)
        made.register_layer(model[0], features=features, feature_dim=dim)
        for _ in range(2):
            model(torch.randn(shape).to(dtype))
        made.step()
        made.squash_mask()
        results.append((made.get_mask(layer=model[0]), model(torch.randn(shape).to(dtype))))
    assert same(*results)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    ("saver", "loader"), [(Ours, Theirs), (Theirs, Ours), (Ours, Ours)], ids=["to-torch", "from-torch", "own"]
)
def test_a_state_saved_by_one_continues_in_the_other(state, saver, loader):
    first = bring_to(state, sparsifier(saver, net()))
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    file.seek(0)
    second = loader(net())
    second.load_state_dict(torch.load(file, weights_only=False))
    assert second.defaults == first.defaults
    for _ in range(2):
        x = torch.randn(5, 6)
        assert torch.equal(first.model(x), second.model(x))
    for made in (first, second):
        if state != "squashed":
            made.step()
            made.squash_mask()
    assert same(first.get_mask("0"), second.get_mask("0"))
    assert same(first.get_mask("2"), second.get_mask("2"))
    assert torch.equal(first.model(x), second.model(x))


@pytest.mark.parametrize("state", STATES)
def test_the_state_dict_has_torchs_format(state):
    mine, other = (bring_to(state, sparsifier(library, net())).state_dict() for library in (Ours, Theirs))
    assert same(mine, other)
    mine, other = (bring_to(state, sparsifier(library, net())).__get_state__() for library in (Ours, Theirs))
    assert sorted(mine) == sorted(other)
    assert all(same(mine[key], other[key]) for key in mine)


@pytest.mark.parametrize("state", STATES)
def test_the_printed_form_is_torchs(state):
    assert repr(bring_to(state, sparsifier(Ours, net()))) == repr(bring_to(state, sparsifier(Theirs, net())))
    assert repr(Ours(net())) == repr(Theirs(net()))


def test_signatures_attributes_and_names_are_torchs():
    assert names == ["ActivationSparsifier"]
    methods = [name for name, value in vars(Theirs).items() if inspect.isfunction(value) or isinstance(value, staticmethod)]
    assert len(methods) > 10
    for name in methods:
        mine, other = (inspect.signature(getattr(library, name)).parameters.values() for library in (Ours, Theirs))
        assert [(p.name, p.default, p.kind) for p in mine] == [(p.name, p.default, p.kind) for p in other], name
    model = net()
    mine, other = (vars(library(model, add, level=1)) for library in (Ours, Theirs))
    assert same(mine, other)
    assert [type(value) for value in mine.values()] == [type(value) for value in other.values()]


def test_a_subclass_with_its_own_update_mask_works_unchanged():
    def update_mask(self, name, data, configs):
        mask = self.get_mask(name)
        if isinstance(mask, list):
            for one, seen in zip(mask, data, strict=True):
                one[seen < 0] = 0
        else:
            mask[data < 0] = 0

    outputs = []
    for library in (Ours, Theirs):
        made = bring_to("squashed", sparsifier(type("Mine", (library,), {"update_mask": update_mask}), net()))
        outputs.append((made.get_mask("0"), made.get_mask("2"), made.model(torch.ones(5, 6))))
    assert same(*outputs)
    assert 0 < outputs[0][0].mean() < 1


def strictly(made, call):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(made)


def wrong_state(**changes):
    def call(made):
        state = copy.copy(made.state_dict())
        state["data_groups"] = {"typo" if key == "0" else key: value for key, value in state["data_groups"].items()}
        made.load_state_dict(state | changes)

    return call


WRONG = {
    "layer-of-another-model": ("registered", lambda s: s.register_layer(nn.Linear(2, 2)), "not in the model"),
    "features-without-dimension": ("registered", lambda s: s.register_layer(s.model[3], features=[1]), "feature_dim"),
    "aggregate-not-callable": ("registered", lambda s: s.register_layer(s.model[3], aggregate_fn=3), "aggregate_fn=3"),
    "reduce-not-callable": ("registered", lambda s: s.register_layer(s.model[3], reduce_fn="mean"), "reduce_fn='mean'"),
    "mask-not-callable": ("registered", lambda s: s.register_layer(s.model[3], mask_fn=[]), "mask_fn="),
    "registered-twice": ("registered", lambda s: s.register_layer(s.model[0]), "'0' was registered before"),
    "mask-of-nothing": ("stepped", lambda s: s.get_mask(), "name of a registered layer"),
    "mask-of-a-strange-layer": ("stepped", lambda s: s.get_mask(layer=nn.ReLU()), "not in the model"),
    "mask-of-an-unregistered-layer": ("stepped", lambda s: s.get_mask(layer=s.model[3]), "no layer '3'"),
    "mask-of-an-unknown-name": ("stepped", lambda s: s.get_mask("22"), "Did you mean '2'"),
    "mask-before-a-forward": ("registered", lambda s: s.get_mask("0"), "'0' has no mask yet"),
    "squash-before-a-forward": ("registered", lambda s: s.squash_mask(), "'0' has no mask yet"),
    "unregister-unknown": ("stepped", lambda s: s.unregister_layer("00"), "Did you mean '0'"),
    "step-before-a-forward": ("registered", lambda s: s.step(), "'0', '2'; run the model"),
    "step-twice": ("stepped", lambda s: s.step(), "'0', '2'; run the model"),
    "step-after-squash": ("squashed", lambda s: s.step(), "squash_mask has ended the aggregation"),
    "state-of-another-model": ("stepped", wrong_state(), "'typo' of the state is not in the model"),
    "state-without-defaults": ("stepped", lambda s: s.load_state_dict({"state": {}, "data_groups": {}}), "defaults"),
    "called-by-keyword": ("registered", lambda s: s.model[0](input=torch.ones(5, 6)), "'0' was called without positional"),
    "not-a-tensor": ("registered", lambda s: s.model[0]("text"), "'0' is a str"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_call_raises_torchs_type_says_why_and_changes_nothing(case):
    state, call, words = WRONG[case]
    theirs = bring_to(state, sparsifier(Theirs, net()))
    with pytest.raises(Exception) as raised:  # noqa: PT011  # any type: the point is that ours is the same
        strictly(theirs, call)
    mine = bring_to(state, sparsifier(Ours, net()))
    hooks = [list(layer._forward_pre_hooks.items()) for layer in mine.model]
    before, groups = copy.deepcopy(mine.state_dict()), {name: dict(config) for name, config in mine.data_groups.items()}
    with pytest.raises(raised.type, match=r".*") as error:
        strictly(mine, call)
    assert error.type is raised.type
    assert words in str(error.value)
    assert same(mine.state_dict(), before)
    assert {name: dict(config) for name, config in mine.data_groups.items()} == groups
    assert [list(layer._forward_pre_hooks.items()) for layer in mine.model] == hooks
