"""Fewer units where a formula knows how many there are: RMSNorm's mean, and sizes in scales such as 1/sqrt(head dimension).

What changes with the size is made good in weights. A guess at which weights is not trusted: that the factors cancel is followed
through the run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ...axes import Atom, Cat, Expr, Prod, atoms, evaluate, new_size, norm
from ...trace import Step, solve_attributes
from .scale_balance import balanced
from .wiring import Silence, reduced, tensors_in

_EXPONENTS = (-0.5, 0.5, -0.25, 0.25, -1.0, 1.0)  # of a size, as it enters formulas
_VIEWS = {"view", "_unsafe_view", "reshape", "expand", "unsqueeze", "squeeze", "transpose", "permute", "alias", "detach"}
_PROPORTIONAL = _VIEWS | {"mul", "div", "neg", "_to_copy", "clone"}


class Refused(Exception):
    """There is no exact answer; the text is the reason."""


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
    """A change to the model for the sake of some atoms, right as long as their removed units are silent in the steps `over`."""

    atoms: set[Atom]
    scales: list[Scale] = field(default_factory=list)
    attributes: list[tuple[str, str, float]] = field(default_factory=list)
    over: set[int] = field(default_factory=set)
    why: str = ""  # it is not exact, if so


# ---------------------------------------------------------------- RMSNorm


def mean_of_squares(flow: Silence, cut: list[Atom], bad: dict[Atom, str]) -> list[Edit]:
    """x / sqrt(mean(x^2) + eps) * w over N of M units, the others zero, is the same with eps * M / N and w * sqrt(M / N).

    Once for each weight, however often it is used; every use has to be such a norm, over as many of as many units.
    """
    found: dict[str, Edit] = {}
    known: dict[str, set[int]] = {}  # weight -> the products with it
    eps: dict[tuple[str, str], dict[int, float]] = {}  # attribute -> the sums with it, and what it should be there
    beside = {name for n in flow.trace.record.returned for name in flow.origin.get(n, ())}  # weights with other uses, too
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
        used = () if prepares(flow, step) else {w for n in tensors_in(step) for w in flow.origin.get(n, ())} & found.keys()
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


def prepares(flow: Silence, step: Step) -> bool:
    """Whether what a step makes is known to be made of weights, so that those who read it are looked at instead."""
    return bool(step.outs) and all(n in flow.origin for n in step.outs)


def _torn(flow: Silence, eps: dict[tuple[str, str], dict[int, float]]) -> set[tuple[str, str]]:
    """Attributes that should be several numbers, or that steps of their module use which are no sum of such a norm."""
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


def _steps_over(flow: Silence, atom: Atom, name: str) -> list[int]:
    found = []
    for i, step in enumerate(flow.trace.steps):
        if step.name == name and any(atom in atoms(e) for e in reduced(flow.trace, step)):
            found.append(i)
    return found


def _rms(flow: Silence, i: int) -> tuple[Edit, int, int]:
    """What makes good that the mean of step i is over fewer units; the steps that add eps and multiply with the weight."""
    steps, where = flow.trace.steps, flow.trace.steps[i].module or "the model"
    refused = Refused(f"mean in {where} runs over the cut axis and is no RMSNorm: over fewer units it is another number")
    made = steps[flow.makers.get(tensors_in(steps[i])[0], i)]
    power = made.name == "aten::pow" and made.args[1] == 2
    if not power and not (made.name == "aten::mul" and len(set(tensors_in(made))) == 1 and len(made.args) == 2):
        raise refused
    chain = _chain(flow, steps[i].outs[0], 8)
    if [steps[j].kind.rstrip("_") for j in chain[:2]] != ["add", "rsqrt"]:
        raise refused
    after = _in_proportion(flow, chain[2:], steps[chain[1]].outs[0])
    if not any(steps[j].kind.startswith("mul") for j in after):
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
    except Refused as near:  # by far the larger part is made good all the same
        edit.why = str(near)
    return edit, chain[0], scaled[0]


def _multiplies(flow: Silence, i: int) -> bool:
    return flow.trace.steps[i].name.startswith("aten::mul") and _weight(flow, flow.trace.steps[i]) is not None


def _factors_of(flow: Silence, chain: list[int]) -> list[int]:
    """Steps that make the other factor of a product in the chain, for it alone: w * x in w * x * rsqrt(...)."""
    product = next((i for i in chain if flow.trace.steps[i].name.startswith("aten::mul")), None)
    found = [n for n in tensors_in(flow.trace.steps[product]) if n in flow.makers] if product is not None else []
    return [flow.makers[n] for n in found if flow.readers.get(n) == [product]]


def _chain(flow: Silence, number: int, most: int) -> list[int]:
    """The steps that follow a tensor as long as exactly one reads it, and the model does not return it."""
    found: list[int] = []
    returned = flow.trace.record.returned
    while len(found) < most and len(flow.readers.get(number, ())) == 1 and number not in returned:
        found.append(flow.readers[number][0])
        outs = flow.trace.steps[found[-1]].outs
        if not outs:
            break
        number = outs[0]
    return found


def _in_proportion(flow: Silence, chain: list[int], number: int) -> list[int]:
    """The first steps of a chain, as long as what comes out grows with the tensor as a product does: no activation, no sum."""
    found: list[int] = []
    for j in chain:
        step = flow.trace.steps[j]
        divided = step.kind.startswith("div") and (step.inputs[0] != number or step.kwargs)
        if step.kind.rstrip("_") not in _PROPORTIONAL or step.inputs.count(number) != 1 or divided:
            break
        found.append(j)
        number = step.outs[0]
    return found


def _weight(flow: Silence, step: Step) -> tuple[int, str] | None:
    """The operand that is made of one parameter, and its name."""
    for n in tensors_in(step):
        names = flow.origin.get(n, frozenset())
        if len(names) == 1:
            return n, next(iter(names))
    return None


def _scale_of(flow: Silence, i: int, factor: float) -> Scale:
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


def _eps_attribute(flow: Silence, path: str, eps: float) -> tuple[str, str]:
    module = flow.trace.model.get_submodule(path)
    names = [k for k, v in vars(module).items() if isinstance(v, float) and v == eps]
    if not names and vars(module).get("eps", 0) is None:  # torch picks the machine's own epsilon
        names = ["eps"]
    if len(names) != 1:
        which = "no attribute of the module" if not names else f"the value of several attributes ({', '.join(sorted(names))})"
        raise Refused(f"the RMSNorm in {path or 'the model'}: eps = {eps:g} is {which}, so it cannot grow by old / new")
    return path, names[0]


# ---------------------------------------------------------------- sizes in formulas


class _Use(NamedTuple):
    """A size in formulas of one module: the sites (step -> exponent of the size there), old and new size, whose units."""

    module: str
    how: str
    old: int
    new: int
    atoms: frozenset[Atom]
    sites: dict[int, float]


def sizes_in_formulas(flow: Silence, bad: dict[Atom, str]) -> list[Edit]:
    """Scale one factor of each product whose scale 1/sqrt(size) changes with the cut, so that the product stays what it was."""
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


def _uses(flow: Silence) -> list[_Use]:
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


def _sites(flow: Silence, module: str, size: int) -> dict[int, float]:
    """Steps of the module in which a power of the size stands as a number, or attention with its own scale; the exponents."""
    found: dict[int, float] = {}
    for i, step in enumerate(flow.trace.steps):
        kind = step.kind.rstrip("_")
        if step.module != module or not (kind in ("mul", "div") or "scaled_dot_product" in kind):
            continue
        given = [*step.args, step.kwargs.get("scale")] if kind not in ("mul", "div") else list(step.args)
        for value in (v for v in given if isinstance(v, float)):
            power = next((e for e in _EXPONENTS if math.isclose(value, size**e, rel_tol=1e-9)), None)
            if power is not None:
                found[i] = -power if kind == "div" else power
        if any(type(v) is int and v == size for v in given):
            found[i] = -1.0 if kind == "div" else 1.0
        own = "scaled_dot_product" in kind and step.kwargs.get("scale") is None
        if own and flow.trace.axes[tensors_in(step)[0]][-1].size == size:
            found[i] = -0.5
    return found


def _candidates(flow: Silence, use: _Use) -> Iterator[tuple[list[Scale], dict[int, float]]]:
    """Weights that may be one factor of the product (a tensor that makes the units, or a segment of it; with its bias), and by
    which power of the factor each formula changes by itself."""
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


def _biases_of(flow: Silence, weight: str, rows: Tensor, atom: Atom, members: list[str]) -> Iterator[list[tuple[str, Tensor]]]:
    """What may be the bias of these rows: the one beside the weight, none, or any part of a vector of the group."""
    beside, parameters = weight.replace("weight", "bias"), flow.parameters
    if beside != weight and beside in parameters and parameters[beside].shape == rows.shape:
        yield [(beside, rows)]
        return
    yield []
    for name in (n for n in members if parameters[n].dim() == 1 and n != weight):
        yield from ([(name, at)] for at in _segments(flow.trace.dims[name][0], atom))


def _segments(e: Expr, atom: Atom) -> list[Tensor]:
    """Index sets of a dim that carry the atom: the whole dim, then every part of a concatenation alone."""
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


def _checkpoint(flow: Silence, i: int) -> int:
    """The softmax or attention that everything of step i goes through, or the step itself."""
    for j in (i, *_chain(flow, flow.trace.steps[i].outs[0], 40)):
        if "softmax" in flow.trace.steps[j].name or "scaled_dot_product" in flow.trace.steps[j].name:
            return j
    return i
