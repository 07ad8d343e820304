"""Constants of removed units are folded into the layers that read them, or the cut is reported as not exact (float64)."""

import copy
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import secateur as sc
from secateur.surgery.exact.fold import fold_
from secateur.surgery.masked import mask_
from secateur.trace.run import trace

sys.path.insert(0, str(Path(__file__).parents[1] / "trace"))
from cutting import choose, difference, seeded
from folding import check, conv, cut_copy, shifted_bn, split, zero_weights_
from probes import Lam, image, tokens

# ---------------------------------------------------------------- where constants come from and go


@pytest.mark.parametrize(
    "activation", [F.relu, torch.sigmoid, F.softplus, F.gelu, F.rrelu, torch.cos], ids=lambda f: f.__name__
)
def test_bias_and_activation_of_zero_go_into_the_next_bias(activation):
    check(Lam(lambda s, x: s.b(activation(s.a(x))), a=nn.Linear(12, 16), b=nn.Linear(16, 5)), tokens())


def test_an_operator_that_wants_operands_of_one_shape_gets_them():
    """Torch hands memory as it finds it to rrelu, which may happen to be zeros."""

    def rrelu(x):
        return torch.ops.aten.rrelu_with_noise(x, torch.zeros_like(x))

    check(Lam(lambda s, x: s.b(rrelu(s.a(x))), a=nn.Linear(12, 16), b=nn.Linear(16, 5)), tokens())


def test_a_consumer_without_a_bias_gets_one():
    t = check(
        Lam(lambda s, x: s.b(torch.sigmoid(s.a(x))), a=nn.Linear(12, 16, bias=False), b=nn.Linear(16, 5, bias=False)), tokens()
    )
    assert "b.bias" not in t.dims  # the trace of the model that was given is not touched
    check(nn.Sequential(conv(3, 8), nn.Sigmoid(), conv(8, 5, bias=False)), image())


def test_parts_of_one_vector_are_biases_of_several_layers():
    def forward(s, x):
        h, (one, two) = torch.sigmoid(s.a(x)), s.v.split([7, 5])
        return torch.cat([F.linear(h, s.b, one), F.linear(h, s.c, two)], -1)

    parts = {"a": nn.Linear(12, 16), "b": nn.Parameter(torch.ones(7, 16)), "c": nn.Parameter(torch.ones(5, 16))}
    check(Lam(forward, **parts, v=nn.Parameter(torch.ones(12))), tokens())


@pytest.mark.parametrize("bias", [lambda v: 2 * v, lambda v: v.abs(), lambda v: v + 1, lambda v: v[:1].repeat(5)])
def test_a_bias_that_is_calculated_takes_no_constant(bias):
    model = Lam(
        lambda s, x: F.linear(torch.sigmoid(s.a(x)), s.b.weight, bias(s.b.bias)), a=nn.Linear(12, 16), b=nn.Linear(16, 5)
    )
    check(model, tokens(), report="which has no bias to take it")


def test_no_constant_adds_no_bias():
    m = seeded(nn.Sequential(nn.Linear(12, 16, bias=False), nn.ReLU(), nn.Linear(16, 5, bias=False)))
    x = (tokens().double(),)
    t = trace(m, x)
    keep = choose(t, t.prunable, 0)
    mask_(m, t, keep)
    assert fold_(m, t, keep, x) == {}
    assert m[2].bias is None


def test_batch_norm_shift():
    check(nn.Sequential(conv(3, 8, bias=False), shifted_bn(8), nn.ReLU(), conv(8, 5)), image())
    check(nn.Sequential(conv(3, 8, 3), shifted_bn(8), nn.SiLU(), conv(8, 6, 3), shifted_bn(6), nn.ReLU(), conv(6, 5)), image())


@pytest.mark.parametrize("groups", [2, 8], ids=["grouped", "depthwise"])
def test_grouped_convolution(groups):
    m = nn.Sequential(conv(3, 8), nn.Sigmoid(), conv(8, 8, 3, groups=groups), nn.Sigmoid(), conv(8, 5))
    check(m, image())


def test_transposed_convolution_of_one_pixel():
    m = nn.Sequential(
        conv(3, 8), nn.Sigmoid(), nn.ConvTranspose2d(8, 6, 1), nn.Sigmoid(), nn.ConvTranspose2d(6, 4, 1, groups=2)
    )
    check(m, image())


def test_transposed_convolution_that_spreads_its_input_is_reported():
    m = nn.Sequential(conv(3, 8), nn.Sigmoid(), nn.ConvTranspose2d(8, 4, 3, stride=2))
    check(m, image(), report="position")


def test_depthwise_transposed_convolution_makes_the_channels_that_it_reads():
    deep = nn.ConvTranspose2d(8, 8, 2, groups=8)
    check(nn.Sequential(conv(3, 8), shifted_bn(8), nn.SiLU(), deep, nn.SiLU(), conv(8, 2)), image())


@pytest.mark.parametrize("meet", [torch.add, torch.maximum, torch.mul])
def test_units_that_meet_each_other_are_reported(meet):
    def model(bias):
        net = Lam(
            lambda s, x: s.o(meet(s.a(x)[..., None], s.a(x)[..., None, :]).sum(-1)), a=nn.Linear(12, 8), o=nn.Linear(8, 2)
        )
        if not bias:
            net.a.register_parameter("bias", None)
        return net

    check(model(True), tokens(), report="meets the kept units")
    check(model(False), tokens(), constants=False, report=None if meet is torch.mul else "meets the kept units")


@pytest.mark.parametrize(
    ("pool", "grows"), [(lambda h: h.sum(1), True), (lambda h: h.sum(1) / h.shape[1], False), (lambda h: h.mean(1), False)]
)
def test_a_constant_that_is_summed_over_places_is_right_for_their_number_alone(pool, grows):
    model = seeded(Lam(lambda s, x: s.o(pool(torch.sigmoid(s.a(x)))), a=nn.Linear(12, 8), o=nn.Linear(8, 2)))
    plan = sc.shrink(model, tokens().double(), channels=0.5)[1]
    assert any("size of the inputs" in (row.why or "") for row in plan.groups) == grows
    assert plan.verify().max_error < 1e-12
    assert (plan.verify(tokens(length=9).double()).max_error > 1e-3) == grows


def test_flatten_gives_many_columns_to_a_channel():
    check(nn.Sequential(conv(3, 8, 3), nn.Sigmoid(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8 * 9, 5)), image())


def test_constants_go_through_a_padded_max_pool_as_they_are():
    check(nn.Sequential(conv(3, 8), shifted_bn(8), nn.MaxPool2d(3, 2, 1), conv(8, 4)), image())  # also those below zero


def test_concatenation_and_several_consumers():
    m = Lam(
        lambda s, x: s.o(torch.cat([torch.sigmoid(s.a(x)), torch.cos(s.b(x))], 1)) + s.p(torch.cos(s.b(x))),
        a=conv(3, 8), b=conv(3, 6), o=conv(14, 4), p=conv(6, 4, bias=False),
    )  # fmt: skip
    t = check(m, image(), least=2)
    assert sorted(g.size for g in t.prunable) == [6, 8]


def test_residual_of_two_producers():
    m = Lam(
        lambda s, x: s.o(torch.cos(s.a(x) + s.c(F.softplus(s.b(s.a(x)))))),
        a=nn.Linear(12, 16), b=nn.Linear(16, 24), c=nn.Linear(24, 16), o=nn.Linear(16, 5),
    )  # fmt: skip
    check(m, tokens(), least=2)


def test_heads_times_dims():
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, s.h, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        return s.o((torch.softmax(q @ k.mT * 0.4, -1) @ v).transpose(1, 2).flatten(2))

    parts = {name: nn.Linear(12, 24) for name in "qkv"}
    t = check(Lam(forward, **parts, o=nn.Linear(24, 5), h=4), tokens(), least=3)  # heads, q/k dims, v dims
    assert sorted(g.size for g in t.prunable) == [4, 6, 6]
    check(Lam(forward, **parts, o=nn.Linear(24, 5), h=4), tokens(), only=lambda g: g.size == 6)


def test_gates_of_a_recurrent_layer_take_the_constants_of_its_inputs():
    for kind, layers, both in ((nn.LSTM, 1, False), (nn.GRU, 2, True)):
        m = Lam(
            lambda s, x: s.o(s.r(torch.sigmoid(s.i(x)))[0]),
            i=nn.Linear(12, 6),
            r=kind(6, 8, layers, bidirectional=both, batch_first=True),
            o=nn.Linear(16 if both else 8, 5),
        )
        check(m, tokens(), only=lambda g: g.size == 6)


def test_hidden_units_with_biases_are_reported():
    m = Lam(lambda s, x: s.o(s.r(x)[0]), r=nn.LSTM(12, 8, batch_first=True), o=nn.Linear(8, 5))
    check(m, tokens(), report="depends on position", mask=zero_weights_)
    check(m, tokens(), constants=False)  # the masked model of a cut has no biases there: nothing is carried on


@pytest.mark.parametrize("kind", [nn.GRU, nn.RNN, nn.LSTM])
@pytest.mark.parametrize("wide", [1, 2])
def test_hidden_units_of_every_recurrent_layer(kind, wide):
    r = kind(12, 8, wide, bidirectional=wide > 1, batch_first=True)
    check(Lam(lambda s, x: s.o(s.r(x)[0]), r=r, o=nn.Linear(8 * wide, 5)), tokens(), constants=False)


def test_a_first_state_that_was_learned_goes_with_its_units():
    def forward(s, x):
        return s.b(s.a(x, s.h.expand(-1, len(x), -1).contiguous())[0])

    parts = {"a": nn.GRU(6, 8, batch_first=True), "h": nn.Parameter(torch.ones(1, 1, 8)), "b": nn.Linear(8, 3)}
    check(Lam(forward, **parts), tokens(6), constants=False)


def test_hidden_and_projected_units_of_an_lstm():
    m = Lam(lambda s, x: s.o(s.r(x)[0]), r=nn.LSTM(12, 8, proj_size=6, batch_first=True), o=nn.Linear(6, 5))
    check(m, tokens(), constants=False)


def test_weights_stored_as_in_by_out():
    def forward(s, x):
        h = torch.addmm(s.b1, x.reshape(-1, x.shape[-1]), s.w1)
        return torch.addmm(s.b2, torch.sigmoid(h), s.w2).view(*x.shape[:-1], -1)

    parts = {"w1": (12, 16), "b1": (16,), "w2": (16, 5), "b2": (5,)}
    check(Lam(forward, **{k: nn.Parameter(torch.randn(v)) for k, v in parts.items()}), tokens())


def test_multihead_attention_module():
    m = Lam(
        lambda s, x: s.o(s.att(*[torch.sigmoid(s.i(x))] * 3, need_weights=False)[0]),
        i=nn.Linear(12, 24), att=nn.MultiheadAttention(24, 4, batch_first=True), o=nn.Linear(24, 5),
    )  # fmt: skip
    check(m, tokens(), only=lambda g: "scale" not in g.flags)


# ---------------------------------------------------------------- no exact answer


def test_constant_under_zero_padding_is_reported_and_zero_is_not():
    def pair(activation):
        return nn.Sequential(conv(3, 8, bias=False), activation, conv(8, 5, 3, padding=1))

    check(pair(nn.Sigmoid()), image(), report="zero padding of 2")
    check(pair(nn.ReLU()), image(), constants=False)


def test_average_pool_that_counts_its_padding_is_reported():
    m = nn.Sequential(conv(3, 8), nn.Sigmoid(), nn.AvgPool2d(3, 1, padding=1), conv(8, 5))
    check(m, image(), report="avg_pool2d in 2")
    m[2].count_include_pad = False
    check(m, image())


@pytest.mark.parametrize(
    ("middle", "why"),
    [
        (nn.LayerNorm(16), "native_layer_norm in n"),
        (nn.Softmax(-1), "softmax in n"),
        (nn.GroupNorm(4, 16), "native_group_norm in n"),
    ],
)
def test_what_runs_over_the_cut_axis_is_reported(middle, why):
    m = Lam(lambda s, x: s.b(s.n(s.a(x.flatten(0, 1)))), a=nn.Linear(12, 16), n=middle, b=nn.Linear(16, 5))
    check(m, tokens(), report=why, only=lambda g: {"norm", "softmax"} & g.flags)


def test_weight_sharing_with_different_constants_is_reported():
    m = Lam(
        lambda s, x: s.o(s.m(torch.sigmoid(s.a(x))) * s.m(torch.cos(s.a(x)))),
        a=nn.Linear(12, 16), m=nn.Linear(16, 8), o=nn.Linear(8, 5),
    )  # fmt: skip
    check(m, tokens(), only=lambda g: g.size == 16, report="m is applied more than once, with different constants")
    same = Lam(
        lambda s, x: s.o(s.m(torch.sigmoid(s.a(x))) * s.m(torch.sigmoid(s.a(-x)))),
        a=nn.Linear(12, 16), m=nn.Linear(16, 8), o=nn.Linear(8, 5),
    )  # fmt: skip
    check(same, tokens(), only=lambda g: g.size == 16)


def test_positions_that_differ_are_reported():
    m = Lam(lambda s, x: s.o(s.a(x) + s.pos), a=nn.Linear(12, 16), o=nn.Linear(16, 5), pos=nn.Parameter(torch.randn(5, 16)))
    check(m, tokens(), report="depends on position", mask=zero_weights_)


@pytest.mark.parametrize(
    "other", [torch.tensor(0.7), torch.ones(1), torch.arange(2)[:, None, None], torch.tensor([[[True]], [[False]]])], ids=str
)
def test_a_constant_plus_what_is_given_is_none(other):
    """Whatever the operand is: a single number, too, and whole ones."""
    m = Lam(lambda s, x, y: s.b(torch.relu(s.a(x) + y)), a=nn.Linear(12, 16), b=nn.Linear(16, 5))
    check(m, tokens(), other, report="varies with the inputs, from add in the model")


def test_zeros_that_are_filled_are_no_zeros():
    """Sequences of different lengths are padded: what stands there is the constant in some places and zero in others."""

    def padded(s, x):
        rows = [h[:n] for h, n in zip(torch.sigmoid(s.a(x)), (5, 3))]
        return s.b(nn.utils.rnn.pad_sequence(rows, batch_first=True))

    check(Lam(padded, a=nn.Linear(12, 16), b=nn.Linear(16, 5)), tokens(), report="written to in place")


def test_a_gate_of_a_single_sample_varies():
    m = Lam(lambda s, x: s.b(s.a(x) * s.g(x).sigmoid()), a=nn.Linear(12, 16), g=nn.Linear(12, 1), b=nn.Linear(16, 5))
    check(m, tokens()[:1, :1], report="varies with the inputs, from mul in the model")


def test_whole_groups_of_a_group_norm():
    m = nn.Sequential(conv(3, 16, 3), nn.GroupNorm(4, 16), nn.SiLU(), conv(16, 5))
    check(m, image(), only=lambda g: not g.flags)


def test_a_sum_without_a_bias_is_reported():
    check(Lam(lambda s, x: s.a(x).cos().sum(-1), a=nn.Linear(12, 16)), tokens(), report="sum in the model, which has no bias")


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (conv(8, 5, 3, padding=1), "zero padding of b"),
        (nn.Sequential(nn.GroupNorm(2, 8), conv(8, 5)), "native_group_norm in b.0"),
        (nn.Sequential(nn.AvgPool2d(3, 1, 1), conv(8, 5)), "avg_pool2d in b.0"),
    ],
    ids=["padding", "norm", "pool"],
)
def test_consumers_that_can_take_a_constant_get_it_where_others_cannot(bad, why):
    def both(s, x):
        h = torch.sigmoid(s.a(x))
        return s.good(h), s.b(h)

    masked, small, said = split(Lam(both, a=conv(3, 8), good=conv(8, 5), b=bad), image())
    assert any(why in text for text in said.values())
    assert difference(small[0], masked[0]) < 1e-12
    assert difference(small[1], masked[1]) > 1e-3


def test_a_softmax_over_places_gives_what_their_number_says():
    parts = {"a": nn.Linear(12, 16, bias=False), "b": nn.Linear(16, 5)}
    check(
        Lam(lambda s, x: s.b(s.a(x).softmax(1)), **parts), tokens(), report="varies with the inputs, from _softmax in the model"
    )
    check(Lam(lambda s, x: s.b(s.a(x).softmax(1) * s.a(x)), **parts), tokens(), constants=False)


def test_constants_of_units_that_are_pixels_of_a_convolution_are_reported():
    parts = {"a": nn.Linear(12, 16), "c": nn.Conv2d(1, 1, (3, 1), padding=(1, 0)), "b": nn.Linear(16, 5)}
    check(Lam(lambda s, x: s.b(s.c(s.a(x)[:, None])[:, 0]), **parts), tokens(), report="lost among the pixels")
    parts["a"] = nn.Linear(12, 16, bias=False)
    check(Lam(lambda s, x: s.b(s.c(s.a(x)[:, None])[:, 0]), **parts), tokens())


def test_one_bad_group_does_not_spoil_the_others():
    m = seeded(nn.Sequential(nn.Linear(12, 16), nn.LayerNorm(16), nn.Linear(16, 10), nn.Sigmoid(), nn.Linear(10, 5)))
    x = (tokens().double(),)
    t = trace(m, x)
    good = [g for g in t.prunable if g.size == 10]
    both = choose(t, t.prunable, 0)
    mask_(m, t, both)
    alone, together = copy.deepcopy(m), copy.deepcopy(m)
    assert [g.members[0].tensor for g in fold_(together, t, both, x)] == ["0.weight"]
    assert fold_(alone, t, {g.atom: both[g.atom] for g in good}, x) == {}
    assert torch.equal(alone[4].bias, together[4].bias)
    assert not torch.equal(alone[4].bias, m[4].bias)


# ---------------------------------------------------------------- found wrong once


def test_biased_queries_and_keys_that_are_rotated_by_position():
    """A removed pair's bias is no constant after the rotation, so the masked model has none there."""
    angles = torch.arange(5.0).double()[:, None] * torch.tensor([1.0, 0.3, 0.1]).double()

    def rotate(x):
        one, two = x.chunk(2, -1)
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)

    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, 4, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        q, k = (t[..., : s.r] if s.r < 6 else t for t in (rotate(q), rotate(k)))
        return s.o(F.scaled_dot_product_attention(q, k, v, scale=0.4).transpose(1, 2).flatten(2))

    m = Lam(forward, **{name: nn.Linear(12, 24) for name in "qkv"}, o=nn.Linear(24, 5), r=6)
    check(m, tokens())
    x = (tokens().double(),)
    t = trace(seeded(m), x)
    keep = choose(t, [g for g in t.prunable if any("q" in n.tensor for n in g.members)], 0)
    masked, small, said = cut_copy(m, t, keep, x, True, zero_weights_)
    assert (difference(small, masked) < 1e-10) == (not said)  # with the biases left in, the claim is withdrawn


def test_channels_of_experts_give_nothing():
    def forward(s, x):
        y, out = x.flatten(0, 1), torch.zeros(10, 12, dtype=x.dtype)
        chosen = s.gate(y).argmax(-1)
        for i, expert in enumerate(s.experts):
            at = (chosen == i).nonzero()[:, 0]
            out.index_add_(0, at, expert(y[at]))
        return s.o(out)

    def expert():
        return nn.Sequential(nn.Linear(12, 16, bias=False), nn.SiLU(), nn.Linear(16, 12, bias=False))

    m = Lam(forward, gate=nn.Linear(12, 3), experts=nn.ModuleList(expert() for _ in range(3)), o=nn.Linear(12, 5))
    check(m, tokens(), constants=False, only=lambda g: g.size == 16, least=3)


def test_a_slice_that_is_written_to_in_place_is_not_taken_for_what_it_was():
    def forward(s, x):
        y = torch.zeros(2, 5, 16, dtype=x.dtype)
        y[:, :3] = s.a(x)[:, :3]
        return s.o(y)

    m = Lam(forward, a=nn.Linear(12, 16), o=nn.Linear(16, 5))
    m = seeded(m)
    t = trace(m, (tokens().double(),))
    if t.prunable:
        keep = choose(t, t.prunable, 0)
        masked, small, said = cut_copy(m, t, keep, (tokens().double(),), True)
        assert said or difference(small, masked) < 1e-10
