"""Prunes the rows of a weight that have the lowest L1 norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .....select import keep_largest
from .base_structured_sparsifier import BaseStructuredSparsifier
from .parametrization import masked_tensors

__all__ = ["SaliencyPruner"]


class SaliencyPruner(BaseStructuredSparsifier):
    """Prunes the fraction `sparsity_level` of rows with the lowest L1 norm, rounded down. Pruned rows stay pruned.

    In a recurrent layer it prunes whole hidden units, so that `prune` can remove them. A unit has a row in every gate, of the
    weights for the input and for the state, in every layer and direction (they share one `hidden_size`). Its saliency is the
    sum of the norms of these rows, and all of them are masked together.
    """

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        level, name = level_of(tensor_name, kwargs), kwargs.get("tensor_fqn", tensor_name)
        if is_gate_weight(module, tensor_name):
            _prune_hidden_units(module, level)
            return
        mask, weight = self._holder(module, tensor_name).mask, getattr(module, tensor_name)
        saliency = row_saliency(weight, name)
        if saliency.shape != mask.shape:
            raise AssertionError(f"{name!r} has {len(saliency)} rows and a mask of shape {tuple(mask.shape)}")
        drop_lowest(mask, saliency, int(len(mask) * level))


def is_gate_weight(module: nn.Module, tensor_name: str) -> bool:
    """Returns whether this is a weight of a recurrent layer with a row for every hidden unit in each gate."""
    return isinstance(module, nn.RNNBase) and tensor_name.startswith(("weight_ih_", "weight_hh_"))


def _prune_hidden_units(module: Any, level: float) -> None:
    """Masks the hidden units of a recurrent layer with the lowest saliency in all of its masked weights."""
    size = module.hidden_size
    masks = {name: mask for name, mask in masked_tensors(module).items() if is_gate_weight(module, name)}
    units: Any = sum(row_saliency(getattr(module, name)).view(-1, size).sum(0) for name in masks)
    for mask in masks.values():
        for gate in mask.split(size):
            drop_lowest(gate, units, int(size * level))


def level_of(tensor_name: str, config: Mapping[str, Any]) -> float:
    """Returns the fraction to prune, which has no default."""
    name, level = config.get("tensor_fqn", tensor_name), config.get("sparsity_level")
    if "sparsity_level" not in config:
        raise KeyError(
            f"no 'sparsity_level' for {name!r}; give it in its config, or for all tensors: {{'sparsity_level': 0.5}}"
        )
    if isinstance(level, bool) or not isinstance(level, int | float) or not 0 <= level <= 1:
        raise ValueError(f"sparsity_level={level!r} for {name!r} must be the fraction of its rows to prune, from 0 to 1")
    return level


def row_saliency(weight: Tensor, name: str = "the tensor") -> Tensor:
    """Returns the L1 norm of every row."""
    if weight.dim() <= 1:
        raise Exception(f"{name!r} has {weight.dim()} dimension(s); structured pruning needs a tensor of two or more")
    return weight.detach().norm(dim=tuple(range(1, weight.dim())), p=1)


def drop_lowest(mask: Tensor, scores: Tensor, count: int) -> None:
    """Sets the mask to False where the `count` lowest scores are. Entries that are False already stay False."""
    mask.data[~keep_largest(scores, count)] = False
