"""The format `input_sparse`: the dense weight, transposed, for one token whose input is partly zero (`gate_`)."""

from __future__ import annotations

from collections.abc import Iterator

import torch.nn.functional as F
from torch import Tensor

from ..find import Zeros
from ..formats import Buffers, Format, FormatOptions, Use, register
from ..single import columns_pack, columns_unpack
from .present import kernels, runs, suits


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if suits(matrix, use) and max(use.rows) == 1 and use.input_zeros >= 0.25:
        yield ()


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    (weight,) = buffers
    if len(x) != 1 or not runs(x, weight):
        return F.linear(x, weight.t().to(x.dtype), bias)
    return kernels().input_sparse(x.contiguous(), weight, bias)


INPUT_SPARSE = register(Format("input_sparse", ("values",), _fits, columns_pack, columns_unpack, _linear))
