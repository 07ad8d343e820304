"""Amounts, channels and masks, as nn.utils.prune counts and shapes them. The ranking itself is `select`'s.

The names with an underscore are torch's own, and its tests call them.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor

from ..select import keep_largest
from ._upkeep import MaskHook


def _validate_pruning_amount_init(amount: Any) -> None:
    if not isinstance(amount, numbers.Real):
        raise TypeError(f"amount is an int (a number of units) or a float (a fraction), and this is a {type(amount).__name__}")
    if isinstance(amount, numbers.Integral):
        if amount < 0:
            raise ValueError(f"amount={amount} is negative; an int is the number of units to prune")
    elif float(amount) < 0 or float(amount) > 1:
        raise ValueError(f"amount={amount} is a float, so a fraction from 0 to 1; for a number of units give an int")


def _validate_pruning_amount(amount: Any, tensor_size: Any) -> None:
    if isinstance(amount, numbers.Integral) and int(amount) > tensor_size:
        raise ValueError(
            f"amount={amount} units cannot be pruned, because only {tensor_size} are left; an amount counts from those"
        )


def _validate_structured_pruning(t: Tensor) -> None:
    if t.dim() <= 1:
        raise ValueError(f"a tensor of shape {tuple(t.shape)} has no channels; structured pruning needs two dimensions or more")


def _compute_nparams_toprune(amount: Any, tensor_size: int) -> Any:
    if isinstance(amount, numbers.Integral):
        return amount
    if amount != amount:
        raise ValueError("amount is NaN; give a fraction from 0 to 1, or a number of units")
    return round(amount * tensor_size)


def _validate_pruning_dim(t: Tensor, dim: int) -> None:
    if dim >= t.dim():
        raise IndexError(f"dim={dim} does not exist in a tensor of shape {tuple(t.shape)}")


def _compute_norm(t: Tensor, n: Any, dim: int) -> Tensor:
    dims = list(range(t.dim()))
    dims.remove(dims[dim])
    return torch.norm(t, p=n, dim=dims)


def count(amount: Any, size: int) -> int:
    """How many of `size` units go."""
    drop = _compute_nparams_toprune(amount, size)
    _validate_pruning_amount(drop, size)
    if drop is True:
        raise TypeError("amount=True is neither a number of units nor a fraction; give 1 for one unit, 1.0 for all")
    return int(drop)


def count_channels(t: Tensor, dim: int) -> int:
    """How many channels there are along `dim`."""
    _validate_structured_pruning(t)
    _validate_pruning_dim(t, dim)
    if dim < -t.dim():
        raise IndexError(f"dim={dim} does not exist in a tensor of shape {tuple(t.shape)}")
    return t.shape[dim]


def keep(method: MaskHook, scores: Tensor, drop: int, *, magnitude: bool = False) -> Tensor:
    """True for all but the `drop` lowest of the scores, or of their magnitudes."""
    if scores.is_meta:
        return torch.empty_like(scores, dtype=torch.bool)
    try:
        return keep_largest(scores, drop, magnitude=magnitude)
    except ValueError as error:  # the engine knows no name, and a count out of range was refused before
        name = getattr(method, "_tensor_name", "t")
        raise ValueError(f"{type(method).__name__} cannot rank {name!r}: it contains NaN (or its scores do)") from error


def without(mask: Tensor, keep: Tensor | None) -> Tensor:
    """A contiguous copy of `mask` that is 0 where not kept."""
    if keep is None:
        return mask.clone(memory_format=torch.contiguous_format)
    return _times(keep.view(torch.int8).to(mask.dtype), mask)  # int8, because torch converts it twice as fast as bool


def spread(keep: Tensor, t: Tensor, dim: int, default_mask: Tensor) -> Tensor:
    """Kept channels as a mask of `t`'s dtype, on top of the mask that is there."""
    shape = [1] * t.dim()
    shape[dim] = -1
    channels = keep.to(device=t.device, dtype=t.dtype).view(shape).expand(t.shape)
    return _times(channels.clone(memory_format=torch.contiguous_format), default_mask.to(dtype=t.dtype))


def _times(fresh: Tensor, mask: Tensor) -> Tensor:
    """`fresh`, multiplied in place by `mask`, unless that is a single one seen everywhere."""
    broadcast = mask.dim() > 0 and not any(mask.stride()) and not mask.is_meta
    return fresh if broadcast and bool(mask[(0,) * mask.dim()] == 1) else fresh.mul_(mask)
