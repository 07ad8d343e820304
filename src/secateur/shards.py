"""`select` for sharded tensors: makes the same masks as one process would, bit for bit.

Large pools are cut by `digits`. A small pool (a row, n:m, a block) is ranked on the process that holds it. If the sharding
divides it, the scores of that tensor are moved so that every pool is whole on one process, and the mask is moved back.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ._dist import Box, Comm, Share, exchange, stripes
from ._layers import Layout
from .brackets import find_cut
from .digits import Part, Pool, bits_for, find_cuts, keep, kind_of, plain_magnitudes
from .masks import pack_bits, unpack_bits
from .patterns import Pattern
from .scores import Scores, nan_in
from .select import elements, fold, held, keep_each, least_kept, row_budget, select

Number = float | Mapping[str, float]
_KINDS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def select_shared(
    scores: Mapping[str, Scores],
    pattern: Pattern,
    *,
    comm: Comm,
    scope: str = "tensor",
    sparsity: Number | None = None,
    count: int | Mapping[str, int] | None = None,
    previous: Mapping[str, Tensor] | None = None,
    floor: float = 0.0,
) -> dict[str, Tensor]:
    """The masks that `select` would make of the whole tensors, of which this process gets its parts.

    `comm` is that of the processes that hold parts of these tensors, and all of them have to call.
    """
    if scope != "global":
        comm = comm.within
    if comm.alone:
        return select(scores, pattern, scope=scope, sparsity=sparsity, count=count, previous=previous, floor=floor)
    if pattern.keep or scope == "row":
        masks = _small_pools(scores, pattern, scope, sparsity, count, previous, comm, floor)
    else:
        masks = _large_pools(scores, pattern, scope, sparsity, count, previous, comm, floor)
    return masks if previous is None else {name: mask & previous[name] for name, mask in masks.items()}


def units_of(scores: Scores, pattern: Pattern, mask: Tensor, comm: Comm) -> tuple[int, int]:
    """How many units a tensor has, and how many of them are kept, for a mask of whole units."""
    share = _share(scores)
    (down, *heights), (across, *widths) = pattern.runs(share.layout)
    bottom, right = max(down - share.box.rows[0], 0), max(across - share.box.cols[0], 0)
    parts = [part for row in (mask[:bottom], mask[bottom:]) for part in (row[:, :right], row[:, right:])]
    sizes = [height * width for height in heights for width in widths]
    alive = comm.within.sum(*(int(part.sum()) * comm.counted(share) for part in parts))
    return math.prod(pattern.grid(share.layout)), sum(n // size for n, size in zip(alive, sizes, strict=True) if n)


def whole_sizes(scores: Mapping[str, Scores]) -> dict[str, Scores]:
    """The scores with the layouts of the whole tensors, for spreads that look at sizes alone."""
    return {name: replace(one, layout=one.share.layout) if one.share else one for name, one in scores.items()}


def pruned_shares(scores: Mapping[str, Scores], masks: Mapping[str, Tensor], comm: Comm) -> dict[str, float]:
    """The fraction of each whole tensor that is pruned."""
    if comm.within.alone:
        return {name: 1 - float(mask.float().mean()) for name, mask in masks.items()}
    kept = comm.within.sum(*(int(masks[name].sum()) * comm.counted(one.share) for name, one in scores.items()))
    sizes = (_share(one).layout for one in scores.values())
    return {name: 1 - n / max(size.rows * size.cols, 1) for name, n, size in zip(scores, kept, sizes, strict=True)}


# --- where scores lie -----------------------------------------------------------------------------------------------


def _share(scores: Scores) -> Share:
    return scores.share or Share(scores.layout, Box((0, scores.layout.rows), (0, scores.layout.cols)))


@dataclass(frozen=True)
class _Placed:
    """The scores of a tensor where every pool is whole: the part that this process holds, or one that was moved to it."""

    scores: Scores
    share: Share
    boxes: Sequence[Box] | None = None  # the parts of all processes, if they were moved

    @property
    def box(self) -> Box:
        return self.share.box if self.boxes is None else self.boxes[self.share.me]

    def back(self, mask: Tensor) -> Tensor:
        """A mask of the part as one of the part that this process held before."""
        return mask if self.boxes is None else move(self.share, mask, self.boxes, self.share.boxes)


def _placed(scores: Scores, pattern: Pattern, scope: str, previous: Tensor | None) -> _Placed:
    share = _share(scores)
    layout = share.layout
    height, width = pattern.block(layout)
    if pattern.keep:
        width *= pattern.keep[1]
    elif scope == "row":
        width = layout.cols
    boxes = None
    if share.ranks and not share.holds(height, width):
        boxes = stripes(layout, len(share.ranks), height, width)
        matrix = scores.magnitude_of if scores.under is None else None
        moved = move(share, scores.rows(0, scores.layout.rows) if matrix is None else matrix, share.boxes, boxes)
        scores = Scores.of(moved) if matrix is None else Scores.magnitude(moved, power=scores.power)
        previous = None if previous is None else move(share, previous, share.boxes, boxes)
    box = share.box if boxes is None else boxes[share.me]
    scores = replace(scores, layout=_layout_of_part(pattern, layout, box), share=None)
    return _Placed(scores if previous is None else held(scores, previous), share, boxes)


def _layout_of_part(pattern: Pattern, layout: Layout, box: Box) -> Layout:
    """The layout of a part as a matrix; for whole inputs, with as many columns for an input as in the whole tensor."""
    rows, cols = box.shape
    if pattern.unit != "in":
        return Layout((rows, cols))
    groups = max(rows * layout.groups // max(layout.rows, 1), 1)
    return Layout((rows, cols // layout.span, layout.span), groups=groups)


def move(share: Share, part: Tensor, source: Sequence[Box], target: Sequence[Box]) -> Tensor:
    """Moves a sharded matrix from layout `source` to `target`, and returns the new part. Masks are sent as bits."""
    mine, wanted = source[share.me], target[share.me]
    pieces = [_as_bytes(part[mine.meet(box).within(mine)]) for box in target]
    places = [wanted.meet(box) for box in source]
    sizes = [math.prod(place.shape) for place in places]
    bits = part.dtype == torch.bool
    found = exchange(share, pieces, [-(-size // 8) if bits else size * part.element_size() for size in sizes])
    out = torch.empty(wanted.shape, dtype=part.dtype, device=part.device)
    for place, size, piece in zip(places, sizes, found, strict=True):
        if size:
            values = unpack_bits(piece, size) if bits else piece.view(part.dtype)
            out[place.within(wanted)] = values.view(place.shape)
    return out


def _as_bytes(piece: Tensor) -> Tensor:
    flat = piece.contiguous().view(-1)
    return pack_bits(flat) if piece.dtype == torch.bool else flat.view(torch.uint8)


# --- NaN ------------------------------------------------------------------------------------------------------------


def _check_nan(scores: Mapping[str, Scores], previous: Mapping[str, Tensor] | None, comm: Comm) -> None:
    """Raises on every process if any of them has NaN, because the others would wait for it."""

    def found(name: str, one: Scores) -> bool:
        allowed = None if previous is None else previous[name]
        slabs = ((one.rows(a, b), a, b) for a, b in one.slabs())
        return any(bool((slab.isnan() if allowed is None else slab.isnan() & allowed[a:b]).any()) for slab, a, b in slabs)

    each = comm.within.sum(*(found(name, one) for name, one in scores.items()))
    bad = [name for name, number in zip(scores, each, strict=True) if number]
    if comm.sum(bool(bad))[0]:
        raise nan_in(bad[0] if bad else "a tensor on another process")


# --- small pools ----------------------------------------------------------------------------------------------------


def _small_pools(
    scores: Mapping[str, Scores],
    pattern: Pattern,
    scope: str,
    sparsity: Number | None,
    count: int | Mapping[str, int] | None,
    previous: Mapping[str, Tensor] | None,
    comm: Comm,
    floor: float,
) -> dict[str, Tensor]:
    _check_nan(scores, previous, comm)
    masks = {}
    for name, one in scores.items():
        layout = _share(one).layout
        if pattern.keep:
            n, size = pattern.keep
            budget = lambda size, n=n: size - n  # noqa: E731
        else:
            size, budget = pattern.grid(layout)[1], row_budget(name, layout, pattern, sparsity, count, floor)
        budget(size)  # raises on all processes, also on those without rows
        placed = _placed(one, pattern, scope, None if previous is None else previous[name])
        kept = keep_each(name, fold(placed.scores, pattern), size, budget)
        masks[name] = placed.back(elements(name, placed.scores, pattern, kept))
    return masks


# --- large pools ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Facts:
    """Facts about the pools of a call that all processes share: sizes over all tensors, and how keys are made."""

    tensors: int
    units: int
    elements: int
    most: int  # elements that the pattern can prune
    alike: bool  # whether all units have the same size
    bits: int
    longest: int
    earlier: int  # tensors of the processes of `group=` before this one


def facts_of(scores: Mapping[str, Scores], pattern: Pattern, comm: Comm) -> Facts:
    sizes: Counter[int] = Counter()
    for one in scores.values():
        sizes += pattern.size_counts(_share(one).layout)
    n, weight, squares = (sum(number * size**power for size, number in sizes.items()) for power in (0, 1, 2))
    every = [_share(one).layout for one in scores.values()]
    kinds = {_grid_kind(one, pattern) for one in scores.values()}
    longest = max((math.prod(pattern.grid(layout)) for layout in every), default=1)
    row = [n, sum(a.rows * a.cols for a in every), weight, squares, len(scores), longest, *(kind in kinds for kind in _KINDS)]
    table = comm.over_stages(row)
    n, total, weight, squares, tensors, _, *flags = (sum(column) for column in zip(*table, strict=True))
    kinds = {kind for kind, there in zip(_KINDS, flags, strict=True) if there}
    return Facts(
        tensors, n, total, weight, squares * n == weight * weight, bits_for(kinds),
        max(r[5] for r in table), sum(r[4] for r in table[: comm.stage]),
    )  # fmt: skip


def _grid_kind(scores: Scores, pattern: Pattern) -> torch.dtype:
    """The dtype in which units are compared."""
    if pattern.elementwise:
        return kind_of(scores)
    return torch.float64 if scores.rows(0, 0).dtype == torch.float64 else torch.float32


def _large_pools(
    scores: Mapping[str, Scores],
    pattern: Pattern,
    scope: str,
    sparsity: Number | None,
    count: int | Mapping[str, int] | None,
    previous: Mapping[str, Tensor] | None,
    comm: Comm,
    floor: float,
) -> dict[str, Tensor]:
    if pattern.lose is not None:  # elements of blocks are ranked on their process
        _check_nan(scores, previous, comm)
    ranked = {name: one.without_power() for name, one in scores.items()} if pattern.elementwise and previous is None else scores
    facts = facts_of(scores if floor else ranked, pattern, comm)

    def parts_of(scores: Mapping[str, Scores]) -> dict[str, Part]:
        allowed = dict.fromkeys(scores) if previous is None else previous
        numbered = enumerate(scores.items(), facts.earlier)
        return {name: _part(one, pattern, number, allowed[name], comm) for number, (name, one) in numbered}

    parts = parts_of(ranked)
    groups = [list(scores)] if scope == "global" else [[name] for name in scores]
    pools = []
    for names in groups:
        own = facts if scope == "global" else facts_of({name: scores[name] for name in names}, pattern, Comm())
        drop, weighted = budget_of(names, own, pattern, sparsity, count)
        pools.append(Pool([parts[name] for name in names], drop, own.units, weighted))
    limits = []
    if floor:
        several = scope == "global" and facts.tensors > 1
        every = parts_of(scores) if several else parts  # one process ranks protected elements by the scores themselves
        for names, pool in zip(groups, pools, strict=True):
            own = {name: (scores[name], every[name]) for name in names}
            limits.append(_limit(pool, own, pattern, floor, facts, comm, several, several or count is not None))
    # The criterion is the same on all processes, so they all sample or none does.
    plain = len(pools) == 1 and pattern.elementwise and previous is None and not floor and facts.bits < 64
    plain = plain and all(plain_magnitudes(one) is not None for one in ranked.values())
    sizes = {"longest": facts.longest, "tensors": facts.tensors}
    if (plain and find_cut(pools[0], facts.bits, comm, **sizes)) or find_cuts(pools, facts.bits, comm, **sizes):
        _check_nan(scores, previous, comm)
        raise nan_in("a unit")
    for names, pool, (most, most_elements) in zip(groups, pools, limits, strict=False):
        if pool.weighted and pool.before + pool.equal * (not pool.last_stays) > most_elements:
            gone = sum(int((~keep(pool, part, facts.bits)).sum()) for part in pool.parts if part.counted)
            raise _too_many(names, floor, most, pool.total, comm.sum(gone)[0])
    masks = {}
    for names, pool in zip(groups, pools, strict=True):
        for name, part in zip(names, pool.parts, strict=True):
            masks[name] = _mask(name, scores[name], pattern, pool, part, facts.bits, previous)
    return masks


def _limit(
    pool: Pool,
    tensors: Mapping[str, tuple[Scores, Part]],
    pattern: Pattern,
    floor: float,
    facts: Facts,
    comm: Comm,
    several: bool,
    strict: bool,
) -> tuple[int, int]:
    """Protects the units that `floor` keeps. Returns how many units of the pool may be pruned, and their elements.

    `several`: whether other tensors can lose more instead. Where units differ in size, only the cut tells how many go.
    """
    layouts = {name: _share(scores).layout for name, (scores, _) in tensors.items()}
    caps = [_most_units(name, layout, pattern, floor) for name, layout in layouts.items()]
    sizes = [max(pattern.size_counts(layout), default=1) for layout in layouts.values()]
    row = [sum(caps), sum(cap * size for cap, size in zip(caps, sizes, strict=True))]
    most, elements = (sum(column) for column in zip(*(comm if several else Comm()).over_stages(row), strict=True))
    if not pool.weighted:
        if pool.drop > most and strict:
            raise _too_many(tensors, floor, most, pool.total, int(pool.drop))
        pool.drop = min(pool.drop, most)
    if several:
        safe = _safe(pool.parts, caps, facts, comm.within)
        parts = zip(tensors.values(), safe, strict=True)
        pool.parts = [replace(part, safe=kept) for (_, part), kept in parts]
    return most, elements


def _too_many(names: Iterable[str], floor: float, most: int, total: int, asked: int) -> ValueError:
    return ValueError(
        f"floor={floor:g} allows {most} of the {total} units in {', '.join(map(repr, list(names)[:3]))} to be pruned, "
        f"but {asked} were requested; lower floor=, or prune less"
    )


def _most_units(name: str, layout: Layout, pattern: Pattern, floor: float) -> int:
    """How many units of a tensor can be pruned if a fraction `floor` of its elements is kept."""
    sizes = pattern.size_counts(layout)
    if len(sizes) > 1:
        raise NotImplementedError(
            f"floor= needs blocks that divide {name!r} evenly, because several processes hold parts of it; choose another "
            "block size, or prune before sharding"
        )
    elements = layout.rows * layout.cols
    return min((elements - least_kept(elements, floor)) // min(sizes, default=1), sizes.total())


def _safe(parts: Sequence[Part], caps: Sequence[int], facts: Facts, comm: Comm) -> list[Tensor]:
    """All units but the lowest `caps` of each tensor."""
    pools = [Pool([part], cap, part.size) for part, cap in zip(parts, caps, strict=True)]
    find_cuts(pools, facts.bits, comm, longest=facts.longest, tensors=facts.tensors)  # NaN is found by the cut itself
    return [keep(pool, part, facts.bits) for pool, part in zip(pools, parts, strict=True)]


def _part(scores: Scores, pattern: Pattern, number: int, previous: Tensor | None, comm: Comm) -> Part:
    """The units of this process's part of a tensor, ready to be counted."""
    share = _share(scores)
    down, across = pattern.grid(share.layout)
    if pattern.elementwise:
        where = share.box.rows[0], share.box.cols[0]
        return Part(scores, number, down * across, across, where, comm.counted(share), allowed=previous)
    placed = _placed(scores, pattern, "tensor", previous)
    height, width = pattern.block(share.layout)
    units = fold(placed.scores, pattern)
    where = placed.box.rows[0] // height, placed.box.cols[0] // width
    return Part(units, number, down * across, across, where, comm.counted(share), sizes=pattern.sizes(placed.scores.layout))


def budget_of(
    names: Sequence[str], facts: Facts, pattern: Pattern, sparsity: Number | None, count: int | Mapping[str, int] | None
) -> tuple[float, bool]:
    """How many units to prune from a pool, or, if they differ in size, the number of elements to prune (and True)."""
    shown = ", ".join(map(repr, names[:3]))
    if count is not None:
        drop = count[names[0]] if isinstance(count, Mapping) else count
        if not 0 <= drop <= facts.units:
            raise ValueError(f"count={drop} units cannot be pruned from {shown}, which has {facts.units} units")
        return drop, False
    assert sparsity is not None
    share = sparsity[names[0]] if isinstance(sparsity, Mapping) else sparsity
    if pattern.elementwise:
        return round(share * facts.units), False
    if share * facts.elements > facts.most + 0.5:
        raise ValueError(
            f"sparsity={share:g} is out of reach: pattern {str(pattern)!r} prunes at most {facts.most / facts.elements:.4g} of "
            f"{shown}"
        )
    if facts.alike:
        return min(round(share * facts.units * (facts.elements / max(facts.most, 1))), facts.units), False
    return share * facts.elements, True


def _mask(
    name: str,
    scores: Scores,
    pattern: Pattern,
    pool: Pool,
    part: Part,
    bits: int,
    previous: Mapping[str, Tensor] | None,
) -> Tensor:
    kept = keep(pool, part, bits)
    if pattern.elementwise:
        return kept
    share = _share(scores)
    if pattern.lose is not None:
        placed = _placed(scores, pattern, "tensor", None if previous is None else previous[name])
        return placed.back(elements(name, placed.scores, pattern, kept))
    height, width = pattern.block(share.layout)
    boxes = None if not share.ranks or share.holds(height, width) else stripes(share.layout, len(share.ranks), height, width)
    placed = _Placed(scores, share, boxes)
    return placed.back(pattern.unfold(kept, _layout_of_part(pattern, share.layout, placed.box)))
