"""Reads the mask of padding of a batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor


def included(kwargs: Mapping[str, Any]) -> Tensor | None:
    """True for the positions (batch, position) that the mask of a batch includes, None without such a mask.

    A mask of floats without positive values is added to attention scores: zero includes a position.
    """
    mask = kwargs.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.ndim != 2:
        return None
    return mask == 0 if mask.is_floating_point() and not bool((mask > 0).any()) else mask.bool()


def check_mask(kwargs: Mapping[str, Any], number: int) -> None:
    """Raises ValueError for a mask that excludes every position, or has another shape than the tokens.

    With a cache it may be longer.
    """
    there = included(kwargs)
    if there is not None and there.numel() and not bool(there.any()):
        raise ValueError(
            f"batch {number} of data= (counted from 1): attention_mask excludes every position, so the batch says nothing "
            "about the layers; leave the batch out, or correct its mask"
        )
    name = next((name for name in ("input_ids", "inputs") if kwargs.get(name) is not None), "")
    tokens, mask = kwargs.get(name), kwargs.get("attention_mask")
    if not isinstance(tokens, Tensor) or not isinstance(mask, Tensor) or tokens.ndim != 2 or mask.ndim != 2:
        return
    fits = mask.shape in (tokens.shape, (tokens.shape[1],) * 2)  # a square one says which position reads which
    if not fits and not tokens.is_floating_point() and kwargs.get("past_key_values") is None:
        raise ValueError(
            f"batch {number} of data= (counted from 1): attention_mask has the shape {tuple(mask.shape)} and {name} the shape "
            f"{tuple(tokens.shape)}; the mask marks the padding among the tokens, so the shapes must be equal"
        )
