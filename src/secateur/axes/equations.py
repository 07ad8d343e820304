"""Constraints on counts: equations and comparisons between sizes that the model's code relies on.

`x.view(b, n, self.heads, -1)` binds the attribute `heads` to an axis. A second call that uses `heads` for another axis makes
the constraint `size of the first axis == size of the second`. A branch such as `if self.groups > 1` must be taken after a cut
if it was taken before.
"""

from __future__ import annotations

import operator
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import nn

from .expressions import Atom, Expr, atoms, flag, same
from .integers import (
    Arithmetic,
    Attr,
    AttrId,
    AttrKey,
    AxisSize,
    Const,
    Source,
    Values,
    attributes_in,
    evaluate,
    leaves,
    signature,
)

# The place where a new value of an attribute is written: owner, key, and the reading module if the owner is a shared config.
AttrPlace = tuple[int, AttrKey, str]


@dataclass(frozen=True, eq=False)
class SizeUse:
    """An integer that a call used as the size of an axis: `source` has to give the size of `axis`."""

    module: str
    call: str
    source: Source
    axis: Expr
    value: int


@dataclass(frozen=True, eq=False)
class FormulaUse:
    """A size that enters a formula, as in 1/sqrt(head_dim): the result changes with the axis. `how` names the operation."""

    source: Source
    how: str
    module: str


@dataclass(frozen=True, eq=False)
class Guard:
    """A comparison of two integers in the traced run. After a cut it must have the same outcome."""

    compare: Callable[[Any, Any], Any]
    left: Source
    right: Source
    outcome: bool
    module: str

    def holds(self, counts: Mapping[Atom, int], attributes: Values) -> bool:
        left, right = (evaluate(source, counts, attributes) for source in (self.left, self.right))
        return bool(self.compare(left, right)) == self.outcome

    @property
    def is_equation(self) -> bool:
        return self.compare is (operator.eq if self.outcome else operator.ne)


@dataclass(frozen=True, eq=False)
class Constraint:
    """`compare(left, right)` must be `outcome`.

    `variables`: the atoms in it that can lose units, and the ids of attributes in it that no axis determines.
    """

    compare: Callable[[Any, Any], Any]
    left: Source
    right: Source
    outcome: bool
    why: str
    variables: tuple[Any, ...]

    def holds(self, counts: Mapping[Any, Any]) -> Any:
        """Returns whether the constraint holds; an array if counts are arrays."""
        left, right = (evaluate(s, counts, counts) for s in (self.left, self.right))
        return self.compare(left, right) if self.outcome else _negated(self.compare(left, right))

    def __str__(self) -> str:
        sign = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}[self.compare.__name__]
        return f"{self.why} ({'' if self.outcome else 'not '}{self.left} {sign} {self.right})"


def _negated(answer: Any) -> Any:
    return not answer if isinstance(answer, bool) else ~answer


def attr_place(attr: Attr, module: str) -> AttrPlace:
    """Returns where a new value of an attribute is written. A shared config can get a copy for each module that reads it."""
    return (*attr.id, "" if isinstance(attr.owner, nn.Module) else module)


class Binding(NamedTuple):
    """An attribute whose value is the size of an axis."""

    attr: Attr
    axis: Expr


def bindings(uses: Iterable[SizeUse], guards: Iterable[Guard]) -> dict[AttrPlace, list[Binding]]:
    """Returns the attributes that are used as the size of an axis, or compared equal to one, with these axes."""
    found: dict[AttrPlace, list[Binding]] = {}
    for use in uses:
        if isinstance(use.source, Attr):
            found.setdefault(attr_place(use.source, use.module), []).append(Binding(use.source, use.axis))
    for guard in guards:
        if guard.is_equation:
            for a, b in ((guard.left, guard.right), (guard.right, guard.left)):
                if isinstance(a, Attr) and isinstance(b, AxisSize):
                    found.setdefault(attr_place(a, guard.module), []).append(Binding(a, b.expr))
    return found


class _Demand(NamedTuple):
    """A constraint before attributes are replaced by the axes that they are bound to. `module`: where the code is."""

    compare: Callable[[Any, Any], Any]
    left: Source
    right: Source
    outcome: bool
    why: str
    module: str


def constraints(uses: Sequence[SizeUse], guards: Sequence[Guard], equal: Iterable[Sequence[Expr]]) -> list[Constraint]:
    """Returns every constraint that can fail when atoms lose units, without duplicates.

    `equal`: axes that must keep the same number of units, such as the results of a `chunk`.
    """
    bound = bindings(uses, guards)
    free = {
        attr.id
        for use in uses
        if isinstance(use.source, Arithmetic)
        for attr in attributes_in(use.source)
        if attr_place(attr, use.module) not in bound
    }
    found: dict[Any, Constraint] = {}
    for demand in _demands(bound, uses, guards, equal):
        made = _constraint(demand, bound, free)
        if made is not None:
            found.setdefault((made.compare.__name__, made.outcome, signature(made.left), signature(made.right)), made)
    return [c for c in found.values() if not _always_holds(c)]


def _demands(
    bound: Mapping[AttrPlace, Sequence[Binding]],
    uses: Iterable[SizeUse],
    guards: Iterable[Guard],
    equal: Iterable[Sequence[Expr]],
) -> Iterator[_Demand]:
    for entries in bound.values():
        first = AxisSize(entries[0].axis)
        for attr, axis in entries[1:]:
            yield _Demand(operator.eq, first, AxisSize(axis), True, f"both are {attr}", "")
    for use in uses:
        if not isinstance(use.source, Attr | Const):
            why = f"{use.call} in {use.module or 'the model'}"
            yield _Demand(operator.eq, use.source, AxisSize(use.axis), True, why, use.module)
    for guard in guards:
        why = f"compared in {guard.module or 'the model'}"
        yield _Demand(guard.compare, guard.left, guard.right, guard.outcome, why, guard.module)
    for parts in equal:
        for part in parts[1:]:
            yield _Demand(operator.eq, AxisSize(parts[0]), AxisSize(part), True, "parts of one split", "")


def _constraint(demand: _Demand, bound: Mapping[AttrPlace, Sequence[Binding]], free: set[AttrId]) -> Constraint | None:
    """Returns the constraint, or None if no atom that can lose units is in it or both sides are the same axis."""
    left, right = (_bind(source, bound, demand.module) for source in (demand.left, demand.right))
    if isinstance(left, AxisSize) and isinstance(right, AxisSize) and same(left.expr, right.expr):
        return None
    variables: dict[Any, None] = {}
    for leaf in (*leaves(left), *leaves(right)):
        if isinstance(leaf, AxisSize):
            variables |= dict.fromkeys(a for a in atoms(leaf.expr) if not a.frozen)
        elif isinstance(leaf, Attr) and leaf.id in free:
            variables[leaf.id] = None
    if not any(isinstance(v, Atom) for v in variables):
        return None
    return Constraint(demand.compare, left, right, demand.outcome, demand.why, tuple(variables))


def _bind(source: Source, bound: Mapping[AttrPlace, Sequence[Binding]], module: str) -> Source:
    """Replaces attributes by the size of the axis that they are bound to."""
    if isinstance(source, Attr):
        entries = bound.get(attr_place(source, module))
        return AxisSize(entries[0].axis) if entries else source
    if isinstance(source, Arithmetic):
        return Arithmetic(source.function, _bind(source.left, bound, module), _bind(source.right, bound, module))
    return source


def _always_holds(c: Constraint) -> bool:
    """True if no tried choice of counts breaks the constraint: the extremes, each atom alone, and four random choices."""
    if any(not isinstance(v, Atom) for v in c.variables):
        return False
    full = {a: a.size for a in c.variables}
    draw = random.Random(0)
    tries = [dict.fromkeys(full, 1), *({**full, a: n} for a in full for n in (1, max(1, a.size // 2)))]
    tries += [{a: draw.randint(1, a.size) for a in full} for _ in range(4)]
    return all(_holds(c, counts) for counts in tries)


def _holds(c: Constraint, counts: Mapping[Any, int]) -> bool:
    try:
        return bool(c.holds(counts))
    except ZeroDivisionError:
        return False


def flag_sizes_in_formulas(formulas: Iterable[FormulaUse], bound: Mapping[AttrId, Sequence[Expr]]) -> None:
    """Sets the flag "scale" on axes whose size enters a formula: with a smaller axis the formula has another value."""
    for use in formulas:
        for e in axes_in(use.source, bound):
            flag(e, "scale")


def bound_axes(uses: Iterable[SizeUse], guards: Iterable[Guard]) -> dict[AttrId, list[Expr]]:
    """Returns the axes that each attribute is the size of, by `Attr.id`."""
    found: dict[AttrId, list[Expr]] = {}
    for place, entries in bindings(uses, guards).items():
        found.setdefault(place[:2], []).extend(entry.axis for entry in entries)
    return found


def axes_in(source: Source, bound: Mapping[AttrId, Sequence[Expr]]) -> list[Expr]:
    """Returns the axes whose sizes are in a source, directly or through attributes that are bound to them."""
    found: list[Expr] = []
    for leaf in leaves(source):
        if isinstance(leaf, AxisSize):
            found.append(leaf.expr)
        elif isinstance(leaf, Attr):
            found += bound.get(leaf.id, ())
    return found
