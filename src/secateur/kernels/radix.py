# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels for the mask of one tensor on a GPU: the threshold digit by digit, without ever waiting for the host.

Magnitudes compare as the integers that their bits are. Each pass counts the next digit of those that share the digits found so
far; every program works these out for itself from the counts of the passes before. The last counts are kept block by block, so
that ties go in order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .arrays import NaNFound, infinity_bits

_BINS = tl.constexpr(256)
_LAST = tl.constexpr(128)  # the last digit has seven bits, all others eight
_TILE = 2048


@triton.jit
def _key(x, under, at, inside, UNDER: tl.constexpr):
    """The bits of |x|, or of |x * under| in x's own precision."""
    v = tl.load(x + at, mask=inside, other=0.0)
    if UNDER:
        v = v * tl.load(under + at, mask=inside, other=0.0)
    if v.dtype == tl.float32:
        key = v.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    else:
        key = v.to(tl.int16, bitcast=True).to(tl.int32) & 0x7FFF
    return key


@triton.jit
def _walk(counts, rank, LEVELS: tl.constexpr):
    """The leading digits of the key with this rank, and its rank among the keys that share them."""
    prefix = 0
    bins = tl.arange(0, _BINS)
    for level in tl.static_range(LEVELS):
        here = tl.load(counts + level * _BINS + bins)
        below = tl.cumsum(here, 0) < rank
        prefix = prefix * _BINS + tl.sum(below.to(tl.int32))
        rank -= tl.sum(tl.where(below, here, 0))
    return prefix, rank


@triton.jit
def _count_kernel(
    x, under, counts, blocks, drop, n,
    UNDER: tl.constexpr, LEVEL: tl.constexpr, LEVELS: tl.constexpr, INFINITY: tl.constexpr, TILE: tl.constexpr,
    TURNS: tl.constexpr,
):  # fmt: skip
    """How many keys have each next digit, of those that share the digits found so far."""
    block = tl.program_id(0).to(tl.int64)
    bins = tl.arange(0, _BINS)
    SHIFT: tl.constexpr = 0 if LEVEL == LEVELS - 1 else 7 + 8 * (LEVELS - 2 - LEVEL)
    ABOVE: tl.constexpr = 7 + 8 * (LEVELS - 1 - LEVEL)
    DIGIT: tl.constexpr = 127 if LEVEL == LEVELS - 1 else 255
    prefix, _ = _walk(counts, drop, LEVEL)
    found = tl.zeros([_BINS], tl.int32)
    highest = 0
    for turn in range(TURNS):
        at = (block * TURNS + turn) * TILE + tl.arange(0, TILE)
        inside = at < n
        key = _key(x, under, at, inside, UNDER)
        if LEVEL == 0:
            highest = tl.maximum(highest, tl.max(key, 0))
        else:
            inside = inside & ((key >> ABOVE) == prefix)
        found += tl.histogram((key >> SHIFT) & DIGIT, _BINS, mask=inside)
    tl.atomic_add(counts + LEVEL * _BINS + bins, found, mask=found > 0, sem="relaxed")
    if LEVEL == 0 and highest > INFINITY:
        tl.atomic_max(counts + LEVELS * _BINS, 1)
    if LEVEL == LEVELS - 1:
        tl.store(blocks + bins * tl.num_programs(0) + block, found, mask=bins < _LAST)


@triton.jit
def _mask_kernel(
    x, under, kept, counts, blocks, drop, n,
    UNDER: tl.constexpr, LEVELS: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr,
):  # fmt: skip
    """What is above the threshold is kept, and of what equals it all but the first."""
    kept = kept.to(tl.pointer_type(tl.int8), bitcast=True)
    block = tl.program_id(0).to(tl.int64)
    digits, _ = _walk(counts, drop, LEVELS - 1)
    whole, goes = _walk(counts, drop, LEVELS)
    digit = whole - digits * _BINS
    threshold = digits * _LAST + digit
    number = tl.num_programs(0)
    every = tl.arange(0, BLOCKS)
    left = goes - tl.sum(tl.load(blocks + digit * number + every, mask=every < block, other=0))
    for turn in range(TURNS):
        at = (block * TURNS + turn) * TILE + tl.arange(0, TILE)
        inside = at < n
        key = _key(x, under, at, inside, UNDER)
        equal = (key == threshold) & inside
        if left <= 0:
            keep = key >= threshold
        elif left >= TILE:
            keep = key > threshold
            left -= tl.sum(equal.to(tl.int32))
        else:
            order = tl.cumsum(equal.to(tl.int32), 0)
            keep = (key > threshold) | (equal & (order > left))
            left -= tl.sum(equal.to(tl.int32))
        tl.store(kept + at, keep.to(tl.int8), mask=inside)


def keep_largest(weight: Tensor, under: Tensor | None, drop: int) -> Tensor:
    """The mask of a contiguous tensor without its `drop` lowest magnitudes, the lowest index first among equals.

    `drop` is at least 1 and less than all.
    """
    n, half = weight.numel(), weight.element_size() == 2
    turns = 8 if n >= 1 << 22 else 2 if n >= 1 << 19 else 1
    programs = triton.cdiv(n, _TILE * turns)
    levels, infinity = (2, infinity_bits(weight.dtype)) if half else (4, 0x7F800000)
    counts = torch.zeros(levels * 256 + 1, dtype=torch.int32, device=weight.device)
    blocks = torch.empty(128 * programs, dtype=torch.int32, device=weight.device)
    kept = torch.empty(weight.shape, dtype=torch.bool, device=weight.device)
    factor, has = (weight, False) if under is None else (under, True)
    for level in range(levels):
        _count_kernel[(programs,)](
            weight, factor, counts, blocks, drop, n, has, level, levels, infinity, _TILE, turns, num_warps=4
        )
    wide = triton.next_power_of_2(programs)
    _mask_kernel[(programs,)](weight, factor, kept, counts, blocks, drop, n, has, levels, wide, _TILE, turns, num_warps=4)
    if counts[-1].item():
        raise NaNFound(0)
    return kept
