"""Loops over large arrays on the CPU, compiled by numba. They do in one pass what NumPy does in several.

numba is slow to import and compiles each function once per machine, so this file is only loaded after a process has processed
many elements. Before that, and without numba, NumPy computes the same. Every function releases the GIL, so parts of an array
run in threads.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

_BLOCK = 256  # elements that are compared at once


def _compiled(function: Callable[..., Any]) -> Any:
    options: dict[str, Any] = {"nogil": True, "error_model": "numpy"}
    try:
        return numba.njit(cache=True, **options)(function)
    except RuntimeError:  # no writable folder for numba's cache
        return numba.njit(**options)(function)


@_compiled
def _magnitude(x, under, i):
    return abs(x[i]) if under is None else abs(x[i] * under[i])


@_compiled
def tally(x, under, low, high, kept, values, places):
    """Writes to `kept` which magnitudes are above `low`. Returns how many are at most `low`, above it, and below `high`, too.

    The latter are copied to `values`, and their indices to `places`.
    """
    upto, above, number = 0, 0, np.uint64(0)
    inside = np.empty(_BLOCK, np.uint8)
    words = inside.view(np.uint64)
    whole = x.size - x.size % _BLOCK
    for first in range(0, whole, _BLOCK):
        few, many = np.int32(0), np.int32(0)
        for i in range(_BLOCK):  # a constant, so that this loop becomes vector instructions
            v = _magnitude(x, under, first + i)
            kept[first + i] = v > low
            inside[i] = (v > low) & (v < high)
            few += np.int32(v <= low)
            many += np.int32(v > low)
        upto += few
        above += many
        for word in range(_BLOCK // 8):
            if words[word]:  # rarely: the bracket is narrow
                for i in range(8 * word, 8 * word + 8):
                    values[number] = _magnitude(x, under, first + i)
                    places[number] = first + i
                    number += np.uint64(inside[i])
    for i in range(whole, x.size):
        v = _magnitude(x, under, i)
        kept[i] = v > low
        upto += v <= low
        above += v > low
        values[number] = v
        places[number] = i
        number += np.uint64((v > low) & (v < high))
    return upto, above, number


@_compiled
def count_equal(x, under, value):
    number = 0
    for i in range(x.size):
        number += _magnitude(x, under, i) == value
    return number


@_compiled
def count_digits(bits, shift, bins):
    """Adds to `bins` how many integers have each value of a digit, which begins at the bit `shift`."""
    mask = bins.size - 1
    for i in range(bits.size):
        bins[np.uint64((bits[i] >> shift) & mask)] += 1  # an index with a sign would be compared with zero


@_compiled
def keep_above(x, under, threshold, kept):
    for i in range(x.size):
        kept[i] = _magnitude(x, under, i) > threshold


@_compiled
def keep_from(x, under, threshold, kept):
    for i in range(x.size):
        kept[i] = _magnitude(x, under, i) >= threshold


@_compiled
def keep_of_four(x, under, drop, kept):
    """Prunes the `drop` lowest magnitudes of every four neighbours, the first among equals. Returns the number of NaN.

    `kept` has one 32-bit word per group: four bytes of zero or one, in little-endian order.
    """
    nan, drop = np.int32(0), np.int32(drop)
    for group in range(kept.size):
        a, b = _magnitude(x, under, 4 * group), _magnitude(x, under, 4 * group + 1)
        c, d = _magnitude(x, under, 4 * group + 2), _magnitude(x, under, 4 * group + 3)
        ab, ac, ad = np.int32(a > b), np.int32(a > c), np.int32(a > d)
        bc, bd, cd = np.int32(b > c), np.int32(b > d), np.int32(c > d)
        first = np.int32(ab + ac + ad >= drop) | np.int32(np.int32(1) - ab + bc + bd >= drop) << np.int32(8)
        second = np.int32(np.int32(2) - ac - bc + cd >= drop) | np.int32(np.int32(3) - ad - bd - cd >= drop) << np.int32(8)
        kept[group] = first | second << np.int32(16)
        nan += np.int32(a != a) + np.int32(b != b) + np.int32(c != c) + np.int32(d != d)
    return nan


@_compiled
def _add_row(x, under, square, sums):
    """Adds the magnitudes of a row, or their squares, to the sums of its columns."""
    for i in range(x.size):
        v = _magnitude(x, under, i)
        sums[i] += np.float64(v * v if square else v)


@_compiled
def _mean_of_four(x, under, square, means):
    for unit in range(means.size):
        total = 0.0
        for i in range(4):
            v = _magnitude(x, under, 4 * unit + i)
            total += np.float64(v * v if square else v)
        means[unit] = total / 4


@_compiled
def fold(x, under, square, height, width, means):
    """Writes the mean magnitude, or mean square, of each block of a matrix. Blocks at the edges may be smaller."""
    rows, cols = x.shape
    sums = np.empty(cols, np.float64)
    for down in range(means.shape[0]):
        top, bottom = down * height, min((down + 1) * height, rows)
        if height == 1 and width == 4 and cols % 4 == 0:  # the common case
            _mean_of_four(x[down], None if under is None else under[down], square, means[down])
            continue
        sums[:] = 0
        for row in range(top, bottom):
            _add_row(x[row], None if under is None else under[row], square, sums)
        for unit in range(means.shape[1]):
            left, right = unit * width, min((unit + 1) * width, cols)
            means[down, unit] = sums[left:right].sum() / ((bottom - top) * (right - left))


@_compiled
def _repeat(kept, width, one, out):
    for unit in range(kept.size):
        v = one if kept[unit] else out.dtype.type(0)
        for i in range(unit * width, min((unit + 1) * width, out.size)):
            out[i] = v


@_compiled
def _repeat_four(kept, one, out):
    for unit in range(kept.size):
        v = one if kept[unit] else out.dtype.type(0)
        for i in range(4):
            out[4 * unit + i] = v


@_compiled
def spread(kept, height, width, one, out, first, last):
    """Writes `one` for the elements of kept units into rows of a matrix, and zero for the others."""
    for row in range(first, last):
        if row > first and row % height:
            out[row] = out[row - 1]
        elif width == 4 and out.shape[1] % 4 == 0:
            _repeat_four(kept[row // height], one, out[row])
        else:
            _repeat(kept[row // height], width, one, out[row])
