"""What every method has in common: the problem of one layer, the amount to prune, and the solution."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from .._dist import Comm
from ..patterns import Pattern
from ..schedules import AnySchedule
from ..scores import Scores
from ..select import least_kept
from ..shards import select_shared, units_of
from ..stats import TensorEvidence


@dataclass(frozen=True)
class Solution:
    """The answer for one layer: a `mask` (rows, cols), True = kept, and new values for the kept weights, or None."""

    mask: Tensor
    weight: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """One layer to prune: its weight as a matrix (outputs, inputs x kernel), and what is known about it.

    The layer maps an input x to W x. A method that changes weights looks for a sparse V that minimises
    tr(G (V - T) H (V - T)') with T H = B. `H` is the Gram matrix of the inputs, the sum of x x'. `C` is the cross matrix, the
    sum of x° x' with the inputs x° of the dense model. `B` is the sum of y x' for the wanted outputs y; None is W H, for the
    outputs of the layer as it is. `G` weighs the outputs against each other; None weighs all alike. Matrices that no method
    asked for are None. The rows of a grouped convolution form groups that read different inputs, so its H and C have a leading
    axis. `scores` are those of the criterion.
    """

    name: str
    W: Tensor
    H: Tensor | None = None
    C: Tensor | None = None
    B: Tensor | None = None
    G: Tensor | None = None
    scores: Scores | None = None
    evidence: TensorEvidence | None = field(default=None, repr=False)
    step: int = 0

    def objective(self, V: Tensor) -> Tensor:
        """The error of V in every row, in float64: (V - T) H (V - T)' up to a constant that does not depend on V."""
        assert self.H is not None
        assert self.G is None, "with G the rows form one problem and have no errors of their own"
        H = self.H.double() if self.H.ndim == 3 else self.H.double()[None]
        wanted = self.W if self.B is None else torch.zeros_like(self.W)
        away = (V.double() - wanted.double()).view(H.shape[0], -1, H.shape[-1])
        error = ((away @ H) * away).sum(-1).view(-1)
        return error if self.B is None else error - 2 * (V.double() * self.B.double()).sum(-1)


@dataclass(frozen=True, eq=False)
class Amount:
    """How much of one layer to prune, and which units compete for it.

    `scope` is "tensor" or "row". `count` is a number of units to prune in each pool, `sparsity` a fraction of the elements; an
    n:m pattern needs neither. At least a fraction `floor` of the elements stays. With `scope="global"` the criterion has ranked
    the units of all layers together: `ranked` is the mask that gave this layer, and fixes how many units it loses.
    """

    scope: str = "tensor"
    sparsity: float | None = None
    count: int | None = None
    ranked: Tensor | None = None
    comm: Comm = field(default_factory=Comm)
    floor: float = 0.0

    def keep(self, name: str, scores: Scores, pattern: Pattern, previous: Tensor | None) -> Tensor:
        """The mask that prunes the lowest of these scores, exactly as many as asked."""
        count = self._ranked_units(pattern, scores) if self.ranked is not None else self.count
        (mask,) = select_shared(
            {name: scores},
            pattern,
            scope=self.scope,
            sparsity=self.sparsity,
            count=count,
            previous=None if previous is None else {name: previous},
            comm=self.comm,
            floor=self.floor,
        ).values()
        return mask

    def elements(self, shape: tuple[int, int]) -> int:
        """How many elements go from each pool of an unstructured layer: from the matrix, or from each of its rows."""
        if self.ranked is not None:
            return self._pruned
        if self.count is not None:
            return self.count
        assert self.sparsity is not None
        pool = shape[1] if self.scope == "row" else shape[0] * shape[1]
        return min(round(self.sparsity * pool), pool - least_kept(pool, self.floor))

    @cached_property
    def _pruned(self) -> int:
        assert self.ranked is not None
        return int((~self.ranked).sum())

    def _ranked_units(self, pattern: Pattern, scores: Scores) -> int:
        assert self.ranked is not None
        whole = self.ranked if pattern.lose is None else self._blocks_kept(*pattern.block(scores.layout))
        total, alive = units_of(scores, pattern, whole, self.comm)
        return total - alive

    def _blocks_kept(self, height: int, width: int) -> Tensor:
        """True over blocks that lost nothing, for patterns that take only some elements of a pruned block."""
        assert self.ranked is not None
        kept = self.ranked.clone()
        for top in range(0, kept.shape[0], height):
            for left in range(0, kept.shape[1], width):
                block = kept[top : top + height, left : left + width]
                block.fill_(bool(block.all()))
        return kept


class Method(abc.ABC):
    """How the weights of a layer answer a budget. A method is a value: it holds its settings and nothing else.

    To write one, subclass it (as a frozen dataclass, so that it prints) and implement `solve`. The attributes say what it needs
    and what it does, so that no other code has to know the method::

        @dataclass(frozen=True)
        class keep_smallest(sc.methods.Method):
            def solve(self, problem, pattern, amount, previous):
                return sc.methods.Solution(amount.keep(problem.name, Scores.of(-problem.W.abs()), pattern, previous))
    """

    needs: ClassVar[frozenset[str]] = frozenset()
    """Evidence to collect beside what the criterion needs. "gram" and "cross" are taken block by block (see `solve`)."""
    ranks: ClassVar[bool] = True
    """Whether the criterion decides which weights go. If not, it only spreads a budget over layers."""
    rewrites: ClassVar[bool] = False
    """Whether solutions bring new values for the weights that stay."""
    revives: ClassVar[bool] = False
    """Whether pruned weights may come back, so that it goes with training only."""

    def due(self, step: int) -> bool:
        """Whether a `Pruner` should solve again at this step, beside the steps of its schedule."""
        return False

    def check(self, pattern: Pattern, scope: str, scheduled: list[AnySchedule]) -> None:  # noqa: B027
        """Raises ValueError where this method does not go with a pattern, a scope or a budget that changes with the step."""

    @abc.abstractmethod
    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        """Solves one layer. `previous` is a mask of what may be kept: what is False there stays pruned, and counts.

        Methods that need "gram" or "cross" see a layer after the blocks before it were solved, with the inputs that those
        produce. Others see all layers of the model as it is.
        """
