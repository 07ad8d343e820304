"""Masks that keep a band around the main diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
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
        _check(kwargs.get("tensor_fqn", tensor_name), mask.shape, nearliness)
        if nearliness <= 0:
            mask.zero_()
        else:
            mask.fill_(1).triu_(-(nearliness // 2)).tril_(nearliness // 2)

    def step(self, use_path: bool = True) -> None:
        """Updates every mask, unless `enable_mask_update` is False; or none, where a setting is wrong."""
        if self.enable_mask_update and type(self).update_mask is NearlyDiagonalSparsifier.update_mask:
            for group in self.groups:
                mask = self._holder(group["module"], group["tensor_name"]).mask
                _check(group["tensor_fqn"], mask.shape, group["nearliness"])
        super().step(use_path)


def _check(name: str, shape: Sequence[int], nearliness: int) -> None:
    if not isinstance(nearliness, Integral):
        raise TypeError(f"nearliness={nearliness!r} for {name!r}: it is a number of diagonals, a whole one")
    if nearliness <= 0:
        return
    if len(shape) != 2:
        raise ValueError(f"{name!r} has shape {tuple(shape)}; only a matrix has a diagonal")
    if nearliness % 2 == 0:
        raise ValueError(f"nearliness={nearliness} for {name!r} is even; it counts the diagonal and equal numbers beside it")
    if nearliness // 2 >= min(shape):
        raise ValueError(f"nearliness={nearliness} is more than {name!r} has diagonals: its shape is {tuple(shape)}")
