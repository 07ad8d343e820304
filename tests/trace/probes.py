"""Small networks, one for each kind of layer and wiring: `PROBES[name]()` returns a model and its inputs."""

import functools
import math

import torch
import torch.nn.functional as F
from torch import nn

PROBES = {}


def probe(*each):
    """Registers a function that builds a model and its inputs. `each` holds the arguments of its variants."""

    def register(function):
        for arguments in each or ((),):
            named = "-".join([function.__name__, *(getattr(a, "__name__", str(a)) for a in arguments)])
            PROBES[named] = functools.partial(function, *arguments)
        return function

    return register


class Lam(nn.Module):
    """A module with a function as its forward pass, so that a probe takes a few lines."""

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


def ids():
    return torch.arange(10).reshape(2, 5)


def conv(i, o, k=3, **options):
    return nn.Conv2d(i, o, k, padding=k // 2, **options)


def drawn(**shapes):
    return {name: nn.Parameter(torch.randn(shape)) for name, shape in shapes.items()}


# ---------------------------------------------------------------- wiring


@probe()
def residual():
    return Lam(
        lambda s, x: s.o(s.a(x) + s.c(F.relu(s.b(s.a(x))))),
        a=nn.Linear(12, 16), b=nn.Linear(16, 24), c=nn.Linear(24, 16), o=nn.Linear(16, 5),
    ), tokens()  # fmt: skip


@probe()
def concatenation():
    return Lam(
        lambda s, x: s.o(torch.cat([F.relu(s.a(x)), torch.tanh(s.b(x))], 1)), a=conv(3, 8), b=conv(3, 6), o=conv(14, 4)
    ), image()


@probe()
def split():
    def forward(s, x):
        a, b = s.p(x).split(s.sizes, -1)
        return s.o(a * 2) + s.q(b)

    return Lam(forward, p=nn.Linear(12, 20), sizes=[8, 12], o=nn.Linear(8, 5), q=nn.Linear(12, 5)), tokens()


@probe()
def chunk():
    def forward(s, x):
        a, b = s.p(x).chunk(2, -1)
        return s.o(F.relu(a)) + s.q(torch.tanh(b))

    return Lam(forward, p=nn.Linear(12, 20, bias=False), o=nn.Linear(10, 5), q=nn.Linear(10, 5)), tokens()


@probe()
def glu():
    return Lam(lambda s, x: s.o(F.glu(s.p(x), -1)), p=nn.Linear(12, 20), o=nn.Linear(10, 5)), tokens()


@probe()
def fused_gate_up():
    def forward(s, x):
        gate, up = s.p(x).chunk(2, -1)
        return s.o(F.silu(gate) * up)

    return Lam(forward, p=nn.Linear(12, 20), o=nn.Linear(10, 5)), tokens()


@probe()
def squeeze_excite():
    def forward(s, x):
        h = F.relu(s.a(x))
        return s.o(h * torch.sigmoid(s.up(F.relu(s.down(h.mean((2, 3), keepdim=True))))))

    return Lam(forward, a=conv(3, 16), down=conv(16, 4, 1), up=conv(4, 16, 1), o=conv(16, 5)), image()


@probe()
def module_used_twice():
    return Lam(
        lambda s, x: s.o(F.relu(s.m(F.relu(s.m(s.a(x)))))), a=nn.Linear(12, 16), m=nn.Linear(16, 16), o=nn.Linear(16, 5)
    ), tokens()


@probe()
def weight_used_twice():
    return Lam(lambda s, x: F.linear(F.relu(F.linear(x, s.w)), s.w.t()) @ s.v, **drawn(w=(16, 12), v=(12, 5))), tokens()


@probe()
def flatten():
    return nn.Sequential(
        conv(3, 8), nn.ReLU(), nn.MaxPool2d(2), conv(8, 6), nn.ReLU(), nn.Flatten(), nn.Linear(6 * 16, 5)
    ), image()


@probe()
def chain():
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 5)), tokens()


@probe()
def slice_write():
    def forward(s, x):
        h = F.relu(s.a(x))
        wide = torch.zeros(x.shape[0], x.shape[1], s.d, dtype=x.dtype)
        wide[:, 1:] = h[:, :-1]
        return s.o(wide + h)

    return Lam(forward, a=nn.Linear(12, 16), o=nn.Linear(16, 5), d=16), tokens()


# ---------------------------------------------------------------- attention


class Attention(nn.Module):
    """Attention with any number of key heads, fused or separate projections, with or without rotary embedding."""

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


@probe(*((kv, rotary, sdpa) for kv in (4, 2, 1) for rotary in (False, True) for sdpa in (True, False)))
def attention(kv, rotary, sdpa):
    return Attention(kv=kv, rotary=rotary, sdpa=sdpa), tokens()


@probe((True,), (False,))
def fused_qkv(sdpa):
    return Attention(fused=True, sdpa=sdpa), tokens()


@probe()
def heads_first():
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = s.qkv(x).view(b, n, s.h, 3 * s.d).transpose(1, 2).chunk(3, -1)
        return s.o((torch.softmax(q @ k.mT * 0.3, -1) @ v).transpose(1, 2).reshape(b, n, s.h * s.d))

    return Lam(forward, qkv=nn.Linear(12, 72), o=nn.Linear(24, 5), h=4, d=6), tokens()


@probe()
def one_key_head_behind_the_queries():
    """Query heads, one key head and one value head in one projection, selected by lists of indices."""

    def forward(s, x):
        b, n, _ = x.shape
        h = s.qkv(x).view(b, n, s.h + 2, s.d)
        q, k, v = (t.transpose(1, 2) for t in (h[..., :-2, :], h[..., [-2], :], h[..., [-1], :]))
        return s.o((torch.softmax(q @ k.mT * 0.3, -1) @ v).transpose(1, 2).reshape(b, n, s.h * s.d))

    return Lam(forward, qkv=nn.Linear(12, 36), o=nn.Linear(24, 5), h=4, d=6), tokens()


@probe((True,), (False,))
def head_size_in_the_scale(written):
    def forward(s, x):
        b, n, _ = x.shape
        q, k, v = (p(x).view(b, n, s.h, -1).transpose(1, 2) for p in (s.q, s.k, s.v))
        y = torch.softmax(q @ k.mT / math.sqrt(s.d), -1) @ v if written else F.scaled_dot_product_attention(q, k, v)
        return s.o(y.transpose(1, 2).flatten(2))

    parts = {name: nn.Linear(12, 24) for name in "qkv"}
    return Lam(forward, **parts, o=nn.Linear(24, 5), h=4, **({"d": 6} if written else {})), tokens()


@probe(("plain",), ("other_widths",), ("no_bias",), ("bias_kv",))
def multihead(kind):
    options = {"other_widths": {"kdim": 7, "vdim": 9}, "no_bias": {"bias": False}, "bias_kv": {"add_bias_kv": True}}.get(
        kind, {}
    )
    return Lam(
        lambda s, x, y: s.o(s.att(s.i(x), s.k(y), s.v(y), need_weights=False)[0]),
        i=nn.Linear(12, 24), k=nn.Linear(12, options.get("kdim", 24)), v=nn.Linear(12, options.get("vdim", 24)),
        att=nn.MultiheadAttention(24, 4, batch_first=True, **options), o=nn.Linear(24, 5),
    ), tokens(), tokens(length=3)  # fmt: skip


@probe()
def transformer_encoder():
    layer = nn.TransformerEncoderLayer(24, 4, 20, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    return Lam(lambda s, x: s.o(s.e(s.i(x))), i=nn.Linear(12, 24), e=encoder, o=nn.Linear(24, 5)), tokens()


# ---------------------------------------------------------------- convolutions

CONVS = {1: (nn.Conv1d, nn.ConvTranspose1d), 2: (nn.Conv2d, nn.ConvTranspose2d), 3: (nn.Conv3d, nn.ConvTranspose3d)}


@probe(*((rank, groups, turned) for rank in (1, 2, 3) for groups in (1, 4, 8) for turned in (False, True)))
def convolution(rank, groups, transposed):
    plain, turned = CONVS[rank]
    middle = (turned if transposed else plain)(8, 8, 3, padding=1, groups=groups)
    return nn.Sequential(plain(3, 8, 1), nn.ReLU(), middle, nn.ReLU(), plain(8, 5, 1)), torch.randn(2, 3, *[4] * rank)


@probe()
def depthwise_with_multiplier():
    return nn.Sequential(conv(3, 4), nn.ReLU(), conv(4, 12, groups=4), nn.ReLU(), conv(12, 5, 1)), image()


@probe()
def channel_shuffle_written_out():
    def forward(s, x):
        h = s.a(x)
        b, c, *hw = h.shape
        h = h.view(b, s.g, c // s.g, *hw).transpose(1, 2).reshape(b, c, *hw)
        return s.o(F.relu(s.d(h)))

    return Lam(forward, a=conv(3, 12), d=conv(12, 12, groups=12), o=conv(12, 5), g=3), image()


@probe()
def channel_shuffle():
    return nn.Sequential(conv(3, 12), nn.ChannelShuffle(3), nn.ReLU(), conv(12, 5)), image()


@probe()
def pixel_shuffle():
    return nn.Sequential(
        conv(3, 16), nn.PixelShuffle(2), nn.ReLU(), conv(4, 5), nn.PixelUnshuffle(2), conv(20, 4)
    ), image()  # fmt: skip


@probe()
def padded_shortcut():
    def forward(s, x):
        h = s.a(x)
        return s.o(F.relu(s.c(h) + F.pad(h[:, :, ::2, ::2], (0, 0, 0, 0, 2, 2))))

    return Lam(forward, a=conv(3, 8), c=conv(8, 12, stride=2), o=conv(12, 5)), image()


@probe()
def unfold_and_fold():
    def forward(s, x):
        h = F.relu(s.a(x))
        return s.o(F.fold(F.unfold(h, 2, stride=2), h.shape[-2:], 2, stride=2))

    return Lam(forward, a=conv(3, 8), o=conv(8, 5)), image()


# ---------------------------------------------------------------- normalisation

CHANNEL_NORMS = {
    "batch": lambda: nn.BatchNorm2d(8), "instance": lambda: nn.InstanceNorm2d(8, affine=True),
    "each_channel": lambda: nn.GroupNorm(8, 8), "groups": lambda: nn.GroupNorm(4, 8),
}  # fmt: skip
LAYER_NORMS = {
    "layer": lambda: nn.LayerNorm(16), "rms": lambda: nn.RMSNorm(16), "layer_over_two": lambda: nn.LayerNorm((5, 16)),
    "layer_without_weights": lambda: nn.LayerNorm(16, elementwise_affine=False),
}  # fmt: skip


@probe(*((kind,) for kind in CHANNEL_NORMS))
def channel_norm(kind):
    norm = CHANNEL_NORMS[kind]()
    if isinstance(norm, nn.BatchNorm2d):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2)
    return nn.Sequential(conv(3, 8), norm, nn.ReLU(), conv(8, 5)), image()


@probe(*((kind,) for kind in LAYER_NORMS))
def layer_norm(kind):
    return nn.Sequential(nn.Linear(12, 16), LAYER_NORMS[kind](), nn.Linear(16, 5)), tokens()


@probe()
def softmax_and_mean_over_units():
    return Lam(
        lambda s, x: s.o(torch.softmax(s.a(x), -1)) + s.b(x).mean(-1, keepdim=True),
        a=nn.Linear(12, 8), b=nn.Linear(12, 6), o=nn.Linear(8, 5),
    ), tokens()  # fmt: skip


# ---------------------------------------------------------------- tables, recurrence, bare parameters


@probe()
def tied_embedding():
    return Lam(
        lambda s, x: F.linear(F.relu(s.p(s.e(x))), s.e.weight), e=nn.Embedding(11, 12), p=nn.Linear(12, 12)
    ), ids()  # fmt: skip


@probe()
def embedding_bag():
    return nn.Sequential(nn.EmbeddingBag(11, 12), nn.Linear(12, 5)), ids()


@probe(
    *(
        (kind, layers, both, length)
        for kind in (nn.LSTM, nn.GRU, nn.RNN)
        for layers, both, length in ((1, False, 5), (2, False, 5), (1, True, 5), (2, True, 5), (2, True, 1))
    )
)
def recurrent(kind, layers, both, length):
    return Lam(
        lambda s, x: s.o(s.r(s.i(x))[0]),
        i=nn.Linear(12, 6), r=kind(6, 8, layers, bidirectional=both, batch_first=True), o=nn.Linear(16 if both else 8, 5),
    ), tokens(length=length)  # fmt: skip


@probe((1, 5), (2, 1))
def lstm_with_projection(layers, length):
    return Lam(
        lambda s, x: s.o(s.r(s.i(x))[1][0][-1]),
        i=nn.Linear(12, 6), r=nn.LSTM(6, 8, layers, proj_size=4, batch_first=True), o=nn.Linear(4, 5),
    ), tokens(length=length)  # fmt: skip


@probe(*((kind, length) for kind in (nn.LSTMCell, nn.GRUCell, nn.RNNCell) for length in (1, 3)))
def recurrent_cell(kind, length):
    def forward(s, x):
        h = None
        for i in range(x.shape[1]):
            h = s.c(s.i(x[:, i]), h)
        return s.o(h if isinstance(h, torch.Tensor) else h[0])

    return Lam(forward, i=nn.Linear(12, 6), c=kind(6, 8), o=nn.Linear(8, 5)), tokens(length=length)


@probe()
def bare_parameters():
    def forward(s, x):
        h = torch.cat([s.cls.expand(x.shape[0], -1, -1), s.i(x)], 1) + s.pos
        return s.o((h + s.gamma * s.b(F.relu(s.a(h))))[:, 0])

    bare = drawn(cls=(1, 1, 16), pos=(1, 6, 16), gamma=(16,))
    return Lam(
        forward, i=nn.Linear(12, 16), a=nn.Linear(16, 10), b=nn.Linear(10, 16), o=nn.Linear(16, 5), **bare
    ), tokens()  # fmt: skip


@probe()
def weights_stored_as_in_by_out():
    def forward(s, x):
        h = torch.addmm(s.b1, x.reshape(-1, x.shape[-1]), s.w1)
        return torch.addmm(s.b2, F.gelu(h), s.w2).view(*x.shape[:-1], -1)

    return Lam(forward, **drawn(w1=(12, 16), b1=(16,), w2=(16, 5), b2=(5,))), tokens()


@probe()
def einsum():
    def forward(s, x):
        h = torch.einsum("bnc,chd->bnhd", x, s.w)
        return torch.einsum("bnhd,hdo->bno", F.relu(h), s.v)

    return Lam(forward, **drawn(w=(12, 4, 6), v=(4, 6, 5))), tokens()


@probe()
def expert_tensors():
    def forward(s, x):
        weight = torch.softmax(s.gate(x), -1)
        h = F.silu(torch.einsum("bnc,ech->bneh", x, s.up))
        return torch.einsum("bneh,eho,bne->bno", h, s.down, weight)

    return Lam(forward, gate=nn.Linear(12, 3), **drawn(up=(3, 12, 8), down=(3, 8, 5))), tokens()


def experts(number):
    return nn.ModuleList(nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Linear(8, 5)) for _ in range(number))


@probe()
def expert_list():
    def forward(s, x):
        weight = torch.softmax(s.gate(x), -1)
        return sum(weight[..., i : i + 1] * expert(x) for i, expert in enumerate(s.experts))

    return Lam(forward, gate=nn.Linear(12, 3), experts=experts(3)), tokens()


@probe()
def experts_chosen_by_data():
    def forward(s, x):
        flat = x.reshape(-1, x.shape[-1])
        top = s.gate(flat).topk(1, -1).indices[:, 0]
        out = torch.zeros(flat.shape[0], 5, dtype=x.dtype)
        for i, expert in enumerate(s.experts):
            rows = (top == i).nonzero()[:, 0]
            out = out.index_add(0, rows, expert(flat[rows]))
        return out

    return Lam(forward, gate=nn.Linear(12, 2), experts=experts(2)), tokens()


@probe()
def bilinear():
    return Lam(
        lambda s, x: s.o(s.m(s.a(x), s.b(x))), a=nn.Linear(12, 6), b=nn.Linear(12, 8), m=nn.Bilinear(6, 8, 7), o=nn.Linear(7, 5)
    ), tokens()


@probe()
def low_rank_update():
    def forward(s, x):
        return s.o(F.linear(x, s.w + s.up @ s.down))

    return Lam(forward, **drawn(w=(16, 12), up=(16, 4), down=(4, 12)), o=nn.Linear(16, 5)), tokens()
