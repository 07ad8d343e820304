"""Solves integer equations: the value of a target expression if all solutions agree on it.

With `heads * dim == 12` and `dim == 4`, the value of `heads` is 3. With the first equation alone it is not determined.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from .integers import AttrId, Source, attributes_in, evaluate

Equation = tuple[Source, int]  # the source must have this value
AttrDomains = Mapping[AttrId, np.ndarray]  # the values that each attribute can still have
_TRIES = 2000  # give up after this many values were tried


def determined(target: Source, equations: Sequence[Equation]) -> int | None:
    """Returns the value of the target that all solutions of the equations agree on.

    Returns None if solutions disagree, if there is none, or if the search takes too long. Values from 1 to twice the old value
    of each attribute are tried.
    """
    old = {attr.id: attr.old for source, _ in equations for attr in attributes_in(source)}
    wanted = _ids(target)
    if not wanted <= old.keys():
        return None
    search = _Enumeration(target, wanted, _connected(wanted, equations))
    search.run({attr: np.arange(1, 2 * value + 1) for attr, value in old.items()})
    return search.found.pop() if len(search.found) == 1 and search.tries > 0 else None


def _ids(source: Source) -> set[AttrId]:
    return {attr.id for attr in attributes_in(source)}


def _connected(wanted: set[AttrId], equations: Sequence[Equation]) -> list[Equation]:
    """Returns the equations that share attributes with the wanted ones, directly or through other equations."""
    reach, left, taken = set(wanted), list(equations), []
    grown = True
    while grown:
        grown = False
        for equation in list(left):
            inside = _ids(equation[0])
            if inside & reach:
                left.remove(equation)
                taken.append(equation)
                reach |= inside
                grown = True
    return taken


class _Enumeration:
    """Tries values, most constrained attribute first, and collects the values of the target until two differ."""

    def __init__(self, target: Source, wanted: set[AttrId], equations: Sequence[Equation]) -> None:
        self.target, self.wanted, self.equations = target, wanted, equations
        self.constrained = {attr for source, _ in equations for attr in _ids(source)}
        self.found: set[int] = set()
        self.tries = _TRIES

    def run(self, domains: AttrDomains) -> None:
        narrowed = _narrow(self.equations, dict(domains))
        if narrowed is None or len(self.found) > 1 or self.tries <= 0:
            return
        values = {v: int(d[0]) for v, d in narrowed.items() if len(d) == 1}
        unknown = [v for v in narrowed if v not in values and v in self.constrained]
        if self.wanted <= values.keys() and not unknown:
            self.found.add(int(evaluate(self.target, {}, values)))
            return
        hub = min(unknown or [v for v in self.wanted if v not in values], key=lambda v: len(narrowed[v]))
        for value in narrowed[hub]:
            self.tries -= 1
            self.run({**narrowed, hub: np.array([value])})


def _narrow(equations: Sequence[Equation], domains: dict[AttrId, np.ndarray]) -> dict[AttrId, np.ndarray] | None:
    """Drops values that an equation with one unknown forbids, until nothing changes. Returns None if no value is left."""
    changed = True
    while changed:
        changed = False
        for source, value in equations:
            inside = _ids(source)
            unknown = [v for v in inside if len(domains[v]) > 1]
            if len(unknown) > 1:
                continue
            trial = {v: domains[v] if v in unknown else int(domains[v][0]) for v in inside}
            with np.errstate(divide="ignore", invalid="ignore"):
                try:
                    fine = np.asarray(evaluate(source, {}, trial) == value)
                except ZeroDivisionError:
                    return None
            if not fine.any():
                return None
            if unknown and not fine.all():
                domains[unknown[0]] = domains[unknown[0]][fine]
                changed = True
    return domains
