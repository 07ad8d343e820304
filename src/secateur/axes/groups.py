"""Coupled groups: the units that go together, and the dims of the model's tensors that carry them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from .expressions import Atom, Expr, atoms

Role = Literal["produce", "consume", "elementwise", "buffer"]
KERNEL = "a kernel axis"

# Reductions for which a removed unit and a zero unit are the same thing.
HARMLESS = frozenset({"sum", "nansum", "any", "count_nonzero"})


class Member(NamedTuple):
    """A dim of a tensor that carries the units. A tensor that plays two parts (a tied embedding) has a member for each."""

    tensor: str
    dim: int
    role: Role


@dataclass(eq=False)
class Group:
    """Units that go together: removing unit i removes the indices that stand for it from every member."""

    atom: Atom
    members: list[Member] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.atom.size

    @property
    def flags(self) -> frozenset[str]:
        """What runs over this axis: norm, mean, softmax, amax, scale (its size enters a formula), sum ..."""
        return self.atom.flags

    @property
    def exact(self) -> bool:
        """Whether removing a unit is the same as zeroing it everywhere, constants (biases) aside."""
        return self.atom.flags <= HARMLESS

    @property
    def frozen(self) -> str | None:
        """Why no unit may go, or None."""
        return self.atom.frozen

    def __repr__(self) -> str:
        shown = ", ".join(f"{m.tensor}[{m.dim}]" for m in self.members[:4]) + (" ..." if len(self.members) > 4 else "")
        state = f", frozen: {self.frozen}" if self.frozen else f", {'+'.join(sorted(self.flags))}" if self.flags else ""
        return f"Group({self.size} units{state}: {shown})"


def build_groups(
    dims: Mapping[str, Sequence[Expr]], roles: Mapping[tuple[str, int], set[Role]], buffers: set[str]
) -> list[Group]:
    """A group for every atom that a tensor of the model carries, in order of appearance."""
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
            group.atom.frozen = "only one tensor carries it: nothing reads or makes these units"
    return list(groups.values())


def skipped(dims: Mapping[str, Sequence[Expr]]) -> dict[str, str]:
    """`tensor[dim]` -> why (some of) its units stay. Kernels and the like have no units to begin with and are left out."""
    found: dict[str, str] = {}
    for name, axes in dims.items():
        for d, e in enumerate(axes):
            reasons = dict.fromkeys(a.frozen for a in atoms(e) if a.frozen and a.frozen != KERNEL)
            if reasons:
                found[f"{name}[{d}]"] = "; ".join(reasons)  # type: ignore[arg-type]
    return found
