"""Measures the statistics of batch normalisations again, on calibration data."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...edit import Cuts, eval_mode
from ...progress import track
from ...stats import check_values, on_batch, split_batch

Statistics = tuple[Tensor, Tensor]  # mean and variance of each channel


def reestimate_(model: nn.Module, data: Iterable[Any], dense: nn.Module | None = None, cuts: Cuts | None = None) -> int:
    """Set the statistics of every BatchNorm to the mean and variance of its inputs over `data`. Returns the number of layers.

    With the `dense` model and the `cuts` that made this one from it, the new statistics are the dense ones plus the difference
    between the two models on `data`. The dense statistics come from far more data, augmented as in training, and deviations of
    these few batches appear in both measurements and cancel (a control variate). Without cuts the statistics do not change.
    """
    batches, norms = list_batches(data), _norms(model)
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
    """The learned statistics of the kept units plus the change on data; variance + eps changes in proportion."""
    mean, variance = (t.double()[units] for t in (norm.running_mean, norm.running_var))
    ratio = (now[1] + norm.eps) / (before[1][units] + norm.eps)
    return mean + now[0] - before[0][units], ((variance + norm.eps) * ratio - norm.eps).clamp(min=0)


def _norms(model: nn.Module) -> dict[str, Any]:
    kind = nn.modules.batchnorm._BatchNorm
    return {n: m for n, m in model.named_modules() if isinstance(m, kind) and m.running_mean is not None}


def _statistics(model: nn.Module, batches: Sequence[Any]) -> dict[str, Statistics]:
    """Mean and variance of the inputs of each BatchNorm over all batches, including the variance between batches.

    Each BatchNorm normalises by its batch, as in training; all other modules are in eval mode.
    """
    norms = _norms(model)
    tracks = {m: m.track_running_stats for m in norms.values()}
    seen: dict[str, tuple[float, Tensor, Tensor]] = {}

    def see(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...]) -> None:
            seen[name] = pooled(seen.get(name), args[0].detach().movedim(1, 0).flatten(1).double())

        return hook

    hooks = [m.register_forward_pre_hook(see(name)) for name, m in norms.items()]
    try:
        with eval_mode(model), torch.no_grad():
            for m in norms.values():
                m.training, m.track_running_stats = True, False  # the statistics change when all data has been seen
            for batch in track(batches if norms else (), "BatchNorm statistics"):
                args, kwargs, _ = split_batch(batch)
                with on_batch(model, args, kwargs):
                    model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
        for m, tracked in tracks.items():
            m.track_running_stats = tracked
    for name, (_, mean, squares) in seen.items():
        if not bool((mean + squares).isfinite().all()):
            raise ValueError(f"{name}: its inputs are not finite on data=; check the data and the model, which is unchanged")
    return {name: (mean, squares / max(count - 1, 1)) for name, (count, mean, squares) in seen.items()}


def pooled(before: tuple[float, Tensor, Tensor] | None, x: Tensor) -> tuple[float, Tensor, Tensor]:
    """Count, mean and sum of squared deviations of each row of `x`, merged with those `before` (Chan et al., 1979)."""
    count, mean = float(x.shape[1]), x.mean(1)
    squares = (x - mean[:, None]).square_().sum(1)
    if before is None:
        return count, mean, squares
    total, shift = before[0] + count, mean - before[1]
    return total, before[1] + shift * (count / total), before[2] + squares + shift.square() * (before[0] * count / total)


def list_batches(data: Iterable[Any]) -> list[Any]:
    """The batches as a list. Raises where there are none, or where `data` is one tensor."""
    if isinstance(data, Tensor):
        raise TypeError("data= is an iterable of batches, not one Tensor; pass [batch]")
    batches = list(data)
    if not batches:
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    for number, batch in enumerate(batches, 1):
        check_values(split_batch(batch), number)
    return batches
