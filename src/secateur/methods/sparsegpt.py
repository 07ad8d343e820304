"""SparseGPT (Frantar and Alistarh, 2023): prunes a layer column by column, and corrects the columns that are still to come.

With H the Gram matrix of the inputs and U the upper Cholesky factor of its inverse, setting w_j to zero costs (w_j / U_jj)^2
of the layer's squared output error, when every later column i of that row moves by -(w_j / U_jj) U_ji.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ..patterns import Pattern
from ..scores import Scores
from ..select import select
from ..values import requested
from .grid import on_grid
from .scaled import ScaledProblem, cholesky
from .seam import Amount, LayerProblem, Method, Solution


@dataclass(frozen=True)
class SparseGPT(Method):
    """SparseGPT with its settings. `sparsegpt()` makes one."""

    damp: float = 0.01
    width: int = 128
    values: str | None = None
    group: int | None = None

    needs = frozenset({"gram"})
    ranks = False
    rewrites = True

    def __post_init__(self) -> None:
        if not isinstance(self.damp, Real) or not self.damp >= 0 or type(self.width) is not int or self.width < 1:
            raise ValueError(f"sparsegpt takes damp= from 0 and width= from 1, not damp={self.damp!r}, width={self.width!r}")
        requested(self.values, self.group)

    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        assert problem.H is not None
        H = problem.H.double() if problem.H.ndim == 3 else problem.H.double()[None]
        plain = problem.W.to(torch.promote_types(problem.W.dtype, torch.float32))
        diagonal = H.diagonal(dim1=-2, dim2=-1)
        ridge = self.damp * diagonal.mean(-1, keepdim=True)
        ridge = torch.where(diagonal.amax(-1, keepdim=True) > 0, ridge, torch.ones_like(ridge))  # no input at all: any will do
        lower = cholesky(problem.name, H + torch.diag_embed(ridge.expand_as(diagonal)))
        upper = cholesky(problem.name, torch.cholesky_inverse(lower)).mT.to(plain.dtype)
        start = plain if problem.B is None else _ideal(problem, lower, ridge).to(plain.dtype)
        cost = torch.where(diagonal > 0, upper.diagonal(dim1=-2, dim2=-1).reciprocal(), 0)  # an unused input costs nothing
        walk = _Walk(problem.name, start.view(H.shape[0], -1, H.shape[-1]).clone(), upper, cost, pattern, amount, previous)
        m = pattern.keep[1] if pattern.keep else 1
        mask = walk.run(max(self.width // m, 1) * m)
        found, masked = walk.W.view_as(plain) * mask, plain * mask
        # Corrections can make a row worse, because its later columns are pruned too: such a row keeps its own weights.
        better = problem.objective(found) < problem.objective(masked)
        solved, values = Solution(mask, torch.where(better[:, None], found, masked)), requested(self.values, self.group)
        return on_grid(problem, ScaledProblem.of(problem), solved, values) if values else solved

    def __str__(self) -> str:
        grid = f", values={self.values!r}" + (f", group={self.group}" if self.group else "") if self.values else ""
        return f"sparsegpt(damp={self.damp:g}, width={self.width}{grid})"


def sparsegpt(damp: float = 0.01, width: int = 128, values: str | None = None, group: int | None = None) -> SparseGPT:
    """Prunes and corrects weights from calibration data alone (Frantar and Alistarh, 2023). Needs `data=`.

    The mask is chosen `width` columns at a time, or one n:m group at a time, from weights that already carry the corrections of
    the columns before; larger units are chosen at once. `damp` times the mean of the Gram matrix's diagonal is added to it.
    With `values`, the weights are rounded as `compress_(values=, group=)` stores them (see `admm`).
    """
    return SparseGPT(damp, width, values, group)


def _ideal(problem: LayerProblem, lower: Tensor, ridge: Tensor) -> Tensor:
    """The unpruned weight that gives the wanted outputs best; the ridge pulls it towards the weight there is."""
    assert problem.B is not None
    shape = (lower.shape[0], -1, lower.shape[-1])
    wanted = problem.B.double().view(shape) + ridge[:, None] * problem.W.double().view(shape)
    return torch.cholesky_solve(wanted.mT, lower).mT.reshape(problem.W.shape)


@dataclass
class _Walk:
    """The columns of one layer, from left to right. W is (groups, rows, columns) and changes on the way."""

    name: str
    W: Tensor
    upper: Tensor
    cost: Tensor
    pattern: Pattern
    amount: Amount
    previous: Tensor | None

    def run(self, step: int) -> Tensor:
        """Corrects W and returns the mask."""
        groups, rows, columns = self.W.shape
        mask = torch.ones(groups * rows, columns, dtype=torch.bool, device=self.W.device)
        fixed, counts = not self.pattern.elementwise, None
        if fixed:
            mask = self.amount.keep(self.name, Scores.of(self._scores(0, columns)), self.pattern, self.previous)
        elif not self.pattern.keep:
            counts = self._counts(step)
        for k, a in enumerate(range(0, columns, step)):
            b = min(a + step, columns)
            if counts is not None:
                mask[:, a:b] = self._choose(a, b, counts[:, k])
            error = torch.zeros_like(self.W[..., a:b])
            for i in range(a, b):
                if self.pattern.keep and not fixed and i % self.pattern.keep[1] == 0:
                    end = min(i + self.pattern.keep[1], columns)
                    mask[:, i:end] = self._select(i, end, {"pattern": self.pattern})
                gone = ~mask[:, i].view(groups, rows)
                error[..., i - a] = torch.where(gone, self.W[..., i], 0) / self.upper[:, i, i, None]
                self.W[..., i:b] -= error[..., i - a, None] * self.upper[:, i, None, i:b]
            self.W[..., b:] -= error @ self.upper[:, a:b, b:]
        return mask

    def _scores(self, a: int, b: int) -> Tensor:
        return (self.W[..., a:b] * self.cost[:, None, a:b]).square().flatten(0, 1)

    def _select(self, a: int, b: int, how: dict, rows: Tensor | slice = slice(None)) -> Tensor:
        held = None if self.previous is None else {self.name: self.previous[rows, a:b]}
        (kept,) = select({self.name: Scores.of(self._scores(a, b)[rows])}, previous=held, **how).values()
        return kept

    def _counts(self, step: int) -> Tensor:
        """How many elements go in each run of columns, in the matrix or in each row: equal shares, to the last one in all."""
        groups, rows, columns = self.W.shape
        alive = torch.ones(groups * rows, columns, dtype=torch.bool) if self.previous is None else self.previous.cpu()
        runs = torch.stack([part.sum(1) for part in alive.split(step, 1)], 1)
        sizes = torch.tensor([part.shape[1] for part in alive.split(step, 1)]).expand_as(runs)
        if self.amount.scope != "row":
            runs, sizes = runs.sum(0, keepdim=True), sizes.sum(0, keepdim=True)
        gone, left = sizes - runs, runs.sum(1, keepdim=True)
        extra = (self.amount.elements((groups * rows, columns)) - gone.sum(1, keepdim=True)).clamp(min=0)
        share = (extra * runs.cumsum(1) / left.clamp(min=1) + 0.5).floor().long()
        return gone + share.diff(dim=1, prepend=torch.zeros_like(share[:, :1]))

    def _choose(self, a: int, b: int, counts: Tensor) -> Tensor:
        if self.amount.scope != "row":
            return self._select(a, b, {"pattern": self.pattern, "count": int(counts[0])})
        kept = torch.empty(len(counts), b - a, dtype=torch.bool, device=self.W.device)
        for count in counts.unique().tolist():  # rows differ only where some of their weights were pruned before
            rows = (counts == count).nonzero().view(-1).to(kept.device)
            kept[rows] = self._select(a, b, {"pattern": self.pattern, "scope": "row", "count": count}, rows)
        return kept
