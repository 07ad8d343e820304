"""Which pattern the zeros of a tensor make, in the words that patterns have."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from .._axes import layout_of

_POOLS = ((1, 4), (2, 4), (4, 8))
_BLOCKS = ((64, 64), (32, 32), (16, 16), (16, 1), (4, 1), (1, 4))
_SLAB = 256  # rows, a multiple of every block
_FEW = 0.01  # fewer zeros than this are there by chance


def pattern_of(model: nn.Module, name: str, tensor: Tensor, zeros: int) -> str | None:
    """The narrowest pattern that the zeros fit, None where there are hardly any. Only of what looks like a weight."""
    if tensor.dim() < 2 or not tensor.is_floating_point() or zeros <= _FEW * tensor.numel() or zeros == tensor.numel():
        return None
    try:
        owner = model.get_submodule(name.rpartition(".")[0])
    except AttributeError:
        owner = model
    matrix = layout_of(owner, tuple(tensor.shape)).matrix(tensor.detach())
    rows, cols = matrix.shape
    tests: dict[str, Callable[[Tensor], bool]] = {"out": lambda kept: _all_or_none(kept, 1)}
    tests |= {f"{a}x{b}": partial(_blocks, a=a, b=b) for a, b in _BLOCKS if rows % a == 0 and cols % b == 0}
    tests |= {f"{n}:{m}": partial(_pools, n=n, m=m) for n, m in _POOLS if cols % m == 0}
    if _all_or_none(matrix[:_SLAB] != 0, 0) and torch.equal((matrix != 0).all(0), (matrix != 0).any(0)):
        return "in"
    for at in range(0, rows, _SLAB):  # most patterns are out after the first rows, and few rows take little memory
        kept = matrix[at : at + _SLAB] != 0
        tests = {pattern: test for pattern, test in tests.items() if test(kept)}
        if not tests:
            return "unstructured"
    return next(iter(tests))


def _all_or_none(kept: Tensor, dim: int) -> bool:
    return torch.equal(kept.all(dim), kept.any(dim))


def _blocks(kept: Tensor, a: int, b: int) -> bool:
    rows, cols = kept.shape
    return _all_or_none(kept.reshape(rows // a, a, cols // b, b).transpose(1, 2).flatten(2), 2)


def _pools(kept: Tensor, n: int, m: int) -> bool:
    return int(kept.reshape(len(kept), -1, m).sum(2, dtype=torch.uint8).max()) <= n
