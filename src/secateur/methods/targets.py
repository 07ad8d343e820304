"""Targets: the outputs that a method wants a layer to have. They decide B of the layer problem, and the evidence for it."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from numbers import Real

from torch import Tensor

from .seam import LayerProblem


class Aim(abc.ABC):
    """The outputs that a layer should have. `own()` and `flow()` make one."""

    needs: frozenset[str] = frozenset()
    blend: tuple[float, float] | None = None

    @abc.abstractmethod
    def shift(self, problem: LayerProblem) -> Tensor | None:
        """B - W H, how far the wanted outputs are from those of the layer as it is; None if they are the same."""


@dataclass(frozen=True)
class Own(Aim):
    """The outputs of the layer as it is, for the inputs that the pruned model passes to it."""

    def shift(self, problem: LayerProblem) -> Tensor | None:
        return problem.shift

    def __str__(self) -> str:
        return "own()"


@dataclass(frozen=True)
class Flow(Aim):
    """A mixture of the layer's own outputs and those of the dense model. `flow()` makes one."""

    alpha: float
    beta: float

    needs = frozenset({"cross", "residual"})

    def __post_init__(self) -> None:
        if not all(isinstance(part, Real) and 0 <= part <= 1 for part in (self.alpha, self.beta)):
            raise ValueError(f"flow takes alpha= and beta= from 0 to 1, not alpha={self.alpha!r}, beta={self.beta!r}")

    @property
    def blend(self) -> tuple[float, float]:  # type: ignore[override]
        return self.alpha, self.beta

    def shift(self, problem: LayerProblem) -> Tensor | None:
        if problem.shift is not None:
            return problem.shift
        assert problem.C is not None
        more = (problem.C * self.alpha).to(problem.dtype)
        W = problem.W.to(problem.dtype)
        moved = (W.reshape(more.shape[0] if more.ndim == 3 else 1, -1, W.shape[1]) @ more).view(W.shape)
        return moved if problem.D is None else moved.add_(problem.D, alpha=self.beta)

    def __str__(self) -> str:
        return f"flow({self.alpha:g})" if self.alpha == self.beta else f"flow({self.alpha:g}, {self.beta:g})"


def own() -> Own:
    """Aims at what the layer computes now, from the inputs that the pruned model passes to it: B = W H."""
    return Own()


def flow(alpha: float = 0.5, beta: float | None = None) -> Flow:
    """Aims at the dense model, so that errors do not add up from block to block: B = W (H + alpha C) + beta D.

    `alpha` is the share of what the layer computes in the dense model, against what it computes from the inputs that the pruned
    model passes to it. `beta` is the share of the error in the residual stream that a layer whose output is added to the stream
    takes over; by default it is `alpha`. A part of the correction is better than all of it, which fits the calibration data too
    closely: `method="flow"` uses 0.5 and 0.75. (Asymmetric targets: Li et al., GPTAQ, 2025.)
    """
    return Flow(alpha, alpha if beta is None else beta)
