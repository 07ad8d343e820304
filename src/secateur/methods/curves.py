"""Error curves: how the error of each layer grows with its sparsity, for `budgets.by_loss`."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..curvature import Curvature
from ..patterns import Pattern
from ..progress import Progress
from ..targeting import Target
from .admm import admm
from .seam import Amount, LayerProblem

_SHORT = admm(steps=8, refit=4, rho=(0.1, 3.0))  # more steps lower all curves alike, and change the budgets little


@torch.no_grad()
def error_curves(
    found: Sequence[Target], measured: Curvature, levels: Sequence[float], pattern: Pattern, scope: str
) -> dict[str, list[float]]:
    """The error of each target at these sparsities, from the statistics of the dense model.

    With curvature it is tokens * tr(G D H D'), where D is the change of the weight: twice the change of the loss. Without,
    it is the squared change of the outputs relative to their size. Targets that saw no token are missing.
    """
    curves: dict[str, list[float]] = {}
    progress = Progress("budgets", len(found))
    for target in found:
        name, weighed = target.name, bool(measured.G)
        progress(name)
        if name not in measured.H or (weighed and name not in measured.G):
            continue
        W = target.layout.matrix(target.weight)
        plain = LayerProblem(name, W, H=measured.H[name])
        judge = LayerProblem(name, W, H=measured.H[name], G=measured.G.get(name))
        scale = float(measured.tokens[name]) if weighed else 1 / max(float(judge.objective(torch.zeros_like(W)).sum()), 1e-300)
        curves[name] = []
        for level in levels:
            weight = _SHORT.solve(plain, pattern, Amount(scope, level), None).weight
            assert weight is not None
            curves[name].append(scale * float(judge.objective(weight).sum()))
    return curves
