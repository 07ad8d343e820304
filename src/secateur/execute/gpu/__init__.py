"""Formats for NVIDIA GPUs. Triton and cuSPARSELt are loaded when a layer in one of them is first called."""

from . import cusparselt, dense_blocks, input_sparse, padded_rows, sparse24_mma

__all__ = ["cusparselt", "dense_blocks", "input_sparse", "padded_rows", "sparse24_mma"]
