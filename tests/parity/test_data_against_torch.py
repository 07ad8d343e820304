"""Compares data sparsifiers with torch's on the same data: masks, configs, container, state formats and repr."""

from __future__ import annotations

import copy
import io
import warnings
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.ao.pruning._experimental import data_sparsifier as theirs
from torch.nn.utils.parametrize import is_parametrized

from secateur.drop_in.ao_pruning._experimental import data_sparsifier as ours

from .conftest import distinct, fill

BOTH = [ours, theirs]
LEVELS = [0.0, 0.13, 0.5, 0.99, 1.0, 2.0]
BLOCKS = [(1, 1), (1, 4), (4, 1), (2, 3), (16, 16)]


def pair(*data: tuple[str, Any], **settings: Any) -> tuple[ours.DataNormSparsifier, theirs.DataNormSparsifier]:
    """Makes two sparsifiers on equal data: ours and torch's."""
    return (
        ours.DataNormSparsifier(data_list=copy.deepcopy(list(data)), **settings),
        theirs.DataNormSparsifier(data_list=copy.deepcopy(list(data)), **settings),
    )


def assert_same(mine: Any, other: Any) -> None:
    """Compares all public state, except the dtype of masks and the shape of torch's masks of 1-D data."""
    assert list(mine.state) == list(other.state)
    assert dict(mine.data_groups) == dict(other.data_groups)
    assert mine.defaults == other.defaults
    assert repr(mine) == repr(other)
    saved, theirs_saved = mine.state_dict(), other.state_dict()
    assert saved.keys() == theirs_saved.keys()
    assert saved["_container"].keys() == theirs_saved["_container"].keys()
    for key, value in theirs_saved["_container"].items():
        assert torch.equal(saved["_container"][key], value), key
    for name, state in theirs_saved["state"].items():
        assert saved["state"][name].keys() == state.keys()
        assert saved["state"][name]["mask"].layout == torch.sparse_coo
        assert torch.equal(mine.get_mask(name).reshape(-1).bool(), other.get_mask(name).reshape(-1).bool()), name


@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("shape", [(4, 8), (5, 7), (1, 9), (9, 1), (13,), (2, 2), (1, 6, 4)], ids=str)
def test_masks_equal_torch_at_every_level_block_and_number_of_zeros(shape, norm):
    for level in LEVELS:
        for block in BLOCKS:
            for zeros in {0, 1, 2, block[0] * block[1] - 1, block[0] * block[1]}:
                if zeros > block[0] * block[1] or (block == (16, 16) and zeros not in (2, 256)):
                    continue
                mine, other = pair(
                    ("w", distinct(shape, torch.float32)),
                    sparsity_level=level,
                    sparse_block_shape=block,
                    zeros_per_block=zeros,
                    norm=norm,
                )
                mine.step()
                other.step()
                assert mine.get_mask("w").shape == torch.Size(shape)
                assert torch.equal(mine.get_mask("w").reshape(-1).bool(), other.get_mask("w").reshape(-1).bool()), (
                    level,
                    block,
                )


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 12),
    cols=st.integers(1, 12),
    block=st.tuples(st.integers(1, 5), st.integers(1, 5)),
    level=st.floats(0, 1.5),
    share=st.floats(0, 1),
    norm=st.sampled_from(["L1", "L2"]),
    seed=st.integers(0, 1000),
)
def test_masks_equal_torch_for_random_shapes_blocks_and_levels(rows, cols, block, level, share, norm, seed):
    data = torch.randn(rows, cols, generator=torch.Generator().manual_seed(seed))
    if data.numel() == 1:
        data = torch.randn(1, 2)  # torch fails on a tensor of one element
    mine, other = pair(
        ("w", data),
        sparsity_level=level,
        sparse_block_shape=block,
        zeros_per_block=round(share * block[0] * block[1]),
        norm=norm,
    )
    mine.step()
    other.step()
    assert_same(mine, other)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_masks_equal_torch_in_every_dtype(dtype):
    mine, other = pair(("w", distinct((8, 12), torch.float32).to(dtype)), sparsity_level=0.3, zeros_per_block=3)
    mine.step()
    other.step()
    assert_same(mine, other)
    assert mine.get_data("w", return_original=False).dtype == dtype


def everything() -> list[tuple[str, Any]]:
    torch.manual_seed(0)
    return [
        ("tensor", distinct((6, 9), torch.float32)),
        ("parameter", nn.Parameter(distinct((5, 4), torch.float32, 1))),
        ("embedding", fill(nn.Embedding(10, 3))),
        ("bag", fill(nn.EmbeddingBag(7, 8))),
    ]


def test_all_kinds_of_data_go_through_the_same_life():
    mine, other = pair(*everything(), sparsity_level=0.6, sparse_block_shape=(1, 4), zeros_per_block=3)
    assert_same(mine, other)
    for one in (mine, other):
        one.add_data("late", torch.arange(8.0).reshape(2, 4), sparsity_level=0.1, extra="kept")
    assert_same(mine, other)
    for _ in range(2):
        mine.step()
        other.step()
        assert_same(mine, other)
    for name in mine.data_groups:
        for original in (True, False):
            assert torch.equal(mine.get_data(name, original), other.get_data(name, original))
    mine.squash_mask(names=["bag", "tensor"])
    other.squash_mask(names=["bag", "tensor"])
    assert_same(mine, other)
    mine.squash_mask(names=["parameter", "embedding", "late"], leave_parametrized=False)
    other.squash_mask(names=["parameter", "embedding", "late"], leave_parametrized=False)
    assert_same(mine, other)
    for name in mine.data_groups:
        assert not is_parametrized(mine._container, name)
        assert torch.equal(mine.get_data(name, False), other.get_data(name, False))


@pytest.mark.parametrize("library", BOTH, ids=["ours", "torch"])
def test_the_data_are_the_callers_own_and_squash_writes_zeros_into_them(library):
    data = dict(everything())
    sparsifier = library.DataNormSparsifier(data_list=list(data.items()), sparsity_level=0.5)
    weights = {name: sparsifier._extract_weight(one) for name, one in data.items()}
    for name, weight in weights.items():
        assert sparsifier.get_data(name) is weight
        weight.data = weight.detach() * 2
        assert torch.equal(sparsifier.get_data(name, return_original=False), weight)
    assert {name for name, _ in sparsifier._container.named_parameters()} == {
        f"parametrizations.{name}.original" for name in ("parameter", "embedding", "bag")
    }
    sparsifier.step()
    masks = {name: sparsifier.get_mask(name) for name in data}
    sparsifier.squash_mask()
    for name, weight in weights.items():
        assert torch.equal(weight == 0, masks[name] == 0)


@pytest.mark.parametrize("library", BOTH, ids=["ours", "torch"])
def test_replacing_data_keeps_mask_and_config_unless_told_otherwise(library):
    sparsifier = library.DataNormSparsifier(sparsity_level=0.5)
    sparsifier.add_data("w", distinct((4, 8), torch.float32), sparsity_level=0.75)
    sparsifier.step()
    mask = sparsifier.get_mask("w")
    new = distinct((4, 8), torch.float32, seed=3)
    with pytest.warns(UserWarning, match="Replacing"):
        masked = sparsifier.add_data("w", new, zeros_per_block=2)
    assert sparsifier.get_mask("w") is mask
    assert torch.equal(masked, new * mask)
    assert sparsifier.data_groups["w"] == {"sparsity_level": 0.75, "sparse_block_shape": (1, 4), "zeros_per_block": 2}
    with pytest.warns(UserWarning, match="Replacing"):
        sparsifier.add_data("w", torch.ones(2, 2), reuse_mask=False)
    assert torch.equal(sparsifier.get_mask("w"), torch.ones(2, 2))


@pytest.mark.parametrize("library", BOTH, ids=["ours", "torch"])
def test_a_user_subclass_that_writes_its_own_masks_works(library):
    class FirstRow(library.BaseDataSparsifier):
        def update_mask(self, name, data, rows, **kwargs):
            mask = self.get_mask(name)
            mask[:rows] = 0
            state = self.state[name]
            state["step_count"] = state.get("step_count", 0) + 1

    class Replaces(library.BaseDataSparsifier):
        def update_mask(self, name, data, **kwargs):
            self.get_mask(name).data = data > 0

    mine = FirstRow(data_list=everything(), rows=1)
    mine.add_data("more", torch.ones(3, 3), rows=2, mask=torch.tril(torch.ones(3, 3)))
    for _ in range(3):
        mine.step()
    assert {state["step_count"] for state in mine.state.values()} == {3}
    assert mine.get_data("more", return_original=False).tolist() == [[0, 0, 0], [0, 0, 0], [1, 1, 1]]
    mine.enable_mask_update = False
    mine.step()
    assert mine.state["more"]["step_count"] == 3

    other = Replaces(data_list=[("w", torch.tensor([[1.0, -1.0]]))])
    other.step()
    assert other.get_data("w", return_original=False).tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("library", BOTH, ids=["ours", "torch"])
def test_a_subclass_of_the_norm_sparsifier_may_read_its_settings_in_its_own_way(library):
    class Rows(library.DataNormSparsifier):
        def update_mask(self, name, data, sparsity_level, sparse_block_shape, **kwargs):
            super().update_mask(name, data, sparsity_level, (1, data.shape[1]), data.shape[1])

    sparsifier = Rows(data_list=[("w", torch.arange(8.0).reshape(4, 2))])
    sparsifier.data_groups["w"]["sparse_block_shape"] = "row"
    sparsifier.step()
    assert sparsifier.get_mask("w").tolist() == [[0, 0], [0, 0], [1, 1], [1, 1]]


class Doubled(nn.Module):
    """A custom parametrization: two times the masked value."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x * self.get_buffer("mask")


@pytest.mark.parametrize("library", BOTH, ids=["ours", "torch"])
def test_a_parametrization_of_the_users_own_is_used(library):
    sparsifier = library.DataNormSparsifier(sparsity_level=0.5, sparse_block_shape=(1, 1))
    assert sparsifier.add_data("w", torch.tensor([[1.0, 2.0]]), parametrization=Doubled).tolist() == [[2, 4]]
    sparsifier.step()
    assert sparsifier.get_data("w", return_original=False).tolist() == [[0, 4]]


# --- states: save with one, load with the other ---------------------------------------------------------------------


def through_a_file(state: Any) -> Any:
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("squashed", [[], ["tensor"]], ids=["masked", "one squashed"])
@pytest.mark.parametrize(
    ("source", "target"), [(ours, theirs), (theirs, ours), (ours, ours)], ids=["to torch", "from torch", "own"]
)
def test_a_state_saved_by_one_is_loaded_by_the_other(source, target, squashed):
    saver = source.DataNormSparsifier(data_list=everything(), sparsity_level=0.6, zeros_per_block=3)
    saver.step()
    saver.squash_mask(names=squashed)
    loader = target.DataNormSparsifier(data_list=[("gone", torch.ones(2, 2)), ("tensor", torch.ones(6, 9))])
    loader.load_state_dict(through_a_file(saver.state_dict()))
    mine, other = (loader, saver) if target is ours else (saver, loader)
    assert list(loader.state) == list(saver.state)
    assert dict(mine.data_groups) == dict(other.data_groups)
    for name in saver.state:
        assert torch.equal(mine.get_mask(name).bool(), other.get_mask(name).bool())
        assert torch.equal(mine.get_data(name, return_original=False), other.get_data(name, return_original=False))
        assert is_parametrized(mine._container, name) == is_parametrized(other._container, name) == (name not in squashed)
    if not squashed:
        saver.data_groups["bag"]["sparsity_level"] = loader.data_groups["bag"]["sparsity_level"] = 0.2
        saver.step()
        loader.step()
        for name in saver.state:
            assert torch.equal(mine.get_mask(name).bool(), other.get_mask(name).bool())


def test_a_state_without_strictness_adds_to_what_is_there():
    for library in BOTH:
        saver = library.DataNormSparsifier(data_list=[("a", torch.ones(2, 4)), ("b", torch.ones(2, 4))], sparsity_level=0.25)
        loader = library.DataNormSparsifier(data_list=[("c", torch.zeros(3, 3))], sparsity_level=0.75)
        loader.load_state_dict(saver.state_dict(), strict=False)
        assert sorted(loader.state) == ["a", "b", "c"]
        assert {name: group["sparsity_level"] for name, group in sorted(loader.data_groups.items())} == {
            "a": 0.25,
            "b": 0.25,
            "c": 0.75,
        }


def test_names_and_defaults_are_those_of_torch():
    import inspect

    for cls in ("BaseDataSparsifier", "DataNormSparsifier"):
        mine, other = getattr(ours, cls), getattr(theirs, cls)
        for name in ("__init__", "add_data", "get_data", "get_mask", "squash_mask", "step", "state_dict", "load_state_dict"):
            a, b = (list(inspect.signature(getattr(one, name)).parameters.values()) for one in (mine, other))
            assert [(p.name, p.kind, p.default) for p in a] == [(p.name, p.kind, p.default) for p in b], (cls, name)
    from secateur.drop_in.ao_pruning._experimental.data_sparsifier import base_data_sparsifier as base

    upstream = theirs.base_data_sparsifier
    assert base.SUPPORTED_TYPES == upstream.SUPPORTED_TYPES
    assert base.EMBEDDING_TYPES == upstream.EMBEDDING_TYPES


def test_no_warning_is_given_where_torch_gives_none():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsifier = ours.DataNormSparsifier(data_list=everything())
        sparsifier.step()
        sparsifier.load_state_dict(sparsifier.state_dict())
        sparsifier.squash_mask()
