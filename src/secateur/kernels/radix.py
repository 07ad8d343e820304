# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels for the mask of one tensor on a GPU: a radix search for the threshold that never waits for the host.

Magnitudes compare like the integers of their bit patterns, called keys. Each pass counts the next digit of the keys that share
the digits found so far. The counts of the last pass are kept for each block, so that ties are pruned in order. Kernels
communicate through int32 arrays:

- `job`, initially zero: the number of zero keys, in SLOTS parts; at DIFFERS, whether the mask of nonzero keys differs from the
  current mask; at _STATES, the digits found and the remaining rank for each level; at _COUNTS, the counts of each level.
- `drop`: the number of elements to prune.
- `status`: 1 + the index of the first tensor with NaN, counted from the last tensor; and whether a threshold is still unknown.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arrays import NaNFound, infinity_bits, launch_options

_BITS = tl.constexpr(8)  # of a digit; the first digit has seven
_BINS = tl.constexpr(256)
SLOTS = tl.constexpr(32)
DIFFERS = tl.constexpr(32)
_STATES = tl.constexpr(34)
_COUNTS = tl.constexpr(64)
_TILE = 2048


@triton.jit
def bits_of(v):
    return v.to(tl.int32, bitcast=True) if v.dtype == tl.float32 else v.to(tl.int16, bitcast=True)


@triton.jit
def key_of(v):
    """Returns the bit pattern of |v|."""
    return bits_of(v).to(tl.int32) & (0x7FFFFFFF if v.dtype == tl.float32 else 0x7FFF)


@triton.jit
def read(x, under, at, inside, UNDER: tl.constexpr):
    """Returns the key of x (or of x * under in x's precision), and under."""
    v = tl.load(x + at, mask=inside, other=0.0)
    u = v
    if UNDER:
        u = tl.load(under + at, mask=inside, other=0.0)
        v = v * u
    return key_of(v), u


@triton.jit
def place(block, turn, n, TILE: tl.constexpr, TURNS: tl.constexpr, EVEN: tl.constexpr):
    """Returns the indices of a turn, and which of them are inside the tensor (all, if EVEN)."""
    at = (block * TURNS + turn) * TILE + tl.arange(0, TILE)
    inside = at < n
    if EVEN:
        inside = tl.full([TILE], True, tl.int1)
    return at, inside


@triton.jit
def solved(job, drop):
    """Returns True if exactly the zero keys are to be pruned, as when a mask stays unchanged."""
    return tl.sum(tl.load(job + tl.arange(0, SLOTS))) == tl.load(drop)


@triton.jit
def _walk(job, drop, LEVEL: tl.constexpr):
    """Returns the first LEVEL digits of the threshold, and its rank among the keys that share them."""
    prefix = 0
    rank = tl.load(drop)
    if LEVEL > 1:
        prefix = tl.load(job + _STATES + 2 * LEVEL - 2)
        rank = tl.load(job + _STATES + 2 * LEVEL - 1)
    if LEVEL > 0:
        here = tl.load(job + _COUNTS + (LEVEL - 1) * _BINS + tl.arange(0, _BINS))
        below = tl.cumsum(here, 0) < rank
        prefix = prefix * _BINS + tl.sum(below.to(tl.int32))
        rank -= tl.sum(tl.where(below, here, 0))
    return prefix, rank


@triton.jit
def _level_kernel(
    x, under, job, drop, blocks, status, code, n,
    UNDER: tl.constexpr, INFINITY: tl.constexpr, LEVEL: tl.constexpr, LEVELS: tl.constexpr, EVEN: tl.constexpr,
    TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Counts the values of the next digit among the keys that share the digits found so far."""
    if not solved(job, drop):
        block, bins = tl.program_id(0), tl.arange(0, _BINS)
        SHIFT: tl.constexpr = _BITS * (LEVELS - 1 - LEVEL)
        prefix, rank = _walk(job, drop, LEVEL)
        if LEVEL > 0 and block == 0:
            tl.store(job + _STATES + 2 * LEVEL, prefix)
            tl.store(job + _STATES + 2 * LEVEL + 1, rank)
        found = tl.zeros([_BINS], tl.int32)
        highest = 0
        for turn in range(TURNS):
            at, inside = place(block, turn, n, TILE, TURNS, EVEN)
            key = read(x, under, at, inside, UNDER)[0]
            if LEVEL == 0:
                highest = tl.maximum(highest, tl.max(key, 0))
            else:
                inside = inside & ((key >> (SHIFT + _BITS)) == prefix)
            if LEVEL < 2:  # noqa: SIM114 - with `or`, Triton would always compute the maximum
                found += tl.histogram((key >> SHIFT) & (_BINS - 1), _BINS, mask=inside)
            elif tl.max(inside.to(tl.int32)) > 0:  # few keys share that many digits
                found += tl.histogram((key >> SHIFT) & (_BINS - 1), _BINS, mask=inside)
        tl.atomic_add(job + _COUNTS + LEVEL * _BINS + bins, found, mask=found > 0, sem="relaxed")
        if LEVEL == 0 and highest > INFINITY:
            tl.atomic_max(status, code)
        if LEVEL == LEVELS - 1:
            tl.store(blocks + bins * tl.num_programs(0) + block, found)


@triton.jit
def _choose_kernel(
    x, under, out, job, drop, blocks, status, code, n,
    UNDER: tl.constexpr, IN_PLACE: tl.constexpr, ONE: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr,
    EVEN: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """Keeps the keys above the threshold and all but the first of those that equal it.

    With IN_PLACE, the result is written to the mask `under` as ONE and zero bits; tiles that do not change are not written.
    """
    if (not solved(job, drop)) & (tl.load(status) < code):
        block, programs, every = tl.program_id(0), tl.num_programs(0), tl.arange(0, BLOCKS)
        threshold, left = _walk(job, drop, LEVELS)
        left -= tl.sum(tl.load(blocks + (threshold & (_BINS - 1)) * programs + every, mask=every < block, other=0))
        for turn in range(TURNS):
            at, inside = place(block, turn, n, TILE, TURNS, EVEN)
            key, u = read(x, under, at, inside, UNDER)
            equal = ((key == threshold) & inside).to(tl.int32)
            if left <= 0:
                keep = key >= threshold
            elif left >= TILE:
                keep = key > threshold
                left -= tl.sum(equal)
            else:
                keep = (key > threshold) | ((equal > 0) & (tl.cumsum(equal, 0) > left))
                left -= tl.sum(equal)
            if IN_PLACE:
                new, old = tl.where(keep, ONE, 0).to(out.dtype.element_ty), bits_of(u)
                if tl.max(((new != old) & inside).to(tl.int32)) > 0:
                    tl.store(out + at, new, mask=inside)
            else:
                tl.store(out + at, keep.to(tl.int8), mask=inside)


class Ranking(NamedTuple):
    """How `n` keys are distributed over the programs of the kernels."""

    n: int
    turns: int
    programs: int
    levels: int
    infinity: int

    @staticmethod
    def of(n: int, dtype: torch.dtype) -> Ranking:
        turns = 1
        while turns < 128 and n > _TILE * turns * 1024:
            turns *= 2
        half = dtype != torch.float32
        return Ranking(n, turns, triton.cdiv(n, _TILE * turns), 2 if half else 4, infinity_bits(dtype) if half else 0x7F800000)

    @property
    def job(self) -> int:
        """The length of the array `job`."""
        return 64 + self.levels * 256

    @property
    def blocks(self) -> int:
        return 256 * self.programs

    @property
    def even(self) -> bool:
        return self.n % (_TILE * self.turns) == 0

    def digits(self, x: Tensor, under: Tensor | None, *told: Any) -> None:
        """Finds the digits of the threshold. `told` is job, drop, blocks, status, and the tensor's number for status."""
        for level in range(self.levels):
            sizes = (under is not None, self.infinity, level, self.levels, self.even, _TILE, self.turns)
            _level_kernel[(self.programs,)](x, x if under is None else under, *told, self.n, *sizes, **launch_options(4))

    def choose(self, x: Tensor, under: Tensor | None, out: Tensor, *told: Any, one: int = 0) -> None:
        """Writes the mask to `out` as int8 or, if `one` is given, to the mask `under` as the bits `one` and zero."""
        there = (under is not None, one != 0, one, self.levels, triton.next_power_of_2(self.programs))
        sizes = (self.even, _TILE, self.turns)
        _choose_kernel[(self.programs,)](
            x, x if under is None else under, out, *told, self.n, *there, *sizes, **launch_options(4)
        )


def keep_largest(weight: Tensor, under: Tensor | None, drop: int) -> Tensor:
    """Returns the mask of a contiguous tensor that prunes its `drop` lowest magnitudes, the lowest index first among equals.

    `drop` must be at least 1 and at most the number of elements.
    """
    kept, status = ranked(weight, under, drop)
    if status[0].item():
        raise NaNFound(0)
    return kept


def ranked(weight: Tensor, under: Tensor | None, drop: int) -> tuple[Tensor, Tensor]:
    """Returns the same mask and `status`, which tells on the device whether there is NaN."""
    ranking, device = Ranking.of(weight.numel(), weight.dtype), weight.device
    job = torch.zeros(ranking.job + 2, dtype=torch.int32, device=device)
    goes, status = torch.full((1,), drop, dtype=torch.int32, device=device), job[ranking.job :]
    blocks = torch.empty(ranking.blocks, dtype=torch.int32, device=device)
    kept = torch.empty(weight.shape, dtype=torch.bool, device=device)
    ranking.digits(weight, under, job, goes, blocks, status, 1)
    ranking.choose(weight, under, kept.view(torch.int8), job, goes, blocks, status, 1)
    return kept, status
