"""What the code demands of sizes: equations between counts, and comparisons that must come out as before."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..axes import Atom, Expr, Fam, atoms, flag, norm, same
from .provenance import Attr, Const, Dim, Guard, Op, SizeUse, Source, evaluate, leaves
from .tracer import Record, Site

Place = tuple[int, Any, str]  # owner, key, and the reading module where the owner is shared (a config)


@dataclass(frozen=True, eq=False)
class Constraint:
    """`compare(left, right)` has to be `outcome`. `variables`: atoms that may shrink, and attributes that nothing else sets."""

    compare: Callable[[Any, Any], Any]
    left: Source
    right: Source
    outcome: bool
    why: str
    variables: tuple[Any, ...]

    def holds(self, counts: Mapping[Any, Any]) -> Any:
        """Whether it holds; with arrays for counts, an array."""
        left, right = (evaluate(s, counts, counts) for s in (self.left, self.right))
        return self.compare(left, right) if self.outcome else _negated(self.compare(left, right))

    def __str__(self) -> str:
        sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[self.compare.__name__]
        return f"{'' if self.outcome else 'not '}{self.left} {sign} {self.right} ({self.why})"


def _negated(answer: Any) -> Any:
    return not answer if isinstance(answer, bool) else ~answer


def place(attr: Attr, module: str) -> Place:
    """Where a new value would be written: a shared config may get a copy for each module that reads it."""
    return (*attr.id, "" if isinstance(attr.owner, nn.Module) else module)


def bindings(sites: Iterable[Site], guards: Iterable[Guard]) -> dict[Place, list[tuple[Attr, Expr, str]]]:
    """Attributes that are the size of an axis as they stand, and the axes."""
    found: dict[Place, list[tuple[Attr, Expr, str]]] = {}
    for site in sites:
        if isinstance(site.source, Attr):
            found.setdefault(place(site.source, site.module), []).append((site.source, site.axis, site.module))
    for guard in guards:
        if _is_equation(guard):
            for a, b in ((guard.left, guard.right), (guard.right, guard.left)):
                if isinstance(a, Attr) and isinstance(b, Dim):
                    found.setdefault(place(a, guard.module), []).append((a, b.expr, guard.module))
    return found


def _is_equation(guard: Guard) -> bool:
    return (guard.compare is operator.eq and guard.outcome) or (guard.compare is operator.ne and not guard.outcome)


def constraints(record: Record, guards: Sequence[Guard]) -> list[Constraint]:
    """Every demand that can fail when atoms lose units, once."""
    bound = bindings(record.sites, guards)
    found: dict[Any, Constraint] = {}
    free: set[Any] = set()

    def add(compare: Any, left: Source, right: Source, outcome: bool, why: str, module: str) -> None:
        made = _constraint(compare, _bind(left, bound, module), _bind(right, bound, module), outcome, why, free)
        if made is not None:
            found.setdefault((compare.__name__, outcome, signature(made.left), signature(made.right)), made)

    for site in record.sites:
        if isinstance(site.source, Op):
            inside = [leaf for leaf in leaves(site.source) if isinstance(leaf, Attr)]
            free |= {attr.id for attr in inside if place(attr, site.module) not in bound}
    for entries in bound.values():
        for attr, axis, _ in entries[1:]:
            add(operator.eq, Dim(entries[0][1]), Dim(axis), True, f"both are {attr}", "")
    for site in record.sites:
        if not isinstance(site.source, Attr | Const):
            add(operator.eq, site.source, Dim(site.axis), True, f"{site.call} in {site.module or 'the model'}", site.module)
    for guard in guards:
        add(guard.compare, guard.left, guard.right, guard.outcome, f"compared in {guard.module or 'the model'}", guard.module)
    for parts in record.equal.values():
        for part in parts[1:]:
            add(operator.eq, Dim(parts[0]), Dim(part), True, "parts of one split", "")
    return [c for c in found.values() if not _always(c)]


def _bind(source: Source, bound: Mapping[Place, list[tuple[Attr, Expr, str]]], module: str) -> Source:
    if isinstance(source, Attr):
        entries = bound.get(place(source, module))
        return Dim(entries[0][1]) if entries else source
    if isinstance(source, Op):
        return Op(source.function, _bind(source.left, bound, module), _bind(source.right, bound, module))
    return source


def _constraint(compare: Any, left: Source, right: Source, outcome: bool, why: str, free: set[Any]) -> Constraint | None:
    if isinstance(left, Dim) and isinstance(right, Dim) and same(left.expr, right.expr):
        return None
    variables: dict[Any, None] = {}
    for leaf in (*leaves(left), *leaves(right)):
        if isinstance(leaf, Dim):
            variables |= dict.fromkeys(a for a in atoms(leaf.expr) if not a.frozen)
        elif isinstance(leaf, Attr) and leaf.id in free:
            variables[leaf.id] = None
    if not any(isinstance(v, Atom) for v in variables):
        return None
    return Constraint(compare, left, right, outcome, why, tuple(variables))


def _always(c: Constraint) -> bool:
    """Whether no choice of counts breaks it, judged by trying: the extremes, each atom alone, and some at random."""
    if any(not isinstance(v, Atom) for v in c.variables):
        return False
    full = {a: a.size for a in c.variables}
    draw = random.Random(0)
    tries = [dict.fromkeys(full, 1), *({**full, a: n} for a in full for n in (1, max(1, a.size // 2)))]
    tries += [{a: draw.randint(1, a.size) for a in full} for _ in range(4)]
    return all(_safely(c, counts) for counts in tries)


def _safely(c: Constraint, counts: Mapping[Any, int]) -> bool:
    try:
        return bool(c.holds(counts))
    except ZeroDivisionError:
        return False


def signature(source: Source) -> Any:
    """A value that is equal for equal sources."""
    if isinstance(source, Dim):
        return _axis_signature(source.expr)
    if isinstance(source, Attr):
        return source.id
    if isinstance(source, Op):
        return source.function.__name__, signature(source.left), signature(source.right)
    return source.value


def _axis_signature(e: Expr) -> Any:
    e = norm(e)
    if isinstance(e, Atom):
        return ("atom", e.serial)
    parts = e.parts[:1] if isinstance(e, Fam) else e.parts
    return (type(e).__name__, *map(_axis_signature, parts))


def flag_sizes_in_formulas(sites: Iterable[Site], guards: Iterable[Guard], uses: Iterable[SizeUse]) -> None:
    """Axes whose size enters a formula get the flag "scale": there, a smaller axis computes something else."""
    bound = bound_axes(sites, guards)
    for use in uses:
        for e in axes_in(use.source, bound):
            flag(e, "scale")


def bound_axes(sites: Iterable[Site], guards: Iterable[Guard]) -> dict[Any, list[Expr]]:
    """The axes whose size an attribute is, by `Attr.id`."""
    found: dict[Any, list[Expr]] = {}
    for where, entries in bindings(sites, guards).items():
        found.setdefault(where[:2], []).extend(axis for _, axis, _ in entries)
    return found


def axes_in(source: Source, bound: Mapping[Any, list[Expr]]) -> list[Expr]:
    """The axes whose sizes a number is made of, itself or by attributes."""
    found: list[Expr] = []
    for leaf in leaves(source):
        found += [leaf.expr] if isinstance(leaf, Dim) else bound.get(leaf.id, []) if isinstance(leaf, Attr) else []
    return found
