"""New values for the integer attributes that the forward pass reads, so that a cut model runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from .axes import Atom
from .equations import Place, bindings, place
from .provenance import Attr, Dim, Op, Source, evaluate, leaves
from .trace import Trace
from .tracer import Site


class Change(NamedTuple):
    """A new value for an integer attribute. `module`: where modules that share a config want different values, which one."""

    owner: Any
    key: tuple[str, Any]
    old: int
    new: int
    module: str | None


def solve_attributes(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> list[Change]:
    """The attributes that have to change with a cut. Raises ValueError when the code cannot be satisfied."""
    sites, guards = trace.sites, trace.guards
    counts = {a: int(k.sum()) if isinstance(k, Tensor) else int(k) for a, k in keep.items()}
    values: dict[Place, int] = {}
    attrs: dict[Place, Attr] = {}
    for where, entries in bindings(sites, guards).items():
        wanted = {evaluate(Dim(axis), counts, {}) for _, axis, _ in entries}
        if len(wanted) > 1:
            raise ValueError(f"{entries[0][0]} would have to be {sorted(wanted)} at once; plan the counts with plan_counts()")
        values[where], attrs[where] = wanted.pop(), entries[0][0]
    for site in sites:
        if isinstance(site.source, Op):
            _solve_site(site, counts, values, attrs)
    return _changes(values, attrs)


def _solve_site(site: Site, counts: Mapping[Atom, int], values: dict[Place, int], attrs: dict[Place, Attr]) -> None:
    """Find the attribute of a computed size that nothing has fixed yet."""
    target = evaluate(Dim(site.axis), counts, {})
    inside = [leaf for leaf in leaves(site.source) if isinstance(leaf, Attr)]
    now = {a.id: values[place(a, site.module)] for a in inside if place(a, site.module) in values}
    if _gives(site.source, counts, now, target):
        return
    for attr in inside:
        where = place(attr, site.module)
        if where in values:
            continue
        for value in sorted(range(1, 2 * attr.old + 1), key=lambda v: abs(v - attr.old)):
            if _gives(site.source, counts, {**now, attr.id: value}, target):
                values[where], attrs[where] = value, attr
                return
    raise ValueError(
        f"{site.call} in {site.module or 'the model'} computes {site.source}, which has to become {target}: "
        "no value of an attribute gives that; plan the counts with plan_counts()"
    )


def _gives(source: Source, counts: Mapping[Atom, int], attributes: Mapping[Any, int], target: int) -> bool:
    try:
        return bool(evaluate(source, counts, attributes) == target)
    except ZeroDivisionError:
        return False


def _changes(values: Mapping[Place, int], attrs: Mapping[Place, Attr]) -> list[Change]:
    wanted: dict[Any, set[int]] = {}
    for where, value in values.items():
        wanted.setdefault(where[:2], set()).add(value)
    found: dict[Any, Change] = {}
    for where, value in values.items():
        attr = attrs[where]
        shared = len(wanted[where[:2]]) > 1
        if value != attr.old:
            found[where if shared else where[:2]] = Change(attr.owner, attr.key, attr.old, value, where[2] if shared else None)
    return list(found.values())
