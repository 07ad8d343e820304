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


class Grouped(nn.Linear):
    """Groups of its rows read inputs of their own, as in the output projection of DeepSeek-V4."""

    def __init__(self, width, rows, n_groups):
        super().__init__(width, rows, bias=False)
        self.n_groups = n_groups

    def forward(self, x):
        weight = self.weight.view(self.n_groups, -1, x.shape[-1]).transpose(1, 2)
        y = torch.bmm(x.reshape(-1, self.n_groups, x.shape[-1]).transpose(0, 1), weight)
        return y.transpose(0, 1).reshape(*x.shape[:-1], -1)


class Scores(nn.Linear):
    """Returns its product and its maximum, as routers of experts do."""

    def forward(self, x):
        scores = super().forward(x)
        return scores, scores.amax(-1, keepdim=True)


class Heads(nn.Module):
    """A block whose heads have a projection each: one grouped layer, or a layer for each head."""

    def __init__(self, grouped):
        super().__init__()
        self.first, self.last = nn.Linear(12, 24), nn.Linear(16, 12)
        self.middle = Grouped(12, 16, 2) if grouped else nn.ModuleList(nn.Linear(12, 8, bias=False) for _ in range(2))
        self.score = Scores(12, 16) if grouped else nn.Linear(12, 16)

    def forward(self, x):
        heads = self.first(x).unflatten(-1, (2, 12)).relu()
        if isinstance(self.middle, Grouped):
            y, score = self.middle(heads).flatten(-2), self.score(x)[0]
        else:
            y, score = torch.cat([layer(head) for layer, head in zip(self.middle, heads.unbind(-2))], -1), self.score(x)
        return x + self.last(y * score)


def heads(grouped):
    torch.manual_seed(0)
    model = nn.Sequential(*(Heads(grouped) for _ in range(2))).eval()
    draw = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        parameter.data = torch.randn(parameter.shape, generator=draw) / 4 if ".middle" not in name else parameter.data
    middle = torch.randn(4, 8, 12, generator=draw) / 4
    for i, block in enumerate(model):
        parts = [block.middle.weight[:8], block.middle.weight[8:]] if grouped else [one.weight for one in block.middle]
        for part, values in zip(parts, middle[2 * i : 2 * i + 2]):
            part.data.copy_(values)
    return model


@pytest.mark.parametrize("how", HOW)
def test_layers_derived_from_linear_that_multiply_otherwise_are_read_as_they_multiply(how):
    model, oracle = heads(True), heads(False)
    torch.testing.assert_close(model(BATCHES[0]), oracle(BATCHES[0]))
    options = {"pattern": "2:4", "data": BATCHES} | HOW[how]
    if "method" in options:
        options["method"] += "(reorder=False, curvature='diag')" if how == "loss" else "(reorder=False)"
    found, wanted = sc.plan(model, **options), sc.plan(oracle, **options)
    assert not found.notes.keys() & {"0", "1"}
    for name in ("first", "score", "middle", "last"):
        for block in range(2):
            own = f"{block}.{name}.weight"
            names = [own] if name != "middle" else [f"{block}.middle.{head}.weight" for head in range(2)]
            assert torch.equal(found.masks[own], torch.cat([wanted.masks[name] for name in names]))
            if wanted.weights:
                weights = torch.cat([wanted.weights[name] for name in names])
                torch.testing.assert_close(found.weights[own], weights, rtol=1e-3, atol=1e-4)


def test_a_grouped_layer_that_does_not_say_so_is_refused_by_name():
    model = heads(True)
    for block in model:
        block.middle.parts = vars(block.middle).pop("n_groups")
    Unknown = type("Unknown", (Grouped,), {"n_groups": property(lambda self: self.parts)})
    for block in model:
        block.middle.__class__ = Unknown
    with pytest.raises(ValueError, match=r"rows 0 to 8 of '0\.middle\.weight' are multiplied with inputs of their own"):
        sc.plan(model, method="flow", sparsity=0.5, data=BATCHES)


class Standardized(nn.Conv2d):
    """Standardises its weight in every call, as in the ResNets of Big Transfer."""

    def forward(self, x):
        mean, deviation = self.weight.mean((1, 2, 3), keepdim=True), self.weight.std((1, 2, 3), keepdim=True)
        return F.conv2d(x, (self.weight - mean) / deviation, self.bias, self.stride, self.padding)


class SamePadding(nn.Conv2d):
    """Pads its inputs itself."""

    def forward(self, x):
        return super().forward(F.pad(x, (1, 1, 1, 1)))


@pytest.mark.parametrize(
    "how", [{"method": "flow"}, {"method": "loss", "loss": lambda output, _: output.square().sum()}, {"criterion": sc.wanda}]
)
def test_layers_that_are_not_linear_in_their_weight_are_refused_by_name(how):
    torch.manual_seed(0)
    data = [torch.randn(2, 3, 6, 6) for _ in range(2)]
    model = nn.Sequential(SamePadding(3, 4, 3), nn.ReLU(), Standardized(4, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 1))
    with pytest.raises(ValueError, match=r"'2\.weight' cannot be (read|measured): Standardized is not linear in it"):
        sc.plan(model, sparsity=0.5, data=data, **how)
    plan = sc.plan(model, sparsity=0.5, data=data, exclude="2.weight", **how)
    assert list(plan.masks) == ["0.weight", "4.weight"]
