"""The cut of a pool through parts in memory, in one pass over the weights, for `digits`.

A sample of all parts gives two scores between which the cut most likely is, the bracket. One pass then counts the keys below
and inside of that bracket, writes the mask of the keys above it, and keeps the few inside, from which the cut is found.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from . import kernels
from ._dist import Comm
from .digits import LISTED, Near, Part, Pool, kind_of, listed, ordered, plain_bits, value_of

_LARGE = 1 << 20  # elements of a pool that is worth a sample
_SAMPLE = 1 << 17
_RUN = 8  # neighbours that a CPU reads from memory together anyway
_FEW = 16  # the keys inside are kept if they are at most one in so many
_WIDEST = 256  # values of the leading 16 bits in a bracket
_HALF = 1 << 15  # values of the leading 16 bits of keys that are not negative
_DIGIT = 15  # bits of a digit inside the bracket; all tables have the same size, so that traffic does not grow


def find_cut(pool: Pool, bits: int, comm: Comm, *, longest: int, tensors: int) -> bool:
    """Finds the cut of a large pool, if a sample brackets it. Returns True if there is NaN anywhere.

    All processes have to call it for a pool of the same size. `digits.find_cuts` does the rest: everything if the cut is not in
    the bracket, and all but the leading 16 bits if too many keys are inside.
    """
    if pool.total < _LARGE or pool.trivial or pool.weighted:
        return False
    bracket = _sampled(pool, bits, comm)
    if bracket is None:
        return False
    low, high = bracket
    shift, wide = bits - 16, bits - 16 + (high - low).bit_length()  # bits of a key inside that follow the leading 16, and all
    fine = max(wide - _DIGIT, 0)
    counts = np.zeros((1 << _DIGIT) + 4, dtype=np.int64)  # below, for each digit, above; NaN, and parts with many keys inside
    for place, part in enumerate(pool.parts):
        if part.counted:
            _look(pool, place, part, bits, bracket, fine, counts)
    comm.add_(torch.from_numpy(counts))
    totals = counts[:-2].cumsum()
    at = int(np.searchsorted(totals, pool.drop))
    if counts[-2] or not 1 <= at <= 1 << _DIGIT:
        pool.near, pool.kept = {}, {}
        return bool(counts[-2])
    number, index = (tensors - 1).bit_length(), max(longest - 1, 1).bit_length()
    if counts[-1] or wide + number + index > 62:
        pool.prefix, pool.known = low + (at - 1 >> shift - fine), 16
        first = (pool.prefix - low) << shift - fine
        pool.before, after = int(totals[first]), int(totals[first + (1 << shift - fine)])
        pool.equal = after - pool.before
        return False
    # The rest of the key, the number of the tensor and the index in it are one integer.
    inside = [np.empty(0, dtype=np.int64)]
    for place, near in pool.near.items():
        keys = near[0].numpy() - (low << shift)
        some = np.flatnonzero(keys >> fine == at - 1)
        where = pool.parts[place].index(0, torch.from_numpy(near[1].numpy()[some])).numpy()
        inside.append((keys[some].astype(np.int64) << number + index) + (pool.parts[place].number << index) + where)
    cut = _narrowed(inside, at - 1, fine + number + index, int(pool.drop) - int(totals[at - 1]), int(counts[at]), comm)
    pool.prefix, pool.known = (low << shift) + (cut >> number + index), bits
    pool.number, pool.index = (cut >> index) & ((1 << number) - 1), cut & ((1 << index) - 1)
    pool.before, pool.equal = int(pool.drop), 0
    return False


def _narrowed(inside: Sequence[np.ndarray], prefix: int, left: int, drop: int, equal: int, comm: Comm) -> int:
    """The largest integer to prune, if `drop` of the integers with this `prefix` are: `equal` in all, `inside` on this process.

    `left` bits follow the prefix.
    """
    own = np.concatenate(inside)
    while drop < equal and left:
        if equal * comm.size <= LISTED:
            return listed(own, equal, drop, comm)
        digit = min(_DIGIT, left)
        left -= digit
        counts = np.bincount((own >> left) - (prefix << digit), minlength=1 << _DIGIT)
        comm.add_(torch.from_numpy(counts))
        totals = counts.cumsum()
        at = int(np.searchsorted(totals, drop))
        prefix, drop, equal = (prefix << digit) + at, drop - int(totals[at] - counts[at]), int(counts[at])
        own = own[own >> left == prefix]
    return ((prefix + 1) << left) - 1


def _sampled(pool: Pool, bits: int, comm: Comm) -> tuple[int, int] | None:
    """The first and the last leading 16 bits in the bracket, or None if any process has parts that cannot be read like this."""
    stride = max(pool.total // _SAMPLE, 1) | 1  # odd, so that all columns are covered
    counts = np.zeros(_HALF + 1, dtype=np.int32)
    for part in pool.parts:
        if not part.counted:
            continue
        if (raw := plain_bits(part, bits)) is None:
            counts[-1] = 1
            break
        if raw.size >= _RUN * _RUN * stride:
            raw = raw[: raw.size // _RUN * _RUN].reshape(-1, _RUN)
        counts[:-1] += np.bincount((raw[::stride].reshape(-1) >> (bits - 16)) & (_HALF - 1), minlength=_HALF)
    comm.add_(torch.from_numpy(counts))
    totals = counts[:-1].cumsum()
    number = int(totals[-1])
    if counts[-1] or not number:
        return None
    share = pool.drop / pool.total
    spread = 4 * (share * (1 - share) / number) ** 0.5 + 2 / number
    low, high = (int(np.searchsorted(totals, (share + way * spread) * number)) for way in (-1, 1))
    low, high = max(low, 0), min(high, _HALF - 1)
    return (low, high) if high - low < _WIDEST else None


def _look(pool: Pool, place: int, part: Part, bits: int, bracket: tuple[int, int], fine: int, counts: np.ndarray) -> None:
    """Adds the counts of a part. Keeps the mask of the elements above the bracket, and the keys inside if they are few."""
    (low, high), shift = bracket, bits - 16
    cols, left = part.scores.layout.cols, part.scores.numel // _FEW
    kept = kernels.new_tensor((part.scores.layout.rows, cols), torch.bool)
    kind = kind_of(part.scores)
    below = value_of((low << shift) - 1, bits, kind) if low else -1.0
    above = value_of((high + 1) << shift, bits, kind) if (high + 1) << shift <= 0x7F80 << shift else torch.inf

    def digits_of(keys: Tensor) -> np.ndarray:
        return np.bincount(keys.numpy() - (low << shift) >> fine, minlength=1 << _DIGIT)

    def look(slab: Any, first: int, last: int) -> tuple[int, int, np.ndarray | Near]:
        nonlocal left
        upto, more, values, places = kernels.tally(slab, below, above, kept[first:last])
        left -= values.numel()
        inside = (values, places.add_(first * cols)) if left >= 0 else digits_of(ordered(values, bits))
        return upto, more, inside

    found = part.scores.each(look, raw=True)
    upto, more = sum(each[0] for each in found), sum(each[1] for each in found)
    digits = sum((each for *_, each in found if not isinstance(each, tuple)), np.zeros(1 << _DIGIT, dtype=np.int64))
    if few := [each for *_, each in found if isinstance(each, tuple)]:
        keys, places = ordered(torch.cat([values for values, _ in few]), bits), torch.cat([places for _, places in few])
        digits += digits_of(keys)
        if len(few) == len(found):
            pool.near[place], pool.kept[place] = (keys, places), kept
    counts[1:-3] += digits
    counts[[0, -3, -2, -1]] += [upto, more - digits.sum(), upto + more != part.scores.numel, len(few) < len(found)]
