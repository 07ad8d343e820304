"""The weights of `nn.MultiheadAttention`, which it passes to a function instead of calling layers.

The oracle computes the same attention with `nn.Linear` layers.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import secateur as sc

WIDTH, HEADS = 8, 2


class Attention(nn.Module):
    """A user's model around torch's attention: "self", "cross" (keys are values), "three" inputs, or inputs of other widths."""

    def __init__(self, case: str):
        super().__init__()
        sizes = {"kdim": 12, "vdim": 4} if case == "widths" else {}
        self.case, self.attention = case, nn.MultiheadAttention(WIDTH, HEADS, batch_first=True, **sizes)

    def inputs(self, x):
        other = x.flip(1) * torch.linspace(0.1, 2, WIDTH)
        if self.case == "widths":
            return x, torch.cat([other, other[..., :4]], -1), other[..., 2:6]
        return {"self": (x, x, x), "cross": (x, other, other), "three": (x, other, other.square())}[self.case]

    def forward(self, x):
        return self.attention(*self.inputs(x), need_weights=False)[0]


class WithLinears(Attention):
    """The same attention, written with a linear layer for each projection."""

    def __init__(self, model: Attention):
        super().__init__(model.case)
        theirs = model.attention
        packed = theirs.in_proj_weight
        parts = packed.chunk(3) if packed is not None else (theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight)
        self.q, self.k, self.v = (nn.Linear(part.shape[1], WIDTH) for part in parts)
        self.out = nn.Linear(WIDTH, WIDTH)
        for layer, weight, bias in zip(
            (self.q, self.k, self.v, self.out),
            (*parts, theirs.out_proj.weight),
            (*theirs.in_proj_bias.chunk(3), theirs.out_proj.bias),
            strict=True,
        ):
            layer.weight, layer.bias = nn.Parameter(weight.detach().clone()), nn.Parameter(bias.detach().clone())
        del self.attention

    def forward(self, x):
        q, k, v = (
            layer(part).unflatten(-1, (HEADS, -1)).transpose(1, 2)
            for layer, part in zip((self.q, self.k, self.v), self.inputs(x), strict=True)
        )
        return self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def batches(width: int = WIDTH) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(4, 6, width) for _ in range(3)]


@pytest.mark.parametrize("recipe", [{"criterion": "wanda"}, {"method": "sparsegpt"}], ids=["wanda", "sparsegpt"])
@pytest.mark.parametrize("case", ["self", "cross", "three", "widths"])
def test_every_weight_of_attention_is_pruned_with_the_inputs_it_is_multiplied_with(case, recipe):
    """`in_proj_weight` was no target, and `out_proj.weight` "saw no input" because attention never calls `out_proj`."""
    torch.manual_seed(0)
    model = Attention(case).eval()
    twin = WithLinears(model)
    torch.testing.assert_close(model(batches()[0]), twin(batches()[0]))
    plan = sc.prune_(model, pattern="2:4", data=batches(), **recipe)
    expected = sc.prune_(twin, pattern="2:4", data=batches(), **recipe)
    names = [f"attention.{n}_proj_weight" for n in "qkv"] if case == "widths" else ["attention.in_proj_weight"]
    assert sorted(plan.masks) == sorted([*names, "attention.out_proj.weight"])
    pairs = [("attention.out_proj.weight", ["out.weight"])]
    pairs += (
        [(name, [f"{n}.weight"]) for name, n in zip(names, "qkv", strict=True)]
        if case == "widths"
        else [(names[0], ["q.weight", "k.weight", "v.weight"])]
    )
    for name, theirs in pairs:
        assert torch.equal(plan.masks[name], torch.cat([expected.masks[other] for other in theirs])), name
        weights = torch.cat([twin.get_parameter(other) for other in theirs])
        torch.testing.assert_close(model.get_parameter(name), weights, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("criterion", ["wanda", "ria", "taylor", "synflow", "magnitude"])
@pytest.mark.parametrize("training", [True, False])
def test_an_encoder_is_pruned_by_any_criterion(criterion, training):
    """Wanda raised "'layers.0.self_attn.out_proj.weight' saw no input", in both modes."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2).train(training)
    data = [(x, torch.zeros_like(x)) for x in batches()]
    plan = sc.prune_(model, criterion, sparsity=0.5, data=data, loss=F.mse_loss)
    assert len(plan.masks) == 8
    assert plan.metrics()["sparsity"] == 0.5
    assert all(module.training is training for module in model.modules())
    assert torch.backends.mha.get_fastpath_enabled()


def test_padding_reaches_sparsegpt_as_it_reaches_the_model():
    """On the fast path an encoder turns padded batches into nested tensors, which layers cannot be replayed with."""
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0), 2).eval()
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[:, 4:] = True
    plan = sc.prune_(
        model, method="sparsegpt", sparsity=0.5, data=[{"src": x, "src_key_padding_mask": padding} for x in batches()]
    )
    assert len(plan.masks) == len(plan.weights) == 8


def test_a_decoder_with_cross_attention_is_pruned_by_wanda():
    torch.manual_seed(0)
    model = nn.Transformer(8, 2, 1, 2, 16, batch_first=True)
    data = [{"src": x, "tgt": x[:, :4]} for x in batches()]
    plan = sc.prune_(model, "wanda", sparsity=0.5, data=data)
    assert len([name for name in plan.masks if name.endswith("in_proj_weight")]) == 1 + 2 * 2


def test_a_weight_that_the_model_passes_to_linear_itself_is_seen():
    """Vision models compute `F.linear(x, self.qkv.weight, bias)` with a bias of their own and never call `qkv`."""

    class Unfused(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.head = nn.Linear(8, 24, bias=False), nn.Linear(24, 4)

        def forward(self, x):
            return self.head(F.linear(x, weight=self.qkv.weight, bias=torch.zeros(24)))

    torch.manual_seed(0)
    model, data, original = Unfused(), batches(), F.linear
    norms = torch.cat(data).flatten(0, 1).norm(dim=0)
    scores = model.qkv.weight.detach().abs() * norms
    plan = sc.prune_(model, "wanda", sparsity=0.5, scope="row", data=data)
    assert torch.equal(plan.masks["qkv.weight"], scores >= scores.sort(1).values[:, 4:5])
    assert F.linear is original
    sc.prune_(model, method="sparsegpt", pattern="2:4", data=data)


def test_a_weight_whose_rows_read_different_inputs_is_refused():
    class Halves(nn.Module):
        def __init__(self):
            super().__init__()
            self.both = nn.Linear(8, 8)

        def forward(self, x):
            return F.linear(x, self.both.weight[:4]) + F.linear(x.flip(1), self.both.weight[4:])

    model = Halves()
    before = model.both.weight.detach().clone()
    with pytest.raises(ValueError, match=r"rows 0 to 4 of 'both.weight' are multiplied with inputs of their own"):
        sc.prune_(model, "wanda", sparsity=0.5, data=batches())
    assert torch.equal(model.both.weight, before)


def test_biases_of_attention_are_not_targets():
    plan = sc.prune_(nn.MultiheadAttention(8, 2, add_bias_kv=True), sparsity=0.5)
    assert set(plan.masks) == {"in_proj_weight", "out_proj.weight"}
    assert "bias" in plan.skipped["bias_k"]
