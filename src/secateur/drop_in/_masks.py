"""Counts of units and the masks that keep them, as `torch.nn.utils.prune` counts and shapes them. `select` does the ranking."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.utils.prune as theirs
from torch import Tensor, nn

from ..kernels import new_tensor
from ..select import keep_largest


def count(amount: Any, size: int) -> int:
    """Returns how many of `size` units are pruned."""
    drop = theirs._compute_nparams_toprune(amount, size)
    theirs._validate_pruning_amount(drop, size)
    if drop is True:
        raise TypeError("amount=True is neither a number of units nor a fraction; give 1 for one unit, 1.0 for all")
    return int(drop)


def count_channels(t: Tensor, dim: int) -> int:
    """Returns the number of channels along `dim`."""
    theirs._validate_structured_pruning(t)
    theirs._validate_pruning_dim(t, dim)
    if dim < -t.dim():
        raise IndexError(f"dim={dim} does not exist in a tensor of shape {tuple(t.shape)}")
    return t.shape[dim]


def keep(method: theirs.BasePruningMethod, scores: Tensor, drop: int, *, magnitude: bool = False) -> Tensor:
    """Returns True for all but the `drop` lowest scores, or the `drop` lowest magnitudes."""
    if scores.is_meta:
        return torch.empty_like(scores, dtype=torch.bool)
    try:
        return keep_largest(scores, drop, magnitude=magnitude)
    except ValueError as error:  # only NaN is left: `count` has refused a number out of range
        name = getattr(method, "_tensor_name", "t")
        raise ValueError(f"{type(method).__name__} cannot rank {name!r}: it contains NaN (or its scores do)") from error


def without(mask: Tensor, keep: Tensor | None) -> Tensor:
    """Returns a contiguous copy of `mask` that is 0 where `keep` is False."""
    if keep is None:
        return mask.clone(memory_format=torch.contiguous_format)
    return _times(as_numbers(keep, mask.dtype), mask)


def as_numbers(keep: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns a contiguous copy of a bool mask as ones and zeros of another dtype."""
    return new_tensor(keep.shape, dtype, keep.device).copy_(keep.view(torch.int8))  # converts twice as fast as bool


def random_like(t: Tensor) -> Tensor:
    """Returns what `torch.rand_like` returns, in memory that is faster to write."""
    plain = type(t) in (Tensor, nn.Parameter) and t.device.type == "cpu" and t.layout == torch.strided
    if plain and t.is_floating_point() and t.is_contiguous():
        return new_tensor(t.shape, t.dtype).uniform_()
    return torch.rand_like(t)


def spread(keep: Tensor, t: Tensor, dim: int, default_mask: Tensor) -> Tensor:
    """Returns `default_mask`, in the dtype of `t`, without the channels along `dim` where `keep` is False."""
    shape = [1] * t.dim()
    shape[dim] = -1
    channels = keep.to(device=t.device, dtype=t.dtype).view(shape)
    return _times(new_tensor(t.shape, t.dtype, t.device).copy_(channels), default_mask.to(dtype=t.dtype))


def _times(fresh: Tensor, mask: Tensor) -> Tensor:
    """Multiplies `fresh` by `mask` in place, except where `mask` is a single 1 expanded to a shape."""
    one_element = mask.numel() > 0 and mask.dim() > 0 and not any(mask.stride()) and not mask.is_meta
    return fresh if one_element and bool(mask[(0,) * mask.dim()] == 1) else fresh.mul_(mask)
