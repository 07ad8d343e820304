"""Wrong input raises the error types of torch.ao.pruning with a helpful message, and changes nothing."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.ao.pruning as theirs
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

import secateur.drop_in.ao_pruning as ours
from secateur.drop_in.ao_pruning.sparsifier.utils import swap_module


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4, bias=False))


def prepared(library, **settings):
    model, sparsifier = net(), library.WeightNormSparsifier(**settings)
    sparsifier.prepare(model, None)
    return model, sparsifier


class Fussy(nn.Module):
    """A parametrization that some tensors cannot have."""

    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        return x if x.shape[0] == 8 else x[:1]


FIRST = {"tensor_fqn": "0.weight"}
BAD_CONFIGS = {
    "no list": (FIRST, AssertionError, "tensor_fqn"),
    "modules": ([nn.Linear(1, 1)], AssertionError, "list of dicts"),
    "no name": ([FIRST, {"sparsity_level": 0.5}], AssertionError, "has no 'tensor_fqn'"),
    "unlike module": ([FIRST, {"tensor_fqn": "2.weight", "module": nn.Linear(1, 1)}], AssertionError, "has module="),
    "unlike fqn": ([FIRST, {"tensor_fqn": "2.weight", "module_fqn": "0"}], AssertionError, "has module_fqn='0'"),
    "unlike name": ([FIRST, {"tensor_fqn": "2.weight", "tensor_name": "bias"}], AssertionError, "has tensor_name='bias'"),
    "unknown layer": ([FIRST, {"tensor_fqn": "3.weight"}], AttributeError, r"'3\.weight'.*Did you mean.*'2\.weight'"),
    "unknown tensor": ([FIRST, {"tensor_fqn": "0.wieght"}], AttributeError, r"Did you mean '0\.weight'"),
    "dot in front": ([FIRST, {"tensor_fqn": ".0.weight"}], AttributeError, r"Did you mean '0\.weight'"),
    "no bias": ([FIRST, {"tensor_fqn": "2.bias"}], TypeError, r"'2\.bias' is None"),
    "mask of another shape": (
        [FIRST, {"tensor_fqn": "2.weight", "mask": torch.ones(2, 2)}],
        AssertionError,
        r"\(2, 2\).*\(4, 8\)",
    ),
    "fussy": ([FIRST, {"tensor_fqn": "2.weight", "parametrization": Fussy}], ValueError, "shape"),
    "no tensor": ([FIRST, {"tensor_fqn": "2.in_features"}], TypeError, r"'2\.in_features' is 8"),
}


@pytest.mark.parametrize("name", BAD_CONFIGS)
def test_a_bad_config_raises_as_torch_does_and_leaves_the_model_as_it_was(name):
    config, error, text = BAD_CONFIGS[name]
    with pytest.raises(error):
        theirs.WeightNormSparsifier().prepare(net(), config)
    model, sparsifier = net(), ours.WeightNormSparsifier()
    before, attributes = list(model.state_dict()), copy.deepcopy(vars(sparsifier))
    with pytest.raises(error, match=text):
        sparsifier.prepare(model, config)
    assert not any(is_parametrized(module) for module in model.modules())
    assert {type(module) for module in model} == {nn.Linear, nn.ReLU}
    assert set(model.state_dict()) == set(before)
    assert vars(sparsifier) == attributes


def test_a_bad_config_leaves_the_masks_that_were_there():
    model, sparsifier = prepared(ours)
    sparsifier.step()
    mask, groups = model[0].parametrizations.weight[0].mask, list(sparsifier.groups)
    model.plain = torch.ones(2)  # neither a parameter nor a buffer; torch notices that after it has added the first mask
    with pytest.raises(ValueError, match="plain"):
        sparsifier.prepare(model, [{"tensor_fqn": "0.bias"}, {"tensor_fqn": "2.weight"}, {"tensor_fqn": "plain"}])
    assert not is_parametrized(model[0], "bias")
    assert model[0].parametrizations.weight[0].mask is mask
    assert sparsifier.groups == groups
    sparsifier.step()


def test_a_tensor_is_named_once():
    with pytest.raises(AssertionError, match=r"'0\.weight' 2 times"):
        ours.WeightNormSparsifier().prepare(net(), [FIRST, FIRST])


def test_defaults_are_a_dict():
    for library in (ours, theirs):
        sparsifier = library.WeightNormSparsifier()
        sparsifier.defaults = 3
        with pytest.raises(AssertionError):
            sparsifier.prepare(net(), [FIRST])


def test_the_base_cannot_be_made():
    for library in (ours, theirs):
        with pytest.raises(TypeError):
            library.BaseSparsifier()


@pytest.mark.parametrize("norm", [0, 3, "fro", math.inf])
def test_an_unknown_norm(norm):
    for library in (ours, theirs):
        with pytest.raises(NotImplementedError, match=str(norm)):
            library.WeightNormSparsifier(norm=norm)


BAD_LEVELS = {
    "too many zeros": ({"zeros_per_block": 5}, ValueError, "zeros_per_block=5"),
    "negative zeros": ({"zeros_per_block": -1}, ValueError, "zeros_per_block=-1"),
    "level that is no number": ({"sparsity_level": math.nan}, ValueError, "NaN"),
}


@pytest.mark.parametrize("name", BAD_LEVELS)
def test_a_bad_setting_raises_as_torch_does_and_leaves_the_mask(name):
    settings, error, text = BAD_LEVELS[name]
    for library in (theirs, ours):
        model, sparsifier = prepared(library, **settings)
        with pytest.raises(error) as caught:
            sparsifier.step()
    assert text in str(caught.value)
    assert model[0].parametrizations.weight[0].mask.all()


@pytest.mark.parametrize("block", [(-1, -4), (1, 2, 3)], ids=str)
def test_a_block_that_is_none_leaves_the_mask(block):
    model, sparsifier = prepared(ours, zeros_per_block=0)
    sparsifier.groups[0].update(sparse_block_shape=block, zeros_per_block=math.prod(block))
    with pytest.raises(ValueError, match="both at least 1"):
        sparsifier.step()
    assert model[0].parametrizations.weight[0].mask.all()


@pytest.mark.parametrize(
    "settings",
    [{}, {"zeros_per_block": 2}, {"sparse_block_shape": (1, 1)}, {"norm": torch.abs}],
    ids=["blocks", "zeros per block", "elements", "a norm of one's own"],
)
def test_nan_is_an_error_that_names_the_tensor_and_leaves_the_mask(settings):
    model, sparsifier = prepared(ours, **settings)
    model[0].parametrizations.weight.original.data[3, 3] = torch.nan
    with pytest.raises(ValueError, match=r"'0\.weight' contain NaN"):
        sparsifier.step()
    assert model[0].parametrizations.weight[0].mask.all()


@pytest.mark.parametrize(
    ("make", "wrong", "error"),
    [
        (ours.WeightNormSparsifier, {"sparsity_level": math.nan}, ValueError),
        (ours.WeightNormSparsifier, {"sparsity_level": None}, TypeError),
        (ours.WeightNormSparsifier, {"sparse_block_shape": (1.5, 4)}, TypeError),
        (ours.WeightNormSparsifier, {"zeros_per_block": 1.5}, TypeError),
        (ours.NearlyDiagonalSparsifier, {"nearliness": 2}, ValueError),
        (ours.NearlyDiagonalSparsifier, {"nearliness": 99}, ValueError),
        (ours.NearlyDiagonalSparsifier, {"nearliness": None}, TypeError),
    ],
    ids=str,
)
def test_a_wrong_setting_of_the_last_tensor_is_found_before_the_first_mask_is_changed(make, wrong, error):
    model, sparsifier = net(), make()
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}, {"tensor_fqn": "2.weight", **wrong}])
    with pytest.raises(error, match=r"2\.weight"):
        sparsifier.step()
    assert bool((sparsifier.state["0.weight"]["mask"] == 1).all())


@pytest.mark.parametrize("shape", [(4, 4, 1), (8,)], ids=str)
def test_only_a_matrix_has_a_diagonal(shape):
    for library in (ours, theirs):
        module = nn.Module()
        module.weight = nn.Parameter(torch.randn(shape))
        sparsifier = library.NearlyDiagonalSparsifier()
        sparsifier.prepare(module, [{"tensor_fqn": "weight"}])
        with pytest.raises(ValueError):  # noqa: PT011  torch's words are others
            sparsifier.step()


def test_more_diagonals_than_there_are():
    for library in (ours, theirs):
        model, sparsifier = net(), library.NearlyDiagonalSparsifier(nearliness=9)
        sparsifier.prepare(model, [{"tensor_fqn": "2.weight"}])
        with pytest.raises(ValueError, match="nearliness"):
            sparsifier.step()


def test_squashing_and_stepping_after_squashing():
    for library in (ours, theirs):
        _, sparsifier = prepared(library)
        sparsifier.squash_mask()
        with pytest.raises(ValueError, match="weight"):
            sparsifier.squash_mask()
        with pytest.raises(AttributeError):
            sparsifier.step()


def test_a_setting_to_keep_that_is_not_there_leaves_the_model_prepared():
    for library in (theirs, ours):
        model, sparsifier = prepared(library)
        with pytest.raises(KeyError, match="sparse_block"):
            sparsifier.squash_mask(params_to_keep=("sparse_block",))
    assert all(is_parametrized(model[at], "weight") for at in (0, 2))
    with pytest.raises(KeyError, match="sparse_block_shape"):
        sparsifier.squash_mask(params_to_keep_per_layer={"2": ("sparse_block",)})
    assert all(is_parametrized(model[at], "weight") for at in (0, 2))


def test_loading_without_a_model_and_into_another_model():
    for library in (ours, theirs):
        _, source = prepared(library)
        with pytest.raises(AttributeError, match="model"):
            library.WeightNormSparsifier().load_state_dict(source.state_dict())
        other = library.WeightNormSparsifier()
        other.prepare(nn.Sequential(nn.Linear(8, 8)), None)
        with pytest.raises(RuntimeError, match=r"2\.weight"):
            other.load_state_dict(source.state_dict())


def test_a_failed_conversion_changes_nothing():
    class Picky(nn.Linear):
        @classmethod
        def from_dense(cls, dense):
            if dense.out_features == 4:
                raise RuntimeError("not this one")
            return cls(dense.in_features, dense.out_features)

    model, sparsifier = prepared(ours)
    before = list(model)
    with pytest.raises(RuntimeError, match="not this one"):
        sparsifier.convert(model, {nn.Linear: Picky}, inplace=True)
    assert list(model) == before
    with pytest.raises(NotImplementedError, match="mapping"):
        sparsifier.convert(model)


def test_a_module_on_two_devices_is_not_swapped():
    layer = nn.Linear(2, 2)
    layer.register_buffer("elsewhere", torch.empty(1, device="meta"))
    with pytest.raises(AssertionError, match=r"cpu.*meta"):
        swap_module(layer, {nn.Linear: nn.Linear})


# --- schedulers -----------------------------------------------------------------------------------------------------------


def test_what_a_scheduler_refuses():
    for library in (ours, theirs):
        _, sparsifier = prepared(library)
        with pytest.raises(TypeError, match="BaseSparsifier"):
            library.BaseScheduler(net())
        with pytest.raises(NotImplementedError):
            library.BaseScheduler(sparsifier)
        with pytest.raises(ValueError, match="2"):
            library.LambdaSL(sparsifier, [lambda epoch: epoch] * 3)
        with pytest.raises(ValueError, match="2"):
            library.CubicSL(sparsifier, init_sl=[0.1, 0.2, 0.3])
        diagonal = library.NearlyDiagonalSparsifier()
        diagonal.prepare(net(), None)
        with pytest.raises(KeyError, match="sparsity_level"):
            library.CubicSL(diagonal)


def test_steps_in_the_wrong_order_are_warned_of_once():
    for library in (ours, theirs):
        _, sparsifier = prepared(library)
        scheduler = library.CubicSL(sparsifier)
        with pytest.warns(UserWarning, match=r"sparsifier\.step\(\)"):
            scheduler.step()
        scheduler.step()
        sparsifier.step()


def test_a_step_that_was_replaced_is_warned_of():
    for library in (ours, theirs):
        _, sparsifier = prepared(library)
        scheduler = library.CubicSL(sparsifier)
        sparsifier.step = lambda: None
        with pytest.warns(UserWarning, match=r"sparsifier\.step"):
            scheduler.step()


def test_asking_for_levels_outside_a_step_warns():
    for library in (ours, theirs):
        _, sparsifier = prepared(library)
        for scheduler in (library.CubicSL(sparsifier), library.LambdaSL(sparsifier, lambda epoch: 1.0)):
            with pytest.warns(UserWarning, match="get_last_sl"):
                assert len(scheduler.get_sl()) == 2


def test_a_level_function_that_raises_leaves_the_flag_and_the_levels():
    _, sparsifier = prepared(ours)
    scheduler = ours.LambdaSL(sparsifier, lambda epoch: 1 / (1 - epoch))
    sparsifier.step()
    with pytest.raises(ZeroDivisionError):
        scheduler.step()
    assert scheduler._get_sl_called_within_step is False
    assert [g["sparsity_level"] for g in sparsifier.groups] == [0.5, 0.5]
