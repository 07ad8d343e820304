"""Sparsity of embeddings and of tensors that are in no module, as in `torch.ao.pruning._experimental.data_sparsifier`."""

from .base_data_sparsifier import BaseDataSparsifier
from .data_norm_sparsifier import DataNormSparsifier

__all__ = ["BaseDataSparsifier", "DataNormSparsifier"]
