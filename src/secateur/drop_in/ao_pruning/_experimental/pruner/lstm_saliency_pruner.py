"""Prunes the rows of every gate of an LSTM that have the lowest L1 norm."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base_structured_sparsifier import BaseStructuredSparsifier
from .parametrization import FakeStructuredSparsity
from .saliency_pruner import drop_lowest, is_gate_weight, level_of, row_saliency

__all__ = ["LSTMSaliencyPruner"]


class LSTMSaliencyPruner(BaseStructuredSparsifier):
    """Masks in each gate the fraction `sparsity_level` of rows with the lowest L1 norm, rounded down.

    The gates of a tensor, and the tensors of a layer, choose their rows independently, as in torch. `prune` removes a hidden
    unit if all gates mask it. The other masked rows stay as zeros, and a warning names their tensors. (torch cuts each gate by
    its own mask, which combines gates of different units and changes the output.) To remove whole hidden units use
    `SaliencyPruner`, which masks a unit in all gates at once.

    A weight that does not belong to a recurrent layer is treated as four gates, as in torch.
    """

    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        level = level_of(tensor_name, kwargs)
        saliency = row_saliency(getattr(module, tensor_name), kwargs.get("tensor_fqn", tensor_name))
        for one in module.parametrizations[tensor_name]:  # type: ignore[index]
            if isinstance(one, FakeStructuredSparsity):
                rows: Any = module.hidden_size if is_gate_weight(module, tensor_name) else len(one.mask) // 4
                for mask, scores in zip(one.mask.split(rows), saliency.split(rows), strict=True):
                    drop_lowest(mask, scores, int(len(mask) * level))
