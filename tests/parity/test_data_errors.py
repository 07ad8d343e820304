"""Wrong input to data sparsifiers raises the error types of torch with a helpful message, and changes nothing."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.pruning._experimental import data_sparsifier as theirs

from secateur.drop_in.ao_pruning._experimental import data_sparsifier as ours

from .conftest import distinct

LIBRARIES = pytest.mark.parametrize("library", [ours, theirs], ids=["ours", "torch"])


def made(library: Any = ours, **settings: Any) -> Any:
    data = [("weight", distinct((4, 8), torch.float32)), ("other", distinct((3, 8), torch.float32, 1))]
    return library.DataNormSparsifier(data_list=data, **settings)


def looks(sparsifier: Any) -> Any:
    """Returns the complete state of a sparsifier for comparison."""
    held = {key: (id(value), value.tolist()) for key, value in sparsifier._container.state_dict(keep_vars=True).items()}
    masks = {name: (id(state["mask"]), state["mask"].tolist()) for name, state in sparsifier.state.items()}
    return held, masks, {name: dict(config) for name, config in sparsifier.data_groups.items()}


def test_a_level_that_is_no_number_is_found_before_the_first_mask_is_changed():
    sparsifier = made()
    sparsifier.data_groups["other"]["sparsity_level"] = float("nan")
    before = looks(sparsifier)[:2]
    with pytest.raises(ValueError, match="'other'"):
        sparsifier.step()
    assert looks(sparsifier)[:2] == before


@LIBRARIES
@pytest.mark.parametrize("data", [nn.Linear(2, 2), [1.0], None, 3], ids=lambda one: type(one).__name__)
def test_data_of_another_kind(library, data):
    sparsifier = made(library)
    before = looks(sparsifier)
    with pytest.raises(AssertionError):
        sparsifier.add_data("x", data)
    assert looks(sparsifier) == before


@LIBRARIES
@pytest.mark.parametrize(("name", "error"), [("", KeyError), ("training", KeyError), ("keys", KeyError), (3, TypeError)])
def test_names_that_cannot_be(library, name, error):
    sparsifier = made(library)
    before = looks(sparsifier)
    with pytest.raises(error):
        sparsifier.add_data(name, torch.ones(2, 2))
    if library is ours:
        assert looks(sparsifier) == before


@LIBRARIES
def test_unknown_names(library):
    sparsifier = made(library)
    for ask in (sparsifier.get_data, sparsifier.get_mask, lambda name: sparsifier.squash_mask(names=["weight", name])):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            ask("wieght")
        if library is ours:
            assert "'wieght'" in str(caught.value)
            assert "Did you mean 'weight'?" in str(caught.value)
            assert sparsifier.get_data("weight") is not None  # not squashed


@LIBRARIES
def test_a_shape_that_the_old_mask_does_not_fit(library):
    sparsifier = made(library)
    before = looks(sparsifier)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if library is theirs else "error")  # torch warns of a replacement that it does not make
        with pytest.raises(AssertionError):
            sparsifier.add_data("weight", torch.ones(2, 2))
    assert looks(sparsifier) == before


class Wrong(nn.Module):
    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("not today")


@pytest.mark.parametrize("name", ["weight", "new"])
@pytest.mark.parametrize(
    ("config", "error"), [({"mask": torch.ones(3)}, AssertionError), ({"parametrization": Wrong}, ArithmeticError)]
)
def test_a_mask_or_a_parametrization_that_does_not_fit_changes_nothing(config, error, name):
    sparsifier = made()
    before = looks(sparsifier)
    with pytest.raises(error):
        sparsifier.add_data(name, torch.ones(4, 8), reuse_mask=False, **config)
    assert looks(sparsifier) == before


@LIBRARIES
def test_what_was_squashed_has_no_original_and_cannot_be_squashed_or_stepped_again(library):
    sparsifier = made(library)
    sparsifier.squash_mask(names=["other"])
    before = looks(sparsifier)
    for call in (
        lambda: sparsifier.get_data("other"),
        sparsifier.step,
        lambda: sparsifier.squash_mask(names=["weight", "other"]),
    ):
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        if library is ours:
            assert "'other'" in str(caught.value)
            assert looks(sparsifier) == before


@LIBRARIES
@pytest.mark.parametrize("zeros", [-1, 5])
def test_zeros_that_a_block_does_not_have(library, zeros):
    sparsifier = made(library)
    sparsifier.data_groups["other"]["zeros_per_block"] = zeros
    before = looks(sparsifier)
    with pytest.raises(ValueError, match=r"[Bb]lock"):
        sparsifier.step()
    if library is ours:
        assert looks(sparsifier) == before


@pytest.mark.parametrize("block", [(0, 4), (1, 2, 2), (4,)], ids=str)
def test_a_block_without_rows_and_columns(block):
    sparsifier = made()
    sparsifier.data_groups["other"]["sparse_block_shape"] = block
    before = looks(sparsifier)
    with pytest.raises(ValueError, match=r"sparse_block_shape=.*'other'"):
        sparsifier.step()
    assert looks(sparsifier) == before


@LIBRARIES
def test_data_with_more_than_two_long_axes(library):
    sparsifier = made(library)
    sparsifier.add_data("cube", torch.ones(2, 3, 4))
    before = looks(sparsifier)
    with pytest.raises(ValueError, match=r"2-D|two dimensions"):
        sparsifier.step()
    if library is ours:
        assert looks(sparsifier) == before


def test_nan_is_an_error_that_names_the_data():
    sparsifier = made()
    sparsifier.get_data("other")[0, 0] = torch.nan
    mask = sparsifier.get_mask("other")
    with pytest.raises(ValueError, match=r"'other'.*NaN"):
        sparsifier.step()
    assert mask.all()


@LIBRARIES
def test_an_unknown_norm(library):
    with pytest.raises(AssertionError):
        made(library, norm="L3")


@LIBRARIES
def test_a_data_sparsifier_prepares_no_model_and_the_base_is_abstract(library):
    with pytest.raises(NotImplementedError):
        made(library).prepare(nn.Linear(2, 2), None)
    with pytest.raises(TypeError):
        library.BaseDataSparsifier()


@LIBRARIES
@pytest.mark.parametrize("broken", ["data_groups", "_container"])
def test_a_state_with_a_part_missing(library, broken):
    state = made(library).state_dict()
    state[broken] = {key: value for key, value in state[broken].items() if "other" not in key}
    loader = library.DataNormSparsifier(data_list=[("here", torch.ones(2, 2))])
    before = looks(loader)
    with pytest.raises(RuntimeError, match="other"):
        loader.load_state_dict(state)
    if library is ours:
        assert looks(loader) == before
        with pytest.raises(RuntimeError, match="other"):
            loader.load_state_dict(state, strict=False)
        assert looks(loader) == before


def test_a_state_whose_mask_does_not_fit_its_data():
    state = made().state_dict()
    state["state"]["other"]["mask"] = torch.ones(2, 2).to_sparse_coo()
    loader = made()
    before = looks(loader)
    with pytest.raises(RuntimeError, match=r"'other'.*\(2, 2\).*\(3, 8\)"):
        loader.load_state_dict(state)
    assert looks(loader) == before
