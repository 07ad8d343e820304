"""Defects of torch's data sparsifiers that are fixed here, with a run of torch's where it shows the defect."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.pruning._experimental import data_sparsifier as theirs
from torch.nn.utils.parametrize import is_parametrized

from secateur.drop_in.ao_pruning._experimental.data_sparsifier import BaseDataSparsifier, DataNormSparsifier

from .conftest import distinct


class KeepsFirst(BaseDataSparsifier):
    """Keeps the first `keep` rows, times a factor that is a class attribute."""

    def __init__(self, data_list: list[tuple[str, Any]] | None = None, keep: int = 1, note: str = "") -> None:
        super().__init__(data_list=data_list, keep=keep)
        self.note = note

    def update_mask(self, name: str, data: Tensor, keep: int, **kwargs: Any) -> None:  # type: ignore[override]
        self.get_mask(name)[keep:] = 0


def through_pickle(one: Any) -> Any:
    return pickle.loads(pickle.dumps(one))


# --- shapes and dtypes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(8,), (8, 1), (1, 8), (1,), (1, 1), (), (1, 2, 4), (2, 1, 4)], ids=str)
def test_data_of_any_shape_with_at_most_two_long_axes_can_be_masked(shape):
    sparsifier = DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1))
    data = distinct(shape, torch.float32)
    sparsifier.add_data("w", data)
    sparsifier.step()
    masked = sparsifier.get_data("w", return_original=False)
    assert masked.shape == torch.Size(shape)
    dropped = round(data.numel() / 2)
    assert (masked == 0).sum() == dropped
    assert set(data[masked == 0].abs().tolist()) == set(data.abs().flatten().sort().values[:dropped].tolist())
    sparsifier.squash_mask()
    assert (data == 0).sum() == dropped


def test_torch_gives_1d_data_a_mask_that_does_not_fit():
    for shape in [(8,), (8, 1)]:
        sparsifier = theirs.DataNormSparsifier(data_list=[("w", torch.randn(shape))], sparse_block_shape=(1, 1))
        sparsifier.step()
        assert sparsifier.get_mask("w").shape == (1, 8)
        with pytest.raises(AssertionError):
            sparsifier.get_data("w", return_original=False)


def test_a_mask_of_the_wrong_shape_in_a_file_of_torch_is_put_right():
    data = [("row", distinct((12,), torch.float32)), ("column", distinct((8, 1), torch.float32))]
    saver = theirs.DataNormSparsifier(data_list=data, sparsity_level=0.5)
    saver.step()
    loader = DataNormSparsifier()
    loader.load_state_dict(saver.state_dict())
    for name, one in data:
        assert torch.equal(loader.get_data(name, return_original=False), one * saver.get_mask(name).reshape(one.shape))


def test_data_without_elements_are_left_in_peace():
    sparsifier = DataNormSparsifier(data_list=[("none", torch.empty(0, 4)), ("some", torch.ones(1, 8))])
    sparsifier.step()
    assert sparsifier.get_data("none", return_original=False).shape == (0, 4)
    assert sparsifier.get_mask("some").sum() == 4


def test_a_mask_keeps_one_dtype_and_one_object():
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        sparsifier = DataNormSparsifier(sparsity_level=0.5)
        sparsifier.add_data("w", distinct((4, 8), torch.float32).to(dtype))
        mask = sparsifier.get_mask("w")
        sparsifier.step()
        assert sparsifier.get_mask("w") is mask
        assert mask.dtype == dtype
        assert sparsifier._container.parametrizations["w"][0].mask is mask  # type: ignore[index]
        sparsifier.squash_mask()
        assert sparsifier.get_data("w", return_original=False).dtype == dtype


def test_squares_that_half_precision_cannot_hold_are_still_ranked():
    data = torch.tensor([[400.0, 300.0, 500.0, 600.0], [1e-4, 3e-4, 2e-4, 5e-4]]).half().reshape(4, 2)
    sparsifier = DataNormSparsifier(data_list=[("w", data)], norm="L2", sparse_block_shape=(1, 2), sparsity_level=0.75)
    sparsifier.step()
    assert sparsifier.get_mask("w").tolist() == [[0, 0], [1, 1], [0, 0], [0, 0]]


def test_whole_numbers_are_ranked():
    sparsifier = DataNormSparsifier(data_list=[("w", torch.arange(8).reshape(1, 8))], sparsity_level=0.5)
    sparsifier.step()
    assert sparsifier.get_data("w", return_original=False).tolist() == [[0, 0, 0, 0, 4, 5, 6, 7]]


def test_a_level_below_zero_prunes_nothing():
    data = distinct((1, 10), torch.float32)
    mine = DataNormSparsifier(data_list=[("w", data)], sparsity_level=-0.3, sparse_block_shape=(1, 1))
    other = theirs.DataNormSparsifier(data_list=[("w", data)], sparsity_level=-0.3, sparse_block_shape=(1, 1))
    mine.step()
    other.step()
    assert mine.get_mask("w").all()
    assert not other.get_mask("w").all()  # torch slices its sorted list from the wrong end


# --- names ----------------------------------------------------------------------------------------------------------


def test_names_with_dots_live_through_everything():
    data = {
        "layer.0.weight": distinct((4, 8), torch.float32),
        "layer_0.weight": nn.Parameter(distinct((2, 4), torch.float32, 1)),
    }
    sparsifier = DataNormSparsifier(data_list=list(data.items()), sparsity_level=0.5)
    sparsifier.step()
    state = sparsifier.state_dict()
    assert set(state["_container"]) == {f"parametrizations.{name}.original" for name in data}
    assert list(state["state"]) == list(state["data_groups"]) == list(data)
    assert "name: layer.0.weight\n" in repr(sparsifier)
    with pytest.warns(UserWarning, match=r"layer\.0\.weight"):
        sparsifier.add_data("layer.0.weight", distinct((4, 8), torch.float32))
    other = DataNormSparsifier()
    other.load_state_dict(state)
    for one in (sparsifier, other, copy.deepcopy(sparsifier), through_pickle(sparsifier)):
        for name, value in data.items():
            assert torch.equal(one.get_data(name), value)
            assert torch.equal(one.get_mask(name), sparsifier.get_mask(name))
    sparsifier.squash_mask(names=["layer_0.weight"])
    assert set(sparsifier.state_dict()["_container"]) == {"layer_0.weight", "parametrizations.layer.0.weight.original"}
    assert (data["layer_0.weight"] == 0).sum() == 4


# --- copies and states ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("copied", [copy.deepcopy, through_pickle], ids=["deepcopy", "pickle"])
def test_copies_keep_everything_and_share_nothing(copied):
    sparsifier = KeepsFirst([("t", torch.ones(3, 3)), ("p", nn.Parameter(torch.ones(4, 2)))], keep=2, note="mine")
    sparsifier.step()
    sparsifier.squash_mask(names=["t"])
    sparsifier.state["p"]["count"] = 7
    sparsifier.enable_mask_update = False
    other = copied(sparsifier)
    assert other.note == "mine"
    assert other.enable_mask_update is False
    assert other.defaults == {"keep": 2}
    assert other.state["p"]["count"] == 7
    assert other.state == sparsifier.state
    assert dict(other.data_groups) == dict(sparsifier.data_groups)
    assert isinstance(other.get_data("p"), nn.Parameter)
    assert not is_parametrized(other._container, "t")
    for name in ("t", "p"):
        assert torch.equal(other.get_data(name, False), sparsifier.get_data(name, False))
        assert torch.equal(other.get_mask(name), sparsifier.get_mask(name))
    other.enable_mask_update = True
    other.data_groups["p"]["keep"] = 0
    other._delete_data("t")
    other.step()
    assert not other.get_data("p", return_original=False).any()
    assert sparsifier.get_mask("p").sum() == 4
    assert sparsifier.data_groups["p"]["keep"] == 2
    other.add_data("new", torch.ones(2, 2))
    assert set(sparsifier.state) == {"t", "p"}


def test_torch_forgets_attributes_in_a_copy():
    sparsifier = theirs.DataNormSparsifier(data_list=[("w", torch.randn(4, 4))])
    for copied in (copy.deepcopy, through_pickle):
        with pytest.raises(AttributeError):
            copied(sparsifier).step()


def test_a_copy_of_model_and_sparsifier_together_keeps_them_together():
    model = nn.Linear(4, 4)
    sparsifier = DataNormSparsifier(data_list=[("w", model.weight)])
    for copied in (copy.deepcopy, through_pickle):
        again, its = copied((model, sparsifier))
        assert its.get_data("w") is again.weight
        its.step()
        its.squash_mask()
        assert (again.weight == 0).sum() == 8
    assert (model.weight == 0).sum() == 0


def test_loading_neither_changes_nor_shares_the_source():
    saver = KeepsFirst([("a", torch.ones(3, 3)), ("b", torch.ones(3, 3))], keep=2)
    saver.step()
    saver.state["a"]["list"] = [1]
    state = saver.state_dict()
    before = copy.deepcopy(state)
    loader = KeepsFirst()
    loader.load_state_dict(state)
    loader.state["a"]["list"].append(2)
    loader.data_groups["a"]["keep"] = 0
    loader.get_data("a").fill_(5)
    loader.step()
    assert not loader.get_data("a", return_original=False).any()
    for part in ("data_groups", "_container", "state"):
        assert state[part].keys() == before[part].keys()
    assert state["data_groups"] == before["data_groups"]
    assert state["state"]["a"]["list"] == [1]
    assert all(torch.equal(state["_container"][key], value) for key, value in before["_container"].items())
    assert all(torch.equal(state["state"][n]["mask"].to_dense(), before["state"][n]["mask"].to_dense()) for n in "ab")
    assert torch.equal(saver.get_data("a", return_original=False), torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))


def test_a_saved_state_does_not_follow_what_happens_later():
    sparsifier = DataNormSparsifier(data_list=[("w", torch.randn(4, 4))], sparsity_level=0.5)
    state = sparsifier.state_dict()
    sparsifier.data_groups["w"]["sparsity_level"] = 0.9
    sparsifier.step()
    assert state["data_groups"]["w"]["sparsity_level"] == 0.5
    assert state["state"]["w"]["mask"].to_dense().all()


def test_a_state_can_be_loaded_with_weights_only():
    sparsifier = DataNormSparsifier(data_list=[("w", nn.Parameter(distinct((4, 8), torch.float32)))])
    sparsifier.step()
    buffer = io.BytesIO()
    torch.save(sparsifier.state_dict(), buffer)
    buffer.seek(0)
    other = DataNormSparsifier()
    other.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(other.get_data("w", return_original=False), sparsifier.get_data("w", return_original=False))


def test_loading_without_strictness_leaves_data_of_the_same_name_alone():
    saver = KeepsFirst([("both", torch.zeros(2, 2)), ("new", torch.ones(2, 2))], keep=0)
    saver.step()
    own = torch.ones(2, 2)
    loader = KeepsFirst([("both", own)], keep=1)
    loader.load_state_dict(saver.state_dict(), strict=False)
    assert loader.get_data("both") is own
    assert loader.get_mask("both").all()
    assert loader.data_groups["both"] == {"keep": 1}
    assert loader.data_groups["new"] == {"keep": 0}
    assert not loader.get_data("new", return_original=False).any()


class Halved(nn.Module):
    """A custom parametrization."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.get_buffer("mask") / 2


def test_a_parametrization_of_the_users_own_comes_back_from_a_state_and_a_copy():
    sparsifier = KeepsFirst()
    sparsifier.add_data("w", torch.ones(2, 2), parametrization=Halved)
    sparsifier.step()
    loaded = KeepsFirst()
    loaded.load_state_dict(sparsifier.state_dict())
    for one in (loaded, copy.deepcopy(sparsifier), through_pickle(sparsifier)):
        assert one.get_data("w", return_original=False).tolist() == [[0.5, 0.5], [0.0, 0.0]]


def test_squashed_data_can_be_replaced():
    sparsifier = DataNormSparsifier(data_list=[("w", distinct((2, 8), torch.float32))])
    sparsifier.step()
    mask = sparsifier.get_mask("w")
    sparsifier.squash_mask()
    with pytest.warns(UserWarning, match="Replacing"):
        sparsifier.add_data("w", torch.ones(2, 8))
    assert torch.equal(sparsifier.get_data("w", return_original=False), mask)


# --- the process around us ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("package", "changed"), [("secateur.drop_in", False), ("torch", True)])
def test_importing_leaves_the_warning_filters_alone(package, changed):
    path = {"torch": "torch.ao.pruning", "secateur.drop_in": "secateur.drop_in.ao_pruning"}[package]
    code = f"""
import warnings, torch
before = list(warnings.filters)
import {path}._experimental.data_sparsifier, {path}._experimental.data_scheduler
print(warnings.filters != before)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == str(changed)


def test_gradients_reach_the_original_through_the_mask():
    parameter = nn.Parameter(distinct((2, 8), torch.float32))
    sparsifier = DataNormSparsifier(data_list=[("w", parameter)])
    sparsifier.step()
    sparsifier.get_data("w", return_original=False).sum().backward()
    assert parameter.grad is not None
    assert torch.equal(parameter.grad, sparsifier.get_mask("w"))
