"""Which quantized sparse module takes the place of which module in `BaseSparsifier.convert`."""

from __future__ import annotations

from typing import Any

from torch import nn

__all__ = ["get_static_sparse_quantized_mapping", "get_dynamic_sparse_quantized_mapping"]


def get_static_sparse_quantized_mapping() -> dict[type[nn.Module], Any]:
    """For modules prepared for static quantization."""
    import torch.ao.nn.sparse.quantized as quantized  # slow to import, and few need it

    return {nn.Linear: quantized.Linear}


def get_dynamic_sparse_quantized_mapping() -> dict[type[nn.Module], Any]:
    """For dynamic quantization, which needs no calibration."""
    import torch.ao.nn.sparse.quantized.dynamic as dynamic

    return {nn.Linear: dynamic.Linear}
