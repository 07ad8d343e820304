"""The arithmetic of ranking: NumPy (and numba for large tensors) on the CPU, torch on other devices, Triton on NVIDIA GPUs.

NumPy compares, counts and partitions slabs that fit the cache in one vectorized pass, without compiling anything. Every
function gives the same result on every device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .arrays import (
    BITS,
    PART,
    Magnitudes,
    NaNFound,
    array,
    compilable,
    compile_now,
    in_huge_pages,
    in_threads,
    infinity_bits,
    new_tensor,
    readable_by_triton,
    triton_installed,
    view,
    workspace,
    worth_compiling,
)  # fmt: skip
from .blocks import WIDEST_BLOCK, fold, fold_magnitudes, runs, spread_, unite_
from .groups import keep_groups, keep_rows

__all__ = [
    "BITS", "LARGEST_STEP", "PART", "WIDEST_BLOCK", "Magnitudes", "NaNFound", "compilable", "compile_now", "count_digits",
    "count_equal", "count_zeros", "drop_ties", "fold", "fold_magnitudes", "gpu_steps", "has_nan",
    "in_huge_pages", "in_threads", "infinity_bits",
    "keep_above", "keep_groups", "keep_magnitudes", "keep_rows", "kth", "magnitude", "magnitude_bits", "new_tensor",
    "ordered", "readable_by_triton", "runs", "slab_elements", "spread_", "tally", "unite_", "zero_",
]  # fmt: skip

LARGEST_STEP = 1 << 28  # most elements of a mask that the kernels in `steps` can write


def slab_elements(device: torch.device) -> int:
    """Returns how many elements to process at once: what fits the caches of a CPU, or keeps a GPU busy."""
    return 1 << 18 if device.type == "cpu" else 1 << 26


def magnitude(slab: Tensor, under: Tensor | None = None, power: float = 1, *, scratch: bool = False) -> Tensor:
    """Returns |slab| ** power, or |slab * under| ** power.

    Power 1 is exact; other powers of half precision are computed in float32. On the CPU, bfloat16 is returned as float32. With
    `scratch`, the next call overwrites the result.
    """
    if slab.device.type != "cpu" or slab.dtype == torch.float16:
        slab = slab if under is None else slab * under
        slab = slab.float() if power != 1 and slab.dtype in (torch.float16, torch.bfloat16) else slab
        return slab.abs() if power == 1 else slab.abs().pow_(power)
    with np.errstate(over="ignore", under="ignore"):  # squares may overflow to infinity or underflow to zero
        return _numpy_magnitude(slab, under, power, scratch)


def _numpy_magnitude(slab: Tensor, under: Tensor | None, power: float, scratch: bool) -> Tensor:
    wide = np.dtype(np.float64 if slab.dtype == torch.float64 else np.float32)
    out = workspace("magnitude", tuple(slab.shape), wide) if scratch else np.empty(slab.shape, wide)
    if slab.dtype == torch.bfloat16:  # the upper half of a float32; the shifts clear its sign
        bits = view((slab if under is None else slab * under).view(torch.int16))
        words = np.left_shift(bits, np.uint32(17), dtype=np.uint32, casting="unsafe", out=out.view(np.uint32))
        np.right_shift(words, np.uint32(1), out=words)
    elif under is not None:
        np.abs(np.multiply(view(slab), view(under), out=out, casting="unsafe"), out=out)
    elif power == 2:
        return torch.from_numpy(np.square(view(slab), out=out))
    else:
        np.abs(view(slab), out=out)
    return torch.from_numpy(out if power == 1 else np.square(out, out=out) if power == 2 else np.power(out, power, out=out))


def magnitude_bits(slab: Tensor) -> Tensor:
    """Returns magnitudes in half precision as their bit patterns: integers in the same order, with half the bytes."""
    bits = view(slab.view(torch.int16)) & np.int16(0x7FFF)
    if bits.size and bits.max() > infinity_bits(slab.dtype):
        raise NaNFound(0)
    return torch.from_numpy(bits)


def has_nan(slab: Tensor) -> bool:
    """Returns True if any element is NaN. The maximum is NaN in that case."""
    if slab.numel() == 0:
        return False
    return bool(np.isnan(array(slab).max())) if slab.device.type == "cpu" else bool(slab.max().isnan())


def ordered(values: Tensor) -> Tensor:
    """Returns the values sorted in ascending order."""
    return torch.from_numpy(np.sort(view(values))) if values.device.type == "cpu" else values.sort().values


def _limit(x: np.ndarray, value: float) -> np.floating | np.int16:
    """Returns the value to compare an array with, in the array's precision unless that would round it."""
    if x.dtype == np.int16:  # infinity, for an unknown bound, must stay beyond all integers
        return np.int16(min(max(value, -1), 0x7FFF))
    own = x.dtype.type(value)
    return own if float(own) == value else np.float64(value)


def _exact(slab: Tensor, *values: float) -> Tensor:
    """Returns the slab in a precision in which it can be compared with these values without rounding them."""
    return slab if all(torch.tensor(v, dtype=slab.dtype).item() == v for v in values) else slab.double()


def _count(flags: np.ndarray) -> int:
    return int(np.count_nonzero(flags))


def tally(slab: Tensor | Magnitudes, low: float, high: float, kept: Tensor) -> tuple[int, int, Tensor, Tensor]:
    """Writes to `kept` which elements are above `low`, and returns how many are at most `low`, and how many are above it.

    Those strictly between low and high follow: their values, and their indices in the slab. NaN is counted nowhere.
    """
    if isinstance(slab, Magnitudes):
        from . import compiled

        x, under = slab.arrays
        values, places = workspace("values", (x.size + 1,), x.dtype), workspace("places", (x.size + 1,), np.int32)
        out = kept.numpy().reshape(-1)
        upto, above, number = compiled.tally(x, under, _limit(x, low), _limit(x, high), out, values, places)
        return upto, above, torch.from_numpy(values[:number].copy()), torch.from_numpy(places[:number].astype(np.int64))
    if slab.device.type == "cpu":
        x, out = array(slab), kept.numpy()
        flags = workspace("flags", x.shape, np.bool_)
        upto = _count(np.less_equal(x, _limit(x, low), out=flags))
        above = _count(np.greater(x, _limit(x, low), out=out))
        places = np.flatnonzero(np.logical_and(out, np.less(x, _limit(x, high), out=flags), out=flags))
        return upto, above, torch.from_numpy(x.reshape(-1)[places]), torch.from_numpy(places)
    own, slab = slab, _exact(slab, low, high)
    torch.gt(slab, low, out=kept)
    upto, above = torch.stack([(slab <= low).sum(), kept.sum()]).tolist()
    places = (kept & (slab < high)).view(-1).nonzero().view(-1)
    return upto, above, own.reshape(-1)[places], places


def count_equal(slab: Tensor | Magnitudes, value: float) -> int:
    """Returns how many elements equal the value."""
    if isinstance(slab, Magnitudes):
        from . import compiled

        x, under = slab.arrays
        return compiled.count_equal(x, under, _limit(x, value))
    if slab.device.type == "cpu":
        x = array(slab)
        return _count(x == _limit(x, value))
    return int((_exact(slab, value) == value).sum())


def count_digits(bits: np.ndarray, shift: int, number: int) -> np.ndarray:
    """Returns how many integers have each of `number` values, a power of two, of the digit that begins at the bit `shift`."""
    found = np.zeros(number, dtype=np.int64)
    if worth_compiling(bits.size):
        from . import compiled

        compiled.count_digits(bits, shift, found)
        return found
    for first in range(0, bits.size, PART):
        found += np.bincount((bits[first : first + PART] >> shift) & (number - 1), minlength=number)
    return found


def count_zeros(tensor: Tensor, among: Tensor | None = None) -> int:
    """Returns how many elements are zero, or how many of those where the mask `among` is True."""
    if among is not None or tensor.device.type != "cpu" or not tensor.is_contiguous():
        return _count_zeros(tensor, among)
    if tensor.dtype not in (torch.float32, torch.float64):
        return tensor.numel() - int(torch.count_nonzero(tensor))
    flat, loops = tensor.detach().view(-1), compilable(tensor)

    def work(first: int) -> int:
        part = flat[first : first + PART]
        if loops:
            return count_equal(Magnitudes(part, None), 0.0)
        return _count(np.equal(view(part), 0, out=workspace("flags", tuple(part.shape), np.bool_)))

    return sum(in_threads(work, range(0, flat.numel(), PART)))


def _count_zeros(tensor: Tensor, among: Tensor | None) -> int:
    """The same for any tensor, a part at a time: on a GPU, `torch.count_nonzero` needs eight bytes for each element."""
    rows = torch.atleast_1d(tensor.detach())
    step = max(slab_elements(tensor.device) * rows.shape[0] // max(rows.numel(), 1), 1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, rows.shape[0], step):
        zero = rows[first : first + step] == 0
        total += (zero if among is None else zero.logical_and_(among.view_as(rows)[first : first + step])).sum()
    return int(total)


def kth(values: Tensor, k: int) -> float:
    """Returns the k-th smallest value, counted from 1."""
    if values.device.type == "cpu":
        return float(np.partition(values.numpy(), k - 1)[k - 1])
    return float(ordered(values)[k - 1])


def keep_above(slab: Tensor | Magnitudes, threshold: float, kept: Tensor, *, ties: bool) -> None:
    """Writes to `kept` which elements are above the threshold (with `ties`, at or above)."""
    if isinstance(slab, Magnitudes):
        from . import compiled

        x, under = slab.arrays
        (compiled.keep_from if ties else compiled.keep_above)(x, under, _limit(x, threshold), kept.numpy().reshape(-1))
    elif slab.device.type == "cpu":
        x = array(slab)
        (np.greater_equal if ties else np.greater)(x, _limit(x, threshold), out=kept.numpy())
    else:
        (torch.ge if ties else torch.gt)(_exact(slab, threshold), threshold, out=kept)


def drop_ties(slab: Tensor, threshold: float, kept: Tensor, goes: int) -> int:
    """Clears `kept` for the first `goes` elements that equal the threshold. Returns how many are left for later slabs."""
    number = count_equal(slab, threshold)
    if number <= goes:  # all of them; there are many if pruned weights score zero
        keep_above(slab, threshold, kept, ties=False)
        return goes - number
    if slab.device.type == "cpu":
        x = array(slab)
        equal = torch.from_numpy(np.flatnonzero(x == _limit(x, threshold)))
    else:
        equal = (_exact(slab, threshold) == threshold).reshape(-1).nonzero().reshape(-1)
    kept.view(-1)[equal[:goes]] = False
    return 0


def keep_magnitudes(
    weights: Sequence[tuple[Tensor, Tensor | None]], sample: Callable[[], Tensor], drop: int
) -> list[Tensor] | None:
    """Returns the masks of a pool of magnitudes, computed in two passes, or None if no kernel supports it.

    Each weight comes with the mask that it is multiplied with, or None.
    """
    if not 0 < drop < sum(weight.numel() for weight, _ in weights):
        return None
    if not readable_by_triton([tensor for pair in weights for tensor in pair if tensor is not None]):
        return None
    from . import cuda

    return cuda.keep_magnitudes(weights, sample, drop)


_ZERO_CHUNK = 1 << 19


def zero_(weight: Tensor, mask: Tensor) -> None:
    """Writes +0 wherever the mask is False, also over NaN and infinity, and leaves all other elements unchanged.

    Multiplying the bits as integers does that in one vectorized pass; chunks keep the widened mask in the cache.
    """
    bits = weight.view(BITS[weight.element_size()])
    if not (weight.is_contiguous() and mask.is_contiguous()):
        bits.mul_(mask)
    elif weight.device.type == "cuda" and triton_installed():
        from . import cuda

        cuda.zero_(bits, mask)
    elif weight.device.type == "cpu":
        for part, kept in zip(bits.view(-1).split(_ZERO_CHUNK), mask.view(-1).split(_ZERO_CHUNK), strict=True):
            part.mul_(kept)
    else:
        bits.mul_(mask)


def gpu_steps() -> Any:
    """The module `kernels.steps`: whole sparsifier steps as CUDA graphs. It needs Triton, so it is imported when asked for."""
    from . import steps

    return steps
