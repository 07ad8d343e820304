"""Operators that make tensors, and those that rearrange, cut and join them."""

from __future__ import annotations

import math

from ..axes import ONE, ZERO, Atom, Cat, Fam, Prod, closed, flag, freeze, fresh, norm, pick, reshape, split_outer, take, unify
from .record import MOVES, Axes, Call, freeze_all, frozen_like, operator


@operator("zeros ones full rand randn randint new_zeros new_ones new_full scalar_tensor", values="computes")
@operator("empty new_empty empty_strided new_empty_strided empty_permuted", undefined=True)
def filled(c: Call) -> Axes:
    return [fresh(s) for s in c.out.shape]


@operator(
    "arange linspace logspace eye tril_indices triu_indices randperm hann_window hamming_window kaiser_window",
    values="computes",
)
def counted(c: Call) -> Axes:
    return frozen_like(c.out, f"values depend on the position ({c.name}): removing a unit changes the others")


@operator("view _unsafe_view reshape _reshape_alias _reshape_copy view_copy", **MOVES)
def view(c: Call) -> Axes | None:
    if "size" not in c.args and "shape" not in c.args:  # view(dtype) reads the same bits as other numbers
        return None
    return reshape(c.axes(c.self), list(c.out.shape), c.ledger.literal_sizes)


@operator("permute permute_copy", **MOVES)
def permute(c: Call) -> Axes:
    x = c.axes(c.self)
    return [x[d % len(x)] for d in c.dims]


@operator("t t_ numpy_T adjoint mT t_copy", **MOVES)
def turned(c: Call) -> Axes:
    return c.axes(c.self)[::-1]


@operator("transpose transpose_ swapaxes transpose_copy", **MOVES)
def transpose(c: Call) -> Axes:
    x = c.axes(c.self)
    if x:
        i, j = c.dim0 % len(x), c.dim1 % len(x)
        x[i], x[j] = x[j], x[i]
    return x


@operator("unsqueeze unsqueeze_ unsqueeze_copy", **MOVES)
def unsqueeze(c: Call) -> Axes:
    x = c.axes(c.self)
    if len(x) < c.out.dim():  # in place, the tensor may have been seen after the change
        x.insert(c.dim % (len(x) + 1), ONE)
    return x


@operator("squeeze squeeze_ squeeze_copy", **MOVES)
def squeeze(c: Call) -> Axes:
    x = c.axes(c.self)
    dims = c.get("dim")
    gone = range(len(x)) if dims is None else [d % len(x) for d in ([dims] if isinstance(dims, int) else dims) if x]
    return [e for i, e in enumerate(x) if i not in gone or e.size != 1] if len(x) != c.out.dim() else x


@operator("expand broadcast_to expand_copy", **MOVES)
def expand(c: Call) -> Axes:
    x = c.axes(c.self)
    x = [ONE] * (c.out.dim() - len(x)) + x
    return [e if e.size == s else fresh(s) for e, s in zip(x, c.out.shape)]


@operator("repeat", **MOVES)
def repeat(c: Call) -> Axes:
    x = c.axes(c.self)
    x = [ONE] * (c.out.dim() - len(x)) + x
    return [norm(Prod((fresh(r), closed(e)))) for r, e in zip(c.repeats, x)]


@operator("slice slice_copy narrow", **MOVES)
def sliced(c: Call) -> Axes:
    x = c.axes(c.self)
    d = c.dim % len(x)
    bounds = slice(c.start, c.start + c.length) if "length" in c.args else slice(c.start, c.end, c.step)
    start, stop, step = bounds.indices(x[d].size)
    if c.out.shape[d] == 0:
        x[d] = ZERO
    elif (start, stop, step) != (0, x[d].size, 1):
        x[d] = take(x[d], start, stop, step)
    return x


@operator("slice_scatter", **MOVES)
def slice_scatter(c: Call) -> Axes:
    x, s = c.axes(c.self), c.axes(c.src)
    d = c.dim % len(x)
    start, stop, step = slice(c.start, c.end, c.step).indices(x[d].size)
    for k in range(len(x)):
        unify(take(x[d], start, stop, step) if k == d else x[k], s[k])
    return x


@operator("select_scatter", **MOVES)
def select_scatter(c: Call) -> Axes:
    x, s = c.axes(c.self), c.axes(c.src)
    d = c.dim % len(x)
    freeze(x[d], "addressed by position")
    for e, f in zip(x[:d] + x[d + 1 :], s):
        unify(closed(e), f)
    return x


def _at(axes: Axes, dim: int, index: int) -> Axes:
    """The other axes at one index of `dim`: a fused axis gives the part that stands there."""
    key = norm(axes[dim])
    return [pick(e, key, index) for i, e in enumerate(axes) if i != dim]


@operator("select select_copy", **MOVES)
def select(c: Call) -> Axes:
    x = c.axes(c.self)
    d = c.dim % len(x)
    c.ledger.freeze_when_read(x[d], "addressed by position")  # `x[:, :, -1].shape` reads nothing
    return _at(x, d, c.index % x[d].size)


@operator("unbind unbind_copy", **MOVES)
def unbind(c: Call) -> list[Axes]:
    x = c.axes(c.self)
    d = c.dim % len(x)
    c.ledger.freeze_when_read(x[d], "addressed by position")
    return [_at(x, d, i) for i in range(len(c.out))]


@operator(
    "split split_with_sizes unsafe_split unsafe_split_with_sizes split_copy split_with_sizes_copy",
    values="moves",
    zero=True,
    factor="same",
)
@operator("chunk unsafe_chunk tensor_split", **MOVES)
def split(c: Call) -> list[Axes]:
    x = c.axes(c.self)
    d = c.dim % len(x)
    parts: Axes = []
    at = 0
    for piece in c.out:
        parts.append(take(x[d], at, at + piece.shape[d]))
        at += piece.shape[d]
    if "split_sizes" not in c.args and len(parts) > 1:  # one number for all pieces
        if parts[-1].size == parts[0].size:
            c.ledger.equal_counts(parts)
        else:
            freeze_all(parts, "split into uneven pieces by one number")
    return [[*x[:d], part, *x[d + 1 :]] for part in parts]


@operator("cat concat concatenate", **MOVES)
def cat(c: Call) -> Axes | None:
    tensors = [t for t in c.tensors() if not (t.dim() == 1 and t.shape[0] == 0)]
    if not tensors:
        return None
    first, *rest = [c.axes(t) for t in tensors]
    d = c.dim % len(first)
    for x in rest:
        for i in range(len(first)):
            if i != d:
                unify(first[i], x[i])
    return [norm(Cat([closed(x[d]) for x in (first, *rest)])) if i == d else norm(e) for i, e in enumerate(first)]


@operator("stack", **MOVES)
def stack(c: Call) -> Axes:
    """A new axis numbers the tensors; each keeps its own units, only their counts have to agree."""
    every = [[closed(e) for e in c.axes(t)] for t in c.tensors()]
    key = Atom(len(every), "numbers stacked tensors")
    key.key = True
    out = [norm(Fam(key, parts)) for parts in zip(*every)]
    out.insert(c.dim % (len(out) + 1), key if len(every) > 1 else ONE)
    return out


@operator("constant_pad_nd pad", values="moves", zero=lambda given: not given.get("value"))
def pad(c: Call) -> Axes:
    x = c.axes(c.self)
    for i in range(len(c.pad) // 2):
        low, high, d = c.pad[2 * i], c.pad[2 * i + 1], len(x) - 1 - i
        if low == high == 0:
            continue
        inside = take(x[d], max(0, -low), x[d].size - max(0, -high)) if min(low, high) < 0 else x[d]
        edges = [fresh(max(0, n), "padding") for n in (low, high)]
        x[d] = norm(Cat((edges[0], closed(inside), edges[1])))
    return x


@operator("diagonal diagonal_copy diag_embed diagonal_scatter diagonal_backward", **MOVES)
def diagonal(c: Call) -> Axes:
    for t in c.tensors():
        freeze_all(c.axes(t), "read along a diagonal")
    return frozen_like(c.out, "read along a diagonal")


@operator("as_strided as_strided_copy as_strided_", **MOVES)
def as_strided(c: Call) -> Axes | None:
    """Overlapping windows and the like: a dim passes when no other step of the new view can move its index."""
    if list(c.out.shape) == list(c.self.shape) and c.out.stride() == c.self.stride():
        return c.axes(c.self)
    x, inner = c.axes(c.self), list(zip(c.self.shape, c.self.stride()))
    offset = 0 if c.storage_offset is None else c.storage_offset - c.self.storage_offset()
    if offset or sorted((s for n, s in inner if n > 1), reverse=True) != _packed(inner):
        return None
    out: Axes = []
    passed: set[int] = set()
    for size, stride in zip(c.size, c.stride):
        others = [(n, s) for n, s in zip(c.size, c.stride) if s != stride and n > 1]
        found = next((d for d, dim in enumerate(inner) if dim == (size, stride) and size > 1), None)
        below = sum((n - 1) * s for n, s in others if s < stride)
        alone = sum(s == stride and n > 1 for n, s in zip(c.size, c.stride)) == 1
        if found is not None and alone and below < stride and all(s % (size * stride) == 0 for _, s in others if s > stride):
            passed.add(found)
            out.append(x[found])
        else:
            out.append(fresh(size, "a strided window"))
    freeze_all([e for d, e in enumerate(x) if d not in passed], "a strided window")
    return out


def _packed(dims: list[tuple[int, int]]) -> list[int]:
    """The strides that the dims would have, outermost first, if they lay in memory without gaps."""
    order = sorted((d for d in dims if d[0] > 1), key=lambda d: -d[1])
    return [math.prod(n for n, _ in order[i + 1 :]) for i in range(len(order))]


@operator("unfold unfold_copy", **MOVES)
def unfold(c: Call) -> Axes:
    x = c.axes(c.self)
    d = c.dimension % len(x)
    halves = split_outer(x[d], x[d].size // c.size) if c.size == c.step and x[d].size % c.size == 0 else None
    freeze(x[d] if halves is None else halves[1], "a sliding window")
    if halves is None:
        halves = [fresh(s, "a sliding window") for s in (c.out.shape[d], c.out.shape[-1])]
    return [*x[:d], halves[0], *x[d + 1 :], halves[1]]


@operator("im2col", **MOVES)
def im2col(c: Call) -> Axes:
    x = c.axes(c.self)
    freeze_all(x[-2:], "a sliding window")
    window = fresh(math.prod(c.kernel_size), "a sliding window")
    return [*x[:-3], norm(Prod((closed(x[-3]), window))), fresh(c.out.shape[-1], "a sliding window")]


@operator("col2im", values="computes", zero=True)
def col2im(c: Call) -> Axes | None:
    x = c.axes(c.self)
    freeze(x[-1], "a sliding window")
    halves = split_outer(x[-2], x[-2].size // math.prod(c.kernel_size))
    if halves is None:
        return None
    freeze(halves[1], "a sliding window")
    return [*x[:-2], halves[0], *(fresh(s, "spatial") for s in c.out.shape[-2:])]


@operator("pixel_shuffle", **MOVES)
def pixel_shuffle(c: Call) -> Axes:
    x, f = c.axes(c.self), c.upscale_factor
    channels, high, wide = reshape([x[-3]], [x[-3].size // f // f, f, f])
    freeze_all((high, wide), "pixel shuffle")
    return [*x[:-3], channels, norm(Prod((x[-2], high))), norm(Prod((x[-1], wide)))]


@operator("pixel_unshuffle", **MOVES)
def pixel_unshuffle(c: Call) -> Axes:
    x, f = c.axes(c.self), c.downscale_factor
    (rows, high), (cols, wide) = (reshape([e], [e.size // f, f]) for e in x[-2:])
    freeze_all((high, wide), "pixel shuffle")
    return [*x[:-3], norm(Prod((closed(x[-3]), high, wide))), rows, cols]


@operator("channel_shuffle native_channel_shuffle", **MOVES)
def channel_shuffle(c: Call) -> Axes:
    x = c.axes(c.self)
    groups, inside = reshape([x[1]], [c.groups, x[1].size // c.groups])
    return [x[0], norm(Prod((inside, groups))), *x[2:]]


@operator("flip roll", **MOVES)
@operator("tril triu tril_ triu_ msort", values="computes", zero=True)
@operator("cumprod cumsum cumsum_", values="computes", zero=True, grows=True)
@operator("sort cummax cummin", values="computes", zero=True, positions=(1,))
@operator("argsort", values="computes", positions=(0,))
@operator("logcumsumexp", values="computes", grows=True)
def ordered(c: Call) -> Axes | list[Axes]:
    """The units along these dims stand in an order that the values depend on."""
    x = c.axes(c.self)
    dims = [-1, -2] if "diagonal" in c.args else c.get("dims", "dim")
    for d in [dims] if isinstance(dims, int) else dims or range(len(x)):
        if x and x[d].size > 1:
            freeze(x[d], f"order matters ({c.name}): removing a unit changes the others")
            x[d] = fresh(x[d].size, f"order matters ({c.name})")
    return c.each(x)


@operator("renorm", over="norm")
def renorm(c: Call) -> Axes:
    """Every slice along `dim` is divided by a norm of its own."""
    x = c.axes(c.self)
    for d, e in enumerate(x):
        if d != c.dim % len(x):
            flag(e, "norm")
    return x


@operator("view_as_complex", **MOVES)
def view_as_complex(c: Call) -> Axes:
    x = c.axes(c.self)
    freeze(x[-1], "a complex pair")
    return x[:-1]


@operator("view_as_real view_as_real_copy", **MOVES)
def view_as_real(c: Call) -> Axes:
    return [*c.axes(c.self), fresh(2, "a complex pair")]


@operator("_fft_r2c _fft_c2r _fft_c2c", values="computes", zero=True)
def fourier(c: Call) -> Axes:
    x = c.axes(c.self)
    for d in c.dim:
        freeze(x[d], "a Fourier transform")
        x[d] = fresh(c.out.shape[d], "a Fourier transform")
    return x
