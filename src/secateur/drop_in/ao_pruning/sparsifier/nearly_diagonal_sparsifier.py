"""Masks that keep a band around the main diagonal."""

from __future__ import annotations

from typing import Any

from torch import nn

from .base_sparsifier import BaseSparsifier

__all__ = ["NearlyDiagonalSparsifier"]


class NearlyDiagonalSparsifier(BaseSparsifier):
    """Keeps `nearliness` diagonals, the main one and as many on either side: an odd number. Nothing, if it is not positive."""

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__(defaults={"nearliness": nearliness})

    def update_mask(self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes the band to the mask."""
        mask = self._holder(module, tensor_name).mask.data
        if nearliness <= 0:
            mask.zero_()
            return
        name = kwargs.get("tensor_fqn", tensor_name)
        if mask.dim() != 2:
            raise ValueError(f"{name!r} has shape {tuple(mask.shape)}; only a matrix has a diagonal")
        if nearliness % 2 == 0:
            raise ValueError(
                f"nearliness={nearliness} for {name!r} is even; it counts the diagonal and equal numbers beside it"
            )
        if nearliness // 2 >= min(mask.shape):
            raise ValueError(f"nearliness={nearliness} is more than {name!r} has diagonals: its shape is {tuple(mask.shape)}")
        mask.fill_(1).triu_(-(nearliness // 2)).tril_(nearliness // 2)
