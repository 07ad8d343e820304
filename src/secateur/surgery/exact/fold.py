"""Folds the constants of removed units into their consumers, so that dropping the units changes nothing.

A removed unit has no weights left but may be a constant: its bias, a BatchNorm shift, f(0) of an activation. `propagate`
follows it to the operators that sum it away; what those lose, one number per output channel, is added to their bias. Where
there is no such number or no such bias, the group is reported as not exact.
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
from ...ops import Contraction, Convolution
from ...trace import Step, Trace
from .propagate import propagate
from .rescale import Edit, Scale, mean_of_squares, prepares, sizes_in_formulas
from .values import Contribution, base_name, is_scaled, operands, where
from .weights import Keep, MaskedWeights

_ZERO_IS_NOTHING = HARMLESS | {"linalg_vector_norm"}  # zeros do not change what these give
_ANSWERED = frozenset({"mean", "scale"})  # corrected by scaling weights (`rescale`)
_DIGIT = 128
_VIEWS = frozenset({"aten::view", "aten::_unsafe_view", "aten::reshape"})
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ADDING = {layer.forward for layer in (nn.Linear, *_CONVOLUTIONS)}  # layers that add `self.bias` if it is not None


@dataclass
class Folds:
    """What a cut changes besides sizes: additions to biases, scaled weights and numbers, and the groups that are not exact,
    with the reason."""

    biases: dict[Slot, Tensor] = field(default_factory=dict)
    edits: list[Edit] = field(default_factory=list)
    reasons: dict[Group, str] = field(default_factory=dict)

    def apply_(self, model: nn.Module, trace: Trace, keep: Keep | None = None) -> None:
        """Writes the changes to a full-size model, or to one that has the kept units only."""
        for slot, value in self.biases.items():
            _add_bias(model, slot, trace, value, keep)
        for edit in self.edits:
            for scale in edit.scales:
                _scale(model, scale, trace, keep)
            for path, name, number in edit.attributes:
                setattr(model.get_submodule(path), name, number)

    def follow(self, flow: MaskedWeights) -> None:
        """Scales new biases along with the rows of the weights that they are added to."""
        scales = [s for edit in self.edits for s in edit.scales if s.rows is not None]
        for slot in [s for s in self.biases if s.new and scales]:
            own = {id(p) for p in flow.trace.model.get_submodule(slot.name.rpartition(".")[0]).parameters()}
            for scale in (s for s in scales if id(flow.parameters.get(s.name)) in own):
                if scale.rows is not None and len(scale.rows) == len(self.biases[slot]):
                    factor = torch.tensor(scale.factor, dtype=torch.float64)
                    self.biases[slot] = torch.where(scale.rows, factor, 1.0) * self.biases[slot]


def find(trace: Trace, keep: Keep, weights: MaskedWeights) -> Folds:
    """Finds what has to change so that the removed units can be dropped. Writes nothing."""
    cut = [a for a in keep if not bool(keep[a].all())]
    bad: dict[Atom, str] = {a: why for a in cut if (why := _collective(trace, a))}
    edits = mean_of_squares(weights, [a for a in cut if "mean" in a.flags], bad)
    edits += sizes_in_formulas(weights, bad)
    losses = propagate(trace, keep, weights, {a: a.flags - _ZERO_IS_NOTHING - _ANSWERED for a in cut})
    for loss in losses:
        if isinstance(loss.value, str):
            bad.setdefault(loss.atom, loss.value)
    biases = _biases(weights, [x for x in losses if isinstance(x.value, Tensor)], bad)  # also for groups that are not exact
    spoilt = {loss.step for loss in losses}  # an RMSNorm over constants has another mean
    found = Folds(
        biases,
        [e for e in edits if not e.over or e.over - spoilt],
        {trace.by_atom[a]: why for a, why in bad.items() if a in trace.by_atom},
    )
    found.follow(weights)
    return found


def fold_(
    model: nn.Module, trace: Trace, keep: Keep, args: Any = None, kwargs: Mapping[str, Any] | None = None
) -> dict[Group, str]:
    """Changes the consumers of removed units so that the units can be dropped; returns the groups that are not exact, and why.

    `model`: the traced model or a full-size copy, with zero weights for the removed units, biases kept. A linear layer or
    convolution without a bias gets one if it needs it. Constants of reported groups are folded where a consumer can take them.
    """
    found = find(trace, keep, MaskedWeights(trace, keep, dict(owned_tensors(model).values()), {}))
    found.apply_(model, trace)
    return found.reasons


def _collective(trace: Trace, atom: Atom) -> str | None:
    """Why a group cannot be cut exactly at all: an operator that runs over its axis depends on how many units there are."""
    for flag in sorted(atom.flags - _ZERO_IS_NOTHING - _ANSWERED):
        for step in trace.steps:
            if flag in _kinds(step) and any(a is atom for n in step.inputs for e in trace.axes[n] for a in atoms(e)):
                return f"{where(step)} runs over the cut axis: no constant makes up for the units that are gone"
        return f"{flag} runs over the cut axis: no constant makes up for the units that are gone"
    return None


def _kinds(step: Step) -> tuple[str, ...]:
    """The names under which a step marks axes: a norm of the smallest entries counts as a normalisation."""
    over = step.operator.over
    return (over, "norm") if over == "linalg_vector_norm" else (over,)


# ---------------------------------------------------------------- where they go


class Slot(NamedTuple):
    """A bias that a consumer adds along an axis of its output. `new`: the parameter is None so far. `at`: which entries of the
    parameter are added, where it is only a part of them."""

    name: str
    new: bool
    axis: Expr
    at: tuple[int, ...] | None = None


def find_slot(flow: MaskedWeights, i: int) -> Slot | None:
    """The bias of a contraction of data with a weight: its own operand, or the one that its layer was created without."""
    step, trace = flow.trace.steps[i], flow.trace
    values = step.operator.values
    if not isinstance(values, Contraction | Convolution):
        return None
    data, weight, bias = operands(step, values.left, values.right, values.bias)
    if weight is None or data is None or not step.outs or is_scaled(step):
        return None
    names = flow.origin.get(weight, frozenset())
    if not names:  # a weight on the left produces rows, and biases are added to columns
        return None
    axes = trace.axes[step.outs[0]]
    convolves = isinstance(values, Convolution)
    dim = len(trace.axes[data]) - len(trace.axes[weight]) + 1 if convolves else len(axes) - 1
    if bias is None:
        slot = _beside(flow, i, names, axes[dim])
        bias = _added(flow, step.outs[0]) if slot is None and dim == len(axes) - 1 else None
        return slot if bias is None else _part(flow, bias, axes[dim])
    return _part(flow, bias, axes[dim])


def _part(flow: MaskedWeights, number: int, axis: Expr) -> Slot | None:
    """The parameter of which a bias is all or a part."""
    names = flow.origin.get(number, frozenset())
    name = next(iter(names)) if len(names) == 1 else ""
    if name not in flow.parameters or flow.parameters[name].dim() != 1:
        return None
    at = _entries(flow, number, name)
    if at is None or len(at) != axis.size or len(set(at)) != len(at):
        return None
    return Slot(name, False, axis, None if at == tuple(range(len(flow.parameters[name]))) else at)


def _entries(flow: MaskedWeights, number: int, name: str) -> tuple[int, ...] | None:
    """Which entries of a vector a tensor computed from it holds; None where it is not a plain selection."""
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

    # numbers of at most eight bits, which no cast changes: the digits of the index, and others that are not integers
    index = torch.arange(size)
    at = (seen(index % _DIGIT) + _DIGIT * seen(index // _DIGIT % _DIGIT) + _DIGIT**2 * seen(index // _DIGIT**2)).long()
    others = torch.randint(1 - 2 * _DIGIT, 2 * _DIGIT, (size,), generator=torch.Generator().manual_seed(0)).double() / 8
    inside = at.dim() == 1 and bool(((at >= 0) & (at < size)).all())
    return tuple(at.tolist()) if inside and all(torch.equal(seen(v), v[at]) for v in (others, -others)) else None


def _beside(flow: MaskedWeights, i: int, names: frozenset[str], axis: Expr) -> Slot | None:
    """The bias that the layer of this step was created without."""
    path = flow.trace.steps[i].module
    owner = flow.trace.model.get_submodule(path)
    if type(owner).forward not in _ADDING or owner._parameters.get("bias", ...) is not None:
        return None
    own = any(p is flow.parameters.get(n) for p in owner.parameters() for n in names)  # not a product in a hook of the layer
    return Slot(f"{path}.bias".lstrip("."), True, norm(axis)) if own else None


def _added(flow: MaskedWeights, number: int) -> int | None:
    """The tensor computed from weights that is added to a tensor by the only step that reads it, past views."""
    readers = flow.readers.get(number, ())
    if len(readers) != 1 or number in flow.trace.record.returned:  # others read it without the addition
        return None
    step = flow.trace.steps[readers[0]]
    if base_name(step) == "aten::add" and not step.kwargs:
        return next((n for n in step.inputs if n in flow.origin), None)
    return _added(flow, step.outs[0]) if step.outs and step.name in _VIEWS else None


def _biases(flow: MaskedWeights, losses: list[Contribution], bad: dict[Atom, str]) -> dict[Slot, Tensor]:
    """What to add to each bias. A layer that is applied several times has to lose the same each time."""
    lost: dict[Slot, dict[int, dict[Atom, Tensor]]] = {}
    for loss in losses:
        assert isinstance(loss.value, Tensor)
        slot = find_slot(flow, loss.step)
        kept = None if slot is None else keep_mask(slot.axis, flow.keep)
        if slot is None or kept is None or len(kept) != len(loss.value):
            if bool(loss.value.any()):
                place = where(flow.trace.steps[loss.step])
                bad.setdefault(loss.atom, f"its removed units give a constant to {place}, which has no bias to take it")
            continue
        if not bool(loss.value.isfinite().all()):
            bad.setdefault(loss.atom, "its removed units give no number that is finite (a division by zero, or an overflow)")
            continue
        at = lost.setdefault(slot, {}).setdefault(loss.step, {})
        at[loss.atom] = at.get(loss.atom, 0.0) + loss.value * kept
    uneven: set[tuple[Slot, Atom]] = set()
    for slot, steps in lost.items():
        for i in _users(flow, slot, set(steps)):  # calls that lose nothing count as well
            steps.setdefault(i, {})
        for atom in {a for each in steps.values() for a in each}:
            each = [s.get(atom, torch.zeros(slot.axis.size, dtype=torch.float64)) for s in steps.values()]
            if len(each) == 1:
                continue
            biggest = max(float(v.abs().max()) for v in each)
            if any(not torch.allclose(v, each[0], 1e-9, 1e-9 * biggest) for v in each):
                layer = slot.name.rpartition(".")[0] or slot.name
                bad.setdefault(atom, f"{layer} is applied more than once, with different constants")
                uneven.add((slot, atom))
    total: dict[Slot, Tensor] = {}
    for slot, steps in lost.items():
        values = [v for a, v in next(iter(steps.values())).items() if (slot, a) not in uneven]
        if values and bool((value := torch.stack(values).sum(0)).any()):
            total[slot] = value
    return total


def _users(flow: MaskedWeights, slot: Slot, steps: set[int]) -> set[int]:
    """All steps that use this bias, or the weight beside it if the bias is new. -1: the model returns a tensor computed from
    it."""
    names = {slot.name} if not slot.new else {n for i in steps for n in _weight_names(flow, i)}
    found = {n for name in names for n in flow.made_with.get(name, ()) if not slot.new or flow.origin[n] <= names}
    if slot.at is not None:
        held = {n: _entries(flow, n, slot.name) for n in found if n in flow.readers or n in flow.trace.record.returned}
        found = {n for n, at in held.items() if at is None or not set(at).isdisjoint(slot.at)}
    users = {j for n in found for j in flow.readers.get(n, ()) if not prepares(flow, flow.trace.steps[j])}
    if slot.new:  # other code that uses the weight does not add the bias
        return {j for j in users if flow.trace.steps[j].module == slot.name.rpartition(".")[0]}
    added = {j for j in users if base_name(flow.trace.steps[j]) == "aten::add"}
    before = {j: {i for n in flow.trace.steps[j].inputs for i in _before(flow, n, slot.name)} or {j} for j in added}
    shown = {-1} if found & flow.trace.record.returned else set()
    return (users - added) | shown | {i for each in before.values() for i in each}


def _before(flow: MaskedWeights, number: int, bias: str) -> set[int]:
    """The contraction whose result reaches the addition of its bias, past views."""
    while number in flow.makers:
        i = flow.makers[number]
        step = flow.trace.steps[i]
        if step.name not in _VIEWS:
            slot = find_slot(flow, i)
            return {i} if slot is not None and slot.name == bias else set()
        number = step.inputs[0]
    return set()


def _weight_names(flow: MaskedWeights, i: int) -> set[str]:
    return {name for n in flow.trace.steps[i].inputs for name in flow.origin.get(n, ())}


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
