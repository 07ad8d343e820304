"""Removed values through operators that move entries or compute them from several others."""

from __future__ import annotations

import torch
from torch import Tensor

from ...axes import Atom, Expr, Prod, atoms, norm
from ...ops import SPATIAL
from ...trace import GIVEN, Ref, Step
from .state import State
from .values import RemovedValue, once, operands, run_step, same, where, wide


def depends_on_input_size(axis: Expr) -> bool:
    """Whether other inputs may have another size along an axis."""
    return any(a.frozen in (GIVEN, SPATIAL) for a in atoms(axis))


def computed(state: State, step: Step) -> list[RemovedValue]:
    """Zeros stay zeros where the operator's record says so; otherwise the operator is run on the constants.

    It is run twice, with other numbers for everything that varies; what differs varies. Outputs that hold positions vary.
    """
    operator = step.operator
    inputs = [n for n in dict.fromkeys(step.inputs) if state.cut_atoms(n)]
    removed = {n: state.removed(n) for n in inputs}
    carried = {a for n in inputs for a in state.cut_atoms(n)}
    zero = {a for a in carried if all(a in removed[n].zero for n in inputs if a in state.cut_atoms(n))}
    data = {a for n in _first_operand(step) for a in state.cut_atoms(n)}
    if _zero_stays(step) and zero == carried and all(state.cut_atoms(n).keys() <= data for n in step.outs):
        made = [RemovedValue(frozenset(state.cut_atoms(n))) for n in step.outs]
    else:
        varies = {a: why for value in removed.values() for a, why in value.varies.items()}
        try:
            made = _run(state, step, inputs, varies, zero)
        except Exception as error:
            return state.unknown(step, f"cannot be followed through {where(step)} ({type(error).__name__})")
    for i in operator.positions:
        if i < len(made):
            why = f"is a position that depends on the inputs, from {where(step)} on"
            made[i] = RemovedValue(varies=dict.fromkeys(state.cut_atoms(step.outs[i]), why))
    return made


def _first_operand(step: Step) -> list[int]:
    """The tensor that is the first argument of a step, or the tensors in it; the others are indices, grids and the like."""
    given = step.args[0] if step.args else None
    return [r.number for r in (given if isinstance(given, tuple) else (given,)) if isinstance(r, Ref)]


def _zero_stays(step: Step) -> bool:
    zero = step.operator.zero
    return zero(step.arguments) if callable(zero) else zero


def _run(state: State, step: Step, inputs: list[int], varies: dict[Atom, str], zero: set[Atom]) -> list[RemovedValue]:
    moves = step.operator.values == "moves"
    outs, others = _outputs(state, step, 0), None
    if not moves or any(state.known(n) is None for n in step.inputs):
        others = _outputs(state, step, 1)
    found = []
    for i, (number, out) in enumerate(zip(step.outs, outs)):
        cut = state.cut_atoms(number)
        unlike = {a for a in cut if others is not None and _differs(state, number, a, out, others[i])}
        if not moves:
            out = _flattened(state, out, number)
        silent = state.zero_atoms(out, number, unlike)
        new = {a for a in cut if not any(a in state.cut_atoms(n) for n in inputs)}
        why = {a: f"varies, from {where(step)} on" for a in unlike | new}
        why |= {a: varies[a] for a in cut if a in varies and not (a in zero and a in silent)}
        sized = f"differs from place to place before {where(step)}, which is right for inputs of this size alone"
        why |= {a: sized for a in cut if a not in why and any(_loses_positions(state, n, number, out, a) for n in inputs)}
        found.append(RemovedValue(silent - why.keys(), why, out))
    return found


def _differs(state: State, number: int, atom: Atom, one: Tensor, two: Tensor) -> bool:
    pairs = zip(state.entries(one, number, atom), state.entries(two, number, atom), strict=True)
    return any(a.shape != b.shape or not torch.allclose(a.double(), b.double(), 1e-12, 1e-300) for a, b in pairs)


def _outputs(state: State, step: Step, draw: int) -> list[Tensor]:
    """The outputs of the operator on the values of removed units; everything else is drawn."""
    operator = step.operator
    stand = {n: _stand_in(state, step, n, draw, operator.values == "moves") for n in dict.fromkeys(step.inputs)}
    if operator.spatial and _has_free_batch(state, step, operator.spatial):  # one sample of the batch is enough
        stand = {n: t[:1] if t.dim() == operator.spatial + 2 else t for n, t in stand.items()}
    if operator.contiguous:
        stand = {n: t.clone(memory_format=torch.contiguous_format) for n, t in stand.items()}
    out = run_step(step, stand)
    outs = [o for o in (out if isinstance(out, list | tuple) else [out]) if isinstance(o, Tensor)]
    shapes = [state.sizes(n) for n in step.outs]
    return [o.expand(s) if o.dim() == len(s) else o.double() for o, s in zip(outs, shapes, strict=True)]


def _has_free_batch(state: State, step: Step, spatial: int) -> bool:
    """Whether the first dim is a batch whose samples are alike: nothing is cut there, and values do not differ along it."""
    for n in step.inputs:
        value = state.known(n)
        if len(state.sizes(n)) == spatial + 2 and (0 not in state.whole(n) or (value is not None and value.stride(0))):
            return False
    return True


def _stand_in(state: State, step: Step, number: int, draw: int, moves: bool) -> Tensor:
    value = state.known(number)
    if value is None:
        return state.sample(number, state.sizes(number), draw)
    cut = state.cut_atoms(number)
    if moves or not cut or not value.is_floating_point():
        return torch.ops.aten.alias(value)
    kept = torch.ones((), dtype=torch.bool)
    for atom, dims in cut.items():
        for d in dims:
            at = state.indices(number, d, atom)
            mask = torch.ones(value.shape[d], dtype=torch.bool)
            if at is not None:
                mask[at] = False
            kept = kept & mask.reshape([-1 if k == d else 1 for k in range(value.dim())])
    return torch.where(kept, state.sample(number, state.sizes(number), draw), value.double())


def _flattened(state: State, out: Tensor, number: int) -> Tensor:
    """The output with stride 0 along dims where the removed units are constant."""
    cut = state.cut_atoms(number)
    for d in state.whole(number):
        if out.stride(d) and out.shape[d] > 1 and all(same(t, d) for a in cut for t in state.entries(out, number, a)):
            out = out.narrow(d, 0, 1)
    return out.expand(state.sizes(number))


def _loses_positions(state: State, number: int, result: int, out: Tensor, atom: Atom) -> bool:
    """Whether an atom's removed units differ along positions of the inputs in a tensor, and no longer do in the result."""
    value = state.removed(number).value
    if value is None or atom not in state.cut_atoms(number):
        return False
    axes = state.trace.axes
    for d in state.whole(number):
        axis = norm(axes[number][d])
        positions = {a for a in atoms(axis) if a.frozen in (GIVEN, SPATIAL)}
        mixed = isinstance(axis, Prod) and len(positions) < len(set(atoms(axis)))  # batch x heads: heads may differ
        if not (value.stride(d) and positions) or mixed or same(state.entries(value, number, atom)[0], d):
            continue
        left = [r for r, e in enumerate(axes[result]) if positions & set(atoms(e))]
        dims = state.cut_atoms(result)[atom]
        if not any(r in dims or (out.stride(r) and not same(state.entries(out, result, atom)[0], r)) for r in left):
            return True
    return False


def batch_norm(state: State, step: Step) -> list[RemovedValue] | None:
    """With running statistics, batch normalisation is a scale and a shift per channel; None where it uses the batch."""
    x, *own = operands(step, "input", "weight", "bias", "running_mean", "running_var")
    given = step.arguments
    if x is None or given["training"] or own[2] is None or any(n is not None and not state.is_constant(n) for n in own):
        return None
    weight, bias, mean, var = (None if n is None else wide(state.weights.value(n)) for n in own)
    assert mean is not None
    assert var is not None
    scale = (1.0 if weight is None else weight) / (var + given["eps"]).sqrt()
    shift = (0.0 if bias is None else bias) - mean * scale
    removed, sizes = state.removed(x), state.sizes(x)
    along = (1, -1, *[1] * (len(sizes) - 2))
    out = shift.reshape(along)
    if removed.value is not None:
        out = once(removed.value) * scale.reshape(along) + out
    varies = {a: removed.varies[a] for a in state.cut_atoms(step.outs[0]) if a in removed.varies}
    zero = state.zero_atoms(out, x, varies)
    return [RemovedValue(zero, varies, out.expand(sizes)), *varying_outputs(state, step)]


def max_pool(state: State, step: Step) -> list[RemovedValue] | None:
    """The largest of equal numbers is that number, and padding is never the largest; None where values differ by position."""
    x, out = step.inputs[0], step.outs[0]
    removed = state.removed(x)
    if removed.value is not None and any(removed.value.stride(d) and removed.value.shape[d] > 1 for d in state.whole(x)):
        return None
    passed = None if removed.value is None else once(removed.value).expand(state.sizes(out))
    return [RemovedValue(removed.zero, dict(removed.varies), passed), *varying_outputs(state, step)]


def varying_outputs(state: State, step: Step) -> list[RemovedValue]:
    """All outputs after the first: statistics and positions, which vary."""
    return [RemovedValue(varies=dict.fromkeys(state.cut_atoms(n), f"varies, from {where(step)} on")) for n in step.outs[1:]]
