"""Prunes the rows of a weight that have the lowest L1 norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .....select import keep_largest
from .base_structured_sparsifier import BaseStructuredSparsifier

__all__ = ["SaliencyPruner"]


class SaliencyPruner(BaseStructuredSparsifier):
    """Prunes the share `sparsity_level` of rows with the lowest L1 norm, rounded down. What is pruned stays pruned.

    The hidden units of a recurrent layer are pruned as `LSTMSaliencyPruner` does it.
    """

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        from .lstm_saliency_pruner import prune_units

        level, name = level_of(tensor_name, kwargs), kwargs.get("tensor_fqn", tensor_name)
        if prune_units(module, tensor_name, level):
            return
        mask, weight = self._holder(module, tensor_name).mask, getattr(module, tensor_name)
        saliency = row_saliency(weight, name)
        if saliency.shape != mask.shape:
            raise AssertionError(f"{name!r} has {len(saliency)} rows and a mask of shape {tuple(mask.shape)}")
        drop_lowest(mask, saliency, int(len(mask) * level))


def level_of(tensor_name: str, config: Mapping[str, Any]) -> float:
    """The share to prune, which has no default."""
    name, level = config.get("tensor_fqn", tensor_name), config.get("sparsity_level")
    if "sparsity_level" not in config:
        raise KeyError(f"no 'sparsity_level' for {name!r}; give it in its config, or to all: {{'sparsity_level': 0.5}}")
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 <= level <= 1:
        raise ValueError(f"sparsity_level={level!r} of {name!r} is the share of its rows to prune: a number from 0 to 1")
    return level


def row_saliency(weight: Tensor, name: str = "the tensor") -> Tensor:
    """The L1 norm of every row."""
    if weight.dim() <= 1:
        raise Exception(
            f"{name!r} has {weight.dim()} dimension(s); structured pruning wants rows of at least one other dimension"
        )
    return weight.detach().norm(dim=tuple(range(1, weight.dim())), p=1)


def drop_lowest(mask: Tensor, scores: Tensor, count: int) -> None:
    """Sets the mask to False where the `count` lowest scores are; nothing comes back."""
    mask.data[~keep_largest(scores, count)] = False
