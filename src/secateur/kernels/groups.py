"""n:m masks: prune the lowest of every m neighbours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .arrays import BITS, PART, WORDS, Magnitudes, NaNFound, array, compilable, in_threads, product, readable_by_triton, view

_GROUP_SLAB = 1 << 19


def keep_rows(groups: Tensor, drop: int, kept: Tensor) -> None:
    """Writes to `kept` all but the `drop` lowest of each row; among equals the lowest index is pruned first."""
    size = groups.shape[1]
    if drop <= 0 or drop >= size:
        kept.fill_(drop <= 0)
    elif groups.device.type == "cpu":
        x, out = array(groups), kept.numpy()
        _duel(np.ascontiguousarray(x.T), drop, out) if size <= 16 else _partition(x, drop, out)
    else:
        kept.fill_(True).scatter_(1, groups.argsort(dim=1, stable=True)[:, :drop], False)


def _duel(columns: np.ndarray, drop: int, out: np.ndarray) -> None:
    """Ranks small pools by comparing every pair of columns, for all pools at once."""
    wins = np.repeat(np.arange(len(columns), dtype=np.uint8)[:, None], columns.shape[1], 1)  # the later of two equals wins
    for i in range(len(columns)):
        for j in range(i + 1, len(columns)):
            first = (columns[i] > columns[j]).view(np.uint8)
            wins[i] += first
            wins[j] -= first
    for i, kept in enumerate(wins >= drop):
        out[:, i] = kept


def _partition(x: np.ndarray, drop: int, out: np.ndarray) -> None:
    threshold = np.partition(x, drop - 1, axis=1)[:, drop - 1 : drop]
    np.greater(x, threshold, out=out)
    spare = drop - np.count_nonzero(x < threshold, axis=1)
    for row in np.flatnonzero(x.shape[1] - np.count_nonzero(out, axis=1) > drop):
        out[row, np.flatnonzero(x[row] == threshold[row])[spare[row] :]] = True


def keep_groups(weight: Tensor, size: int, drop: int, kept: Tensor, under: Tensor | None = None) -> bool:
    """Writes the n:m mask of the magnitudes of `weight` or `weight * under` to `kept` in one pass.

    Returns False if no kernel supports it.
    """
    tensors = [weight] if under is None else [weight, under]
    if weight.shape[1] % size or not 0 < drop < size or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    if size == 4 and compilable(weight, under):
        _keep_of_four(weight, under, drop, kept)
        return True
    if weight.device.type == "cpu" and size in WORDS:
        _keep_groups(weight, under, size, drop, kept)
        return True
    if size in (2, 4, 8, 16) and readable_by_triton(tensors):
        from . import cuda

        cuda.keep_groups(weight, under, size, drop, kept)
        return True
    return False


def _keep_of_four(weight: Tensor, under: Tensor | None, drop: int, kept: Tensor) -> None:
    from . import compiled

    (x, mask), words = Magnitudes(weight, under).arrays, kept.numpy().reshape(-1).view(np.int32)

    def work(first: int) -> int:
        part = slice(4 * first, 4 * first + PART)
        return compiled.keep_of_four(x[part], None if mask is None else mask[part], drop, words[first : first + PART // 4])

    if any(in_threads(work, range(0, len(words), PART // 4))):
        raise NaNFound(0)


def _keep_groups(weight: Tensor, under: Tensor | None, size: int, drop: int, kept: Tensor) -> None:
    """Compares all elements with those 1, 2, ... places to the right, in place, and counts wins.

    Magnitudes compare like the integers of their bit patterns. The results of a group are neighbouring bytes, so they form one
    machine word, in which wins are summed byte by byte. Of two equals, the right one wins.
    """
    integer = BITS[weight.element_size()]
    flat, mask, out = weight.reshape(-1), None if under is None else under.reshape(-1), kept.numpy().reshape(-1)
    infinity = int(torch.tensor(torch.inf, dtype=weight.dtype).view(integer))
    x = view(flat.view(integer))
    word, ones = WORDS[size], sum(1 << 8 * i for i in range(size))
    # Each element starts with a win against all to its left, plus an offset that makes `drop` wins carry into bit log2(size).
    start = word(sum(i << 8 * i for i in range(size)) + ones * (size - drop))

    sign = x.dtype.type(np.iinfo(x.dtype).max)

    def work(begin: int, end: int) -> None:
        length = min(_GROUP_SLAB, end - begin)
        magnitudes, beats, swings = np.empty(length, x.dtype), np.zeros(length, np.bool_), np.empty(length // size, word)
        products = torch.from_numpy(magnitudes).view(weight.dtype)
        for first in range(begin, end, _GROUP_SLAB):
            n = min(_GROUP_SLAB, end - first)
            m, wins = magnitudes[:n], out[first : first + n].view(word)
            won = beats[:n].view(word)
            values = x[first : first + n]
            if mask is not None:
                product(flat[first : first + n], mask[first : first + n], products[:n])
                values = m
            if np.bitwise_and(values, sign, out=m).max() > infinity:
                raise NaNFound(0)
            for shift in range(1, size):
                np.greater(m[:-shift], m[shift:], out=beats[: n - shift])
                np.bitwise_and(won, word(ones >> 8 * shift), out=won)  # drops comparisons across groups
                swing = word((1 - (1 << 8 * shift)) % (1 << 8 * size))  # +1 for the left element, -1 for the right one
                np.add(start if shift == 1 else wins, np.multiply(won, swing, out=swings[: n // size]), out=wins)
            np.right_shift(wins, word(size.bit_length() - 1), out=wins)
            np.bitwise_and(wins, word(ones), out=wins)

    part = -(-x.size // (2 * torch.get_num_threads()) // size) * size
    part = max(part, _GROUP_SLAB)
    in_threads(lambda begin: work(begin, min(begin + part, x.size)), range(0, x.size, part))
