"""The element scores of one tensor, worked out a slab of rows at a time, so that they are never laid side by side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import kernels
from ._layers import Layout

RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scores:
    """The element scores of one tensor as a matrix, worked out a slab of rows at a time.

    `magnitude_of` is set when the scores are the absolute values of that matrix to a positive `power`, so that they rank as
    those do, which kernels then read directly; `under` is a mask of the matrix's own dtype that it is multiplied with first.
    """

    layout: Layout
    device: torch.device
    rows: Callable[[int, int], Tensor]
    magnitude_of: Tensor | None = None
    under: Tensor | None = None
    power: float = 1

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

        return Scores(layout, matrix.device, rows, matrix, under, power)

    @property
    def numel(self) -> int:
        return self.layout.rows * self.layout.cols

    def slabs(self, multiple: int = 1, elements: int | None = None) -> list[tuple[int, int]]:
        """(first row, last row) over all rows, `multiple` rows at a time or more, sized for the device."""
        elements = elements or kernels.slab_elements(self.device)
        step = max(elements // max(self.layout.cols, 1) // multiple, 1) * multiple
        return [(first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step)]

    def each(self, look: Callable[[Any, int, int], Result], multiple: int = 1, *, raw: bool = False) -> list[Result]:
        """`look(scores, first row, last row)` for every slab, in order. The scores are good while `look` looks.

        With `raw` it also understands `Magnitudes`, and gets those where compiled loops can read them.
        """
        matrix, under = self.magnitude_of, self.under
        if matrix is None or self.device.type != "cpu":
            return [look(self.rows(*rows), *rows) for rows in self.slabs(multiple)]
        if raw and self.power == 1 and kernels.compilable(matrix, under):

            def in_thread(rows: tuple[int, int]) -> Result:
                part = slice(*rows)
                return look(kernels.Magnitudes(matrix[part], None if under is None else under[part]), *rows)

            return kernels.in_threads(in_thread, self.slabs(multiple, kernels.PART))

        def work(rows: tuple[int, int]) -> Result:
            part = slice(*rows)
            return look(
                kernels.magnitude(matrix[part], None if under is None else under[part], self.power, scratch=True), *rows
            )

        return [work(rows) for rows in self.slabs(multiple)]  # in threads it took longer: memory is what it waits for

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
