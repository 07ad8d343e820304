"""A plan that says exact is exact, for models as people write them; where it is not, the plan says why."""

import math
import random
import sys
from pathlib import Path

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import seeded, unchanged
from probes import Lam, image, tokens


def cut(model, x, *more, channels=0.5):
    """The plan of a cut in double precision, chosen at random."""
    x, *more = (t.double() if t.is_floating_point() else t for t in (x, *more))
    return sc.shrink(seeded(model), (x, *more), sc.random(0), channels=channels, floor=0.01)[1]


def exact(model, *inputs, **options):
    plan = cut(model, *inputs, **options)
    assert plan.metrics()["exact"], plan
    found = plan.verify(groups=True)
    assert found.moved
    assert max(found.max_error, *found.groups.values()) < 1e-9, found
    return plan


def told(why, model, *inputs, **options):
    plan = cut(model, *inputs, **options)
    assert any(row.why and why in row.why for row in plan.groups), plan
    assert plan.verify().max_error > 1e-6
    return plan


def two(forward, bias=True, **more):
    return Lam(forward, a=nn.Linear(12, 16, bias=bias), o=nn.Linear(16, 5), **more)


# ---------------------------------------------------------------- sizes that layers keep


def test_the_width_of_a_layer_in_a_formula_is_corrected_or_reported():
    exact(two(lambda s, x: s.o(torch.tanh(s.a(x) * math.sqrt(s.a.out_features)))), tokens())
    told("its size enters a formula", two(lambda s, x: s.o(F.softplus(s.a(x))) / s.o.in_features), tokens())
    twice = Lam(lambda s, x: s.e(x) * math.sqrt(s.e.embedding_dim) @ s.e.weight.t(), e=nn.Embedding(20, 8))
    told("its size enters a formula", twice, torch.arange(10).view(2, 5))


def test_a_number_that_happens_to_be_a_power_of_the_width_is_not_its_scale():
    told("its size enters a formula", two(lambda s, x: s.o(F.softplus(s.a(x) * 16**0.5)) / s.a.out_features), tokens())


def test_comparisons_of_a_width_have_the_same_outcome_after_the_cut():
    model = two(lambda s, x: s.o(F.softplus(s.a(x)) * (3 if s.a.out_features > 6 else 1)))
    assert exact(model, tokens()).groups[0].after > 6
    with pytest.raises(ValueError, match="16 > 6"):
        cut(model, tokens(), channels=0.25)


def test_an_attribute_that_an_assertion_ties_to_a_size_changes_formulas_with_it():
    def forward(s, x):
        h = F.softplus(s.a(x))
        assert h.shape[-1] == s.d
        return s.o(torch.tanh(h * s.d**-0.5))

    told("its size enters a formula", two(forward, d=16), tokens())


# ---------------------------------------------------------------- what looks like zero


def test_units_over_their_norm_are_zero_where_they_are_removed():
    """The norm is spread over the units again; it is not zero there, and nothing is divided by zero."""
    plan = exact(two(lambda s, x: s.o(F.normalize(F.relu(s.a(x)), dim=-1)), bias=False), tokens())
    assert all(bool(p.isfinite().all()) for p in plan.small.parameters())


def test_nan_is_never_folded():
    parts = {"a": nn.Conv2d(3, 8, 1, bias=False), "o": nn.Conv2d(8, 5, 1)}
    plan = cut(Lam(lambda s, x: s.o(s.a(x).abs().log()), **parts), image())
    assert "no number" in plan.groups[0].why
    assert all(bool(p.isfinite().all()) for p in plan.small.parameters())


@pytest.mark.parametrize(
    ("count", "why"),
    [
        (lambda h: (h <= 0).sum(-1, keepdim=True), "a constant to sum"),
        (lambda h: (~(h > 0)).sum(-1, keepdim=True), "a constant to sum"),
        (lambda h: 1.0 * (h > -0.05).all(-1, keepdim=True), "all in the model runs over"),
        (lambda h: torch.linalg.vector_norm(h, -1, dim=-1, keepdim=True), "linalg_vector_norm in the model runs over"),
    ],
    ids=["count", "not", "all", "smallest"],
)
def test_reductions_that_zeros_change_are_reported(count, why):
    plan = cut(two(lambda s, x: s.o(F.relu(s.a(x))) * count(s.a(x)), bias=False), tokens())
    assert why in plan.groups[0].why


# ---------------------------------------------------------------- operators on a few numbers


@pytest.mark.parametrize(
    "forward",
    [
        lambda s, x: s.o((s.a(x) < 0.1).to(x) - s.a(x)),
        lambda s, x: s.o((8 * s.a(x)).long().to(x)),
        lambda s, x: s.o((~(s.a(x) > 0.1)).to(x)),
    ],
    ids=["step", "whole numbers", "not"],
)
def test_constants_go_through_casts_as_values_do(forward):
    exact(two(forward), tokens())


def test_the_median_of_a_constant_is_the_constant():
    exact(two(lambda s, x: s.o(F.softplus(s.a(x)).median(1).values)), torch.randn(2, 40, 12))


def test_statistics_that_a_run_writes_are_not_those_of_the_model():
    def forward(s, x):
        n = s.n
        return s.o(F.relu(F.batch_norm(s.a(x), n.running_mean, n.running_var, n.weight, n.bias, training=True)))

    model = seeded(two(forward, n=nn.BatchNorm1d(16)))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    sc.shrink(model, torch.randn(6, 12).double(), sc.random(0), channels=0.5)[1].verify(groups=True)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


# ---------------------------------------------------------------- memory that is written to


def in_a_cache(s, x):
    s.cache[: len(x), : x.shape[1]] = F.softplus(s.a(x))
    return s.o(s.cache[: len(x), : x.shape[1]])


def in_a_table(s, x):
    s.gain[:] = s.gain * 2
    return s.o(s.a(x) * s.gain[None])


def behind_its_back(s, x):
    s.gain.detach().add_(1)
    return s.o(s.a(x) * s.gain.view(1, 1, -1))


@pytest.mark.parametrize("forward", [in_a_cache, in_a_table, behind_its_back])
def test_a_buffer_is_read_as_what_was_written_to_it(forward):
    model = two(forward)
    model.register_buffer("cache", torch.zeros(4, 8, 16))
    model.register_buffer("gain", torch.ones(16))
    told("is written to in place", model, tokens())


# ---------------------------------------------------------------- sizes that torch works out


@pytest.mark.parametrize(
    ("split", "left"),
    [
        (lambda h, s: h.tensor_split(2, -1), [8, 8]),
        (lambda h, s: torch.dsplit(h, 2), [8, 8]),
        (lambda h, s: h.tensor_split((s.k,), -1), [5, 11]),
        (lambda h, s: h.tensor_split((6,), -1), [10]),
    ],
    ids=["even", "along the third", "at an attribute", "at a number"],
)
def test_pieces_of_tensor_split_keep_their_units(split, left):
    def forward(s, x):
        one, two = split(F.softplus(s.a(x)), s)
        return s.o(torch.cat([one.tanh(), two.exp()], -1))

    plan = exact(two(forward, k=5), tokens())
    assert [row.before for row in plan.groups] == left


def test_pieces_that_torch_makes_uneven_stay():
    uneven = two(lambda s, x: s.o(torch.cat([p.exp() for p in s.a(x).tensor_split(3, -1)], -1)))
    with pytest.raises(ValueError, match="uneven pieces"):
        cut(uneven, tokens())


@pytest.mark.parametrize(
    "spread", [lambda g, h: g.expand_as(h), lambda g, h: torch.broadcast_tensors(h, g)[1]], ids=["as", "tensors"]
)
def test_a_number_that_is_spread_over_units_is_as_wide_as_they_are(spread):
    def forward(s, x):
        h = F.softplus(s.a(x))
        return s.o(torch.cat([h, spread(s.g(x), h)], -1))

    model = Lam(forward, a=nn.Linear(12, 16), g=nn.Linear(12, 1), o=nn.Linear(32, 5))
    with pytest.raises(ValueError, match="cannot be met"):  # nothing makes the copies, so they stay, and so does what they copy
        cut(model, tokens())


def test_a_cut_through_numpy_is_refused():
    with pytest.raises(ValueError, match="values are read into Python"):
        cut(two(lambda s, x: s.o(torch.from_numpy(s.a(x).numpy()))), tokens())


# ---------------------------------------------------------------- what is around the call


def test_a_cut_under_autocast_uses_the_weights_and_takes_effect():
    """Torch remembers weights in low precision as long as autocast lasts: those of before the cut."""
    model, x = two(lambda s, x: s.o(F.softplus(s.a(x)))), tokens()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        model(x)
        _, plan = sc.shrink(model, x, sc.random(0), channels=0.5)
        assert plan.verify().max_error < 1e-2  # its constants are as autocast rounds them
        sc.shrink_(model, x, sc.random(0), channels=0.5)
        assert model(x).shape == (2, 5, 5)


class Drawing(nn.Module):
    """Draws from all generators that there are."""

    def __init__(self):
        super().__init__()
        self.a, self.n, self.o = nn.Linear(12, 16), nn.BatchNorm1d(16), nn.Linear(16, 5)

    def forward(self, x):
        noise = torch.rand(1) + random.random() + float(numpy.random.rand())
        return self.o(F.relu(self.n(self.a(x)))) + noise


@pytest.mark.parametrize("how", [{}, {"refit": True}, {"reestimate": True}, {"criterion": sc.reconstruction}])
def test_generators_are_as_they_were_after_a_cut(how):
    model, x = Drawing(), torch.randn(8, 12)
    data = None if not how else [x]

    def dice():
        return torch.get_rng_state().tolist(), random.getstate(), numpy.random.get_state()[1].tolist()

    before = dice()
    _, plan = sc.shrink(model, x, channels=0.5, data=data, **how)
    found = plan.verify()
    assert dice() == before
    assert how or found.max_error < 1e-6  # both sides draw the same


def any_weight(weight):
    return torch.rand_like(weight)


def any_unit(units):
    return torch.rand(units.group.size)


@pytest.mark.parametrize("chance", [any_weight, sc.surgery.unit_criterion(any_unit)])
def test_a_random_criterion_draws_other_numbers_in_the_next_cut(chance):
    """Ten random cuts to compare with are ten, not ten times one; after a seed they are the same again."""
    model, x = Drawing(), torch.randn(8, 12)

    def kept():
        small, _ = sc.shrink(model, x, chance, channels=0.5)
        return small.a.bias.tolist()

    torch.manual_seed(0)
    first, second = kept(), kept()
    torch.manual_seed(0)
    assert first != second
    assert (kept(), kept()) == (first, second)


@pytest.mark.parametrize("batch", [torch.randn(4, 7), {"y": torch.randn(4, 12)}], ids=["shape", "name"])
@pytest.mark.parametrize(
    "how",
    [
        {"refit": True},
        {"reestimate": True},
        {"criterion": sc.reconstruction},
        {"criterion": sc.surgery.activation_variance},
        {"criterion": sc.taylor, "loss": lambda out, _: out.sum()},
    ],
    ids=["refit", "reestimate", "reconstruction", "variance", "taylor"],
)
def test_a_batch_that_does_not_run_is_named_with_its_shapes(batch, how):
    model = Drawing()
    with unchanged(model), pytest.raises(ValueError, match=r"Drawing does not run on a batch of data= \(tensors of shape"):
        sc.shrink_(model, torch.randn(4, 12), channels=0.5, data=[batch], **how)


def test_models_without_numbers_of_their_own_are_refused_in_our_words():
    x = torch.randn(4, 12)
    with pytest.raises(ValueError, match=r"'0\.weight' belongs to a lazy module"):
        sc.shrink(nn.Sequential(nn.LazyLinear(8), nn.Linear(8, 5)), x, channels=0.5)
    with torch.inference_mode():
        model = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))
    with pytest.raises(ValueError, match=r"'0\.weight' was made in inference mode"):
        sc.shrink(model, x, channels=0.5)
    plain = nn.Sequential(nn.Linear(12, 8), nn.Linear(8, 5))
    with torch.device("meta"), pytest.raises(ValueError, match="default device is meta"):
        sc.shrink(plain, x, channels=0.5)
    with pytest.raises(TypeError, match=r"write random\(\)"):
        sc.shrink(plain, x, sc.random, channels=0.5)


def test_a_shuffle_of_shuffled_channels_beside_others_is_exact():
    def shuffled(x):
        return x.unflatten(-1, (2, -1)).transpose(-2, -1).flatten(-2)

    model = Lam(
        lambda s, x: s.o(shuffled(torch.cat([s.b(shuffled(s.a(x))), shuffled(s.a(x))], -1))),
        a=nn.Linear(12, 8),
        b=nn.Linear(8, 4),
        o=nn.Linear(12, 5),
    )
    exact(model, tokens())


# ---------------------------------------------------------------- tensors that the model changes while it runs


def _replaced(s, x):
    s.state = 0.5 * s.state + s.a(x).detach().mean((0, 1))
    return s.o(s.a(x) - s.state)


def _added_to(s, x):
    out = s.o(s.a(x) * s.state)
    s.state.add_(1)
    return out


def _counted(s, x):
    out = s.o(s.a(x).sigmoid() * s.state[0])
    s.state = s.state + 1
    return out


@pytest.mark.parametrize("forward", [_replaced, _added_to, _counted])
def test_the_content_of_a_buffer_in_one_run_is_not_a_constant_of_the_next(forward):
    model = two(forward)
    model.register_buffer("state", torch.zeros(16))
    plan = cut(model, tokens())
    assert not plan.metrics()["exact"], plan


def test_a_buffer_that_is_overwritten_before_it_is_read_stays_exact():
    model = two(lambda s, x: s.o(s.a(x) - s.state.copy_(s.a(x).detach().mean((0, 1)))))
    model.register_buffer("state", torch.zeros(16))
    exact(model, tokens())
