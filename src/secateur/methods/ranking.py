"""The default method: rank once by the criterion, prune the lowest, keep the other weights as they are."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from ..patterns import Pattern
from .seam import Amount, LayerProblem, Method, Solution


@dataclass(frozen=True)
class Rank(Method):
    """Prunes the lowest scores of the criterion. `rank()` makes one."""

    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        if amount.ranked is not None:
            return Solution(amount.ranked)
        assert problem.scores is not None
        return Solution(amount.keep(problem.name, problem.scores, pattern, previous))

    def __str__(self) -> str:
        return "rank()"


def rank() -> Rank:
    """Prunes the weights with the lowest scores; the others keep their values. The default method."""
    return Rank()
