"""The plan of a cut: what went from which group, whether that is exact, what was left alone, and the totals."""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ..edit import Cuts, split_inputs
from .verify import Verified, verify


@dataclass(frozen=True)
class Row:
    """One group: its name (the first tensor that makes its units), units before and after, and why it is not exact, if so.

    For a list of blocks: its path, blocks before and after, and as members the blocks that went.
    """

    name: str
    before: int
    after: int
    why: str | None
    members: tuple[str, ...]


@dataclass
class Shrunk:
    """What `shrink` did. `groups`: a row for each that may be cut. `skipped`: what was left alone, and why.

    `moved`: groups that kept another number of units than the ranking gave them, and why. `cuts`: the cut as plain data.
    `totals`: before and after. `errors`: what `verify` measured.
    """

    recipe: str
    groups: list[Row]
    skipped: dict[str, str]
    moved: dict[str, str]
    cuts: Cuts
    totals: dict[str, tuple[float, float]]
    small: nn.Module = field(repr=False)
    original: nn.Module | None = field(repr=False)
    inputs: tuple[tuple[Any, ...], dict[str, Any]] = field(repr=False)
    errors: dict[str, float] = field(default_factory=dict)

    def verify(self, inputs: Any = None, *, original: nn.Module | None = None, each: bool = True) -> Verified:
        """Compare the small model with the masked one in float64, per group and in all; `inputs` as for `shrink`.

        After `shrink_` the model before the cut is gone: pass a copy of it as `original`.
        """
        dense = original or self.original
        if dense is None:
            raise ValueError(
                "the model was cut in place, so there is nothing to compare with; pass original= (a copy made before the cut)"
            )
        args, kwargs = self.inputs if inputs is None else split_inputs(inputs)
        if self.cuts.drop:
            from .depth import verify_blocks

            found = verify_blocks(dense, self.small, self.cuts, (args, kwargs), each=each)
        else:
            found = verify(dense, self.small, self.cuts, args, kwargs, each=each)
        self.errors = found.groups
        return found

    def metrics(self) -> dict[str, Any]:
        """The counts, as plain numbers: in all, and for each group."""
        totals = {f"{key}_{when}": value for key, pair in self.totals.items() for when, value in zip(("before", "after"), pair)}
        return {
            **totals,
            **{key: after / before for key, (before, after) in self.totals.items() if before},
            "exact": all(row.why is None for row in self.groups if row.after < row.before),
            "skipped": len(self.skipped),
            "groups": {row.name: {"before": row.before, "after": row.after, "exact": row.why is None} for row in self.groups},
        }

    def _rows(self) -> list[tuple[str, ...]]:
        rows = []
        for row in self.groups:
            state = "whole" if row.after == row.before else "exact" if row.why is None else "not exact"
            if row.name in self.errors:
                state += f", error {self.errors[row.name]:.1e}"
            rows.append((row.name, _short(row.members), f"{row.before:,}", f"{row.after:,}", state))
        totals = [
            (key, "", _number(before), _number(after), f"{after / before:.1%} remain" if before else "")
            for key, (before, after) in self.totals.items()
        ]
        return [*rows, *totals]

    def _notes(self) -> list[str]:
        why = {row.name: row.why for row in self.groups if row.why is not None and row.after < row.before}
        return [*_grouped("not exact", why), *_grouped("moved", self.moved), *_grouped("left alone", self.skipped)]

    def __str__(self) -> str:
        rows = self._rows()
        widths = [max(len(row[i]) for row in (_HEADER, *rows)) for i in range(len(_HEADER))]

        def line(row: Sequence[str]) -> str:
            cells = [c.rjust(w) if i in (2, 3) else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths))]
            return "  ".join(cells).rstrip()

        rule = "-" * (sum(widths) + 2 * (len(widths) - 1))
        body, totals = rows[: len(self.groups)], rows[len(self.groups) :]
        return "\n".join([self.recipe, line(_HEADER), rule, *map(line, body), rule, *map(line, totals), *self._notes()])

    def _repr_html_(self) -> str:
        def row(cells: Iterable[str], tag: str) -> str:
            return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

        body = "".join(row(cells, "td") for cells in self._rows())
        notes = "".join(f"<li>{html.escape(note)}</li>" for note in self._notes())
        left = f"<details><summary>{len(self.skipped)} left alone</summary><ul>{notes}</ul></details>" if notes else ""
        head = f"<caption>{html.escape(self.recipe)}</caption><thead>{row(_HEADER, 'th')}</thead>"
        return f"<table>{head}<tbody>{body}</tbody></table>{left}"


_HEADER = ("group", "members", "units", "kept", "")


def _short(members: Sequence[str]) -> str:
    return ", ".join(members[:3]) + (f" and {len(members) - 3} more" if len(members) > 3 else "")


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value * 1e3:,.2f} ms"


def _grouped(title: str, reasons: Mapping[str, str | None]) -> list[str]:
    """A line for each reason, with the names it holds for."""
    lines = []
    for reason, number in Counter(reasons.values()).items():
        names = [name for name, why in reasons.items() if why == reason]
        lines.append(f"{title}, {number}: {reason} ({', '.join(names[:4])}{', ...' if number > 4 else ''})")
    return lines
