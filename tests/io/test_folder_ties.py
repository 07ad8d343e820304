"""`prune_folder` writes a tensor that several layers share under every name that the files have for it."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import secateur as sc
from secateur import prune_folder

DATA = [torch.randn(32, 16, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
NAMES = ("first.weight", "last.weight")


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 16, bias=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 16)) for _ in range(2))
        self.last = nn.Linear(16, 16, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


@dataclass(frozen=True)
class MaskOnly(sc.methods.Method):
    needs = frozenset({"gram"})

    def solve(self, problem, pattern, amount, previous):
        return sc.methods.Solution(amount.keep(problem.name, problem.scores, pattern, previous))


METHODS = {
    "no data": {},
    "random": {"criterion": sc.random(3)},
    "sparsegpt": {"method": "sparsegpt", "data": DATA},
    "mask only": {"method": MaskOnly(), "data": DATA},
}


def written(folder, names):
    torch.manual_seed(0)
    state = {name: tensor.clone() for name, tensor in Tied().state_dict().items() if name not in NAMES or name in names}
    folder.mkdir()
    save_file(state, folder / "model.safetensors")
    return state


@pytest.mark.parametrize("names", [NAMES, NAMES[:1], NAMES[1:]], ids=["both", "the first", "the last"])
@pytest.mark.parametrize("how", METHODS)
def test_a_shared_tensor_is_pruned_under_all_names_of_the_files(tmp_path, how, names):
    state = written(tmp_path / "dense", names)
    result = prune_folder(tmp_path / "dense", tmp_path / "pruned", sparsity=0.5, into=Tied, **METHODS[how])
    found = {name: t for file in (tmp_path / "pruned").glob("*.safetensors") for name, t in load_file(file).items()}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], found[names[0]]) for name in names)
    assert int((found[names[0]] != 0).sum()) == 128 == result.layers[0].kept
    if "data" not in METHODS[how]:
        model = Tied()
        model.load_state_dict(state, strict=False)
        sc.prune_(model, sparsity=0.5, **METHODS[how])
        assert all(torch.equal(found[name], tensor) for name, tensor in model.state_dict().items() if name in found)


def test_different_values_for_one_tensor_are_refused(tmp_path):
    state = written(tmp_path / "dense", NAMES)
    state["last.weight"][3, 4] += 1
    save_file(state, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"'first.weight' and 'last.weight' are one tensor in the model .* different values"):
        prune_folder(tmp_path / "dense", tmp_path / "pruned", sparsity=0.5, into=Tied)
    assert not (tmp_path / "pruned").exists()


def test_a_tensor_that_a_block_shares_with_a_layer_outside_is_refused(tmp_path):
    def into():
        model = Tied()
        model.blocks.append(nn.Sequential(nn.Linear(16, 16, bias=False)))
        model.first, model.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16, bias=False)
        model.last.weight = model.blocks[2][0].weight
        return model

    (tmp_path / "dense").mkdir()
    state = {name: tensor for name, tensor in into().state_dict().items() if name != "blocks.2.0.weight"}
    save_file(state, tmp_path / "dense" / "model.safetensors")
    with pytest.raises(ValueError, match=r"a block and a layer outside of it share 'blocks\.2\.0\.weight'"):
        prune_folder(tmp_path / "dense", tmp_path / "pruned", sparsity=0.5, into=into, method="sparsegpt", data=DATA)
