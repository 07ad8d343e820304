"""Cuts inside torch's own attention modules: the width, the heads, and the width of a head."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc


class Attends(nn.Module):
    def __init__(self, width, heads, residual):
        super().__init__()
        self.first, self.last = nn.Linear(8, width), nn.Linear(width, 5)
        self.attention, self.residual = nn.MultiheadAttention(width, heads, batch_first=True), residual

    def forward(self, x):
        h = self.first(x)
        y, _ = self.attention(h, h, h, need_weights=False)
        return self.last(y + h if self.residual else y)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize(("width", "heads"), [(36, 6), (64, 4)])
def test_multihead_attention_gets_narrower_and_stays_exact(width, heads, residual):
    torch.manual_seed(0)
    model, x = Attends(width, heads, residual).double().eval(), torch.randn(2, 6, 8, dtype=torch.float64)
    small, plan = sc.shrink(model, x, params=0.5)
    attention = small.attention
    assert attention.embed_dim == attention.num_heads * attention.head_dim < width
    assert attention.in_proj_weight.shape == (3 * attention.embed_dim, attention.embed_dim)
    assert plan.verify().max_error < 1e-12


def test_the_attention_of_a_transformer_encoder_is_cut():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = nn.Sequential(nn.Linear(8, 32), nn.TransformerEncoder(layer, 2), nn.Linear(32, 3)).eval()
    small, plan = sc.shrink(model, torch.randn(2, 6, 8), channels=0.75)
    assert small[1].layers[0].self_attn.embed_dim < 32
    assert small(torch.randn(3, 7, 8)).shape == (3, 7, 3)
    assert any(row.why for row in plan.groups)  # across a LayerNorm there is no exact answer


@pytest.mark.parametrize("returned", [False, True])
def test_attention_maps_matter_only_where_they_are_returned(returned):
    class Maps(Attends):
        def forward(self, x):
            h = self.first(x)
            y, maps = self.attention(h, h, h)  # their mean over the heads is made, asked for or not
            return (self.last(y), maps) if returned else self.last(y)

    torch.manual_seed(0)
    model, x = Maps(32, 4, False).double().eval(), torch.randn(2, 6, 8, dtype=torch.float64)
    small, plan = sc.shrink(model, x, sc.random(0), channels=0.5, scope="tensor")
    assert small.attention.num_heads < 4
    assert any("mean" in (row.why or "") for row in plan.groups) == returned
    assert (plan.verify().max_error < 1e-12) != returned


class Biased(nn.Module):
    """Queries that also make the bias of the attention, as relative positions do."""

    def __init__(self):
        super().__init__()
        self.qkv, self.last = nn.Linear(8, 3 * 16), nn.Linear(16, 5)
        self.places = nn.Parameter(torch.randn(6, 16))

    def forward(self, x):
        query, key, value = self.qkv(x).chunk(3, dim=-1)
        bias = query @ self.places.mT
        attended = nn.functional.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None], bias[:, None])
        return self.last(attended[:, 0])


def test_queries_that_also_make_a_bias_are_not_scaled():
    torch.manual_seed(0)
    model, x = Biased().double().eval(), torch.randn(2, 6, 8, dtype=torch.float64)
    small, plan = sc.shrink(model, x, channels=0.5, exact_only=True)
    assert small.places.shape[1] < 16
    assert plan.verify().max_error < 1e-12


@pytest.mark.parametrize("widths", [{}, {"kdim": 10, "vdim": 14}])
def test_attention_to_something_else_takes_the_constants_of_its_inputs(widths):
    class Crosses(nn.Module):
        def __init__(self):
            super().__init__()
            self.q, self.k, self.v = (
                nn.Linear(8, 16),
                nn.Linear(8, widths.get("kdim", 16)),
                nn.Linear(8, widths.get("vdim", 16)),
            )
            self.attention, self.last = nn.MultiheadAttention(16, 4, batch_first=True, **widths), nn.Linear(16, 3)
            nn.init.normal_(self.attention.in_proj_bias)

        def forward(self, x, y):
            return self.last(self.attention(self.q(x), self.k(y), self.v(y), need_weights=False)[0])

    torch.manual_seed(0)
    inputs = torch.randn(2, 5, 8, dtype=torch.float64), torch.randn(2, 6, 8, dtype=torch.float64)
    plan = sc.shrink(Crosses().double().eval(), inputs, sc.random(0), channels=0.5)[1]
    assert len(plan.groups) >= 5
    assert all(row.why is None for row in plan.groups)
    found = plan.verify()
    assert found.max_error < 1e-12
    assert found.moved


class ByHand(nn.Module):
    """Attention as papers write it; `kv` heads for keys and values."""

    def __init__(self, attend, kv=4):
        super().__init__()
        self.q, self.k, self.v, self.o = nn.Linear(16, 16), nn.Linear(16, 4 * kv), nn.Linear(16, 4 * kv), nn.Linear(16, 5)
        self.heads, self.kv, self.attend = 4, kv, attend

    def forward(self, x):
        b, n, _ = x.shape
        q, k, v = (f(x).view(b, n, h, -1) for f, h in ((self.q, self.heads), (self.k, self.kv), (self.v, self.kv)))
        return self.o(self.attend(q, k, v).reshape(b, n, -1))


def einsums(scores, dim):
    """Scores in this order of axes, a softmax over one of them."""

    def attend(q, k, v):
        weights = torch.softmax(torch.einsum(f"bqhd,bkhd->{scores}", q, k) / q.shape[-1] ** 0.5, dim)
        return torch.einsum(f"{scores},bkhd->bqhd", weights, v)

    return attend


def cut_by_hand(attend, kv=4):
    torch.manual_seed(0)
    model, x = ByHand(attend, kv).double().eval(), torch.randn(4, 4, 16, dtype=torch.float64)  # sizes tell no axis from another
    plan = sc.shrink(model, x, sc.random(0), channels=0.5, floor=0.01)[1]
    return plan, plan.verify().max_error


@pytest.mark.parametrize(("scores", "dim"), [("bhqk", -1), ("bqhk", -1), ("bkqh", 1), ("kqhb", 0)])
def test_attention_in_einsums_passes_on_the_bias_of_its_values(scores, dim):
    plan, error = cut_by_hand(einsums(scores, dim))
    assert plan.metrics()["exact"], plan
    assert error < 1e-12


@pytest.mark.parametrize(("scores", "dim"), [("bhqk", -2), ("bkqh", 2), ("kqhb", 1)])
def test_weights_that_sum_to_one_over_another_axis_pass_on_no_constant(scores, dim):
    plan, error = cut_by_hand(einsums(scores, dim))
    assert not plan.metrics()["exact"]
    assert error > 1e-6


def test_the_scale_of_shared_keys_is_corrected():
    plan, error = cut_by_hand(
        lambda q, k, v: F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), enable_gqa=True).transpose(
            1, 2
        ),
        kv=2,
    )
    assert plan.metrics()["exact"], plan
    assert error < 1e-12


def test_a_norm_inside_a_head_does_not_grow_with_the_inputs():
    unit = einsums("bhqk", -1)
    plan, _ = cut_by_hand(lambda q, k, v: unit(F.normalize(q, dim=-1), F.normalize(k, dim=-1), v))
    assert not any("grows with the size" in (row.why or "") for row in plan.groups), plan
