"""The plan of a cut: what was removed from which group, whether that is exact, what was left whole, and the totals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from .._hints import hints
from ..display import Reported, Table, notes_by_reason
from ..edit import UNKNOWN, Arguments, Cuts, Inputs, check_inputs, split_inputs
from .verify import Verified, verify


@dataclass(frozen=True)
class GroupCut:
    """One group of units. `name`: the first tensor that produces them, with the axis; `why`: the reason, if the cut is not
    exact; `each`: how many entries of that axis one unit has.

    For a list of blocks: its path, the number of blocks before and after, and the removed blocks as members. For a mixture of
    experts: the path of the experts, their numbers, and experts and router as members. Both name their `unit`.
    """

    name: str
    before: int
    after: int
    why: str | None
    members: tuple[str, ...]
    each: int = 0
    unit: str = "block"


@dataclass
class Shrunk(Reported):
    """What `shrink` did. `print(plan)` shows it as a table.

    `groups`: one entry for each group that may be cut. `skipped`: what was left whole, and why. `moved`: groups that keep
    another number of units than their scores give them, and why. `cuts`: the cut as plain data. `totals`: sizes before and
    after. `note`: what was reached, where whole units cannot meet the target, and the sizes of the inputs for which alone the
    cut is exact. `errors`: the errors that `verify` measured.
    """

    recipe: str
    groups: list[GroupCut]
    skipped: dict[str, str]
    moved: dict[str, str]
    cuts: Cuts
    totals: dict[str, tuple[float, float]]
    small: nn.Module = field(repr=False)
    original: nn.Module | None = field(repr=False)
    inputs: Inputs = field(repr=False)
    note: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    restore_: Callable[[], None] | None = field(default=None, repr=False)
    arguments: Arguments = field(default=UNKNOWN, repr=False)  # for `Recipe`: of the call that made the plan

    @hints
    def verify(self, example_inputs: Any = None, *, original: nn.Module | None = None, groups: bool = False) -> Verified:
        """Compare the small model with the masked one in float64; `example_inputs` as for `shrink`.

        This takes four runs of the model. With `groups=True`, every group is also cut alone, which takes several runs for each.
        After `shrink_` the original is gone: pass a copy that was made before the cut as `original`.
        """
        if any(group.unit == "expert" for group in self.groups):
            raise ValueError("no masked model equals one with fewer experts, so there is nothing to verify; compare a metric")
        dense = original or self.original
        if dense is None:
            raise ValueError(
                "the model was cut in place, so there is nothing to compare with; pass original= (a copy made before the cut)"
            )
        given = self.inputs if example_inputs is None else split_inputs(example_inputs)
        try:
            found = verify(dense, self.small, self.cuts, given, groups=groups)
        except Exception:
            check_inputs(dense, *given)
            raise
        self.errors = found.groups
        repaired = isinstance(self.arguments, dict) and [key for key in ("refit", "reestimate") if self.arguments.get(key)]
        if repaired and not found.exact:
            note = f"{' and '.join(repaired)} changed it after the cut, on purpose"
            if found.recut is None:
                note += "; verify(groups=True) also measures the cut alone"
            found = replace(found, note="; ".join(filter(None, (found.note, note))))
        return found

    def undo_(self, model: nn.Module | None = None) -> None:
        """Give the model its original sizes and weights back, bit for bit. For `shrink_(..., keep_dense=True)`.

        `shrink` returns a copy and leaves the model as it is, so there is nothing to undo. `model` may be left out, as in the
        `undo_` of every result.
        """
        if model is not None and model is not self.small:
            raise ValueError("this plan belongs to another model")
        if self.original is not None:
            raise ValueError("shrink made a copy, and the original is unchanged: use plan.original")
        if self.restore_ is None:
            raise ValueError(
                "this plan kept no dense weights, or was undone before; call shrink_(..., keep_dense=True) to be able to undo"
            )
        self.restore_()
        self.restore_ = None

    def metrics(self) -> dict[str, float]:
        """Plain numbers in a flat dictionary: totals, and `kept/NAME`, the fraction of its units that each group keeps."""
        totals = {f"{key}_{when}": value for key, pair in self.totals.items() for when, value in zip(("before", "after"), pair)}
        return {
            **totals,
            **{key: after / before for key, (before, after) in self.totals.items() if before},
            "exact": all(group.why is None for group in self.groups if group.after < group.before),
            "skipped": len(self.skipped),
            **{f"kept/{group.name}": group.after / group.before for group in self.groups},
        }

    def to_dict(self) -> dict[str, Any]:
        """The plan as plain data, without models and without the kept indices (those are in `cuts`)."""
        return {
            "recipe": self.recipe,
            "note": self.note,
            "groups": [{**asdict(group), "members": list(group.members)} for group in self.groups],
            "skipped": dict(self.skipped),
            "moved": dict(self.moved),
            "totals": {key: list(pair) for key, pair in self.totals.items()},
            "errors": dict(self.errors),
            "added": {name: list(shape) for name, shape in self.cuts.added.items()},
        }

    def _table(self) -> Table:
        rows = []
        for group in self.groups:
            state = "whole" if group.after == group.before else "exact" if group.why is None else "not exact"
            if group.name in self.errors:
                state += f", error {self.errors[group.name]:.1e}"
            rows.append((group.name, _short(group), _one_unit(group), f"{group.before:,}", f"{group.after:,}", state))
        totals = [
            (key, "", "", _number(before), _number(after), f"{after / before:.1%} remain" if before else "")
            for key, (before, after) in self.totals.items()
        ]
        why = {g.name: g.why for g in self.groups if g.why is not None and g.after < g.before}
        notes = [
            *([self.note] if self.note else []),
            *notes_by_reason("not exact", why),
            *notes_by_reason("another number of units kept", self.moved),
            *notes_by_reason("skipped", self.skipped),
            *([_LEGEND] if any(group.each > 1 for group in self.groups) else []),
        ]
        header = ("group", "members", "one unit", "units", "kept", "")
        return Table(header, rows, totals, right=(2, 3, 4), title=self.recipe, notes=notes)

    def __str__(self) -> str:
        return str(self._table())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return self._table().html(f"{len(self.skipped)} skipped")


_LEGEND = (
    "units are removed from all members of a group. A group is named after a tensor and an axis of it: fc.weight[0] are the "
    "rows of fc.weight, and fc.weight[0]#2 the same rows divided in another way"
)


def _one_unit(group: GroupCut) -> str:
    """What one unit is: entries of the axis after which its group is named, a block, or an expert."""
    if not group.each:
        return f"1 {group.unit}"
    axis = group.name.rpartition("[")[2].partition("]")[0]
    what = {"0": "row", "1": "column"}.get(axis, f"entry of axis {axis}")
    return f"{group.each:,} {what if group.each == 1 else what.replace('entry', 'entries') + ('s' if axis in '01' else '')}"


def _short(group: GroupCut) -> str:
    """The first members of a group; "…" stands for the path that they share with its name."""
    path = group.name.partition("[")[0].rpartition(".")[0].rpartition(".")[0] + "."
    shown = [f"…{m[len(path) :]}" if len(path) > 1 and m.startswith(path) else m for m in group.members[:3]]
    return ", ".join(shown) + (f" and {len(group.members) - 3} more" if len(group.members) > 3 else "")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value * 1e3:,.2f} ms"
