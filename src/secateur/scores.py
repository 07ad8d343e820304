"""`Scores`: the element scores of one tensor, computed a slab of rows at a time to save memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import kernels
from ._dist import Share
from ._layers import Layout

RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Result = TypeVar("Result")


@dataclass(frozen=True)
class Scores:
    """The element scores of one tensor as a matrix, computed a slab of rows at a time by `rows(first, last)`.

    If the scores are |matrix| ** power or |matrix * under| ** power for a positive power, `magnitude_of` is that matrix, so
    that kernels can read it directly. `under` is a mask of the matrix's dtype. `share` is the position of the matrix in that of
    a sharded tensor.
    """

    layout: Layout
    device: torch.device
    rows: Callable[[int, int], Tensor]
    magnitude_of: Tensor | None = None
    under: Tensor | None = None
    power: float = 1
    share: Share | None = None

    @staticmethod
    def of(matrix: Tensor, layout: Layout | None = None) -> Scores:
        """Returns the scores in an existing matrix."""
        return Scores(layout or Layout(tuple(matrix.shape)), matrix.device, lambda a, b: matrix[a:b])

    @staticmethod
    def magnitude(matrix: Tensor, layout: Layout | None = None, *, power: float = 1, under: Tensor | None = None) -> Scores:
        """Returns |matrix| ** power or |matrix * under| ** power as scores, without copying the matrix."""
        layout = layout or Layout(tuple(matrix.shape))

        def rows(first: int, last: int) -> Tensor:
            return kernels.magnitude(matrix[first:last], None if under is None else under[first:last], power)

        return Scores(layout, matrix.device, rows, matrix, under, power)

    @staticmethod
    def of_size(layout: Layout) -> Scores:
        """Returns scores without values, for spreads that use only sizes."""
        return Scores(layout, torch.device("meta"), lambda a, b: torch.empty(b - a, layout.cols, device="meta"))

    def without_power(self) -> Scores:
        """Powers of magnitudes as magnitudes. These have the same order, but rounding can make different powers equal."""
        if self.magnitude_of is None or self.power == 1:
            return self
        return replace(Scores.magnitude(self.magnitude_of, self.layout, under=self.under), share=self.share)

    def permuted(self, index: Tensor) -> Scores:
        """Returns the scores with their columns in another order: `index` holds the old number of each new one."""
        return Scores(self.layout, self.device, lambda a, b: self.rows(a, b)[:, index])

    @property
    def numel(self) -> int:
        return self.layout.rows * self.layout.cols

    def slabs(self, multiple: int = 1, elements: int | None = None) -> list[tuple[int, int]]:
        """Returns (first row, end) of slabs that fit the device, in multiples of `multiple` rows."""
        elements = elements or kernels.slab_elements(self.device)
        step = max(elements // max(self.layout.cols, 1) // multiple, 1) * multiple
        return [(first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step)]

    def each(self, look: Callable[[Any, int, int], Result], multiple: int = 1, *, raw: bool = False) -> list[Result]:
        """Calls `look(scores, first row, end)` for every slab and returns the results in order.

        `look` must not keep the scores, because their memory is reused. With `raw`, it may get `Magnitudes` instead of a
        tensor, where compiled loops can read them.
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

        return [work(rows) for rows in self.slabs(multiple)]  # threads measured slower: memory bandwidth is the limit

    def sample(self, size: int) -> Tensor:
        """Returns about `size` scores from all over the tensor, the same ones every time."""
        rows, cols = self.layout.rows, self.layout.cols
        if self.numel <= size:
            return self.rows(0, rows).reshape(-1)
        picks = min(rows, 64, max(size // max(cols, 1), 1))
        return torch.cat([self.rows(r, r + 1).reshape(-1) for r in (i * rows // picks for i in range(picks))])


def nan_in(name: str) -> ValueError:
    """Returns the error for a tensor whose scores contain NaN."""
    return ValueError(
        f"the scores of {name!r} contain NaN, which cannot be ranked; check its weights and the data of the criterion"
    )
