"""The leading digit of a cut through parts in memory, in one pass over the weights, for `digits`.

A sample of all parts says between which digits the cut most likely lies. One pass then counts the keys below and inside of
that bracket, writes the mask of the keys above it, and keeps the few inside, from which all other digits are found.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import kernels
from .digits import Add, Near, Part, Pool, kind_of, ordered, plain_bits, value_of

_LARGE = 1 << 20  # elements of a pool that is worth a sample
_SAMPLE = 1 << 17
_RUN = 8  # neighbours that a CPU reads from memory together anyway
_FEW = 16  # the keys inside are kept if they are at most one in so many
_WIDEST = 253  # digits in a bracket; so all tables have the same size
_HALF = 1 << 15  # values of a digit of keys that are not negative


def find_leading(pool: Pool, bits: int, add: Add) -> bool:
    """Finds the leading digit of a large pool, if a sample brackets it. Returns True if there is NaN anywhere.

    All processes have to call it for a pool of the same size. If it finds nothing, `digits.find_cuts` counts that digit, too.
    """
    if pool.total < _LARGE or pool.trivial or pool.weighted:
        return False
    bracket = _sampled(pool, bits, add)
    if bracket is None:
        return False
    low, high = bracket
    counts = np.zeros(_WIDEST + 3, dtype=np.int64)  # below the bracket, for each digit from its first on, above, and NaN
    for place, part in enumerate(pool.parts):
        if part.counted:
            _look(pool, place, part, bits, low, high, counts)
    *table, nan = add(torch.from_numpy(counts)).tolist()
    totals = list(accumulate(table))
    at = next((i for i, total in enumerate(totals) if total >= pool.drop), 0)
    if nan or not 1 <= at <= _WIDEST:
        pool.near, pool.kept = {}, {}
        return bool(nan)
    pool.prefix, pool.known = low + at - 1, 16
    pool.before, pool.equal = totals[at - 1], table[at]
    for place, (keys, places) in pool.near.items():  # from now on, only the keys that share the digit matter
        digits, where = (keys >> (bits - 16)).numpy(), places.numpy()
        pool.kept[place].view(-1).numpy()[where] = digits >= pool.prefix
        same = np.flatnonzero(digits == pool.prefix)
        pool.near[place] = torch.from_numpy(keys.numpy()[same]), torch.from_numpy(where[same])
    return False


def _sampled(pool: Pool, bits: int, add: Add) -> tuple[int, int] | None:
    """The first and the last digit of the bracket, or None if any process has parts that cannot be read in this way."""
    stride = max(pool.total // _SAMPLE, 1) | 1  # odd, so that all columns are covered
    counts = np.zeros(_HALF + 1, dtype=np.int64)
    for part in pool.parts:
        if not part.counted:
            continue
        if (raw := plain_bits(part, bits)) is None:
            counts[-1] = 1
            break
        if raw.size >= _RUN * _RUN * stride:
            raw = raw[: raw.size // _RUN * _RUN].reshape(-1, _RUN)
        counts[:-1] += np.bincount((raw[::stride].reshape(-1) >> (bits - 16)) & (_HALF - 1), minlength=_HALF)
    table = add(torch.from_numpy(counts)).cpu().numpy()
    totals = table[:-1].cumsum()
    number = int(totals[-1])
    if table[-1] or not number:
        return None
    share = pool.drop / pool.total
    spread = 4 * (share * (1 - share) / number) ** 0.5 + 2 / number
    low, high = (int(np.searchsorted(totals, (share + way * spread) * number)) for way in (-1, 1))
    low, high = max(low, 0), min(high, _HALF - 1)
    return (low, high) if high - low < _WIDEST else None


def _look(pool: Pool, place: int, part: Part, bits: int, low: int, high: int, counts: np.ndarray) -> None:
    """Adds the counts of a part. Keeps its mask of what is above the bracket, and the keys inside if they are few."""
    shift, cols, left = bits - 16, part.scores.layout.cols, part.scores.numel // _FEW
    kept = kernels.new_tensor((part.scores.layout.rows, cols), torch.bool)
    kind = kind_of(part.scores)
    below = value_of((low << shift) - 1, bits, kind) if low else -1.0
    above = value_of((high + 1) << shift, bits, kind) if (high + 1) << shift <= 0x7F80 << shift else torch.inf

    def digits_of(keys: Tensor) -> np.ndarray:
        return np.bincount((keys >> shift).numpy() - low, minlength=_WIDEST)

    def look(slab: Any, first: int, last: int) -> tuple[int, int, np.ndarray | Near]:
        nonlocal left
        upto, more, values, places = kernels.tally(slab, below, above, kept[first:last])
        left -= values.numel()
        inside = (values, places.add_(first * cols)) if left >= 0 else digits_of(ordered(values, bits))
        return upto, more, inside

    found = part.scores.each(look, raw=True)
    upto, more = sum(each[0] for each in found), sum(each[1] for each in found)
    digits = sum((each for *_, each in found if not isinstance(each, tuple)), np.zeros(_WIDEST, dtype=np.int64))
    if few := [each for *_, each in found if isinstance(each, tuple)]:
        keys, places = ordered(torch.cat([values for values, _ in few]), bits), torch.cat([places for _, places in few])
        digits += digits_of(keys)
        if len(few) == len(found):
            pool.near[place], pool.kept[place] = (keys, places), kept
    counts += [upto, *digits, more - digits.sum(), upto + more != part.scores.numel]
