"""The result of a trace: axes, coupled groups and constraints of a model, and the operators of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from torch import nn

from ..axes import (
    Atom,
    AttrId,
    Constraint,
    Expr,
    FormulaUse,
    Group,
    Guard,
    PlannedCounts,
    Planner,
    SizeUse,
    Source,
    atoms,
    axes_in,
    bound_axes,
    skipped,
)
from .constructor import Blueprint
from .tracer import RunRecord, Step


@dataclass(eq=False)
class Trace:
    """What one run showed about a model.

    `dims[name]` holds an axis expression for each dim of a tensor. `groups` are the units that are removed together. `guards`
    are comparisons of integers that the run made, `formula_uses` sizes in formulas, and `constraints` what counts must satisfy.
    `record` holds the run itself. `fake`: True if it ran on fake tensors.
    """

    model: nn.Module
    dims: dict[str, list[Expr]]
    groups: list[Group]
    record: RunRecord
    guards: list[Guard]
    formula_uses: list[FormulaUse]
    constraints: list[Constraint]
    fake: bool
    blueprint: Blueprint | None = None  # how the constructor computed sizes and attributes, if the model has a config
    _atoms: dict[int, frozenset[Atom]] = field(default_factory=dict, repr=False)

    @property
    def prunable(self) -> list[Group]:
        """The groups that can lose units."""
        return [g for g in self.groups if not g.frozen]

    @cached_property
    def skipped(self) -> dict[str, str]:
        """`tensor[dim]` -> why it cannot lose units."""
        return skipped(self.dims)

    @cached_property
    def by_atom(self) -> dict[Atom, Group]:
        return {g.atom: g for g in self.groups}

    def atoms_of(self, number: int) -> frozenset[Atom]:
        """Returns the atoms in the axes of a tensor of the run."""
        if number not in self._atoms:
            self._atoms[number] = frozenset(a for e in self.axes[number] for a in atoms(e))
        return self._atoms[number]

    def axes_in(self, source: Source) -> list[Expr]:
        """Returns the axes whose sizes an integer is computed from, directly or through attributes."""
        return axes_in(source, self._bound_axes)

    @property
    def steps(self) -> list[Step]:
        """The operators of the run, in order."""
        return self.record.steps

    @property
    def axes(self) -> list[list[Expr]]:
        """The axes of each tensor of the run, by its number."""
        return self.record.axes

    @property
    def names(self) -> dict[int, str]:
        """Tensor number -> name, for the tensors that the model owns."""
        return self.record.names

    @property
    def size_uses(self) -> list[SizeUse]:
        """The integers that calls used as the size of an axis."""
        return self.record.size_uses

    @property
    def unknown(self) -> dict[str, int]:
        """Operators without a rule, and how often they were called."""
        return dict(self.record.unknown)

    @cached_property
    def planner(self) -> Planner:
        return Planner(self.dims, self.constraints)

    @cached_property
    def _bound_axes(self) -> dict[AttrId, list[Expr]]:
        return bound_axes(self.size_uses, self.guards)


def plan_counts(trace: Trace, wanted: Mapping[Group, int], multiple_of: int = 1) -> PlannedCounts:
    """Returns the legal counts nearest to the wanted ones; see `axes.Planner.counts`."""
    return trace.planner.counts(wanted, multiple_of)
