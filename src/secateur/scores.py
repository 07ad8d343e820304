"""The element scores of one tensor, worked out a slab of rows at a time, so that they are never laid side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from . import kernels
from ._axes import Layout

RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scores:
    """The element scores of one tensor as a matrix, worked out a slab of rows at a time.

    `magnitude_of` is set when the scores rank as the absolute values of that matrix do, which kernels then read directly;
    `under` is a mask of the matrix's own dtype that it is multiplied with first.
    """

    layout: Layout
    device: torch.device
    rows: Callable[[int, int], Tensor]
    magnitude_of: Tensor | None = None
    under: Tensor | None = None

    @staticmethod
    def of(matrix: Tensor, layout: Layout | None = None) -> Scores:
        """Scores that are there already, as one matrix."""
        return Scores(layout or Layout(tuple(matrix.shape)), matrix.device, lambda a, b: matrix[a:b])

    @staticmethod
    def magnitude(matrix: Tensor, layout: Layout | None = None, *, power: float = 1, under: Tensor | None = None) -> Scores:
        """The absolute values of a matrix, or of `matrix * under`, to a positive power, without a copy of it."""
        layout = layout or Layout(tuple(matrix.shape))

        def rows(first: int, last: int) -> Tensor:
            return kernels.magnitude(matrix[first:last], None if under is None else under[first:last], power)

        return Scores(layout, matrix.device, rows, matrix, under)

    @property
    def numel(self) -> int:
        return self.layout.rows * self.layout.cols

    def slabs(self, multiple: int = 1) -> list[tuple[int, int]]:
        """(first row, last row) over all rows, `multiple` rows at a time or more, sized for the device."""
        step = max(kernels.slab_elements(self.device) // max(self.layout.cols, 1) // multiple, 1) * multiple
        return [(first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step)]

    def each(self, look: Callable[[Tensor, int, int], Result], multiple: int = 1) -> list[Result]:
        """`look(scores, first row, last row)` for every slab, in order, in threads where numpy works the scores out."""

        def work(rows: tuple[int, int]) -> Result:
            return look(self.rows(*rows), *rows)

        slabs = self.slabs(multiple)
        numpy = self.device.type == "cpu" and self.magnitude_of is not None
        return kernels.in_threads(work, slabs) if numpy else [work(rows) for rows in slabs]

    def sample(self, size: int) -> Tensor:
        """About `size` scores from all over the tensor, the same ones every time."""
        rows, cols = self.layout.rows, self.layout.cols
        if self.numel <= size:
            return self.rows(0, rows).reshape(-1)
        picks = min(rows, 64, max(size // max(cols, 1), 1))
        return torch.cat([self.rows(r, r + 1).reshape(-1) for r in (i * rows // picks for i in range(picks))])


def nan_in(name: str) -> ValueError:
    return ValueError(
        f"the scores of {name!r} contain NaN, which cannot be ranked; look at its weights and at the criterion's evidence"
    )
