"""Sparsifiers in real programs: shared layers, subclasses, states of other models, wrong settings."""

import copy

import pytest
import torch
from torch import nn

from secateur.drop_in.ao_pruning import BaseSparsifier, CubicSL, LambdaSL, WeightNormSparsifier
from secateur.drop_in.ao_pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier
from secateur.drop_in.ao_pruning._experimental.data_sparsifier import DataNormSparsifier


def two() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))


def prepared(model=None, **settings):
    model = model or two()
    sparsifier = WeightNormSparsifier(**settings)
    sparsifier.prepare(model, None)
    return model, sparsifier


def test_a_layer_in_two_places_is_prepared_once():
    shared = nn.Linear(8, 8)
    model = nn.Sequential(nn.Sequential(shared), nn.Sequential(shared))
    _, sparsifier = prepared(model)
    assert len(sparsifier.groups) == 1
    sparsifier.step()
    sparsifier.squash_mask()
    assert int((shared.weight == 0).sum()) == 32


@pytest.mark.parametrize("wrong", [{"zeros_per_block": 9}, {"sparse_block_shape": (0, 4)}])
def test_a_wrong_setting_of_the_second_tensor_leaves_the_mask_of_the_first(wrong):
    model, sparsifier = prepared()
    sparsifier.groups[1].update(wrong)
    with pytest.raises(ValueError, match="weight"):
        sparsifier.step()
    assert all(bool(layer.parametrizations.weight[0].mask.all()) for layer in model)


class OldFashioned(WeightNormSparsifier):
    """Defines its own `__getstate__`, as sparsifiers written for torch do."""

    def __getstate__(self):
        return {"defaults": self.defaults, "state": self.state, "groups": self.groups, "norm_fn": self.norm_fn}


def test_a_subclass_that_says_what_its_state_is_can_be_copied_and_stepped():
    model = two()
    sparsifier = OldFashioned()
    sparsifier.prepare(model, None)
    twin = copy.deepcopy(sparsifier)
    twin.step()
    assert bool(model[0].parametrizations.weight[0].mask.all())
    assert int((twin.groups[0]["module"].parametrizations.weight[0].mask == 0).sum()) == 32


def test_loading_a_state_removes_masks_of_tensors_that_it_does_not_name():
    _, source = prepared()
    state = source.state_dict()
    first = {"state": {"0.weight": state["state"]["0.weight"]}, "groups": state["groups"][:1]}
    model = two()
    sparsifier = WeightNormSparsifier()
    sparsifier.prepare(model, [{"tensor_fqn": "1.weight"}])
    sparsifier.load_state_dict(first)
    sparsifier.squash_mask()
    assert not any(nn.utils.parametrize.is_parametrized(layer) for layer in model)


def test_a_sparsifier_that_goes_on_with_a_smaller_model_reloads_its_own_state():
    _, sparsifier = prepared()
    sparsifier.squash_mask()
    sparsifier.prepare(nn.Sequential(nn.Linear(8, 8)), None)
    sparsifier.step()
    sparsifier.load_state_dict(sparsifier.state_dict())
    assert list(sparsifier.state) == ["0.weight"]


def test_a_value_that_is_not_a_state_is_refused():
    _, sparsifier = prepared()
    with pytest.raises(KeyError, match="needs the keys 'state' and 'groups'"):
        sparsifier.load_state_dict({})


def test_new_settings_are_what_a_new_scheduler_starts_from():
    model, sparsifier = prepared(sparsity_level=0.8)
    LambdaSL(sparsifier, lambda epoch: 0.5)
    assert sparsifier.groups[0]["sparsity_level"] == 0.4
    sparsifier.prepare(model, [{"tensor_fqn": "0.weight", "sparsity_level": 0.4}])
    assert LambdaSL(sparsifier, lambda epoch: 1.0).base_sl == [0.4, 0.8]


def test_a_scheduler_does_not_share_lists_with_the_state_it_loads():
    _, sparsifier = prepared()
    scheduler = CubicSL(sparsifier)
    state = scheduler.state_dict()
    scheduler.load_state_dict(state)
    scheduler.base_sl[0] = 0.1
    assert state["base_sl"][0] == 0.5


def test_the_state_of_a_scheduler_for_another_number_of_groups_is_refused():
    state = CubicSL(prepared()[1]).state_dict()
    one = WeightNormSparsifier()
    one.prepare(nn.Sequential(nn.Linear(8, 8)), None)
    with pytest.raises(ValueError, match="1 groups, and this state_dict is for 2"):
        CubicSL(one).load_state_dict(state)


def test_a_single_name_of_a_setting_to_keep_means_a_tuple_of_one():
    model, sparsifier = prepared()
    sparsifier.squash_mask(params_to_keep="sparse_block_shape")
    assert model[0].sparse_params == {"sparse_block_shape": (1, 4)}


def test_weights_whose_squares_overflow_are_ranked_without_a_warning():
    model = nn.Sequential(nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1e30] * 4 + [1e-25] * 4, [1.0] * 8]))
    _, sparsifier = prepared(model)
    sparsifier.step()
    mask = sparsifier.state["0.weight"]["mask"]
    assert bool(mask[0, :4].all())
    assert not bool(mask[0, 4:].any())


def test_squashed_data_are_zero_in_the_memory_they_came_in():
    memory = torch.arange(1.0, 9.0)
    sparsifier = DataNormSparsifier([("part", memory[4:])], sparsity_level=0.5, sparse_block_shape=(1, 1))
    sparsifier.step()
    sparsifier.squash_mask()
    assert memory.tolist() == [1, 2, 3, 4, 0, 0, 7, 8]


class RunningMean:
    def __init__(self):
        self.calls = 0

    def __call__(self, data, x):
        self.calls += 1
        return data + (x - data) / self.calls


def test_a_function_that_counts_its_calls_counts_inputs_only():
    model = nn.Sequential(nn.Linear(1, 1))
    mean = RunningMean()
    sparsifier = ActivationSparsifier(model, aggregate_fn=mean, reduce_fn=lambda d: d, mask_fn=torch.ones_like)
    sparsifier.register_layer(model[0])
    for value, rows in ((1.0, 3), (3.0, 3), (5.0, 2)):
        model(torch.full((rows, 1), value))
    assert sparsifier.data_groups["0"]["aggregate_fn"].calls == 3
    assert sparsifier.data_groups["0"]["data"].reshape(-1).tolist() == [3.0, 3.0, 2.0]


def test_hooks_that_take_keyword_arguments_survive_a_swap():
    from secateur.drop_in.ao_pruning.sparsifier.utils import swap_module

    class Twin(nn.Linear):
        @classmethod
        def from_dense(cls, mod):
            return cls(mod.in_features, mod.out_features)

    seen = []
    layer = nn.Linear(4, 4)
    layer.register_forward_pre_hook(lambda module, args, kwargs: seen.append(kwargs), with_kwargs=True)
    layer.register_forward_hook(lambda module, args, kwargs, output: seen.append(kwargs), with_kwargs=True)
    swap_module(layer, {nn.Linear: Twin})(input=torch.ones(1, 4))
    assert [list(kwargs) for kwargs in seen] == [["input"], ["input"]]


def test_the_base_class_is_still_abstract():
    with pytest.raises(TypeError, match="update_mask"):
        BaseSparsifier()
