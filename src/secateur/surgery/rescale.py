"""What a cut changes besides units: means over fewer elements (RMSNorm), and sizes that enter formulas (1/sqrt(head_dim)).

Both are made good by scaling weights. A guess at which weights is not trusted: the run says whether it was right.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graph import Atom, Cat, Expr, Prod, atoms, new_size, norm, solve_attributes
from ..graph.provenance import Attr, Dim, SizeUse, evaluate, leaves
from ..graph.tracer import Step
from .replay import Replay, Visit, numbers

_EXPONENTS = (-0.5, 0.5, -0.25, 0.25, -1.0, 1.0)  # of a size, as it enters formulas


class Refused(Exception):
    """There is no exact answer; the text is the reason."""


class Scale(NamedTuple):
    """A parameter p becomes `factor * (p + offset) - offset`: what is used is p + offset (1 + weight in some norms)."""

    parameter: nn.Parameter
    factor: Tensor
    offset: float = 0.0


@dataclass(eq=False)
class Edit:
    """A change to the model for the sake of some atoms."""

    atoms: set[Atom]
    scales: list[Scale] = field(default_factory=list)
    attributes: list[tuple[nn.Module, str, float]] = field(default_factory=list)

    def apply(self) -> None:
        for parameter, factor, offset in self.scales:
            parameter.data = factor.to(parameter) * (parameter.data + offset) - offset
        for module, name, number in self.attributes:
            setattr(module, name, number)


# ---------------------------------------------------------------- RMSNorm


def mean_of_squares(replay: Replay, atom: Atom, done: set[int]) -> list[Edit]:
    """x / sqrt(mean(x^2) + eps) * w over N of M units, the others zero, is the same with eps * M / N and w * sqrt(M / N)."""
    return [_rms(replay, i, done) for i in _steps_over(replay, atom, "aten::mean") if i not in done]


def _steps_over(replay: Replay, atom: Atom, name: str) -> list[int]:
    found = []
    for i, step in enumerate(replay.trace.steps):
        if step.name == name and any(atom in atoms(e) for e in _reduced(replay, step)):
            found.append(i)
    return found


def _reduced(replay: Replay, step: Step) -> list[Expr]:
    axes = replay.trace.axes[numbers(step)[0]]
    dims = step.args[1] if len(step.args) > 1 and isinstance(step.args[1], tuple) else range(len(axes))
    return [axes[d] for d in dims]


def _rms(replay: Replay, i: int, done: set[int]) -> Edit:
    steps, where = replay.trace.steps, replay.trace.steps[i].module or "the model"
    refused = Refused(f"mean in {where} runs over the cut axis and is no RMSNorm: over fewer units it is another number")
    made = steps[replay.makers.get(numbers(steps[i])[0], i)]
    power = made.name == "aten::pow" and made.args[1] == 2
    if not power and not (made.name == "aten::mul" and len(set(numbers(made))) == 1 and len(made.args) == 2):
        raise refused
    chain = _chain(replay, steps[i].outs[0], 8)
    names = [steps[j].name.partition("::")[2].rstrip("_") for j in chain]
    if names[:2] != ["add", "rsqrt"] or "mul" not in names[2:]:
        raise refused
    eps = next((v for v in steps[chain[0]].args if isinstance(v, int | float)), None)
    scaled = [j for j in chain[2:] if steps[j].name.startswith("aten::mul") and _weight(replay, steps[j])]
    if eps is None or not scaled:
        raise Refused(f"the RMSNorm {where} has no weight that could take the factor sqrt(old / new)")
    axes = _reduced(replay, steps[i])
    counts = {a: int(m.sum()) for a, m in replay.keep.items()}
    ratio = math.prod(e.size for e in axes) / math.prod(new_size(e, counts) for e in axes)
    done.add(i)
    cut = {a for e in axes for a in atoms(e) if a in replay.keep}
    scale = _scale_of(replay, scaled[0], math.sqrt(ratio))
    return Edit(cut, [scale], [(*_eps_attribute(replay, steps[i].module, float(eps)), float(eps) * ratio)])


def _chain(replay: Replay, number: int, most: int) -> list[int]:
    """The steps that follow a tensor as long as exactly one reads it."""
    found: list[int] = []
    while len(found) < most and len(replay.readers.get(number, ())) == 1:
        found.append(replay.readers[number][0])
        outs = replay.trace.steps[found[-1]].outs
        if not outs:
            break
        number = outs[0]
    return found


def _weight(replay: Replay, step: Step) -> tuple[int, str] | None:
    """The operand that is made of one parameter, and its name."""
    for n in numbers(step):
        names = replay.origin.get(n, frozenset())
        if len(names) == 1:
            return n, next(iter(names))
    return None


def _scale_of(replay: Replay, i: int, factor: float) -> Scale:
    found = _weight(replay, replay.trace.steps[i])
    assert found is not None
    number, name = found
    parameter = replay.parameters.get(name)
    if parameter is None:
        raise Refused(f"the RMSNorm with {name} has no trainable weight that could take the factor sqrt(old / new)")
    offset = (replay.made_of_weights(number).to(parameter).reshape(parameter.shape) - parameter.detach()).double()
    if float((offset - offset.mean()).abs().max()) > 1e-6:
        raise Refused(f"{name} enters its RMSNorm through a formula other than a sum with a number")
    return Scale(parameter, torch.tensor(factor, dtype=torch.float64), round(float(offset.mean()), 6))


def _eps_attribute(replay: Replay, path: str, eps: float) -> tuple[nn.Module, str]:
    module = replay.model.get_submodule(path)
    names = [k for k, v in vars(module).items() if isinstance(v, float) and v == eps]
    if not names and vars(module).get("eps", 0) is None:  # torch picks the machine's own epsilon
        names = ["eps"]
    if len(names) != 1:
        raise Refused(f"the RMSNorm {path}: eps = {eps:g} is no attribute of the module, so it cannot grow by old / new")
    return module, names[0]


# ---------------------------------------------------------------- sizes in formulas


class _Use(NamedTuple):
    """A size in formulas of one module: the sites (step -> exponent of the size there), old and new size, whose units."""

    module: str
    how: str
    old: int
    new: int
    atoms: frozenset[Atom]
    sites: dict[int, float]


def sizes_in_formulas(replay: Replay, bad: dict[Atom, str]) -> list[Edit]:
    """Scale one factor of each product whose scale 1/sqrt(size) changes with the cut, so that the product stays what it was."""
    left = _uses(replay)
    edits: list[Edit] = []
    options = {id(u): list(_candidates(replay, u)) for u in left}
    for rank in range(max(map(len, options.values()), default=0)):
        trial = {id(u): options[id(u)][rank] for u in left if rank < len(options[id(u)])}
        if not trial:
            break
        overrides = {i: _resized(u, e) for u in left if id(u) in trial for i, e in u.sites.items()}
        fine = agrees_after(replay, overrides, [s for scales in trial.values() for s in scales])
        settled = [u for u in left if id(u) in trial and all(fine[i] for i in u.sites)]
        edits += [Edit(set(u.atoms), trial[id(u)]) for u in settled]
        left = [u for u in left if u not in settled]
    for use in left:
        where = use.module or "the model"
        for atom in use.atoms:
            bad.setdefault(atom, f"its size enters a formula in {where} ({use.how}), and no weight there can be scaled for it")
    return edits


def _uses(replay: Replay) -> list[_Use]:
    trace = replay.trace
    counts = {a: int(m.sum()) for a, m in replay.keep.items()}
    if not any("scale" in a.flags for a in counts):
        return []
    now = {(id(c.owner), c.key): c.new for c in solve_attributes(trace, counts)}
    found: dict[tuple[str, int, int], _Use] = {}
    for use in trace.uses:
        old, new = evaluate(use.source, {}, {}), evaluate(use.source, counts, now)
        cut = frozenset(a for e in _axes_of(replay, use) for a in atoms(e) if a in counts)
        if cut and old != new:
            key = (use.module, old, new)
            known = found.get(key, _Use(use.module, use.how, old, new, frozenset(), {}))
            found[key] = known._replace(atoms=known.atoms | cut, sites=_sites(replay, use.module, old))
    return list(found.values())


def _axes_of(replay: Replay, use: SizeUse) -> list[Expr]:
    found: list[Expr] = []
    for leaf in leaves(use.source):
        if isinstance(leaf, Dim):
            found.append(leaf.expr)
        elif isinstance(leaf, Attr):
            found += [s.axis for s in replay.trace.sites if isinstance(s.source, Attr) and s.source.id == leaf.id]
    return found


def _sites(replay: Replay, module: str, size: int) -> dict[int, float]:
    """Steps of the module in which a power of the size stands as a number, or attention with its own scale; the exponents."""
    found: dict[int, float] = {}
    for i, step in enumerate(replay.trace.steps):
        kind = step.name.partition("::")[2].rstrip("_")
        if step.module != module or not (kind in ("mul", "div") or "scaled_dot_product" in kind):
            continue
        given = [*step.args, step.kwargs.get("scale")] if kind not in ("mul", "div") else list(step.args)
        for value in (v for v in given if isinstance(v, float)):
            power = next((e for e in _EXPONENTS if math.isclose(value, size**e, rel_tol=1e-9)), None)
            if power is not None:
                found[i] = -power if kind == "div" else power
        own = "scaled_dot_product" in kind and step.kwargs.get("scale") is None
        if own and replay.trace.axes[numbers(step)[0]][-1].size == size:
            found[i] = -0.5
    return found


def _resized(use: _Use, exponent: float) -> Visit:
    """The operator as it will be after the cut: with the new size."""

    def visit(i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        power = -exponent if step.name.partition("::")[2].rstrip("_") == "div" else exponent

        def new(value: Any) -> Any:
            fits = isinstance(value, float) and math.isclose(value, use.old**power, rel_tol=1e-9)
            return float(use.new**power) if fits else value

        if "scaled_dot_product" in step.name:
            return func(*map(new, args), **{**kwargs, "scale": float(use.new**power)})
        return func(*map(new, args), **kwargs)

    return visit


def _candidates(replay: Replay, use: _Use) -> Iterator[list[Scale]]:
    """Weights that may be one factor of the product: a tensor that makes the units, or a segment of it; with its bias."""
    totals: dict[int, float] = {}
    for i, exponent in use.sites.items():
        end = checkpoint(replay, i)
        totals[end] = totals.get(end, 0.0) + exponent
    if len(set(totals.values())) != 1:
        return
    factor = (use.new / use.old) ** -next(iter(totals.values()))
    parameters = replay.parameters
    for atom in use.atoms:
        members = [
            m for m in replay.trace.by_atom[atom].members if m.tensor in parameters and m.role in ("produce", "elementwise")
        ]
        for m in sorted(members, key=lambda m: (m.role != "produce", parameters[m.tensor].dim() < 2)):
            for rows in _segments(replay.trace.dims[m.tensor][m.dim], atom):
                scales = [_rows(parameters[m.tensor], m.dim, rows, factor)]
                bias = m.tensor.replace("weight", "bias")
                if bias != m.tensor and bias in parameters and parameters[bias].shape == rows.shape:
                    scales.append(_rows(parameters[bias], 0, rows, factor))
                yield scales


def _rows(parameter: nn.Parameter, dim: int, rows: Tensor, factor: float) -> Scale:
    shape = [-1 if d == dim else 1 for d in range(parameter.dim())]
    values = torch.where(rows, torch.tensor(factor, dtype=torch.float64), torch.tensor(1.0, dtype=torch.float64))
    return Scale(parameter, values.reshape(shape))


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


# ---------------------------------------------------------------- the judge


def checkpoint(replay: Replay, i: int) -> int:
    """The softmax or attention that everything of step i goes through, or the step itself."""
    for j in (i, *_chain(replay, replay.trace.steps[i].outs[0], 40)):
        if "softmax" in replay.trace.steps[j].name or "scaled_dot_product" in replay.trace.steps[j].name:
            return j
    return i


def agrees_after(replay: Replay, overrides: Mapping[int, Visit], scales: list[Scale] | None = None) -> dict[int, bool]:
    """For each step that is answered differently (with scaled weights): is everything as it was from its checkpoint on?"""
    ends = {i: checkpoint(replay, i) for i in overrides}
    before: dict[int, Any] = {}
    fine: dict[int, bool] = {}

    def remember(i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = func(*args, **kwargs)
        if i in ends.values():
            before[i] = out
        return out

    def compare(i: int, step: Step, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        out = overrides[i](i, step, func, args, kwargs) if i in overrides else func(*args, **kwargs)
        if i not in before:
            return out
        a, b = (replay.zeroed(_first(o), step.outs[0], replay.cut_atoms(step.outs[0])) for o in (before[i], out))
        exact = math.sqrt(torch.finfo(a.dtype).eps) * (1e-2 if a.dtype == torch.float64 else 1.0)
        fine[i] = float((a - b).abs().max()) <= exact * float(a.abs().max())
        return before[i]

    replay.run(remember)
    with _scaled(scales or []):
        replay.run(compare)
    return {i: fine[end] for i, end in ends.items()}


def _first(out: Any) -> Tensor:
    return out[0] if isinstance(out, list | tuple) else out


@contextlib.contextmanager
def _scaled(scales: list[Scale]) -> Iterator[None]:
    saved = [(p, p.data) for p, _, _ in scales]
    try:
        Edit(set(), scales).apply()
        yield
    finally:
        for parameter, data in reversed(saved):
            parameter.data = data
