"""Operators that compute: reductions, contractions, convolutions, pooling, normalisations and attention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..axes import KERNEL, ONE, Expr, Prod, closed, flag, freeze, fresh, norm, reshape, take, unify
from .record import (
    Attention,
    Axes,
    Call,
    Contraction,
    Convolution,
    broadcast,
    elementwise,
    freeze_all,
    frozen_like,
    operator,
    register,
)

SPATIAL = "a spatial axis"


def _reduced_dims(c: Call, rank: int) -> set[int]:
    dims = c.get("dim")
    if isinstance(dims, int):
        dims = [dims]
    return {d % rank for d in dims} if dims and rank else set(range(rank))


def _reduce(c: Call, x: Axes, dims: set[int]) -> Axes | list[Axes]:
    kept = bool(c.get("keepdim"))
    return c.each([ONE if i in dims else e for i, e in enumerate(x) if kept or i not in dims])


def reduce(c: Call) -> Axes | list[Axes]:
    if isinstance(c.args.get("other"), Tensor):  # max(a, b)
        return elementwise(c)
    x = c.axes(c.self)
    dims = _reduced_dims(c, len(x))
    order = c.get("ord", "p")
    smallest = isinstance(order, int | float) and order < 0  # such a norm is decided by the smallest entries: by zeros
    for d in dims:
        flag(x[d], "norm" if smallest else c.operator.over)
    return _reduce(c, x, dims)


for _name in ("sum", "nansum", "count_nonzero", "prod", "norm", "linalg_vector_norm"):
    register(_name, axes=reduce, values="computes", over=_name, zero=True, grows=True)
for _name in ("any", "all", "mean", "nanmean", "var", "std", "var_mean", "std_mean", "amax", "amin", "aminmax"):
    register(_name, axes=reduce, values="computes", over=_name, zero=True)
for _name in ("max", "min"):
    register(_name, axes=reduce, values="computes", over=_name, zero=True, positions=(1,))
register("logsumexp", axes=reduce, values="computes", over="logsumexp", grows=True)


@operator("argmax argmin", values="computes", positions=(0,))
@operator("median nanmedian mode kthvalue", values="computes", zero=True, positions=(1,), contiguous=True)
def arg_reduce(c: Call) -> Axes | list[Axes]:
    x = c.axes(c.self)
    dims = _reduced_dims(c, len(x))
    freeze_all([x[d] for d in dims], f"units are addressed by value ({c.name})")
    return _reduce(c, x, dims)


@operator("topk", values="computes", zero=True, positions=(1,))
def topk(c: Call) -> Axes | list[Axes]:
    x = c.axes(c.self)
    d = c.dim % len(x)
    freeze(x[d], "units are addressed by value (top-k)")
    x[d] = fresh(c.out[0].shape[d], "units are addressed by value (top-k)")
    return c.each(x)


@operator("_softmax _log_softmax softmax log_softmax _safe_softmax", values="computes", over="softmax")
def softmax(c: Call) -> Axes:
    x = c.axes(c.self)
    if x:
        flag(x[c.dim], "softmax")
    return x


@operator("glu", values="computes", zero=True)
def glu(c: Call) -> Axes:
    x = c.axes(c.self)
    d = c.dim % len(x)
    half = x[d].size // 2
    first, second = take(x[d], 0, half), take(x[d], half, 2 * half)
    unify(first, second)
    x[d] = norm(first)
    return x


@operator("log_sigmoid_forward", values="computes")
def log_sigmoid(c: Call) -> list[Axes]:
    return [c.axes(c.self), [fresh(s) for s in c.out[1].shape]]


def _matmul(c: Call, a: Tensor, b: Tensor) -> Axes:
    c.contract(a, -1, b, -2)
    if a.dim() == 3:
        unify(c.axes(a)[0], c.axes(b)[0])
    c.produce(a, -2)
    c.produce(b, -1)
    return [*(norm(e) for e in c.axes(a)[:-1]), norm(c.axes(b)[-1])]


@operator("mm bmm", values=Contraction("self", "mat2"))
def matmul(c: Call) -> Axes:
    return _matmul(c, c.self, c.mat2)


@operator("addmm", values=Contraction("mat1", "mat2", "self"))
@operator("baddbmm", values=Contraction("batch1", "batch2", "self"))
@operator("addmm_ baddbmm_ _addmm_activation")
def addmm(c: Call) -> Axes:
    a, b = (c.mat1, c.mat2) if "mat1" in c.args else (c.batch1, c.batch2)
    return broadcast(_matmul(c, a, b), c.axes(c.self))


@operator("addbmm", values="computes")
def addbmm(c: Call) -> Axes:
    return broadcast(_matmul(c, c.batch1, c.batch2)[1:], c.axes(c.self))


@operator("linear", values=Contraction("input", "weight", "bias", inner=(-1, -1)))
@operator("mkldnn_linear mkldnn::_linear_pointwise mkl::_mkl_linear")
def linear(c: Call) -> Axes:
    x, w = c.get("input", "self", "X"), c.get("weight", "W")
    c.contract(x, -1, w, -1)
    if w.dim() == 1:
        return c.axes(x)[:-1]
    c.produce(w, 0)
    bias = c.get("bias", "B")
    if bias is not None:
        unify(c.axes(bias)[0], c.axes(w)[0])
    return [*c.axes(x)[:-1], norm(c.axes(w)[0])]


@operator("mv addmv", values="computes")
@operator("addmv_")
def mv(c: Call) -> Axes:
    matrix = c.get("mat") if "mat" in c.args else c.self
    c.contract(matrix, 1, c.vec, 0)
    c.produce(matrix, 0)
    out = c.axes(matrix)[:1]
    return broadcast(out, c.axes(c.self)) if "mat" in c.args else out


@operator("dot vdot", values="computes")
def dot(c: Call) -> Axes:
    c.contract(c.self, 0, c.get("tensor", "other"), 0)
    return []


@operator("cdist _cdist_forward _euclidean_dist", values="computes")
def cdist(c: Call) -> Axes:
    a, b = c.axes(c.x1), c.axes(c.x2)
    unify(a[-1], b[-1])
    for e, f in zip(a[:-2], b[:-2]):
        unify(e, f)
    return [*a[:-1], b[-2]]


@operator("_trilinear", values="computes")
def trilinear(c: Call) -> Axes | None:
    """nn.Bilinear: sum over i, j of a[..., i] w[k, i, j] b[..., j], as the three operands are spread over common dims."""
    parts = [c.i1, c.i2, c.i3]
    spread: list[list[Expr | None]] = []
    rank = c.i1.dim() + len(c.expand1)
    for t, gaps in zip(parts, (c.expand1, c.expand2, c.expand3)):
        left = c.axes(t)
        spread.append([None if d in gaps else left.pop(0) for d in range(rank)])
    out: Axes = []
    for d in range(rank):
        found = [s[d] for s in spread if s[d] is not None and s[d].size != 1]  # type: ignore[union-attr]
        for e in found[1:]:
            unify(found[0], e)  # type: ignore[arg-type]
        if d not in c.sumdim:
            out.append(norm(found[0]) if found else ONE)  # type: ignore[arg-type]
    for d in range(rank):
        at = [k for k in range(rank) if spread[1][k] is not None]
        if c.ledger.is_weight(c.i2) and d in at:
            c.ledger.play(c.i2, at.index(d), "consume" if d in c.sumdim else "produce")
    return out


@operator("_grouped_mm", values=Contraction("self", "mat2"))
def grouped_mm(c: Call) -> Axes | None:
    if c.self.dim() == 2 and c.mat2.dim() == 3:  # rows are sorted by expert
        freeze(c.axes(c.mat2)[0], "units are addressed by value (experts)")
        c.contract(c.self, -1, c.mat2, -2)
        c.produce(c.mat2, -1)
        for e in c.axes(c.mat2)[1:]:  # the kernel wants rows that start at multiples of 16 bytes
            c.ledger.multiple(e, 16 // c.mat2.element_size())
        return [c.axes(c.self)[0], norm(c.axes(c.mat2)[-1])]
    return None


@operator("convolution _convolution", values=Convolution())
@operator("convolution_overrideable mkldnn_convolution thnn_conv2d _slow_conv2d_forward cudnn_convolution", values="computes")
def convolution(c: Call) -> Axes:
    return _convolution(c, c.get("groups") or 1)


@operator("_conv_depthwise2d conv_depthwise3d", values="computes")
def depthwise_convolution(c: Call) -> Axes:
    return _convolution(c, c.self.shape[1])


def _convolution(c: Call, groups: int) -> Axes:
    image, weight = c.get("input", "self"), c.weight
    x, w = c.axes(image), c.axes(weight)
    at = len(x) - len(w) + 1  # 0 without a batch
    if c.get("transposed"):
        group, inside = _grouped(w[0], groups)
        unify(x[at], norm(Prod((group, inside))))
        out = norm(Prod((norm(group), closed(w[1]))))
    else:
        group, _ = _grouped(w[0], groups)
        unify(x[at], norm(Prod((group, closed(w[1])))))
        out = norm(w[0])
    _conv_roles(c, weight, bool(c.get("transposed")), groups)
    if c.get("bias") is not None:
        unify(c.axes(c.bias)[0], out)
    freeze_all(w[2:], KERNEL)
    return [*x[:at], norm(out), *(_slide(c, i, x[at + 1 + i], c.out.shape[at + 1 + i]) for i in range(len(w) - 2))]


def _slide(c: Call, i: int, e: Expr, size: int) -> Expr:
    """The axis a kernel slides over: it stays as it is, unless the kernel looks at one place at a time."""
    options = [(name, c.get(name)) for name in ("stride", "padding", "output_padding")]
    moves = [(name, v[i if len(v) > 1 else 0]) for name, v in options if v]
    if c.weight.shape[2 + i] == 1 and all(v == (name == "stride") for name, v in moves):
        return e
    freeze(e, SPATIAL)
    return fresh(size, SPATIAL)


def _grouped(e: Expr, groups: int) -> list[Expr]:
    return reshape([closed(e)], [groups, e.size // groups])


def _conv_roles(c: Call, weight: Tensor, transposed: bool, groups: int) -> None:
    if c.ledger.is_weight(weight):
        if transposed and groups == weight.shape[0] > 1:  # depthwise: the channels that it reads are those that it makes
            c.ledger.play(weight, 0, "produce")
        c.ledger.play(weight, 0, "consume" if transposed else "produce")
        c.ledger.play(weight, 1, "produce" if transposed else "consume")


def spatial(c: Call) -> Axes | list[Axes]:
    """Pooling, interpolation and padding over the last dims; the channels before them pass."""
    x, rank = c.axes(c.get("self", "input")), c.operator.spatial
    if c.get("random_samples") is not None:  # every sample and every channel draws where its windows lie
        samples = c.axes(c.random_samples)
        freeze(samples[2], SPATIAL)
        unify(x[-rank - 1], samples[1])
        if len(x) == rank + 2:
            unify(x[0], samples[0])
    freeze_all(x[-rank:], SPATIAL)
    return c.each([*x[:-rank], *(fresh(s, SPATIAL) for s in c.outputs()[0].shape[-rank:])])


def _register_spatial(rank: int, names: str, values: str = "computes", **facts: Any) -> None:
    register(names, axes=spatial, spatial=rank, values=values, zero=True, **facts)


_register_spatial(1, "avg_pool1d adaptive_avg_pool1d upsample_nearest1d upsample_linear1d _upsample_nearest_exact1d")
_register_spatial(1, "reflection_pad1d replication_pad1d max_pool1d")
_register_spatial(1, "max_pool1d_with_indices adaptive_max_pool1d", positions=(1,))
_register_spatial(2, "avg_pool2d _adaptive_avg_pool2d adaptive_avg_pool2d max_pool2d mkldnn_max_pool2d upsample_nearest2d")
_register_spatial(2, "upsample_bilinear2d upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa")
_register_spatial(2, "_upsample_nearest_exact2d reflection_pad2d replication_pad2d")
_register_spatial(2, "max_pool2d_with_indices", "max pooling", positions=(1,))
_register_spatial(2, "adaptive_max_pool2d fractional_max_pool2d", positions=(1,))
_register_spatial(3, "avg_pool3d _adaptive_avg_pool3d adaptive_avg_pool3d max_pool3d upsample_nearest3d upsample_trilinear3d")
_register_spatial(3, "reflection_pad3d replication_pad3d _upsample_nearest_exact3d")
_register_spatial(3, "max_pool3d_with_indices", "max pooling", positions=(1,))
_register_spatial(3, "adaptive_max_pool3d fractional_max_pool3d", positions=(1,))


@operator("max_unpool2d", values="computes", zero=True, spatial=2)
@operator("max_unpool3d", values="computes", zero=True, spatial=3)
def max_unpool(c: Call) -> Axes:
    rank = c.operator.spatial
    x = broadcast(c.axes(c.self), c.axes(c.indices))
    freeze_all(x[-rank:], SPATIAL)
    return [*x[:-rank], *(fresh(s, SPATIAL) for s in c.out.shape[-rank:])]


@operator("grid_sampler_2d grid_sampler_3d _grid_sampler_2d_cpu_fallback", values="computes", zero=True)
def grid_sampler(c: Call) -> Axes:
    x, g = c.axes(c.input), c.axes(c.grid)
    freeze_all((*x[2:], g[-1]), SPATIAL)
    unify(x[0], g[0])
    return [*x[:2], *g[1:-1]]


@operator("native_layer_norm layer_norm _fused_rms_norm rms_norm", values="computes", over="norm")
def layer_norm(c: Call) -> Axes | list[Axes]:
    x, n = c.axes(c.input), len(c.normalized_shape)
    for e, *params in zip(x[-n:], *[c.axes(p) for p in (c.get("weight"), c.get("bias")) if p is not None]):
        for p in params:
            unify(e, p)
        flag(e, "norm")
    whole, reduced = [norm(e) for e in x], [*x[:-n], *[ONE] * n]
    return [whole, *(list(reduced) for _ in c.out[1:])] if isinstance(c.out, list | tuple) else whole


def _batch_norm(c: Call, batch_statistics: bool) -> Axes | list[Axes]:
    x = c.axes(c.input)
    for name in ("weight", "bias", "running_mean", "running_var"):
        if c.get(name) is not None:
            unify(x[1], c.axes(c.args[name])[0])
    if batch_statistics:
        for i, e in enumerate(x):  # over a weight this is weight standardisation
            if i != 1:
                flag(e, "norm")
    whole = [norm(e) for e in x]
    if not isinstance(c.out, list | tuple):
        return whole
    return [
        whole,
        *([whole[1]] if o.dim() == 1 and o.shape[0] == x[1].size else [fresh(s) for s in o.shape] for o in c.out[1:]),
    ]


_PER_CHANNEL: dict[str, Any] = {"over": "norm", "per_channel": True, "contiguous": True}


@operator("native_batch_norm", values="batch normalisation", **_PER_CHANNEL)
@operator("_native_batch_norm_legit batch_norm cudnn_batch_norm", values="computes", **_PER_CHANNEL)
def batch_norm(c: Call) -> Axes | list[Axes]:
    """Uses the statistics of the batch in training, or where there are no running ones."""
    return _batch_norm(c, bool(c.get("training")) or c.get("running_mean") is None)


@operator("_batch_norm_with_update _native_batch_norm_legit_functional", values="computes", **_PER_CHANNEL)
def batch_norm_in_training(c: Call) -> Axes | list[Axes]:
    return _batch_norm(c, True)


@operator("_batch_norm_no_update _native_batch_norm_legit_no_training", values="computes", **_PER_CHANNEL)
def batch_norm_in_evaluation(c: Call) -> Axes | list[Axes]:
    return _batch_norm(c, c.get("running_mean") is None)


@operator("native_group_norm group_norm", values="computes", over="norm", contiguous=True)
def group_norm(c: Call) -> Axes | list[Axes]:
    x, groups = c.axes(c.input), c.get("group", "num_groups")
    group, inside = _grouped(x[1], groups)
    flag(inside, "norm")
    for p in (c.get("weight"), c.get("bias")):
        if p is not None:
            unify(x[1], c.axes(p)[0])
    for e in x[2:]:
        flag(e, "norm")
    whole = [norm(e) for e in x]
    return [whole, [x[0], group], [x[0], group]] if isinstance(c.out, list | tuple) else whole


@operator("_weight_norm_interface _weight_norm", values="computes", over="norm")
def weight_norm(c: Call) -> Axes | list[Axes]:
    v, g = c.axes(c.v), c.axes(c.g)
    for e, f in zip(v, g):
        unify(e, f) if f.size == e.size else flag(e, "norm")
    whole = [norm(e) for e in v]
    return [whole, list(g)] if isinstance(c.out, list | tuple) else whole


_FUSED_ATTENTION = (
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)


def _attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Every query with every key, and every weight with every value; heads may share keys and values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@operator(_FUSED_ATTENTION, values=Attention(), over="softmax", flops=_attention_flops)
@operator("_scaled_dot_product_attention_math scaled_dot_product_attention", over="softmax")
@operator("_scaled_dot_product_attention_math_for_mps", over="softmax")
def attention(c: Call) -> Axes | list[Axes]:
    q, k, v = (c.axes(c.args[n]) for n in ("query", "key", "value"))
    for a, b in zip(q[:-2], k[:-2]):
        if a.size == b.size:
            unify(a, b)
        else:  # several query heads for each key head
            unify(_grouped(a, b.size)[0], b)
    for a, b in zip(k[:-2], v[:-2]):
        unify(a, b)
    unify(q[-1], k[-1])
    unify(k[-2], v[-2])
    flag(k[-2], "softmax")
    if c.get("scale") is None:
        c.ledger.uses_size(q[-1], "scaled_dot_product_attention(scale=None)")
    mask = c.get("attn_mask", "attn_bias")
    if mask is not None:
        broadcast(c.axes(mask), [*(norm(e) for e in q[:-1]), norm(k[-2])])
    out = [*(norm(e) for e in q[:-1]), norm(v[-1])]
    if not isinstance(c.out, list | tuple):
        return out
    return [out, *(frozen_like(o, "attention statistics") if isinstance(o, Tensor) else [] for o in c.out[1:])]
