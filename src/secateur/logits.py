"""Logits: where the output of a model has them, and the Kullback-Leibler divergence between those of two models."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from .input_squares import is_float

_ELEMENTS = {"cpu": 1 << 16}  # logits are worked on in parts of about this size: a few of them fit into the cache of a CPU


def logits_of(output: Any) -> Tensor:
    """The logits in the output of a model: the output itself, its `logits`, or the first float tensor of a tuple."""
    found = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", output)
    if isinstance(found, tuple | list):
        found = next((value for value in found if is_float(value)), None)
    if not isinstance(found, Tensor) or not is_float(found) or found.ndim not in (2, 3) or found.shape[-1] < 2:
        given = f"a tensor of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(output).__name__
        raise ValueError(
            f"the model returns {given}, and not logits of shape (batch, classes) or (batch, tokens, classes); pass loss=, a "
            "function of the output and the target"
        )
    return found


def parts_of(logits: Tensor) -> Iterator[slice]:
    """The rows of a matrix of logits, in parts that take little memory."""
    step = max(_ELEMENTS.get(logits.device.type, 1 << 22) // logits.shape[1], 1)
    return (slice(first, first + step) for first in range(0, len(logits), step))


def divergence(logits: Tensor, wanted: Tensor, valid: Tensor | None, *, gradient: bool) -> tuple[float, int, Tensor | None]:
    """The summed KL(teacher || model) over tokens, their number, and the gradient of the mean by the model's logits.

    The gradient is softmax(logits) - softmax(wanted), so no graph over the logits is needed.
    """
    if logits.shape != wanted.shape:
        raise ValueError(f"the model gives logits of shape {tuple(logits.shape)} and the teacher {tuple(wanted.shape)}")
    own, other = logits.reshape(-1, logits.shape[-1]), wanted.reshape(-1, wanted.shape[-1])
    there, wide = None, torch.promote_types(own.dtype, torch.float32)
    if valid is not None and valid.shape == logits.shape[:-1]:
        there = valid.flatten().to(own.device)
    count = len(own) if there is None else int(there.sum())
    slope = torch.empty_like(own) if gradient else None
    total = 0.0
    for part in parts_of(own):
        log_p, log_q = (torch.log_softmax(values[part], -1, dtype=wide) for values in (other, own))
        p, apart = log_p.exp(), log_p.sub_(log_q)
        each = torch.linalg.vecdot(p, apart)
        if not bool(each.isfinite().all()):
            each = torch.linalg.vecdot(p, apart.masked_fill_(p == 0, 0))  # classes that the teacher excludes count nothing
        if there is not None:
            each = torch.where(there[part], each, 0)
        total += float(each.double().sum())
        if slope is not None:
            difference = log_q.exp_().sub_(p).div_(max(count, 1))
            slope[part] = difference if there is None else difference.masked_fill_(~there[part, None], 0)
    return total, count, None if slope is None else slope.view_as(logits)
