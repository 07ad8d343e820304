"""Folds what removed units still say into their consumers, so that dropping them changes nothing.

A removed unit has no weights left but may give a constant: its bias, a BatchNorm shift, f(0) of an activation. Constants are
found by running: what do the kept outputs of an operator lose when the removed units of its inputs are not there? Where that is
one number for each output channel, wherever one looks, it goes into a bias. Anything else is reported, and its group stays.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graph import Atom, Expr, Group, Trace, atoms, norm
from ..graph.groups import HARMLESS
from ..graph.tracer import Step
from .replay import Keep, LeftTrace, Replay, numbers, paired
from .rescale import Edit, Refused, agrees_after, mean_of_squares, sizes_in_formulas

_ZERO_IS_NOTHING = HARMLESS | {"linalg_vector_norm"}  # over zeros these give what they give without them
_TRUSTED = (nn.Linear, nn.modules.conv._ConvNd)  # with a bias instead of None they add it
# step, atom -> what each output channel loses; a sentence: that is no constant; None: it is lost where no bias is
Found = dict[tuple[int, Atom], Tensor | str | None]


def fold_(model: nn.Module, trace: Trace, keep: Keep, args: Any, kwargs: Mapping[str, Any] | None = None) -> dict[Group, str]:
    """Change the consumers of removed units so that the units can go; returns, for each group where that cannot be, why.

    `model`: a full-size copy in eval mode with zero weights for the removed units, biases kept. A linear layer or
    convolution without a bias gets one if it needs it. A group that is reported is left as it is everywhere.
    """
    replay = Replay(model, trace, keep, args, kwargs)
    bad: dict[Atom, str] = {a: why for a in replay.keep if (why := _collective(trace, a))}
    edits: list[Edit] = []
    try:
        seen: set[int] = set()
        for atom in [a for a in replay.keep if a not in bad and "mean" in a.flags]:
            try:
                edits += mean_of_squares(replay, atom, seen)
            except Refused as refused:
                bad[atom] = str(refused)
        edits += sizes_in_formulas(replay, bad)
        biases = _biases(replay, _constants(replay, [a for a in replay.keep if a not in bad], bad), bad)
    except LeftTrace as left:
        return {trace.by_atom[a]: f"its constants cannot be found: {left}" for a in replay.keep}
    for slot, value in biases.items():
        _add_bias(model, slot, value)
    for edit in edits:
        if not edit.atoms & bad.keys():
            edit.apply()
            for slot in biases:
                _follow(model, slot, edit)
    return {trace.by_atom[a]: why for a, why in bad.items()}


def _collective(trace: Trace, atom: Atom) -> str | None:
    """Why a group has no exact answer at all: what runs over its axis depends on how many units there are."""
    for flag in sorted(atom.flags - _ZERO_IS_NOTHING - {"mean", "scale"}):
        for step in trace.steps:
            if flag in step.name and any(a is atom for n in numbers(step) for e in trace.axes[n] for a in atoms(e)):
                where = f"{step.name.partition('::')[2]} in {step.module or 'the model'}"
                return f"{where} runs over the cut axis: no constant makes up for the units that are gone"
        return f"{flag} runs over the cut axis: no constant makes up for the units that are gone"
    return None


# ---------------------------------------------------------------- finding the constants


class _Look:
    """Visits a run and writes down what kept outputs lose, for each operator and atom."""

    def __init__(self, replay: Replay, judged: list[Atom]) -> None:
        self.replay, self.judged, self.found = replay, set(judged), Found()

    def __call__(self, i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        replay = self.replay
        data = [n for n in numbers(step) if n not in replay.origin] or numbers(step)
        cut = [a for a in dict.fromkeys(a for n in data for a in replay.cut_atoms(n)) if a in self.judged]
        if not cut or _mixes_nothing(func):
            return func(*args, **kwargs)
        loud: list[bool] = []
        paired(step, args, kwargs, lambda t, n: loud.append(n in data and replay.says(t, n)) or t)
        if not any(loud):  # nothing is said, so nothing is lost; a bias that other calls share has to know
            slot = find_slot(replay, i)
            self.found.update({(i, a): torch.zeros(slot.axis.size, dtype=torch.float64) for a in cut if slot is not None})
            return func(*args, **kwargs)
        given = paired(step, args, kwargs, lambda t, _: t.detach().clone().double() if t.is_floating_point() else t.clone())
        out = func(*args, **kwargs)
        gone: list[Atom] = []

        def without(t: Tensor, n: int) -> Tensor:
            lost = [a for a in gone if a in replay.cut_atoms(n)] if n in data else []
            return replay.zeroed(t.clone(), n, lost)  # a clone, since the operator may write to it

        def outputs() -> list[Tensor]:
            changed = paired(step, tuple(given[0]), given[1], without)
            made = func(*changed[0], **changed[1])
            return [o for o in (made if isinstance(made, list | tuple) else [made]) if isinstance(o, Tensor)]

        before = outputs()
        for atom in cut:
            gone.append(atom)
            after = outputs()
            for verdict in self.judge(i, step, before, after):
                self.found[i, atom] = verdict
            before = after
        return out

    def judge(self, i: int, step: Step, before: list[Tensor], after: list[Tensor]) -> list[Tensor | str | None]:
        """One vector for the channels, a sentence, or None where something is lost and no bias can take it; [] for nothing."""
        replay, slot = self.replay, find_slot(self.replay, i)
        losses = [
            replay.zeroed(b - a, n, replay.cut_atoms(n)) for b, a, n in zip(before, after, step.outs) if b.is_floating_point()
        ]
        noise = [64 * torch.finfo(torch.float64).eps * float(b.abs().max()) if b.numel() else 0.0 for b in before]
        sizes = [float(x.abs().max()) if x.numel() else 0.0 for x in losses]
        if slot is None:
            return [None] if any(not s <= e for s, e in zip(sizes, noise)) else []
        lost = losses[0].movedim(slot.dim, 0).flatten(1)
        value = lost.mean(1)
        if sizes[0] <= noise[0]:
            return [torch.zeros_like(value)]
        exact = torch.finfo(next(p.dtype for p in replay.model.parameters() if p.is_floating_point())).eps
        if float((lost - value[:, None]).abs().max()) <= 100 * exact * sizes[0] + noise[0]:
            return [value]
        return [f"position {step.module}"]


def _mixes_nothing(func: Any) -> bool:
    """Element by element, or a view: a unit's output depends on that unit alone."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return False
    view = any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)
    writes = func.name().partition("::")[2].split(".")[0] in ("copy_", "index_put_", "fill_", "zero_", "index_copy_")
    return torch.Tag.pointwise in func.tags or view or writes


def _constants(replay: Replay, judged: list[Atom], bad: dict[Atom, str]) -> dict[tuple[int, Atom], Tensor]:
    """What each consumer loses, from two runs on different inputs; what is no constant goes to `bad`."""
    first, second = _Look(replay, judged), _Look(replay, judged)
    replay.run(first)
    for change in (_other, _nearly):
        with contextlib.suppress(LeftTrace):  # other values may take another branch; then constancy within one run must do
            second = _Look(replay, judged)
            replay.run(second, change)
            break
    else:
        second = first
    verdicts = {k: (first.found.get(k, ""), second.found.get(k, "")) for k in sorted({*first.found, *second.found}, key=_place)}
    _without_a_bias(replay, [k for k, both in verdicts.items() if None in [v for v in both if not isinstance(v, Tensor)]], bad)
    constants: dict[tuple[int, Atom], Tensor] = {}
    varies: dict[Atom, tuple[int, str]] = {}
    for (i, atom), (one, two) in verdicts.items():
        if isinstance(one, Tensor) and isinstance(two, Tensor):
            if torch.allclose(one, two, rtol=1e-4 if _low(replay) else 1e-9, atol=1e-9 * float(one.abs().max()) + 1e-300):
                constants[i, atom] = one
            else:
                varies.setdefault(atom, (i, "the input"))
        elif (isinstance(one, str) and one) or (isinstance(two, str) and two):
            varies.setdefault(atom, (i, "position"))
    _blame(replay, {a: found for a, found in varies.items() if a not in bad}, bad)
    return constants


def _place(key: tuple[int, Atom]) -> tuple[int, int]:
    return key[0], key[1].serial


def _low(replay: Replay) -> bool:
    return any(p.dtype != torch.float64 for p in replay.model.parameters() if p.is_floating_point())


def _other(tensor: Tensor) -> Tensor:
    """Different inputs of the same kind: other numbers, the same tokens in another order."""
    if not tensor.is_floating_point():
        return tensor.clone() if tensor.dtype == torch.bool or tensor.dim() == 0 else tensor.flip(-1)
    noise = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return tensor * 0.7 + 0.5 * noise.to(tensor) * (tensor.std() if tensor.numel() > 1 else 1.0)


def _nearly(tensor: Tensor) -> Tensor:
    return tensor * 1.01 if tensor.is_floating_point() else tensor.clone()


def _without_a_bias(replay: Replay, lost: list[tuple[int, Atom]], bad: dict[Atom, str]) -> None:
    """Something is lost where no bias is. A softmax does not mind a common shift: is anything different after it?"""
    open_steps: dict[int, list[Atom]] = {}
    for i, atom in lost:
        open_steps.setdefault(i, []).append(atom)
    if not open_steps:
        return

    def override(i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def without(t: Tensor, n: int) -> Tensor:
            return replay.zeroed(t, n, [a for a in open_steps[i] if a in replay.cut_atoms(n)])

        changed = paired(step, args, kwargs, without)
        return func(*changed[0], **changed[1])

    for i, fine in agrees_after(replay, dict.fromkeys(open_steps, override)).items():
        step = replay.trace.steps[i]
        for atom in open_steps[i] if not fine else ():
            where = f"{step.name.partition('::')[2]} in {step.module or 'the model'}"
            bad.setdefault(atom, f"its removed units give a constant to {where}, which has no bias to take it")


def _blame(replay: Replay, varies: dict[Atom, tuple[int, str]], bad: dict[Atom, str]) -> None:
    """Say why the units give no constant at a step: the first operator after which they differ from place to place."""
    culprits: dict[Atom, str] = {}

    def visit(i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        for o, n in zip(out if isinstance(out, list | tuple) else (out,), step.outs):
            if not isinstance(o, Tensor) or not o.is_floating_point() or n in replay.origin:
                continue
            for atom in [a for a in replay.cut_atoms(n) if a in varies and a not in culprits]:
                units = replay.removed(o, n, atom)
                if units is not None and units.numel() and not torch.allclose(units, units[:, :1].expand_as(units)):
                    culprits[atom] = f"{step.name.partition('::')[2]} in {step.module or 'the model'}"
        return out

    if varies:
        replay.run(visit)
    for atom, (i, on) in varies.items():
        step = replay.trace.steps[i]
        padding = step.args[4] if "convolution" in step.name else ()
        if atom in culprits:
            bad[atom] = f"what its removed units give depends on {on}, from {culprits[atom]} on"
        elif any(isinstance(p, int) and p for p in padding):
            bad[atom] = f"a constant meets the zero padding of {step.module or 'the model'}"
        else:
            bad[atom] = f"the constant depends on {on} after {step.name.partition('::')[2]} in {step.module or 'the model'}"


# ---------------------------------------------------------------- where they go


class Slot(NamedTuple):
    """A bias that a consumer adds to dim `dim` of its output; `new`: the parameter is None so far."""

    name: str
    dim: int
    new: bool
    axis: Expr


def find_slot(replay: Replay, i: int) -> Slot | None:
    """The bias that takes what step i loses, if there is one."""
    if i not in replay.slots:
        replay.slots[i] = _find_slot(replay, i)
    return replay.slots[i]


def _find_slot(replay: Replay, i: int) -> Slot | None:
    """The bias of a contraction of data with a weight: its own operand, or the parameter beside the weight."""
    step, trace = replay.trace.steps[i], replay.trace
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
    if weight not in replay.origin and data in replay.origin:
        weight, dim = data, len(axes) - 2
    names = replay.origin.get(weight, frozenset())
    if weight not in replay.origin or not names:
        return None
    slots = replay.parameters
    if bias is not None:
        own = replay.origin.get(bias, frozenset())
        name = next(iter(own)) if len(own) == 1 else ""
        return Slot(name, dim, False, axes[dim]) if name in slots and slots[name].shape == (axes[dim].size,) else None
    return _beside(replay, i, sorted(names), dim, axes[dim])


def _beside(replay: Replay, i: int, names: list[str], dim: int, axis: Expr) -> Slot | None:
    """The bias parameter that stands beside a weight under the same name, `weight` read as `bias`."""
    step = replay.trace.steps[i]
    for path, local in [n.rpartition(".")[::2] for n in names] + [(step.module, "weight")]:
        with contextlib.suppress(AttributeError):
            owner, other = replay.model.get_submodule(path), local.replace("weight", "bias")
            if other == local or other not in owner._parameters:
                continue
            value, name = owner._parameters[other], f"{path}.{other}" if path else other
            if value is None and isinstance(owner, _TRUSTED):
                return Slot(name, dim, True, norm(axis))
            if value is not None and value.shape == (axis.size,) and _is_added(replay, step.outs[0], name):
                return Slot(name, dim, False, axis)
    return None


def _is_added(replay: Replay, number: int, name: str) -> bool:
    """Whether the next thing that happens to a tensor is that this bias is added to it."""
    for j in replay.readers.get(number, ()):
        step = replay.trace.steps[j]
        if step.name in ("aten::add", "aten::add_") and not step.kwargs:
            return any(replay.origin.get(n) == frozenset({name}) for n in numbers(step))
        if step.outs and "view" in step.name:
            return _is_added(replay, step.outs[0], name)
    return False


def _biases(replay: Replay, constants: dict[tuple[int, Atom], Tensor], bad: dict[Atom, str]) -> dict[Slot, Tensor]:
    """What to add to each bias. A weight that is applied several times has to lose the same each time."""
    users: dict[str, dict[int, Slot]] = {}
    for i, _ in constants:
        slot = find_slot(replay, i)
        assert slot is not None
        users.setdefault(slot.name, {})[i] = slot
    for name, steps in users.items():
        readers = {j for n, own in replay.origin.items() if own == {name} for j in replay.readers.get(n, ())}
        direct = {j for j in readers if not replay.trace.steps[j].weights}
        for atom in {a for i, a in constants if i in steps}:
            each = [constants.get((i, atom)) for i in steps]
            known = [v for v in each if v is not None]
            biggest = max(float(v.abs().max()) for v in known)
            same = len(known) == len(each) and all(
                torch.allclose(v, known[0], rtol=1e-5 if _low(replay) else 1e-9, atol=1e-9 * biggest + 1e-300) for v in known
            )
            if not same:
                bad.setdefault(atom, f"{name.rpartition('.')[0] or name} is applied more than once, with different constants")
            elif biggest and len(direct) > len(steps):
                bad.setdefault(atom, f"the constant would go into {name}, which is used elsewhere too")
    total: dict[Slot, Tensor] = {}
    for steps in users.values():
        i, slot = next(iter(steps.items()))
        values = [v for (j, a), v in constants.items() if j == i and a not in bad]
        value = torch.stack(values).sum(0) if values else torch.zeros(())
        if bool(value.any()):
            total[slot] = value
    return total


def _add_bias(model: nn.Module, slot: Slot, value: Tensor) -> None:
    path, _, local = slot.name.rpartition(".")
    owner = model.get_submodule(path)
    if not slot.new:
        bias = owner._parameters[local]
        assert bias is not None
        bias.data += value.to(bias)
        return
    like = next(p for n, p in owner._parameters.items() if p is not None and "weight" in n)
    owner.register_parameter(local, nn.Parameter(value.to(like), requires_grad=like.requires_grad))


def _follow(model: nn.Module, slot: Slot, edit: Edit) -> None:
    """Rows of a weight that are scaled take their bias along; one that was added a moment ago is not in the edit."""
    path, _, local = slot.name.rpartition(".")
    parameters = model.get_submodule(path)._parameters
    weight, bias = parameters.get(local.replace("bias", "weight")), parameters[local]
    for scale in edit.scales if slot.new else ():
        if scale.parameter is weight and bias is not None and scale.factor.numel() == len(bias):
            bias.data *= scale.factor.reshape(-1).to(bias)
