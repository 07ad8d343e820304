"""Coupled groups: units that are removed together, and the dimensions of the model's tensors that hold them.

In `Linear(8, 16) -> ReLU -> Linear(16, 4)` the 16 hidden units form one group. Its members are dim 0 of the first weight, which
produces the units, dim 0 of its bias, and dim 1 of the second weight, which consumes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .expressions import Atom, Expr, atoms

Role = Literal["produce", "consume", "elementwise", "buffer"]
KERNEL = "a kernel axis"

# Reductions that give the same result for a removed unit and for a unit of zeros.
HARMLESS = frozenset({"sum", "nansum", "any", "count_nonzero"})


class Member(NamedTuple):
    """A dimension of a tensor that holds the units. A tensor with two roles (a tied embedding) has a member for each role."""

    tensor: str
    dim: int
    role: Role


@dataclass(eq=False)
class Group:
    """Units that are removed together: removing unit i removes its indices from every member."""

    atom: Atom
    members: list[Member] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.atom.size

    @property
    def flags(self) -> frozenset[str]:
        """The operations that run over this axis: norm, mean, softmax, amax, sum, scale (its size is in a formula), ..."""
        return self.atom.flags

    @property
    def exact(self) -> bool:
        """True if removing a unit is the same as zeroing it everywhere, except for constants such as biases."""
        return self.atom.flags <= HARMLESS

    @property
    def frozen(self) -> str | None:
        """The reason why no unit can be removed, or None."""
        return self.atom.frozen

    def __repr__(self) -> str:
        shown = ", ".join(f"{m.tensor}[{m.dim}]" for m in self.members[:4]) + (" ..." if len(self.members) > 4 else "")
        state = f", frozen: {self.frozen}" if self.frozen else f", {'+'.join(sorted(self.flags))}" if self.flags else ""
        return f"Group({self.size} units{state}: {shown})"


def build_groups(
    dims: Mapping[str, Sequence[Expr]], roles: Mapping[tuple[str, int], set[Role]], buffers: set[str]
) -> list[Group]:
    """Returns a group for every atom in the tensors of the model, in order of appearance.

    `dims` holds the axes of each tensor by its name, `roles` the roles of (tensor, dim), `buffers` the names of buffers.
    """
    groups: dict[Atom, Group] = {}
    for name, axes in dims.items():
        for d, e in enumerate(axes):
            played = roles.get((name, d)) or {"buffer" if name in buffers else "elementwise"}
            for atom in dict.fromkeys(atoms(e)):
                group = groups.setdefault(atom, Group(atom))
                group.members += [Member(name, d, role) for role in sorted(played)]
    for group in groups.values():
        places, played = {(m.tensor, m.dim) for m in group.members}, {m.role for m in group.members}
        if not group.frozen and len(places) == 1 and not played >= {"produce", "consume"}:
            group.atom.frozen = "only one tensor has this axis: no other weight produces or consumes its units"
    return list(groups.values())


def skipped(dims: Mapping[str, Sequence[Expr]]) -> dict[str, str]:
    """Returns, for each `tensor[dim]` with units that cannot be removed, the reasons. Kernel axes have no units: left out."""
    found: dict[str, str] = {}
    for name, axes in dims.items():
        for d, e in enumerate(axes):
            reasons = dict.fromkeys(a.frozen for a in atoms(e) if a.frozen and a.frozen != KERNEL)
            if reasons:
                found[f"{name}[{d}]"] = "; ".join(reasons)  # type: ignore[arg-type]
    return found
