"""Removed values through convolutions, and what their output channels lose with removed input channels."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ...axes import Atom, keep_mask
from ...ops import Convolution
from ...trace import Step
from .state import State
from .values import Contribution, RemovedValue, operands, same, where, wide


def convolution(state: State, i: int, step: Step, values: Convolution) -> list[RemovedValue] | None:
    """Records what the output channels lose with removed input channels; returns the removed values of the output."""
    x, w, bias = operands(step, values.left, values.right, values.bias)
    if x is None or w is None or not state.weights.made_of_weights(w):
        return None
    number, removed, groups = step.outs[0], state.removed(x), step.arguments["groups"]
    cut = state.cut_atoms(number)
    zero_rows, varies = _masked_channels(state, step, x, w)
    for atom in (a for a, dims in cut.items() if 1 not in dims and a not in removed.zero):  # its units are pixels here
        if atom in removed.varies:
            varies[atom] = removed.varies[atom]
        why = f"what its removed units give is lost among the pixels of {where(step)}"
        state.contributions.append(Contribution(i, atom, why))
    value = wide(state.weights.value(bias)) if cut and bias is not None else None
    counted: Tensor | None = None  # input channels whose contribution is known already
    for atom, dims in state.cut_atoms(x).items():
        if atom in removed.zero or (atom in zero_rows and groups > 1) or 1 not in dims:
            continue
        gone = state.weights.removed_indices(state.trace.axes[x][1], atom)
        lost = state.reason(atom, removed) or _pixels(state, step, x, w, gone if counted is None else gone[~counted[gone]])
        if isinstance(lost, Tensor):
            these = ~keep_mask(state.trace.axes[x][1], {atom: state.keep[atom]})
            counted = these if counted is None else counted | these
            value = None if not cut else lost if value is None else value + lost
        else:
            varies |= {a: "varies" for a in cut if a not in zero_rows and a not in varies}
        if not (groups > 1 and atom in cut and isinstance(lost, str)):
            state.contributions.append(Contribution(i, atom, lost))
    if value is not None:
        sizes = state.sizes(number)
        value = value.reshape(1, -1, *[1] * (len(sizes) - 2)).expand(sizes)
    return [RemovedValue(state.zero_atoms(value, number, varies), varies, value)]


def _masked_channels(state: State, step: Step, x: int, w: int) -> tuple[set[Atom], dict[Atom, str]]:
    """Of the atoms of the output channels: those whose weights are zero, and those that vary, with the reason."""
    given, removed = step.arguments, state.removed(x)
    zero_rows, varies = set[Atom](), dict[Atom, str]()
    for atom in (a for a, dims in state.cut_atoms(step.outs[0]).items() if 1 in dims):
        rows = [d for d in state.cut_atoms(w).get(atom, ()) if d == 0 or given["groups"] > 1 or given["transposed"]]
        if rows and all(state.weights.zero(w, d, atom) for d in rows):
            zero_rows.add(atom)
        elif atom not in state.cut_atoms(x) or atom in removed.varies:
            varies[atom] = removed.varies.get(atom) or f"varies with the inputs, from {where(step)} on"
    return zero_rows, varies


_FEW = 8  # channels that are checked before all are


def _part(state: State, w: int, rows: Tensor, at: Tensor) -> Tensor:
    """The weight from some input channels to some output channels."""
    return wide(state.weights.part(w, {0: rows, 1: at}))


def _pixels(state: State, step: Step, x: int, w: int, at: Tensor) -> Tensor | str:
    """What the constants of some input channels contribute: a number per output channel, or why it is not one number."""
    value = state.removed(x).value
    assert value is not None
    for d in (0, *range(2, value.dim())):
        if value.shape[d] > 1 and value.stride(d) and not same(value.index_select(1, at), d):
            return f"what its removed units give depends on position, from {state.removed(x).since or where(step)} on"
    constants = value[(0, slice(None), *[0] * (value.dim() - 2))][at]
    at, constants = at[constants != 0], constants[constants != 0]
    given = step.arguments
    if not len(at):
        return torch.zeros(state.sizes(step.outs[0])[1], dtype=torch.float64)
    if given["groups"] > 1 or given["transposed"]:
        channels = torch.zeros(1, state.sizes(x)[1], dtype=torch.float64).index_copy_(1, at, constants[None])
        return _on_a_few_pixels(state, step, x, wide(state.weights.value(w)), channels, given["groups"])
    rows = state.weights.unmasked(w, 0).nonzero()[:, 0]
    if not any(given["padding"]):
        return _without_padding(state, step, w, rows, at, constants)
    if _clipped(_part(state, w, rows[:_FEW], at).movedim(1, -1) @ constants, given["padding"], given["dilation"]):
        return _at_padding(step)
    # the constants times each tap first: what is left is one small kernel per channel
    taps = torch.zeros([size for d, size in enumerate(state.sizes(w)) if d != 1], dtype=torch.float64)
    taps[rows] = _part(state, w, rows, at).movedim(1, -1) @ constants
    return _on_a_few_pixels(state, step, x, taps[:, None], torch.ones(1, len(taps), dtype=torch.float64), len(taps))


def _without_padding(state: State, step: Step, w: int, rows: Tensor, at: Tensor, constants: Tensor) -> Tensor:
    """Every position sees every tap."""
    total = torch.zeros(state.sizes(step.outs[0])[1], dtype=torch.float64)
    spread = constants.repeat_interleave(math.prod(state.sizes(w)[2:]))
    for some in state.weights.slabs(w, rows, len(spread)):
        total[some] = _part(state, w, some, at).flatten(1) @ spread
    return total


def _clipped(taps: Tensor, padding: Sequence[int], dilation: Sequence[int]) -> bool:
    """Whether the first pixel, where taps reach into the padding, differs from a pixel inside."""
    rank = taps.dim() - 1
    paddings, dilations = (list(v) * rank if len(v) == 1 else list(v) for v in (padding, dilation))
    inside = taps[(slice(None), *(slice(-(-p // d), None) for p, d in zip(paddings, dilations)))]
    return not same(torch.stack([inside.flatten(1).sum(1), taps.flatten(1).sum(1)]), 0)


def _on_a_few_pixels(state: State, step: Step, x: int, kernel: Tensor, channels: Tensor, groups: int) -> Tensor | str:
    """Runs the convolution on an image of constants that is just large enough to have a border and an inside."""
    given = step.arguments
    stride, padding, dilation = given["stride"], given["padding"], given["dilation"]
    spread = dilation if len(dilation) > 1 else dilation * (kernel.dim() - 2)
    reach = [r * (k - 1) for k, r in zip(kernel.shape[2:], spread)]
    sizes = [min(2 * r + 3, size) if r else min(2, size) for r, size in zip(reach, state.sizes(x)[2:])]
    image = channels.reshape(1, -1, *[1] * len(sizes)).expand(-1, -1, *sizes)
    extra = given["output_padding"]
    out = torch.ops.aten.convolution(image, kernel, None, stride, padding, dilation, given["transposed"], extra, groups)
    out = out[0].flatten(1)
    if same(out, 1) or not out.numel():
        return out[:, 0]
    if any(padding) and not given["transposed"]:
        return _at_padding(step)
    return f"the constant depends on position after {where(step)}"


def _at_padding(step: Step) -> str:
    return f"a constant meets the zero padding of {step.module or 'the model'}"
