"""What every method has in common: the problem of one layer, the amount to prune, and the solution."""

from __future__ import annotations

import abc
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from .._dist import Comm
from .._layers import Layout
from ..evidence import TensorEvidence
from ..patterns import Pattern
from ..schedules import AnySchedule
from ..scores import Scores
from ..select import least_kept
from ..shards import select_shared, units_of


@dataclass(frozen=True)
class Solution:
    """The answer for one layer: a `mask` (rows, cols), True = kept, and new values for the kept weights, or None.

    `before` and `error` are the errors of the layer's outputs with the mask alone and with the new values, relative to the
    outputs; None where a method does not know them.
    """

    mask: Tensor
    weight: Tensor | None = None
    before: float | None = None
    error: float | None = None


@dataclass(frozen=True, eq=False)
class LayerProblem:
    """One layer to prune: its weight as a matrix (outputs, inputs x kernel), and what is known about it.

    The layer maps an input x to W x. A method that changes weights looks for a sparse V that minimises
    tr(G (V - T) H (V - T)') with T H = B.

    - `H` is the Gram matrix of the inputs, the sum of x x'.
    - `C` is the cross matrix, the sum of (x° - x) x' with the inputs x° of the dense model.
    - `D` is the sum of (r° - r) x' for a layer whose output is added to a residual stream r (r° in the dense model).
    - `B` is the sum of y x' for the wanted outputs y; None is W H, for the outputs of the layer as it is. A target
      (`methods.flow`) gives `shift` = B - W H instead.
    - `G` weighs the outputs against each other: a vector of weights, or a matrix; None weighs all alike.

    Matrices that no method asked for are None. The rows of a grouped convolution form groups that read different inputs, so
    its H and C have a leading axis. `scores` are those of the criterion. `tokens` is the number of inputs behind H.
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
    D: Tensor | None = None
    shift: Tensor | None = None
    tokens: int | None = None

    @property
    def layout(self) -> Layout:
        """How the rows and columns of W form units: kernels of a convolution, groups."""
        if self.scores is not None:
            return self.scores.layout
        groups = self.H.shape[0] if self.H is not None and self.H.ndim == 3 else 1
        return Layout(tuple(self.W.shape), groups=groups)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype to compute in: that of the weight, at least float32."""
        return torch.promote_types(self.W.dtype, torch.float32)

    def aim(self) -> Tensor | None:
        """B - W H, which is None where the outputs of the layer as it is are wanted."""
        if self.B is None or self.shift is not None:
            return self.shift
        assert self.H is not None
        return self.B.double() - self._by_group(self.W.double()).matmul(self.H.double()).reshape(self.W.shape)

    def permuted(self, index: Tensor) -> LayerProblem:
        """The problem with its inputs in another order: `index` holds the old number of each new one.

        The criterion's `evidence` keeps its order, so it is left out.
        """

        def columns(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix.index_select(-1, index)

        def both(matrix: Tensor | None) -> Tensor | None:
            return None if matrix is None else matrix.index_select(-1, index).index_select(-2, index)

        index = index.to(self.W.device)
        return replace(
            self,
            W=self.W.index_select(1, index),
            H=both(self.H),
            C=both(self.C),
            B=columns(self.B),
            D=columns(self.D),
            shift=columns(self.shift),
            scores=None if self.scores is None else self.scores.permuted(index),
            evidence=None,
        )

    def objective(self, V: Tensor) -> Tensor:
        """The error of V, in float64, up to a constant that does not depend on V: one number for each row of the weight.

        With a matrix G the rows form one problem, and the result has one number for each group of rows.
        """
        assert self.H is not None
        away, aim = self._by_group(V.double() - self.W.double()), self.aim()
        products = away @ self.H.double()
        if aim is not None:
            products = products - 2 * self._by_group(aim.double())
        if self.G is None or self.G.ndim == 1:
            rows = (products * away).sum(-1).reshape(-1)
            return rows if self.G is None else rows * self.G.double()
        return ((diagonal_blocks(self.G.double(), len(away)) @ products) * away).sum((-2, -1))

    def _by_group(self, matrix: Tensor) -> Tensor:
        assert self.H is not None
        return matrix.reshape(self.H.shape[0] if self.H.ndim == 3 else 1, -1, matrix.shape[-1])


def diagonal_blocks(G: Tensor, groups: int) -> Tensor:
    """The blocks (groups, rows, rows) on the diagonal of a matrix over all outputs. Rows of two groups share no input."""
    rows = G.shape[0] // groups
    return torch.stack([G[a : a + rows, a : a + rows] for a in range(0, G.shape[0], rows)])


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

    def share(self, fraction: float, pattern: Pattern, scores: Scores) -> Amount:
        """The amount that prunes only this fraction of what this one prunes."""
        if self.ranked is not None:
            count = round(fraction * self._ranked_units(pattern, scores))
            return replace(self, ranked=None, count=count)
        if self.count is not None:
            return replace(self, count=round(fraction * self.count))
        return self if self.sparsity is None else replace(self, sparsity=fraction * self.sparsity)

    def elements(self, shape: tuple[int, int]) -> int:
        """How many elements go from each pool of an unstructured layer: from the matrix, or from each of its rows."""
        if self.ranked is not None:
            return self._pruned
        if self.count is not None:
            return self.count
        assert self.sparsity is not None
        pool = shape[1] if self.scope == "row" else shape[0] * shape[1]
        return min(round(self.sparsity * pool), pool - least_kept(pool, self.floor))

    def asked(self, elements: int, pattern: Pattern) -> float | None:
        """The sparsity that this amount asks for, of a layer with so many elements; None if it is a number of units."""
        if pattern.keep:
            return 1 - pattern.keep[0] / pattern.keep[1]
        return self.sparsity if self.ranked is None else self._pruned / elements

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
    blend: ClassVar[tuple[float, float] | None] = None
    """Weights (alpha, beta) of "cross" and "residual". If given, a layer that shares its inputs with no other, and has at most
    as many outputs as inputs, gets `problem.shift`, the sum of (alpha W (x° - x) + beta (r° - r)) x', in place of C and D. That
    takes fewer products and less memory."""
    ranks: ClassVar[bool] = True
    """Whether the criterion decides which weights go. If not, it only spreads a budget over layers."""
    rewrites: ClassVar[bool] = False
    """Whether solutions bring new values for the weights that stay."""
    revives: ClassVar[bool] = False
    """Whether pruned weights may come back, so that it goes with training only."""
    curvature: str = "none"
    """Whether it weighs outputs by their effect on the loss (`problem.G`): "diag" by a vector, "fisher" by a matrix."""
    spread: ClassVar[Any] = None
    """The spread to use where a sparsity is given and neither a spread nor a scope that spreads it."""
    reorder: bool = False
    """Whether `plan`, `prune_` and `prune_folder` may permute channels inside of blocks for n:m patterns (see `reorder_`)."""

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
