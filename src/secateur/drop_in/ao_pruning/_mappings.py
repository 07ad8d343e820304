"""The quantized sparse modules that `BaseSparsifier.convert` puts in the place of dense ones."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["get_static_sparse_quantized_mapping", "get_dynamic_sparse_quantized_mapping"]


def get_static_sparse_quantized_mapping() -> dict[type[nn.Module], Any]:
    """Returns the replacements for modules that were prepared for static quantization."""
    import torch.ao.nn.sparse.quantized as quantized  # slow to import and rarely needed

    return {nn.Linear: quantized.Linear}


def get_dynamic_sparse_quantized_mapping() -> dict[type[nn.Module], Any]:
    """Returns the replacements for dynamic quantization, which needs no calibration."""
    import torch.ao.nn.sparse.quantized.dynamic as dynamic

    return {nn.Linear: dynamic.Linear}
