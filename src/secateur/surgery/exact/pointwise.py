"""What removed units say through operators that work element by element: the operator itself, on constants and samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...axes import Atom
from ...trace import Ref, Step
from .operands import RemovedValue, call, extent, first, once, same, where
from .wiring import tensors_in

if TYPE_CHECKING:
    from .propagate import Propagation


def elementwise(g: Propagation, step: Step) -> list[RemovedValue]:
    """The operator on constants, with samples for whatever varies; what differs between samples varies."""
    inputs = list(dict.fromkeys(tensors_in(step)))
    number = step.outs[0]
    cut = g.cut_atoms(number)
    bearers = [n for n in inputs if g.cut_atoms(n)]
    pairs = _pairs(g, step, bearers)
    silent = all(a in g.ghost(n).zero for n in bearers for a in g.cut_atoms(n))
    if silent and not pairs and _zero_stays(g, step, bearers):
        return [RemovedValue(frozenset(g.cut_atoms(n))) for n in step.outs]
    bad = {a: why for n in bearers for a, why in g.ghost(n).bad.items()} | pairs
    known = {n: g.known(n) for n in inputs}
    whole, rank = g.whole(number), len(g.trace.axes[number])
    full = [d not in whole or any(t is not None and extent(t, d, rank) > 1 for t in known.values()) for d in range(rank)]
    stand = {n: once(t) if t is not None else g.samples(n, full) for n, t in known.items()}
    try:
        out = _answer(g, step, stand)
    except Exception as error:
        return g.unknown(step, f"cannot be followed through {where(step)} ({type(error).__name__})")
    mixed = [n for n in bearers if any(a in g.ghost(n).zero for a in g.cut_atoms(n)) or g.ghost(n).bad]
    if mixed:  # zero times what varies is zero, unit by unit
        bad = {a: why for a, why in bad.items() if a in pairs or not _absorbed(g, step, a, bearers)}
    single = [n for n, t in known.items() if t is None and (stand[n].numel() == 1 or not stand[n].is_floating_point())]
    for atom in cut:  # what carries removed units of other atoms only, varies where those are kept
        foreign = [n for n in bearers if atom not in g.cut_atoms(n) and not g.silence.made_of_weights(n)]
        if (single or foreign) and atom not in bad and _moves(g, step, stand, out, [*single, *foreign], atom):
            bad[atom] = f"varies with the inputs, from {where(step)} on"
    return _judged(g, step, out, cut, bad)


def _answer(g: Propagation, step: Step, stand: Mapping[int, Tensor]) -> Tensor:
    """The operator on its stand-ins; some (rrelu) want all operands in one shape."""
    try:
        return first(call(step, stand))
    except RuntimeError:
        return first(call(step, dict(zip(stand, torch.broadcast_tensors(*stand.values())))))


def _pairs(g: Propagation, step: Step, bearers: Sequence[int]) -> dict[Atom, str]:
    """Atoms of which every unit meets every other here, removed ones kept ones: only a product with zero is zero."""
    found: dict[Atom, str] = {}
    for atom in g.cut_atoms(step.outs[0]):
        meets = [n for n in bearers if atom in g.cut_atoms(n)]
        alone = meets and g.dims(step.outs[0], atom) == min(g.dims(n, atom) for n in meets)
        product = step.kind.rstrip("_") == "mul" and all(atom in g.ghost(n).zero for n in meets)
        if meets and not alone and not product:
            found[atom] = f"meets the kept units in {where(step)}"
    return found


def _moves(g: Propagation, step: Step, stand: Mapping[int, Tensor], out: Tensor, varying: Sequence[int], atom: Atom) -> bool:
    """Whether the removed units of an atom differ when what varies is another number."""
    number = step.outs[0]
    before = [entries for _, entries in g.removed(out, number, atom)]
    for change in (lambda t: t + 1, lambda t: -9 * t - 1):
        others = {n: ~stand[n] if stand[n].dtype == torch.bool else change(stand[n]) for n in varying}
        after = [entries for _, entries in g.removed(_answer(g, step, {**stand, **others}), number, atom)]
        if any(not torch.equal(one, two) for one, two in zip(before, after, strict=True)):
            return True
    return False


def _absorbed(g: Propagation, step: Step, atom: Atom, bearers: Sequence[int]) -> bool:
    """Whether the units are zero in one factor of a product, or in what is divided, so that the other does not matter."""
    kind = step.kind.rstrip("_")
    enough = bearers if kind == "mul" else [step.inputs[0]] if kind == "div" else ()
    return any(atom in g.ghost(n).zero for n in enough)


def _zero_stays(g: Propagation, step: Step, bearers: Sequence[int]) -> bool:
    """Whether the operator makes zero of zero, whatever the other operands are."""
    plain = tuple((k, v) for k, v in (*enumerate(step.args), *step.kwargs.items()) if not isinstance(v, Ref | tuple | list))
    loose = any(isinstance(v, tuple | list) for v in step.args)
    key = None if loose else (step.func, repr(plain), tuple(isinstance(v, Ref) and v.number in bearers for v in step.args))
    if key is None or key not in g.zeros:
        stand = {n: torch.zeros(2) if n in bearers else g.sample(n, (2,)) for n in tensors_in(step)}
        try:
            out = first(call(step, stand))
            answer = not bool(out.any())
        except Exception:
            answer = False
        g.zeros[key] = answer
    return g.zeros[key]


def _judged(g: Propagation, step: Step, out: Tensor, cut: Mapping[Atom, Any], bad: Mapping[Atom, str]) -> list[RemovedValue]:
    """The outcome as a ghost: dims of samples have to be constant over the removed units of each atom."""
    number = step.outs[0]
    axes, bad = g.trace.axes[number], {a: why for a, why in bad.items() if a in cut}
    for d, e in enumerate(axes):
        if out.dim() == len(axes) and out.shape[d] not in (1, e.size):  # samples
            for atom in cut:
                for _, entries in g.removed(out, number, atom):
                    if not same(entries, d):
                        bad.setdefault(atom, f"varies with the inputs, from {where(step)} on")
            out = out.narrow(d, 0, 1)
    zero = {a for a in cut if a not in bad and not any(bool(t.any()) for _, t in g.removed(out, number, a))}
    value = None if len(zero) == len(cut) else (out if out.dtype == torch.bool else out.double()).expand([e.size for e in axes])
    ghost = RemovedValue(frozenset(zero), dict(bad), value)
    return [ghost, *(RemovedValue(bad=dict.fromkeys(g.cut_atoms(n), f"varies, from {where(step)} on")) for n in step.outs[1:])]
