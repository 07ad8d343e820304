"""New values for integer attributes, so that a cut model runs: those that the traced run read, and those that it did not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..axes import Atom, atoms, new_size
from .constructor import Blueprint, Equation, determined
from .equations import Place, bindings, place, signature
from .provenance import Attr, Const, Dim, Guard, Op, Source, evaluate, leaves
from .run import Trace
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
    return _solved(trace, keep)[0]


def undetermined(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> list[str]:
    """Attributes that the traced run did not read, that the constructor made from sizes that change, and that stay as they are:
    no config gives the new sizes, or several do. Code that reads them would have to be looked at."""
    return _solved(trace, keep)[1]


def _solved(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> tuple[list[Change], list[str]]:
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
    for where, attr in trace.record.read.items():  # given to some call, and nothing says that it changes: it stays there
        if where not in values:
            values[where], attrs[where] = attr.old, attr
    changes, left = _unread(trace, counts, values)
    return [*_changes(values, attrs), *changes], left


def _unread(trace: Trace, counts: Mapping[Atom, int], values: Mapping[Place, int]) -> tuple[list[Change], list[str]]:
    """Changes for what the run did not read, by what the constructor made of the config; and what stays undetermined."""
    plan = trace.blueprint
    if plan is None or not counts:
        return [], []
    sources = [*(s.source for s in trace.sites), *(use.source for use in trace.uses)]
    read = {leaf.id for source in sources for leaf in leaves(source) if isinstance(leaf, Attr)}
    read |= {where[:2] for where in trace.record.read}
    held = _compared(trace.guards)
    solver = Solver(trace, plan, counts, values)
    changes: list[Change] = []
    left: list[str] = []
    for owner, path, key, source, old in _candidates(trace.model, plan):
        if (id(owner), key) in read or not solver.moves(source):
            continue
        new = solver.value(source, path)
        if new is None or not all(guard.holds(counts, {(id(owner), key): new}) for guard in held.get((id(owner), key), ())):
            name = key[0] if key[1] is None else f"{key[0]}[{key[1]!r}]"
            left.append(f"{path}.{name}" if path else f"config.{name}")
        elif new != old:
            changes.append(Change(owner, key, old, new, None))
    return changes, left


def _compared(guards: Iterable[Guard]) -> dict[Any, list[Guard]]:
    found: dict[Any, list[Guard]] = {}
    for guard in guards:
        for leaf in (*leaves(guard.left), *leaves(guard.right)):
            if isinstance(leaf, Attr):
                found.setdefault(leaf.id, []).append(guard)
    return found


def _candidates(model: nn.Module, plan: Blueprint) -> Iterable[tuple[Any, str, Any, Source, int]]:
    """Attributes of modules, but for torch's own layers, which follow their weights; and the numbers of the config itself."""
    modules = dict(model.named_modules())
    for (path, key), source in plan.attributes.items():
        module = modules.get(path)
        if module is None or type(module).__module__.startswith("torch.nn."):
            continue
        value = vars(module).get(key[0])
        try:
            value = value if key[1] is None else value[key[1]]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue
        if type(value) is int and value == evaluate(source, {}, {}):
            yield module, path, key, source, value
    numbers = {
        leaf.id: leaf
        for source in (*plan.sizes.values(), *plan.attributes.values())
        for leaf in leaves(source)
        if isinstance(leaf, Attr)
    }
    for leaf in numbers.values():
        yield leaf.owner, "", leaf.key, leaf, leaf.old


class Solver:
    """Values of constructor expressions in a cut model: from the sizes of one module, or of as many around it as it takes."""

    def __init__(self, trace: Trace, plan: Blueprint, counts: Mapping[Atom, int], values: Mapping[Place, int]) -> None:
        self.equations: list[tuple[str, Equation]] = []
        self.moving: set[Any] = set()  # config numbers behind sizes that change
        cut = set(counts)
        for (name, d), source in plan.sizes.items():
            axes = trace.dims.get(name)
            if axes is None:
                continue
            self.equations.append((name, (source, new_size(axes[d], counts))))
            if not cut.isdisjoint(atoms(axes[d])):
                self.moving |= {leaf.id for leaf in leaves(source) if isinstance(leaf, Attr)}
        modules = dict(trace.model.named_modules())
        for (path, key), source in plan.attributes.items():
            now = values.get((id(modules.get(path)), key, ""))
            if now is not None:
                self.equations.append((f"{path}.", (source, now)))
        self.known: dict[Any, int | None] = {}

    def moves(self, source: Source) -> bool:
        return any(leaf.id in self.moving for leaf in leaves(source) if isinstance(leaf, Attr))

    def value(self, source: Source, path: str) -> int | None:
        parts = path.split(".") if path else []
        for n in range(len(parts), -1, -1):
            scope = ".".join([*parts[:n], ""]) if n else ""
            inside = {(signature(s), v): (s, v) for name, (s, v) in self.equations if name.startswith(scope)}
            key = (signature(source), frozenset(inside))
            if key not in self.known:
                found = determined(source, list(inside.values()))
                # no config gives the sizes of this module: what it computed on the way (its head dimension) is a number now
                self.known[key] = determined(*_taken(source, list(inside.values()))) if found is None and n else found
            if self.known[key] is not None:
                return self.known[key]
        return None


def _taken(target: Source, equations: Sequence[Equation]) -> tuple[Source, list[Equation]]:
    """The equations with computed numbers that are parts of others as the values they have, no longer as formulas.

    A constructor computes them once; a cut sets each by itself, so that `heads * (width // heads)` has solutions again.
    """
    known = {signature(s): v for s, v in equations if isinstance(s, Op)}
    used: set[Any] = set()

    def taken(source: Source, whole: bool = False) -> Source:
        key = signature(source)
        if key in known and not whole:
            used.add(key)
            return Const(known[key])
        return Op(source.function, taken(source.left), taken(source.right)) if isinstance(source, Op) else source

    found = [(signature(s), taken(s, whole=True), v) for s, v in equations]
    target = taken(target, whole=True)
    return target, [(s, v) for key, s, v in found if key not in used]


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
