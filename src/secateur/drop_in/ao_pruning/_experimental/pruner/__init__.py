"""Structured pruning, with the names of `torch.ao.pruning._experimental.pruner`."""

from .base_structured_sparsifier import BaseStructuredSparsifier
from .FPGM_pruner import FPGMPruner
from .lstm_saliency_pruner import LSTMSaliencyPruner
from .parametrization import BiasHook, FakeStructuredSparsity
from .saliency_pruner import SaliencyPruner

__all__ = [
    "BaseStructuredSparsifier",
    "FPGMPruner",
    "LSTMSaliencyPruner",
    "BiasHook",
    "FakeStructuredSparsity",
    "SaliencyPruner",
]
