"""Functions that need dense weights raise for compressed layers and for meta tensors, and change nothing."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

import secateur as sc
from secateur.drop_in import prune
from secateur.execute import Compressed
from secateur.execute.formats import FORMATS

X = torch.randn(4, 32, generator=torch.Generator().manual_seed(0))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32, bias=False), nn.ReLU(), nn.Linear(32, 8)).eval()


def compressed(*places: int) -> nn.Sequential:
    model = build()
    sc.prune_(model, sparsity=0.9)
    for place in places:
        model[place] = Compressed(model[place], FORMATS["tiled"], (1,))
    return model


@pytest.mark.parametrize("places", [(2,), (2, 4), (0, 2, 4)], ids=str)
@pytest.mark.parametrize(
    "use",
    [
        lambda model: sc.prune_(model, sparsity=0.5),
        lambda model: sc.prune_(model, sparsity=0.5, include="2.weight"),
        lambda model: sc.plan(model, sparsity=0.5),
        lambda model: sc.Pruner(model, sparsity=0.5),
        lambda model: sc.plan(build(), sparsity=0.5).apply_(model),
        lambda model: sc.shrink(model, X, channels=0.5),
        lambda model: sc.shrink_(model, X, channels=0.5),
        lambda model: prune.l1_unstructured(model[2], "weight", 0.5),
    ],
    ids=["prune_", "prune_ by name", "plan", "Pruner", "apply_", "shrink", "shrink_", "drop_in"],
)
def test_what_needs_weights_names_a_compressed_layer_and_the_way_back(places, use):
    model = compressed(*places)
    before, shown = copy.deepcopy(model.state_dict()), str(model)
    with pytest.raises((ValueError, TypeError), match=r"('[024]' is compressed|layer is compressed).*decompress_"):
        use(model)
    assert str(model) == shown
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    sc.decompress_(model)
    use(model)


def test_a_model_of_nothing_but_packed_weights_has_something_to_prune():
    model = nn.Sequential(nn.Linear(32, 32, bias=False)).eval()
    model[0] = Compressed(model[0], FORMATS["tiled"], (1,))
    with pytest.raises(ValueError, match="'0' is compressed"):
        sc.prune_(model, sparsity=0.5)


def test_compressed_layers_that_are_not_meant_are_left_alone_and_listed():
    model = compressed(2)
    choices: list[dict[str, Any]] = [{"exclude": "2"}, {"exclude": "2.weight"}, {"include": ["0.*", "4.weight"]}]
    for choice in choices:
        plan = sc.plan(model, sparsity=0.5, **choice)
        assert list(plan.masks) == ["0.weight", "4.weight"]
        assert plan.skipped["2.weight"] in ("excluded", "not included")
    table = nn.Sequential(nn.Embedding(32, 32), nn.Linear(32, 32)).eval()
    table[0] = Compressed(table[0], FORMATS["bitmask"], ())
    assert "Embedding is not among the types" in sc.plan(table, sparsity=0.5).skipped["0.weight"]
    with pytest.raises(ValueError, match="'0' is compressed"):
        sc.plan(table, sparsity=0.5, types=[nn.Embedding])


def test_compress_names_the_first_tensor_without_values():
    for model, name in (
        (build().to("meta"), "0.weight"),
        (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32, device="meta")), "1.weight"),
        (nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32, affine=False, device="meta")), "1.running_mean"),
    ):
        with pytest.raises(ValueError, match=f"'{name}' is on the meta device.*load its values first"):
            sc.compress_(model, X)


def test_only_models_are_compressed_and_decompressed():
    for use in (sc.decompress_, lambda model: sc.compress_(model, X)):
        with pytest.raises(TypeError, match=r"compress_ takes a torch.nn.Module, not dict"):
            use({"0.weight": X})  # type: ignore[arg-type]
