"""Tensors that share memory: loaded where that can be exact, otherwise refused before anything is written."""

import pytest
import torch
from saving import build, refused, same
from torch import nn

from secateur import io


class Held(nn.Module):
    """A module with the given buffers."""

    def __init__(self, **tensors: torch.Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)


def saved(path, **tensors):
    io.save(Held(**tensors), path)


def test_expanded_tensors_are_refused_by_name(tmp_path):
    saved(tmp_path, first=torch.ones(3), table=torch.arange(12.0).view(3, 4))
    refused(tmp_path, Held(first=torch.zeros(3), table=torch.zeros(4).expand(3, 4)), "'table' share memory.*expanded")
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    io.save(model, tmp_path)
    other = nn.Sequential(nn.Linear(4, 3), nn.Linear(4, 3))
    other[1].weight = nn.Parameter(torch.zeros(1, 4).expand(3, 4))
    refused(tmp_path, other, "'1.weight' share memory.*expanded")


@pytest.mark.parametrize(
    "views",
    [
        lambda flat: (flat[:12], flat[8:]),
        lambda flat: (flat[:12], flat[:12]),
        lambda flat: (flat[:12], flat[8:].view(torch.int32)),
        lambda flat: (flat.as_strided((4, 3), (1, 1)), flat[8:]),
    ],
    ids=["partly", "wholly", "as another dtype", "over itself"],
)
def test_what_cannot_hold_the_numbers_of_the_file_is_refused(tmp_path, views):
    a, b = views(torch.zeros(20))
    saved(tmp_path, a=torch.arange(12.0).view(a.shape), b=torch.arange(100, 100 + b.numel()).to(b.dtype))
    refused(tmp_path, Held(a=a, b=b), "share memory in the model, and the file has numbers for")


def test_a_tied_model_does_not_take_the_numbers_of_one_that_was_not(tmp_path):
    class Head(nn.Module):
        def __init__(self, tied):
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 9, bias=False)
            if tied:
                self.head.weight = self.embed.weight

    untied = Head(tied=False)
    io.save(untied, tmp_path)
    refused(tmp_path, Head(tied=True), r"'embed.weight', 'head.weight' share memory")
    with torch.no_grad():
        untied.head.weight.copy_(untied.embed.weight)
    io.save(untied, tmp_path)
    assert same(io.load(tmp_path, Head(tied=True)), untied)


@pytest.mark.parametrize(
    "views",
    [
        lambda flat: (flat[:16].view(4, 4), flat[:16].view(4, 4).t()),
        lambda flat: (flat[:12], flat[8:]),
        lambda flat: (flat.view(5, 4)[:, :2], flat.view(5, 4)[:, 2:]),
        lambda flat: (flat, flat.view(torch.int32)),
        lambda flat: (flat.view(torch.complex64), flat.view(torch.complex64).conj()),
    ],
    ids=["transposed", "partly", "side by side", "as another dtype", "conjugate"],
)
def test_views_of_one_memory_come_back_as_such(tmp_path, views):
    whole = Held(**dict(zip("ab", views(torch.randn(20)))))
    io.save(whole, tmp_path)
    flat = torch.zeros(20)
    back = io.load(tmp_path, Held(**dict(zip("ab", views(flat)))))
    assert all(torch.equal(back.get_buffer(n), whole.get_buffer(n)) for n in "ab")
    assert back.get_buffer("a").untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_what_is_not_there_yet_is_refused(tmp_path):
    io.save(nn.Sequential(nn.Linear(4, 3)), tmp_path)
    with pytest.raises(io.BadFile, match=r"'0.weight' is not initialised in the model"):
        io.load(tmp_path, nn.Sequential(nn.LazyLinear(3)))
    sparse = nn.Sequential(nn.Linear(4, 3))
    sparse[0].weight = nn.Parameter(sparse[0].weight.detach().to_sparse())
    with pytest.raises(io.BadFile, match=r"'0.weight' is torch.sparse_coo in the model"):
        io.load(tmp_path, sparse)


def test_a_model_that_was_made_for_inference_is_filled(tmp_path):
    io.save(build(1), tmp_path)
    with torch.inference_mode():
        model = build(2)
    assert same(io.load(tmp_path, model), build(1))


def test_a_model_whose_own_code_refuses_half_way_is_as_it_was(tmp_path):
    class Own(nn.Linear):
        def _save_to_state_dict(self, destination, prefix, keep_vars):
            super()._save_to_state_dict(destination, prefix, keep_vars)
            destination[prefix + "weight"] = destination[prefix + "weight"] * 2

        def _load_from_state_dict(self, state_dict, prefix, *rest):
            super()._load_from_state_dict(state_dict, prefix, *rest)
            raise KeyError("something of mine")

    io.save(Own(4, 3), tmp_path)
    refused(tmp_path, Own(4, 3), "Own.load_state_dict refuses .*something of mine")
