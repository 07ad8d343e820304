"""The arithmetic of ranking, for the device a slab lies on: numpy on the CPU, torch elsewhere, Triton where it helps.

numpy because it compares, counts and partitions vectorised, in one pass over slabs that fit the cache, with nothing to
compile. Every function means the same on every device; `select` decides what to ask.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")


def slab_elements(device: torch.device) -> int:
    """How many elements to look at in one go: what fits the caches of a CPU, what fills a GPU."""
    return 1 << 18 if device.type == "cpu" else 1 << 26


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """`work` for every item, in order, on as many threads as torch uses: numpy lets go of the interpreter while it works."""
    threads = min(torch.get_num_threads(), len(items))
    if threads < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, items))


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.of: dict[str, np.ndarray] = {}


_buffers = _Buffers()


def _scratch(use: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Memory for one use at a time in this thread: fresh pages for every slab would take longer than the arithmetic."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if use not in _buffers.of or _buffers.of[use].size < size:
        _buffers.of[use] = np.empty(size, np.uint8)
    return _buffers.of[use][:size].view(dtype).reshape(shape)


def _view(slab: Tensor) -> np.ndarray:
    """The slab's memory as an array. `Tensor.numpy` would pin the storage to its size, which sharding frameworks change."""
    return np.from_dlpack(slab.detach())


def _product(slab: Tensor, under: Tensor, out: Tensor | None = None) -> Tensor:
    """slab * under; numpy's, where it can, does not start threads inside a thread."""
    if slab.device.type == "cpu" and slab.dtype == under.dtype and slab.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.multiply(_view(slab), _view(under), out=None if out is None else _view(out)))
    return torch.mul(slab, under, out=out)


def magnitude(slab: Tensor, under: Tensor | None = None, power: float = 1, *, scratch: bool = False) -> Tensor:
    """|slab| ** power, or |slab * under| ** power. To the power 1 it is exact; half precision is raised in float32.

    On the CPU bfloat16 comes out as float32, in which it is ranked. With `scratch` the result is good until the next call.
    """
    if slab.device.type != "cpu" or slab.dtype == torch.float16:
        slab = slab if under is None else slab * under
        slab = slab.float() if power != 1 and slab.dtype in (torch.float16, torch.bfloat16) else slab
        return slab.abs() if power == 1 else slab.abs().pow_(power)
    wide = np.dtype(np.float64 if slab.dtype == torch.float64 else np.float32)
    out = _scratch("magnitude", tuple(slab.shape), wide) if scratch else np.empty(slab.shape, wide)
    if slab.dtype == torch.bfloat16:  # the upper half of a float32; its sign is shifted out
        bits = _view((slab if under is None else slab * under).view(torch.int16))
        words = np.left_shift(bits, np.uint32(17), dtype=np.uint32, casting="unsafe", out=out.view(np.uint32))
        np.right_shift(words, np.uint32(1), out=words)
    elif under is not None:
        np.abs(np.multiply(_view(slab), _view(under), out=out, casting="unsafe"), out=out)
    elif power == 2:
        return torch.from_numpy(np.square(_view(slab), out=out))
    else:
        np.abs(_view(slab), out=out)
    return torch.from_numpy(out if power == 1 else np.square(out, out=out) if power == 2 else np.power(out, power, out=out))


def magnitude_bits(slab: Tensor) -> Tensor:
    """The magnitudes of half precision as the integers that their bits are: the same order, and half the bytes to compare."""
    bits = _view(slab.view(torch.int16)) & np.int16(0x7FFF)
    if bits.size and bits.max() > infinity_bits(slab.dtype):
        raise NaNFound(0)
    return torch.from_numpy(bits)


def infinity_bits(dtype: torch.dtype) -> int:
    """The bits of infinity in half precision, as an integer: what is above is NaN."""
    return 0x7F80 if dtype == torch.bfloat16 else 0x7C00


def _array(slab: Tensor) -> np.ndarray:
    """The slab as a numpy array of float32, float64 or int16, whose order and equality are those of the slab."""
    return _view(slab.float() if slab.dtype in (torch.bfloat16, torch.float16) else slab)


def has_nan(slab: Tensor) -> bool:
    """Whether any element is NaN: the maximum is, then."""
    if slab.numel() == 0:
        return False
    return bool(np.isnan(_array(slab).max())) if slab.device.type == "cpu" else bool(slab.max().isnan())


def ordered(values: Tensor) -> Tensor:
    """The values in rising order."""
    return torch.from_numpy(np.sort(_view(values))) if values.device.type == "cpu" else values.sort().values


def _limit(x: np.ndarray, value: float) -> np.floating | np.int16:
    """The value to compare an array with; in the array's own precision unless that would round it."""
    if x.dtype == np.int16:  # infinity, when no bound is known, is beyond all of them here too
        return np.int16(min(max(value, -1), 0x7FFF))
    own = x.dtype.type(value)
    return own if float(own) == value else np.float64(value)


def _exact(slab: Tensor, *values: float) -> Tensor:
    """The slab in a precision in which none of the values is rounded when it is compared with them."""
    return slab if all(torch.tensor(v, dtype=slab.dtype).item() == v for v in values) else slab.double()


def _count(flags: np.ndarray) -> int:
    return int(np.count_nonzero(flags))


def tally(slab: Tensor, low: float, high: float) -> tuple[int, int, Tensor]:
    """How many are at most low, how many above it, and the values strictly between low and high. NaN is in none."""
    if slab.device.type == "cpu":
        x = _array(slab)
        flags, above = (_scratch(use, x.shape, np.bool_) for use in ("flags", "above"))
        upto = _count(np.less_equal(x, _limit(x, low), out=flags))
        number = _count(np.greater(x, _limit(x, low), out=above))
        between = x[np.logical_and(above, np.less(x, _limit(x, high), out=flags), out=flags)]
        return upto, number, torch.from_numpy(between)
    own, slab = slab, _exact(slab, low, high)
    upto, above = torch.stack([(slab <= low).sum(), (slab > low).sum()]).tolist()
    return upto, above, own[(slab > low) & (slab < high)]


def count_equal(slab: Tensor, value: float) -> int:
    """How many elements equal the value."""
    if slab.device.type == "cpu":
        x = _array(slab)
        return _count(x == _limit(x, value))
    return int((_exact(slab, value) == value).sum())


def kth(values: Tensor, k: int) -> float:
    """The k-th smallest of the values, counted from 1."""
    if values.device.type == "cpu":
        return float(np.partition(values.numpy(), k - 1)[k - 1])
    return float(ordered(values)[k - 1])


def keep_above(slab: Tensor, threshold: float, kept: Tensor, *, ties: bool) -> None:
    """Marks in `kept` what is above the threshold, and with `ties` what equals it."""
    if slab.device.type == "cpu":
        x = _array(slab)
        (np.greater_equal if ties else np.greater)(x, _limit(x, threshold), out=kept.numpy())
    else:
        (torch.ge if ties else torch.gt)(_exact(slab, threshold), threshold, out=kept)


def drop_ties(slab: Tensor, threshold: float, kept: Tensor, goes: int) -> int:
    """Unmarks the first `goes` of those that equal the threshold; gives how many are still to go after this slab."""
    number = count_equal(slab, threshold)
    if number <= goes:  # all of them, which are many when pruned weights score zero
        keep_above(slab, threshold, kept, ties=False)
        return goes - number
    if slab.device.type == "cpu":
        x = _array(slab)
        equal = torch.from_numpy(np.flatnonzero(x == _limit(x, threshold)))
    else:
        equal = (_exact(slab, threshold) == threshold).reshape(-1).nonzero().reshape(-1)
    kept.view(-1)[equal[:goes]] = False
    return 0


def fold(matrix: Tensor, height: int, width: int, means: Tensor) -> None:
    """The mean over each block of a matrix, smaller blocks at its edges, into `means`; added up in float64."""
    on_cpu = matrix.device.type == "cpu"
    x: Any = _array(matrix) if on_cpu else matrix
    out: Any = means.numpy() if on_cpu else means
    for top, bottom, h in runs(matrix.shape[0], height):
        for left, right, w in runs(matrix.shape[1], width):
            grid = out[top // height :, left // width :][: (bottom - top) // h, : (right - left) // w]
            (_means if on_cpu else _torch_means)(x[top:bottom, left:right], h, w, grid)


def runs(size: int, run: int) -> list[tuple[int, int, int]]:
    """(begin, end, length) of the whole runs along an axis, together, and of the shorter one at its end, if any."""
    whole = size - size % run
    return [part for part in ((0, whole, run), (whole, size, size - whole)) if part[0] < part[1]]


def _torch_means(matrix: Tensor, height: int, width: int, out: Tensor) -> None:
    total = matrix.unflatten(0, (-1, height)).sum(1, dtype=torch.float64).unflatten(1, (-1, width)).sum(2)
    out.copy_(total.div_(height * width))


def _means(x: np.ndarray, height: int, width: int, out: np.ndarray) -> None:
    """The means of blocks that divide the matrix evenly, a few rows at a time so that sums stay in the cache."""
    step = max(_FOLD_SLAB // x.shape[1] // height, 1) * height
    for first in range(0, len(x), step):
        some = x[first : first + step]
        wide = _scratch("wide", some.shape, np.float64)
        np.copyto(wide, some)
        if height > 1:
            shape = (len(some) // height, some.shape[1])
            wide = np.add.reduce(wide.reshape(shape[0], height, shape[1]), axis=1, out=_scratch("rows", shape, np.float64))
        part = out[first // height : -(-(first + step) // height)]
        np.divide(_sum_runs(wide, width), height * width, out=part, casting="same_kind")


def _sum_runs(wide: np.ndarray, run: int) -> np.ndarray:
    """The sums of neighbours in rows. numpy adds long rows fast and short runs slowly, so runs are halved again and again,
    the first time as the real and imaginary parts of complex numbers, which lie side by side."""
    rows, cols = wide.shape
    if run % 2:
        return wide.reshape(rows, cols // run, run).sum(-1)
    pairs, uses = wide.view(np.complex128).reshape(rows, cols // run, run // 2), itertools.cycle(("halves", "quarters"))
    while pairs.shape[2] > 1 and pairs.shape[2] % 2 == 0:
        half = _scratch(next(uses), (rows, cols // run, pairs.shape[2] // 2), np.complex128)
        pairs = np.add(pairs[..., 0::2], pairs[..., 1::2], out=half)
    total = pairs[..., 0] if pairs.shape[2] == 1 else pairs.sum(-1)
    return np.add(np.real(total), np.imag(total), out=_scratch("sums", total.shape, np.float64))


def spread(kept: Tensor, height: int, width: int, shape: tuple[int, int]) -> Tensor:
    """A grid of units to the mask of elements that it stands for; units at the edges may be smaller."""
    mask = torch.empty(shape, dtype=torch.bool, device=kept.device)
    if kept.device.type == "cpu" and height == 1 and shape[1] % width == 0:
        _repeat(kept.numpy(), width, mask.numpy())
    else:
        _spread(kept, height, width, mask, unite=False)
    return mask


def unite_(mask: Tensor, kept: Tensor, height: int, width: int) -> None:
    """Marks in `mask` the blocks that `kept` marks, too."""
    _spread(kept, height, width, mask, unite=True)


def _spread(kept: Tensor, height: int, width: int, mask: Tensor, *, unite: bool) -> None:
    if mask.device.type == "cpu":
        wide = np.empty((kept.shape[0], kept.shape[1] * width), np.bool_)
        _repeat(kept.numpy(), width, wide)
        for top, bottom, h in runs(mask.shape[0], height):
            out = mask.numpy()[top:bottom].reshape((bottom - top) // h, h, mask.shape[1])
            part = wide[top // height :, None, : mask.shape[1]][: len(out)]
            np.logical_or(out, part, out=out) if unite else np.copyto(out, part)
    elif mask.device.type == "cuda" and _triton_installed() and kept.is_contiguous() and mask.is_contiguous():
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
    """Every column `times` times over."""
    size = next(size for size in (8, 4, 2, 1) if times % size == 0)
    if size == 1:
        np.copyto(out, np.repeat(kept, times, axis=1))
    else:  # one machine word holds that many
        word = _WORDS[size]
        ones, words = word(sum(1 << 8 * i for i in range(size))), out.view(word)
        for i in range(times // size):
            np.multiply(kept.view(np.uint8), ones, out=words[:, i :: times // size], dtype=word)


def write_(out: Tensor, kept: Tensor) -> None:
    """Zeros and ones of the dtype of `out`, where `kept` is False and True."""
    fits = out.device.type == "cuda" and out.is_contiguous() and kept.is_contiguous()
    if fits and out.dtype in _KERNEL_DTYPES and _triton_installed():
        from . import cuda

        cuda.write_(out, kept)
    else:
        out.copy_(kept.view(torch.int8))  # int8, because torch converts it faster than bool


def keep_rows(groups: Tensor, drop: int, kept: Tensor) -> None:
    """Each row is a pool of which the `drop` lowest go, the lowest index first among equals; the rest is marked in `kept`."""
    size = groups.shape[1]
    if drop <= 0 or drop >= size:
        kept.fill_(drop <= 0)
    elif groups.device.type == "cpu":
        x, out = _array(groups), kept.numpy()
        _duel(np.ascontiguousarray(x.T), drop, out) if size <= 16 else _partition(x, drop, out)
    else:
        kept.fill_(True).scatter_(1, groups.argsort(dim=1, stable=True)[:, :drop], False)


def _duel(columns: np.ndarray, drop: int, out: np.ndarray) -> None:
    """Rank by pairwise comparison, one column of all pools at a time: for small pools."""
    wins = np.repeat(np.arange(len(columns), dtype=np.uint8)[:, None], columns.shape[1], 1)  # a later one beats its equals
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


class NaNFound(ValueError):
    """A kernel met NaN in the tensor at this position."""

    def __init__(self, position: int):
        super().__init__(f"NaN in tensor {position}")
        self.position = position


def _triton(weights: Sequence[Tensor]) -> bool:
    """Whether the Triton kernels can read these tensors."""
    fits = all(w.device.type == "cuda" and w.is_contiguous() and w.dtype in _KERNEL_DTYPES for w in weights)
    return fits and len({w.device for w in weights}) == 1 and _triton_installed()


@functools.cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


_KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def keep_magnitudes(
    weights: Sequence[tuple[Tensor, Tensor | None]], sample: Callable[[], Tensor], drop: int
) -> list[Tensor] | None:
    """The masks of a pool of magnitudes in two passes, where there is a kernel for it; None where there is not.

    Each weight comes with the mask it is multiplied with, or None.
    """
    if not 0 < drop < sum(weight.numel() for weight, _ in weights):
        return None
    if not _triton([tensor for pair in weights for tensor in pair if tensor is not None]):
        return None
    from . import cuda

    return cuda.keep_magnitudes(weights, sample(), drop)


def fold_magnitudes(weight: Tensor, under: Tensor | None, power: float, height: int, width: int, means: Tensor) -> bool:
    """The mean magnitude of each block in one pass into `means`, where there is a kernel for it; False where there is not."""
    if power not in (1, 2) or width > 1 << 14 or not _triton([weight] if under is None else [weight, under]):
        return False
    from . import cuda

    cuda.fold_magnitudes(weight, under, int(power), height, width, means)
    return True


def keep_groups(weight: Tensor, size: int, drop: int, kept: Tensor, under: Tensor | None = None) -> bool:
    """n:m of magnitudes, of `weight * under` where that is given, in one pass into `kept`; False where there is no kernel."""
    tensors = [weight] if under is None else [weight, under]
    if weight.shape[1] % size or not 0 < drop < size or not all(tensor.is_contiguous() for tensor in tensors):
        return False
    if weight.device.type == "cpu" and size in _WORDS:
        _keep_groups(weight, under, size, drop, kept)
        return True
    if size in (2, 4, 8, 16) and _triton(tensors):
        from . import cuda

        cuda.keep_groups(weight, under, size, drop, kept)
        return True
    return False


_WORDS: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}


def _keep_groups(weight: Tensor, under: Tensor | None, size: int, drop: int, kept: Tensor) -> None:
    """Every element is compared with the one 1, 2, ... places on, all at once, and without moving any.

    Magnitudes compare as the integers that their bits are. The outcomes of a group lie side by side, so they are one machine
    word, in which wins are added up byte by byte: an element wins against its equals to the left.
    """
    integer = _BITS[weight.element_size()]
    flat, mask, out = weight.reshape(-1), None if under is None else under.reshape(-1), kept.numpy().reshape(-1)
    infinity = int(torch.tensor(torch.inf, dtype=weight.dtype).view(integer))
    x = _view(flat.view(integer))
    word, ones = _WORDS[size], sum(1 << 8 * i for i in range(size))
    # As if each beat all to its left and none to its right, and so many more that `drop` wins carry into bit log2(size).
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
                _product(flat[first : first + n], mask[first : first + n], products[:n])
                values = m
            if np.bitwise_and(values, sign, out=m).max() > infinity:
                raise NaNFound(0)
            for shift in range(1, size):
                np.greater(m[:-shift], m[shift:], out=beats[: n - shift])
                np.bitwise_and(won, word(ones >> 8 * shift), out=won)  # within a group only
                swing = word((1 - (1 << 8 * shift)) % (1 << 8 * size))  # a win here is one less to the right
                np.add(start if shift == 1 else wins, np.multiply(won, swing, out=swings[: n // size]), out=wins)
            np.right_shift(wins, word(size.bit_length() - 1), out=wins)
            np.bitwise_and(wins, word(ones), out=wins)

    part = -(-x.size // (2 * torch.get_num_threads()) // size) * size
    part = max(part, _GROUP_SLAB)
    in_threads(lambda begin: work(begin, min(begin + part, x.size)), range(0, x.size, part))


_GROUP_SLAB = 1 << 19
_FOLD_SLAB = 1 << 17
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_ZERO_CHUNK = 1 << 19


def zero_(weight: Tensor, mask: Tensor) -> None:
    """Writes +0 wherever the mask is False, also over NaN and infinity, and leaves every other bit alone.

    Multiplying the bits as integers does that in one vectorised pass; chunks keep the widened mask in the cache.
    """
    bits = weight.view(_BITS[weight.element_size()])
    if not (weight.is_contiguous() and mask.is_contiguous()):
        bits.mul_(mask)
    elif weight.device.type == "cuda" and _triton_installed():
        from . import cuda

        cuda.zero_(bits, mask)
    elif weight.device.type == "cpu":
        for part, kept in zip(bits.view(-1).split(_ZERO_CHUNK), mask.view(-1).split(_ZERO_CHUNK), strict=True):
            part.mul_(kept)
    else:
        bits.mul_(mask)
