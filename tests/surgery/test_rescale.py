"""Fewer units where a formula counts them (RMSNorm, 1/sqrt(head dimension)): masked == cut, in float64, or it is reported."""

import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc
from secateur.trace.run import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import choose, difference
from folding import check, conv, cut_copy, shifted_bn, split
from probes import Lam, image, tokens


class Rms(nn.Module):
    """RMSNorm as models write it; `one`: the weight is stored as its difference from one."""

    def __init__(self, width, one=False):
        super().__init__()
        self.weight, self.variance_epsilon, self.one = nn.Parameter(torch.ones(width)), 1e-2, one

    def forward(self, x):
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return x * (1 + self.weight) if self.one else self.weight * x


class WeightFirst(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.w, self.eps = nn.Parameter(torch.ones(width)), 1e-5

    def forward(self, x):
        return self.w * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("rms", [nn.RMSNorm(16, eps=1e-2), nn.RMSNorm(16), Rms(16), Rms(16, one=True), WeightFirst(16)])
def test_rms_norm_over_fewer_units(rms):
    m = Lam(lambda s, x: s.b(s.n(s.a(x))), a=nn.Linear(12, 16, bias=False), n=rms, b=nn.Linear(16, 5))
    check(m, tokens())


@pytest.mark.parametrize("rms", [nn.RMSNorm(16), Rms(16, one=True)])
def test_a_norm_that_is_used_twice_is_scaled_once(rms):
    parts = {"a": nn.Linear(12, 16, bias=False), "c": nn.Linear(12, 16, bias=False), "n": rms, "b": nn.Linear(16, 5)}
    check(Lam(lambda s, x: s.b(s.n(s.a(x)) - 2 * s.n(s.c(x))), **parts), tokens())


@pytest.mark.parametrize("rms", [nn.RMSNorm(16, eps=1e-2), Rms(16)])
def test_a_norm_over_constants_is_reported_and_not_scaled(rms):
    """Removed units with a bias are constants, which count in the mean of squares: no factor makes up for them."""
    m = Lam(lambda s, x: s.b(s.n(s.a(x))), a=nn.Linear(12, 16), n=rms, b=nn.Linear(16, 5)).double().eval()
    with torch.no_grad():
        m.n.weight.copy_(torch.arange(1.0, 17))
    eps = {name: value for name, value in vars(m.n).items() if "eps" in name}
    small, plan = sc.shrink(m, tokens().double(), channels=0.5)
    assert plan.groups[0].why is not None
    kept = plan.cuts.tensors["n.weight"][0]
    assert torch.equal(small.n.weight, m.n.weight[kept])
    assert eps == {name: value for name, value in vars(small.n).items() if "eps" in name}


def test_the_weight_of_a_norm_that_is_used_beside_it_is_reported():
    def forward(s, x):
        h = s.a(x)
        return s.b(s.n(h) + h * s.n.weight)

    check(
        Lam(forward, a=nn.Linear(12, 16, bias=False), n=nn.RMSNorm(16), b=nn.Linear(16, 5)), tokens(), report="outside of its"
    )


def test_rms_norm_that_cannot_be_exact_is_reported():
    def with_norm(rms, bias=False):
        return Lam(lambda s, x: s.b(s.n(s.a(x))), a=nn.Linear(12, 16, bias=bias), n=rms, b=nn.Linear(16, 5))

    check(with_norm(nn.RMSNorm(16), bias=True), tokens(), report="mean in n, which has no bias")
    check(with_norm(nn.RMSNorm(16, elementwise_affine=False)), tokens(), report="has no weight")
    literal = Lam(lambda s, x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 0.01) * s.w, w=nn.Parameter(torch.ones(16)))
    check(with_norm(literal), tokens(), report="eps = 0.01 is no attribute")
    masked, small, _ = split(with_norm(literal), tokens())
    assert 1e-8 < difference(torch.cat(small), torch.cat(masked)) < 0.1  # eps alone is off
    average = Lam(lambda s, x: (s.b(x) * s.w).mean(-1), b=nn.Linear(12, 16, bias=False), w=nn.Parameter(torch.ones(16)))
    check(average, tokens(), report="is no RMSNorm")


def attention(kind):
    def forward(s, x):
        b, n, _ = x.shape
        if kind == "fused":
            q, k, v = s.qkv(x).view(b, n, 3, s.h, -1).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = (p(x).view(b, n, s.h, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        if kind == "eager":
            y = torch.softmax(q @ k.mT / math.sqrt(q.shape[-1]), -1) @ v
        elif kind == "power":
            y = torch.softmax((q * q.shape[-1] ** -0.5) @ k.mT, -1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v)
        return s.o(y.transpose(1, 2).flatten(2))

    parts = {"qkv": nn.Linear(12, 72)} if kind == "fused" else {name: nn.Linear(12, 24) for name in "qkv"}
    return Lam(forward, **parts, o=nn.Linear(24, 5), h=4)


@pytest.mark.parametrize("kind", ["sdpa", "eager", "power", "fused"])
def test_scale_of_attention_is_corrected_in_the_queries(kind):
    t = check(attention(kind), tokens(), only=lambda g: g.size == 6, least=2)
    assert any("scale" in g.flags for g in t.prunable)


def test_queries_without_a_bias_take_constants_and_scale_at_once():
    inner = attention("sdpa")
    for name in "qkv":
        setattr(inner, name, nn.Linear(10, 24, bias=False))
    t = check(Lam(lambda s, x: s.att(torch.sigmoid(s.i(x))), i=nn.Linear(12, 10), att=inner), tokens(), least=4)
    assert sorted(g.size for g in t.prunable) == [4, 6, 6, 10]


def test_a_size_that_no_weight_can_correct_is_reported():
    m = Lam(
        lambda s, x: s.o(torch.tanh(s.a(x)).reshape(-1, s.d) / math.sqrt(s.d)), a=nn.Linear(12, 16), o=nn.Linear(16, 5), d=16
    )
    check(m, tokens(), report="its size enters a formula")


def test_corrections_in_float32_are_exact_to_float32_rounding():
    m = nn.Sequential(conv(3, 8, bias=False), shifted_bn(8), nn.SiLU(), conv(8, 5)).eval()
    x = (image(),)
    t = trace(m, x)
    keep = choose(t, t.prunable, 0)
    masked, small, said = cut_copy(m, t, keep, x, True)
    assert said == {}
    assert difference(small, masked) < 1e-5


def test_a_group_that_is_not_exact_still_has_its_rms_norm_scaled():
    def both(s, x):
        h = s.a(x)
        return s.good(s.rms(h)), s.b(s.layer(h))

    parts = {"a": nn.Linear(12, 16, bias=False), "rms": nn.RMSNorm(16), "layer": nn.LayerNorm(16)}
    masked, small, said = split(Lam(both, **parts, good=nn.Linear(16, 5), b=nn.Linear(16, 5)), tokens())
    assert any("native_layer_norm in layer" in text for text in said.values())
    assert difference(small[0], masked[0]) < 1e-12
