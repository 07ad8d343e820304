"""The counts nearest to the wanted ones that satisfy every constraint: an exact search, class by class."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from ..axes import Atom, Cat, Expr, Group, Prod, atoms, norm
from .equations import Constraint, signature
from .provenance import Const, Dim, Op
from .run import Trace

Variable = Hashable  # an atom, or the id of an attribute that the constraints leave open
_STEPS = 20_000  # values tried before the best answer so far is taken
_MANY = 100_000  # results that a search remembers


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
    counts: dict[Group, int] = {}
    moved: dict[Group, str] = {}
    for members, own, answer in _search(trace, atoms_of, multiple_of).answers({g.atom: n for g, n in wanted.items()}):
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


_known: WeakKeyDictionary[Trace, dict[Any, Search]] = WeakKeyDictionary()  # a budget asks many times, for nearly the same


def _search(trace: Trace, free: Mapping[Atom, Group], multiple: int) -> Search:
    known, key = _known.setdefault(trace, {}), (multiple, *free)
    if key not in known:
        rules = [c for c in trace.constraints if any(v in free for v in c.variables)]
        known[key] = Search(free, rules + _multiples(trace, free, multiple))
    return known[key]


def _multiples(trace: Trace, free: Mapping[Atom, Group], multiple: int) -> list[Constraint]:
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


def _form(c: Constraint) -> tuple[Any, list[tuple[Variable, int]]]:
    """A constraint without its names, and these in order, each with the size that it has."""
    names: list[tuple[Variable, int]] = []

    def walk(x: Any) -> Any:
        if isinstance(x, Const):
            return x.value
        if isinstance(x, Dim):
            return walk(norm(x.expr))
        if isinstance(x, Op):
            return x.function.__name__, walk(x.left), walk(x.right)
        if hasattr(x, "parts"):
            return type(x).__name__, *map(walk, x.parts)
        names.append((x, x.size) if isinstance(x, Atom) else (x.id, x.old))
        return "?"

    return (c.compare.__name__, c.outcome, walk(c.left), walk(c.right)), names


class Search:
    """Branch and bound over counts: filter by constraints with one open variable, split into independent parts, try values."""

    def __init__(self, free: Iterable[Atom], rules: Sequence[Constraint]) -> None:
        self.free, self.rules = dict.fromkeys(free), rules
        self.wanted: Mapping[Atom, int] = {}
        self.watching: dict[Variable, list[Constraint]] = {}
        for c in rules:
            for v in c.variables:
                self.watching.setdefault(v, []).append(c)
        every = dict.fromkeys([*self.free, *(v for c in self.rules for v in self.open_in(c, {}))])
        self.classes = self.components(list(every), {})
        self.steps = 0
        # What was found out, for later questions.
        self.known: dict[Any, dict[Variable, int] | None] = {}
        self.memo: dict[Any, tuple[float, list[int]] | None] = {}
        self.tables: dict[Any, np.ndarray] = {}
        self.forms: dict[Constraint, tuple[Any, list[tuple[Variable, int]]]] = {}

    def answers(
        self, wanted: Mapping[Atom, int]
    ) -> Iterable[tuple[list[Variable], list[Constraint], dict[Variable, int] | None]]:
        """The variables that constraints connect, with these and the best values, or None where none were found."""
        self.wanted = wanted
        for number, (members, rules) in enumerate(self.classes):
            key = number, *(wanted.get(v) for v in members)  # type: ignore[arg-type]
            if key not in self.known:
                self.known[key] = self.best(members, rules)
            yield members, rules, self.known[key]

    def open_in(self, c: Constraint, fixed: Mapping[Variable, int]) -> list[Variable]:
        return [v for v in c.variables if v not in fixed and (v in self.free or not isinstance(v, Atom))]

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
        for kept in (self.known, self.memo, self.tables):
            if len(kept) >= _MANY:
                kept.clear()
        answer = self.solve(members, rules, {}, {v: self.domain(v) for v in members}, float("inf"))
        return answer and answer[1]

    def solve(
        self,
        members: list[Variable],
        news: list[Constraint],
        fixed: dict[Variable, int],
        domains: dict[Variable, np.ndarray],
        bound: float,
    ) -> tuple[float, dict[Variable, int]] | None:
        """The cheapest values for `members` below `bound`, or None. `news`: constraints that may say more than before."""
        narrowed = self.narrow(news, fixed, domains)
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
        often = Counter(v for c in rules for v in c.variables)
        hub = max(part, key=lambda v: often[v])
        costs = self.cost(hub, domains[hub])
        best: tuple[float, dict[Variable, int]] | None = None
        for i in np.argsort(costs, kind="stable"):
            limit = min(bound, best[0] if best else float("inf"))
            if costs[i] >= limit or self.steps > _STEPS:
                break
            self.steps += 1
            found = self.solve(part, self.watching[hub], {**fixed, hub: int(domains[hub][i])}, domains, limit)
            best = found or best
        if self.steps <= _STEPS and (best is not None or bound == float("inf")):
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
        number = {v: -1 - i for i, v in enumerate(part)}

        def renamed(c: Constraint) -> Any:
            if c not in self.forms:
                self.forms[c] = _form(c)
            form, leaves = self.forms[c]
            return form, *(number.get(v) or fixed.get(v, size) for v, size in leaves)

        wants = tuple((self.wanted.get(v), v.size) if isinstance(v, Atom) else None for v in part)  # type: ignore[arg-type]
        ranges = tuple((len(domains[v]), int(domains[v].sum())) for v in part)
        return wants, ranges, tuple(map(renamed, rules))

    def narrow(
        self, news: list[Constraint], fixed: dict[Variable, int], domains: dict[Variable, np.ndarray]
    ) -> tuple[dict[Variable, int], dict[Variable, np.ndarray]] | None:
        """Drop values that a constraint with one open variable forbids, until nothing changes; None when none is left."""
        fixed, domains, queue = dict(fixed), dict(domains), list(news)
        while queue:
            c = queue.pop()
            left = self.open_in(c, fixed)
            if len(left) > 1:
                continue
            fine = self.table(c, left[0] if left else None, fixed)
            if not left:
                if not fine[0]:
                    return None
                continue
            values = domains[left[0]]
            values = values[fine[values - 1]]
            if not len(values):
                return None
            domains[left[0]] = values
            if len(values) == 1:
                fixed[left[0]] = int(values[0])
                queue += self.watching[left[0]]
        return fixed, domains

    def table(self, c: Constraint, v: Variable | None, fixed: Mapping[Variable, int]) -> np.ndarray:
        """For each value of `v`, from one on, whether the constraint holds; without one, whether it does. What else it speaks
        of is fixed or stays whole."""
        key = c, v, *(fixed.get(u) for u in c.variables)
        found = self.tables.get(key)
        if found is None:
            values = np.ones(1, dtype=np.int64) if v is None else self.domain(v)
            trial: dict[Any, Any] = dict(fixed) if v is None else {**fixed, v: values}
            with np.errstate(divide="ignore", invalid="ignore"):
                try:
                    holds = np.asarray(c.holds(trial))
                except ZeroDivisionError:
                    holds = np.asarray(False)
            self.tables[key] = found = np.broadcast_to(holds, values.shape)
        return found
