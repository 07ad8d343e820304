"""Axes for modules that the traced run did not reach.

In a mixture of experts, an expert that no token was sent to has not run. It is assumed to be wired like a sibling of the same
type and shapes that has run: the same outer axes, and inner axes of its own.
"""

from __future__ import annotations

from torch import nn

from ..axes import Atom, Cat, Expr, Prod, atoms, closed, freeze, norm, unify
from .tracer import RunRecord

UNUSED = "not used in the traced run"


def adopt_unused(model: nn.Module, record: RunRecord) -> None:
    """Gives tensors of unused modules the axes of a used sibling in the same container. Freezes the other unused tensors."""
    numbers = {name: number for number, name in record.names.items()}
    used = {record.names[n] for step in record.steps for n in step.inputs if n in record.names}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict):
            _adopt_children(f"{path}." if path else "", module, record, numbers, used)
    for name, number in numbers.items():
        if name not in used:
            for e in record.axes[number]:
                freeze(e, UNUSED)


def _adopt_children(prefix: str, container: nn.Module, record: RunRecord, numbers: dict[str, int], used: set[str]) -> None:
    """Finds children that were not used, and copies the axes of a child with the same tensors that was used."""
    shapes = _shapes_of_children(prefix, container, record, numbers)
    for child, own in shapes.items():
        if not own or any(child + name in used for name in own):
            continue
        twin = next((c for c, other in shapes.items() if other == own and all(c + name in used for name in other)), None)
        if twin is not None:
            _copy_axes(twin, child, list(own), record, numbers)
            used |= {child + name for name in own}


def _shapes_of_children(
    prefix: str, container: nn.Module, record: RunRecord, numbers: dict[str, int]
) -> dict[str, dict[str, tuple[int, ...]]]:
    """Returns, for each child (by the prefix of its names), the shapes of its tensors."""
    found: dict[str, dict[str, tuple[int, ...]]] = {}
    for key, _ in container.named_children():
        child = f"{prefix}{key}."
        own = [(name, i) for name, i in numbers.items() if name.startswith(child)]
        found[child] = {name.removeprefix(child): tuple(e.size for e in record.axes[i]) for name, i in own}
    return found


def _copy_axes(twin: str, child: str, names: list[str], record: RunRecord, numbers: dict[str, int]) -> None:
    """Unites the axes of a child with those of its twin, except that atoms inside the twin are replaced by new ones."""
    outer = {a for name, i in numbers.items() if not name.startswith(twin) for e in record.axes[i] for a in atoms(e)}
    new: dict[Atom, Atom] = {}

    def mapped(e: Expr) -> Expr:
        e = norm(e)
        if isinstance(e, Atom):
            if e in outer or e.frozen:
                return e
            if e not in new:
                new[e] = Atom(e.size)
                new[e].flags = e.flags
            return new[e]
        return (Cat if isinstance(e, Cat) else Prod)(mapped(p) for p in e.parts)

    for name in names:
        for d, (e, mine) in enumerate(zip(record.axes[numbers[twin + name]], record.axes[numbers[child + name]])):
            unify(mapped(closed(e)), mine)
            played = record.roles.get((twin + name, d))
            if played:
                record.roles.setdefault((child + name, d), set()).update(played)
