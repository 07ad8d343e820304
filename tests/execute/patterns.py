"""Random matrices with zeros in the patterns that the formats support."""

import torch
from torch import Tensor


def pruned(rows: int, columns: int, pattern: str, sparsity: float, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator)
    if ":" in pattern:
        n, m = map(int, pattern.split(":"))
        wide = columns + -columns % m
        keep = torch.rand(rows, wide // m, m, generator=generator).argsort(-1) < n
        return (weight * keep.view(rows, wide)[:, :columns]).to(dtype)
    height, width = map(int, pattern.split("x"))
    blocks = torch.rand(-(-rows // height), -(-columns // width), generator=generator) >= sparsity
    keep = blocks.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
    return (weight * keep).to(dtype)
