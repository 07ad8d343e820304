# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""The masks of a pool of magnitudes on a GPU, in one pass over the weights.

A sample brackets the threshold. The pass keeps the magnitudes above the lower end of the bracket and collects those inside, its
candidates. A radix search among the candidates finds which of them are pruned after all. If many magnitudes equal an end of the
bracket, they are counted instead, and a second pass prunes as many of them as it takes.

Magnitudes are compared by their keys: their bit patterns in float32, which have the same order. Programs handle blocks of
neighbouring elements and never wait for each other; the candidates of a block have a place of their own, in order, so that the
result is the same in every run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arrays import NaNFound, launch_options
from .radix import ranked

TILE = 512  # elements that a program, a single warp, reads at a time
TURNS = 16  # tiles of a block
BLOCK = TILE * TURNS
SLOTS = 256  # candidates of a block for which there is memory; those of blocks with more are read again
_INFINITY = tl.constexpr(0x7F800000)
_NOTHING = tl.constexpr(-2)  # a key that no magnitude has
_FEW = 1 << 20  # number of candidates for which there is always memory
_COMMON = 128  # a value is common if it fills more than such a part of the sample


class Part(NamedTuple):
    """One tensor of a pool."""

    weight: Tensor
    factor: Tensor  # the mask to multiply it with; the weight itself if there is none
    masked: bool
    start: int  # its first block among those of all tensors
    end: int


def parts_of(pairs: Sequence[tuple[Tensor, Tensor | None]], block: int) -> list[Part]:
    """Divides the tensors of a pool into blocks of so many elements. The last block of a tensor may be smaller."""
    parts, start = [], 0
    for weight, mask in pairs:
        end = start + triton.cdiv(weight.numel(), block)
        parts.append(Part(weight, weight if mask is None else mask, mask is not None, start, end))
        start = end
    return parts


@triton.jit
def _key_at(ordered, i):
    return tl.abs(tl.load(ordered + i).to(tl.float32)).to(tl.int32, bitcast=True)


@triton.jit
def _is_common(ordered, i, size, by):
    """Returns True if the i-th of the sorted values is equal to one that is `by` places away."""
    key = _key_at(ordered, i)
    below = (i >= by) & (_key_at(ordered, tl.maximum(i - by, 0)) == key)
    return below | ((i + by < size) & (_key_at(ordered, tl.minimum(i + by, size - 1)) == key))


@triton.jit(do_not_specialize=["size", "first", "middle", "last", "by"])
def _bracket_kernel(ordered, bracket, size, first, middle, last, by):
    """Writes the keys between which the candidates are: those of the first-th and the last-th of the sorted sample.

    They are candidates, too, unless they are common. The third key written is a common one, at which the threshold may be.
    """
    least, most = tl.maximum(first, 0), tl.minimum(last, size - 1)
    low, high, here = _key_at(ordered, least), _key_at(ordered, most), _key_at(ordered, middle)
    low_common, high_common = _is_common(ordered, least, size, by), _is_common(ordered, most, size, by)
    tie = tl.where(high_common, high, _NOTHING)
    if low_common & ((here == low) | (tie != here)):
        tie = low
    tl.store(bracket, tl.where(first < 0, -1, tl.where(low_common, low, low - 1)))
    tl.store(bracket + 1, tl.where(last >= size, _INFINITY + 1, tl.where(high_common, high, high + 1)))
    tl.store(bracket + 2, tie)


@triton.jit
def _load(x, under, place, inside, UNDER: tl.constexpr):
    v = tl.load(x + place, mask=inside, other=0.0)
    if UNDER:
        v = v * tl.load(under + place, mask=inside, other=0.0)
    return v


@triton.jit
def _key(v):
    return v.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _put(to, value, where):
    """Stores elements one by one. With `tl.store`, Triton would rearrange all of them among the threads first."""
    tl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }",
        "=r,l,l,r", [to.to(tl.int64), value, where.to(tl.int32)], tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _row(x, r: tl.constexpr, row):
    return tl.sum(tl.where(row == r, x, 0), 1)


@triton.jit
def _sweep(
    x, under, kept, found, low, high, tie, left,
    UNDER: tl.constexpr, EVEN: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """Does the work of `_sweep_kernel` for one block, whose `left` elements fill it if EVEN.

    A thread reads WIDTH neighbours at a time. How many candidates there are in front of them is found for all ROWS parts of a
    tile at once, in parts of a number.
    """
    ROWS: tl.constexpr = TILE // (32 * WIDTH)
    BITS: tl.constexpr = 32 // ROWS
    MOST: tl.constexpr = (1 << BITS) - 1
    lane, row, i = tl.arange(0, 32)[:, None, None], tl.arange(0, ROWS)[None, :, None], tl.arange(0, WIDTH)[None, None, :]
    place = row * (32 * WIDTH) + lane * WIDTH + i
    above, highest, equal = tl.zeros([32], tl.int32), tl.zeros([32], tl.int32), tl.zeros([32], tl.int32)
    number = 0
    v = _load(x, under, place, place < left, UNDER)
    for turn in range(TURNS if EVEN else tl.cdiv(left, TILE)):
        key = _key(v)
        if EVEN:
            v = _load(x, under, place + TILE, turn + 1 < TURNS, UNDER)
        else:
            key = tl.where(place < left, key, -1)
            v = _load(x, under, place + TILE, place + TILE < left, UNDER)
        # The sign bits of differences, because a thread has few predicates.
        keep = ((low - key) >> 31) & 1
        tl.store(kept + place, keep.to(tl.int8), mask=place < left)
        above += tl.sum(tl.sum(keep, 2), 1)
        highest = tl.maximum(highest, tl.max(tl.max(key, 2), 1))
        candidate = keep & ((key - high) >> 31)
        mine = tl.sum(tl.sum(candidate, 2) << (BITS * tl.arange(0, ROWS))[None, :], 1)
        every = tl.sum(mine)
        if every != 0:
            ahead, rank = tl.cumsum(mine, 0) - mine, tl.cumsum(candidate, 2)
            for r in tl.static_range(ROWS):
                here = (every >> (BITS * r)) & MOST
                if here != 0:
                    both = (_row(key, r, row).to(tl.int64) << 32) | _row(place, r, row)
                    slot = number + ((ahead >> (BITS * r)) & MOST)[:, None] + _row(rank, r, row) - 1
                    _put(found + slot, both, (_row(candidate, r, row) != 0) & (slot < SLOTS))
                    number += here
        if tie >= 0:
            equal += tl.sum(tl.sum((key == tie).to(tl.int32), 2), 1)
        place += TILE
    return tl.sum(above), number, tl.max(highest), tl.sum(equal)


@triton.jit(do_not_specialize=["start", "blocks"])
def _sweep_kernel(
    x, under, kept, bracket, found, counts, bases, start, blocks, n,
    UNDER: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Keeps the magnitudes above the bracket's lower end, and collects the candidates with their places in the block.

    Counts for each block what is kept, the candidates, whether there is NaN, and what equals `tie`.
    """
    SIZE: tl.constexpr = TILE * TURNS
    block, row = tl.program_id(0).to(tl.int64), start + tl.program_id(0)
    low, high, tie = tl.load(bracket), tl.load(bracket + 1), tl.load(bracket + 2)
    first = block * SIZE
    x, under, kept = x + first, under + first, kept.to(tl.pointer_type(tl.int8), bitcast=True) + first
    mine, left = found + row.to(tl.int64) * SLOTS, tl.minimum(n - first, SIZE).to(tl.int32)
    if left == SIZE:
        above, number, highest, equal = _sweep(
            x, under, kept, mine, low, high, tie, left, UNDER, True, SLOTS, WIDTH, TILE, TURNS
        )
    else:
        above, number, highest, equal = _sweep(
            x, under, kept, mine, low, high, tie, left, UNDER, False, SLOTS, WIDTH, TILE, TURNS
        )
    tl.store(counts + row, above)
    tl.store(counts + blocks + row, number)
    tl.store(counts + 2 * blocks + row, (highest > _INFINITY).to(tl.int32))
    tl.store(counts + 3 * blocks + row, equal)
    tl.store(bases + row, kept.to(tl.int64))


@triton.jit(do_not_specialize=["blocks"])
def _collect_kernel(found, counts, ends, values, places, blocks, SLOTS: tl.constexpr, TILE: tl.constexpr):
    """Copies the candidates of each block behind those of the block before, except where they did not fit its memory."""
    row = tl.program_id(0)
    number = tl.load(counts + blocks + row)
    first = tl.load(ends + row) - number
    if number <= SLOTS:
        for begin in range(0, number, TILE):
            slot = begin + tl.arange(0, TILE)
            both = tl.load(found + row.to(tl.int64) * SLOTS + slot, mask=slot < number, other=0)
            value = (both >> 32).to(tl.int32).to(tl.float32, bitcast=True)
            tl.store(values + first + slot, value.to(values.dtype.element_ty), mask=slot < number)
            tl.store(places + first + slot, both.to(tl.int32), mask=slot < number)


@triton.jit(do_not_specialize=["start", "blocks"])
def _again_kernel(
    x, under, bracket, counts, ends, values, places, start, blocks, n,
    UNDER: tl.constexpr, SLOTS: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Does the same for the blocks whose candidates did not fit: it reads the weights again."""
    block, row = tl.program_id(0).to(tl.int64), start + tl.program_id(0)
    number = tl.load(counts + blocks + row)
    if number > SLOTS:
        slot = tl.load(ends + row) - number
        low, high = tl.load(bracket), tl.load(bracket + 1)
        first = block * (TILE * TURNS)
        for turn in range(TURNS):
            place = turn * TILE + tl.arange(0, TILE)
            key = _key(_load(x + first, under + first, place, first + place < n, UNDER))
            candidate = (key > low) & (key < high) & (first + place < n)
            to = slot + tl.cumsum(candidate.to(tl.int32), 0) - 1
            tl.store(values + to, key.to(tl.float32, bitcast=True).to(values.dtype.element_ty), mask=candidate)
            tl.store(places + to, place, mask=candidate)
            slot += tl.sum(candidate.to(tl.int32))


@triton.jit(do_not_specialize=["blocks"])
def _drop_kernel(kept, places, counts, ends, bases, blocks, TILE: tl.constexpr):
    """Clears the masks of the candidates that are pruned. `bases` are the addresses of the masks of the blocks."""
    row = tl.program_id(0)
    number = tl.load(counts + blocks + row)
    first = tl.load(ends + row) - number
    mask = tl.load(bases + row).to(tl.pointer_type(tl.int8))
    for begin in range(0, number, TILE):
        slot = begin + tl.arange(0, TILE)
        keep = tl.load(kept + first + slot, mask=slot < number, other=1)
        tl.store(mask + tl.load(places + first + slot, mask=slot < number, other=0), keep, mask=keep == 0)


class Swept(NamedTuple):
    """What a pass has found. The masks keep everything above the bracket's lower end, and so all candidates."""

    total: int  # magnitudes
    upto: int  # those up to the lower end
    number: int  # candidates
    ties: int  # magnitudes that equal `tie`
    low: int
    high: int
    tie: int  # the end of the bracket that many magnitudes equal, or a key that no magnitude has
    fullest: int  # candidates of the block with the most
    counts: Tensor  # of each block: what is kept, candidates, whether there is NaN, ties
    found: Tensor  # the candidates of each block
    bases: Tensor  # the address of the mask of each block

    def holds(self, drop: int) -> bool:
        """Returns True if the threshold is among the candidates, and they do not need much memory."""
        few = self.number <= max(_FEW, self.total // 16)
        return self.upto == drop or (few and self.upto < drop <= self.upto + self.number)

    def ties_below(self, drop: int) -> int | None:
        """Returns how many of those that equal `tie` are pruned if it is the threshold, else None."""
        if self.tie == self.low and self.upto - self.ties <= drop < self.upto:
            return drop - (self.upto - self.ties)
        if self.tie == self.high > self.low and self.upto + self.number < drop <= self.upto + self.number + self.ties:
            return drop - self.upto - self.number
        return None

    def drop_lowest(self, parts: Sequence[Part], bracket: Tensor, drop: int) -> None:
        """Prunes the lowest candidates, so that `drop` magnitudes are pruned; the lowest index first among equals."""
        if self.upto == drop:
            return
        counts, device, blocks = self.counts, bracket.device, parts[-1].end
        dtypes = {part.weight.dtype for part in parts}
        values = torch.empty(self.number, dtype=dtypes.pop() if len(dtypes) == 1 else torch.float32, device=device)
        places = torch.empty(self.number, dtype=torch.int32, device=device)
        ends = counts[1].cumsum(0)
        _collect_kernel[(blocks,)](self.found, counts, ends, values, places, blocks, SLOTS, 128, **launch_options(1))
        if self.fullest > SLOTS:
            for part in parts:
                if part.start < part.end:
                    arguments = part.weight, part.factor, bracket, counts, ends, values, places, part.start, blocks
                    sizes = part.weight.numel(), part.masked, SLOTS, TILE, TURNS
                    _again_kernel[(part.end - part.start,)](*arguments, *sizes, **launch_options(1))
        kept = ranked(values, None, drop - self.upto)[0].view(torch.int8)
        _drop_kernel[(blocks,)](kept, places, counts, ends, self.bases, blocks, 128, **launch_options(1))


def bracket_of(sample: Tensor, share: float) -> Tensor:
    """Returns the keys that a sample brackets the threshold with: below the lower one is about a fraction `share`."""
    ordered, size = sample.sort().values, sample.numel()
    spread = 3 * (share * (1 - share) / size) ** 0.5 + 1 / size
    first, middle, last = (math.floor((share + by) * size) for by in (-spread, 0, spread))
    bracket = torch.empty(3, dtype=torch.int32, device=sample.device)
    _bracket_kernel[(1,)](
        ordered, bracket, size, first, min(middle, size - 1), last, max(size // _COMMON, 1), **launch_options(1)
    )
    return bracket


def sweep(parts: Sequence[Part], bracket: Tensor, masks: Sequence[Tensor]) -> Swept:
    """Writes the masks of the magnitudes above the bracket's lower end, and collects those inside. Raises NaNFound."""
    blocks, device = parts[-1].end, bracket.device
    counts = torch.empty(4, blocks, dtype=torch.int32, device=device)
    found = torch.empty(blocks * SLOTS, dtype=torch.int64, device=device)
    bases = torch.empty(blocks, dtype=torch.int64, device=device)
    for part, mask in zip(parts, masks, strict=True):
        if part.start < part.end:
            arguments = part.weight, part.factor, mask, bracket, found, counts, bases, part.start, blocks
            sizes = part.weight.numel(), part.masked, SLOTS, 16 // part.weight.element_size(), TILE, TURNS
            _sweep_kernel[(part.end - part.start,)](*arguments, *sizes, **launch_options(1))
    told = torch.cat([counts.sum(1), counts[1].amax().view(1), bracket]).tolist()
    above, number, nan, ties, fullest, low, high, tie = told
    if nan:
        block = int(counts[2].nonzero()[0, 0])
        raise NaNFound(next(i for i, part in enumerate(parts) if part.start <= block < part.end))
    total = sum(part.weight.numel() for part in parts)
    return Swept(total, total - above, number, ties, low, high, tie, fullest, counts, found, bases)
