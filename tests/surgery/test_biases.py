"""Which biases take constants of removed units: those added to a product before it is read, without another use."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.nn.utils.parametrize import register_parametrization

import secateur as sc
from secateur.trace.run import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import choose, difference, seeded
from folding import check, cut_copy
from probes import Lam, drawn, tokens

NONE = "has no bias to take it"


def product(forward, **shapes):
    """A model whose `forward` gets a product without a bias, of units that give constants."""
    return Lam(lambda s, x: forward(s, F.linear(F.softplus(s.a(x)), s.w)), a=nn.Linear(12, 16), **drawn(w=(6, 16), **shapes))


# ---------------------------------------------------------------- vectors that are added


def test_a_vector_that_is_added_right_after_is_a_bias():
    check(product(lambda s, y: torch.tanh(y + s.b), b=(6,)), tokens())
    check(product(lambda s, y: torch.tanh(y.view(10, 6) + s.b), b=(6,)), tokens())


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, y: (y + s.b) * torch.sigmoid(y),
        lambda s, y: torch.sigmoid(y) * (y + s.b),
        lambda s, y: (y + s.b) * (y + s.d),
        lambda s, y: torch.cat([y + s.b, y]),
        lambda s, y: (y.view(10, 6) + s.b) * torch.sigmoid(y.view(10, 6)),
    ],
)
def test_a_product_that_is_read_without_the_vector_too_loses_its_constant(forward):
    check(product(forward, b=(6,), d=(6,)), tokens(), report=NONE)


def test_a_product_that_is_returned_without_the_vector_loses_its_constant():
    check(product(lambda s, y: (y + s.b, y), b=(6,)), tokens(), report=NONE)
    check(product(lambda s, y: (y.view(10, 6) + s.b, y.view(10, 6)), b=(6,)), tokens(), report=NONE)


# ---------------------------------------------------------------- casts


class Cast(nn.Module):
    """A consumer that computes in another precision; `part`: which entries of the vector are its bias."""

    def __init__(self, dtype, part=slice(0, 600), first=False):
        super().__init__()
        self.a, self.weight, self.bias = nn.Linear(12, 16), nn.Parameter(torch.ones(600, 16)), nn.Parameter(torch.ones(900))
        self.dtype, self.part, self.first = dtype, part, first

    def forward(self, x):
        bias = self.bias.to(self.dtype)[self.part] if self.first else self.bias[self.part].to(self.dtype)
        return F.linear(F.softplus(self.a(x)).to(self.dtype), self.weight.to(self.dtype), bias).double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("first", [False, True])
@pytest.mark.parametrize("part", [slice(0, 600), slice(250, 850)])
def test_a_bias_that_is_cast_takes_a_constant(dtype, first, part):
    model, x = seeded(Cast(dtype, part, first)), tokens().double()
    t = trace(model, (x,))
    masked, small, said = cut_copy(model, t, choose(t, t.prunable, 0), (x,), True)
    assert said == {}
    assert difference(small, masked) < 16 * torch.finfo(dtype).eps


def test_a_bias_takes_a_constant_under_autocast():
    def forward(s, x):
        with torch.autocast("cpu", torch.bfloat16):
            return s.o(F.softplus(s.a(x))).float()

    model, x = seeded(Lam(forward, a=nn.Linear(12, 16), o=nn.Linear(16, 5))).float(), tokens()
    t = trace(model, (x,))
    masked, small, said = cut_copy(model, t, choose(t, t.prunable, 0), (x,), True)
    assert said == {}
    assert difference(small, masked) < 16 * torch.finfo(torch.bfloat16).eps


@pytest.mark.parametrize("bias", [lambda v: v.round(), lambda v: v.to(torch.int8).double(), lambda v: v.clamp(-9, 9)])
def test_a_bias_that_is_rounded_or_clipped_takes_no_constant(bias):
    model = Lam(lambda s, x: F.linear(F.softplus(s.a(x)), s.w, bias(s.b)), a=nn.Linear(12, 16), **drawn(w=(6, 16), b=(6,)))
    check(model, tokens(), report=NONE)


# ---------------------------------------------------------------- biases that are made


@pytest.mark.parametrize("kind", [lambda i, o: nn.Linear(i, o, bias=False), lambda i, o: nn.Conv1d(i, o, 1, bias=False)])
def test_a_parametrized_layer_without_a_bias_gets_one(kind):
    def shrunk(wrap):
        first = kind(12, 16)
        x = tokens() if isinstance(first, nn.Linear) else tokens().mT
        model = nn.Sequential(first, nn.Softplus(), wrap(kind(16, 5))).double().eval()
        small, plan = sc.shrink(model, x.double(), sc.random(0), channels=0.5)
        assert small[2].bias.dtype == torch.float64
        return plan.metrics()["exact"], plan.verify().max_error

    exact, error = shrunk(lambda layer: register_parametrization(layer, "weight", nn.Tanh()))
    assert exact
    assert error < 1e-12
    for norm in (weight_norm, spectral_norm):  # of a smaller weight it is another number
        exact, error = shrunk(norm)
        assert not exact
        assert error > 1e-6


class Deaf(nn.Linear):
    """A linear layer that never looks at its bias."""

    def forward(self, input):
        return F.linear(input, self.weight) * 2


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, h: F.linear(h, s.c.weight),
        lambda s, h: h @ s.c.weight.t(),
        lambda s, h: s.c(h) * F.linear(torch.tanh(h), s.c.weight),
        lambda s, h: s.deaf(h),
    ],
)
def test_no_bias_is_added_where_the_model_would_not_read_it(forward):
    parts = {"c": nn.Linear(16, 5, bias=False), "deaf": Deaf(16, 5, bias=False)}
    check(Lam(lambda s, x: forward(s, torch.sigmoid(s.a(x))), a=nn.Linear(12, 16), **parts), tokens(), report=NONE)


def test_a_new_bias_is_of_the_layer_that_runs_and_not_of_one_with_the_same_weight():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(12, 16), nn.Linear(16, 5, bias=False), nn.Linear(16, 5, bias=False)
            self.c.weight = self.b.weight

        def forward(self, x):
            h = self.a(x)
            return self.b(torch.sigmoid(h)) * self.c(F.softplus(h))

    model, x = seeded(Tied()), tokens().double()
    small, plan = sc.shrink(model, x, sc.random(0), channels=0.5)
    assert plan.metrics()["exact"]
    assert plan.verify().max_error < 1e-12
    assert not torch.equal(small.b.bias, small.c.bias)


def test_a_product_in_a_hook_of_a_layer_gets_no_bias_of_the_layer():
    model = Lam(lambda s, x: s.c(torch.sigmoid(s.a(x))), a=nn.Linear(12, 16), c=nn.Linear(6, 5, bias=False), **drawn(w=(6, 16)))
    model.c.register_forward_pre_hook(Before(model))
    check(model, tokens(), report=NONE)


class Before:
    """A hook, as a class so that a copied model has a hook with its own weight."""

    def __init__(self, model):
        self.model = model

    def __call__(self, _, args):
        return F.linear(args[0], self.model.w)


class Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("wrap", [lambda m: m, lambda m: register_parametrization(m, "weight", Twice())])
def test_a_new_bias_is_scaled_with_its_weight(wrap):
    """Fewer units in a head: the scale of attention grows, queries shrink, and what they get from removed units with them."""

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.o, self.heads = nn.Linear(12, 16), nn.Linear(24, 5), 4
            self.q, self.k, self.v = (nn.Linear(16, 24, bias=False) for _ in "qkv")
            wrap(self.q)
            wrap(self.k)

        def forward(self, x):
            b, n, _ = x.shape
            h = F.softplus(self.a(x))
            q, k, v = (p(h).view(b, n, self.heads, -1).transpose(1, 2) for p in (self.q, self.k, self.v))
            return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    for seed in range(2):
        _, plan = sc.shrink(Heads().double().eval(), tokens().double(), sc.random(seed), channels=0.5)
        assert plan.metrics()["exact"]
        assert plan.verify().max_error < 1e-13


# ---------------------------------------------------------------- biases that are read elsewhere


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, h: torch.cat([s.o(h).flatten(), s.o.bias]),
        lambda s, h: (s.o(h), s.o.bias),
        lambda s, h: (s.o(h), s.o.bias.pow(2).sum()),
        lambda s, h: (s.o(h), (s.o.bias * s.d).sum()),
        lambda s, h: s.o(h) * (s.o.bias * s.d),
        lambda s, h: (F.linear(h, s.w) + s.d, s.d),
        lambda s, h: (F.linear(h, s.w) + s.d, h[..., :5].detach() * 0 + s.d),
        lambda s, h: (F.linear(h, s.w, s.e[:5]), s.e[3:].sum()),
        lambda s, h: (F.linear(h, s.w, s.e[:5]), s.e[3:8] * s.d),
    ],
)
def test_a_bias_that_has_another_use_takes_no_constant(forward):
    model = Lam(
        lambda s, x: forward(s, F.softplus(s.a(x))),
        a=nn.Linear(12, 16), o=nn.Linear(16, 5), **drawn(w=(5, 16), d=(5,), e=(10,)),
    )  # fmt: skip
    check(model.requires_grad_(False), tokens(), report="applied more than once")


@pytest.mark.parametrize(
    "mixed",
    [
        lambda e: e[torch.tensor([9, 3, 4])].sum(),
        lambda e: (e * torch.arange(10)).sum(),
        lambda e: (e + torch.rand(10)).sum(),
    ],
)
@pytest.mark.parametrize("forward", [lambda y, number: y * number, lambda y, number: (y, number)])
def test_a_bias_that_is_mixed_with_numbers_of_no_module_has_another_use(mixed, forward):
    def run(s, x):
        return forward(F.linear(F.softplus(s.a(x)), s.w, s.e[:5]), mixed(s.e))

    model = Lam(run, a=nn.Linear(12, 16), **drawn(w=(5, 16), e=(10,))).double().eval()
    _, plan = sc.shrink(model, tokens().double(), sc.random(0), channels=0.5)
    assert not plan.metrics()["exact"]


# ---------------------------------------------------------------- addmm


@pytest.mark.parametrize("factors", [{"beta": 0.5}, {"alpha": 0.5}, {"beta": 0}])
def test_a_bias_in_a_scaled_sum_takes_no_constant(factors):
    def forward(s, x):
        return torch.addmm(s.b, F.softplus(s.a(x)), s.w, **factors)

    check(Lam(forward, a=nn.Linear(12, 16), **drawn(w=(16, 6), b=(6,))), tokens()[0], report=NONE)


def test_a_vector_along_the_tokens_is_no_bias_of_the_rows():
    def forward(s, x):
        return torch.addmm(s.b, s.w, F.softplus(s.a(x)).t())

    check(Lam(forward, a=nn.Linear(12, 16), **drawn(w=(5, 16), b=(5,))), tokens()[0], report=NONE)


# ---------------------------------------------------------------- RMSNorm


def rms(x, weight, eps):
    return weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps))


class Norm(nn.Module):
    def __init__(self, forward, width=16, eps=0.1, **numbers):
        super().__init__()
        self.weight, self.eps, self.run = nn.Parameter(torch.ones(width)), eps, forward
        vars(self).update(numbers)

    def forward(self, x):
        return self.run(self, x)


def normed(norm, forward=lambda s, h: s.o(s.n(h)), **parts):
    return Lam(lambda s, x: forward(s, s.a(x)), a=nn.Linear(12, 16, bias=False), n=norm, o=nn.Linear(16, 5), **parts)


def test_an_rms_norm_whose_inner_number_is_returned_is_reported():
    def inner(s, x):
        r = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.eps)
        return s.weight * (x * r), r

    def returned(s, h):
        y, r = s.n(h)
        return s.o(y), r

    check(normed(Norm(inner), returned), tokens(), report="is no RMSNorm")


def test_the_weight_of_a_norm_that_is_returned_is_reported():
    norm = Norm(lambda s, x: rms(x, s.weight, s.eps))
    check(normed(norm, lambda s, h: (s.o(s.n(h)), s.n.weight.pow(2).sum())), tokens(), report="outside of its")


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: rms(x, s.weight, s.eps) + s.eps,
        lambda s, x: rms(x, s.weight, s.eps) / (s.weight.abs() + s.eps),
        lambda s, x: torch.clamp(rms(x, s.weight, s.eps), min=s.eps),
    ],
)
def test_an_eps_with_other_uses_is_reported(forward):
    check(normed(Norm(forward)), tokens(), report="eps has other uses")


def test_norms_that_share_one_eps_are_scaled_only_if_they_need_the_same_value():
    def forward(s, x):
        return s.o(rms(s.a(x), s.v, s.eps)) + s.p(rms(s.b(x), s.w, s.eps))

    parts = {
        "a": nn.Linear(12, 20, bias=False),
        "b": nn.Linear(12, 10, bias=False),
        "o": nn.Linear(20, 5),
        "p": nn.Linear(10, 5),
    }
    model = Lam(forward, **parts, eps=0.1, **drawn(v=(20,), w=(10,)))
    check(model, tokens(), least=2)  # the same part of both
    check(model, tokens(), only=lambda g: g.size == 20, report="eps has other uses")
    check(model, tokens(), only=lambda g: g.size == 10, report="eps has other uses")


def test_norms_of_one_weight_may_have_an_eps_each():
    one, two = nn.RMSNorm(16, eps=0.01), nn.RMSNorm(16, eps=0.1)
    two.weight = one.weight
    check(normed(one, lambda s, h: s.o(s.n(h) + torch.tanh(s.m(h))), m=two), tokens())


def test_two_attributes_that_may_be_eps_are_named():
    norm = Norm(lambda s, x: rms(x, s.weight, s.eps), other=0.1)
    check(normed(norm), tokens(), report="the value of several attributes (eps, other)")


@pytest.mark.parametrize(
    "formula",
    [
        lambda x, r, w: w * torch.tanh(x * r),
        lambda x, r, w: w * (x * r + x),
        lambda x, r, w: w * (x * (r * r)),
        lambda x, r, w: w * (x * (r + 1)),
        lambda x, r, w: w * (x / (r + 3)),
        lambda x, r, w: w * (x / r),
    ],
)
def test_a_weight_behind_another_formula_does_not_take_the_factor(formula):
    def forward(s, x):
        return formula(x, torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.eps), s.weight)

    check(normed(Norm(forward)), tokens(), report="RMSNorm")


def test_a_weight_behind_views_and_quotients_takes_the_factor():
    def forward(s, x):
        y = (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + s.eps)).flatten(0, 1)
        return (-y / 2 * s.weight).unflatten(0, x.shape[:2])

    check(normed(Norm(forward)), tokens())
