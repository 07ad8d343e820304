"""Ranks by any criterion, then solves for the weights that stay by least squares."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from torch import Tensor

from ..patterns import Pattern
from .ranking import rank
from .scaled import ScaledProblem, fast_products, finish
from .seam import Amount, LayerProblem, Method, Solution
from .targets import Aim, own


@dataclass(frozen=True)
class TopK(Method):
    """The mask of the criterion, and weights re-solved for it. `topk()` makes one."""

    refit: int = 10
    target: Aim = field(default_factory=own)

    rewrites = True

    def __post_init__(self) -> None:
        if type(self.refit) is not int or self.refit < 0 or not isinstance(self.target, Aim):
            raise ValueError(f"topk takes refit= from 0 and target= own() or flow(), not {self.refit!r} and {self.target!r}")

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"gram"}) | self.target.needs

    @property
    def blend(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.target.blend

    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        mask = rank().solve(problem, pattern, amount, previous).mask
        scaled = ScaledProblem.of(replace(problem, shift=self.target.shift(problem)))
        with fast_products(problem.W.device):
            return finish(problem, scaled, scaled.W, mask, self.refit)

    def __str__(self) -> str:
        return f"topk(refit={self.refit}, target={self.target})"


def topk(refit: int = 10, target: Aim | None = None) -> TopK:
    """Ranks by the criterion, then re-solves the weights that stay so that the layer's outputs change least. Needs `data=`.

    The re-solve is least squares on each row's own support, by `refit` steps of conjugate gradients for all rows at once. Ten
    steps are as good as an exact solution. `target` is what the outputs should be: `own()` (the default) or `flow()`.
    """
    return TopK(refit, target or own())
