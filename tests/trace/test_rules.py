"""Each axis rule, by brute force: the operator on cut inputs equals the operator on zeroed inputs, cut afterwards."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from secateur.axes import HARMLESS, atoms, closed, families, keep_mask, norm, unify
from secateur.edit import plain_kernels
from secateur.ops.record import OPERATORS, Call, _found, elementwise, operator, register
from secateur.trace import trace
from secateur.trace.provenance import Journal
from secateur.trace.tracer import Tracer

A = torch.ops.aten
LONG = torch.tensor([[0, 2, 1], [3, 3, 0]])


def several(out):
    return [o for o in (out if isinstance(out, tuple | list) else [out]) if isinstance(o, torch.Tensor)]


def follow(function, inputs):
    """Returns the tracer, the axes of inputs and outputs after one call, and the outputs."""
    tracer = Tracer(Journal())
    for i, x in enumerate(inputs):
        tracer.own(f"x{i}", x)
    with torch.no_grad(), plain_kernels(), tracer:
        out = function(*inputs)
    for o in several(out):
        tracer.info(o).read()
    axes = [[closed(e) for e in tracer.axes_of(x)] for x in [*inputs, *several(out)]]
    return tracer, axes[: len(inputs)], axes[len(inputs) :], several(out)


def cut(tensor, axes, keep):
    for d, e in enumerate(axes):
        tensor = tensor.index_select(d, keep_mask(e, keep).nonzero()[:, 0])
    return tensor


def zeroed(tensor, axes, keep):
    if not tensor.is_floating_point() and not tensor.is_complex():
        return tensor
    for d, e in enumerate(axes):
        tensor = tensor.index_fill(d, (~keep_mask(e, keep)).nonzero()[:, 0], 0)
    return tensor


def free(axes):
    found = dict.fromkeys(a for one in axes for e in one for a in atoms(e))
    return [a for a in found if not a.frozen and a.flags <= HARMLESS]


def check(function, inputs, sizes):
    tracer, before, after, _ = follow(function, inputs)
    assert not tracer.record.unknown
    assert not tracer.record.errors
    usable = free(before)
    assert sorted(a.size for a in usable) == sorted(sizes)
    for seed in range(3):
        draw = torch.Generator().manual_seed(seed)
        keep = {}
        for a in usable:
            mask = torch.zeros(a.size, dtype=torch.bool)
            mask[torch.randperm(a.size, generator=draw)[: max(1, a.size // 2)]] = True
            keep[a] = mask
        with torch.no_grad(), plain_kernels():
            got = several(function(*[cut(x, e, keep) for x, e in zip(inputs, before)]))
            want = several(function(*[zeroed(x, e, keep) for x, e in zip(inputs, before)]))
        for g, w, e in zip(got, want, after):
            torch.testing.assert_close(g, cut(w, e, keep), rtol=1e-9, atol=1e-9)
    return tracer


def x(*shape, kind=torch.float64):
    made = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(len(shape)))
    return made.to(kind)


def half(t, d=-1):
    return t.shape[d] // 2


CASES = {
    # element-wise, factories
    "add": (torch.add, [x(4, 6), x(4, 6)], [4, 6]),
    "add broadcast": (torch.add, [x(4, 6), x(6)], [4, 6]),
    "mul by column": (torch.mul, [x(4, 6), x(4, 1)], [4, 6]),
    "where": (lambda a, b: torch.where(a > 0, a, b), [x(4, 6), x(4, 6)], [4, 6]),
    "gelu": (F.gelu, [x(4, 6)], [4, 6]),
    "clone in place": (lambda a: a.clone().mul_(2).relu_(), [x(4, 6)], [4, 6]),
    "zeros": (lambda a: a + torch.zeros(a.shape, dtype=a.dtype), [x(4, 6)], [4, 6]),
    "arange": (lambda a: a + torch.arange(a.shape[-1]), [x(4, 6)], [4]),
    "log_sigmoid": (F.logsigmoid, [x(4, 6)], [4, 6]),
    "prelu": (F.prelu, [x(4, 6, 2), x(6)], [4, 6, 2]),
    "renorm": (lambda a: torch.renorm(a, 2, 0, 1.0), [x(4, 6)], [4]),
    "batch_norm in training": (
        lambda a, w: A._batch_norm_with_update(a, w, w, torch.zeros_like(w), torch.ones_like(w), 0.1, 1e-5)[0],
        [x(4, 6, 3), x(6)],
        [6],
    ),
    "batch_norm in evaluation": (
        lambda a, w: A._native_batch_norm_legit_no_training(a, w, w, torch.zeros_like(w), torch.ones_like(w), 0.1, 1e-5)[0],
        [x(4, 6, 3), x(6)],
        [3, 4, 6],
    ),
    # views
    "view split": (lambda a: a.view(a.shape[0], 2 if a.shape[1] == 6 else 1, -1), [x(4, 6)], [2, 3, 4]),
    "view merge": (lambda a: a.reshape(-1, a.shape[-1]), [x(4, 6, 2)], [4, 6, 2]),
    "view misaligned": (lambda a: a.view(3, 8), [x(4, 6)], []),
    "permute": (lambda a: a.permute(2, 0, 1), [x(4, 6, 2)], [4, 6, 2]),
    "t": (lambda a: a.t(), [x(4, 6)], [4, 6]),
    "transpose": (lambda a: a.transpose(0, -1), [x(4, 6, 2)], [4, 6, 2]),
    "unsqueeze": (lambda a: a.unsqueeze(-1), [x(4, 6)], [4, 6]),
    "squeeze": (lambda a: a.squeeze(1), [x(4, 1, 6)], [4, 6]),
    "squeeze all": (lambda a: a.squeeze(), [x(4, 1, 6)], [4, 6]),
    "unsqueeze in place": (lambda a: a.clone().unsqueeze_(0).squeeze_(0), [x(4, 6)], [4, 6]),
    "expand": (lambda a: a.expand(3, -1, -1), [x(4, 6)], [4, 6]),
    "repeat": (lambda a: a.repeat(2, 3), [x(4, 6)], [4, 6]),
    "repeat_interleave": (lambda a: a.repeat_interleave(2, dim=1), [x(4, 6)], [4, 6]),
    "slice": (lambda a: a[:, half(a) :], [x(4, 6)], [3, 3, 4]),
    "slice stride": (lambda a: a[:, ::2], [x(4, 6)], [3, 4]),
    "slice odd": (lambda a: a[:, 1::2], [x(4, 6)], [3, 4]),
    "slice_scatter": (lambda a, b: torch.slice_scatter(a, b, 1, 0, b.shape[1]), [x(4, 6), x(4, 3)], [3, 3, 4]),
    "select": (lambda a: a[:, 1], [x(4, 6)], [4]),
    "select_scatter": (lambda a, b: torch.select_scatter(a, b, 1, 1), [x(4, 6), x(4)], [4]),
    "unbind": (lambda a: a.unbind(0), [x(3, 6)], [6]),
    "chunk": (lambda a: a.chunk(2, -1), [x(4, 6)], [3, 3, 4]),
    "uneven split": (lambda a: a.split(4, -1), [x(4, 6)], [4]),
    "cat": (lambda a, b: torch.cat([a, b], 1), [x(4, 6), x(4, 2)], [2, 4, 6]),
    "stack": (lambda a, b: torch.stack([a, b], 1), [x(4, 6), x(4, 6)], [4, 6]),
    "stack then sum": (lambda a, b: torch.stack([a, b], 1).sum(1), [x(4, 6), x(4, 6)], [4, 6]),
    "pad": (lambda a: F.pad(a, (1, 2)), [x(4, 6)], [4, 6]),
    "crop": (lambda a: F.pad(a, (-half(a), 0)), [x(4, 6)], [3, 3, 4]),
    "diagonal": (lambda a: a.diagonal(), [x(4, 4)], []),
    "sliding windows": (lambda a: a.as_strided((2, 4, a.shape[1]), (2 * a.shape[1], a.shape[1], 1)), [x(6, 4)], [4]),
    "unfold": (lambda a: a.unfold(1, 2, 2), [x(4, 6)], [3, 4]),
    "unfold overlapping": (lambda a: a.unfold(1, 3, 1), [x(4, 6)], [4]),
    "im2col": (lambda a: F.unfold(a, 2), [x(2, 4, 4, 4)], [2, 4]),
    "col2im": (lambda a: F.fold(a, (4, 4), 2, stride=2), [x(2, 12, 4)], [2, 3]),
    "pixel_shuffle": (lambda a: F.pixel_shuffle(a, 2), [x(2, 12, 2, 2)], [2, 2, 2, 3]),
    "pixel_unshuffle": (lambda a: F.pixel_unshuffle(a, 2), [x(2, 3, 4, 4)], [2, 2, 2, 3]),
    "channel_shuffle": (lambda a: F.channel_shuffle(a, 2 if a.shape[1] == 6 else 1), [x(2, 6, 2, 2)], [2, 2, 2, 2, 3]),
    "flip": (lambda a: a.flip(1), [x(4, 6)], [4]),
    "cumsum": (lambda a: a.cumsum(0), [x(4, 6)], [6]),
    "sort": (lambda a: a.sort(1), [x(4, 6)], [4]),
    "tril": (torch.tril, [x(2, 4, 4)], [2]),
    "complex": (lambda a: torch.view_as_real(torch.view_as_complex(a) * 2j), [x(4, 6, 2)], [4, 6]),
    "fft": (lambda a: torch.fft.rfft(a, dim=1), [x(4, 6)], [4]),
    # reductions
    "sum": (lambda a: a.sum(1), [x(4, 6)], [4, 6]),
    "sum keepdim": (lambda a: a.sum(1, keepdim=True), [x(4, 6)], [4, 6]),
    "mean": (lambda a: a.mean(1), [x(4, 6)], [4]),
    "amax": (lambda a: a.amax(1), [x(4, 6)], [4]),
    "var_mean": (lambda a: torch.var_mean(a, 1), [x(4, 6)], [4]),
    "norm": (lambda a: a.norm(dim=1), [x(4, 6)], [4]),
    "max with indices": (lambda a: a.max(1), [x(4, 6)], [4]),
    "max of two": (torch.maximum, [x(4, 6), x(4, 6)], [4, 6]),
    "argmax": (lambda a: a.argmax(1), [x(4, 6)], [4]),
    "topk": (lambda a: a.topk(2, 1), [x(4, 6)], [4]),
    "softmax": (lambda a: a.softmax(1), [x(4, 6)], [4]),
    "glu": (lambda a: F.glu(a, 1), [x(4, 6)], [3, 4]),
    # contractions
    "mm": (torch.mm, [x(4, 6), x(6, 3)], [3, 4, 6]),
    "bmm": (torch.bmm, [x(2, 4, 6), x(2, 6, 3)], [2, 3, 4, 6]),
    "addmm": (torch.addmm, [x(3), x(4, 6), x(6, 3)], [3, 4, 6]),
    "baddbmm": (torch.baddbmm, [x(2, 4, 3), x(2, 4, 6), x(2, 6, 3)], [2, 3, 4, 6]),
    "addbmm": (torch.addbmm, [x(4, 3), x(2, 4, 6), x(2, 6, 3)], [2, 3, 4, 6]),
    "linear": (F.linear, [x(2, 4, 6), x(3, 6), x(3)], [2, 3, 4, 6]),
    "mv": (torch.mv, [x(4, 6), x(6)], [4, 6]),
    "addmv": (torch.addmv, [x(4), x(4, 6), x(6)], [4, 6]),
    "dot": (torch.dot, [x(6), x(6)], [6]),
    "outer": (torch.outer, [x(4), x(6)], [4, 6]),
    "cdist": (lambda a, b: A._cdist_forward(a, b, 2.0, None), [x(2, 4, 6), x(2, 3, 6)], [2, 3, 4, 6]),
    "bilinear": (F.bilinear, [x(2, 4), x(2, 6), x(3, 4, 6), x(3)], [2, 3, 4, 6]),
    "einsum": (lambda a, b: torch.einsum("bij,bjk->bik", a, b), [x(2, 4, 6), x(2, 6, 3)], [2, 3, 4, 6]),
    "conv1d": (lambda a, w, b: F.conv1d(a, w, b, padding=1), [x(2, 4, 5), x(6, 4, 3), x(6)], [2, 4, 6]),
    "conv over channels, one at a time": (F.conv1d, [x(2, 4, 5), x(6, 4, 1)], [2, 4, 5, 6]),
    "conv2d stride": (lambda a, w: F.conv2d(a, w, stride=2), [x(2, 4, 5, 5), x(6, 4, 3, 3)], [2, 4, 6]),
    "conv unbatched": (F.conv2d, [x(4, 5, 5), x(6, 4, 3, 3)], [4, 6]),
    "grouped conv": (lambda a, w: F.conv2d(a, w, groups=len(a[0]) // len(w[0])), [x(2, 8, 4, 4), x(12, 2, 3, 3)], [2, 2, 3, 4]),
    "transposed conv": (F.conv_transpose2d, [x(2, 4, 3, 3), x(4, 6, 3, 3), x(6)], [2, 4, 6]),
    "conv3d": (F.conv3d, [x(2, 4, 3, 3, 3), x(6, 4, 2, 2, 2)], [2, 4, 6]),
    "max_pool2d": (lambda a: F.max_pool2d(a, 2), [x(2, 4, 4, 4)], [2, 4]),
    "avg_pool1d": (lambda a: F.avg_pool1d(a, 2), [x(2, 4, 4)], [2, 4]),
    "adaptive_avg_pool3d": (lambda a: F.adaptive_avg_pool3d(a, 1), [x(2, 4, 3, 3, 3)], [2, 4]),
    "upsample": (lambda a: F.interpolate(a, scale_factor=2, mode="bilinear"), [x(2, 4, 3, 3)], [2, 4]),
    "reflection pad": (lambda a: F.pad(a, (1, 1), mode="reflect"), [x(2, 4, 3)], [2, 4]),
    "grid_sample": (lambda a, g: F.grid_sample(a, g, align_corners=False), [x(2, 4, 3, 3), x(2, 3, 3, 2)], [2, 3, 3, 4]),
    "max_unpool": (lambda a: F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2), [x(2, 4, 4, 4)], [2, 4]),
    # normalisations
    "layer_norm": (lambda a, w, b: F.layer_norm(a, a.shape[-1:], w, b), [x(4, 6), x(6), x(6)], [4]),
    "rms_norm": (lambda a, w: F.rms_norm(a, a.shape[-1:], w), [x(4, 6), x(6)], [4]),
    "batch_norm": (lambda a, m, v, w, b: F.batch_norm(a, m, v**2 + 1, w, b), [x(4, 6, 2), x(6), x(6), x(6), x(6)], [2, 4, 6]),
    "batch statistics": (lambda a: F.batch_norm(a, None, None, training=True), [x(4, 6, 2)], [6]),
    "group_norm": (lambda a, w: F.group_norm(a, a.shape[1] // 2, w), [x(4, 6, 2), x(6)], [3, 4]),
    "instance_norm": (F.instance_norm, [x(4, 6, 3)], [4, 6]),
    "weight_norm": (lambda v, g: torch._weight_norm(v, g, 0), [x(4, 6), x(4, 1)], [4]),
    # attention
    "sdpa": (
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, scale=0.3),
        [x(2, 4, 3, 6), x(2, 4, 5, 6), x(2, 4, 5, 2)], [2, 2, 3, 4, 6],
    ),
    "sdpa fused": (
        lambda q, k, v: A._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=0.3)[0],
        [x(2, 4, 3, 6), x(2, 4, 5, 6), x(2, 4, 5, 6)], [2, 3, 4, 6, 6],
    ),
    "sdpa with mask": (
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m, scale=0.3),
        [x(2, 4, 3, 6), x(2, 4, 5, 6), x(2, 4, 5, 2), x(1, 1, 3, 5)], [2, 2, 3, 4, 6],
    ),
    # lookups
    "embedding": (lambda w: F.embedding(LONG, w), [x(4, 6)], [6]),
    "embedding_bag": (lambda w: F.embedding_bag(LONG, w, mode="sum"), [x(4, 6)], [6]),
    "index_select": (lambda a: a.index_select(1, LONG[0]), [x(2, 6)], [2]),
    "index": (lambda a: a[:, LONG[0]], [x(2, 6, 3)], [2, 3]),
    "index apart": (lambda a: a[LONG[0] % 2, :, LONG[0]], [x(2, 6, 3)], [6]),
    "index apart and not first": (lambda a: a[:, LONG[0] % 2, :, LONG[0]], [x(4, 2, 6, 3)], [4, 6]),
    "index boolean": (lambda a: a[torch.tensor([True, False, True])], [x(3, 6)], [6]),
    "index_put": (lambda a, v: a.index_put((LONG[0],), v), [x(4, 6), x(3, 6)], [6]),
    "gather": (lambda a: a.gather(1, LONG[:, :2]), [x(2, 6)], []),
    "scatter": (lambda a, s: a.scatter(1, LONG, s), [x(2, 6), x(2, 3)], []),
    "index_add": (lambda a, s: a.index_add(0, LONG[0], s), [x(4, 6), x(3, 6)], [6]),
    "masked_select": (lambda a: a.masked_select(a > 0).sum(), [x(2, 6)], []),
    "isin": (lambda a: torch.isin(a, torch.tensor([1.0])), [x(2, 6)], [2, 6]),
    "bucketize": (lambda a: torch.bucketize(a, torch.tensor([0.0, 1.0], dtype=a.dtype)), [x(2, 6)], [2, 6]),
    "read": (lambda a: a * a.mean(0)[0].item(), [x(2, 6)], []),
    "assert": (lambda a: (torch._assert_async(torch.tensor(True)), a * 2)[1], [x(2, 6)], [2, 6]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rule_agrees_with_brute_force(name):
    check(*CASES[name])


def test_every_rule_has_a_case():
    used = {elementwise}
    for function, inputs, _ in CASES.values():
        used |= {OPERATORS[s.name].axes for s in follow(function, inputs)[0].record.steps if s.name in OPERATORS}
    untested = {o.axes.__name__ for n, o in OPERATORS.items() if o.axes and n.startswith("aten::")} - {f.__name__ for f in used}
    decomposed = {"one_hot", "linear", "depthwise_convolution"}  # on the CPU
    assert untested == decomposed | {"grouped_mm"}


def test_grouped_mm_rule():
    def run(a, b):
        return torch._grouped_mm(a, b, torch.tensor([2, 5, 8], dtype=torch.int32))

    _, before, after, _ = follow(run, [x(8, 16, kind=torch.bfloat16), x(3, 16, 32, kind=torch.bfloat16)])
    assert before[0][1] is before[1][1]
    assert after[0][1] is before[1][2]
    assert "addressed by value" in before[1][0].frozen


def test_linear_rule_for_backends_that_do_not_decompose_it():
    tracer, inputs = Tracer(Journal()), [x(2, 4), x(3, 4), x(3)]
    for i, tensor in enumerate(inputs):
        tracer.own(f"x{i}", tensor)
    out = OPERATORS["aten::linear"].axes(Call(tracer, A.linear.default, inputs, {}, F.linear(*inputs)))
    data, weight, bias = (tracer.axes_of(tensor) for tensor in inputs)
    assert norm(data[1]) is norm(weight[1])
    assert norm(out[1]) is norm(weight[0]) is norm(bias[0])


@pytest.mark.parametrize(
    ("func", "rest"),
    [
        (A.native_batch_norm.default, (None, None, None, None, False, 0.1, 1e-5)),
        (A._batch_norm_no_update.default, (None, None, None, None, 0.1, 1e-5)),
    ],
    ids=str,
)
def test_batch_norm_without_running_statistics_uses_the_batch(func, rest):
    """The rule alone: on some devices torch reads memory that is not there when it runs this call."""
    tracer, given = Tracer(Journal()), x(4, 6, 2)
    tracer.own("x", given)
    out = A.native_batch_norm(given, None, None, None, None, True, 0.1, 1e-5)
    OPERATORS[func.name().partition(".")[0]].axes(Call(tracer, func, (given, *rest), {}, out))
    assert [sorted(a.flags) for e in tracer.axes_of(given) for a in atoms(closed(e))] == [["norm"], [], ["norm"]]


def test_registered_names_exist_in_torch():
    gone = [n for n in OPERATORS if n.startswith("aten::") and not hasattr(A, n.removeprefix("aten::"))]
    assert not gone


def test_families_couple_when_their_key_disappears():
    _, (axes, *_), (out,), _ = follow(lambda a: a.view(4, 2, 3).sum(1), [x(4, 6)])
    assert not families(out[1])
    assert [a.size for a in atoms(axes[1])] == [2, 3]


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.a, self.b, self.middle = nn.Linear(6, 8), nn.Linear(8, 3), middle

    def forward(self, x):
        return self.b(self.middle(self.a(x)))


@pytest.fixture
def library():
    made = torch.library.Library("graphtest", "DEF")
    made.define("gate(Tensor x) -> Tensor")
    made.impl("gate", lambda x: x * 2, "CompositeExplicitAutograd")
    yield torch.ops.graphtest.gate
    OPERATORS.pop("graphtest::gate", None)
    _found.clear()
    made._destroy()


def test_operator_without_a_rule_freezes_its_axes_and_is_named(library):
    t = trace(Net(library), torch.randn(2, 6))
    assert t.unknown == {"graphtest::gate": 1}
    assert not t.prunable
    call = "secateur.ops.register('graphtest::gate', values='elementwise')"
    assert t.skipped["a.weight[0]"] == f"graphtest::gate has no record; if it is element-wise, call {call}"


def test_users_mark_an_operator_elementwise_in_one_line(library):
    register("graphtest::gate", values="elementwise")
    assert [g.size for g in trace(Net(library), torch.randn(2, 6)).prunable] == [8]


def test_users_register_a_rule_in_a_few_lines(library):
    @operator("graphtest::gate")
    def gate(c):
        axes = c.axes(c.x)
        unify(axes[0], axes[0])
        return [norm(e) for e in axes]

    assert [g.size for g in trace(Net(library), torch.randn(2, 6)).prunable] == [8]


def test_wrong_rule_is_reported_and_not_used(library):
    @operator("graphtest::gate")
    def gate(c):
        return c.axes(c.x)[::-1]

    t = trace(Net(library), torch.randn(2, 6))
    assert not t.prunable
    assert "the rule gives sizes [8, 2], the operator [2, 8]" in t.record.errors[0]
