"""Plans counts: how many units each group keeps, as near as possible to the wanted numbers and legal for the model's code.

If the code views `width` as 3 heads of `width // 3`, then 7 units of `width` are not legal. The planner returns 6, the nearest
legal count, and the constraint that forbids 7.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .equations import Constraint
from .expressions import Atom, Cat, Expr, Prod, atoms, norm
from .groups import Group
from .integers import Arithmetic, AxisSize, Const, signature
from .search import CountSearch

# Kernels are slow along inner axes of odd lengths: an inner axis of at least _LONG that is a multiple of _LANES stays one.
_LONG, _LANES = 32, 8


@dataclass
class PlannedCounts:
    """`counts`: the units that each group keeps. `moved`: the groups that do not get the wanted number, and why."""

    counts: dict[Group, int]
    moved: dict[Group, str]


class Planner:
    """Plans counts for the tensors of one model: `dims` holds their axes, `constraints` what the code relies on.

    Searches are kept between calls: a budget asks for many similar counts.
    """

    def __init__(self, dims: Mapping[str, Sequence[Expr]], constraints: Sequence[Constraint]) -> None:
        self.dims, self.constraints = dims, constraints
        self._searches: dict[Any, CountSearch] = {}

    def counts(self, wanted: Mapping[Group, int], multiple_of: int = 1) -> PlannedCounts:
        """Returns the legal counts nearest to the wanted ones, by the sum of relative differences.

        Groups that are not named keep all units. With `multiple_of`, every axis (or segment of a concatenation) whose size is a
        multiple of it keeps such a size.
        """
        for group, count in wanted.items():
            if group.frozen:
                raise ValueError(f"{group} cannot lose units")
            if not 1 <= count <= group.size:
                raise ValueError(f"{group}: wanted {count} units; possible are 1 to {group.size}")
        groups = {group.atom: group for group in wanted}
        planned = PlannedCounts({}, {})
        for component, answer in self._search(groups, multiple_of).answers({g.atom: n for g, n in wanted.items()}):
            for atom in component.variables:
                if isinstance(atom, Atom):
                    group = groups[atom]
                    planned.counts[group] = count = answer[atom] if answer else group.size
                    if count != wanted[group]:
                        own = [c for c in component.constraints if atom in c.variables]
                        planned.moved[group] = _reason(wanted[group], count, own, bool(answer))
        return planned

    def _search(self, free: Mapping[Atom, Group], multiple: int) -> CountSearch:
        key = multiple, *free
        if key not in self._searches:
            own = [c for c in self.constraints if any(v in free for v in c.variables)]
            self._searches[key] = CountSearch(free, own + self._multiples(free, multiple))
        return self._searches[key]

    def _multiples(self, free: Mapping[Atom, Group], multiple: int) -> list[Constraint]:
        """Returns constraints that keep sizes multiples of `multiple`, and long inner axes multiples of _LANES."""
        found: dict[Any, Constraint] = {}
        for axes in self.dims.values():
            for length, inner in (t for e in axes for t in _lengths(e)):
                wide = max(multiple, _LANES)
                of = wide if inner and length.size >= _LONG and length.size % wide == 0 else multiple
                variables = tuple(dict.fromkeys(a for a in atoms(length) if a in free))
                if variables and of > 1 and length.size % of == 0:
                    left = Arithmetic(operator.mod, AxisSize(length), Const(of))
                    why = f"multiple_of={of}" if of == multiple else f"{length.size} per outer unit: stays a multiple of {of}"
                    found[signature(left)] = Constraint(operator.eq, left, Const(0), True, why, variables)
        return list(found.values())


def _reason(wanted: int, count: int, constraints: Sequence[Constraint], solved: bool) -> str:
    shown = "; ".join(dict.fromkeys(map(str, constraints[:3]))) + (" ..." if len(constraints) > 3 else "")
    return f"keeps {count} instead of {wanted}{'' if solved else ', because no legal counts were found'}: {shown}"


def _lengths(e: Expr) -> Iterable[tuple[Expr, bool]]:
    """Returns the parts of an axis that have a length of their own. The bool tells the inner part of a product (a head dim)."""
    e = norm(e)
    if isinstance(e, Cat):
        return [t for p in e.parts for t in _lengths(p)]
    if isinstance(e, Prod) and any(isinstance(p, Cat) for p in e.parts):
        return [t for p in e.parts for t in _lengths(p)]
    if isinstance(e, Prod) and len(e.parts) > 1:
        return [(e, False), (norm(e.parts[-1]), True)]
    return [(e, False)]
