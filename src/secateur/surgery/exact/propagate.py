"""Propagates the values of removed units through the trace: zero, constant, or dependent on the input.

Only single operators run, on a few numbers. Where removed units are summed away, their contribution is what the sum loses by
the cut: `propagate` returns these contributions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from ...axes import Atom, atoms
from ...ops import Attention, Contraction, Convolution
from ...trace import Step, Trace
from .compute import batch_norm, computed, depends_on_input_size, max_pool
from .elementwise import elementwise
from .products import product
from .state import State
from .values import Contribution, RemovedValue, aliases, is_random, read_inputs, where
from .weights import Keep, MaskedWeights
from .wiring import reduced


def propagate(trace: Trace, keep: Keep, weights: MaskedWeights, mixing: Mapping[Atom, Iterable[str]]) -> list[Contribution]:
    """What the sums of the run lose with the units that `keep` removes.

    `mixing`: for each atom, the kinds of operators that run over it and make its units depend on each other.
    """
    state, memory = State(trace, keep, weights, mixing), _Memory()
    for i, step in enumerate(trace.steps):
        if i in weights.idle:
            continue
        _draw(state, i, step)
        if step.weights and not any(map(state.starts_as_zeros, step.inputs)):
            memory.record(state, step, None)
            _sum_weights_away(state, i, step)
        elif not any(map(state.cut_atoms, (*step.inputs, *step.outs))):
            memory.record(state, step, None)
        else:
            made = _after(state, i, step)
            memory.record(state, step, made[0] if made else None)
            for number, value in zip(step.outs, made):
                _settle(state, step, number, value)
    _check_what_starts_as_zeros(state)
    return state.contributions


def _check_what_starts_as_zeros(state: State) -> None:
    """The next run finds what this one left: a tensor that was taken as zero has to be zero at the end too."""
    for number in (number for number, zeros in state.started.items() if zeros):
        for atom in state.cut_atoms(number):
            if atom not in state.removed(number).zero:
                why = f"what its removed units give is kept in {state.trace.names[number]} for the next run"
                state.contributions.append(Contribution(len(state.trace.steps) - 1, atom, why))


def _draw(state: State, i: int, step: Step) -> None:
    """Random numbers for each unit are drawn anew when there are fewer units."""
    if is_random(step) and not step.operator.undefined:
        for atom in dict.fromkeys(a for n in step.outs for a in state.cut_atoms(n)):
            state.contributions.append(
                Contribution(i, atom, f"what its removed units give is drawn at random, in {where(step)}")
            )


def _after(state: State, i: int, step: Step) -> list[RemovedValue]:
    """The removed values of the outputs of a step."""
    made = _by_record(state, i, step)
    if made is not None:
        return made
    _sum_away(state, i, step)
    _grows_with_inputs(state, i, step)
    mixed = _mixed(state, step)
    if is_random(step):
        mixed = {a: f"is drawn at random, in {where(step)}" for n in step.outs for a in state.cut_atoms(n)}
    lost = {**_lost(state, read_inputs(step)), **mixed}
    values = step.operator.values
    if values is None:
        lost |= {a: f"varies, from {where(step)} on" for n in step.outs for a in state.cut_atoms(n) if a not in lost}
    if all(a in lost for n in step.outs for a in state.cut_atoms(n)):
        return [RemovedValue(varies={a: lost[a] for a in state.cut_atoms(n)}) for n in step.outs]
    made = elementwise(state, step) if values == "elementwise" else computed(state, step)
    for number, value in zip(step.outs, made) if mixed else ():
        value.zero -= mixed.keys()
        value.varies |= {a: mixed[a] for a in state.cut_atoms(number) if a in mixed}
    return made


def _by_record(state: State, i: int, step: Step) -> list[RemovedValue] | None:
    """The answer for operators with a way of their own; None where it does not cover this call."""
    values = step.operator.values
    if isinstance(values, Contraction | Convolution | Attention):
        return product(state, i, step)
    if values == "batch normalisation":
        return batch_norm(state, step)
    return max_pool(state, step) if values == "max pooling" else None


def _mixed(state: State, step: Step) -> dict[Atom, str]:
    """Atoms whose units this step makes depend on each other (a normalisation or a softmax over their axis), or on how many
    positions the inputs have (a softmax over those)."""
    over = step.operator.over
    if not over:
        return {}
    first = state.trace.axes[step.inputs[0]]
    positions = over == "softmax" and isinstance(step.args[1], int) and depends_on_input_size(first[step.args[1]])
    cut = dict.fromkeys(a for n in step.inputs for a in state.cut_atoms(n))
    found = [a for a in cut if positions or over in state.mixing[a]]
    channels = set(atoms(first[1])) if found and step.operator.per_channel else set()
    return {a: f"varies with the inputs, from {where(step)} on" for a in found if a not in channels}


def _grows_with_inputs(state: State, i: int, step: Step) -> None:
    """A constant that is summed over positions is another one for inputs of another size, unless it is made a mean."""
    axes = reduced(state.trace, step) if step.operator.grows else []
    if not any(map(depends_on_input_size, axes)):
        return
    readers = [state.trace.steps[j] for j in state.weights.readers.get(step.outs[0], ())]
    size = math.prod(e.size for e in axes)
    if readers and all(s.name == "aten::div" and s.args[1] == size for s in readers):
        return
    removed = state.removed(step.inputs[0])
    for atom in state.cut_atoms(step.outs[0]):
        if atom not in removed.varies and (atom not in removed.zero or not step.operator.zero):
            why = f"what its removed units give grows with the size of the inputs, in {where(step)}"
            state.contributions.append(Contribution(i, atom, why))


def _lost(state: State, inputs: Sequence[int]) -> dict[Atom, str]:
    """Atoms that vary in one of these tensors and are zero in none."""
    zero = {a for n in inputs for a in state.removed(n).zero}
    return {a: why for n in inputs for a, why in state.removed(n).varies.items() if a not in zero}


def _settle(state: State, step: Step, number: int, value: RemovedValue) -> None:
    """Remembers the removed values of an output, and since which operator they differ from position to position."""
    axes, held = state.trace.axes[number], value.value
    if held is not None and held.is_complex():
        constant = [a for a in state.cut_atoms(number) if a not in value.zero and a not in value.varies]
        value.varies |= dict.fromkeys(constant, f"is complex, from {where(step)} on")
        held = value.value = None
    if held is not None and any(held.stride(d) and axes[d].size > 1 for d in state.whole(number)):
        value.since = next((s for n in step.inputs if n in state.found and (s := state.found[n].since)), where(step))
    state.found[number] = value


def _sum_away(state: State, i: int, step: Step) -> None:
    """Atoms that no output carries any more (as often as before) were summed over by an operator that has no bias."""
    if aliases(step.func)[1] or step.operator.values == "moves":
        return
    for n in step.inputs:
        removed = state.removed(n)
        for atom in state.cut_atoms(n):
            left = max((state.dims(out, atom) for out in step.outs), default=0)
            if left < state.dims(n, atom) and step.outs and atom not in removed.zero:
                why = f"its removed units give a constant to {where(step)}, which has no bias to take it"
                state.contributions.append(Contribution(i, atom, state.reason(atom, removed) or why))


def _sum_weights_away(state: State, i: int, step: Step) -> None:
    """The same among weights alone: a sum of products needs one factor that is zero."""
    left = {a for n in step.outs for a in state.cut_atoms(n)}
    for atom in dict.fromkeys(a for n in step.inputs for a in state.cut_atoms(n) if a not in left):
        bearers = [n for n in step.inputs if atom in state.cut_atoms(n)]
        if step.outs and not any(atom in state.removed(n).zero for n in bearers):
            why = f"its removed units are part of a number that {where(step)} computes from weights"
            state.contributions.append(Contribution(i, atom, why))


class _Memory:
    """Which tensors share memory: what is written through one is seen in the others."""

    def __init__(self) -> None:
        self.roots: dict[int, int] = {}
        self.families: dict[int, list[int]] = {}

    def record(self, state: State, step: Step, value: RemovedValue | None) -> None:
        """Notes that outputs share the memory of the first input. Where the step writes to it, all that share it change, unless
        zeros are written over zeros."""
        writes, shares = aliases(step.func)
        if not shares or not step.inputs or not step.outs:
            return
        root = self.roots.get(step.inputs[0], step.inputs[0])
        family = self.families.setdefault(root, [root])
        for number in family if writes else ():
            cut, old = state.cut_atoms(number), state.removed(number)
            state.written.add(number)
            zeros = value is not None and old.zero.issuperset(cut) and value.zero.issuperset(state.cut_atoms(step.outs[0]))
            if not zeros:
                why = f"is written to in place ({where(step)})"
                state.found[number] = RemovedValue(varies=dict.fromkeys(cut, why))
            else:
                state.found[number] = old
        for number in step.outs:
            self.roots[number] = root
            family.append(number)
