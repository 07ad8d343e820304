"""Means over blocks of a matrix, and masks of elements from masks of blocks."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import (
    BITS,
    KERNEL_DTYPES,
    PART,
    WORDS,
    array,
    compilable,
    in_threads,
    readable_by_triton,
    triton_installed,
    view,
    workspace,
    worth_compiling,
)

WIDEST_BLOCK = 1 << 14  # widest block whose rows the Triton kernel sums at once
_FOLD_SLAB = 1 << 17


def fold(matrix: Tensor, height: int, width: int, means: Tensor) -> None:
    """Writes the mean over each block of a matrix to `means`, summed in float64. Blocks at the edges may be smaller."""
    on_cpu = matrix.device.type == "cpu"
    x: Any = array(matrix) if on_cpu else matrix
    out: Any = means.numpy() if on_cpu else means
    for top, bottom, h in runs(matrix.shape[0], height):
        for left, right, w in runs(matrix.shape[1], width):
            grid = out[top // height :, left // width :][: (bottom - top) // h, : (right - left) // w]
            (_means if on_cpu else _torch_means)(x[top:bottom, left:right], h, w, grid)


def runs(size: int, run: int) -> list[tuple[int, int, int]]:
    """Splits an axis into its whole runs and a shorter last one, if any, as (begin, end, length of a run)."""
    whole = size - size % run
    return [part for part in ((0, whole, run), (whole, size, size - whole)) if part[0] < part[1]]


def _torch_means(matrix: Tensor, height: int, width: int, out: Tensor) -> None:
    total = matrix.unflatten(0, (-1, height)).sum(1, dtype=torch.float64).unflatten(1, (-1, width)).sum(2)
    out.copy_(total.div_(height * width))


def _means(x: np.ndarray, height: int, width: int, out: np.ndarray) -> None:
    """Writes the means of blocks that divide the matrix evenly, a few rows at a time, so that sums stay in the cache."""
    step = max(_FOLD_SLAB // x.shape[1] // height, 1) * height
    for first in range(0, len(x), step):
        some = x[first : first + step]
        wide = workspace("wide", some.shape, np.float64)
        np.copyto(wide, some)
        if height > 1:
            shape = (len(some) // height, some.shape[1])
            wide = np.add.reduce(wide.reshape(shape[0], height, shape[1]), axis=1, out=workspace("rows", shape, np.float64))
        part = out[first // height : -(-(first + step) // height)]
        np.divide(_sum_runs(wide, width), height * width, out=part, casting="same_kind")


def _sum_runs(wide: np.ndarray, run: int) -> np.ndarray:
    """Returns the sums over runs of neighbours in each row.

    NumPy adds long rows fast and short runs slowly, so runs are halved repeatedly. The first pairs are the real and imaginary
    parts of complex numbers, which are neighbours in memory.
    """
    rows, cols = wide.shape
    if run % 2:
        return wide.reshape(rows, cols // run, run).sum(-1)
    pairs, uses = wide.view(np.complex128).reshape(rows, cols // run, run // 2), itertools.cycle(("halves", "quarters"))
    while pairs.shape[2] > 1 and pairs.shape[2] % 2 == 0:
        half = workspace(next(uses), (rows, cols // run, pairs.shape[2] // 2), np.complex128)
        pairs = np.add(pairs[..., 0::2], pairs[..., 1::2], out=half)
    total = pairs[..., 0] if pairs.shape[2] == 1 else pairs.sum(-1)
    return np.add(np.real(total), np.imag(total), out=workspace("sums", total.shape, np.float64))


def spread_(out: Tensor, kept: Tensor, height: int, width: int) -> None:
    """Writes ones for the elements of kept units and zeros for the others into a matrix of any dtype.

    Units at the edges may be smaller.
    """
    if not out.numel():
        return
    plain, on_cpu = out.is_contiguous() and kept.is_contiguous(), out.device.type == "cpu"
    if height == width == 1 and not (plain and _on_gpu(out)):
        out.copy_(kept if out.dtype == torch.bool else kept.view(torch.int8))  # int8: torch converts it faster than bool
    elif plain and on_cpu and worth_compiling(out.numel()):
        _spread_compiled(out, kept, height, width)
    elif on_cpu and out.dtype != torch.bool:
        mask = torch.empty(out.shape, dtype=torch.bool)
        spread_(mask, kept, height, width)
        spread_(out, mask, 1, 1)
    elif plain and on_cpu and height == 1 and out.shape[1] % width == 0:
        _repeat(kept.numpy(), width, out.numpy())
    else:
        _spread(kept, height, width, out, unite=False)


def _spread_compiled(out: Tensor, kept: Tensor, height: int, width: int) -> None:
    from . import compiled

    one = torch.ones((), dtype=out.dtype).view(BITS[out.element_size()]).item()
    units, bits, step = view(kept), view(out.view(BITS[out.element_size()])), max(PART // out.shape[1], 1)
    one = bits.dtype.type(one)
    in_threads(
        lambda first: compiled.spread(units, height, width, one, bits, first, min(first + step, len(bits))),
        range(0, len(bits), step),
    )


def _on_gpu(mask: Tensor) -> bool:
    return mask.device.type == "cuda" and mask.dtype in (torch.bool, *KERNEL_DTYPES) and triton_installed()


def unite_(mask: Tensor, kept: Tensor, height: int, width: int) -> None:
    """Sets `mask` to True in the blocks that `kept` marks."""
    _spread(kept, height, width, mask, unite=True)


def _spread(kept: Tensor, height: int, width: int, mask: Tensor, *, unite: bool) -> None:
    if mask.device.type == "cpu":
        wide = np.empty((kept.shape[0], kept.shape[1] * width), np.bool_)
        _repeat(kept.numpy(), width, wide)
        for top, bottom, h in runs(mask.shape[0], height):
            out = view(mask)[top:bottom].reshape((bottom - top) // h, h, mask.shape[1])
            part = wide[top // height :, None, : mask.shape[1]][: len(out)]
            np.logical_or(out, part, out=out) if unite else np.copyto(out, part)
    elif kept.is_contiguous() and mask.is_contiguous() and _on_gpu(mask):
        from . import cuda

        cuda.spread(kept, height, width, mask, unite=unite)
    else:
        for top, bottom, h in runs(mask.shape[0], height):
            for left, right, w in runs(mask.shape[1], width):
                down, across = (bottom - top) // h, (right - left) // w
                part = mask[top:bottom, left:right].unflatten(1, (across, w)).unflatten(0, (down, h))
                units = kept[top // height :, left // width :][:down, None, :across, None]
                part.logical_or_(units) if unite else part.copy_(units.expand_as(part))


def _repeat(kept: np.ndarray, times: int, out: np.ndarray) -> None:
    """Writes every column `times` times."""
    size = next(size for size in (8, 4, 2, 1) if times % size == 0)
    if size == 1:
        np.copyto(out, np.repeat(kept, times, axis=1))
    else:  # one multiplication of machine words repeats `size` times
        word = WORDS[size]
        ones, words = word(sum(1 << 8 * i for i in range(size))), out.view(word)
        for i in range(times // size):
            np.multiply(kept.view(np.uint8), ones, out=words[:, i :: times // size], dtype=word)


def _fold_compiled(weight: Tensor, under: Tensor | None, square: bool, height: int, width: int, means: np.ndarray) -> None:
    from . import compiled

    x, mask, step = view(weight), None if under is None else view(under), max(PART // weight.shape[1] // height, 1)

    def work(first: int) -> None:
        rows, last = slice(first * height, (first + step) * height), first + step
        compiled.fold(x[rows], None if mask is None else mask[rows], square, height, width, means[first:last])

    in_threads(work, range(0, len(means), step))


def fold_magnitudes(weight: Tensor, under: Tensor | None, power: float, height: int, width: int, means: Tensor) -> bool:
    """Writes the mean magnitude of each block to `means` in one pass. Returns False if no kernel supports it."""
    if power in (1, 2) and compilable(weight, under):
        _fold_compiled(weight, under, power == 2, height, width, means.numpy())
        return True
    if power not in (1, 2) or width > WIDEST_BLOCK or not readable_by_triton([weight] if under is None else [weight, under]):
        return False
    from . import cuda

    cuda.fold_magnitudes(weight, under, int(power), height, width, means)
    return True
