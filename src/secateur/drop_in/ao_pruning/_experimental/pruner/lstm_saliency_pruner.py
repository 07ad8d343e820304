"""Prunes the hidden units of recurrent layers that have the lowest L1 norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .base_structured_sparsifier import BaseStructuredSparsifier
from .parametrization import FakeStructuredSparsity, masked_tensors
from .saliency_pruner import drop_lowest, level_of, row_saliency

__all__ = ["LSTMSaliencyPruner"]


class LSTMSaliencyPruner(BaseStructuredSparsifier):
    """Prunes the share `sparsity_level` of the hidden units of an LSTM, rounded down: those with the lowest L1 norm.

    A hidden unit is a row in each of the gates, of the weights for the input and for the state, in every layer and direction
    (they have one `hidden_size`): its norms there are added up, and all of its rows go together. If each gate chose rows of
    its own, no unit would be silent and none could be removed. The weight of another layer is seen as four parts, and each
    loses its lowest rows.
    """

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        level = level_of(tensor_name, kwargs)
        if prune_units(module, tensor_name, level):
            return
        saliency = row_saliency(getattr(module, tensor_name), kwargs.get("tensor_fqn", tensor_name))
        for one in module.parametrizations[tensor_name]:  # type: ignore[index]
            if isinstance(one, FakeStructuredSparsity):
                quarter = len(one.mask) // 4
                for mask, scores in zip(one.mask.split(quarter), saliency.split(quarter), strict=True):
                    drop_lowest(mask, scores, int(len(mask) * level))


def prune_units(module: nn.Module, tensor_name: str, level: float) -> bool:
    """Masks the hidden units of a recurrent layer with the lowest norms; False, and nothing, for any other weight."""
    if not isinstance(module, nn.RNNBase) or not tensor_name.startswith(("weight_ih_", "weight_hh_")):
        return False
    size = module.hidden_size
    masks = {name: mask for name, mask in masked_tensors(module).items() if name.startswith(("weight_ih_", "weight_hh_"))}
    units: Tensor = sum(row_saliency(getattr(module, name)).view(-1, size).sum(0) for name in masks)  # type: ignore[assignment]
    for mask in masks.values():
        for gate in mask.split(size):
            drop_lowest(gate, units, int(size * level))
    return True
