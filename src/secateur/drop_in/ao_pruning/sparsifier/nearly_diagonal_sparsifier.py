"""Masks that keep a band around the main diagonal."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

from torch import nn

from .base_sparsifier import BaseSparsifier

__all__ = ["NearlyDiagonalSparsifier"]


class NearlyDiagonalSparsifier(BaseSparsifier):
    """Keeps `nearliness` diagonals: the main one and equally many on either side, so an odd number. Prunes all if it is ≤ 0."""

    def __init__(self, nearliness: int = 1) -> None:
        super().__init__(defaults={"nearliness": nearliness})

    def update_mask(self, module: nn.Module, tensor_name: str, nearliness: int, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes the band of diagonals to the mask."""
        mask = self._holder(module, tensor_name).mask.data
        _check(kwargs.get("tensor_fqn", tensor_name), mask.shape, nearliness)
        if nearliness <= 0:
            mask.zero_()
        else:
            mask.fill_(1).triu_(-(nearliness // 2)).tril_(nearliness // 2)

    def step(self, use_path: bool = True) -> None:
        """Updates every mask, unless `enable_mask_update` is False. If a setting is wrong, no mask is updated."""
        if self.enable_mask_update and type(self).update_mask is NearlyDiagonalSparsifier.update_mask:
            for group in self.groups:
                mask = self._holder(group["module"], group["tensor_name"]).mask
                _check(group["tensor_fqn"], mask.shape, group["nearliness"])
        super().step(use_path)


def _check(name: str, shape: Sequence[int], nearliness: int) -> None:
    if not isinstance(nearliness, Integral):
        raise TypeError(f"nearliness={nearliness!r} for {name!r} must be an integer: the number of diagonals")
    if nearliness <= 0:
        return
    if len(shape) != 2:
        raise ValueError(f"{name!r} has shape {tuple(shape)}; only a matrix has a diagonal")
    if nearliness % 2 == 0:
        raise ValueError(f"nearliness={nearliness} for {name!r} must be odd: the main diagonal and equally many on either side")
    if nearliness // 2 >= min(shape):
        raise ValueError(f"nearliness={nearliness} is too large for {name!r} of shape {tuple(shape)}")
