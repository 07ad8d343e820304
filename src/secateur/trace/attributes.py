"""Computes new values for integer attributes, so that the model's code runs after a cut.

If half of the heads are removed, `self.heads` has to be half as large. Attributes that the traced run read follow from the
axes that they are the size of. Attributes that it did not read follow from the constructor (`constructor.Blueprint`), if it
determines them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from .._layers import right_sizes
from ..axes import (
    Arithmetic,
    Atom,
    Attr,
    AttrId,
    AttrKey,
    AttrPlace,
    Const,
    Equation,
    Guard,
    SizeUse,
    Source,
    atoms,
    attr_place,
    attributes_in,
    bindings,
    determined,
    evaluate,
    new_size,
    signature,
)
from .constructor import Blueprint
from .result import Trace


class Change(NamedTuple):
    """A new value for an integer attribute.

    `module`: None, or the module that the value is for, if modules that share a config need different values.
    """

    owner: Any
    key: AttrKey
    old: int
    new: int
    module: str | None


def solve_attributes(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> list[Change]:
    """Returns the attributes that change with a cut. Raises ValueError if no values make the model's code work."""
    return _solved(trace, keep)[0]


def undetermined(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> list[str]:
    """Returns the attributes that keep their value although the constructor computed them from sizes that change.

    The traced run did not read them, and no config, or more than one, gives the new sizes. Code that reads them needs a review.
    """
    return _solved(trace, keep)[1]


def _solved(trace: Trace, keep: Mapping[Atom, Tensor] | Mapping[Atom, int]) -> tuple[list[Change], list[str]]:
    counts = {a: int(k.sum()) if isinstance(k, Tensor) else int(k) for a, k in keep.items()}
    values: dict[AttrPlace, int] = {}
    attrs: dict[AttrPlace, Attr] = {}
    for where, entries in bindings(trace.size_uses, trace.guards).items():
        wanted = {new_size(entry.axis, counts) for entry in entries}
        if len(wanted) > 1:
            raise ValueError(
                f"{entries[0].attr} would have to be {sorted(wanted)} at once; plan the counts with plan_counts(), which keeps "
                "them consistent"
            )
        values[where], attrs[where] = wanted.pop(), entries[0].attr
    for use in trace.size_uses:
        if isinstance(use.source, Arithmetic):
            _solve_use(use, counts, values, attrs)
    for where, attr in trace.record.passed.items():  # passed to a call, and no axis says that it changes: keeps its value there
        if where not in values:
            values[where], attrs[where] = attr.old, attr
    changes, left = _solve_unread(trace, counts, values)
    return [*_changes(values, attrs), *changes], left


def _solve_use(use: SizeUse, counts: Mapping[Atom, int], values: dict[AttrPlace, int], attrs: dict[AttrPlace, Attr]) -> None:
    """Finds a value for one attribute in a computed size that does not have a value yet, so that the size is right."""
    target = new_size(use.axis, counts)
    inside = attributes_in(use.source)
    now = {a.id: values[attr_place(a, use.module)] for a in inside if attr_place(a, use.module) in values}
    if _gives(use.source, counts, now, target):
        return
    for attr in inside:
        where = attr_place(attr, use.module)
        if where in values:
            continue
        for value in sorted(range(1, 2 * attr.old + 1), key=lambda v: abs(v - attr.old)):
            if _gives(use.source, counts, {**now, attr.id: value}, target):
                values[where], attrs[where] = value, attr
                return
    raise ValueError(
        f"{use.call} in {use.module or 'the model'} computes {use.source}, which has to become {target}: "
        "no value of an attribute gives that; plan the counts with plan_counts()"
    )


def _gives(source: Source, counts: Mapping[Atom, int], attributes: Mapping[AttrId, int], target: int) -> bool:
    try:
        return bool(evaluate(source, counts, attributes) == target)
    except ZeroDivisionError:
        return False


def _changes(values: Mapping[AttrPlace, int], attrs: Mapping[AttrPlace, Attr]) -> list[Change]:
    wanted: dict[AttrId, set[int]] = {}
    for where, value in values.items():
        wanted.setdefault(where[:2], set()).add(value)
    found: dict[Any, Change] = {}
    for where, value in values.items():
        attr = attrs[where]
        shared = len(wanted[where[:2]]) > 1
        if value != attr.old:
            found[where if shared else where[:2]] = Change(attr.owner, attr.key, attr.old, value, where[2] if shared else None)
    return list(found.values())


# ---------------------------------------------------------------- attributes that the run did not read


class _Candidate(NamedTuple):
    """An attribute that the constructor computed: its owner, the owner's path, and how it was computed."""

    owner: Any
    path: str
    key: AttrKey
    source: Source
    old: int

    def __str__(self) -> str:
        name, index = self.key
        return f"{self.path or 'config'}.{name}{'' if index is None else f'[{index!r}]'}"


def _solve_unread(trace: Trace, counts: Mapping[Atom, int], values: Mapping[AttrPlace, int]) -> tuple[list[Change], list[str]]:
    """Returns changes for attributes that the run did not read, and the names of those that stay undetermined."""
    plan = trace.blueprint
    if plan is None or not counts:
        return [], []
    read = {attr.id for use in (*trace.size_uses, *trace.formula_uses) for attr in attributes_in(use.source)}
    read |= {where[:2] for where in trace.record.passed}
    guards = _guards_by_attribute(trace.guards)
    solver = _BlueprintSolver(trace, plan, counts, values)
    changes: list[Change] = []
    left: list[str] = []
    for one in _candidates(trace.model, plan):
        key = (id(one.owner), one.key)
        if key in read or not solver.changes(one.source):
            continue
        new = solver.value(one.source, one.path)
        if new is None or not all(guard.holds(counts, {key: new}) for guard in guards.get(key, ())):
            left.append(str(one))
        elif new != one.old:
            changes.append(Change(one.owner, one.key, one.old, new, None))
    return changes, left


def _guards_by_attribute(guards: Iterable[Guard]) -> dict[AttrId, list[Guard]]:
    found: dict[AttrId, list[Guard]] = {}
    for guard in guards:
        for attr in attributes_in(guard.left, guard.right):
            found.setdefault(attr.id, []).append(guard)
    return found


def _candidates(model: nn.Module, plan: Blueprint) -> Iterable[_Candidate]:
    """Yields attributes of modules, except sizes of layers, which follow their weights; then the numbers of the config."""
    modules = dict(model.named_modules())
    for (path, key), source in plan.attributes.items():
        module = modules.get(path)
        if module is None or type(module).__module__.startswith("torch.nn.") or key[0] in dict(right_sizes(module)):
            continue
        value = vars(module).get(key[0])
        try:
            value = value if key[1] is None else value[key[1]]  # type: ignore[index]
        except (KeyError, IndexError, TypeError):
            continue
        if type(value) is int and value == evaluate(source, {}, {}):
            yield _Candidate(module, path, key, source, value)
    numbers = {attr.id: attr for attr in attributes_in(*plan.sizes.values(), *plan.attributes.values())}
    for attr in numbers.values():
        yield _Candidate(attr.owner, "", attr.key, attr, attr.old)


class _BlueprintSolver:
    """Finds the values of constructor expressions in a cut model.

    The equations are the new sizes of the tensors in one module, or in as many modules around it as are needed.
    """

    def __init__(self, trace: Trace, plan: Blueprint, counts: Mapping[Atom, int], values: Mapping[AttrPlace, int]) -> None:
        self.equations: list[tuple[str, Equation]] = []
        self.changing: set[AttrId] = set()  # config numbers in sizes that change
        cut = set(counts)
        for (name, d), source in plan.sizes.items():
            axes = trace.dims.get(name)
            if axes is None:
                continue
            self.equations.append((name, (source, new_size(axes[d], counts))))
            if not cut.isdisjoint(atoms(axes[d])):
                self.changing |= {attr.id for attr in attributes_in(source)}
        modules = dict(trace.model.named_modules())
        for (path, key), source in plan.attributes.items():
            now = values.get((id(modules.get(path)), key, ""))
            if now is not None:
                self.equations.append((f"{path}.", (source, now)))
        self.known: dict[Any, int | None] = {}

    def changes(self, source: Source) -> bool:
        return any(attr.id in self.changing for attr in attributes_in(source))

    def value(self, source: Source, path: str) -> int | None:
        parts = path.split(".") if path else []
        for n in range(len(parts), -1, -1):
            scope = ".".join([*parts[:n], ""]) if n else ""
            inside = {(signature(s), v): (s, v) for name, (s, v) in self.equations if name.startswith(scope)}
            key = (signature(source), frozenset(inside))
            if key not in self.known:
                found = determined(source, list(inside.values()))
                if found is None and n:  # no config gives these sizes: take numbers that the module computed as given
                    found = determined(*_with_known_parts(source, list(inside.values())))
                self.known[key] = found
            if self.known[key] is not None:
                return self.known[key]
        return None


def _with_known_parts(target: Source, equations: Sequence[Equation]) -> tuple[Source, list[Equation]]:
    """Replaces computed numbers that are parts of other expressions by their values.

    A constructor computes such a number once, while a cut sets it independently. Then `heads * (width // heads)` has solutions
    again.
    """
    known = {signature(s): v for s, v in equations if isinstance(s, Arithmetic)}
    used: set[Any] = set()

    def replaced(source: Source, whole: bool = False) -> Source:
        key = signature(source)
        if key in known and not whole:
            used.add(key)
            return Const(known[key])
        if isinstance(source, Arithmetic):
            return Arithmetic(source.function, replaced(source.left), replaced(source.right))
        return source

    found = [(signature(s), replaced(s, whole=True), v) for s, v in equations]
    target = replaced(target, whole=True)
    return target, [(s, v) for key, s, v in found if key not in used]
