"""Averages of weights (EMA, SWA) of a model that is pruned while it trains."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.swa_utils import get_swa_multi_avg_fn

Average = Callable[[Any, Any, Tensor | int], None]


def keep_zeros(average: Average | None = None) -> Average:
    """A function for `multi_avg_fn=` of `torch.optim.swa_utils.AveragedModel` that keeps the zeros of the model::

        ema = AveragedModel(model, multi_avg_fn=keep_zeros(get_ema_multi_avg_fn(0.999)))

    A plain average of a weight that is pruned in the course of training still holds values from before. Here a value is zero
    wherever that of the model is zero at the last update. `average`: the rule for all other values. Default: the mean of all
    updates (SWA).
    """
    rule = get_swa_multi_avg_fn() if average is None else average

    @torch.no_grad()
    def update(averaged: Any, current: Any, count: Tensor | int) -> None:
        rule(averaged, current, count)
        for mean, now in zip(averaged, current, strict=True):
            mean.masked_fill_(now.detach().to(mean.device) == 0, 0)

    return update
