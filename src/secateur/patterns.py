"""`Pattern`: which elements are pruned together (the unit) and, for n:m, which units compete with each other (the pool).

One grammar is printed and parsed: ``unstructured``, ``2:4``, ``16x1``, ``32x32``, ``16x1/2:4``, ``1x4-2``, ``out``, ``in``.
``n:m`` always keeps n of every m neighbouring units along the input axis. ``AxB-Z`` prunes only the Z lowest elements of each
pruned block. Patterns apply to a weight as a matrix of shape (out, in * kernel size).
"""

from __future__ import annotations

import re
import reprlib
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from ._layers import Layout

_GRAMMAR = re.compile(r"(?:(?P<a>\d+)x(?P<b>\d+)(?:-(?P<lose>\d+))?|(?P<slice>out|in))?(?:(?:^|/)(?P<n>\d+):(?P<m>\d+))?")


@dataclass(frozen=True)
class Pattern:
    """A unit (a block of `a` outputs by `b` inputs, or a whole output or input channel) and, optionally, n:m.

    If blocks do not divide the matrix, the blocks at its edge are smaller; if m does not divide a row, its last pool is
    smaller and also keeps up to n. Nothing is padded. With `lose`, a pruned block loses only that many elements, its lowest
    (all of them if it has fewer).
    """

    unit: tuple[int, int] | str = (1, 1)
    keep: tuple[int, int] | None = None
    lose: int | None = None

    @staticmethod
    def parse(text: str | Pattern) -> Pattern:
        """Returns the pattern that `text` describes. A `Pattern` is returned unchanged."""
        if isinstance(text, Pattern):
            return text
        found = _GRAMMAR.fullmatch(text) if isinstance(text, str) else None
        if text == "unstructured":
            return Pattern()
        if not found or not text or text.startswith("/"):
            raise ValueError(
                f"pattern {reprlib.repr(text)} is not understood; write 'unstructured', 'n:m' (keeps n of m), 'AxB' (blocks of "
                "A outputs by B inputs), 'AxB-Z' (a pruned block loses only Z elements), 'out', 'in', or a block with n:m such "
                "as '16x1/2:4'"
            )
        unit = found["slice"] or (int(found["a"] or 1), int(found["b"] or 1))
        keep = (int(found["n"]), int(found["m"])) if found["n"] else None
        return Pattern(unit, keep, int(found["lose"]) if found["lose"] else None)

    def __post_init__(self) -> None:
        if self.unit not in ("out", "in") and not _two_counts(self.unit):
            raise ValueError(
                f"pattern with unit {self.unit!r}: a unit is 'out', 'in', or (rows, columns), two integers of at least 1"
            )
        if self.keep is not None and not _two_counts(self.keep):
            raise ValueError(f"pattern that keeps {self.keep!r}: it keeps (n, m), two integers of at least 1")
        if self.keep and not self.keep[0] <= self.keep[1]:
            raise ValueError(f"pattern {self}: n:m keeps n of m, so n must be from 1 to m")
        if self.keep and self.unit == "out":
            raise ValueError(
                "pattern 'out' with n:m: n:m groups along the input axis, but a unit is a whole row; use 'in/n:m' or 'n:m'"
            )
        if self.lose is not None:
            self._check_lose()

    def _check_lose(self) -> None:
        size = self.unit[0] * self.unit[1] if isinstance(self.unit, tuple) else 0
        if self.keep or type(self.lose) is not int or not 1 <= self.lose < size:
            raise ValueError(
                f"pattern {self}: in 'AxB-Z' a pruned block loses Z elements, from 1 to A * B - 1; write 'AxB' to prune whole "
                "blocks. It cannot be combined with n:m"
            )

    def __str__(self) -> str:
        unit = self.unit if isinstance(self.unit, str) else f"{self.unit[0]}x{self.unit[1]}"
        pool = f"{self.keep[0]}:{self.keep[1]}" if self.keep else ""
        if self.unit == (1, 1) and self.lose is None:
            return pool or "unstructured"
        return unit + (f"-{self.lose}" if self.lose is not None else "") + (f"/{pool}" if pool else "")

    @property
    def elementwise(self) -> bool:
        """True if every element is a unit of its own."""
        return self.unit == (1, 1)

    def block(self, layout: Layout) -> tuple[int, int]:
        """Returns the height and width of a unit in a matrix of this layout."""
        if self.unit == "out":
            return 1, max(layout.cols, 1)
        if self.unit == "in":
            return max(layout.rows // layout.groups, 1), layout.span
        assert isinstance(self.unit, tuple)
        return self.unit

    def grid(self, layout: Layout) -> tuple[int, int]:
        """Returns the number of units in a matrix of this layout, down and across."""
        a, b = self.block(layout)
        return -(-layout.rows // a), -(-layout.cols // b)

    def sizes(self, layout: Layout) -> Tensor:
        """Returns the number of elements that each unit loses when it is pruned, as a grid."""
        a, b = self.block(layout)
        sizes = _run_sizes(layout.rows, a)[:, None] * _run_sizes(layout.cols, b)
        return sizes if self.lose is None else sizes.clamp(max=self.lose)

    def size_counts(self, layout: Layout) -> Counter[int]:
        """Returns how many units lose how many elements when they are pruned: `sizes` without a number for each unit."""
        (down, height, bottom), (across, width, right) = self.runs(layout)
        found: Counter[int] = Counter()
        for h, rows in ((height, down // height), (bottom, bottom > 0)):
            for w, cols in ((width, across // width), (right, right > 0)):
                if rows * cols:
                    found[h * w if self.lose is None else min(h * w, self.lose)] += rows * cols
        return found

    def runs(self, layout: Layout) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
        """Returns, for rows and for columns, where smaller units at the edge begin, the size of a unit, and of one there."""
        height, width = self.block(layout)
        down, across = layout.rows - layout.rows % height, layout.cols - layout.cols % width
        return (down, height, layout.rows - down), (across, width, layout.cols - across)

    def unfold(self, kept: Tensor, layout: Layout) -> Tensor:
        """Returns the mask of elements for a mask of units."""
        mask = torch.empty(layout.rows, layout.cols, dtype=torch.bool, device=kept.device)
        kernels.spread_(mask, kept, *self.block(layout))
        return mask


def _two_counts(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)


def _run_sizes(size: int, run: int) -> Tensor:
    sizes = torch.full((-(-size // run),), run, dtype=torch.int64)
    if size % run:
        sizes[-1] = size % run
    return sizes
