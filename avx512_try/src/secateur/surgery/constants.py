"""Folds what removed units still say into their consumers, so that dropping them changes nothing.

A removed unit has no weights left but may give a constant: its bias, a BatchNorm shift, f(0) of an activation. `ghosts` follows
it to the operators that sum it away; what those lose, one number for each output channel, goes into their bias. Where there is
no such number or no such bias, the group is reported.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graph import Atom, Expr, Group, Trace, atoms, keep_mask, norm
from ..graph.groups import HARMLESS
from ..graph.slots import owned_tensors
from .ghosts import Ghosts
from .operands import Loss
from .rescale import Edit, Refused, Scale, mean_of_squares, sizes_in_formulas
from .wiring import Keep, Silence, tensors_in

_ZERO_IS_NOTHING = HARMLESS | {"linalg_vector_norm"}  # over zeros these give what they give without them
_ANSWERED = frozenset({"mean", "scale"})  # what changes with the size is made good in weights
_TRUSTED = (nn.Linear, nn.modules.conv._ConvNd)  # with a bias instead of None they add it


@dataclass
class Folds:
    """What a cut changes besides sizes: what biases gain, weights and numbers that are scaled, and the groups for which there
    is no exact answer, with why."""

    biases: dict[Slot, Tensor] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    reasons: dict[Group, str] = field(default_factory=dict)

    def apply_(self, model: nn.Module, trace: Trace, keep: Keep | None = None) -> None:
        """Write it to a model in full size, or to one that has the kept units only."""
        for slot, value in self.biases.items():
            _add_bias(model, slot, value if keep is None else value[keep_mask(slot.axis, keep)])
        for edit in self.edits:
            for scale in edit.scales:
                _scale(model, scale, trace, keep)
            for path, name, number in edit.attributes:
                setattr(model.get_submodule(path), name, number)

    def follow(self) -> None:
        """Rows of a weight that are scaled take along a bias that they get only now."""
        for slot in [s for s in self.biases if s.new]:
            weight = slot.name.replace("bias", "weight")
            for scale in (s for edit in self.edits for s in edit.scales if s.name == weight and s.rows is not None):
                if scale.rows is not None and len(scale.rows) == len(self.biases[slot]):
                    self.biases[slot] = torch.where(scale.rows, scale.factor, 1.0) * self.biases[slot]


def find(trace: Trace, keep: Keep, silence: Silence) -> Folds:
    """What has to change so that the removed units can go. Nothing is written."""
    cut = [a for a in keep if not bool(keep[a].all())]
    bad: dict[Atom, str] = {a: why for a in cut if (why := _collective(trace, a))}
    edits: list[Edit] = []
    seen: set[int] = set()
    for atom in [a for a in cut if "mean" in a.flags]:
        try:
            edits += mean_of_squares(silence, atom, seen)
        except Refused as refused:
            bad.setdefault(atom, str(refused))
    for edit in (e for e in edits if e.why):
        bad = dict.fromkeys(edit.atoms, edit.why) | bad
    edits += sizes_in_formulas(silence, bad)
    losses = Ghosts(trace, keep, silence, {a: a.flags - _ZERO_IS_NOTHING - _ANSWERED for a in cut}).losses
    for loss in losses:
        if isinstance(loss.value, str):
            bad.setdefault(loss.atom, loss.value)
    biases = _biases(silence, [x for x in losses if isinstance(x.value, Tensor)], bad)  # also of groups that lose more
    spoilt = {loss.step for loss in losses}  # an RMSNorm over constants: its mean is another one
    found = Folds(
        biases,
        [e for e in edits if e.over not in spoilt],
        {trace.by_atom[a]: why for a, why in bad.items() if a in trace.by_atom},
    )
    found.follow()
    return found


def fold_(
    model: nn.Module, trace: Trace, keep: Keep, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> dict[Group, str]:
    """Change the consumers of removed units so that the units can go; returns, for each group where that cannot be, why.

    `model`: the traced model or a full-size copy, with zero weights for the removed units, biases kept. A linear layer or
    convolution without a bias gets one if it needs it. What a reported group says to consumers that can take it is folded, too.
    """
    found = find(trace, keep, Silence(trace, keep, dict(owned_tensors(model).values()), {}))
    found.apply_(model, trace)
    return found.reasons


def _collective(trace: Trace, atom: Atom) -> str | None:
    """Why a group has no exact answer at all: what runs over its axis depends on how many units there are."""
    for flag in sorted(atom.flags - _ZERO_IS_NOTHING - _ANSWERED):
        for step in trace.steps:
            if flag in step.name and any(a is atom for n in tensors_in(step) for e in trace.axes[n] for a in atoms(e)):
                where = f"{step.name.partition('::')[2]} in {step.module or 'the model'}"
                return f"{where} runs over the cut axis: no constant makes up for the units that are gone"
        return f"{flag} runs over the cut axis: no constant makes up for the units that are gone"
    return None


# ---------------------------------------------------------------- where they go


class Slot(NamedTuple):
    """A bias that a consumer adds to dim `dim` of its output; `new`: the parameter is None so far."""

    name: str
    dim: int
    new: bool
    axis: Expr


def find_slot(flow: Silence, i: int) -> Slot | None:
    """The bias of a contraction of data with a weight: its own operand, or the parameter beside the weight."""
    step, trace = flow.trace.steps[i], flow.trace
    given = [getattr(a, "number", None) for a in step.args]
    kind = step.name.partition("::")[2]
    if "conv" in kind or kind == "linear":
        data, weight, bias = (*given, None, None)[:3]
    elif kind in ("addmm", "baddbmm", "mm", "bmm"):
        bias, data, weight = given[:3] if kind.startswith(("add", "badd")) else (None, *given[:2])
    else:
        return None
    if weight is None or data is None or not step.outs:
        return None
    axes = trace.axes[step.outs[0]]
    dim = len(trace.axes[data]) - len(trace.axes[weight]) + 1 if "conv" in kind else len(axes) - 1
    if weight not in flow.origin and data in flow.origin:
        weight, dim = data, len(axes) - 2
    names = flow.origin.get(weight, frozenset())
    if weight not in flow.origin or not names:
        return None
    slots = flow.parameters
    if bias is not None:
        own = flow.origin.get(bias, frozenset())
        name = next(iter(own)) if len(own) == 1 else ""
        return Slot(name, dim, False, axes[dim]) if name in slots and slots[name].shape == (axes[dim].size,) else None
    return _beside(flow, i, sorted(names), dim, axes[dim])


def _beside(flow: Silence, i: int, names: list[str], dim: int, axis: Expr) -> Slot | None:
    """The bias parameter that stands beside a weight under the same name, `weight` read as `bias`."""
    step = flow.trace.steps[i]
    for path, local in [n.rpartition(".")[::2] for n in names] + [(step.module, "weight")]:
        with contextlib.suppress(AttributeError):
            owner, other = flow.trace.model.get_submodule(path), local.replace("weight", "bias")
            if other == local or other not in owner._parameters:
                continue
            value, name = owner._parameters[other], f"{path}.{other}" if path else other
            if value is None and isinstance(owner, _TRUSTED):
                return Slot(name, dim, True, norm(axis))
            if value is not None and value.shape == (axis.size,) and _is_added(flow, step.outs[0], name):
                return Slot(name, dim, False, axis)
    return None


def _is_added(flow: Silence, number: int, name: str) -> bool:
    """Whether the next thing that happens to a tensor is that this bias is added to it."""
    for j in flow.readers.get(number, ()):
        step = flow.trace.steps[j]
        if step.name in ("aten::add", "aten::add_") and not step.kwargs:
            return any(flow.origin.get(n) == frozenset({name}) for n in tensors_in(step))
        if step.outs and "view" in step.name:
            return _is_added(flow, step.outs[0], name)
    return False


def _biases(flow: Silence, losses: list[Loss], bad: dict[Atom, str]) -> dict[Slot, Tensor]:
    """What to add to each bias. A weight that is applied several times has to lose the same each time."""
    lost: dict[str, dict[int, dict[Atom, Tensor]]] = {}
    slots: dict[str, Slot] = {}
    for loss in losses:
        assert isinstance(loss.value, Tensor)
        slot = find_slot(flow, loss.step)
        kept = None if slot is None else keep_mask(slot.axis, flow.keep)
        if slot is None or kept is None or len(kept) != len(loss.value):
            if bool(loss.value.any()):
                step = flow.trace.steps[loss.step]
                where = f"{step.name.partition('::')[2]} in {step.module or 'the model'}"
                bad.setdefault(loss.atom, f"its removed units give a constant to {where}, which has no bias to take it")
            continue
        slots[slot.name] = slot
        at = lost.setdefault(slot.name, {}).setdefault(loss.step, {})
        at[loss.atom] = at.get(loss.atom, 0.0) + loss.value * kept
    uneven: set[tuple[str, Atom]] = set()
    for name, steps in lost.items():
        for i in _users(flow, slots[name], set(steps)):  # calls that lose nothing count, too
            steps.setdefault(i, {})
        for atom in {a for each in steps.values() for a in each}:
            each = [s.get(atom, torch.zeros(slots[name].axis.size, dtype=torch.float64)) for s in steps.values()]
            biggest = max(float(v.abs().max()) for v in each)
            if any(not torch.allclose(v, each[0], 1e-9, 1e-9 * biggest) for v in each):
                bad.setdefault(atom, f"{name.rpartition('.')[0] or name} is applied more than once, with different constants")
                uneven.add((name, atom))
    total: dict[Slot, Tensor] = {}
    for name, steps in lost.items():
        values = [v for a, v in next(iter(steps.values())).items() if (name, a) not in uneven]
        if values and bool((value := torch.stack(values).sum(0)).any()):
            total[slots[name]] = value
    return total


def _users(flow: Silence, slot: Slot, steps: set[int]) -> set[int]:
    """All steps that use this bias, or the weight beside it when it is still to be made."""
    names = {slot.name} if not slot.new else {n for i in steps for n in _weight_names(flow, i)}
    found = {n for n, own in flow.origin.items() if own and own <= names}
    users = {j for n in found for j in flow.readers.get(n, ()) if not flow.trace.steps[j].weights}
    if slot.new:
        return users
    added = {j for j in users if flow.trace.steps[j].name in ("aten::add", "aten::add_")}
    return (users - added) | {i for j in added for n in tensors_in(flow.trace.steps[j]) for i in _before(flow, n)}


def _before(flow: Silence, number: int) -> set[int]:
    """The contraction whose result reaches an addition, past views."""
    while number in flow.makers:
        i = flow.makers[number]
        step = flow.trace.steps[i]
        if "view" not in step.name:
            return {i} if find_slot(flow, i) is not None else set()
        number = tensors_in(step)[0]
    return set()


def _weight_names(flow: Silence, i: int) -> set[str]:
    return {name for n in tensors_in(flow.trace.steps[i]) for name in flow.origin.get(n, ())}


def _add_bias(model: nn.Module, slot: Slot, value: Tensor) -> None:
    path, _, local = slot.name.rpartition(".")
    owner = model.get_submodule(path)
    if not slot.new:
        bias = owner._parameters[local]
        assert bias is not None
        bias.data = (bias.detach().double() + value.to(bias.device)).to(bias)
        return
    like = next(p for n, p in owner._parameters.items() if p is not None and "weight" in n)
    owner.register_parameter(local, nn.Parameter(value.to(like), requires_grad=like.requires_grad))


def _scale(model: nn.Module, scale: Scale, trace: Trace, keep: Keep | None) -> None:
    parameter = model.get_parameter(scale.name)
    factor = torch.tensor(scale.factor, dtype=torch.float64)
    if scale.rows is not None:
        rows = scale.rows if keep is None else scale.rows[keep_mask(trace.dims[scale.name][scale.dim], keep)]
        factor = torch.where(rows, factor, 1.0).reshape([-1 if d == scale.dim else 1 for d in range(parameter.dim())])
    parameter.data = factor.to(parameter) * (parameter.detach() + scale.offset) - scale.offset
