"""The counts nearest to the wanted ones that satisfy every constraint: an exact search, class by class."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from .axes import Atom, Cat, Expr, Prod, atoms, norm
from .equations import Constraint, signature
from .groups import Group
from .provenance import Const, Dim, Op
from .trace import Trace

Variable = Hashable  # an atom, or the id of an attribute that the constraints leave open
_STEPS = 20_000  # values tried before the best answer so far is taken


@dataclass
class Counts:
    """`counts`: units to keep for each group. `moved`: groups that do not get what was wanted, and why."""

    counts: dict[Group, int]
    moved: dict[Group, str]


def plan_counts(trace: Trace, wanted: Mapping[Group, int], multiple_of: int = 1) -> Counts:
    """Legal counts nearest to the wanted ones, by the sum of relative differences. Groups that are not named stay whole.

    With `multiple_of`, every axis (or part of a concatenation) whose size is a multiple of it keeps such a size.
    """
    for group, count in wanted.items():
        if group.frozen:
            raise ValueError(f"{group} may lose no unit")
        if not 1 <= count <= group.size:
            raise ValueError(f"{group}: wanted {count} units; possible are 1 to {group.size}")
    atoms_of = {group.atom: group for group in wanted}
    rules = [c for c in trace.constraints if any(v in atoms_of for v in c.variables)]
    rules += _multiples(trace, atoms_of, multiple_of)
    search = Search({g.atom: n for g, n in wanted.items()}, rules)
    counts: dict[Group, int] = {}
    moved: dict[Group, str] = {}
    for members, own in search.classes():
        answer = search.best(members, own)
        for atom in members:
            if isinstance(atom, Atom):
                group = atoms_of[atom]
                counts[group] = answer[atom] if answer else group.size
                if counts[group] != wanted[group]:
                    moved[group] = _reason(wanted[group], counts[group], [c for c in own if atom in c.variables], bool(answer))
    return Counts(counts, moved)


def _reason(wanted: int, count: int, rules: Sequence[Constraint], solved: bool) -> str:
    shown = "; ".join(dict.fromkeys(map(str, rules[:3]))) + (" ..." if len(rules) > 3 else "")
    return f"wanted {wanted}, {'nearest legal' if solved else 'no legal counts found, so all are kept:'} {count}: {shown}"


_LONG, _LANES = 32, 8  # an inner axis this long stays a multiple of this: kernels run along it, and stumble over other lengths


_known: WeakKeyDictionary[Trace, dict[Any, list[Constraint]]] = WeakKeyDictionary()  # a search asks many times


def _multiples(trace: Trace, free: Mapping[Atom, Group], multiple: int) -> list[Constraint]:
    known = _known.setdefault(trace, {})
    key = (multiple, frozenset(free))
    if key not in known:
        known[key] = _find_multiples(trace, free, multiple)
    return known[key]


def _find_multiples(trace: Trace, free: Mapping[Atom, Group], multiple: int) -> list[Constraint]:
    found: dict[Any, Constraint] = {}
    for axes in trace.dims.values():
        for term, inner in (t for e in axes for t in _terms(e)):
            of = max(multiple, _LANES) if inner and term.size >= _LONG and term.size % max(multiple, _LANES) == 0 else multiple
            variables = tuple(dict.fromkeys(a for a in atoms(term) if a in free))
            if variables and of > 1 and term.size % of == 0:
                left = Op(operator.mod, Dim(term), Const(of))
                why = f"multiple_of={of}" if of == multiple else f"{term.size} per outer unit: stays a multiple of {of}"
                found[signature(left)] = Constraint(operator.eq, left, Const(0), True, why, variables)
    return list(found.values())


def _terms(e: Expr) -> Iterable[tuple[Expr, bool]]:
    """The parts of an axis that have a length of their own, and whether one is the inner part of a product (dims of a head)."""
    e = norm(e)
    if isinstance(e, Cat):
        return [t for p in e.parts for t in _terms(p)]
    if isinstance(e, Prod) and any(isinstance(p, Cat) for p in e.parts):
        return [t for p in e.parts for t in _terms(p)]
    if isinstance(e, Prod) and len(e.parts) > 1:
        return [(e, False), (norm(e.parts[-1]), True)]
    return [(e, False)]


class Search:
    """Branch and bound over counts: filter by constraints with one open variable, split into independent parts, try values."""

    def __init__(self, wanted: Mapping[Atom, int], rules: Sequence[Constraint]) -> None:
        self.wanted, self.rules = wanted, rules
        self.watching: dict[Variable, list[Constraint]] = {}
        for c in rules:
            for v in c.variables:
                self.watching.setdefault(v, []).append(c)
        self.steps = 0
        self.memo: dict[Any, tuple[float, list[int]] | None] = {}

    def open_in(self, c: Constraint, fixed: Mapping[Variable, int]) -> list[Variable]:
        return [v for v in c.variables if v not in fixed and (v in self.wanted or not isinstance(v, Atom))]

    def cost(self, v: Variable, values: Any) -> Any:
        return abs(values - self.wanted[v]) / v.size if isinstance(v, Atom) else 0.0 * values

    def domain(self, v: Variable) -> np.ndarray:
        return np.arange(1, (v.size if isinstance(v, Atom) else 2 * self.old(v)) + 1, dtype=np.int64)

    def old(self, v: Variable) -> int:
        from .provenance import Attr, leaves

        for c in self.watching[v]:
            for leaf in (*leaves(c.left), *leaves(c.right)):
                if isinstance(leaf, Attr) and leaf.id == v:
                    return leaf.old
        raise KeyError(v)

    def classes(self) -> list[tuple[list[Variable], list[Constraint]]]:
        """Variables that constraints connect, with their constraints."""
        every = dict.fromkeys([*self.wanted, *(v for c in self.rules for v in self.open_in(c, {}))])
        return self.components(list(every), {})

    def components(
        self, members: list[Variable], fixed: Mapping[Variable, int]
    ) -> list[tuple[list[Variable], list[Constraint]]]:
        left = dict.fromkeys(members)
        found: list[tuple[list[Variable], list[Constraint]]] = []
        while left:
            start = next(iter(left))
            del left[start]
            part, rules, queue = [start], {}, [start]
            while queue:
                for c in self.watching.get(queue.pop(), ()):
                    if id(c) not in rules:
                        rules[id(c)] = c
                        fresh = [v for v in self.open_in(c, fixed) if v in left]
                        for v in fresh:
                            del left[v]
                        part += fresh
                        queue += fresh
            found.append((part, list(rules.values())))
        return found

    def best(self, members: list[Variable], rules: list[Constraint]) -> dict[Variable, int] | None:
        if not rules:  # nothing is in the way
            return {v: self.wanted[v] for v in members if isinstance(v, Atom)}
        self.steps = 0
        answer = self.solve(members, rules, {}, {v: self.domain(v) for v in members}, float("inf"))
        return answer and answer[1]

    def solve(
        self,
        members: list[Variable],
        rules: list[Constraint],
        fixed: dict[Variable, int],
        domains: dict[Variable, np.ndarray],
        bound: float,
    ) -> tuple[float, dict[Variable, int]] | None:
        """The cheapest values for `members` below `bound`, or None."""
        narrowed = self.narrow(rules, fixed, domains)
        if narrowed is None:
            return None
        fixed, domains = narrowed
        total = sum(float(self.cost(v, fixed[v])) for v in members if v in fixed)
        answer = {v: fixed[v] for v in members if v in fixed}
        for part, own in self.components([v for v in members if v not in fixed], fixed):
            found = self.part(part, own, fixed, domains, bound - total)
            if found is None:
                return None
            total += found[0]
            answer |= found[1]
        return (total, answer) if total < bound else None

    def part(
        self,
        part: list[Variable],
        rules: list[Constraint],
        fixed: dict[Variable, int],
        domains: dict[Variable, np.ndarray],
        bound: float,
    ) -> tuple[float, dict[Variable, int]] | None:
        """One connected part: try the values of its most constrained variable, nearest first."""
        if not rules:
            v = part[0]
            values = domains[v]
            at = int(values[np.argmin(self.cost(v, values))])
            return float(self.cost(v, at)), {v: at}
        key = self.shape(part, rules, fixed, domains)
        if key in self.memo:
            known = self.memo[key]
            return known and ((known[0], dict(zip(part, known[1]))) if known[0] < bound else None)
        hub = max(part, key=lambda v: sum(v in c.variables for c in rules))
        costs = self.cost(hub, domains[hub])
        best: tuple[float, dict[Variable, int]] | None = None
        for i in np.argsort(costs, kind="stable"):
            limit = min(bound, best[0] if best else float("inf"))
            if costs[i] >= limit or self.steps > _STEPS:
                break
            self.steps += 1
            found = self.solve(part, rules, {**fixed, hub: int(domains[hub][i])}, domains, limit)
            best = found or best
        if best is not None or bound == float("inf"):
            self.memo[key] = best and (best[0], [best[1][v] for v in part])
        return best

    def shape(
        self,
        part: list[Variable],
        rules: list[Constraint],
        fixed: Mapping[Variable, int],
        domains: Mapping[Variable, np.ndarray],
    ) -> Any:
        """A value that is equal for parts that differ in names only, such as the layers of one model."""
        number = {v: i for i, v in enumerate(part)}

        def renamed(x: Any) -> Any:
            if isinstance(x, Atom):
                return ("var", number[x]) if x in number else fixed.get(x, x.size)
            if isinstance(x, Dim):
                return renamed(norm(x.expr))
            if isinstance(x, Op):
                return x.function.__name__, renamed(x.left), renamed(x.right)
            if isinstance(x, Const):
                return x.value
            if hasattr(x, "parts"):
                return (type(x).__name__, *map(renamed, x.parts))
            return ("var", number[x.id]) if x.id in number else fixed.get(x.id, x.old)

        wants = tuple((self.wanted.get(v), v.size) if isinstance(v, Atom) else None for v in part)  # type: ignore[arg-type]
        ranges = tuple((len(domains[v]), int(domains[v].sum())) for v in part)
        return wants, ranges, tuple((c.compare.__name__, c.outcome, renamed(c.left), renamed(c.right)) for c in rules)

    def narrow(
        self, rules: list[Constraint], fixed: dict[Variable, int], domains: dict[Variable, np.ndarray]
    ) -> tuple[dict[Variable, int], dict[Variable, np.ndarray]] | None:
        """Drop values that a constraint with one open variable forbids, until nothing changes; None when none is left."""
        fixed, domains, queue = dict(fixed), dict(domains), list(rules)
        while queue:
            c = queue.pop()
            left = self.open_in(c, fixed)
            if len(left) > 1:
                continue
            trial: dict[Any, Any] = {**fixed, **({left[0]: domains[left[0]]} if left else {})}
            with np.errstate(divide="ignore", invalid="ignore"):
                try:
                    fine = np.asarray(c.holds(trial))
                except ZeroDivisionError:
                    return None
            if not left:
                if not bool(fine.all()):
                    return None
                continue
            values = domains[left[0]][np.broadcast_to(fine, domains[left[0]].shape)]
            if not len(values):
                return None
            domains[left[0]] = values
            if len(values) == 1:
                fixed[left[0]] = int(values[0])
                queue += self.watching[left[0]]
        return fixed, domains
