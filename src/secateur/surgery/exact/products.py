"""What removed units say through sums of products: matrix products, attention, convolutions; and what those lose by the cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...axes import Atom, atoms, keep_mask
from ...trace import Ref, Step
from .operands import PASSING, Contribution, RemovedValue, is_scaled, once, once_along, same, where, wide

if TYPE_CHECKING:
    from .propagate import Propagation

Rule = Callable[["Propagation", int, Step], list[RemovedValue] | None]
RULES: dict[str, Rule] = {}
_SLAB = 1 << 16  # elements that stay in the caches while they are worked with


def _rule(names: str) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names.split(), function))
        return function

    return register


@_rule("mm bmm addmm baddbmm linear")
def _product(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    numbers = [v.number if isinstance(v, Ref) else None for v in step.args]
    kind = step.kind
    bias, left, right = (None, *numbers[:2]) if kind in ("mm", "bmm") else numbers[:3]
    if kind == "linear":
        left, right, bias = (*numbers, None)[:3]
    if left is None or right is None or is_scaled(step):
        return None
    inner = len(g.trace.axes[left]) - 1, (1 if kind == "linear" else len(g.trace.axes[right]) - 2)
    return [_contract(g, i, step, (left, right), inner, bias)]


def _contract(
    g: Propagation, i: int, step: Step, pair: tuple[int, int], inner: tuple[int, int], bias: int | None
) -> RemovedValue:
    """A sum over one dim of each of two tensors: what it loses with the removed units there, and the ghost of its result."""
    out = step.outs[0]
    made = [g.silence.made_of_weights(n) for n in pair]
    weight = 1 if made[1] else 0 if made[0] else None
    earlier: Tensor | None = None
    for atom in dict.fromkeys(a for a in atoms(g.trace.axes[pair[0]][inner[0]]) if a in g.keep):
        if any(_silent(g, n, d, atom) for n, d in zip(pair, inner)):
            continue
        why = next((r for n in pair if not _fixed(g, n) and (r := g.reason(atom, g.ghost(n)))), None)
        if why is None and weight is None:
            why = f"its removed units give a constant to {where(step)}, which has no bias to take it"
        if why is None:
            assert weight is not None
            gone = ~keep_mask(g.trace.axes[pair[0]][inner[0]], {atom: g.keep[atom]})
            g.losses.append(
                Contribution(i, atom, _weighted(g, step, pair, inner, weight, gone if earlier is None else gone & ~earlier))
            )
            earlier = gone if earlier is None else earlier | gone
        else:
            g.losses.append(Contribution(i, atom, why))
    return _result(g, step, pair, inner, bias, g.cut_atoms(out))


def _fixed(g: Propagation, number: int) -> bool:
    """Whether it is made of weights alone, which never vary."""
    return number not in g.found and g.silence.made_of_weights(number)


def _silent(g: Propagation, number: int, dim: int, atom: Atom) -> bool:
    if g.silence.made_of_weights(number):
        return g.silence.zero(number, dim, atom)
    return atom in g.ghost(number).zero


def _weighted(
    g: Propagation, step: Step, pair: tuple[int, int], inner: tuple[int, int], weight: int, gone: Tensor
) -> Tensor | str:
    """The removed columns of a weight times the constants that they meet, if those are the same wherever one looks."""
    value, since = g.ghost(pair[1 - weight]).value, g.ghost(pair[1 - weight]).since
    assert value is not None
    d, at = inner[1 - weight], gone.nonzero()[:, 0]
    value = value.index_select(d, at)
    for other in range(value.dim()):
        if other != d and value.shape[other] > 1:
            if value.stride(other) and not same(value, other):
                return f"what its removed units give depends on position, from {since or where(step)} on"
            value = value.narrow(other, 0, 1)
    if len(g.trace.axes[pair[weight]]) != 2:
        return f"its removed units give a constant to {where(step)}, which has no bias to take it"
    w, along, constants = pair[weight], inner[weight], value.reshape(-1)
    rows = _slabs(g, w, torch.arange(g.trace.axes[w][1 - along].size), len(at))
    parts = [wide(g.silence.part(w, {1 - along: some, along: at}).movedim(along, 1)) @ constants for some in rows]
    return torch.cat(parts)


def _slabs(g: Propagation, w: int, rows: Tensor, width: int) -> Sequence[Tensor]:
    """Rows of a weight, as many at a time as stay in the caches; all at once where it has to be worked out first."""
    return rows.split(max(_SLAB // max(width, 1), 1) if g.silence.stored(w) else max(len(rows), 1))


def _result(
    g: Propagation,
    step: Step,
    pair: tuple[int, int],
    inner: tuple[int, int],
    bias: int | None,
    cut: Iterable[Atom],
) -> RemovedValue:
    """Removed units of the result: nothing but the bias where a factor is zero; a mean of constants is the constant."""
    bad: dict[Atom, str] = {}
    value: Tensor | None = None
    axes = g.trace.axes[step.outs[0]]
    for atom in cut:
        bearing = [(n, d) for n, c in zip(pair, inner) for d, e in enumerate(g.trace.axes[n]) if d != c and atom in atoms(e)]
        shared = len(bearing) == 2 and bearing[0][1] == bearing[1][1] < len(axes) - 2  # a batch: one zero is enough
        quiet = [_silent(g, n, d, atom) for n, d in bearing]
        if (any(quiet) if shared else all(quiet)) and quiet:
            continue
        source = g.ghost(pair[1])
        if (
            pair[1] in {n for n, _ in bearing}
            and _sums_to_one(g, pair[0])
            and atom not in source.bad
            and source.value is not None
        ):
            passed = once_along(source.value, inner[1])
            if passed is not None:
                value = passed.expand([e.size for e in axes])
                continue
        bad[atom] = g.ghost(bearing[0][0]).bad.get(atom) or f"varies with the inputs, from {where(step)} on"
    if bias is not None and cut:
        if g.silence.made_of_weights(bias):
            added = wide(g.silence.value(bias))
            value = (added if value is None else once(value) + added).expand([e.size for e in axes])
        else:
            bad |= {a: "varies with the inputs" for a in cut if a not in g.ghost(bias).zero}
    zero = [
        a
        for a in cut
        if a not in bad and (value is None or not any(bool(once(t).any()) for _, t in g.removed(value, step.outs[0], a)))
    ]
    return RemovedValue(frozenset(zero), bad, value)


def _sums_to_one(g: Propagation, number: int) -> bool:
    """Whether the last dim holds the outcome of a softmax over it, past layouts of all kinds."""
    makers, dim = g.silence.makers, len(g.trace.axes[number]) - 1
    for _ in range(12):
        step = g.trace.steps[makers[number]] if number in makers else None
        if step is None or not step.inputs:
            return False
        if "softmax" in step.kind and "log" not in step.kind:
            return step.args[1] % len(g.trace.axes[number]) == dim
        before = _dim_before(step, *([e.size for e in g.trace.axes[n]] for n in (step.inputs[0], number)), dim)
        if before is None:
            return False
        number, dim = step.inputs[0], before
    return False


def _dim_before(step: Step, old: list[int], new: list[int], dim: int) -> int | None:
    """The dim of what a layout is made of that a dim of it was, if that is one of them as it stands."""
    kind = step.kind
    if kind in PASSING:
        return dim
    if kind == "permute":
        return step.args[1][dim] % len(old)
    if kind == "transpose":
        swapped = [d % len(old) for d in step.args[1:3]]
        return swapped[1 - swapped.index(dim)] if dim in swapped else dim
    if kind == "expand":
        before = dim - len(new) + len(old)
        return before if before >= 0 and old[before] == new[dim] else None
    if kind not in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"):
        return None
    inner = math.prod(new[dim + 1 :])
    found = [d for d, size in enumerate(old) if size == new[dim] and math.prod(old[d + 1 :]) == inner]
    return found[0] if len(found) == 1 else None


@_rule(
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention _scaled_dot_product_efficient_attention "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
)
def _attention(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    query, key, value = (v.number for v in step.args[:3])
    for atom in dict.fromkeys(a for a in atoms(g.trace.axes[query][-1]) if a in g.keep):
        if not any(atom in g.ghost(n).zero for n in (query, key)):
            why = next((r for n in (query, key) if (r := g.reason(atom, g.ghost(n)))), None)
            constant = f"its removed units give a constant to {where(step)}, which has no bias to take it"
            g.losses.append(Contribution(i, atom, why or constant))
    source, number = g.ghost(value), step.outs[0]
    cut, axes = g.cut_atoms(number), g.trace.axes[number]
    bad = {a: source.bad.get(a, "varies") for a in cut if a in source.bad or a not in g.cut_atoms(value)}
    passed = None if source.value is None else once_along(source.value, 2)
    if source.value is not None and passed is None:
        bad |= {a: f"depends on position, from {source.since or where(step)} on" for a in cut if a not in source.zero}
    if passed is not None and passed.shape[1] not in (1, axes[1].size):  # heads that share keys and values
        passed = passed.repeat_interleave(axes[1].size // passed.shape[1], 1)
    result = None if passed is None else passed.expand([e.size for e in axes])
    zero = frozenset(a for a in cut if a in source.zero and a not in bad)
    return [
        RemovedValue(zero, bad, result),
        *(RemovedValue(bad=dict.fromkeys(g.cut_atoms(n), "varies")) for n in step.outs[1:]),
    ]


@_rule("_grouped_mm")
def _experts(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    x, w = (v.number for v in step.args[:2])
    return [_contract(g, i, step, (x, w), (len(g.trace.axes[x]) - 1, len(g.trace.axes[w]) - 2), None)]


@_rule("convolution _convolution")
def _convolution(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    """A few pixels are enough: inside, at the border, and next to it."""
    x, w = (v.number for v in step.args[:2])
    if not g.silence.made_of_weights(w):
        return None
    out, bias = step.outs[0], step.args[2].number if isinstance(step.args[2], Ref) else None
    cut = g.cut_atoms(out)
    ghost, bad, zero_rows = g.ghost(x), {}, set()
    transposed, groups = bool(step.args[6]), step.args[8]
    for atom in (a for a, dims in cut.items() if 1 in dims):
        rows = [d for d in g.cut_atoms(w).get(atom, ()) if d == 0 or groups > 1 or transposed]
        if rows and all(g.silence.zero(w, d, atom) for d in rows):
            zero_rows.add(atom)
        elif atom not in g.cut_atoms(x) or atom in ghost.bad:
            bad[atom] = ghost.bad.get(atom) or f"varies with the inputs, from {where(step)} on"
    for atom in (a for a, dims in cut.items() if 1 not in dims and a not in ghost.zero):  # its units are pixels here
        if atom in ghost.bad:
            bad[atom] = ghost.bad[atom]
        g.losses.append(Contribution(i, atom, f"what its removed units give is lost among the pixels of {where(step)}"))
    total: Tensor | None = None
    earlier: Tensor | None = None  # channels that have been counted
    for atom, dims in g.cut_atoms(x).items():
        if atom in ghost.zero or (atom in zero_rows and groups > 1) or 1 not in dims:
            continue
        gone = g.silence.gone(g.trace.axes[x][1], atom)
        lost = g.reason(atom, ghost) or _pixels(g, step, x, w, gone if earlier is None else gone[~earlier[gone]])
        if isinstance(lost, Tensor):
            counted = ~keep_mask(g.trace.axes[x][1], {atom: g.keep[atom]})
            earlier = counted if earlier is None else earlier | counted
            total = lost if total is None else total + lost
        else:
            bad |= {a: "varies" for a in cut if a not in zero_rows and a not in bad}
        if not (groups > 1 and atom in cut and isinstance(lost, str)):
            g.losses.append(Contribution(i, atom, lost))
    value = None
    if cut and bias is not None:
        value = wide(g.silence.value(bias))
    if cut and total is not None:
        value = total if value is None else value + total
    sizes = [e.size for e in g.trace.axes[out]]
    if value is not None:
        value = value.reshape(1, -1, *[1] * (len(sizes) - 2)).expand(sizes)
    zero = [
        a for a in cut if a not in bad and (value is None or not any(bool(once(t).any()) for _, t in g.removed(value, out, a)))
    ]
    return [RemovedValue(frozenset(zero), bad, value)]


@_rule("native_batch_norm")
def _batch_norm(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    """With the statistics it has learned: a scale and a shift for each channel."""
    x, *own = (v.number if isinstance(v, Ref) else None for v in step.args[:5])
    training, _, eps = step.args[5:8]
    if x is None or training or own[2] is None or any(n is not None and not g.silence.made_of_weights(n) for n in own):
        return None
    weight, bias, mean, var = (None if n is None else wide(g.silence.value(n)) for n in own)
    assert mean is not None
    assert var is not None
    scale = (1.0 if weight is None else weight) / (var + eps).sqrt()
    shift = (0.0 if bias is None else bias) - mean * scale
    ghost, sizes = g.ghost(x), [e.size for e in g.trace.axes[x]]
    along = (1, -1, *[1] * (len(sizes) - 2))
    out = shift.reshape(along)
    if ghost.value is not None:
        out = once(ghost.value) * scale.reshape(along) + out
    cut = g.cut_atoms(step.outs[0])
    bad = {a: ghost.bad[a] for a in cut if a in ghost.bad}
    zero = [a for a in cut if a not in bad and not any(bool(t.any()) for _, t in g.removed(out, x, a))]
    rest = [RemovedValue(bad=dict.fromkeys(g.cut_atoms(n), "varies")) for n in step.outs[1:]]
    return [RemovedValue(frozenset(zero), bad, out.expand(sizes)), *rest]


@_rule("max_pool2d_with_indices max_pool3d_with_indices")
def _max_pool(g: Propagation, i: int, step: Step) -> list[RemovedValue] | None:
    """The largest of equal numbers is one of them, and padding never is."""
    x, out = step.inputs[0], step.outs[0]
    ghost, value = g.ghost(x), g.ghost(x).value
    if value is not None and any(value.stride(d) and value.shape[d] > 1 for d in g.whole(x)):
        return None
    passed = None if value is None else once(value).expand([e.size for e in g.trace.axes[out]])
    rest = [RemovedValue(bad=dict.fromkeys(g.cut_atoms(n), "varies")) for n in step.outs[1:]]
    return [RemovedValue(ghost.zero, dict(ghost.bad), passed), *rest]


_FEW = 8


def _kernel(g: Propagation, w: int, rows: Tensor, at: Tensor) -> Tensor:
    """What a convolution makes some of its channels of, from some channels."""
    return wide(g.silence.part(w, {0: rows, 1: at}))


def _clipped(taps: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether the first pixel, where taps reach into the padding, differs from one inside."""
    rank = taps.dim() - 1
    paddings, dilations = (list(v) * rank if len(v) == 1 else list(v) for v in (padding, dilation))
    inside = taps[(slice(None), *(slice(-(-p // d), None) for p, d in zip(paddings, dilations)))]
    return not same(torch.stack([inside.flatten(1).sum(1), taps.flatten(1).sum(1)]), 0)


def _pixels(g: Propagation, step: Step, x: int, w: int, at: Tensor) -> Tensor | str:
    """What a convolution makes of the constants of some channels: one number for each of its own, or why it is not one."""
    value = g.ghost(x).value
    assert value is not None
    for d in (0, *range(2, value.dim())):
        if value.shape[d] > 1 and value.stride(d) and not same(value.index_select(1, at), d):
            return f"what its removed units give depends on position, from {g.ghost(x).since or where(step)} on"
    constants = value[(0, slice(None), *[0] * (value.dim() - 2))][at]
    total = torch.zeros(g.trace.axes[step.outs[0]][1].size, dtype=torch.float64)
    if not bool(constants.any()):
        return total
    groups, (stride, padding, dilation, turned, extra) = step.args[8], step.args[3:8]
    if groups == 1 and not turned:
        rows = g.silence.loud(w, 0).nonzero()[:, 0]
        if not any(padding):  # every place sees every tap
            taps = math.prod(e.size for e in g.trace.axes[w][2:])
            spread = constants.repeat_interleave(taps)
            for some in _slabs(g, w, rows, len(spread)):
                total[some] = _kernel(g, w, some, at).flatten(1) @ spread
            return total
        if _clipped(_kernel(g, w, rows[:_FEW], at).movedim(1, -1) @ constants, padding, dilation):  # the first channels show it
            return f"a constant meets the zero padding of {step.module or 'the model'}"
        # every tap with its constants first: what is left is one small kernel for each channel
        taps = torch.zeros([e.size for d, e in enumerate(g.trace.axes[w]) if d != 1], dtype=torch.float64)
        taps[rows] = _kernel(g, w, rows, at).movedim(1, -1) @ constants
        kernel, given, groups = taps[:, None], torch.ones(1, len(taps), dtype=torch.float64), len(taps)
    else:
        kernel = wide(g.silence.value(w))
        given = torch.zeros(1, g.trace.axes[x][1].size, dtype=torch.float64).index_copy_(1, at, constants[None])
    reach = [r * (k - 1) for k, r in zip(kernel.shape[2:], dilation if len(dilation) > 1 else dilation * (kernel.dim() - 2))]
    sizes = [min(2 * r + 3, e.size) if r else min(2, e.size) for r, e in zip(reach, g.trace.axes[x][2:])]
    given = given.reshape(1, -1, *[1] * len(sizes)).expand(-1, -1, *sizes)
    out = torch.ops.aten.convolution(given, kernel, None, stride, padding, dilation, turned, extra, groups)[0].flatten(1)
    if same(out, 1) or not out.numel():
        return out[:, 0]
    if any(padding) and not turned:
        return f"a constant meets the zero padding of {step.module or 'the model'}"
    return f"the constant depends on position after {where(step)}"
