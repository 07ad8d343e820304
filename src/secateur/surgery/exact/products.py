"""Removed values through sums of products, and what those sums lose with the removed units: matrix products, attention,
convolutions."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from ...axes import Atom, atoms, keep_mask
from ...ops import Attention, Contraction, Convolution
from ...trace import Step
from .compute import varying_outputs
from .convolution import convolution
from .state import State
from .values import Contribution, RemovedValue, is_scaled, once, once_along, operands, same, where, wide


def product(state: State, i: int, step: Step) -> list[RemovedValue] | None:
    """The removed values of a sum of products, by its record; None where the record does not cover this call."""
    values = step.operator.values
    if isinstance(values, Attention):
        return _attention(state, i, step, values)
    if isinstance(values, Convolution):
        return convolution(state, i, step, values)
    assert isinstance(values, Contraction)
    left, right, bias = operands(step, values.left, values.right, values.bias)
    if left is None or right is None or is_scaled(step):
        return None
    inner = values.inner[0] % len(state.trace.axes[left]), values.inner[1] % len(state.trace.axes[right])
    return [_contract(state, i, step, (left, right), inner, bias)]


def _contract(
    state: State, i: int, step: Step, pair: tuple[int, int], inner: tuple[int, int], bias: int | None
) -> RemovedValue:
    """Records what the sum loses with the removed units that it runs over; returns the removed values of its output."""
    out = step.outs[0]
    made = [state.weights.made_of_weights(n) for n in pair]
    weight = 1 if made[1] else 0 if made[0] else None
    earlier: Tensor | None = None
    for atom in dict.fromkeys(a for a in atoms(state.trace.axes[pair[0]][inner[0]]) if a in state.keep):
        if any(state.is_zero(n, d, atom) for n, d in zip(pair, inner)):
            continue
        why = next((r for n in pair if not state.is_constant(n) and (r := state.reason(atom, state.removed(n)))), None)
        if why is None and weight is None:
            why = f"its removed units give a constant to {where(step)}, which has no bias to take it"
        if why is None:
            assert weight is not None
            gone = ~keep_mask(state.trace.axes[pair[0]][inner[0]], {atom: state.keep[atom]})
            state.contributions.append(
                Contribution(i, atom, _weighted(state, step, pair, inner, weight, gone if earlier is None else gone & ~earlier))
            )
            earlier = gone if earlier is None else earlier | gone
        else:
            state.contributions.append(Contribution(i, atom, why))
    return _result(state, step, pair, inner, bias, state.cut_atoms(out))


def _weighted(
    state: State, step: Step, pair: tuple[int, int], inner: tuple[int, int], weight: int, gone: Tensor
) -> Tensor | str:
    """The removed columns of a weight times the constants that they meet, if those are the same at every position."""
    value, since = state.removed(pair[1 - weight]).value, state.removed(pair[1 - weight]).since
    assert value is not None
    d, at = inner[1 - weight], gone.nonzero()[:, 0]
    value = value.index_select(d, at)
    for other in range(value.dim()):
        if other != d and value.shape[other] > 1:
            if value.stride(other) and not same(value, other):
                return f"what its removed units give depends on position, from {since or where(step)} on"
            value = value.narrow(other, 0, 1)
    if len(state.trace.axes[pair[weight]]) != 2:
        return f"its removed units give a constant to {where(step)}, which has no bias to take it"
    w, along, constants = pair[weight], inner[weight], value.reshape(-1)
    rows = state.weights.slabs(w, torch.arange(state.trace.axes[w][1 - along].size), len(at))
    parts = [wide(state.weights.part(w, {1 - along: some, along: at}).movedim(along, 1)) @ constants for some in rows]
    return torch.cat(parts)


def _result(
    state: State,
    step: Step,
    pair: tuple[int, int],
    inner: tuple[int, int],
    bias: int | None,
    cut: Iterable[Atom],
) -> RemovedValue:
    """The removed values of the output: the bias where a factor is zero; the constant itself where it is averaged."""
    varies: dict[Atom, str] = {}
    value: Tensor | None = None
    axes = state.trace.axes[step.outs[0]]
    for atom in cut:
        bearing = [
            (n, d) for n, c in zip(pair, inner) for d, e in enumerate(state.trace.axes[n]) if d != c and atom in atoms(e)
        ]
        shared = len(bearing) == 2 and bearing[0][1] == bearing[1][1] < len(axes) - 2  # a batch: one zero is enough
        zeros = [state.is_zero(n, d, atom) for n, d in bearing]
        if zeros and (any(zeros) if shared else all(zeros)):
            continue
        source = state.removed(pair[1])
        if (
            pair[1] in {n for n, _ in bearing}
            and _sums_to_one(state, pair[0])
            and atom not in source.varies
            and source.value is not None
        ):
            passed = once_along(source.value, inner[1])
            if passed is not None:
                value = passed.expand([e.size for e in axes])
                continue
        varies[atom] = state.removed(bearing[0][0]).varies.get(atom) or f"varies with the inputs, from {where(step)} on"
    if bias is not None and cut:
        if state.weights.made_of_weights(bias):
            added = wide(state.weights.value(bias))
            value = (added if value is None else once(value) + added).expand([e.size for e in axes])
        else:
            varies |= {a: "varies with the inputs" for a in cut if a not in state.removed(bias).zero}
    return RemovedValue(state.zero_atoms(value, step.outs[0], varies), varies, value)


_SOFTMAX = frozenset({"aten::_softmax", "aten::softmax", "aten::_safe_softmax"})


def _sums_to_one(state: State, number: int) -> bool:
    """Whether the last dim holds the output of a softmax over it, possibly viewed or permuted since."""
    makers, dim = state.weights.makers, len(state.trace.axes[number]) - 1
    for _ in range(12):
        step = state.trace.steps[makers[number]] if number in makers else None
        if step is None or not step.inputs:
            return False
        if step.name in _SOFTMAX:
            return step.args[1] % len(state.trace.axes[number]) == dim
        before = _dim_before(step, state.sizes(step.inputs[0]), state.sizes(number), dim)
        if before is None:
            return False
        number, dim = step.inputs[0], before
    return False


def _dim_before(step: Step, old: list[int], new: list[int], dim: int) -> int | None:
    """The dim of the input of a view that became a dim of its output, if it passed as it is."""
    if step.operator.identity:
        return dim
    if step.name == "aten::permute":
        return step.args[1][dim] % len(old)
    if step.name == "aten::transpose":
        swapped = [d % len(old) for d in step.args[1:3]]
        return swapped[1 - swapped.index(dim)] if dim in swapped else dim
    if step.name == "aten::expand":
        before = dim - len(new) + len(old)
        return before if before >= 0 and old[before] == new[dim] else None
    if step.name not in _SAME_ORDER:
        return None
    inner = math.prod(new[dim + 1 :])
    found = [d for d, size in enumerate(old) if size == new[dim] and math.prod(old[d + 1 :]) == inner]
    return found[0] if len(found) == 1 else None


_SAME_ORDER = frozenset(f"aten::{name}" for name in ("view", "_unsafe_view", "reshape", "unsqueeze", "squeeze"))


def _attention(state: State, i: int, step: Step, values: Attention) -> list[RemovedValue] | None:
    query, key, value = operands(step, values.left, values.right, values.value)
    if query is None or key is None or value is None:
        return None
    for atom in dict.fromkeys(a for a in atoms(state.trace.axes[query][-1]) if a in state.keep):
        if not any(atom in state.removed(n).zero for n in (query, key)):
            why = next((r for n in (query, key) if (r := state.reason(atom, state.removed(n)))), None)
            constant = f"its removed units give a constant to {where(step)}, which has no bias to take it"
            state.contributions.append(Contribution(i, atom, why or constant))
    source, number = state.removed(value), step.outs[0]
    cut, sizes = state.cut_atoms(number), state.sizes(number)
    varies = {a: source.varies.get(a, "varies") for a in cut if a in source.varies or a not in state.cut_atoms(value)}
    passed = None if source.value is None else once_along(source.value, 2)
    if source.value is not None and passed is None:
        varies |= {a: f"depends on position, from {source.since or where(step)} on" for a in cut if a not in source.zero}
    if passed is not None and passed.shape[1] not in (1, sizes[1]):  # heads that share keys and values
        passed = passed.repeat_interleave(sizes[1] // passed.shape[1], 1)
    result = None if passed is None else passed.expand(sizes)
    zero = frozenset(a for a in cut if a in source.zero and a not in varies)
    return [RemovedValue(zero, varies, result), *varying_outputs(state, step)]
