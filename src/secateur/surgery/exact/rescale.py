"""Corrects formulas that use the number of units: the mean of an RMSNorm, scales such as 1/sqrt(head dimension).

The correction is a factor on some weights. Which weights is a guess, and `scale_balance` checks that their factors cancel
everywhere else in the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...axes import Atom, Cat, Expr, Prod, atoms, evaluate, new_size, norm
from ...ops import Attention
from ...trace import Step, solve_attributes
from .scale_balance import balanced
from .values import base_name
from .weights import MaskedWeights
from .wiring import reduced

_EXPONENTS = (-0.5, 0.5, -0.25, 0.25, -1.0, 1.0)  # of a size, as it enters formulas


class Refused(Exception):
    """There is no exact correction; the message is the reason."""


class Scale(NamedTuple):
    """Parameter p becomes `factor * (p + offset) - offset`: what is used is p + offset (1 + weight in some norms).

    `rows`: the indices of `dim` that are scaled; None for all of it.
    """

    name: str
    factor: float
    offset: float = 0.0
    dim: int = 0
    rows: Tensor | None = None


@dataclass(eq=False)
class Edit:
    """A change to the model that corrects for some atoms, valid as long as their removed units are zero in the steps `over`."""

    atoms: set[Atom]
    scales: list[Scale] = field(default_factory=list)
    attributes: list[tuple[str, str, float]] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    why: str = ""  # why it is not exact, if it is not


# ---------------------------------------------------------------- RMSNorm


def mean_of_squares(flow: MaskedWeights, cut: list[Atom], bad: dict[Atom, str]) -> list[Edit]:
    """x / sqrt(mean(x^2) + eps) * w over N of M units, the others zero, is the same with eps * M / N and w * sqrt(M / N).

    Each weight is scaled once, however often it is used; every use has to be such a norm, with the same N and M.
    """
    found: dict[str, Edit] = {}
    known: dict[str, set[int]] = {}  # weight -> the products with it
    eps: dict[tuple[str, str], dict[int, float]] = {}  # attribute -> the sums with it, and what it should be there
    beside = {
        name for n in flow.trace.record.returned for name in flow.origin.get(n, ())
    }  # weights that have other uses as well
    for i in sorted({i for atom in cut for i in _steps_over(flow, atom, "aten::mean")} - flow.idle):
        units = {a for e in reduced(flow.trace, flow.trace.steps[i]) for a in atoms(e)} & set(cut)
        try:
            edit, summed, product = _rms(flow, i)
        except Refused as refused:
            bad |= dict.fromkeys(units - bad.keys(), str(refused))
            continue
        name = edit.scales[0].name
        known.setdefault(name, set()).add(product)
        for path, attribute, number in edit.attributes:
            eps.setdefault((path, attribute), {})[summed] = number
        other = found.setdefault(name, edit)
        if other.scales != edit.scales:
            edit.why = f"{name} belongs to several RMSNorms, which lose different parts of their units"
        other.attributes += [a for a in edit.attributes if a not in other.attributes]
        other.over |= edit.over
        other.atoms |= edit.atoms
        other.why = other.why or edit.why
    for i, step in enumerate(flow.trace.steps if found else ()):
        used = () if prepares(flow, step) else {w for n in step.inputs for w in flow.origin.get(n, ())} & found.keys()
        beside |= {name for name in used if i not in known[name]}
    torn = _torn(flow, eps)
    for name, edit in found.items():
        for path, attribute, _ in (a for a in edit.attributes if a[:2] in torn):
            where = f"the RMSNorm in {path or 'the model'}"
            edit.why = edit.why or f"{where}: its {attribute} has other uses too, so it cannot grow by old / new"
        edit.attributes = [a for a in edit.attributes if a[:2] not in torn]
        if name in beside:
            edit.why = edit.why or f"{name} is used outside of its RMSNorm too, and should be scaled inside only"
        bad |= dict.fromkeys(edit.atoms - bad.keys(), edit.why) if edit.why else {}
    return list(found.values())


def prepares(flow: MaskedWeights, step: Step) -> bool:
    """Whether all outputs of a step are computed from weights, so that their readers are looked at instead."""
    return bool(step.outs) and all(n in flow.origin for n in step.outs)


def _torn(flow: MaskedWeights, eps: dict[tuple[str, str], dict[int, float]]) -> set[tuple[str, str]]:
    """Attributes that would need several values, or that their module uses elsewhere than in the sum of such a norm."""
    found = {key for key, sums in eps.items() if len(set(sums.values())) > 1}
    old: dict[str, list[tuple[tuple[str, str], object]]] = {}
    for key, sums in eps.items():
        number = next(v for v in flow.trace.steps[next(iter(sums))].args if isinstance(v, int | float))
        old.setdefault(key[0], []).append((key, number))
    for i, step in enumerate(flow.trace.steps if eps else ()):
        for key, number in old.get(step.module, ()):
            if i not in eps[key] and any(type(v) is float and v == number for v in (*step.args, *step.kwargs.values())):
                found.add(key)
    return found


def _steps_over(flow: MaskedWeights, atom: Atom, name: str) -> list[int]:
    found = []
    for i, step in enumerate(flow.trace.steps):
        if step.name == name and any(atom in atoms(e) for e in reduced(flow.trace, step)):
            found.append(i)
    return found


def _rms(flow: MaskedWeights, i: int) -> tuple[Edit, int, int]:
    """The correction for a mean over fewer units in step i; the steps that add eps and multiply by the weight."""
    steps, where = flow.trace.steps, flow.trace.steps[i].module or "the model"
    refused = Refused(f"mean in {where} runs over the cut axis and is no RMSNorm: over fewer units it is another number")
    made = steps[flow.makers.get(steps[i].inputs[0], i)]
    power = made.name == "aten::pow" and made.args[1] == 2
    if not power and not (made.name == "aten::mul" and len(set(made.inputs)) == 1 and len(made.args) == 2):
        raise refused
    chain = _chain(flow, steps[i].outs[0], 8)
    if [base_name(steps[j]) for j in chain[:2]] != ["aten::add", "aten::rsqrt"]:
        raise refused
    after = _in_proportion(flow, chain[2:], steps[chain[1]].outs[0])
    if not any(_is_product(steps[j]) for j in after):
        raise refused
    eps = next((v for v in steps[chain[0]].args if isinstance(v, int | float)), None)
    scaled = [j for j in (*after, *_factors_of(flow, after)) if _multiplies(flow, j)]
    if eps is None or not scaled:
        raise Refused(f"the RMSNorm {where} has no weight that could take the factor sqrt(old / new)")
    axes = reduced(flow.trace, steps[i])
    counts = {a: int(m.sum()) for a, m in flow.keep.items()}
    ratio = math.prod(e.size for e in axes) / math.prod(new_size(e, counts) for e in axes)
    edit = Edit({a for e in axes for a in atoms(e) if a in flow.keep}, [_scale_of(flow, scaled[0], math.sqrt(ratio))], over={i})
    try:
        edit.attributes = [(*_eps_attribute(flow, steps[i].module, float(eps)), float(eps) * ratio)]
    except Refused as near:  # the scale of the weight corrects by far the larger part
        edit.why = str(near)
    return edit, chain[0], scaled[0]


def _multiplies(flow: MaskedWeights, i: int) -> bool:
    return _is_product(flow.trace.steps[i]) and _weight(flow, flow.trace.steps[i]) is not None


def _is_product(step: Step) -> bool:
    return step.operator.factor == "product"


def _factors_of(flow: MaskedWeights, chain: list[int]) -> list[int]:
    """Steps that compute the other factor of a product in the chain, and nothing else: w * x in w * x * rsqrt(...)."""
    product = next((i for i in chain if _is_product(flow.trace.steps[i])), None)
    found = [n for n in flow.trace.steps[product].inputs if n in flow.makers] if product is not None else []
    return [flow.makers[n] for n in found if flow.readers.get(n) == [product]]


def _chain(flow: MaskedWeights, number: int, most: int) -> list[int]:
    """The steps that follow a tensor, as long as exactly one step reads it and the model does not return it."""
    found: list[int] = []
    returned = flow.trace.record.returned
    while len(found) < most and len(flow.readers.get(number, ())) == 1 and number not in returned:
        found.append(flow.readers[number][0])
        outs = flow.trace.steps[found[-1]].outs
        if not outs:
            break
        number = outs[0]
    return found


def _in_proportion(flow: MaskedWeights, chain: list[int], number: int) -> list[int]:
    """The first steps of a chain, as long as their output is proportional to the tensor: no activation, no sum."""
    found: list[int] = []
    for j in chain:
        step = flow.trace.steps[j]
        factor = step.operator.factor
        divided = factor == "quotient" and (step.inputs[0] != number or step.kwargs)
        if factor not in ("same", "product", "quotient") or step.inputs.count(number) != 1 or divided:
            break
        found.append(j)
        number = step.outs[0]
    return found


def _weight(flow: MaskedWeights, step: Step) -> tuple[int, str] | None:
    """The operand that is computed from one parameter, and the name of that parameter."""
    for n in step.inputs:
        names = flow.origin.get(n, frozenset())
        if len(names) == 1:
            return n, next(iter(names))
    return None


def _scale_of(flow: MaskedWeights, i: int, factor: float) -> Scale:
    found = _weight(flow, flow.trace.steps[i])
    assert found is not None
    number, name = found
    parameter = flow.parameters.get(name)
    if parameter is None:
        raise Refused(f"the RMSNorm with {name} has no trainable weight that could take the factor sqrt(old / new)")
    if number in flow.trace.names:
        return Scale(name, factor)
    offset = (flow.value(number).to(parameter).reshape(parameter.shape) - flow.value(flow.numbers[name])).double()
    if float((offset - offset.mean()).abs().max()) > 1e-6:
        raise Refused(f"{name} enters its RMSNorm through a formula other than a sum with a number")
    return Scale(name, factor, round(float(offset.mean()), 6))


def _eps_attribute(flow: MaskedWeights, path: str, eps: float) -> tuple[str, str]:
    module = flow.trace.model.get_submodule(path)
    names = [k for k, v in vars(module).items() if isinstance(v, float) and v == eps]
    if not names and vars(module).get("eps", 0) is None:  # torch then uses the epsilon of the dtype
        names = ["eps"]
    if len(names) != 1:
        which = "no attribute of the module" if not names else f"the value of several attributes ({', '.join(sorted(names))})"
        raise Refused(f"the RMSNorm in {path or 'the model'}: eps = {eps:g} is {which}, so it cannot grow by old / new")
    return path, names[0]


# ---------------------------------------------------------------- sizes in formulas


class _Use(NamedTuple):
    """A size in the formulas of one module: the steps that use it (with its exponent), the old and new size, and its atoms."""

    module: str
    how: str
    old: int
    new: int
    atoms: frozenset[Atom]
    sites: dict[int, float]


def sizes_in_formulas(flow: MaskedWeights, bad: dict[Atom, str]) -> list[Edit]:
    """Scales one factor of each product whose scale, such as 1/sqrt(size), changes with the cut."""
    edits: list[Edit] = []
    for use in _uses(flow):
        scales = next((s for s, shares in _candidates(flow, use) if balanced(flow, s, shares)), None)
        if scales is not None:
            edits.append(Edit(set(use.atoms), scales))
            continue
        where = use.module or "the model"
        for atom in use.atoms:
            bad.setdefault(atom, f"its size enters a formula in {where} ({use.how}), and no weight there can be scaled for it")
    return edits


def _uses(flow: MaskedWeights) -> list[_Use]:
    trace = flow.trace
    counts = {a: int(m.sum()) for a, m in flow.keep.items()}
    if not any("scale" in a.flags for a in counts):
        return []
    now = {(id(c.owner), c.key): c.new for c in solve_attributes(trace, counts)}
    found: dict[tuple[str, int, int], _Use] = {}
    for use in trace.formula_uses:
        old, new = evaluate(use.source, {}, {}), evaluate(use.source, counts, now)
        cut = frozenset(a for e in trace.axes_in(use.source) for a in atoms(e) if a in counts)
        if cut and old != new:
            key = (use.module, old, new)
            known = found.get(key, _Use(use.module, use.how, old, new, frozenset(), {}))
            found[key] = known._replace(atoms=known.atoms | cut, sites=_sites(flow, use.module, old))
    return list(found.values())


def _sites(flow: MaskedWeights, module: str, size: int) -> dict[int, float]:
    """Steps of the module that multiply or divide by a power of the size, or use it as the default scale; the exponents."""
    found: dict[int, float] = {}
    for i, step in enumerate(flow.trace.steps):
        operator = step.operator
        attention = isinstance(operator.values, Attention)
        if step.module != module or not (attention or operator.factor in ("product", "quotient")):
            continue
        sign = -1.0 if operator.factor == "quotient" else 1.0
        for value in (*step.args, step.kwargs.get("scale")) if attention else step.args:
            exponent = _exponent(value, size)
            if exponent is not None:
                found[i] = sign * exponent
        if attention and step.kwargs.get("scale") is None and flow.trace.axes[step.inputs[0]][-1].size == size:
            found[i] = -0.5
    return found


def _exponent(value: Any, size: int) -> float | None:
    """The exponent with which a number is a power of the size, if it is one."""
    if type(value) is int:
        return 1.0 if value == size else None
    if not isinstance(value, float):
        return None
    return next((e for e in _EXPONENTS if math.isclose(value, size**e, rel_tol=1e-9)), None)


def _candidates(flow: MaskedWeights, use: _Use) -> Iterator[tuple[list[Scale], dict[int, float]]]:
    """Weights that may be scaled (a tensor that produces the units, or a segment of it, with its bias), and the power of the
    factor by which each formula changes on its own."""
    totals: dict[int, float] = {}
    for i, exponent in use.sites.items():
        end = _checkpoint(flow, i)
        totals[end] = totals.get(end, 0.0) + exponent
    if len(set(totals.values())) != 1:
        return
    total = next(iter(totals.values()))
    factor = (use.new / use.old) ** -total
    shares = {i: -exponent / total for i, exponent in use.sites.items()}
    parameters = flow.parameters
    for atom in use.atoms:
        members = [
            m for m in flow.trace.by_atom[atom].members if m.tensor in parameters and m.role in ("produce", "elementwise")
        ]
        for m in sorted(members, key=lambda m: (m.role != "produce", parameters[m.tensor].dim() < 2)):
            for rows in _segments(flow.trace.dims[m.tensor][m.dim], atom):
                scale = Scale(m.tensor, factor, 0.0, m.dim, rows)
                for bias in _biases_of(flow, m.tensor, rows, atom, [b.tensor for b in members]):
                    yield [scale, *(Scale(name, factor, 0.0, 0, at) for name, at in bias)], shares


def _biases_of(
    flow: MaskedWeights, weight: str, rows: Tensor, atom: Atom, members: list[str]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Possible biases of these rows: the one beside the weight, none, or any part of a vector of the group."""
    beside, parameters = weight.replace("weight", "bias"), flow.parameters
    if beside != weight and beside in parameters and parameters[beside].shape == rows.shape:
        yield [(beside, rows)]
        return
    yield []
    for name in (n for n in members if parameters[n].dim() == 1 and n != weight):
        yield from ([(name, at)] for at in _segments(flow.trace.dims[name][0], atom))


def _segments(e: Expr, atom: Atom) -> list[Tensor]:
    """Index sets of a dim that carry the atom: the whole dim, then each part of a concatenation."""
    whole = _carries(e, atom)
    found = [whole] if bool(whole.all()) else []
    e = norm(e)
    parts = list(e.parts) if isinstance(e, Cat) else []
    outer, inner = torch.ones(1, dtype=torch.bool), parts
    if isinstance(e, Prod) and isinstance(norm(e.parts[-1]), Cat):  # heads x (q | k | v)
        outer = torch.ones(math.prod(p.size for p in e.parts[:-1]), dtype=torch.bool)
        inner = list(norm(e.parts[-1]).parts)  # type: ignore[union-attr]
    for k in range(len(inner)):
        chosen = torch.cat([_carries(p, atom) & (i == k) for i, p in enumerate(inner)])
        if bool(chosen.any()):
            found.append((outer[:, None] & chosen[None]).reshape(-1))
    return found or [whole]


def _carries(e: Expr, atom: Atom) -> Tensor:
    e = norm(e)
    if isinstance(e, Cat):
        return torch.cat([_carries(p, atom) for p in e.parts])
    return torch.full((e.size,), atom in atoms(e))


def _checkpoint(flow: MaskedWeights, i: int) -> int:
    """The softmax or attention that the whole output of step i goes through, or the step itself."""
    for j in (i, *_chain(flow, flow.trace.steps[i].outs[0], 40)):
        if flow.trace.steps[j].operator.over == "softmax":
            return j
    return i
