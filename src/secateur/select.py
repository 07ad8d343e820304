"""`select`: the only function that ranks anything.

Units compete in pools. In each pool the lowest scores go, as many as asked, to the last one; among equal scores the lowest
index goes first. That order is the same for every dtype and on every device. NaN cannot be ranked and is an error.

Scores are never laid side by side. A large pool is cut by its threshold: a small sample brackets it, one pass counts what lies
below the bracket and gathers the little that lies inside, and the threshold is exact. So a global magnitude mask reads the
weights twice and needs no memory but the mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from . import kernels
from ._axes import Layout
from ._dist import Comm
from .patterns import Pattern

SCOPES = ("tensor", "global", "row")
RANKED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
Result = TypeVar("Result")
_COLUMNS = 4096  # slabs are whole rows, so a tensor of any shape is ranked in rows of this length
_SAMPLE = {"cpu": 1 << 17, "cuda": 1 << 20}  # brackets the threshold to about 1 % of the pool, or less


@dataclass(frozen=True)
class Scores:
    """The element scores of one tensor as a matrix, worked out a slab of rows at a time.

    `magnitude_of` is set when the scores are the absolute values of that matrix, which kernels then read directly.
    """

    layout: Layout
    device: torch.device
    rows: Callable[[int, int], Tensor]
    magnitude_of: Tensor | None = None

    @staticmethod
    def of(matrix: Tensor, layout: Layout | None = None) -> Scores:
        """Scores that are there already, as one matrix."""
        return Scores(layout or Layout(tuple(matrix.shape)), matrix.device, lambda a, b: matrix[a:b])

    @staticmethod
    def magnitude(matrix: Tensor, layout: Layout | None = None) -> Scores:
        """The absolute values of a matrix, without a copy of it."""
        layout = layout or Layout(tuple(matrix.shape))
        return Scores(layout, matrix.device, lambda a, b: kernels.magnitude(matrix[a:b]), matrix)

    @property
    def numel(self) -> int:
        return self.layout.rows * self.layout.cols

    def slabs(self, multiple: int = 1) -> list[tuple[int, int]]:
        """(first row, last row) over all rows, `multiple` rows at a time or more, sized for the device."""
        step = max(kernels.slab_elements(self.device) // max(self.layout.cols, 1) // multiple, 1) * multiple
        return [(first, min(first + step, self.layout.rows)) for first in range(0, self.layout.rows, step)]

    def each(self, look: Callable[[Tensor, int, int], Result], multiple: int = 1) -> list[Result]:
        """`look(scores, first row, last row)` for every slab, in order."""
        return [look(self.rows(first, last), first, last) for first, last in self.slabs(multiple)]

    def sample(self, size: int) -> Tensor:
        """About `size` scores from all over the tensor, the same ones every time."""
        rows, cols = self.layout.rows, self.layout.cols
        if self.numel <= size:
            return self.rows(0, rows).reshape(-1)
        if self.magnitude_of is not None and self.magnitude_of.is_contiguous():
            return kernels.magnitude(_every(self.magnitude_of, self.numel // size))
        picks = min(rows, 64, max(size // max(cols, 1), 1))
        return torch.cat([self.rows(r, r + 1).reshape(-1) for r in (i * rows // picks for i in range(picks))])


@dataclass(frozen=True)
class Cut:
    """Where a pool is cut: everything below `threshold` goes, and the first `ties` of the `equal` that equal it."""

    threshold: float
    ties: int
    equal: int


def select(
    scores: Mapping[str, Scores],
    pattern: Pattern,
    *,
    scope: str = "tensor",
    sparsity: float | Mapping[str, float] | None = None,
    count: int | Mapping[str, int] | None = None,
    previous: Mapping[str, Tensor] | None = None,
    comm: Comm | None = None,
) -> dict[str, Tensor]:
    """Bool matrices, True where an element is kept.

    `sparsity` is the fraction of all elements to prune, `count` the number of units to prune in each pool; a mapping gives
    each tensor its own. With n:m the pattern itself is the budget. `previous` holds matrices of what may be kept: what is
    False there stays pruned, and counts.
    """
    comm = comm or Comm()
    if not comm.alone:
        _no_nan_anywhere(scores, comm)
    if previous is not None:
        scores = {name: _held(one, previous[name]) for name, one in scores.items()}
    units = {name: _fold(one, pattern) for name, one in scores.items()}
    if pattern.keep:
        n, m = pattern.keep
        kept = {name: _keep_each(name, one, m, lambda size: size - n) for name, one in units.items()}
    elif scope == "row":
        kept = {name: _keep_each(name, one, one.layout.cols, _row_budget(name, sparsity, count)) for name, one in units.items()}
    else:
        pools = [list(units)] if scope == "global" else [[name] for name in units]
        kept = {}
        for names in pools:
            sizes = [pattern.sizes(scores[name].layout) for name in names] if not pattern.elementwise else None
            drop = _budget(names, [units[name] for name in names], sizes, sparsity, count, comm)
            kept |= _keep_pool({name: units[name] for name in names}, drop, comm)
    masks = {n: k if pattern.elementwise else pattern.unfold(k, scores[n].layout) for n, k in kept.items()}
    return masks if previous is None else {name: mask & previous[name] for name, mask in masks.items()}


def keep_largest(scores: Tensor, drop: int, *, magnitude: bool = False) -> Tensor:
    """The mask of one tensor on its own: its `drop` lowest scores (or magnitudes) go."""
    of = Scores.magnitude if magnitude else Scores.of
    flat = scores.detach().reshape(-1)
    if not (flat.is_complex() or flat.dtype in RANKED):  # whole numbers, and floats of eight bits
        flat = flat.double()
    whole = flat.numel() - flat.numel() % _COLUMNS
    parts = {"scores": of(flat[:whole].view(-1, _COLUMNS)), "scores at the end": of(flat[whole:].view(1, -1))}
    kept = select({name: part for name, part in parts.items() if part.numel}, Pattern(), scope="global", count=drop)
    flats = [part.view(-1) for part in kept.values()]
    return (flats[0] if len(flats) == 1 else torch.cat(flats) if flats else flat > 0).view(scores.shape)


# --- units and budgets ----------------------------------------------------------------------------------------------


def _held(scores: Scores, allowed: Tensor) -> Scores:
    """The same scores, with what is not allowed below everything else."""

    def rows(first: int, last: int) -> Tensor:
        slab = scores.rows(first, last)
        if bool((slab == -torch.inf).any()):  # stays below every number, and above what is not allowed
            slab = slab.double().clamp(min=torch.finfo(torch.float64).min)
        return slab.masked_fill(~allowed[first:last], -torch.inf)

    return replace(scores, rows=rows, magnitude_of=None)


def _fold(scores: Scores, pattern: Pattern) -> Scores:
    if pattern.elementwise:
        return scores
    block = pattern.block(scores.layout)
    folded = scores.each(lambda slab, *_: pattern.fold(slab, block), multiple=block[0])
    return Scores.of(torch.cat(folded) if folded else torch.empty(0, -(-scores.layout.cols // block[1]), device=scores.device))


def _budget(
    names: Sequence[str],
    units: Sequence[Scores],
    sizes: Sequence[Tensor] | None,
    sparsity: float | Mapping[str, float] | None,
    count: int | Mapping[str, int] | None,
    comm: Comm,
) -> int:
    """How many units of this pool go."""
    (total,) = comm.sum(sum(one.numel for one in units))
    if count is not None:
        asked = count[names[0]] if isinstance(count, Mapping) else count
        if not 0 <= asked <= total:
            raise ValueError(f"count={asked} units cannot be pruned from {', '.join(map(repr, names[:3]))}, which has {total}")
        return asked
    assert sparsity is not None
    share = sparsity[names[0]] if isinstance(sparsity, Mapping) else sparsity
    if sizes is None:
        return round(share * total)
    flat = torch.cat([size.reshape(-1) for size in sizes])
    every = comm.cat(flat)  # decided alike on every process, also on one that has few units or none
    if every.numel() == 0 or bool((every == every[0]).all()):
        return round(share * total)
    if not comm.alone:
        raise NotImplementedError(
            "blocks that do not divide a sharded tensor evenly cannot share a budget; choose a block that does"
        )
    # Units of different sizes: prune in order of score, as many as bring the number of elements nearest to the budget.
    order = torch.cat([one.rows(0, one.layout.rows).reshape(-1).cpu() for one in units]).sort(stable=True).indices
    gone = torch.cat([flat.new_zeros(1), flat[order].cumsum(0)])
    return int((gone - share * int(flat.sum())).abs().argmin())


def _row_budget(name: str, sparsity: float | Mapping[str, float] | None, count: int | Mapping[str, int] | None):
    def budget(size: int) -> int:
        if count is not None:
            asked = count[name] if isinstance(count, Mapping) else count
            if not 0 <= asked <= size:
                raise ValueError(f"count={asked} cannot be pruned from each row of {name!r}, which has {size} units")
            return asked
        assert sparsity is not None
        return round((sparsity[name] if isinstance(sparsity, Mapping) else sparsity) * size)

    return budget


# --- small pools: rows and n:m --------------------------------------------------------------------------------------


def _keep_each(name: str, units: Scores, size: int, drop: Callable[[int], int]) -> Tensor:
    """Each run of `size` neighbours in a row is a pool; the last may be shorter. `drop` says how many go from a pool."""
    rows, cols = units.layout.rows, units.layout.cols
    kept = torch.empty(rows, cols, dtype=torch.bool, device=units.device)
    size = max(size, 1)
    whole = cols - cols % size
    try:
        if units.magnitude_of is not None and kernels.keep_groups(units.magnitude_of, size, drop(size), kept):
            return kept
    except kernels.NaNFound:
        raise _nan(name) from None

    def keep(slab: Tensor, first: int, last: int) -> None:
        if kernels.has_nan(slab):
            raise _nan(name)
        for begin, end, pool in ((0, whole, size), (whole, cols, cols - whole)):
            if begin < end:
                groups = slab[:, begin:end].reshape(-1, pool)
                if end - begin == cols:
                    kernels.keep_rows(groups, drop(pool), kept[first:last].view(-1, pool))
                else:
                    part = torch.empty(groups.shape, dtype=torch.bool, device=kept.device)
                    kernels.keep_rows(groups, drop(pool), part)
                    kept[first:last, begin:end] = part.view(last - first, end - begin)

    units.each(keep)
    return kept


def _no_nan_anywhere(scores: Mapping[str, Scores], comm: Comm) -> None:
    """NaN on one process is an error on all of them: the others would wait for it forever."""
    found = [sum(one.each(lambda slab, *_: int(slab.isnan().sum()))) for one in scores.values()]
    for name, number in zip(scores, comm.sum(*found), strict=True):
        if number:
            raise _nan(name)


def _nan(name: str) -> ValueError:
    return ValueError(
        f"the scores of {name!r} contain NaN, which cannot be ranked; look at its weights and at the criterion's evidence"
    )


# --- large pools: one tensor, or all of them ------------------------------------------------------------------------


def _keep_pool(pool: Mapping[str, Scores], drop: int, comm: Comm) -> dict[str, Tensor]:
    magnitudes = [one.magnitude_of for one in pool.values() if one.magnitude_of is not None]
    if comm.alone and len(magnitudes) == len(pool):
        try:
            masks = kernels.keep_magnitudes(magnitudes, lambda: _sample(pool, sum(one.numel for one in pool.values())), drop)
        except kernels.NaNFound as found:
            raise _nan(list(pool)[found.position]) from None
        if masks is not None:
            return dict(zip(pool, masks, strict=True))
    if len(magnitudes) == len(pool) and len({(m.dtype, m.device.type) for m in magnitudes}) == 1:
        pool = {name: _bits(name, one) for name, one in pool.items()}
    cut = find_cut(pool, drop, comm)
    if cut.ties == cut.equal:  # of those that equal the threshold, none stays
        return {name: _keep_above(one, cut.threshold, ties=False) for name, one in pool.items()}
    left = _ties_to_go(pool, cut, comm)
    masks = {}
    for name, one in pool.items():
        masks[name] = _keep_above(one, cut.threshold, ties=True)
        for first, last in one.slabs():
            if not left[name]:
                break
            left[name] = kernels.drop_ties(one.rows(first, last), cut.threshold, masks[name][first:last], left[name])
    return masks


def _bits(name: str, scores: Scores) -> Scores:
    """Magnitudes of half precision on the CPU as integers in the same order, which compare faster; others as they are."""
    matrix = scores.magnitude_of
    if matrix is None or matrix.device.type != "cpu" or matrix.dtype not in (torch.bfloat16, torch.float16):
        return scores

    def rows(first: int, last: int) -> Tensor:
        try:
            return kernels.magnitude_bits(matrix[first:last])
        except kernels.NaNFound:
            raise _nan(name) from None

    return replace(scores, rows=rows, magnitude_of=None)


def _keep_above(scores: Scores, threshold: float, *, ties: bool) -> Tensor:
    kept = torch.empty(scores.layout.rows, scores.layout.cols, dtype=torch.bool, device=scores.device)
    scores.each(lambda slab, a, b: kernels.keep_above(slab, threshold, kept[a:b], ties=ties))
    return kept


def _ties_to_go(pool: Mapping[str, Scores], cut: Cut, comm: Comm) -> dict[str, int]:
    """Of the ties that go, how many lie in each tensor of this process."""
    if len(pool) == 1 and comm.alone:
        return dict.fromkeys(pool, cut.ties)
    equal = [_equal({name: one}, cut.threshold) for name, one in pool.items()]
    before = comm.before(equal)
    return {name: min(max(cut.ties - b, 0), here) for name, b, here in zip(pool, before, equal, strict=True)}


def find_cut(pool: Mapping[str, Scores], drop: int, comm: Comm) -> Cut:
    """The exact cut that prunes `drop` of the pool."""
    (total,) = comm.sum(sum(one.numel for one in pool.values()))
    sample = kernels.ordered(comm.cat(_sample(pool, total)))
    share, width = drop / max(total, 1), 4.0
    low = high = torch.nan  # not known
    while True:
        spread = width * (share * (1 - share) / max(sample.numel(), 1)) ** 0.5 + 2 / max(sample.numel(), 1)
        low = _quantile(sample, share - spread) if math.isnan(low) else low
        high = _quantile(sample, share + spread) if math.isnan(high) else high
        upto, inside = _tally(pool, low, high, comm)
        if drop <= upto:
            (equal,) = comm.sum(_equal(pool, low))
            if drop > upto - equal or drop == 0:
                return Cut(low, max(drop - (upto - equal), 0), equal)
            low, high = torch.nan, low
        elif drop <= upto + inside.numel():
            threshold = kernels.kth(inside, drop - upto)
            under, equal = int((inside < threshold).count_nonzero()), int((inside == threshold).count_nonzero())
            return Cut(threshold, drop - upto - under, equal)
        else:
            low, high = high, torch.nan
        width *= 8


def _equal(pool: Mapping[str, Scores], value: float) -> int:
    return sum(sum(one.each(lambda slab, *_: kernels.count_equal(slab, value))) for one in pool.values())


def _sample(pool: Mapping[str, Scores], total: int) -> Tensor:
    size = _SAMPLE.get(next(iter(pool.values())).device.type, 1 << 17)
    raw = [one.magnitude_of for one in pool.values() if one.magnitude_of is not None and one.magnitude_of.is_contiguous()]
    if len(raw) == len(pool) and len({(matrix.device, matrix.dtype) for matrix in raw}) == 1:  # few launches for many tensors
        return kernels.magnitude(torch.cat([_every(matrix, max(total // size, 1)) for matrix in raw]))
    parts = [one.sample(max(size * one.numel // max(total, 1), 1)) for one in pool.values() if one.numel]
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    device = parts[0].device if parts else torch.device("cpu")
    return torch.cat([part.to(device, wide) for part in parts]) if parts else torch.empty(0)


def _every(matrix: Tensor, stride: int) -> Tensor:
    """Elements of a contiguous matrix at a stride, an odd one so that all columns are visited."""
    return matrix.view(-1)[:: stride | 1]


def _quantile(ordered: Tensor, share: float) -> float:
    at = int(share * ordered.numel())
    if ordered.numel() == 0 or at <= 0:
        return -torch.inf
    return float(ordered[at]) if at < ordered.numel() else torch.inf


def _tally(pool: Mapping[str, Scores], low: float, high: float, comm: Comm) -> tuple[int, Tensor]:
    """How many scores are at most `low`, and the values strictly between `low` and `high`."""
    upto = 0
    inside: list[Tensor] = []
    for name, one in pool.items():
        found = one.each(lambda slab, *_: kernels.tally(slab, low, high))
        if sum(at_most + above for at_most, above, _ in found) != one.numel:
            raise _nan(name)
        upto += sum(at_most for at_most, _, _ in found)
        inside += [between for _, _, between in found]
    (upto,) = comm.sum(upto)
    wide = torch.float64 if any(part.dtype == torch.float64 for part in inside) else torch.float32
    device = inside[0].device if inside else torch.device("cpu")
    return upto, comm.cat(torch.cat([part.to(device, wide) for part in inside]) if inside else torch.empty(0))
