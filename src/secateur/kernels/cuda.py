# pyright: reportMissingImports=false, reportIndexIssue=false, reportPossiblyUnboundVariable=false
"""Triton kernels for magnitudes on a GPU: masks of pools by an exact threshold, n:m masks, and means over blocks.

The mask of a pool takes one pass over the weights (`one_pass`) if a sample has bracketed its threshold. Otherwise the threshold
is found by counting, in each block, the magnitudes below a ladder of values, its rungs. The counts also tell how many ties
precede each block, so the mask needs one more pass and no sort.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from . import one_pass, radix
from .arrays import NaNFound, infinity_bits, launch_options
from .one_pass import Part

_TILE = 1024  # elements that a program of the counting kernel reads at a time
_TURNS = 32  # tiles per program; at most 255, because a counter has one byte per rung
_BLOCK = _TILE * _TURNS
_MASK_TILE = 2048
_FEW = 1 << 18  # number of candidates that are collected and sorted instead of counted again
_ONE = 1 << 24  # elements up to which waiting for the host would take longer than counting


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Makes the device of the first tensor the current one during a call, because Triton launches on the current device."""

    @functools.wraps(function)
    def run(first: Any, *rest: Any, **named: Any) -> Any:
        with torch.cuda.device((first if isinstance(first, Tensor) else first[0][0]).device):
            return function(first, *rest, **named)

    return run


@triton.jit
def _magnitude(x, under, at, inside, other, UNDER: tl.constexpr):
    """Returns |x| (or |x * under| in x's precision) as float32, and `other` outside of the tensor."""
    v = tl.load(x + at, mask=inside, other=other)
    if UNDER:
        v = v * tl.load(under + at, mask=inside, other=1.0)
    return tl.abs(v.to(tl.float32))


@triton.jit(do_not_specialize=["start"])
def _count_kernel(
    x, under, ladder, counts, start, n, UNDER: tl.constexpr, RUNGS: tl.constexpr, TILE: tl.constexpr, TURNS: tl.constexpr
):
    """Counts the magnitudes of each block below each rung, and the NaN. RUNGS is 4 or 8."""
    block = tl.program_id(0).to(tl.int64)
    t0, t1, t2, t3 = tl.load(ladder), tl.load(ladder + 1), tl.load(ladder + 2), tl.load(ladder + 3)
    lower = tl.zeros([TILE], tl.int32)  # four one-byte counters, for the first four rungs
    if RUNGS == 8:
        t4, t5, t6, t7 = tl.load(ladder + 4), tl.load(ladder + 5), tl.load(ladder + 6), tl.load(ladder + 7)
        upper = tl.zeros([TILE], tl.int32)
    nan = tl.zeros([TILE], tl.int32)
    first = block * (TILE * TURNS)
    for turn in range(TURNS):
        at = first + turn * TILE + tl.arange(0, TILE)
        s = _magnitude(x, under, at, at < n, float("inf"), UNDER)
        lower += (
            tl.where(s < t0, 1, 0) + tl.where(s < t1, 1 << 8, 0) + tl.where(s < t2, 1 << 16, 0) + tl.where(s < t3, 1 << 24, 0)
        )
        if RUNGS == 8:
            upper += (
                tl.where(s < t4, 1, 0)
                + tl.where(s < t5, 1 << 8, 0)
                + tl.where(s < t6, 1 << 16, 0)
                + tl.where(s < t7, 1 << 24, 0)
            )
        nan += (s != s).to(tl.int32)
    row = counts + (start + block) * (RUNGS + 1)
    tl.store(row + RUNGS, tl.sum(nan))
    for j in tl.static_range(4):
        tl.store(row + j, tl.sum((lower >> (8 * j)) & 255))
        if RUNGS == 8:
            tl.store(row + 4 + j, tl.sum((upper >> (8 * j)) & 255))


@triton.jit
def _gather_kernel(x, under, ends, found, cursor, n, UNDER: tl.constexpr, TILE: tl.constexpr):
    """Collects the magnitudes from ends[0] to below ends[1], in no particular order."""
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    s = _magnitude(x, under, at, at < n, float("inf"), UNDER)
    inside = (s >= tl.load(ends)) & (s < tl.load(ends + 1))
    number = tl.sum(inside.to(tl.int32))
    if number > 0:
        place = tl.atomic_add(cursor, number) + tl.cumsum(inside.to(tl.int32), 0) - 1
        tl.store(found + place, s, mask=inside)


@triton.jit(do_not_specialize=["first_block"])
def _mask_kernel(
    x, under, kept, before, first_block, threshold, goes, n, UNDER: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr
):
    """Keeps the magnitudes above the threshold, and those that equal it after the first `goes` of them."""
    kept = kept.to(tl.pointer_type(tl.int8), bitcast=True)
    tile = tl.program_id(0)
    block = first_block + tile // TILES
    first = tile.to(tl.int64) * TILE
    at = first + tl.arange(0, TILE)
    s = _magnitude(x, under, at, at < n, 0.0, UNDER)
    t = tl.load(threshold)
    start = tl.load(before + block)
    left = tl.load(goes) - start  # ties of this block that are pruned
    if left <= 0:
        keep = s >= t
    elif left >= tl.load(before + block + 1) - start:
        keep = s > t
    else:  # the only block that prunes some ties and keeps others: count those in the tiles before this one
        for earlier in range(tile % TILES):
            there = first - (earlier + 1) * TILE + tl.arange(0, TILE)
            left -= tl.sum((_magnitude(x, under, there, there >= 0, 0.0, UNDER) == t).to(tl.int32))
        equal = (s == t) & (at < n)
        keep = (s > t) | (equal & (tl.cumsum(equal.to(tl.int32), 0) > left))
    tl.store(kept + at, keep.to(tl.int8), mask=at < n)


@triton.jit
def _group_kernel(x, under, kept, nan, groups, drop, UNDER: tl.constexpr, M: tl.constexpr, GROUPS: tl.constexpr):
    """Writes the n:m mask of GROUPS groups of M elements by counting, for each element, those that rank lower."""
    g = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    i = tl.arange(0, M)
    at = g[:, None] * M + i[None, :]
    inside = (g < groups)[:, None]
    s = _magnitude(x, under, at, inside, 0.0, UNDER)
    rank = tl.zeros([GROUPS, M], tl.int32)
    for j in tl.static_range(M):
        other = _magnitude(x, under, g * M + j, g < groups, 0.0, UNDER)[:, None]
        rank += ((other < s) | ((other == s) & (j < i)[None, :])).to(tl.int32)
    tl.store(kept + at, (rank >= drop).to(tl.int8), mask=inside)
    bad = tl.max(tl.max((s != s).to(tl.int32), 1), 0)
    if bad > 0:
        tl.atomic_max(nan, bad)


@triton.jit
def _quad_kernel(x, kept, nan, groups, drop, INFINITY: tl.constexpr, TILE: tl.constexpr):
    """Writes the n:4 mask of half precision. A group is one 64-bit word, its mask one 32-bit word; keys have 15 bits."""
    x = x.to(tl.pointer_type(tl.int64), bitcast=True)
    kept = kept.to(tl.pointer_type(tl.int32), bitcast=True)
    g = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    v = tl.load(x + g, mask=g < groups, other=0)
    a = (v & 0x7FFF).to(tl.int32)
    b = ((v >> 16) & 0x7FFF).to(tl.int32)
    c = ((v >> 32) & 0x7FFF).to(tl.int32)
    d = ((v >> 48) & 0x7FFF).to(tl.int32)
    ab, ac, ad = (a > b).to(tl.int32), (a > c).to(tl.int32), (a > d).to(tl.int32)
    bc, bd, cd = (b > c).to(tl.int32), (b > d).to(tl.int32), (c > d).to(tl.int32)
    first = (ab + ac + ad >= drop).to(tl.int32) | ((1 - ab + bc + bd >= drop).to(tl.int32) << 8)
    second = ((2 - ac - bc + cd >= drop).to(tl.int32) << 16) | ((3 - ad - bd - cd >= drop).to(tl.int32) << 24)
    tl.store(kept + g, first | second, mask=g < groups)
    if tl.max(tl.maximum(tl.maximum(a, b), tl.maximum(c, d)), 0) > INFINITY:
        tl.atomic_max(nan, 1)


@triton.jit
def _fold_kernel(
    x, under, means, rows, cols, across, height, width,
    UNDER: tl.constexpr, POWER: tl.constexpr, WIDTH: tl.constexpr, EXACT: tl.constexpr, UNITS: tl.constexpr,
):  # fmt: skip
    """Computes the means of UNITS neighbouring blocks in float64. WIDTH is `width` if EXACT, else the next power of two."""
    down = tl.program_id(0).to(tl.int64)
    unit = tl.program_id(1) * UNITS + tl.arange(0, UNITS)
    i = tl.arange(0, WIDTH)
    if EXACT:  # lets the compiler see that the columns are contiguous
        col = unit[:, None] * WIDTH + i[None, :]
        inside = col < cols
    else:
        col = unit[:, None] * width + i[None, :]
        inside = (i[None, :] < width) & (col < cols)
    total = tl.zeros([UNITS], tl.float64)
    for k in range(height):
        row = down * height + k
        s = _magnitude(x, under, row * cols + col, inside & (row < rows), 0.0, UNDER)
        total += tl.sum((s * s if POWER == 2 else s).to(tl.float64), 1)
    size = tl.minimum(height, rows - down * height) * tl.minimum(width, cols - unit * width)
    tl.store(means + down * across + unit, (total / size.to(tl.float64)).to(tl.float32), mask=unit < across)


@_on_its_device
def fold_magnitudes(weight: Tensor, under: Tensor | None, power: int, height: int, width: int, means: Tensor) -> None:
    """Writes the mean of |weight| ** power, or of |weight * under| ** power, over each block of a contiguous matrix."""
    (rows, cols), (down, across) = weight.shape, means.shape
    if not means.numel():
        return
    wide = triton.next_power_of_2(width)
    units = min(max(1024 // wide, 1), triton.next_power_of_2(across))
    arguments = weight, weight if under is None else under, means, rows, cols, across, height, width, under is not None
    _fold_kernel[(down, triton.cdiv(across, units))](*arguments, power, wide, wide == width, units, **launch_options(4))


@triton.jit
def _spread_kernel(kept, mask, rows, cols, across, height, width, UNITE: tl.constexpr, TILE: tl.constexpr):
    """Writes one row of a mask of elements from a mask of blocks; with UNITE, elements that are already set stay set."""
    kept = kept.to(tl.pointer_type(tl.int8), bitcast=True)
    row = tl.program_id(0).to(tl.int64)
    col = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = col < cols
    v = tl.load(kept + (row // height) * across + col // width, mask=inside, other=0)
    if UNITE:
        v = v | tl.load(mask + row * cols + col, mask=inside, other=0)
    tl.store(mask + row * cols + col, v.to(mask.dtype.element_ty), mask=inside)


@_on_its_device
def spread(kept: Tensor, height: int, width: int, mask: Tensor, *, unite: bool) -> None:
    """Expands a grid of units to a contiguous mask of any dtype. With `unite`, the mask is bool and set elements stay set."""
    rows, cols = mask.shape
    out = mask.view(torch.int8) if mask.dtype == torch.bool else mask
    if mask.numel():
        grid = (rows, triton.cdiv(cols, 2048))
        _spread_kernel[grid](kept, out, rows, cols, kept.shape[1], height, width, unite, 2048, **launch_options(4))


@triton.jit
def _zero_kernel(bits, mask, n, TILE: tl.constexpr):
    mask = mask.to(tl.pointer_type(tl.int8), bitcast=True)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    kept = tl.load(mask + at, mask=at < n, other=0) != 0
    tl.store(bits + at, tl.where(kept, tl.load(bits + at, mask=at < n, other=0), 0), mask=at < n)


@_on_its_device
def zero_(bits: Tensor, mask: Tensor) -> None:
    """Sets contiguous integers to 0 wherever the mask is False."""
    if bits.numel():
        _zero_kernel[(triton.cdiv(bits.numel(), 4096),)](bits, mask, bits.numel(), 4096, **launch_options(8))


def _keys(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Returns non-negative values of a dtype as integers in the same order, such that neighbouring values differ by one."""
    if dtype == torch.float16:
        return values.astype(np.float16).view(np.uint16).astype(np.int64)
    bits = values.astype(np.float32).view(np.uint32).astype(np.int64)
    return bits >> 16 if dtype == torch.bfloat16 else bits


def _values(keys: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Undoes `_keys`, as float32."""
    if dtype == torch.float16:
        return keys.astype(np.uint16).view(np.float16).astype(np.float32)
    return ((keys << 16) if dtype == torch.bfloat16 else keys).astype(np.uint32).view(np.float32)


@_on_its_device
def keep_magnitudes(
    pairs: Sequence[tuple[Tensor, Tensor | None]], sample: Callable[[], Tensor], drop: int
) -> list[Tensor] | None:
    """Returns masks of contiguous tensors on one device that prune their `drop` lowest magnitudes together.

    Among equals the lowest index is pruned first. Each tensor comes with a mask to multiply it with, or None. `drop` must be
    at least 1 and less than the number of elements. Returns None if the threshold is infinite, which a ladder cannot bracket.
    """
    weights = [weight for weight, _ in pairs]
    if len(weights) == 1 and weights[0].numel() <= _ONE:
        return [radix.keep_largest(*pairs[0], drop)]
    values = sample()
    masks = [torch.empty(weight.shape, dtype=torch.bool, device=weight.device) for weight in weights]
    parts = one_pass.parts_of(pairs, one_pass.BLOCK)
    bracket = one_pass.bracket_of(values, drop / sum(weight.numel() for weight in weights))
    swept = one_pass.sweep(parts, bracket, masks)
    if swept.holds(drop):
        swept.drop_lowest(parts, bracket, drop)
    elif (goes := swept.ties_below(drop)) is not None:
        _write_masks(parts, one_pass.BLOCK, masks, bracket.view(torch.float32)[2:], swept.counts[3], goes)
    else:  # an unlucky sample, or too many candidates
        del swept
        parts = one_pass.parts_of(pairs, _BLOCK)
        found = _find_threshold(parts, values, drop)
        if found is None:
            return None
        _write_masks(parts, _BLOCK, masks, *found)
    return masks


def _write_masks(
    parts: Sequence[Part], block: int, masks: Sequence[Tensor], threshold: Tensor, ties: Tensor, goes: int
) -> None:
    """Keeps the magnitudes above the threshold, and those that equal it, of which each block has `ties`, but the first."""
    before = torch.zeros(parts[-1].end + 1, dtype=torch.int64, device=ties.device)
    torch.cumsum(ties, 0, out=before[1:])
    pruned = torch.tensor([goes], device=ties.device)
    for part, mask in zip(parts, masks, strict=True):
        size = part.weight.numel()
        if size:
            arguments = part.weight, part.factor, mask, before, part.start, threshold, pruned, size, part.masked
            _mask_kernel[(triton.cdiv(size, _MASK_TILE),)](*arguments, _MASK_TILE, block // _MASK_TILE, **launch_options(8))


def _find_threshold(parts: Sequence[Part], sample: Tensor, drop: int) -> tuple[Tensor, Tensor, int] | None:
    """Returns the threshold, the number of ties in each block, and how many ties are pruned. None if it is infinite."""
    dtypes = {part.weight.dtype for part in parts}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.float32
    rungs = 8 if dtype == torch.float32 else 4
    counts = torch.empty(parts[-1].end, rungs + 1, dtype=torch.int32, device=parts[0].weight.device)
    total, infinity = sum(part.weight.numel() for part in parts), int(_keys(np.array([np.inf]), dtype)[0])
    low, high, under, upto = 0, infinity + 1, 0, total  # `under` < drop magnitudes are below low, `upto` >= drop below high
    ladder = _sampled_rungs(sample, drop / total, dtype, infinity, rungs)
    while True:
        values = torch.from_numpy(_values(ladder, dtype)).to(counts.device)
        below = _count_below(parts, values, counts)
        at = int(np.searchsorted(below, drop))  # the first rung with at least `drop` magnitudes below it
        low, under = (int(ladder[at - 1]), below[at - 1]) if at > 0 else (low, under)
        high, upto = (int(ladder[at]), below[at]) if at < rungs else (high, upto)
        if low == infinity:
            return None
        if 0 < at < rungs and high - low == 1:
            return values[at - 1 :], counts[:, at] - counts[:, at - 1], drop - under
        if low < high - 1 and upto - under <= _FEW and high <= infinity:  # few candidates are left: collect and sort them
            key = _kth_between(parts, low, high, upto - under, drop - under, dtype)
            ladder = np.minimum(key + np.arange(rungs), infinity)
        else:
            ladder = _rungs(low, high, under, upto, drop, infinity, rungs)


def _count_below(parts: Sequence[Part], values: Tensor, counts: Tensor) -> list[int]:
    """Returns how many magnitudes are below each rung, and writes those of each block to `counts`. Raises NaNFound."""
    for part in parts:
        if part.start < part.end:
            arguments = part.weight, part.factor, values, counts, part.start, part.weight.numel(), part.masked, len(values)
            _count_kernel[(part.end - part.start,)](*arguments, _TILE, _TURNS, **launch_options(4))
    *below, nan = counts.sum(0, dtype=torch.int64).tolist()
    if nan:
        block = int(counts[:, -1].nonzero()[0, 0])
        raise NaNFound(next(i for i, part in enumerate(parts) if part.start <= block < part.end))
    return below


def _kth_between(parts: Sequence[Part], low: int, high: int, number: int, k: int, dtype: torch.dtype) -> int:
    """Returns the key of the k-th lowest of the `number` magnitudes with keys from `low` to below `high`."""
    device = parts[0].weight.device
    ends = torch.from_numpy(_values(np.array([low, high]), dtype)).to(device)
    found, cursor = torch.empty(number, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    for weight, factor, has, start, end in parts:
        if start == end:
            continue
        grid = (triton.cdiv(weight.numel(), _MASK_TILE),)
        _gather_kernel[grid](weight, factor, ends, found, cursor, weight.numel(), has, _MASK_TILE, **launch_options(8))
    return int(_keys(found.sort().values[k - 1 : k].cpu().numpy(), dtype)[0])


def _sampled_rungs(sample: Tensor, share: float, dtype: torch.dtype, infinity: int, rungs: int) -> np.ndarray:
    """Returns rungs around the quantile of the sample, about as wide as its error."""
    ordered, size = sample.sort().values, sample.numel()
    spread = 3 * (share * (1 - share) / size) ** 0.5 + 1 / size
    ends = [min(max(int((share + sign * spread) * size), 0), size - 1) for sign in (-1, 1)]
    first, last = _keys(ordered[ends].float().cpu().numpy(), dtype).tolist()
    if first == 0:  # count zeros separately, because pruning just the weights that are already zero is common
        keys = np.concatenate([[0], np.linspace(1, max(last + 1, rungs - 1), rungs - 1)])
    else:
        keys = first + np.arange(rungs) if last + 1 - first < rungs else np.linspace(first, last + 1, rungs)
    return np.minimum(keys.astype(np.int64), infinity)


def _rungs(low: int, high: int, under: int, upto: int, drop: int, infinity: int, rungs: int) -> np.ndarray:
    """Returns the next rungs from `low` to `high`: every key if there are few.

    Otherwise half of them are close to where the counts interpolate to `drop`, and half are evenly spaced, so that the range
    shrinks for any distribution.
    """
    if high - low < rungs:
        keys = low + np.arange(rungs)
    else:
        per_count, half = (high - low) / (upto - under), (rungs - 2) // 2
        middle, width = low + (drop - under) * per_count, 2 + 4 * per_count * (upto - under) ** 0.5
        near = np.linspace(max(middle - width, low + 1), min(middle + width, high - 1), rungs - 2 - half)
        keys = np.sort(np.concatenate([[low], near, np.linspace(low, high, half + 2)[1:-1], [high]]))
    return np.minimum(keys.astype(np.int64), infinity)


@functools.cache
def _flag(device: torch.device) -> Tensor:
    """Returns a number on the device that is zero between calls and that kernels set if they find NaN."""
    return torch.zeros(1, dtype=torch.int32, device=device)


@_on_its_device
def keep_groups(weight: Tensor, under: Tensor | None, size: int, drop: int, kept: Tensor) -> None:
    """Writes the mask that prunes the `drop` lowest magnitudes of every `size` neighbours of a contiguous matrix.

    `size` must divide the rows.
    """
    groups = weight.numel() // size
    nan = _flag(weight.device)
    if size == 4 and weight.element_size() == 2 and under is None:
        arguments = weight, kept, nan, groups, drop, infinity_bits(weight.dtype)
        _quad_kernel[(triton.cdiv(groups, 1024),)](*arguments, 1024, **launch_options(4))
    else:
        tile = 2048 // size
        arguments = weight, weight if under is None else under, kept.view(torch.int8), nan, groups, drop, under is not None
        _group_kernel[(triton.cdiv(groups, tile),)](*arguments, size, tile, **launch_options(8))
    if nan.item():
        nan.zero_()
        raise NaNFound(0)
