"""`select`: the only function that ranks anything.

Units compete in pools. In each pool the lowest scores go, as many as asked, to the last one; among equal scores the lowest
index goes first. That order is the same for every dtype and on every device. NaN cannot be ranked and is an error.

Scores are never laid side by side. A large pool is cut by its threshold: a small sample brackets it, one pass counts what lies
below the bracket and gathers the little that lies inside, and the threshold is exact. So a global magnitude mask reads the
weights twice and needs no memory but the mask.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from . import kernels
from ._axes import Layout
from ._dist import Comm
from .patterns import Pattern

SCOPES = ("tensor", "global", "row")
_SAMPLE = 1 << 17  # brackets the threshold to about 1 % of the pool


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

    def slabs(self, multiple: int = 1) -> Iterator[tuple[int, int, Tensor]]:
        """(first row, last row, scores) over all rows, `multiple` rows at a time or more, sized for the device."""
        step = max(kernels.slab_elements(self.device) // max(self.layout.cols, 1) // multiple, 1) * multiple
        for first in range(0, self.layout.rows, step):
            last = min(first + step, self.layout.rows)
            yield first, last, self.rows(first, last)

    def sample(self, size: int) -> Tensor:
        """About `size` scores from all over the tensor, the same ones every time."""
        rows, cols = self.layout.rows, self.layout.cols
        if self.numel <= size:
            return self.rows(0, rows).reshape(-1)
        if self.magnitude_of is not None and self.magnitude_of.is_contiguous():
            return self.magnitude_of.view(-1)[:: self.numel // size | 1].abs()  # an odd stride visits all columns
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
    return select({"scores": of(scores.detach().reshape(1, -1))}, Pattern(), count=drop)["scores"].view(scores.shape)


# --- units and budgets ----------------------------------------------------------------------------------------------


def _held(scores: Scores, allowed: Tensor) -> Scores:
    """The same scores, with what is not allowed below everything else."""

    def rows(first: int, last: int) -> Tensor:
        slab = scores.rows(first, last)
        return slab.clamp(min=torch.finfo(slab.dtype).min).masked_fill(~allowed[first:last], -torch.inf)

    return replace(scores, rows=rows, magnitude_of=None)


def _fold(scores: Scores, pattern: Pattern) -> Scores:
    if pattern.elementwise:
        return scores
    block = pattern.block(scores.layout)
    folded = [pattern.fold(slab, block) for _, _, slab in scores.slabs(multiple=block[0])]
    return Scores.of(torch.cat(folded))


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
    flat = torch.cat([size.reshape(-1) for size in sizes]) if sizes else None
    if flat is None or flat.numel() == 0 or bool((flat == flat[0]).all()):
        return round(share * total)
    if not comm.alone:
        raise NotImplementedError(
            "blocks that do not divide a sharded tensor evenly cannot share a budget; choose a block that does"
        )
    # Units of different sizes: prune in order of score, as many as bring the number of elements nearest to the budget.
    order = torch.cat([one.rows(0, one.layout.rows).reshape(-1) for one in units]).sort(stable=True).indices.cpu()
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
    for first, last, slab in units.slabs():
        _no_nan(name, slab)
        for begin, end, pool in ((0, whole, size), (whole, cols, cols - whole)):
            if begin < end and last > first:
                groups = slab[:, begin:end].reshape(-1, pool)
                kept[first:last, begin:end] = kernels.keep_rows(groups, max(drop(pool), 0)).view(last - first, end - begin)
    return kept


def _no_nan(name: str, slab: Tensor) -> None:
    if slab.numel() and bool(slab.max().isnan()):
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
    cut = find_cut(pool, drop, comm)
    kept, equal = {}, []
    for name, one in pool.items():
        kept[name] = torch.empty(one.layout.rows, one.layout.cols, dtype=torch.bool, device=one.device)
        equal.append(0)
        for first, last, slab in one.slabs():
            equal[-1] += kernels.keep_above(slab, cut.threshold, kept[name][first:last], count_equal=cut.ties < cut.equal)
    if cut.ties < cut.equal:  # some of those that equal the threshold stay: all but the first `ties` of them
        for (name, one), before, here in zip(pool.items(), comm.before(equal), equal, strict=True):
            goes = min(max(cut.ties - before, 0), here)
            for first, last, slab in one.slabs() if goes < here else ():
                goes = kernels.keep_ties(slab, cut.threshold, kept[name][first:last], goes)
    return kept


def find_cut(pool: Mapping[str, Scores], drop: int, comm: Comm) -> Cut:
    """The exact cut that prunes `drop` of the pool."""
    (total,) = comm.sum(sum(one.numel for one in pool.values()))
    sample = comm.cat(_sample(pool, total)).sort().values
    share, width = drop / max(total, 1), 4.0
    low = high = None
    while True:
        if low is None or high is None:
            spread = width * ((share * (1 - share) / max(sample.numel(), 1)) ** 0.5) + 2 / max(sample.numel(), 1)
            low = _quantile(sample, share - spread) if low is None else low
            high = _quantile(sample, share + spread) if high is None else high
        below, upto, inside = _tally(pool, low, high, comm)
        if drop <= below and drop > 0:
            low, high = None, low
        elif drop <= upto:
            return Cut(low, drop - below, upto - below)
        elif drop <= upto + inside.numel():
            threshold = kernels.kth(inside, drop - upto)
            under, equal = int((inside < threshold).count_nonzero()), int((inside == threshold).count_nonzero())
            return Cut(threshold, drop - upto - under, equal)
        else:
            low, high = high, None
        width *= 8


def _sample(pool: Mapping[str, Scores], total: int) -> Tensor:
    parts = [one.sample(max(_SAMPLE * one.numel // max(total, 1), 1)) for one in pool.values() if one.numel]
    wide = torch.float64 if any(part.dtype == torch.float64 for part in parts) else torch.float32
    device = parts[0].device if parts else torch.device("cpu")
    return torch.cat([part.to(device, wide) for part in parts]) if parts else torch.empty(0)


def _quantile(ordered: Tensor, share: float) -> float:
    at = int(share * ordered.numel())
    if ordered.numel() == 0 or at <= 0:
        return -torch.inf
    return float(ordered[at]) if at < ordered.numel() else torch.inf


def _tally(pool: Mapping[str, Scores], low: float, high: float, comm: Comm) -> tuple[int, int, Tensor]:
    """How many scores are below `low`, how many up to it, and the values strictly between `low` and `high`."""
    below = upto = 0
    inside: list[Tensor] = []
    for name, one in pool.items():
        for _, _, slab in one.slabs():
            under, at_most, above, between = kernels.tally(slab, low, high)
            if at_most + above != slab.numel():
                raise _nan(name)
            below, upto = below + under, upto + at_most
            inside.append(between)
    below, upto = comm.sum(below, upto)
    wide = torch.float64 if any(part.dtype == torch.float64 for part in inside) else torch.float32
    device = inside[0].device if inside else torch.device("cpu")
    return below, upto, comm.cat(torch.cat([part.to(device, wide) for part in inside]) if inside else torch.empty(0))
