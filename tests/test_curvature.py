"""Curvature: the Kronecker factors of the Fisher matrix, from one backward pass that leaves the model unchanged."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc
from secateur.curvature import _shrink_, curvature


def found(model, **which):
    return sc.targets(model, **which)[0]


def cross_entropy(output, target):
    return F.cross_entropy(output, target, reduction="sum")


def assert_same(one, other, tolerance=1e-10):
    torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_both_factors_equal_sums_over_tokens_taken_one_by_one():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4)).double()
    x, y = torch.randn(90, 5).double(), torch.randint(4, (90,))
    made = curvature(model, found(model), [(x[:50], y[:50]), (x[50:], y[50:])], loss=cross_entropy)
    G, H = torch.zeros(7, 7).double(), torch.zeros(7, 7).double()
    for one, label in zip(x, y, strict=True):
        middle = model[0](one).detach().requires_grad_()
        (g,) = torch.autograd.grad(cross_entropy(model[2](middle.tanh()), label), middle)
        G += torch.outer(g, g) / 90
        H += torch.outer(middle.tanh(), middle.tanh()).detach() / 90
    assert_same(made.G["0.weight"], G)
    assert_same(made.H["2.weight"], H)
    assert_same(made.H["0.weight"], x.T @ x / 90)
    assert made.tokens == {"0.weight": 90, "2.weight": 90}


def test_the_fisher_matrix_is_that_of_the_models_own_distribution():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    x = torch.randn(40_000, 6)
    p = model(x).softmax(-1).detach()
    wanted = torch.diag(p.mean(0)) - p.T @ p / len(p)  # the Fisher matrix of a softmax, exactly
    made = curvature(model, found(model), list(x.split(8000)), seed=3)
    assert (made.G["0.weight"] - wanted).norm() < 0.02 * wanted.norm()
    again = curvature(model, found(model), list(x.split(8000)), seed=3)
    assert torch.equal(made.G["0.weight"], again.G["0.weight"])
    other = curvature(model, found(model), list(x.split(8000)), seed=4)
    assert not torch.equal(made.G["0.weight"], other.G["0.weight"])


def test_few_tokens_are_enough_for_a_confident_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5))
    with torch.no_grad():
        model[0].weight.mul_(0.1)
        model[0].bias.copy_(torch.tensor([8.0, 0, 0, 0, 0]))  # a label drawn from it is another one in 1 of 700 tokens
    x = torch.randn(60, 6)
    p = model(x).softmax(-1).detach()
    wanted = torch.diag(p.mean(0)) - p.T @ p / len(p)
    made = curvature(model, found(model), [x], kind="diag")
    torch.testing.assert_close(made.G["0.weight"], wanted.diagonal(), rtol=0.3, atol=0)


def test_a_class_of_probability_zero_is_never_drawn():
    class Masked(nn.Linear):
        def forward(self, x):
            return super().forward(x).index_fill(-1, torch.tensor([2]), -torch.inf)

    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), Masked(4, 3))
    made = curvature(model, found(model), [torch.randn(500, 3)])
    assert made.G["2.weight"][2].abs().max() == 0
    assert made.G["2.weight"][0, 0] > 0


def test_diag_is_the_diagonal_of_fisher():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 6, 3, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(96, 3)).double()
    data = [torch.randn(9, 2, 6, 6).double()]
    whole, diagonal = (curvature(model, found(model), data, kind=kind, gram="diag") for kind in ("fisher", "diag"))
    for name, G in whole.G.items():
        assert_same(diagonal.G[name], G.diagonal())


def test_positions_of_a_convolution_are_its_tokens():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 25, 3)).double()
    x, y = torch.randn(8, 4, 5, 5).double(), torch.randint(3, (8,))
    made = curvature(model, found(model), [(x, y)], loss=cross_entropy)
    middle = model[0](x).detach().requires_grad_()
    (g,) = torch.autograd.grad(cross_entropy(model[3](middle.relu().flatten(1)), y), middle)
    rows = g.movedim(1, -1).reshape(-1, 6)
    assert_same(made.G["0.weight"], rows.T @ rows / len(rows))
    assert made.tokens["0.weight"] == 8 * 25
    patches = F.unfold(x, 3, padding=1).movedim(1, -1).reshape(-1, 4 * 9)
    assert made.H["0.weight"].shape == (2, 18, 18)
    assert_same(made.H["0.weight"][1], patches[:, 18:].T @ patches[:, 18:] / len(rows))


def test_shared_weights_and_attention_count_every_use():
    torch.manual_seed(0)

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention, self.step, self.head = nn.MultiheadAttention(8, 2), nn.Linear(8, 8), nn.Linear(8, 3)

        def forward(self, x):
            x = x + self.attention(x, x, x, need_weights=False)[0]
            return self.head(self.step(self.step(x).tanh()))

    model = Net().double()
    made = curvature(model, found(model), [torch.randn(6, 5, 8).double()])
    assert made.tokens == {
        "attention.in_proj_weight": 30,
        "attention.out_proj.weight": 30,
        "step.weight": 60,
        "head.weight": 30,
    }
    assert made.G["attention.in_proj_weight"].shape == (24, 24)
    assert made.H["attention.in_proj_weight"].shape == (3, 8, 8)
    assert all(bool(G.diagonal().gt(0).any()) for G in made.G.values())


def test_layers_that_read_one_tensor_share_its_gram_matrix():
    class Gated(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

        def forward(self, x):
            return self.down(self.gate(x).sigmoid() * self.up(x))

    model = Gated()
    x = [torch.randn(5, 4), torch.randn(7, 4)]
    made = curvature(model, found(model), x)
    assert made.H["gate.weight"] is made.H["up.weight"]
    assert_same(made.H["up.weight"], (x[0].T @ x[0] + x[1].T @ x[1]) / 12, 1e-5)
    assert not curvature(model, found(model), x, gram="none").H


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=31, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, **changes
    )
    return transformers.LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_counts_nowhere(side):
    model = llama(num_key_value_heads=2).double()
    which = found(model, exclude="lm_head")
    ids = torch.randint(31, (3, 9))
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[1, 4:] = mask[2, 6:] = 0
    mask = mask.flip(1) if side == "left" else mask

    def loss(output, batch):  # every position that is there wants the same label
        return cross_entropy(output.logits[batch["attention_mask"].bool()], batch["input_ids"][batch["attention_mask"].bool()])

    made = curvature(model, which, [{"input_ids": ids, "attention_mask": mask}], loss=loss)
    alone = [
        {"input_ids": row[there.bool()][None], "attention_mask": there[there.bool()][None]}
        for row, there in zip(ids, mask, strict=True)
    ]
    wanted = curvature(model, which, alone, loss=loss)
    for name in made.G:
        assert made.tokens[name] == int(mask.sum())
        assert_same(made.G[name], wanted.G[name], 1e-8)
        assert_same(made.H[name], wanted.H[name], 1e-8)
    drawn = curvature(model, which, [{"input_ids": ids, "attention_mask": mask}])
    assert drawn.tokens == made.tokens
    assert min(float(G.trace()) for G in drawn.G.values()) > 0


def test_the_loss_at_padded_positions_does_not_reach_the_positions_before():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.head = nn.Linear(6, 5), nn.Linear(5, 4)

        def forward(self, x, attention_mask=None):
            return self.head(self.inner(x).cumsum(1))

    torch.manual_seed(0)
    model, x = Sums(), torch.randn(1, 7, 6)
    padded = {"x": x, "attention_mask": torch.tensor([[1, 1, 1, 1, 0, 0, 0]])}
    factors = [curvature(model, found(model), [batch]).G for batch in (padded, {"x": x[:, :4]})]
    for name in ("inner.weight", "head.weight"):
        torch.testing.assert_close(factors[0][name], factors[1][name])


def test_the_model_comes_out_unchanged():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True), nn.Dropout(), nn.Linear(8, 4))
    model[4].weight.requires_grad_(False)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    model.train()
    before, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    with torch.no_grad():
        curvature(model, found(model), [torch.randn(10, 6, generator=torch.Generator().manual_seed(0))])
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.requires_grad for p in model.parameters()] == [True, True, True, True, False, True]
    assert torch.equal(model[0].weight.grad, torch.ones(8, 6))
    assert model[4].bias.grad is None
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_few_tokens_shrink_towards_the_diagonal_and_say_so():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 40), nn.ReLU(), nn.Linear(40, 3))
    few = curvature(model, found(model), [torch.randn(60, 6)])
    assert "60 tokens for 40 outputs" in few.notes["0.weight"]
    assert "2.weight" not in few.notes
    enough = curvature(model, found(model), [torch.randn(400, 6)])
    assert enough.notes == {}


def test_the_shrunk_matrix_is_nearer_to_the_truth():
    draw = torch.Generator().manual_seed(0)
    root = torch.eye(60).double() + 0.15 * torch.randn(60, 60, generator=draw).double()
    truth = root @ root.T
    g = torch.randn(90, 60, generator=draw).double() @ root.T
    G, squares = g.T @ g / 90, g.square()
    fourth = torch.stack([squares.sum(1).square().mean(), squares.square().sum(1).mean()])
    shrunk = G.clone()
    share = _shrink_(shrunk, fourth, 90)
    errors = {a: float((G * (1 - a) + a * G.diagonal().diag() - truth).norm()) for a in [i / 50 for i in range(51)]}
    assert 0.1 < share < 0.9
    assert float((shrunk - truth).norm()) < 1.02 * min(errors.values()) < 0.9 * errors[0.0]
    assert torch.equal(shrunk.diagonal(), G.diagonal())


def test_wide_outputs_keep_the_diagonal_and_say_so(monkeypatch):
    monkeypatch.setattr("secateur.curvature._WIDEST", 7)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    made = curvature(model, found(model), [torch.randn(100, 6)])
    assert made.G["0.weight"].shape == (8,)
    assert made.G["2.weight"].shape == (4, 4)
    assert "only the diagonal" in made.notes["0.weight"]


def test_layers_without_tokens_are_named():
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.spare = nn.Linear(4, 3), nn.Linear(4, 3)

        def forward(self, x):
            return self.used(x)

    model = Routed()
    made = curvature(model, found(model), [torch.randn(5, 4), torch.randn(0, 4)])
    assert list(made.G) == ["used.weight"]
    assert "no token" in made.notes["spare.weight"]


def test_layers_that_run_without_gradients_are_named():
    class Selecting(nn.Module):
        def __init__(self):
            super().__init__()
            self.score, self.value = nn.Linear(4, 1), nn.Linear(4, 3)

        def forward(self, x):
            with torch.no_grad():
                chosen = self.score(x) > 0
            return self.value(x) * chosen

    model = Selecting()
    made = curvature(model, found(model), [torch.randn(50, 4)])
    assert list(made.G) == ["value.weight"]
    assert made.notes["score.weight"].startswith("no gradient of the loss reached it")
    plan = sc.prune_(model, method="loss", sparsity=0.5, data=[torch.randn(50, 4)])
    assert plan.metrics()["pruned"] == 8


def test_embeddings_that_require_gradients_change_nothing():
    """As under gradient checkpointing of transformers, which adds this hook to the embeddings."""
    model, data = llama(), [torch.randint(31, (2, 8))]
    targets = found(model, exclude="lm_head")
    expected = curvature(model, targets, data)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_(True))
    made = curvature(model, targets, data)
    assert made.G.keys() == expected.G.keys()
    assert all(torch.equal(made.G[name], expected.G[name]) for name in expected.G)


def test_half_precision_models_have_factors_in_single_precision():
    model = llama().to(torch.bfloat16)
    made = curvature(model, found(model, exclude="lm_head"), [torch.randint(31, (2, 8))])
    assert {G.dtype for G in (*made.G.values(), *made.H.values())} == {torch.float32}


def test_what_cannot_be_measured_is_refused_by_name():
    model = nn.Sequential(nn.Linear(4, 4))
    with pytest.raises(ValueError, match="pass loss="):
        curvature(model, found(model), [torch.randn(2, 3, 5, 4)])
    with pytest.raises(ValueError, match="batch 2 of data= are NaN"):
        curvature(model, found(model), [torch.randn(2, 4), torch.full((2, 4), torch.nan)])
    with pytest.raises(ValueError, match="gave no batch"):
        curvature(model, found(model), [])
    with pytest.raises(ValueError, match="'none', 'diag', 'fisher'"):
        curvature(model, found(model), [torch.randn(2, 4)], kind="full")


def test_without_curvature_only_the_inputs_are_measured():
    model = llama()
    which, data = found(model, exclude="lm_head"), [torch.randint(31, (2, 8))]
    made, whole = curvature(model, which, data, kind="none"), curvature(model, which, data)
    assert made.G == {}
    assert made.tokens == whole.tokens
    for name, H in whole.H.items():
        assert_same(made.H[name], H)


def test_the_gram_matrix_of_a_model_that_runs_in_bfloat16_is_a_sum_of_float32(monkeypatch):
    monkeypatch.setattr("secateur.edit.guards.has_bfloat16", lambda kind: True)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 16400), nn.ReLU(), nn.Linear(16400, 3))  # large enough for bfloat16
    batches = [torch.randn(500, 64) + 1 for _ in range(3)]
    H = curvature(model, found(model), batches, kind="diag").H["0.weight"]
    x = torch.cat(batches).double()
    assert H.dtype == torch.float32
    torch.testing.assert_close(H.double(), x.T @ x / len(x), rtol=1e-5, atol=1e-5)
