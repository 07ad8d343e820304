"""Folds what removed units still say into their consumers, so that dropping them changes nothing.

A removed unit has no weights left but may give a constant: its bias, a BatchNorm shift, f(0) of an activation. `ghosts` follows
it to the operators that sum it away; what those lose, one number for each output channel, goes into their bias. Where there is
no such number or no such bias, the group is reported.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...axes import HARMLESS, Atom, Expr, Group, atoms, keep_mask, norm
from ...edit import owned_tensors
from ...trace import Trace
from .operands import Contribution, is_scaled
from .propagate import Propagation
from .rescale import Edit, Scale, mean_of_squares, prepares, sizes_in_formulas
from .wiring import Keep, Silence, tensors_in

_ZERO_IS_NOTHING = HARMLESS | {"linalg_vector_norm"}  # over zeros these give what they give without them
_ANSWERED = frozenset({"mean", "scale"})  # what changes with the size is made good in weights
_DIGIT = 128
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ADDING = {layer.forward for layer in (nn.Linear, *_CONVOLUTIONS)}  # with a bias instead of None they add it


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
            _add_bias(model, slot, trace, value, keep)
        for edit in self.edits:
            for scale in edit.scales:
                _scale(model, scale, trace, keep)
            for path, name, number in edit.attributes:
                setattr(model.get_submodule(path), name, number)

    def follow(self, flow: Silence) -> None:
        """Rows of a weight that are scaled take along a bias that they get only now."""
        scales = [s for edit in self.edits for s in edit.scales if s.rows is not None]
        for slot in [s for s in self.biases if s.new and scales]:
            own = {id(p) for p in flow.trace.model.get_submodule(slot.name.rpartition(".")[0]).parameters()}
            for scale in (s for s in scales if id(flow.parameters.get(s.name)) in own):
                if scale.rows is not None and len(scale.rows) == len(self.biases[slot]):
                    factor = torch.tensor(scale.factor, dtype=torch.float64)
                    self.biases[slot] = torch.where(scale.rows, factor, 1.0) * self.biases[slot]


def find(trace: Trace, keep: Keep, silence: Silence) -> Folds:
    """What has to change so that the removed units can go. Nothing is written."""
    cut = [a for a in keep if not bool(keep[a].all())]
    bad: dict[Atom, str] = {a: why for a in cut if (why := _collective(trace, a))}
    edits = mean_of_squares(silence, [a for a in cut if "mean" in a.flags], bad)
    edits += sizes_in_formulas(silence, bad)
    losses = Propagation(trace, keep, silence, {a: a.flags - _ZERO_IS_NOTHING - _ANSWERED for a in cut}).losses
    for loss in losses:
        if isinstance(loss.value, str):
            bad.setdefault(loss.atom, loss.value)
    biases = _biases(silence, [x for x in losses if isinstance(x.value, Tensor)], bad)  # also of groups that lose more
    spoilt = {loss.step for loss in losses}  # an RMSNorm over constants: its mean is another one
    found = Folds(
        biases,
        [e for e in edits if not e.over or e.over - spoilt],
        {trace.by_atom[a]: why for a, why in bad.items() if a in trace.by_atom},
    )
    found.follow(silence)
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
                where = f"{step.kind} in {step.module or 'the model'}"
                return f"{where} runs over the cut axis: no constant makes up for the units that are gone"
        return f"{flag} runs over the cut axis: no constant makes up for the units that are gone"
    return None


# ---------------------------------------------------------------- where they go


class Slot(NamedTuple):
    """A bias that a consumer adds to an axis of its output; `new`: the parameter is None so far. `at`: the entries that are
    added there, where they are a part of the parameter."""

    name: str
    new: bool
    axis: Expr
    at: tuple[int, ...] | None = None


def find_slot(flow: Silence, i: int) -> Slot | None:
    """The bias of a contraction of data with a weight: its own operand, or the one that its layer has been made without."""
    step, trace = flow.trace.steps[i], flow.trace
    given = [getattr(a, "number", None) for a in step.args]
    kind = step.kind
    if "conv" in kind or kind == "linear":
        data, weight, bias = (*given, None, None)[:3]
    elif kind in ("addmm", "baddbmm", "mm", "bmm"):
        bias, data, weight = given[:3] if kind.startswith(("add", "badd")) else (None, *given[:2])
    else:
        return None
    if weight is None or data is None or not step.outs or is_scaled(step):
        return None
    names = flow.origin.get(weight, frozenset())
    if not names:  # a weight on the left makes rows, and biases are added to columns
        return None
    axes = trace.axes[step.outs[0]]
    dim = len(trace.axes[data]) - len(trace.axes[weight]) + 1 if "conv" in kind else len(axes) - 1
    if bias is None:
        slot = _beside(flow, i, names, axes[dim])
        bias = _added(flow, step.outs[0]) if slot is None and dim == len(axes) - 1 else None
        return slot if bias is None else _part(flow, bias, axes[dim])
    return _part(flow, bias, axes[dim])


def _part(flow: Silence, number: int, axis: Expr) -> Slot | None:
    """The parameter that a bias is, or the part of one."""
    names = flow.origin.get(number, frozenset())
    name = next(iter(names)) if len(names) == 1 else ""
    if name not in flow.parameters or flow.parameters[name].dim() != 1:
        return None
    at = _entries(flow, number, name)
    if at is None or len(at) != axis.size or len(set(at)) != len(at):
        return None
    return Slot(name, False, axis, None if at == tuple(range(len(flow.parameters[name]))) else at)


def _entries(flow: Silence, number: int, name: str) -> tuple[int, ...] | None:
    """Which entries of a vector a tensor made of it holds; None where it is more than a choice of them."""
    size = len(flow.parameters[name])
    if flow.origin[number] != {name}:
        return None
    if flow.trace.names.get(number) == name:
        return tuple(range(size))
    probe = copy.copy(flow)
    probe.zeros = {}

    def seen(entries: Tensor) -> Tensor:
        probe.tensors = {name: entries.double()}
        return probe.value(number).double().cpu()

    # numbers of eight bits at most, which every cast leaves as they are: the index by its digits, and others that are not whole
    index = torch.arange(size)
    at = (seen(index % _DIGIT) + _DIGIT * seen(index // _DIGIT % _DIGIT) + _DIGIT**2 * seen(index // _DIGIT**2)).long()
    others = torch.randint(1 - 2 * _DIGIT, 2 * _DIGIT, (size,), generator=torch.Generator().manual_seed(0)).double() / 8
    inside = at.dim() == 1 and bool(((at >= 0) & (at < size)).all())
    return tuple(at.tolist()) if inside and all(torch.equal(seen(v), v[at]) for v in (others, -others)) else None


def _beside(flow: Silence, i: int, names: frozenset[str], axis: Expr) -> Slot | None:
    """The bias that the layer which runs the step has been made without."""
    path = flow.trace.steps[i].module
    owner = flow.trace.model.get_submodule(path)
    if type(owner).forward not in _ADDING or owner._parameters.get("bias", ...) is not None:
        return None
    own = any(p is flow.parameters.get(n) for p in owner.parameters() for n in names)  # not what a hook before it does
    return Slot(f"{path}.bias".lstrip("."), True, norm(axis)) if own else None


def _added(flow: Silence, number: int) -> int | None:
    """What is made of weights and added to a tensor by the only thing that happens to it, past views."""
    readers = flow.readers.get(number, ())
    if len(readers) != 1 or number in flow.trace.record.returned:  # somebody sees it without what is added
        return None
    step = flow.trace.steps[readers[0]]
    if step.name in ("aten::add", "aten::add_") and not step.kwargs:
        return next((n for n in tensors_in(step) if n in flow.origin), None)
    return _added(flow, step.outs[0]) if step.outs and "view" in step.name else None


def _biases(flow: Silence, losses: list[Contribution], bad: dict[Atom, str]) -> dict[Slot, Tensor]:
    """What to add to each bias. A weight that is applied several times has to lose the same each time."""
    lost: dict[Slot, dict[int, dict[Atom, Tensor]]] = {}
    for loss in losses:
        assert isinstance(loss.value, Tensor)
        slot = find_slot(flow, loss.step)
        kept = None if slot is None else keep_mask(slot.axis, flow.keep)
        if slot is None or kept is None or len(kept) != len(loss.value):
            if bool(loss.value.any()):
                step = flow.trace.steps[loss.step]
                where = f"{step.kind} in {step.module or 'the model'}"
                bad.setdefault(loss.atom, f"its removed units give a constant to {where}, which has no bias to take it")
            continue
        if not bool(loss.value.isfinite().all()):
            bad.setdefault(loss.atom, "its removed units give no number: they are divided by zero, or grow beyond all bounds")
            continue
        at = lost.setdefault(slot, {}).setdefault(loss.step, {})
        at[loss.atom] = at.get(loss.atom, 0.0) + loss.value * kept
    uneven: set[tuple[Slot, Atom]] = set()
    for slot, steps in lost.items():
        for i in _users(flow, slot, set(steps)):  # calls that lose nothing count, too
            steps.setdefault(i, {})
        for atom in {a for each in steps.values() for a in each}:
            each = [s.get(atom, torch.zeros(slot.axis.size, dtype=torch.float64)) for s in steps.values()]
            if len(each) == 1:
                continue
            biggest = max(float(v.abs().max()) for v in each)
            if any(not torch.allclose(v, each[0], 1e-9, 1e-9 * biggest) for v in each):
                where = slot.name.rpartition(".")[0] or slot.name
                bad.setdefault(atom, f"{where} is applied more than once, with different constants")
                uneven.add((slot, atom))
    total: dict[Slot, Tensor] = {}
    for slot, steps in lost.items():
        values = [v for a, v in next(iter(steps.values())).items() if (slot, a) not in uneven]
        if values and bool((value := torch.stack(values).sum(0)).any()):
            total[slot] = value
    return total


def _users(flow: Silence, slot: Slot, steps: set[int]) -> set[int]:
    """All steps that use this bias, or the weight beside it when it is still to be made. -1: the model returns what is made of
    it."""
    names = {slot.name} if not slot.new else {n for i in steps for n in _weight_names(flow, i)}
    found = {n for name in names for n in flow.made_with.get(name, ()) if not slot.new or flow.origin[n] <= names}
    if slot.at is not None:
        held = {n: _entries(flow, n, slot.name) for n in found if n in flow.readers or n in flow.trace.record.returned}
        found = {n for n, at in held.items() if at is None or not set(at).isdisjoint(slot.at)}
    users = {j for n in found for j in flow.readers.get(n, ()) if not prepares(flow, flow.trace.steps[j])}
    if slot.new:  # other code that takes the weight goes without the bias
        return {j for j in users if flow.trace.steps[j].module == slot.name.rpartition(".")[0]}
    added = {j for j in users if flow.trace.steps[j].name in ("aten::add", "aten::add_")}
    before = {j: {i for n in tensors_in(flow.trace.steps[j]) for i in _before(flow, n, slot.name)} or {j} for j in added}
    shown = {-1} if found & flow.trace.record.returned else set()
    return (users - added) | shown | {i for each in before.values() for i in each}


def _before(flow: Silence, number: int, bias: str) -> set[int]:
    """The contraction whose result reaches the addition of its bias, past views."""
    while number in flow.makers:
        i = flow.makers[number]
        step = flow.trace.steps[i]
        if "view" not in step.name:
            slot = find_slot(flow, i)
            return {i} if slot is not None and slot.name == bias else set()
        number = tensors_in(step)[0]
    return set()


def _weight_names(flow: Silence, i: int) -> set[str]:
    return {name for n in tensors_in(flow.trace.steps[i]) for name in flow.origin.get(n, ())}


def _add_bias(model: nn.Module, slot: Slot, trace: Trace, value: Tensor, keep: Keep | None) -> None:
    path, _, local = slot.name.rpartition(".")
    owner = model.get_submodule(path)
    if slot.at is not None:
        value = torch.zeros(trace.dims[slot.name][0].size, dtype=value.dtype).index_put_((torch.tensor(slot.at),), value)
    if keep is not None:
        value = value[keep_mask(slot.axis if slot.at is None else trace.dims[slot.name][0], keep)]
    if not slot.new:
        bias = owner._parameters[local]
        assert bias is not None
        bias.data = (bias.detach().double() + value.to(bias.device)).to(bias)
        return
    like = next(owner.parameters())  # a parametrized weight lies in a module below
    owner.register_parameter(local, nn.Parameter(value.to(like), requires_grad=like.requires_grad))


def _scale(model: nn.Module, scale: Scale, trace: Trace, keep: Keep | None) -> None:
    parameter = model.get_parameter(scale.name)
    factor = torch.tensor(scale.factor, dtype=torch.float64)
    if scale.rows is not None:
        rows = scale.rows if keep is None else scale.rows[keep_mask(trace.dims[scale.name][scale.dim], keep)]
        factor = torch.where(rows, factor, 1.0).reshape([-1 if d == scale.dim else 1 for d in range(parameter.dim())])
    parameter.data = factor.to(parameter) * (parameter.detach() + scale.offset) - scale.offset
