"""Modules that the traced run did not reach: an expert that no token chose is taken to be wired as its siblings are."""

from __future__ import annotations

from torch import nn

from ..axes import Atom, Cat, Expr, Prod, atoms, closed, freeze, norm, unify
from .tracer import Record, Ref

UNUSED = "not used in the traced run"


def adopt_unused(model: nn.Module, record: Record) -> None:
    """Give the tensors of unused modules the axes of a used sibling in the same list; freeze the other unused tensors."""
    numbers = {name: number for number, name in record.names.items()}
    used = {record.names[n] for n in _read(record) if n in record.names}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            _adopt(f"{path}." if path else "", module, record, numbers, used)
    for name, number in numbers.items():
        if name not in used:
            for e in record.axes[number]:
                freeze(e, UNUSED)


def _read(record: Record) -> set[int]:
    found: set[int] = set()
    for step in record.steps:
        for value in (*step.args, *step.kwargs.values()):
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Ref):
                    found.add(item.number)
    return found


def _adopt(prefix: str, container: nn.Module, record: Record, numbers: dict[str, int], used: set[str]) -> None:
    """Children of one type and shape, of which some were used and some were not."""
    shapes: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, _ in container.named_children():
        inside = f"{prefix}{key}."
        own = [(name, i) for name, i in numbers.items() if name.startswith(inside)]
        shapes[inside] = {name.removeprefix(inside): tuple(e.size for e in record.axes[i]) for name, i in own}
    for inside, own in shapes.items():
        if own and not any(inside + name in used for name in own):
            model = next((s for s, o in shapes.items() if o == own and all(s + name in used for name in o)), None)
            if model is not None:
                _copy_wiring(model, inside, list(own), record, numbers)
                used |= {inside + name for name in own}


def _copy_wiring(model: str, inside: str, names: list[str], record: Record, numbers: dict[str, int]) -> None:
    outer = {a for name, i in numbers.items() if not name.startswith(model) for e in record.axes[i] for a in atoms(e)}
    fresh: dict[Atom, Atom] = {}

    def mapped(e: Expr) -> Expr:
        e = norm(e)
        if isinstance(e, Atom):
            if e in outer or e.frozen:
                return e
            if e not in fresh:
                fresh[e] = Atom(e.size)
                fresh[e].flags = e.flags
            return fresh[e]
        return (Cat if isinstance(e, Cat) else Prod)(mapped(p) for p in e.parts)

    for name in names:
        for d, (e, mine) in enumerate(zip(record.axes[numbers[model + name]], record.axes[numbers[inside + name]])):
            unify(mapped(closed(e)), mine)
            played = record.roles.get((model + name, d))
            if played:
                record.roles.setdefault((inside + name, d), set()).update(played)
