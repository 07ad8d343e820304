"""Gram and cross matrices of what layers read, against slow references in float64."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
import secateur.layers
from secateur.moments import Moments, layer_inputs
from secateur.products import Products
from secateur.targeting import targets


def moments(model, batches, needs=("gram",)):
    found, _ = targets(model)
    collector = Moments(found, frozenset(needs))
    with collector.listen(), torch.no_grad():
        for batch in batches:
            collector.next_batch()
            model(batch)
    return collector.table()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_gram_matrix_of_a_linear_layer(dtype):
    batches = [torch.randn(3, 5, 7).to(dtype), torch.randn(2, 7).to(dtype)]
    rows = torch.cat([batch.reshape(-1, 7) for batch in batches]).double()
    gram = moments(nn.Linear(7, 4).to(dtype), batches)["weight"]["gram"]
    torch.testing.assert_close(gram, rows.T @ rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(4, 6, 3, stride=2, padding=1),
        nn.Conv2d(4, 6, (1, 3), groups=2, padding=(0, 2), dilation=(1, 2)),
        nn.Conv2d(4, 4, 3, groups=4),
        nn.Conv2d(4, 2, 3, padding=1, padding_mode="circular"),
        nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2),
    ],
    ids=str,
)
def test_a_convolution_is_its_weight_matrix_times_the_patches(layer):
    """What the Gram matrix is summed from reproduces the layer, whatever its stride, groups or padding."""
    x = torch.randn(3, 4, 7, 6)
    (target,) = targets(layer)[0]
    patches = layer_inputs(layer, "weight", target.layout, (x,), {})
    matrix = target.layout.matrix(layer.weight.detach()).view(target.layout.groups, -1, target.layout.cols)
    wanted = (layer(x) - layer.bias[:, None, None]).detach().movedim(1, -1)
    found = (patches @ matrix.mT).transpose(0, 1).reshape(wanted.shape)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    gram = moments(layer, [x, x[:1]])["weight"]["gram"]
    both = torch.cat([patches, layer_inputs(layer, "weight", target.layout, (x[:1],), {})], 1).double()
    torch.testing.assert_close(gram.view(both.shape[0], *gram.shape[-2:]), both.mT @ both, rtol=1e-5, atol=1e-3)


def test_a_layer_type_of_the_users_own_that_stores_inputs_first(monkeypatch):
    class InOut(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.bias, self.wide = nn.Parameter(torch.randn(5, 3)), nn.Parameter(torch.randn(3)), 3

        def forward(self, x):
            return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], self.wide)

    monkeypatch.setattr("secateur._layers._INPUT_FIRST", set())
    sc.layers.input_first(InOut)
    x = torch.randn(4, 6, 5)
    found, _ = targets(InOut(), types=[InOut])
    collector = Moments(found, frozenset({"gram"}))
    with collector.listen():
        found[0].slot.module(x)
    rows = x.view(-1, 5).double()
    torch.testing.assert_close(collector.table()["weight"]["gram"], rows.T @ rows, rtol=1e-5, atol=1e-5)


def test_unfolded_patches_are_those_of_torch():
    layer, x = nn.Conv2d(3, 5, 3, padding=1), torch.randn(2, 3, 6, 5)
    rows = F.unfold(x, 3, padding=1).transpose(1, 2).reshape(-1, 27).double()
    torch.testing.assert_close(moments(layer, [x])["weight"]["gram"], rows.T @ rows, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mean", [0.0, 100.0, 10_000.0])
def test_inputs_with_a_large_mean_lose_no_digits(mean):
    """The centred second moment is what is left when the mean is taken out; float32 products would lose it."""
    x = (mean + torch.randn(1, 5000, 6, dtype=torch.float64)).float()
    sums = Products()
    for part in x.split(1000, 1):
        sums.add(part, part)
    exact = x[0].double()
    centred = exact - exact.mean(0)
    found = sums.total() - 5000 * torch.outer(exact.mean(0), exact.mean(0))
    torch.testing.assert_close(found, centred.T @ centred, rtol=1e-4, atol=1e-2)


def test_the_cross_matrix_pairs_two_runs():
    layer = nn.Linear(5, 3)
    dense, pruned = [torch.randn(4, 5) for _ in range(3)], [torch.randn(4, 5) for _ in range(3)]
    found, _ = targets(layer)
    collector = Moments(found, frozenset({"gram", "cross"}))
    with collector.listen(), torch.no_grad():
        for one, other in zip(dense, pruned, strict=True):
            collector.next_batch()
            collector.dense = True
            layer(one)
            collector.dense = False
            layer(other)
    table = collector.table()["weight"]
    a, b = torch.cat(dense).double(), torch.cat(pruned).double()
    torch.testing.assert_close(table["cross"], (a - b).T @ b, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(table["gram"], b.T @ b, rtol=1e-5, atol=1e-5)


def test_a_layer_without_inputs_is_named():
    class Half(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x):
            return self.used(x)

    with pytest.raises(ValueError, match=r"'spare\.weight' saw no input"):
        sc.plan(Half(), sparsity=0.5, method=sc.methods.sparsegpt(), data=[torch.randn(2, 3)])


@pytest.mark.parametrize("size", [1e20, 1e30])
def test_inputs_whose_squares_overflow_name_the_layer(size):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    with pytest.raises(ValueError, match=r"the inputs of '0\.weight' are .* so large that their products are"):
        sc.plan(model, sparsity=0.5, method="sparsegpt", data=[torch.randn(16, 8) * size])
