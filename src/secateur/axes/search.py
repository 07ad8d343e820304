"""Searches for counts that satisfy every constraint and are nearest to the wanted ones: exact, by branch and bound.

A variable is an atom (how many units it keeps) or an attribute that no axis determines (its new value). For the constraint
`width == 3 * head_dim` and wanted counts of width 8 and head_dim 3, the nearest legal counts are width 9 and head_dim 3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .equations import Constraint
from .expressions import Atom, norm
from .integers import Arithmetic, AxisSize, Const, attributes_in

CountVariable = Hashable  # an atom, or the id of an attribute
Fixed = Mapping[CountVariable, int]
CountDomains = Mapping[CountVariable, np.ndarray]  # the values that each variable can still have
_STEPS = 20_000  # after this many values the best answer so far is taken
_MANY = 100_000  # results that a search remembers


class Component(NamedTuple):
    """Variables that constraints connect, and these constraints."""

    variables: list[CountVariable]
    constraints: list[Constraint]


class Answer(NamedTuple):
    """Values for variables, and their distance from the wanted ones."""

    cost: float
    values: dict[CountVariable, int]


class CountSearch:
    """Narrows domains by constraints with one open variable, splits into independent components, and tries values.

    Results are kept: a budget asks many questions that differ in a few counts.
    """

    def __init__(self, free: Iterable[Atom], constraints: Sequence[Constraint]) -> None:
        self.free = dict.fromkeys(free)
        self.wanted: Mapping[Atom, int] = {}
        self.watching: dict[CountVariable, list[Constraint]] = {}
        for c in constraints:
            for v in c.variables:
                self.watching.setdefault(v, []).append(c)
        self.old = {attr.id: attr.old for c in constraints for attr in attributes_in(c.left, c.right)}
        every = dict.fromkeys([*self.free, *(v for c in constraints for v in self.open_in(c, {}))])
        self.components = self.connected(list(every), {})
        self.steps = 0
        self.known: dict[Any, dict[CountVariable, int] | None] = {}
        self.memo: dict[Any, tuple[float, list[int]] | None] = {}
        self.tables: dict[Any, np.ndarray] = {}
        self.forms: dict[Constraint, tuple[Any, list[tuple[CountVariable, int]]]] = {}

    def answers(self, wanted: Mapping[Atom, int]) -> Iterable[tuple[Component, dict[CountVariable, int] | None]]:
        """Yields each component with its best values, or with None if no legal values were found."""
        self.wanted = wanted
        for number, component in enumerate(self.components):
            key = number, *(wanted.get(v) for v in component.variables)  # type: ignore[arg-type]
            if key not in self.known:
                self.known[key] = self.best(component)
            yield component, self.known[key]

    def open_in(self, c: Constraint, fixed: Fixed) -> list[CountVariable]:
        return [v for v in c.variables if v not in fixed and (v in self.free or not isinstance(v, Atom))]

    def cost(self, v: CountVariable, values: Any) -> Any:
        return abs(values - self.wanted[v]) / v.size if isinstance(v, Atom) else 0.0 * values

    def domain(self, v: CountVariable) -> np.ndarray:
        largest = v.size if isinstance(v, Atom) else 2 * self.old[v]  # type: ignore[index]
        return np.arange(1, largest + 1, dtype=np.int64)

    def connected(self, variables: list[CountVariable], fixed: Fixed) -> list[Component]:
        """Returns the components of these variables, once the fixed ones no longer connect them."""
        left = dict.fromkeys(variables)
        found: list[Component] = []
        while left:
            start = next(iter(left))
            del left[start]
            part, constraints, queue = [start], {}, [start]
            while queue:
                for c in self.watching.get(queue.pop(), ()):
                    if id(c) not in constraints:
                        constraints[id(c)] = c
                        fresh = [v for v in self.open_in(c, fixed) if v in left]
                        for v in fresh:
                            del left[v]
                        part += fresh
                        queue += fresh
            found.append(Component(part, list(constraints.values())))
        return found

    def best(self, component: Component) -> dict[CountVariable, int] | None:
        variables, constraints = component
        if not constraints:
            return {v: self.wanted[v] for v in variables if isinstance(v, Atom)}
        self.steps = 0
        for kept in (self.known, self.memo, self.tables):
            if len(kept) >= _MANY:
                kept.clear()
        answer = self.solve(variables, constraints, {}, {v: self.domain(v) for v in variables}, float("inf"))
        return answer and answer.values

    def solve(
        self, variables: list[CountVariable], news: list[Constraint], fixed: Fixed, domains: CountDomains, bound: float
    ) -> Answer | None:
        """Returns the cheapest values below `bound`, or None. `news`: constraints that may now exclude more than before."""
        narrowed = self.narrow(news, fixed, domains)
        if narrowed is None:
            return None
        fixed, domains = narrowed
        total = sum(float(self.cost(v, fixed[v])) for v in variables if v in fixed)
        values = {v: fixed[v] for v in variables if v in fixed}
        for component in self.connected([v for v in variables if v not in fixed], fixed):
            found = self.solve_component(component, fixed, domains, bound - total)
            if found is None:
                return None
            total += found.cost
            values |= found.values
        return Answer(total, values) if total < bound else None

    def solve_component(self, component: Component, fixed: Fixed, domains: CountDomains, bound: float) -> Answer | None:
        variables, constraints = component
        if not constraints:
            v = variables[0]
            at = int(domains[v][np.argmin(self.cost(v, domains[v]))])
            return Answer(float(self.cost(v, at)), {v: at})
        key = self.shape(component, fixed, domains)
        if key in self.memo:
            known = self.memo[key]
            return known and (Answer(known[0], dict(zip(variables, known[1]))) if known[0] < bound else None)
        best = self.try_values(component, fixed, domains, bound)
        if self.steps <= _STEPS and (best is not None or bound == float("inf")):
            self.memo[key] = best and (best.cost, [best.values[v] for v in variables])
        return best

    def try_values(self, component: Component, fixed: Fixed, domains: CountDomains, bound: float) -> Answer | None:
        """Tries the values of the most constrained variable, nearest to the wanted one first."""
        variables, constraints = component
        often = Counter(v for c in constraints for v in c.variables)
        hub = max(variables, key=lambda v: often[v])
        costs = self.cost(hub, domains[hub])
        best: Answer | None = None
        for i in np.argsort(costs, kind="stable"):
            limit = min(bound, best.cost if best else float("inf"))
            if costs[i] >= limit or self.steps > _STEPS:
                break
            self.steps += 1
            found = self.solve(variables, self.watching[hub], {**fixed, hub: int(domains[hub][i])}, domains, limit)
            best = found or best
        return best

    def shape(self, component: Component, fixed: Fixed, domains: CountDomains) -> Any:
        """Returns a value that is equal for components that differ only in names, such as the layers of one model."""
        variables, constraints = component
        number = {v: -1 - i for i, v in enumerate(variables)}

        def renamed(c: Constraint) -> Any:
            if c not in self.forms:
                self.forms[c] = _form(c)
            form, leaves = self.forms[c]
            return form, *(number.get(v) or fixed.get(v, size) for v, size in leaves)

        wants = tuple((self.wanted.get(v), v.size) if isinstance(v, Atom) else None for v in variables)
        ranges = tuple((len(domains[v]), int(domains[v].sum())) for v in variables)
        return wants, ranges, tuple(map(renamed, constraints))

    def narrow(self, news: list[Constraint], fixed: Fixed, domains: CountDomains) -> tuple[Fixed, CountDomains] | None:
        """Drops values that a constraint with one open variable forbids, until nothing changes; None if no value is left."""
        fixed, domains, queue = dict(fixed), dict(domains), list(news)
        while queue:
            c = queue.pop()
            unknown = self.open_in(c, fixed)
            if len(unknown) > 1:
                continue
            fine = self.table(c, unknown[0] if unknown else None, fixed)
            if not unknown:
                if not fine[0]:
                    return None
                continue
            values = domains[unknown[0]]
            values = values[fine[values - 1]]
            if not len(values):
                return None
            domains[unknown[0]] = values
            if len(values) == 1:
                fixed[unknown[0]] = int(values[0])
                queue += self.watching[unknown[0]]
        return fixed, domains

    def table(self, c: Constraint, v: CountVariable | None, fixed: Fixed) -> np.ndarray:
        """Returns whether the constraint holds for each value of `v` from 1 on, or for the fixed values if `v` is None.

        The other variables of the constraint are fixed, or keep all their units.
        """
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


def _form(c: Constraint) -> tuple[Any, list[tuple[CountVariable, int]]]:
    """Returns a constraint without the names in it, and the names in order, each with its size or value before the cut."""
    names: list[tuple[CountVariable, int]] = []

    def walk(x: Any) -> Any:
        if isinstance(x, Const):
            return x.value
        if isinstance(x, AxisSize):
            return walk(norm(x.expr))
        if isinstance(x, Arithmetic):
            return x.function.__name__, walk(x.left), walk(x.right)
        if hasattr(x, "parts"):
            return type(x).__name__, *map(walk, x.parts)
        names.append((x, x.size) if isinstance(x, Atom) else (x.id, x.old))
        return "?"

    return (c.compare.__name__, c.outcome, walk(c.left), walk(c.right)), names
