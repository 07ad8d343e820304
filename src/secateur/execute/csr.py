"""The format `csr`: compressed sparse rows, multiplied by torch. It runs where our own kernels do not."""

from __future__ import annotations

import warnings
from collections.abc import Iterator

import torch
from torch import Tensor

from .find import Zeros, owners
from .formats import Buffers, Format, FormatOptions, Use, register


def _fits(matrix: Tensor, zeros: Zeros, use: Use) -> Iterator[tuple[int, ...]]:
    if use.kind == "linear" and zeros.sparsity > 0.5 and matrix.dtype == torch.float32:
        yield ()


def _pack(matrix: Tensor, options: FormatOptions) -> tuple[Tensor, ...]:
    kept = matrix != 0
    starts = torch.zeros(len(matrix) + 1, dtype=torch.int32, device=matrix.device)
    starts[1:] = kept.sum(1).cumsum(0)
    return matrix[kept], kept.nonzero()[:, 1].to(torch.int32), starts


def _unpack(buffers: Buffers, rows: int, columns: int, options: FormatOptions) -> Tensor:
    values, index, starts = buffers
    matrix = torch.zeros(rows, columns, dtype=values.dtype, device=values.device)
    row = owners(starts, len(index))
    matrix[row, index.long()] = values
    return matrix


def _linear(x: Tensor, buffers: Buffers, bias: Tensor | None, rows: int, options: FormatOptions) -> Tensor | None:
    values, index, starts = buffers
    if values.dtype != torch.float32 or x.dtype != torch.float32 or not len(values):
        return None
    with warnings.catch_warnings():  # torch warns once that the layout is in beta
        warnings.simplefilter("ignore", UserWarning)
        matrix = torch.sparse_csr_tensor(starts, index, values, (rows, x.shape[1]), device=x.device, check_invariants=False)
    y = (matrix @ x.t().contiguous()).t()  # several times faster than x @ matrix.t()
    return (y if bias is None else y + bias).contiguous()


CSR = register(Format("csr", ("values", "index", "starts"), _fits, _pack, _unpack, _linear))
