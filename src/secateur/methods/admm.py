"""ADMM: solves for the mask and the weights of a layer together.

The weights V and a copy Z in the pattern are moved towards each other under a growing penalty (Boža, 2024; Meng et al., ALPS,
2024). Then the support is fixed and the weights on it are re-solved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from numbers import Real
from typing import ClassVar

from torch import Tensor

from ..budgets import by_loss
from ..patterns import Pattern
from ..scores import Scores
from ..values import requested
from .grid import on_grid
from .scaled import RIDGE, ScaledProblem, fast_products, finish, keep_largest
from .seam import Amount, LayerProblem, Method, Solution
from .targets import Aim, flow, own

CURVATURES = ("none", "diag", "fisher")
_FIXED = 0.65  # the penalty for wide inputs: lower ones let the mask change for ever, higher ones fix it too soon
_RAMP = 0.75  # with a fixed penalty, the sparsity grows over this part of the steps
Solver = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True)
class ADMM(Method):
    """ADMM with its settings. `admm()` makes one."""

    steps: int = 20
    refit: int = 6
    target: Aim = field(default_factory=own)
    curvature: str = "none"
    rho: tuple[float, float] = (0.2, 1.0)
    ridge: float = RIDGE
    wide: int = 8192
    values: str | None = None
    group: int | None = None
    reorder: bool = False

    ranks = False
    rewrites = True

    def __post_init__(self) -> None:
        for name, least in (("steps", 1), ("refit", 0), ("wide", 0)):
            if type(value := getattr(self, name)) is not int or value < least:
                raise ValueError(f"admm takes {name}= from {least}, a whole number, not {value!r}")
        if not isinstance(self.target, Aim):
            raise TypeError(f"admm takes target=sc.methods.own() or sc.methods.flow(), not {self.target!r}")
        if self.curvature not in CURVATURES:
            raise ValueError(f"admm takes curvature= one of {', '.join(map(repr, CURVATURES))}, not {self.curvature!r}")
        two = isinstance(self.rho, tuple) and len(self.rho) == 2
        if not two or not all(isinstance(rho, Real) and 0 < rho < math.inf for rho in self.rho):
            raise ValueError(f"admm takes rho=(first, last), two penalties above 0, not {self.rho!r}")
        if not isinstance(self.ridge, Real) or not 0 < self.ridge < math.inf:
            raise ValueError(f"admm takes ridge= above 0, not {self.ridge!r}")
        requested(self.values, self.group)

    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset({"gram"}) | self.target.needs

    @property
    def blend(self) -> tuple[float, float] | None:  # type: ignore[override]
        return self.target.blend

    def solve(self, problem: LayerProblem, pattern: Pattern, amount: Amount, previous: Tensor | None) -> Solution:
        problem = replace(problem, shift=self.target.shift(problem))
        whole = Scores.of(problem.W, problem.layout)
        amount = amount.share(1.0, pattern, whole)  # as a number, where a mask gives it

        def keep(V: Tensor, share: float = 1.0) -> Tensor:
            part = amount if share == 1 else amount.share(share, pattern, whole)
            return keep_largest(problem, V, pattern, part, previous)

        with fast_products(problem.W.device):
            scaled = ScaledProblem.of(problem, self.ridge)
            first = keep(scaled.W)
            search = self._fixed if problem.W.shape[1] > self.wide else self._growing
            Z, mask = search(scaled, keep, first)
            found = finish(problem, scaled, Z, mask, self.refit)
            best = self._not_above(problem, scaled, first, found)
            return on_grid(problem, scaled, best, requested(self.values, self.group))

    def _growing(self, p: ScaledProblem, keep: Callable[..., Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """A penalty that grows geometrically. It takes an eigendecomposition, after which any penalty is free."""
        first, last = self.rho
        grow = (last / first) ** (1 / max(self.steps - 1, 1))
        Z = p.W * mask.view_as(p.W)
        dual: Tensor | None = None  # not divided by the penalty, so a change of the penalty leaves it as it is
        for step in range(self.steps):
            rho = first * grow**step
            A = _moved(p, Z, dual, rho, p.shifted_solve)
            mask = keep(A)
            Z = A * mask.view_as(A)
            dual = (A - Z).mul_(rho)
        return Z, mask

    def _fixed(self, p: ScaledProblem, keep: Callable[..., Tensor], mask: Tensor) -> tuple[Tensor, Tensor]:
        """One penalty throughout, with a sparsity that grows. It takes one inverse, so it suits wide inputs.

        Full curvature would need an eigendecomposition, so the search uses its diagonal (the scale of the rows) alone.
        """
        p = replace(p, left=None)
        ramp, Z = max(round(_RAMP * self.steps), 1), p.W
        dual: Tensor | None = None
        for step in range(self.steps):
            A = _moved(p, Z, dual, _FIXED, p.fixed_solve)
            mask = keep(A, 1 - (1 - min((step + 1) / ramp, 1.0)) ** 3)
            Z = A * mask.view_as(A)
            dual = (A - Z).mul_(_FIXED)
        return Z, mask

    def _not_above(self, problem: LayerProblem, p: ScaledProblem, first: Tensor, found: Solution) -> Solution:
        """The solution, or one for the mask of the largest scaled weights in the rare case that this mask alone is better."""
        assert found.weight is not None
        V = found.weight.to(p.W.dtype).view_as(p.W) * p.scale
        plain = p.W * first.view_as(p.W)
        if float(p.errors(V).sum()) <= float(p.errors(plain).sum()):
            return found
        return finish(problem, p, plain, first, self.refit)

    def __str__(self) -> str:
        start, given = type(self)(), []
        for one in fields(self):
            if (value := getattr(self, one.name)) != getattr(start, one.name):
                given.append(f"{one.name}={value!r}" if isinstance(value, str) else f"{one.name}={value}")
        return f"{self._called}({', '.join(given)})"

    _called: ClassVar[str] = "admm"


@dataclass(frozen=True)
class ByTheLoss(ADMM):
    """`method="loss"`: ADMM in which the loss decides, from backward passes of the dense model.

    Outputs are weighed by their curvature, the target is `flow(0.5, 0.75)`, the budget is spread by `by_loss()`, and channels
    are put into a better order for n:m patterns.
    """

    target: Aim = field(default_factory=lambda: flow(0.5, 0.75))
    curvature: str = "fisher"
    reorder: bool = True

    spread = by_loss()
    _called = "loss"


def _moved(p: ScaledProblem, Z: Tensor, dual: Tensor | None, rho: float, solve: Solver) -> Tensor:
    """V + dual / rho, with the V that is best under the penalty."""
    R = (Z - p.W).mul_(rho)
    if p.pull is not None:
        R = R.add_(p.pull)
    if dual is None:
        return solve(R, rho).add_(p.W)
    return solve(R.sub_(dual), rho).add_(p.W).add_(dual, alpha=1 / rho)


def admm(
    steps: int = 20,
    refit: int = 6,
    target: Aim | None = None,
    curvature: str = "none",
    rho: tuple[float, float] = (0.2, 1.0),
    ridge: float = RIDGE,
    wide: int = 8192,
    values: str | None = None,
    group: int | None = None,
    reorder: bool = False,
) -> ADMM:
    """Solves for the mask and the weights of a layer together, from calibration data alone. Needs `data=`.

    `steps` is how often the weights and their pruned copy are moved towards each other, under a penalty that grows from
    `rho[0]` to `rho[1]`; more than 20 hardly matter. Then `refit` steps of conjugate gradients re-solve the weights that stay.
    The search is rounded to bfloat16 on CPUs that multiply such numbers in hardware; the re-solve is not.
    Layers with more than `wide` inputs use a fixed penalty, which is faster there and about 1 % worse. `target` says what the
    outputs should be: `own()` (the default) or `flow()`. `curvature` weighs errors of the outputs by their effect on the loss:
    "diag" for each output, "fisher" for all pairs of outputs; both need backward passes of the model. `ridge` pulls weights
    towards their old values. With `values`, the weights are rounded as `compress_(values=, group=)` stores them, and each makes
    up for the errors of the others. With `reorder`, `prune_` and `prune_folder` permute channels inside of the blocks of the
    model so that n:m patterns keep more, as `sc.reorder_` does. (Boža, 2024; Meng et al., ALPS, 2024.)
    """
    return ADMM(steps, refit, target or own(), curvature, rho, ridge, wide, values, group, reorder)
