"""Shared helpers of the kernels: tensors as NumPy arrays, reusable memory, threads, and which kernels can be used."""

from __future__ import annotations

import functools
import importlib.util
import math
import mmap
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

Item = TypeVar("Item")
Result = TypeVar("Result")
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
WORDS: dict[int, type[np.unsignedinteger]] = {2: np.uint16, 4: np.uint32, 8: np.uint64}
LARGE = 1 << 20  # number of elements above which compiled loops are faster
ENOUGH = 1 << 28  # number of elements processed after which loading the compiled loops, about a second, pays off
PART = 1 << 18  # elements that one thread processes at a time
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def launch_options(warps: int) -> dict[str, int | bool]:
    """Triton's options for a launch. Its default for fusing products with sums depends on its version, and 3.9 warns of it."""
    return {"num_warps": warps, "enable_fp_fusion": True}


def in_threads(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Calls `work` for every item on as many threads as torch uses, and returns the results in order.

    Threads help because NumPy and the compiled loops release the GIL.
    """
    results: dict[int, Result] = {}
    left = deque(enumerate(items))

    def some() -> None:
        while left:
            try:
                i, item = left.popleft()
            except IndexError:  # another thread was faster
                return
            results[i] = work(item)

    others = min(torch.get_num_threads(), len(items)) - 1
    with ThreadPoolExecutor(max(others, 1)) as pool:  # starts threads only when work is submitted
        tasks = [pool.submit(some) for _ in range(others)]
        some()
    for task in tasks:
        task.result()  # re-raises an error from the thread
    return [results[i] for i in range(len(items))]


class _Buffers(threading.local):
    def __init__(self) -> None:
        self.of: dict[str, np.ndarray] = {}


_buffers = _Buffers()


def workspace(use: str, shape: tuple[int, ...], dtype: np.typing.DTypeLike) -> np.ndarray:
    """Returns memory that this thread reuses for the purpose `use`, because new pages would take longer than the arithmetic."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if use not in _buffers.of or _buffers.of[use].size < size:
        _buffers.of[use] = np.empty(size, np.uint8)
    return _buffers.of[use][:size].view(dtype).reshape(shape)


_HUGE = 1 << 21  # bytes of a huge page


def new_tensor(shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """Returns an uninitialized contiguous tensor for a result, on Linux in huge pages if it is large.

    Writing to new memory takes several times as long in pages of 4 KiB, because the system has to provide each of them. The
    storage cannot be resized.
    """
    shape = tuple(shape)
    plain = torch.device(device).type == "cpu" and type(torch.empty(0, device=device)) is Tensor  # not of a fake mode
    memory = _huge_pages(math.prod(shape) * dtype.itemsize) if plain else None
    return torch.empty(shape, dtype=dtype, device=device) if memory is None else memory.view(dtype).view(shape)


def in_huge_pages(tensor: Tensor) -> Tensor:
    """Returns a copy of a large tensor in huge pages, which a CPU reads faster, or the tensor itself if it is not large."""
    plain = type(tensor) is Tensor and tensor.device.type == "cpu" and tensor.layout == torch.strided and tensor.is_contiguous()
    memory = _huge_pages(tensor.nbytes, waste=1.0) if plain else None
    return tensor if memory is None else memory.view(tensor.dtype).view(tensor.shape).copy_(tensor)


def _huge_pages(size: int, waste: float = 0.125) -> Tensor | None:
    """Returns new memory that begins at a huge page, or None if it would be small or the system has no huge pages.

    Its end is in a huge page, too, unless that would be more than a fraction `waste` of the memory too large.
    """
    if size < _HUGE or not _system_has_huge_pages():
        return None
    whole = -(-size // _HUGE) * _HUGE
    try:
        memory = mmap.mmap(-1, whole + _HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        first = -torch.frombuffer(memory, dtype=torch.uint8).data_ptr() % _HUGE
        memory.madvise(mmap.MADV_HUGEPAGE, first, whole if whole - size <= waste * size else size // _HUGE * _HUGE)
    except OSError:  # too little memory, or a kernel that was built without huge pages
        return None
    return torch.frombuffer(memory, dtype=torch.uint8, offset=first, count=size)


@functools.cache
def _system_has_huge_pages() -> bool:
    try:
        return "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False


class Magnitudes(NamedTuple):
    """The magnitudes of a matrix, or of its product with `under`, which compiled loops compute on the fly."""

    matrix: Tensor
    under: Tensor | None

    @property
    def arrays(self) -> tuple[np.ndarray, np.ndarray | None]:
        return view(self.matrix).reshape(-1), None if self.under is None else view(self.under).reshape(-1)


def compilable(*tensors: Tensor | None) -> bool:
    """Returns True if the compiled loops can read these tensors and are worth loading for the first one."""
    first, *_ = there = [tensor for tensor in tensors if tensor is not None]
    fits = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype == first.dtype for t in there)
    return fits and first.dtype in (torch.float32, torch.float64) and worth_compiling(first.numel())


def worth_compiling(elements: int) -> bool:
    """Returns True for many elements once this process has processed enough elements to make loading the loops pay off."""
    if elements < LARGE or not numba_installed():
        return False
    _work.elements += elements
    return _work.elements >= ENOUGH


def compile_now() -> None:
    """Makes this process use the compiled loops for all large tensors from now on."""
    _work.elements = ENOUGH


class _Work:
    elements = 0  # of large tensors that this process has processed


_work = _Work()


def view(slab: Tensor) -> np.ndarray:
    """Returns a NumPy view of the tensor's memory.

    `Tensor.numpy` would forbid resizing the storage, which sharding frameworks do.
    """
    return np.from_dlpack(slab.detach())


def array(slab: Tensor) -> np.ndarray:
    """Returns the tensor as a NumPy array of float32, float64 or int16 that compares like the tensor."""
    return view(slab.float() if slab.dtype in (torch.bfloat16, torch.float16) else slab)


def product(slab: Tensor, under: Tensor, out: Tensor | None = None) -> Tensor:
    """Returns slab * under, with NumPy where possible, because torch would start threads inside a thread."""
    if slab.device.type == "cpu" and slab.dtype == under.dtype and slab.dtype in (torch.float32, torch.float64):
        return torch.from_numpy(np.multiply(view(slab), view(under), out=None if out is None else view(out)))
    return torch.mul(slab, under, out=out)


def infinity_bits(dtype: torch.dtype) -> int:
    """Returns the bit pattern of infinity in half precision as an integer. Larger ones are NaN."""
    return 0x7F80 if dtype == torch.bfloat16 else 0x7C00


class NaNFound(ValueError):
    """Raised by a kernel for NaN in the tensor at `position` of its inputs."""

    def __init__(self, position: int):
        super().__init__(f"NaN in tensor {position}")
        self.position = position


def readable_by_triton(weights: Sequence[Tensor]) -> bool:
    """Returns True if the Triton kernels can read these tensors."""
    fits = all(w.device.type == "cuda" and w.is_contiguous() and w.dtype in KERNEL_DTYPES for w in weights)
    return fits and len({w.device for w in weights}) == 1 and triton_installed()


@functools.cache
def triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@functools.cache
def numba_installed() -> bool:
    return importlib.util.find_spec("numba") is not None
