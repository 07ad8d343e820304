"""Compares `post_training_sparse_quantize` with torch's on real models, in both orders."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.ao.nn.quantized as quantized
from torch import Tensor, nn
from torch.ao.pruning._experimental import data_sparsifier as theirs
from torch.ao.pruning._experimental.data_sparsifier.quantization_utils import _fetch_all_embeddings as their_embeddings
from torch.ao.pruning._experimental.data_sparsifier.quantization_utils import post_training_sparse_quantize as their_quantize

from secateur.drop_in.ao_pruning._experimental import data_sparsifier as ours
from secateur.drop_in.ao_pruning._experimental.data_sparsifier.quantization_utils import (
    _fetch_all_embeddings,
    post_training_sparse_quantize,
)

FIRST = pytest.mark.parametrize("first", [True, False], ids=["sparsify first", "quantize first"])


@pytest.fixture(autouse=True)
def quantization_of_torch_may_warn() -> Iterator[None]:
    """Ignores the deprecation warnings of torch's quantization."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*quantiz", category=Warning)
        yield


class Recommender(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(40, 16)
        self.tags = nn.EmbeddingBag(30, 16, mode="sum")
        self.deep = nn.Sequential(nn.Embedding(20, 8), nn.Sequential(nn.EmbeddingBag(12, 8, mode="sum")))
        self.head = nn.Linear(48, 2)

    def forward(self, ids: Tensor) -> Tensor:
        bags = ids.reshape(-1, 1)
        return self.head(torch.cat([self.user(ids), self.tags(bags), self.deep[0](ids), self.deep[1][0](bags)], 1))


def twins() -> tuple[Any, Any]:
    torch.manual_seed(3)
    model = Recommender()
    return model, copy.deepcopy(model)


@FIRST
@pytest.mark.parametrize("norm", ["L1", "L2"])
@pytest.mark.parametrize("chosen", [None, ["tags", "user"]], ids=["all", "some"])
def test_the_result_equals_torch(first, norm, chosen):
    mine, other = twins()
    results = []
    for model, library, quantize in ((mine, ours, post_training_sparse_quantize), (other, theirs, their_quantize)):
        select = None if chosen is None else [getattr(model, name) for name in chosen]
        settings = {"sparsity_level": 0.6, "sparse_block_shape": (1, 4), "zeros_per_block": 3, "norm": norm}
        assert quantize(model, library.DataNormSparsifier, first, select, **settings) is None
        results.append(model(torch.arange(12)))
    assert [type(module) for module in mine.modules()] == [type(module) for module in other.modules()]
    assert mine.state_dict().keys() == other.state_dict().keys()
    for name in ("user", "tags", "deep.0", "deep.1.0"):
        a, b = mine.get_submodule(name).weight, other.get_submodule(name).weight
        a, b = (a(), b()) if callable(a) else (a, b)
        assert torch.equal(a.dequantize(), b.dequantize()), name
        assert not a.is_quantized or torch.equal(a.int_repr(), b.int_repr())
    assert torch.equal(results[0], results[1])
    assert type(mine.user) is quantized.Embedding
    assert type(mine.tags) is quantized.EmbeddingBag
    assert type(mine.head) is nn.Linear
    assert type(mine.deep[0]) is (quantized.Embedding if chosen is None else nn.Embedding)


@FIRST
def test_the_zeros_are_really_there(first):
    model, _ = twins()
    post_training_sparse_quantize(model, ours.DataNormSparsifier, first, sparsity_level=0.8, sparse_block_shape=(1, 1))
    for module in (model.user, model.tags):
        weight = module.weight()
        step = weight.q_per_channel_scales()[:, None]
        assert ((weight.dequantize().abs() <= step / 2).double().mean() - 0.8).abs() < 0.05


def test_embeddings_are_found_in_the_order_of_torch():
    model = nn.ModuleDict(
        {"a": nn.Sequential(nn.Embedding(2, 2)), "b": nn.EmbeddingBag(2, 2), "c": nn.Sequential(nn.Embedding(3, 2))}
    )
    assert [name for name, _ in _fetch_all_embeddings(model)] == [name for name, _ in their_embeddings(model)]


@FIRST
def test_only_embeddings_change_whatever_else_has_a_qconfig(first):
    model, _ = twins()
    model.head.qconfig = torch.ao.quantization.default_qconfig
    post_training_sparse_quantize(model, ours.DataNormSparsifier, first)
    assert type(model.head) is nn.Linear
    assert model.head.qconfig is torch.ao.quantization.default_qconfig


@FIRST
def test_hooks_go_along_and_one_embedding_in_two_places_stays_one(first):
    model, _ = twins()
    model.again = model.user
    calls = []
    model.user.register_forward_hook(lambda *args: calls.append(1))
    post_training_sparse_quantize(model, ours.DataNormSparsifier, first)
    assert type(model.user) is quantized.Embedding
    assert model.again is model.user
    model(torch.arange(3))
    assert calls == [1]


@FIRST
def test_names_that_would_be_one_without_dots_stay_two(first):
    torch.manual_seed(0)
    model = nn.Module()
    model.a = nn.ModuleDict({"b": nn.Embedding(8, 4)})
    model.a_b = nn.Embedding(6, 4)
    post_training_sparse_quantize(model, ours.DataNormSparsifier, first, sparsity_level=0.5)
    for module in (model.a_b, model.a["b"]):
        assert type(module) is quantized.Embedding
        rows = module.weight().int_repr()
        assert (rows == rows[:, :1]).all(1).sum() == len(rows) / 2  # zero, or the value nearest to zero in that row


@FIRST
@pytest.mark.parametrize("selected", ["a tuple", "a layer of another kind", "a stranger", "the model itself"])
def test_a_wrong_selection_is_refused_before_anything_changes(first, selected):
    model, before = twins()
    wrong: Any = {
        "a tuple": (model.user,),
        "a layer of another kind": [model.user, model.head],
        "a stranger": [model.user, nn.Embedding(40, 16)],
        "the model itself": [nn.Embedding(4, 4)],
    }[selected]
    target = wrong[0] if selected == "the model itself" else model
    with pytest.raises(AssertionError):
        post_training_sparse_quantize(target, ours.DataNormSparsifier, first, wrong)
    assert_untouched(model, before)


@FIRST
def test_a_wrong_config_leaves_the_model_as_it_was(first):
    model, before = twins()
    with pytest.raises(ValueError, match="zeros_per_block=5"):
        post_training_sparse_quantize(model, ours.DataNormSparsifier, first, zeros_per_block=5)
    assert_untouched(model, before)


def assert_untouched(model: nn.Module, before: nn.Module) -> None:
    assert [type(module) for module in model.modules()] == [type(module) for module in before.modules()]
    assert [sorted(vars(module)) for module in model.modules()] == [sorted(vars(module)) for module in before.modules()]
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before.parameters(), strict=True))
