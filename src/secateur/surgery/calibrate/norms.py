"""Statistics of batch normalisations, measured anew on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...edit import Cuts
from ...stats import on_batch, split_batch

Statistics = tuple[Tensor, Tensor]  # mean and variance of each channel


def reestimate_(model: nn.Module, data: Iterable[Any], dense: nn.Module | None = None, cuts: Cuts | None = None) -> int:
    """Give every BatchNorm the mean and variance of its inputs over all of `data`; returns how many were done.

    With the `dense` model and the `cuts` that made this one of it, its statistics are the dense ones, moved by what moves on
    `data` between the two: they came from far more data, augmented as in training, and what is peculiar to these few batches
    is in both measurements and cancels (a control variate). A model that lost nothing stays as it is.
    """
    batches, norms = checked(data), _norms(model)
    found = _statistics(model, batches)
    if dense is not None and found:
        before, learned = _statistics(dense, batches), _norms(dense)
        for name in found.keys() & before.keys():
            kept = {} if cuts is None else cuts.tensors.get(f"{name}.running_mean".removeprefix("."), {})
            units = torch.tensor(kept.get(0, range(learned[name].num_features)), device=learned[name].running_mean.device)
            found[name] = _moved(learned[name], before[name], found[name], units)
    for name, (mean, variance) in found.items():
        norms[name].running_mean.copy_(mean)
        norms[name].running_var.copy_(variance)
    return len(found)


def _moved(norm: Any, before: Statistics, now: Statistics, units: Tensor) -> Statistics:
    """The learned statistics of the units that stay; of the variance, what the layer divides by moves in proportion."""
    mean, variance = (t.double()[units] for t in (norm.running_mean, norm.running_var))
    ratio = (now[1] + norm.eps) / (before[1][units] + norm.eps)
    return mean + now[0] - before[0][units], ((variance + norm.eps) * ratio - norm.eps).clamp(min=0)


def _norms(model: nn.Module) -> dict[str, Any]:
    kind = nn.modules.batchnorm._BatchNorm
    return {n: m for n, m in model.named_modules() if isinstance(m, kind) and m.running_mean is not None}


def _statistics(model: nn.Module, batches: Sequence[Any]) -> dict[str, Statistics]:
    """Mean and variance of all values that each BatchNorm gets: batches that differ in their means count.

    While it runs, each normalises by its batch, as in training, and everything else is in evaluation mode.
    """
    norms = _norms(model)
    modes = {m: m.training for m in model.modules()}
    tracks = {m: m.track_running_stats for m in norms.values()}
    seen: dict[str, tuple[float, Tensor, Tensor]] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = pooled(seen.get(name), args[0].detach().movedim(1, 0).flatten(1).double())

        return hook

    hooks = [m.register_forward_pre_hook(see(name)) for name, m in norms.items()]
    try:
        model.eval()
        for m in norms.values():
            m.training, m.track_running_stats = True, False  # the statistics stay as they are until all data was seen
        with torch.no_grad():
            for batch in batches if norms else ():
                args, kwargs, _ = split_batch(batch)
                with on_batch(model, args, kwargs):
                    model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for m, mode in modes.items():
            m.training = mode
        for m, tracked in tracks.items():
            m.track_running_stats = tracked
    for name, (_, mean, squares) in seen.items():
        if not bool((mean + squares).isfinite().all()):
            raise ValueError(
                f"{name}: its inputs are not finite on data=; look at the data and at the model, which is as it was"
            )
    return {name: (mean, squares / max(count - 1, 1)) for name, (count, mean, squares) in seen.items()}


def pooled(before: tuple[float, Tensor, Tensor] | None, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Count, mean and summed squared deviations of rows, with what was seen before (Chan et al., 1979)."""
    count, mean = float(x.shape[1]), x.mean(1)
    squares = (x - mean[:, None]).square_().sum(1)
    if before is None:
        return count, mean, squares
    total, shift = before[0] + count, mean - before[1]
    return total, before[1] + shift * (count / total), before[2] + squares + shift.square() * (before[0] * count / total)


def checked(data: Iterable[Any]) -> list[Any]:
    """The batches, as a list."""
    if isinstance(data, Tensor):
        raise TypeError("data= is an iterable of batches, not one Tensor; pass [batch]")
    batches = list(data)
    if not batches:
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    return batches
