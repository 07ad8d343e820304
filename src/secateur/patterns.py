"""Patterns: which elements go together (the unit) and, for n:m, who competes with whom (the pool).

One grammar, printed and parsed: ``unstructured``, ``2:4``, ``16x1``, ``32x32``, ``16x1/2:4``, ``1x4-2``, ``out``, ``in``.
``n:m`` keeps n of every m neighbouring units along the input axis, always. ``AxB-Z`` takes only the Z lowest elements out of a
block that is pruned. The matrix a pattern sees is (out, in x kernel).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from . import kernels
from ._layers import Layout

_GRAMMAR = re.compile(r"(?:(?P<a>\d+)x(?P<b>\d+)(?:-(?P<lose>\d+))?|(?P<slice>out|in))?(?:(?:^|/)(?P<n>\d+):(?P<m>\d+))?")


@dataclass(frozen=True)
class Pattern:
    """A unit (a block of `a` outputs by `b` inputs, or a whole output or input channel) and, optionally, n:m.

    A shape that blocks do not divide ends in smaller blocks, and a row that m does not divide in a smaller pool, which
    keeps up to n like any other. Nothing is padded. With `lose`, a block that is pruned loses that many elements, its
    lowest (all of them if it has fewer), and the rest of it stays.
    """

    unit: tuple[int, int] | str = (1, 1)
    keep: tuple[int, int] | None = None
    lose: int | None = None

    @staticmethod
    def parse(text: str | Pattern) -> Pattern:
        """The pattern that `text` names; a Pattern is given back as it is."""
        if isinstance(text, Pattern):
            return text
        found = _GRAMMAR.fullmatch(text) if isinstance(text, str) else None
        if text == "unstructured":
            return Pattern()
        if not found or not text or text.startswith("/"):
            raise ValueError(
                f"pattern {text!r} is not understood; write 'unstructured', 'n:m' (keeps n of m), 'AxB' (blocks of A outputs "
                "by B inputs), 'AxB-Z' (such blocks, of which a pruned one loses Z elements), 'out', 'in', or a block with n:m "
                "such as '16x1/2:4'"
            )
        unit = found["slice"] or (int(found["a"] or 1), int(found["b"] or 1))
        keep = (int(found["n"]), int(found["m"])) if found["n"] else None
        return Pattern(unit, keep, int(found["lose"]) if found["lose"] else None)

    def __post_init__(self) -> None:
        if self.unit not in ("out", "in") and not _two_counts(self.unit):
            raise ValueError(
                f"pattern with unit {self.unit!r}: a unit is 'out', 'in', or (rows, columns), at least one of each"
            )
        if self.keep is not None and not _two_counts(self.keep):
            raise ValueError(f"pattern that keeps {self.keep!r}: it keeps (n, m), whole numbers from 1 up")
        if self.keep and not self.keep[0] <= self.keep[1]:
            raise ValueError(f"pattern {self}: n:m keeps n of m, so n is from 1 to m")
        if self.keep and self.unit == "out":
            raise ValueError("pattern 'out' with n:m: whole outputs leave no input axis to group along; use 'in/n:m' or 'n:m'")
        if self.lose is not None:
            self._check_lose()

    def _check_lose(self) -> None:
        size = self.unit[0] * self.unit[1] if isinstance(self.unit, tuple) else 0
        if self.keep or type(self.lose) is not int or not 1 <= self.lose < size:
            raise ValueError(
                f"pattern {self}: in 'AxB-Z' a pruned block of A by B loses Z elements, from 1 to A * B - 1; for whole blocks "
                "write 'AxB', and n:m says by itself how many go"
            )

    def __str__(self) -> str:
        unit = self.unit if isinstance(self.unit, str) else f"{self.unit[0]}x{self.unit[1]}"
        pool = f"{self.keep[0]}:{self.keep[1]}" if self.keep else ""
        if self.unit == (1, 1) and self.lose is None:
            return pool or "unstructured"
        return unit + (f"-{self.lose}" if self.lose is not None else "") + (f"/{pool}" if pool else "")

    @property
    def elementwise(self) -> bool:
        """True when every element is its own unit, so that nothing has to be folded."""
        return self.unit == (1, 1)

    def block(self, layout: Layout) -> tuple[int, int]:
        """The size of a unit in the matrix of this layout."""
        if self.unit == "out":
            return 1, max(layout.cols, 1)
        if self.unit == "in":
            return max(layout.rows // layout.groups, 1), layout.span
        assert isinstance(self.unit, tuple)
        return self.unit

    def grid(self, layout: Layout) -> tuple[int, int]:
        """How many units the matrix of this layout has, down and across."""
        a, b = self.block(layout)
        return -(-layout.rows // a), -(-layout.cols // b)

    def sizes(self, layout: Layout) -> Tensor:
        """How many elements each unit loses when it is pruned, as a grid: all it holds, unless the pattern says otherwise."""
        a, b = self.block(layout)
        sizes = _run_sizes(layout.rows, a)[:, None] * _run_sizes(layout.cols, b)
        return sizes if self.lose is None else sizes.clamp(max=self.lose)

    def unfold(self, kept: Tensor, layout: Layout) -> Tensor:
        """A mask of units to a mask of elements."""
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
