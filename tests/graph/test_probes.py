"""A cut is exact on every kind of layer and wiring: random units removed, against the same units zeroed, in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from cutting import check, group_of, sizes
from torch import nn

torch.manual_seed(0)


class Lam(nn.Module):
    """A module from a function, so that a probe fits on a few lines."""

    def __init__(self, forward, **parts):
        super().__init__()
        self.run = forward
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *x):
        return self.run(self, *x)


def tokens(width=12, length=5):
    return torch.randn(2, length, width, generator=torch.Generator().manual_seed(1))


def image(channels=3, size=8):
    return torch.randn(2, channels, size, size, generator=torch.Generator().manual_seed(1))


def conv(i, o, k=3, **options):
    return nn.Conv2d(i, o, k, padding=k // 2, **options)


def mean(x):
    return x.mean((-2, -1))


# ---------------------------------------------------------------- wiring


def test_residual_couples_its_branches():
    m = Lam(
        lambda s, x: s.o(s.a(x) + s.c(F.relu(s.b(s.a(x))))),
        a=nn.Linear(12, 16), b=nn.Linear(16, 24), c=nn.Linear(24, 16), o=nn.Linear(16, 5),
    )  # fmt: skip
    t = check(m, tokens())
    assert sizes(t) == [16, 24]
    roles = {m.tensor: m.role for m in group_of(t, "a.weight", 0)[0].members if "weight" in m.tensor}
    assert roles == {"a.weight": "produce", "b.weight": "consume", "c.weight": "produce", "o.weight": "consume"}


def test_concatenation_keeps_the_branches_apart():
    m = Lam(lambda s, x: s.o(torch.cat([F.relu(s.a(x)), torch.tanh(s.b(x))], 1)), a=conv(3, 8), b=conv(3, 6), o=conv(14, 4))
    t = check(m, image())
    assert sizes(t) == [6, 8]


def test_split_with_sizes_from_an_attribute():
    def forward(s, x):
        a, b = s.p(x).split(s.sizes, -1)
        return s.o(a * 2) + s.q(b)

    t = check(Lam(forward, p=nn.Linear(12, 20), sizes=[8, 12], o=nn.Linear(8, 5), q=nn.Linear(12, 5)), tokens())
    assert sizes(t) == [8, 12]


def test_chunk_ties_counts_and_not_units():
    def forward(s, x):
        a, b = s.p(x).chunk(2, -1)
        return s.o(F.relu(a)) + s.q(torch.tanh(b))

    t = check(Lam(forward, p=nn.Linear(12, 20, bias=False), o=nn.Linear(10, 5), q=nn.Linear(10, 5)), tokens())
    assert sizes(t) == [10, 10]
    assert len(t.constraints) == 1


def test_glu_and_fused_gate_up():
    t = check(Lam(lambda s, x: s.o(F.glu(s.p(x), -1)), p=nn.Linear(12, 20), o=nn.Linear(10, 5)), tokens())
    assert sizes(t) == [10]

    def swiglu(s, x):
        gate, up = s.p(x).chunk(2, -1)
        return s.o(F.silu(gate) * up)

    assert sizes(check(Lam(swiglu, p=nn.Linear(12, 20), o=nn.Linear(10, 5)), tokens())) == [10]


def test_squeeze_excite():
    def forward(s, x):
        h = F.relu(s.a(x))
        return s.o(h * torch.sigmoid(s.up(F.relu(s.down(h.mean((2, 3), keepdim=True))))))

    t = check(Lam(forward, a=conv(3, 16), down=conv(16, 4, 1), up=conv(4, 16, 1), o=conv(16, 5)), image())
    assert sizes(t) == [4, 16]


def test_weight_sharing_module_twice_and_transposed_weight():
    m = Lam(lambda s, x: s.o(F.relu(s.m(F.relu(s.m(s.a(x)))))), a=nn.Linear(12, 16), m=nn.Linear(16, 16), o=nn.Linear(16, 5))
    check(m, tokens())

    def tied(s, x):
        h = F.relu(F.linear(x, s.w))
        return F.linear(h, s.w.t()) @ s.v

    t = check(Lam(tied, w=nn.Parameter(torch.randn(16, 12)), v=nn.Parameter(torch.randn(12, 5))), tokens())
    assert sizes(t) == [16]
    assert {m.role for m in group_of(t, "w", 0)[0].members} == {"produce", "consume"}


def test_flatten_into_a_classifier():
    m = nn.Sequential(conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5))
    assert sizes(check(m, image())) == [6, 8]


def test_outputs_and_inputs_keep_their_shape():
    t = check(nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), tokens())
    assert t.skipped["0.weight[1]"] == "given by the inputs"
    assert t.skipped["2.weight[0]"] == t.skipped["2.bias[0]"] == "the model returns it"


def test_in_place_slice_write_and_buffer_made_from_an_attribute():
    def forward(s, x):
        h = F.relu(s.a(x))
        wide = torch.zeros(x.shape[0], x.shape[1], s.d, dtype=x.dtype)
        wide[:, 1:] = h[:, :-1]
        return s.o(wide + h)

    assert sizes(check(Lam(forward, a=nn.Linear(12, 16), o=nn.Linear(16, 5), d=16), tokens())) == [16]


# ---------------------------------------------------------------- attention


class Attention(nn.Module):
    """Every head layout, fused or not, rotary or not."""

    def __init__(self, kv=4, heads=4, dim=6, fused=False, rotary=False, sdpa=True):
        super().__init__()
        self.heads, self.kv, self.dim, self.fused, self.rotary, self.sdpa = heads, kv, dim, fused, rotary, sdpa
        if fused:
            self.qkv = nn.Linear(12, 3 * heads * dim)
        else:
            self.q, self.k, self.v = nn.Linear(12, heads * dim), nn.Linear(12, kv * dim), nn.Linear(12, kv * dim)
        self.o = nn.Linear(heads * dim, 5)
        self.scale = dim**-0.5
        self.register_buffer("freq", torch.rand(dim // 2))

    def turn(self, x):
        angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] * self.freq[None]
        cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat([-b, a], -1) * sin

    def forward(self, x):
        b, n, _ = x.shape
        if self.fused:
            q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, self.dim).permute(2, 0, 3, 1, 4)
        else:
            q = self.q(x).view(b, n, self.heads, self.dim).transpose(1, 2)
            k, v = (p(x).view(b, n, self.kv, self.dim).transpose(1, 2) for p in (self.k, self.v))
        if self.rotary:
            q, k = self.turn(q), self.turn(k)
        if self.sdpa:
            y = F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=self.kv != self.heads)
        else:
            times = q.shape[1] // k.shape[1]
            k, v = (t[:, :, None].expand(b, t.shape[1], times, n, t.shape[3]).reshape(b, -1, n, t.shape[3]) for t in (k, v))
            y = torch.softmax(q @ k.transpose(-1, -2) * self.scale, -1) @ v
        return self.o(y.transpose(1, 2).reshape(b, n, -1))


@pytest.mark.parametrize("sdpa", [True, False], ids=["sdpa", "eager"])
@pytest.mark.parametrize("rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("kv", [4, 2, 1], ids=["mha", "gqa", "mqa"])
def test_attention_loses_heads_kv_groups_and_head_dims(kv, rotary, sdpa):
    t = check(Attention(kv=kv, rotary=rotary, sdpa=sdpa), tokens())
    heads, dims = group_of(t, "v.weight", 0) if kv > 1 else (None, group_of(t, "v.weight", 0)[0])
    assert dims.size == 6
    if heads:
        assert heads.size == kv
        assert {m.tensor for m in heads.members} >= {"q.weight", "k.weight", "v.weight", "o.weight"}
    if kv < 4:  # query heads of each kv head
        assert 4 // kv in sizes(t)
    pairs = group_of(t, "q.weight", 0)[-1]
    assert pairs.size == (3 if rotary else 6)
    assert ("freq" in {m.tensor for m in pairs.members}) == rotary


@pytest.mark.parametrize("sdpa", [True, False])
def test_fused_qkv_shares_heads_and_only_counts_of_value_dims(sdpa):
    t = check(Attention(fused=True, sdpa=sdpa), tokens())
    assert sizes(t) == [4, 6, 6]
    qk, v = (g for g in t.prunable if g.size == 6)
    assert {m.tensor for m in v.members} == {"qkv.weight", "qkv.bias", "o.weight"}
    assert {m.tensor for m in qk.members} == {"qkv.weight", "qkv.bias"}
    assert any(set(c.variables) == {qk.atom, v.atom} for c in t.constraints)


def test_heads_first_fused_layout():
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, s.h, 3 * s.d).transpose(1, 2).chunk(3, -1)
        return s.o((torch.softmax(q @ k.mT * 0.3, -1) @ v).transpose(1, 2).reshape(b, n, s.h * s.d))

    t = check(Lam(forward, qkv=nn.Linear(12, 72), o=nn.Linear(24, 5), h=4, d=6), tokens())
    assert sizes(t) == [4, 6, 6]


def test_size_in_a_formula_is_recorded_and_rescaling_makes_the_cut_exact():
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, s.h, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        return s.o((torch.softmax(q @ k.mT / math.sqrt(s.d), -1) @ v).transpose(1, 2).flatten(2))

    t = check(
        Lam(forward, q=nn.Linear(12, 24), k=nn.Linear(12, 24), v=nn.Linear(12, 24), o=nn.Linear(24, 5), h=4, d=6), tokens()
    )
    assert [u.how for u in t.uses] == ["float"]

    def fused(s, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, s.h, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        return s.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))

    t = check(Lam(fused, q=nn.Linear(12, 24), k=nn.Linear(12, 24), v=nn.Linear(12, 24), o=nn.Linear(24, 5), h=4), tokens())
    flagged = [g for g in t.groups if "scale" in g.flags]
    assert [{m.tensor for m in g.members} for g in flagged] == [{"q.weight", "q.bias", "k.weight", "k.bias"}]
    assert {u.how for u in t.uses} == {"scaled_dot_product_attention(scale=None)"}


@pytest.mark.parametrize("options", [{}, {"kdim": 7, "vdim": 9}, {"bias": False}, {"add_bias_kv": True}])
def test_multihead_attention_module(options):
    m = Lam(
        lambda s, x, y: s.o(s.att(s.i(x), s.k(y), s.v(y), need_weights=False)[0]),
        i=nn.Linear(12, 24), k=nn.Linear(12, options.get("kdim", 24)), v=nn.Linear(12, options.get("vdim", 24)),
        att=nn.MultiheadAttention(24, 4, batch_first=True, **options), o=nn.Linear(24, 5),
    )  # fmt: skip
    t = check(m, tokens(), tokens(length=3))
    assert any("att.out_proj.weight" in {m.tensor for m in g.members} for g in t.prunable)


def test_transformer_encoder_across_its_norms():
    layer = nn.TransformerEncoderLayer(24, 4, 20, batch_first=True)
    m = Lam(lambda s, x: s.o(s.e(s.i(x))), i=nn.Linear(12, 24), e=nn.TransformerEncoder(layer, 2), o=nn.Linear(24, 5))
    t = check(m, tokens(), across=True)
    assert sizes(t).count(20) == 2
    assert [g.size for g in t.prunable if "norm" in g.flags] == [24]


# ---------------------------------------------------------------- convolutions

CONVS = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "transposed"])
@pytest.mark.parametrize("groups", [1, 4, 8], ids=["dense", "grouped", "depthwise"])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_convolution(rank, groups, transposed):
    plain, turned = CONVS[rank]
    middle = (turned if transposed else plain)(8, 8, 3, padding=1, groups=groups)
    m = nn.Sequential(plain(3, 8, 1), nn.ReLU(), middle, nn.ReLU(), plain(8, 5, 1))
    t = check(m, torch.randn(2, 3, *[4] * rank))
    assert sizes(t) == ([8, 8] if groups == 1 else [2, 2, 4] if groups == 4 else [8])
    if groups == 1:
        roles = {m.role: m.dim for g in t.prunable for m in g.members if m.tensor == "2.weight"}
        assert roles == ({"produce": 1, "consume": 0} if transposed else {"produce": 0, "consume": 1})


def test_depthwise_with_multiplier():
    m = nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 12, groups=4), nn.ReLU(), conv(12, 5, 1))
    assert sizes(check(m, image())) == [3, 4]


def test_channel_shuffle_written_out_and_built_in():
    def forward(s, x):
        h = s.a(x)
        b, c, *hw = h.shape
        h = h.view(b, s.g, c // s.g, *hw).transpose(1, 2).reshape(b, c, *hw)
        return s.o(F.relu(s.d(h)))

    t = check(Lam(forward, a=conv(3, 12), d=conv(12, 12, groups=12), o=conv(12, 5), g=3), image())
    assert sizes(t) == [3, 4]
    m = nn.Sequential(conv(3, 12), nn.ChannelShuffle(3), nn.ReLU(), conv(12, 5))
    assert sizes(check(m, image())) == [3, 4]


def test_pixel_shuffle_and_unshuffle():
    m = nn.Sequential(conv(3, 16), nn.PixelShuffle(2), nn.ReLU(), conv(4, 5), nn.PixelUnshuffle(2), conv(20, 4))
    assert sizes(check(m, image())) == [4, 5]


def test_padded_shortcut():
    def forward(s, x):
        h = s.a(x)
        return s.o(F.relu(s.c(h) + F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))))

    t = check(Lam(forward, a=conv(3, 8), c=conv(8, 12, stride=2), o=conv(12, 5)), image())
    assert 8 in sizes(t)


def test_unfold_and_fold():
    def forward(s, x):
        h = F.relu(s.a(x))
        return s.o(F.fold(F.unfold(h, 2, stride=2), h.shape[-2:], 2, stride=2))

    assert sizes(check(Lam(forward, a=conv(3, 8), o=conv(8, 5)), image())) == [8]


# ---------------------------------------------------------------- normalisation


@pytest.mark.parametrize(
    ("norm", "exact"),
    [
        (nn.BatchNorm2d(8), True),
        (nn.InstanceNorm2d(8, affine=True), True),
        (nn.GroupNorm(8, 8), True),
        (nn.GroupNorm(4, 8), False),
    ],
)
def test_channel_norms(norm, exact):
    if isinstance(norm, nn.BatchNorm2d):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    t = check(nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5)), image(), across=True)
    assert all(g.exact for g in t.prunable) or not exact
    if isinstance(norm, nn.BatchNorm2d):
        assert {(m.tensor, m.role) for m in t.prunable[0].members if m.tensor.startswith("1.")} == {
            ("1.weight", "elementwise"), ("1.bias", "elementwise"), ("1.running_mean", "buffer"), ("1.running_var", "buffer"),
        }  # fmt: skip


@pytest.mark.parametrize(
    "norm", [nn.LayerNorm(16), nn.RMSNorm(16), nn.LayerNorm((5, 16)), nn.LayerNorm(16, elementwise_affine=False)]
)
def test_layer_norms_are_flagged_and_right_on_the_kept_units(norm):
    m = nn.Sequential(nn.Linear(12, 16), norm, nn.Linear(16, 5))
    t = check(m, tokens(), across=True)
    assert [g.flags for g in t.prunable] == [{"mean" if isinstance(norm, nn.RMSNorm) else "norm"}]
    assert not t.prunable[0].exact


def test_softmax_and_mean_over_the_cut_axis_are_flagged():
    m = Lam(
        lambda s, x: s.o(torch.softmax(s.a(x), -1)) + s.b(x).mean(-1, keepdim=True),
        a=nn.Linear(12, 8),
        b=nn.Linear(12, 6),
        o=nn.Linear(8, 5),
    )
    t = check(m, tokens(), across=True)
    assert {g.size: set(g.flags) for g in t.prunable} == {8: {"softmax"}, 6: {"mean"}}


# ---------------------------------------------------------------- tables, recurrence, bare parameters


def test_tied_embedding():
    def forward(s, x):
        return F.linear(F.relu(s.p(s.e(x))), s.e.weight)

    t = check(Lam(forward, e=nn.Embedding(11, 12), p=nn.Linear(12, 12)), torch.arange(10).reshape(2, 5))
    (rows,) = group_of(t, "e.weight", 0)
    assert "addressed by value" in rows.frozen
    assert {m.role for g in group_of(t, "e.weight", 1) for m in g.members if m.tensor == "e.weight"} == {"produce", "consume"}


def test_embedding_bag():
    m = nn.Sequential(nn.EmbeddingBag(11, 12), nn.Linear(12, 5))
    assert sizes(check(m, torch.arange(10).reshape(2, 5), across=True)) == [12]


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, False), (1, True), (2, True)])
def test_recurrent_layers(kind, layers, both):
    width = 8 * (2 if both else 1)
    m = Lam(
        lambda s, x: s.o(s.r(s.i(x))[0]),
        i=nn.Linear(12, 6), r=kind(6, 8, layers, bidirectional=both, batch_first=True), o=nn.Linear(width, 5),
    )  # fmt: skip
    t = check(m, tokens())
    assert {6, 8} <= set(sizes(t))


def test_lstm_with_projection_and_last_state():
    m = Lam(
        lambda s, x: s.o(s.r(s.i(x))[1][0][-1]),
        i=nn.Linear(12, 6),
        r=nn.LSTM(6, 8, proj_size=4, batch_first=True),
        o=nn.Linear(4, 5),
    )
    assert sizes(check(m, tokens())) == [4, 6, 8]


def test_bare_parameters_class_token_positions_layer_scale():
    def forward(s, x):
        h = torch.cat([s.cls.expand(x.shape[0], -1, -1), s.i(x)], 1) + s.pos
        return s.o((h + s.gamma * s.b(F.relu(s.a(h))))[:, 0])

    m = Lam(
        forward, i=nn.Linear(12, 16), a=nn.Linear(16, 10), b=nn.Linear(10, 16), o=nn.Linear(16, 5),
        cls=nn.Parameter(torch.randn(1, 1, 16)), pos=nn.Parameter(torch.randn(1, 6, 16)), gamma=nn.Parameter(torch.randn(16)),
    )  # fmt: skip
    assert sizes(check(m, tokens())) == [10, 16]


def test_weights_stored_as_in_by_out():
    def forward(s, x):
        h = torch.addmm(s.b1, x.reshape(-1, x.shape[-1]), s.w1)
        return torch.addmm(s.b2, F.gelu(h), s.w2).view(*x.shape[:-1], -1)

    parts = {"w1": (12, 16), "b1": (16,), "w2": (16, 5), "b2": (5,)}
    t = check(Lam(forward, **{k: nn.Parameter(torch.randn(v)) for k, v in parts.items()}), tokens())
    assert {(m.tensor, m.dim, m.role) for m in t.prunable[0].members} == {
        ("w1", 1, "produce"),
        ("b1", 0, "elementwise"),
        ("w2", 0, "consume"),
    }


def test_einsum_with_parameters():
    def forward(s, x):
        h = torch.einsum("bnc,chd->bnhd", x, s.w)
        return torch.einsum("bnhd,hdo->bno", F.relu(h), s.v)

    t = check(Lam(forward, w=nn.Parameter(torch.randn(12, 4, 6)), v=nn.Parameter(torch.randn(4, 6, 5))), tokens())
    assert sizes(t) == [4, 6]
    assert {m.role for m in group_of(t, "w", 1)[0].members if m.tensor == "w"} == {"produce"}


def test_experts_as_three_dimensional_tensors_and_as_a_list():
    def batched(s, x):
        weight = torch.softmax(s.gate(x), -1)
        h = F.silu(torch.einsum("bnc,ech->bneh", x, s.up))
        return torch.einsum("bneh,eho,bne->bno", h, s.down, weight)

    t = check(
        Lam(batched, gate=nn.Linear(12, 3), up=nn.Parameter(torch.randn(3, 12, 8)), down=nn.Parameter(torch.randn(3, 8, 5))),
        tokens(),
    )
    assert 8 in sizes(t)

    def listed(s, x):
        weight = torch.softmax(s.gate(x), -1)
        return sum(weight[..., i : i + 1] * expert(x) for i, expert in enumerate(s.experts))

    experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)) for _ in range(3))
    assert sizes(check(Lam(listed, gate=nn.Linear(12, 3), experts=experts), tokens())) == [8, 8, 8]


def test_experts_chosen_by_data():
    def forward(s, x):
        flat = x.reshape(-1, x.shape[-1])
        top = s.gate(flat).topk(1, -1).indices[:, 0]
        out = torch.zeros(flat.shape[0], 5, dtype=x.dtype)
        for i, expert in enumerate(s.experts):
            rows = (top == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]))
        return out

    experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)) for _ in range(2))
    t = check(Lam(forward, gate=nn.Linear(12, 2), experts=experts), tokens())
    assert sizes(t) == [8, 8]
    assert "addressed by value" in t.skipped["gate.weight[0]"]
    assert not t.record.errors


def test_bilinear():
    m = Lam(
        lambda s, x: s.o(s.m(s.a(x), s.b(x))), a=nn.Linear(12, 6), b=nn.Linear(12, 8), m=nn.Bilinear(6, 8, 7), o=nn.Linear(7, 5)
    )
    assert sizes(check(m, tokens())) == [6, 7, 8]


def test_low_rank_weights_multiplied():
    def forward(s, x):
        return s.o(F.linear(x, s.w + s.up @ s.down))

    parts = {"w": (16, 12), "up": (16, 4), "down": (4, 12)}
    t = check(Lam(forward, **{k: nn.Parameter(torch.randn(v)) for k, v in parts.items()}, o=nn.Linear(16, 5)), tokens())
    assert sizes(t) == [4, 16]
    assert {(m.tensor, m.role) for m in group_of(t, "up", 1)[0].members} == {("up", "consume"), ("down", "produce")}
