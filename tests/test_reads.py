"""Weights that a model multiplies itself, without a call of their layer: by a product, a convolution, or expert by expert.

The oracle is the same model with calls of the layers, or with the matrices of its experts the other way around.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc

BATCHES = [torch.randn(n, 7, 12, generator=torch.Generator().manual_seed(n)) for n in (2, 3)]


class Mixer(nn.Module):
    """A block with a linear layer and a causal convolution, each read in its own way."""

    def __init__(self, linear, convolution):
        super().__init__()
        self.project, self.conv = nn.Linear(12, 8), nn.Conv1d(8, 8, 4, groups=8, padding=3)
        self.out, self.linear, self.convolution = nn.Linear(8, 12), linear, convolution

    def forward(self, x):
        weight, bias = self.project.weight, self.project.bias
        if self.linear == "left":
            y = (weight @ x.transpose(1, 2)).mT + bias
        else:
            y = x @ weight.T + bias if self.linear == "right" else self.project(x)
        y, size = y.transpose(1, 2), x.shape[1]
        if self.convolution == "passed":
            flat = self.conv.weight.squeeze(1)
            y = F.conv1d(y, weight=flat.unsqueeze(1), bias=self.conv.bias, padding=flat.shape[-1] - 1, groups=8)
        else:
            y = self.conv(y)
        return x + self.out(y[..., :size].transpose(1, 2).relu())


def mixers(linear="called", convolution="called"):
    torch.manual_seed(0)
    return nn.Sequential(*(Mixer(linear, convolution) for _ in range(2))).eval()


HOW = {
    "flow": {"method": "flow"},
    "loss": {"method": "loss", "loss": lambda output, _: output.square().sum()},
    "wanda": {"criterion": sc.wanda},
}


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize(("linear", "convolution"), [("left", "called"), ("right", "called"), ("called", "passed")])
def test_products_that_a_model_takes_itself_are_read_like_calls(linear, convolution, how):
    model, oracle = mixers(linear, convolution), mixers()
    torch.testing.assert_close(model(BATCHES[0]), oracle(BATCHES[0]))
    options = {"sparsity": 0.5, "data": BATCHES} | HOW[how]
    found, wanted = sc.plan(model, **options), sc.plan(oracle, **options)
    assert all(torch.equal(found.masks[name], mask) for name, mask in wanted.masks.items())
    for name, weight in wanted.weights.items():
        torch.testing.assert_close(found.weights[name], weight, rtol=1e-3, atol=1e-4)


def test_functions_of_torch_are_as_before():
    before = (F.linear, F.conv1d, torch.matmul, torch.bmm, vars(torch.Tensor).get("__matmul__"), torch.Tensor.mm)
    with pytest.raises(ValueError, match="does not run"):
        sc.plan(mixers("left", "passed"), method="flow", sparsity=0.5, data=[BATCHES[0], BATCHES[0][..., :5]])
    assert (F.linear, F.conv1d, torch.matmul, torch.bmm, vars(torch.Tensor).get("__matmul__"), torch.Tensor.mm) == before


class Experts(nn.Module):
    """A matrix for each of three experts, as transformers stores them. One of them gets no token."""

    def __init__(self, transposed, batched=False):
        super().__init__()
        self.num_experts, self.is_transposed, self.batched = 3, transposed, batched
        torch.manual_seed(1)
        weight = torch.randn(3, 12, 12) / 3
        self.weight = nn.Parameter(weight.mT.contiguous() if transposed else weight)

    def forward(self, x):
        flat = x.flatten(0, 1)
        chosen = (flat[:, :1] > 0).long()[:, 0]
        if self.batched:  # as Llama 4: every expert gets all positions, and zeros for those of others
            given = torch.stack([flat * (chosen == e)[:, None] for e in range(3)])
            return x + torch.bmm(given, self.weight).sum(0).view_as(x)
        made = torch.zeros_like(flat)
        for e in range(2):
            (rows,) = torch.where(chosen == e)
            own = flat[rows] @ self.weight[e] if self.is_transposed else F.linear(flat[rows], self.weight[e])
            made.index_add_(0, rows, own)
        return x + made.view_as(x)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("batched", [False, True])
def test_experts_are_solved_alike_whichever_way_their_matrices_are_stored(batched, how):
    model = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), Experts(True, batched)) for _ in range(2))).eval()
    oracle = nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), Experts(False)) for _ in range(2))).eval()
    for one, other in zip(model, oracle):
        other[0].load_state_dict(one[0].state_dict())
    torch.testing.assert_close(model(BATCHES[0]), oracle(BATCHES[0]))
    options = {"pattern": "2:4", "data": BATCHES} | HOW[how]
    found, wanted = sc.plan(model, **options), sc.plan(oracle, **options)
    for name in ("0.1.weight", "1.1.weight"):
        assert torch.equal(found.masks[name], wanted.masks[name].mT)
        if name in wanted.weights:
            torch.testing.assert_close(found.weights[name], wanted.weights[name].mT, rtol=1e-3, atol=1e-4)
            assert "experts 2 saw no token" in found.notes[name]
        if how == "loss":
            assert "only the diagonal" in found.notes[name]
    sc.prune_(model, **options)
    weight = model[0][1].weight  # 2:4 along the inputs
    assert torch.equal((weight.mT.reshape(-1, 4) != 0).sum(1), torch.full((weight.numel() // 4,), 2))


def test_curvature_of_experts_is_the_mean_over_their_own_tokens():
    from secateur.curvature import curvature
    from secateur.targeting import targets

    model = nn.Sequential(Experts(False)).eval()
    x = BATCHES[0]
    measured = curvature(model, targets(model)[0], [x], kind="diag", loss=lambda output, _: output.square().sum())
    gradient = (2 * model(x)).detach().flatten(0, 1)
    chosen = (x.flatten(0, 1)[:, 0] > 0).long()
    wanted = torch.stack([gradient[chosen == e].square().mean(0) if e < 2 else torch.zeros(12) for e in range(3)])
    torch.testing.assert_close(measured.G["0.weight"].view(3, 12), wanted)
    assert measured.tokens["0.weight"] == 14
