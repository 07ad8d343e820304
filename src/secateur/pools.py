"""Masks of large pools (one tensor, or several together), by one exact threshold.

The scores of a pool are never concatenated. A small sample brackets the threshold. One pass counts the scores below the
bracket, writes the mask of those above it, and collects the few inside, which give the exact threshold and are pruned one by
one. A global magnitude mask therefore reads the weights once and needs little memory besides the mask.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import kernels
from .scores import Scores, nan_in

_SAMPLE = 1 << 17  # enough to bracket the threshold within about 1 % of the pool


@dataclass(frozen=True)
class PoolCut:
    """Scores below `threshold` are pruned, and the first `ties` of the `equal` scores that equal it."""

    threshold: float
    ties: int
    equal: int


def keep_pool(pool: Mapping[str, Scores], drop: int) -> dict[str, Tensor]:
    """Returns the masks of a pool that prune its `drop` lowest scores."""
    magnitudes = [(one.magnitude_of, one.under) for one in pool.values() if one.magnitude_of is not None]
    if len(magnitudes) == len(pool):
        try:
            masks = kernels.keep_magnitudes(magnitudes, lambda: _sample(pool, _count(pool)), drop)
        except kernels.NaNFound as found:
            raise nan_in(list(pool)[found.position]) from None
        if masks is not None:
            return dict(zip(pool, masks, strict=True))
        alike = len({(matrix.dtype, matrix.device.type) for matrix, _ in magnitudes}) == 1
        pool = {name: _ranked(name, one, alike) for name, one in pool.items()}
    total = _count(pool)
    sample = kernels.ordered(_sample(pool, total))
    if drop > 0 and sample.numel() == total and not bool(sample[-1].isnan()):
        return _cut_at(pool, _cut_of_sorted(sample, drop), _new_masks(pool))
    return _cut_by_bracket(pool, drop, drop / max(total, 1), sample)


def _cut_at(pool: Mapping[str, Scores], cut: PoolCut, masks: dict[str, Tensor]) -> dict[str, Tensor]:
    """Writes the masks of a pool whose cut is known."""
    some = cut.ties < cut.equal  # some of the scores that equal the threshold stay
    left = _ties_to_go(pool, cut) if some else dict.fromkeys(pool, 0)
    for name, one in pool.items():
        one.each(lambda slab, a, b, kept=masks[name]: kernels.keep_above(slab, cut.threshold, kept[a:b], ties=some), raw=True)
        for first, last in one.slabs():
            if not left[name]:
                break
            left[name] = kernels.drop_ties(one.rows(first, last), cut.threshold, masks[name][first:last], left[name])
    return masks


def _count(pool: Mapping[str, Scores]) -> int:
    return sum(one.numel for one in pool.values())


def _ranked(name: str, scores: Scores, alike: bool) -> Scores:
    """Returns magnitudes in the form that compares fastest: half precision on the CPU as integers of the same order."""
    matrix, under = scores.magnitude_of, scores.under
    assert matrix is not None
    if not alike or matrix.device.type != "cpu" or matrix.dtype not in (torch.bfloat16, torch.float16):
        return Scores.magnitude(matrix, scores.layout, under=under)

    def rows(first: int, last: int) -> Tensor:
        try:
            slab = matrix[first:last]
            return kernels.magnitude_bits(slab if under is None else slab * under[first:last])
        except kernels.NaNFound:
            raise nan_in(name) from None

    return replace(scores, rows=rows, magnitude_of=None)


def _new_masks(pool: Mapping[str, Scores]) -> dict[str, Tensor]:
    return {name: kernels.new_tensor((one.layout.rows, one.layout.cols), torch.bool, one.device) for name, one in pool.items()}


def _ties_to_go(pool: Mapping[str, Scores], cut: PoolCut) -> dict[str, int]:
    """Returns how many of the pruned ties are in each tensor."""
    left, found = cut.ties, dict.fromkeys(pool, cut.ties)
    for name, one in pool.items() if len(pool) > 1 else ():
        found[name] = min(left, _equal({name: one}, cut.threshold))
        left -= found[name]
    return found


def _cut_by_bracket(pool: Mapping[str, Scores], drop: int, share: float, sample: Tensor) -> dict[str, Tensor]:
    """Returns the masks that prune `drop` elements, a fraction `share` of the pool, from a sorted sample of its scores."""
    masks, width = _new_masks(pool), 4.0
    low = high = torch.nan  # bounds of the bracket; NaN: to be taken from the sample
    while True:
        spread = width * (share * (1 - share) / max(sample.numel(), 1)) ** 0.5 + 2 / max(sample.numel(), 1)
        low = _quantile(sample, share - spread) if math.isnan(low) else low
        high = _quantile(sample, share + spread) if math.isnan(high) else high
        upto, inside = _tally(pool, low, high, masks)
        if drop <= upto:
            none_below = low == 0 and all(one.magnitude_of is not None for one in pool.values())
            equal = upto if none_below else _equal(pool, low)
            if drop > upto - equal or drop == 0:
                cut = PoolCut(low, max(drop - (upto - equal), 0), equal)
                return masks if cut.ties == equal else _cut_at(pool, cut, masks)
            low, high = torch.nan, low
        elif drop <= upto + sum(values.numel() for values, _ in inside.values()):
            _drop_inside(inside, drop - upto, masks)
            return masks
        else:
            low, high = high, torch.nan
        width *= 8


def _drop_inside(inside: Mapping[str, tuple[Tensor, Tensor]], goes: int, masks: Mapping[str, Tensor]) -> None:
    """Prunes the `goes` lowest of the elements inside the bracket, given by their values and places in the masks."""
    each = [values for values, _ in inside.values()]
    every = _joined(each)
    threshold = kernels.kth(every, goes)
    ties = goes - int((every < threshold).count_nonzero())
    for (name, (_, places)), values in zip(inside.items(), every.split([one.numel() for one in each]), strict=True):
        values = values.to(places.device)
        keep, equal = values > threshold, (values == threshold).nonzero().view(-1)
        keep[equal[ties:]] = True
        masks[name].view(-1).scatter_(0, places, keep)
        ties = max(ties - equal.numel(), 0)


def _cut_of_sorted(whole: Tensor, drop: int) -> PoolCut:
    """Returns the cut of a small pool whose scores are all in a sorted tensor."""
    threshold = whole[drop - 1]
    under, upto = (int(torch.searchsorted(whole, threshold, right=right)) for right in (False, True))
    return PoolCut(float(threshold), drop - under, upto - under)


def _equal(pool: Mapping[str, Scores], value: float) -> int:
    return sum(sum(one.each(lambda slab, *_: kernels.count_equal(slab, value), raw=True)) for one in pool.values())


def _sample(pool: Mapping[str, Scores], total: int) -> Tensor:
    """Returns a sample of the scores from all over the pool, the same every time."""
    on_cpu = next(iter(pool.values())).device.type == "cpu"
    # On a GPU, sorting takes little time, and fewer candidates in the bracket save more than that.
    # On a CPU, a sample of an eighth is enough for small pools, where sorting it would take longest.
    size = min(_SAMPLE, max(_SAMPLE >> 3, total >> 3)) if on_cpu else max(_SAMPLE >> 1, total >> 10)
    sample = _sample_of_magnitudes(list(pool.values()), max(total // size, 1) | 1, on_cpu)
    if sample is not None:
        return sample
    return _joined([one.sample(max(size * one.numel // max(total, 1), 1)) for one in pool.values() if one.numel])


def _sample_of_magnitudes(pool: list[Scores], stride: int, on_cpu: bool) -> Tensor | None:
    """Returns every `stride`-th score (odd, so that all columns are covered) if all scores are magnitudes of matrices alike.

    All tensors are sampled in one call, which saves kernel launches.
    """
    raw = [one.magnitude_of for one in pool if one.magnitude_of is not None and one.magnitude_of.is_contiguous()]
    masks = [one.under for one in pool if one.under is not None and one.under.is_contiguous()]
    if len(raw) != len(pool) or len(masks) not in (0, len(pool)) or len({(m.device, m.dtype) for m in raw}) != 1:
        return None
    some = torch.cat([_every(matrix, stride, on_cpu) for matrix in raw])
    under = torch.cat([_every(mask, stride, on_cpu) for mask in masks]) if masks else None
    return kernels.magnitude(some, under)


def _joined(parts: list[Tensor]) -> Tensor:
    """Concatenates scores on the device of the first, as float64 if any of them is, and else as float32."""
    if not parts:
        return torch.empty(0)
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    return torch.cat([part.to(parts[0].device, wide) for part in parts])


def _every(matrix: Tensor, stride: int, in_runs: bool) -> Tensor:
    """Returns every `stride`-th element, or run of eight elements, which a CPU reads from memory together anyway."""
    flat, run = matrix.view(-1), 8
    if not in_runs or flat.numel() < run * run * stride:
        return flat[::stride]
    return flat[: flat.numel() // run * run].view(-1, run)[::stride].reshape(-1)


def _quantile(ordered: Tensor, share: float) -> float:
    """Returns a quantile of sorted values, or an infinity if it lies outside of them."""
    at = int(share * ordered.numel())
    if ordered.numel() == 0 or at <= 0:
        return -torch.inf
    return float(ordered[at]) if at < ordered.numel() else torch.inf


def _tally(
    pool: Mapping[str, Scores], low: float, high: float, masks: Mapping[str, Tensor]
) -> tuple[int, dict[str, tuple[Tensor, Tensor]]]:
    """Writes the masks of the scores above `low`. Returns the number of scores up to `low`, and for each tensor the values
    strictly between `low` and `high` and their places in the mask.
    """
    upto = 0
    inside = {}
    for name, one in pool.items():
        kept, cols = masks[name], one.layout.cols

        def look(slab: Any, first: int, last: int, kept: Tensor = kept, cols: int = cols) -> tuple[int, int, Tensor, Tensor]:
            at_most, above, values, places = kernels.tally(slab, low, high, kept[first:last])
            return at_most, above, values, places.add_(first * cols)

        found = one.each(look, raw=True)
        if sum(at_most + above for at_most, above, _, _ in found) != one.numel:
            raise nan_in(name)
        upto += sum(at_most for at_most, *_ in found)
        if found:
            inside[name] = torch.cat([values for *_, values, _ in found]), torch.cat([places for *_, places in found])
    return upto, inside
