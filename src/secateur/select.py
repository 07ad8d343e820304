"""`select` turns scores into masks.

Units compete in pools. In each pool exactly the requested number of units with the lowest scores is pruned; among equal scores
the lowest index is pruned first. The order is the same for every dtype and on every device. NaN cannot be ranked and raises.
Small pools (rows, n:m, the elements of a block) are ranked here; large ones are cut at a threshold by `pools`. For sharded
tensors, `shards` does the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from . import kernels
from ._layers import Layout
from .patterns import Pattern
from .pools import keep_pool
from .scores import RANKED, Scores, nan_in

SCOPES = ("tensor", "global", "row")
_COLUMNS = 4096  # row length in which a tensor of any shape is ranked, because slabs are made of whole rows


def select(
    scores: Mapping[str, Scores],
    pattern: Pattern,
    *,
    scope: str = "tensor",
    sparsity: float | Mapping[str, float] | None = None,
    count: int | Mapping[str, int] | None = None,
    previous: Mapping[str, Tensor] | None = None,
    floor: float = 0.0,
) -> dict[str, Tensor]:
    """Returns a bool matrix for each tensor, True where an element is kept.

    `sparsity` is the fraction of all elements to prune, `count` the number of units to prune in each pool; a mapping gives
    each tensor its own number. With n:m the pattern itself sets the budget. Elements that are False in `previous` stay pruned
    and count toward the budget. At least a fraction `floor` of each tensor is kept: in a pool of several tensors the others
    lose more instead, and a budget for each tensor or row, rounded to whole units, is rounded down where it has to be.
    """
    if previous is not None:
        scores = {name: held(one, previous[name]) for name, one in scores.items()}
    kept: dict[str, Tensor | None] = {}
    if pattern.keep:
        n, m = pattern.keep
        kept |= {name: keep_each(name, fold(one, pattern), m, lambda size: size - n) for name, one in scores.items()}
    elif scope == "row":
        for name, one in scores.items():
            units = fold(one, pattern)
            budget = row_budget(name, one.layout, pattern, sparsity, count, floor)
            kept[name] = keep_each(name, units, units.layout.cols, budget)
    else:
        for pool in [scores] if scope == "global" else [{name: one} for name, one in scores.items()]:
            kept |= _keep_units(pool, pattern, sparsity, count, floor)
    masks = {name: elements(name, scores[name], pattern, units) for name, units in kept.items()}
    return masks if previous is None else {name: mask & previous[name] for name, mask in masks.items()}


def keep_largest(scores: Tensor, drop: int, *, magnitude: bool = False) -> Tensor:
    """Returns the mask of one tensor that prunes its `drop` lowest scores (or magnitudes)."""
    of = Scores.magnitude if magnitude else Scores.of
    flat = scores.detach().reshape(-1)
    if not (flat.is_complex() or flat.dtype in RANKED):  # integers and 8-bit floats
        flat = flat.double()
    if 0 <= drop <= flat.numel() <= _COLUMNS and not (magnitude or flat.is_complex()):  # fast path for small tensors
        return _keep_small(flat[None], drop).view(scores.shape)
    whole = flat.numel() - flat.numel() % _COLUMNS
    parts = {"scores": of(flat[:whole].view(-1, _COLUMNS)), "scores at the end": of(flat[whole:].view(1, -1))}
    kept = select({name: part for name, part in parts.items() if part.numel}, Pattern(), scope="global", count=drop)
    flats = [part.view(-1) for part in kept.values()]
    return (flats[0] if len(flats) == 1 else torch.cat(flats) if flats else flat > 0).view(scores.shape)


def _keep_small(row: Tensor, drop: int) -> Tensor:
    if kernels.has_nan(row):
        raise nan_in("scores")
    kept = torch.empty(row.shape, dtype=torch.bool, device=row.device)
    kernels.keep_rows(row, drop, kept)
    return kept


# --- units and budgets ----------------------------------------------------------------------------------------------


def held(scores: Scores, allowed: Tensor) -> Scores:
    """Returns the scores with elements that are not allowed set to -inf, below all others."""

    def rows(first: int, last: int) -> Tensor:
        slab = scores.rows(first, last)
        if bool((slab == -torch.inf).any()):  # allowed elements that score -inf must rank above those not allowed
            slab = slab.double().clamp(min=torch.finfo(torch.float64).min)
        return slab.masked_fill(~allowed[first:last], -torch.inf)

    return replace(scores, rows=rows, magnitude_of=None, under=None)


def fold(scores: Scores, pattern: Pattern) -> Scores:
    """Returns the scores of units: the mean over each block, summed in float64 so that every device gives the same result."""
    if pattern.elementwise:
        return scores
    height, width = pattern.block(scores.layout)
    dtype = torch.float64 if scores.rows(0, 0).dtype == torch.float64 else torch.float32
    grid = torch.empty(pattern.grid(scores.layout), dtype=dtype, device=scores.device)
    matrix = scores.magnitude_of
    if matrix is None or not kernels.fold_magnitudes(matrix, scores.under, scores.power, height, width, grid):
        scores.each(lambda slab, a, b: kernels.fold(slab, height, width, grid[a // height : -(-b // height)]), multiple=height)
    # Means of magnitudes are not negative, so they are their own magnitudes.
    return replace(Scores.of(grid), magnitude_of=None if scores.magnitude_of is None else grid)


def _keep_units(
    pool: Mapping[str, Scores],
    pattern: Pattern,
    sparsity: float | Mapping[str, float] | None,
    count: int | Mapping[str, int] | None,
    floor: float,
) -> Mapping[str, Tensor | None]:
    """Returns the kept units of one pool as bool grids, or None for every tensor if no unit is kept."""
    most = total = sum(math.prod(pattern.grid(one.layout)) for one in pool.values())

    @functools.cache
    def units() -> Mapping[str, Scores]:
        nonlocal most
        folded = {name: fold(one, pattern) for name, one in pool.items()}
        if floor:
            caps = {name: _most_units(one, folded[name], pattern, floor) for name, one in pool.items()}
            most = sum(caps.values())
            if len(pool) > 1:
                folded = {name: _protected(name, one, caps[name]) for name, one in folded.items()}
        return folded

    first = next(iter(pool))
    if count is not None:
        drop = count[first] if isinstance(count, Mapping) else count
        if not 0 <= drop <= total:
            raise ValueError(
                f"count={drop} units cannot be pruned from {', '.join(map(repr, list(pool)[:3]))}, which has {total} units"
            )
    else:
        assert sparsity is not None
        share = sparsity[first] if isinstance(sparsity, Mapping) else sparsity
        drop = round(share * total) if pattern.elementwise else _units_to_drop(pool, pattern, share, total, units)
    if floor:
        units()  # sets `most`
        if drop > most and (len(pool) > 1 or count is not None):
            raise ValueError(
                f"floor={floor:g} allows {most} of the {total} units in {', '.join(map(repr, list(pool)[:3]))} to be pruned, "
                f"but {drop} were requested; lower floor=, or prune less"
            )
        drop = min(drop, most)  # a share of one tensor, rounded to whole units
    if pattern.lose is not None and drop == total:  # every block loses elements, so blocks need no ranking
        return dict.fromkeys(pool)
    return keep_pool(units(), drop)


def least_kept(elements: int, floor: float) -> int:
    """Returns how many of so many elements are kept at least."""
    return math.ceil(floor * elements - 1e-9)


def _most_units(scores: Scores, units: Scores, pattern: Pattern, floor: float) -> int:
    """Returns how many units with the lowest scores can be pruned if a fraction `floor` of the elements is kept."""
    spare = scores.numel - least_kept(scores.numel, floor)
    alike = pattern.size_counts(scores.layout)
    if len(alike) < 2:
        return min(spare // max(alike, default=1), alike.total())
    sizes = pattern.sizes(scores.layout).reshape(-1)
    order = units.rows(0, units.layout.rows).reshape(-1).cpu().sort(stable=True).indices
    return int((sizes[order].cumsum(0) <= spare).sum())


def _protected(name: str, units: Scores, cap: int) -> Scores:
    """Returns the scores with all but the `cap` lowest set to infinity, above all others."""
    (kept,) = keep_pool({name: units}, cap).values()

    def rows(first: int, last: int) -> Tensor:
        slab = units.rows(first, last)
        if bool((slab == torch.inf).any()):  # infinite scores that are not protected must rank below those that are
            slab = slab.double().clamp(max=torch.finfo(torch.float64).max)
        return slab.masked_fill(kept[first:last], torch.inf)

    return replace(units, rows=rows, magnitude_of=None, under=None)


def _units_to_drop(
    pool: Mapping[str, Scores],
    pattern: Pattern,
    share: float,
    total: int,
    units: Callable[[], Mapping[str, Scores]],
) -> int:
    """Returns the number of units whose elements come nearest to a fraction `share` of all elements."""
    sizes = torch.cat([pattern.sizes(one.layout).reshape(-1) for one in pool.values()])
    elements, most = sum(one.numel for one in pool.values()), int(sizes.sum())
    if share * elements > most + 0.5:
        raise ValueError(
            f"sparsity={share:g} is out of reach: pattern {str(pattern)!r} prunes at most {most / elements:.4g} of "
            f"{', '.join(map(repr, list(pool)[:3]))}"
        )
    if sizes.numel() == 0 or bool((sizes == sizes[0]).all()):
        return min(round(share * total * (elements / max(most, 1))), total)
    # Units of different sizes: in order of score, as many as come nearest to the budget.
    order = torch.cat([one.rows(0, one.layout.rows).reshape(-1).cpu() for one in units().values()]).sort(stable=True).indices
    gone = torch.cat([sizes.new_zeros(1), sizes[order].cumsum(0)])
    return int((gone.double() - share * elements).abs().argmin())


def row_budget(
    name: str,
    layout: Layout,
    pattern: Pattern,
    sparsity: float | Mapping[str, float] | None,
    count: int | Mapping[str, int] | None,
    floor: float,
) -> Callable[[int], int]:
    """Returns a function that maps the number of units in a row to the number of units to prune."""
    elements = layout.rows * layout.cols
    sizes = pattern.size_counts(layout)
    largest = max(sizes, default=1)
    most = (elements - least_kept(elements, floor)) // max(pattern.grid(layout)[0] * largest, 1)

    def budget(size: int) -> int:
        if count is not None:
            asked = count[name] if isinstance(count, Mapping) else count
            if not 0 <= asked <= size:
                raise ValueError(f"count={asked} cannot be pruned from each row of {name!r}, which has {size} units")
            if floor and asked > most:
                raise ValueError(
                    f"floor={floor:g} allows {most} units of each row of {name!r} to be pruned; count={asked} is more"
                )
            return asked
        assert sparsity is not None
        share = sparsity[name] if isinstance(sparsity, Mapping) else sparsity
        reach = 1.0 if pattern.lose is None else sum(size * number for size, number in sizes.items()) / elements
        drop = round(share * size / reach)
        if drop > size:
            raise ValueError(f"pattern {str(pattern)!r} cannot make each row of {name!r} {share:g} sparse")
        return min(drop, most) if floor else drop

    return budget


def elements(name: str, scores: Scores, pattern: Pattern, kept: Tensor | None) -> Tensor:
    """Returns the mask of elements for a mask of units; None means that all units are pruned."""
    if kept is not None and pattern.lose is None:
        return kept if pattern.elementwise else pattern.unfold(kept, scores.layout)
    assert pattern.lose is not None
    height, width = pattern.block(scores.layout)
    mask = _keep_in_blocks(name, scores, height, width, pattern.lose)
    if kept is not None:  # kept blocks lose nothing
        for first, last in scores.slabs(height):
            kernels.unite_(mask[first:last], kept[first // height : -(-last // height)], height, width)
    return mask


# --- small pools: rows and n:m --------------------------------------------------------------------------------------


def keep_each(name: str, units: Scores, size: int, drop: Callable[[int], int]) -> Tensor:
    """Ranks each run of `size` neighbours in a row as a pool (the last may be shorter). `drop(size)` of a pool are pruned."""
    rows, cols, units = units.layout.rows, units.layout.cols, units.without_power()
    kept = kernels.new_tensor((rows, cols), torch.bool, units.device)
    size = max(size, 1)
    try:
        if units.magnitude_of is not None and kernels.keep_groups(units.magnitude_of, size, drop(size), kept, units.under):
            return kept
    except kernels.NaNFound:
        raise nan_in(name) from None

    def keep(slab: Tensor, first: int, last: int) -> None:
        if kernels.has_nan(slab):
            raise nan_in(name)
        for begin, end, pool in kernels.runs(cols, size):
            groups = slab[:, begin:end].reshape(-1, pool)
            if end - begin == cols:
                kernels.keep_rows(groups, drop(pool), kept[first:last].view(-1, pool))
            else:
                part = torch.empty(groups.shape, dtype=torch.bool, device=kept.device)
                kernels.keep_rows(groups, drop(pool), part)
                kept[first:last, begin:end] = part.view(last - first, end - begin)

    units.each(keep)
    return kept


def _keep_in_blocks(name: str, scores: Scores, height: int, width: int, lose: int) -> Tensor:
    """Ranks the elements of each block as a pool and prunes `lose` of them, or all if there are fewer."""
    if height == 1:
        return keep_each(name, scores, width, lambda size: min(lose, size))
    rows, cols = scores.layout.rows, scores.layout.cols
    mask = kernels.new_tensor((rows, cols), torch.bool, scores.device)

    def keep(slab: Tensor, first: int, last: int) -> None:
        if kernels.has_nan(slab):
            raise nan_in(name)
        for top, bottom, h in kernels.runs(last - first, height):
            for left, right, w in kernels.runs(cols, width):
                grid = ((bottom - top) // h, h, (right - left) // w, w)
                blocks = slab[top:bottom, left:right].reshape(grid).transpose(1, 2).reshape(-1, h * w)
                part = torch.empty(blocks.shape, dtype=torch.bool, device=mask.device)
                kernels.keep_rows(blocks, min(lose, h * w), part)
                part = part.view(grid[0], grid[2], h, w).transpose(1, 2)
                mask[first + top : first + bottom, left:right] = part.reshape(bottom - top, right - left)

    scores.each(keep, multiple=height)
    return mask
