"""Removed values through element-wise operators: the operator itself, run on constants, with samples for what varies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...axes import Atom
from ...trace import Ref, Step
from .state import State
from .values import RemovedValue, extent, first, once, read_inputs, run_step, same, where


def elementwise(state: State, step: Step) -> list[RemovedValue]:
    """Runs the operator on the constants of removed units; where the result differs between samples, it varies."""
    inputs = list(dict.fromkeys(read_inputs(step)))
    number = step.outs[0]
    cut = state.cut_atoms(number)
    bearers = [n for n in inputs if state.cut_atoms(n)]
    pairs = _pairs(state, step, bearers)
    all_zero = all(a in state.removed(n).zero for n in bearers for a in state.cut_atoms(n))
    if all_zero and not pairs and _zero_stays(state, step, bearers):
        return [RemovedValue(frozenset(state.cut_atoms(n))) for n in step.outs]
    varies = {a: why for n in bearers for a, why in state.removed(n).varies.items()} | pairs
    known = {n: state.known(n) for n in inputs}
    full = _full(state, number, known)
    stand = {n: _samples(state, n, full) if known.get(n) is None else once(known[n]) for n in step.inputs}  # type: ignore[arg-type]
    try:
        out = _run(step, stand)
    except Exception as error:
        return state.unknown(step, f"cannot be followed through {where(step)} ({type(error).__name__})")
    if any(state.removed(n).zero or state.removed(n).varies for n in bearers):  # zero times what varies is zero, unit by unit
        varies = {a: why for a, why in varies.items() if a in pairs or not _absorbed(state, step, a, bearers)}
    single = [n for n, t in known.items() if t is None and (stand[n].numel() == 1 or not stand[n].is_floating_point())]
    for atom in cut:  # a tensor that carries removed units of other atoms only varies where those are kept
        foreign = [n for n in bearers if atom not in state.cut_atoms(n) and not state.weights.made_of_weights(n)]
        if (single or foreign) and atom not in varies and _moves(state, step, stand, out, [*single, *foreign], atom):
            varies[atom] = f"varies with the inputs, from {where(step)} on"
    return _judged(state, step, out, varies)


def _full(state: State, number: int, known: Mapping[int, Tensor | None]) -> list[bool]:
    """For each dim of the output: whether samples need its full size; two entries are enough otherwise."""
    whole, rank = state.whole(number), len(state.trace.axes[number])
    return [d not in whole or any(t is not None and extent(t, d, rank) > 1 for t in known.values()) for d in range(rank)]


def _samples(state: State, number: int, full: Sequence[bool]) -> Tensor:
    sizes = state.sizes(number)
    at = len(full) - len(sizes)
    return state.sample(number, [size if full[at + d] or size == 1 else 2 for d, size in enumerate(sizes)])


def _run(step: Step, stand: Mapping[int, Tensor]) -> Tensor:
    """The first output; some operators (rrelu) want all operands in one shape."""
    try:
        return first(run_step(step, stand))
    except RuntimeError:
        return first(run_step(step, dict(zip(stand, torch.broadcast_tensors(*stand.values())))))


def _pairs(state: State, step: Step, bearers: Sequence[int]) -> dict[Atom, str]:
    """Atoms of which every unit meets every other, so that removed ones meet kept ones: only a product with zero is zero."""
    found: dict[Atom, str] = {}
    for atom in state.cut_atoms(step.outs[0]):
        meets = [n for n in bearers if atom in state.cut_atoms(n)]
        alone = meets and state.dims(step.outs[0], atom) == min(state.dims(n, atom) for n in meets)
        product = step.operator.factor == "product" and all(atom in state.removed(n).zero for n in meets)
        if meets and not alone and not product:
            found[atom] = f"meets the kept units in {where(step)}"
    return found


def _moves(state: State, step: Step, stand: Mapping[int, Tensor], out: Tensor, varying: Sequence[int], atom: Atom) -> bool:
    """Whether an atom's removed units change when the tensors that vary do."""
    number = step.outs[0]
    before = state.entries(out, number, atom)
    for change in (lambda t: t + 1, lambda t: -9 * t - 1):
        others = {n: ~stand[n] if stand[n].dtype == torch.bool else change(stand[n]) for n in varying}
        after = state.entries(_run(step, {**stand, **others}), number, atom)
        if any(not torch.equal(one, two) for one, two in zip(before, after, strict=True)):
            return True
    return False


def _absorbed(state: State, step: Step, atom: Atom, bearers: Sequence[int]) -> bool:
    """Whether the units are zero in one factor of a product or in a dividend, so that the other operand does not matter."""
    factor = step.operator.factor
    enough = bearers if factor == "product" else [step.inputs[0]] if factor == "quotient" else ()
    return any(atom in state.removed(n).zero for n in enough)


def _zero_stays(state: State, step: Step, bearers: Sequence[int]) -> bool:
    """Whether the operator makes zero of zero, whatever the other operands are. Remembered for calls with the same numbers."""
    plain = tuple((k, v) for k, v in (*enumerate(step.args), *step.kwargs.items()) if not isinstance(v, Ref | tuple | list))
    loose = any(isinstance(v, tuple | list) for v in step.args)
    key = None if loose else (step.func, repr(plain), tuple(isinstance(v, Ref) and v.number in bearers for v in step.args))
    if key is None or key not in state.zero_stays:
        zeros = torch.zeros(_FEW)
        stand = {n: zeros if n in bearers else state.sample(n, (_FEW,)) for n in step.inputs}
        try:
            answer = not bool(first(run_step(step, stand)).any())
        except Exception:
            answer = False
        state.zero_stays[key] = answer
    return state.zero_stays[key]


_FEW = 4  # samples of both signs


def _judged(state: State, step: Step, out: Tensor, varies: Mapping[Atom, str]) -> list[RemovedValue]:
    """The outcome: along dims of samples, the removed units of each atom have to be constant."""
    number = step.outs[0]
    cut, sizes = state.cut_atoms(number), state.sizes(number)
    varies = {a: why for a, why in varies.items() if a in cut}
    for d, size in enumerate(sizes):
        if out.dim() == len(sizes) and out.shape[d] not in (1, size):  # samples
            for atom in cut:
                if any(not same(entries, d) for entries in state.entries(out, number, atom)):
                    varies.setdefault(atom, f"varies with the inputs, from {where(step)} on")
            out = out.narrow(d, 0, 1)
    zero = state.zero_atoms(out, number, varies)
    value = None if len(zero) == len(cut) else (out if out.dtype == torch.bool else out.double()).expand(sizes)
    others = [RemovedValue(varies=dict.fromkeys(state.cut_atoms(n), f"varies, from {where(step)} on")) for n in step.outs[1:]]
    return [RemovedValue(zero, varies, value), *others]
