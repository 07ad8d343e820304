"""Filter pruning via geometric median (He et al., 2019): prunes the filters that are closest to all others."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .base_structured_sparsifier import BaseStructuredSparsifier
from .saliency_pruner import drop_lowest

__all__ = ["FPGMPruner"]


class FPGMPruner(BaseStructuredSparsifier):
    """Prunes the fraction `sparsity_level` of filters with the smallest sum of distances to all others.

    `dist` is 1 or 2 (the default) for the L1 or L2 distance, or a function that maps a matrix with one filter per row to the
    matrix of distances between them. Pruned filters stay pruned and count towards the fraction.
    """

    def __init__(self, sparsity_level: float = 0.5, dist: Callable[[Tensor], Tensor] | int | None = None) -> None:
        if not callable(dist) and dist not in (None, 1, 2):
            raise NotImplementedError(f"dist={dist!r} is not supported; give 1, 2, or a function from rows to their distances")
        super().__init__(defaults={"sparsity_level": sparsity_level})
        self.dist_fn: Callable[[Tensor], Tensor] = dist if callable(dist) else partial(_distances, p=dist or 2)

    def _compute_distance(self, t: Tensor) -> Tensor:
        """Returns for every filter the sum of its distances to all filters."""
        return self.dist_fn(t.detach().flatten(1)).abs().sum(1)

    def update_mask(self, module: nn.Module, tensor_name: str, sparsity_level: float, **kwargs: Any) -> None:  # type: ignore[override]
        mask = self._holder(module, tensor_name).mask
        if sparsity_level <= 0:
            mask.data = torch.ones_like(mask)
        elif sparsity_level >= 1:
            mask.data = torch.zeros_like(mask)
        else:
            distance = self._compute_distance(getattr(module, tensor_name)).double()
            count = min(max(round(sparsity_level * len(mask)), 0), len(mask))
            drop_lowest(mask, distance.masked_fill(~mask.bool(), -1.0), count)  # distances are not negative


def _distances(rows: Tensor, p: int) -> Tensor:
    return torch.cdist(rows, rows, p=p)
