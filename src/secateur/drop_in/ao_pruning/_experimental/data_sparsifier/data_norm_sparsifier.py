"""Prunes the blocks of data that have the lowest norms."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from .....scores import RANKED, Scores
from ...sparsifier.weight_norm_sparsifier import Kept, check_blocks, keep_blocks, write_mask
from .base_data_sparsifier import BaseDataSparsifier

__all__ = ["DataNormSparsifier"]


class DataNormSparsifier(BaseDataSparsifier):
    """Prunes the blocks whose mean absolute value (L1) or mean square (L2) is lowest.

    Dimensions of size 1 are ignored, and a vector is treated as a matrix of shape (1, n). Each step scores the unmasked data,
    so pruned elements can return.

    Args:
        data_list: (name, data) pairs to add with the defaults.
        sparsity_level: the fraction of blocks to prune.
        sparse_block_shape: rows and columns of a block. Blocks at the edge are smaller if they do not divide the shape.
        zeros_per_block: how many elements are pruned in such a block, the lowest; by default all.
        norm: "L1" or "L2".
    """

    def __init__(
        self,
        data_list: list[tuple[str, Any]] | None = None,
        sparsity_level: float = 0.5,
        sparse_block_shape: tuple[int, int] = (1, 4),
        zeros_per_block: int | None = None,
        norm: str = "L1",
    ) -> None:
        if norm not in ("L1", "L2"):
            raise AssertionError(f"norm={norm!r} is not supported; give 'L1' or 'L2'")
        self.norm = norm
        super().__init__(
            data_list=data_list,
            sparsity_level=sparsity_level,
            sparse_block_shape=sparse_block_shape,
            zeros_per_block=math.prod(sparse_block_shape) if zeros_per_block is None else zeros_per_block,
        )

    def update_mask(  # type: ignore[override]
        self,
        name: str,
        data: Tensor,
        sparsity_level: float,
        sparse_block_shape: tuple[int, int],
        zeros_per_block: int,
        **kwargs: Any,
    ) -> None:
        self._check(name, data, sparsity_level, sparse_block_shape, zeros_per_block)
        kept: Kept | bool = True
        if sparsity_level > 0 and zeros_per_block > 0 and data.numel():
            scores = Scores.magnitude(_matrix(data), power=1 if self.norm == "L1" else 2)
            kept = keep_blocks(scores, sparsity_level, sparse_block_shape, zeros_per_block, name)
        write_mask(self.get_mask(name), kept, data)

    def step(self) -> None:
        """Updates all masks. If a config or a shape is wrong, no mask is updated."""
        if self.enable_mask_update and type(self).update_mask is DataNormSparsifier.update_mask:
            for name, config in self.data_groups.items():
                asked = (config[key] for key in ("sparsity_level", "sparse_block_shape", "zeros_per_block"))
                self._check(name, self.get_data(name), *asked)
        super().step()

    @staticmethod
    def _check(name: str, data: Tensor, level: float, sparse_block_shape: tuple[int, int], zeros_per_block: int) -> None:
        check_blocks(name, level, sparse_block_shape, zeros_per_block)
        if sum(length != 1 for length in data.shape) > 2:
            raise ValueError(
                f"{name!r} has shape {tuple(data.shape)}, and blocks need data with at most two dimensions larger than 1; "
                "add a view of two dimensions instead, such as data.flatten(1)"
            )


def _matrix(data: Tensor) -> Tensor:
    """Returns the data as a matrix that can be ranked: without dimensions of size 1, and integers as floats."""
    shape = data.squeeze().shape
    matrix = data.detach().reshape(shape if len(shape) == 2 else (1, data.numel()))
    return matrix if matrix.dtype in RANKED or matrix.is_complex() else matrix.double()
