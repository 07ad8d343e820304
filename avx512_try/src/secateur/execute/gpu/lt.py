"""cuSPARSELt, called directly with plans that are kept.

torch's own call makes a new plan each time, which takes the host longer than the GPU takes for a thousand tokens. The functions
and constants are those of NVIDIA's header, from version 0.6 on.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_float, c_int, c_int64, c_size_t, c_uint32, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor

FIRST_VERSION = 600
_ROW, _COLUMN, _PLAIN, _TRANSPOSED, _SUMS_FLOAT32 = 2, 1, 0, 1, 2
_BFLOAT16 = 14
_BIAS = 8  # the attribute of a product that holds the address of the bias
_PLANS: dict[tuple[Any, ...], Plan] = {}
_ROOMS: dict[tuple[int, int], Tensor] = {}


@cache
def library() -> Any:
    """The library, which torch has loaded; None where it is not there or too old."""
    if not torch.backends.cusparselt.is_available() or (torch.backends.cusparselt.version() or 0) < FIRST_VERSION:
        return None
    try:
        return ctypes.PyDLL("libcusparseLt.so.0")  # which keeps the lock: a handle is not for several threads at once
    except OSError:
        return None


class Opaque(ctypes.Structure):
    """Room for any of the library's structures, which differ in size from version to version."""

    _fields_ = (("data", ctypes.c_uint64 * 2048),)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuSPARSELt: {what} failed with status {status}")


@cache
def _handle(device: int) -> Opaque:
    handle = Opaque()
    _check(library().cusparseLtInit(byref(handle)), "the start")
    return handle


class Plan:
    """One product of given sizes: y [tokens, rows] = x [tokens, columns] times the packed matrix, transposed, plus the bias."""

    def __init__(self, rows: int, columns: int, tokens: int, bias: Tensor | None, device: int):
        lib, kind = library(), _BFLOAT16
        self.handle, self.plan = _handle(device), Opaque()
        self.sparse, self.dense, self.out, self.product, self.choice = (Opaque() for _ in range(5))
        h, sizes = byref(self.handle), (c_int64, c_int64, c_int64)
        matrix = [of(size) for of, size in zip(sizes, (rows, columns, columns))]
        inputs = [of(size) for of, size in zip(sizes, (tokens, columns, columns))]
        result = [of(size) for of, size in zip(sizes, (rows, tokens, rows))]
        align = c_uint32(16)
        _check(lib.cusparseLtStructuredDescriptorInit(h, byref(self.sparse), *matrix, align, kind, _ROW, 0), "the matrix")
        _check(lib.cusparseLtDenseDescriptorInit(h, byref(self.dense), *inputs, align, kind, _ROW), "the inputs")
        _check(lib.cusparseLtDenseDescriptorInit(h, byref(self.out), *result, align, kind, _COLUMN), "the result")
        parts = (byref(self.sparse), byref(self.dense), byref(self.out), byref(self.out))
        _check(
            lib.cusparseLtMatmulDescriptorInit(h, byref(self.product), _PLAIN, _TRANSPOSED, *parts, _SUMS_FLOAT32),
            "the product",
        )
        if bias is not None:
            address = c_void_p(bias.data_ptr())
            args = (h, byref(self.product), c_int(_BIAS), byref(address), c_size_t(8))
            _check(lib.cusparseLtMatmulDescSetAttribute(*args), "the bias")
        _check(lib.cusparseLtMatmulAlgSelectionInit(h, byref(self.choice), byref(self.product), 0), "the choice")
        _check(lib.cusparseLtMatmulPlanInit(h, byref(self.plan), byref(self.product), byref(self.choice)), "the plan")
        self.one, self.zero, self.size = c_float(1.0), c_float(0.0), c_size_t(0)
        self._measure_room()
        # Addresses as plain numbers, made once: a call should cost the host little.
        self.stream = c_void_p()
        self.before = tuple(ctypes.addressof(each) for each in (self.handle, self.plan, self.one))
        self.after, self.where = ctypes.addressof(self.zero), ctypes.addressof(self.stream)
        self.matmul = lib.cusparseLtMatmul
        self.matmul.argtypes = lib.cusparseLtMatmulSearch.argtypes = [c_void_p] * 10 + [c_int]

    def _measure_room(self) -> None:
        _check(library().cusparseLtMatmulGetWorkspace(byref(self.handle), byref(self.plan), byref(self.size)), "the workspace")

    def search(self, x: Tensor, packed: Tensor, y: Tensor) -> None:
        """Try the library's kernels on these tensors and keep the fastest."""
        self._call(library().cusparseLtMatmulSearch, x, packed, y)
        self._measure_room()

    def run(self, x: Tensor, packed: Tensor, y: Tensor) -> None:
        self._call(self.matmul, x, packed, y)

    def _call(self, function: Any, x: Tensor, packed: Tensor, y: Tensor) -> None:
        self.stream.value = stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        spare, out = self._room(x, stream), y.data_ptr()
        room = None if spare is None else spare.data_ptr()
        status = function(*self.before, packed.data_ptr(), x.data_ptr(), self.after, out, out, room, self.where, 1)
        _check(status, "the product")

    def _room(self, x: Tensor, stream: int) -> Tensor | None:
        """Memory to work in: one for each stream, whose calls follow each other; a graph gets its own."""
        size = self.size.value
        if not size or torch.cuda.is_current_stream_capturing():
            return x.new_empty(size, dtype=torch.uint8) if size else None
        held = _ROOMS.get((x.device.index, stream))
        if held is None or held.numel() < size:
            held = _ROOMS[x.device.index, stream] = x.new_empty(size, dtype=torch.uint8)
        return held


def needed(rows: int, columns: int) -> int:
    """Bytes that the library takes for a packed matrix of this size."""
    lib, matrix, size, more = library(), Opaque(), c_size_t(0), c_size_t(0)
    h = byref(_handle(torch.cuda.current_device()))
    sizes = (c_int64(rows), c_int64(columns), c_int64(columns), c_uint32(16))
    _check(lib.cusparseLtStructuredDescriptorInit(h, byref(matrix), *sizes, _BFLOAT16, _ROW, 0), "the matrix")
    _check(lib.cusparseLtSpMMACompressedSize2(h, byref(matrix), byref(size), byref(more)), "the size")
    return size.value


def product(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """x [tokens, columns], bfloat16, contiguous; `packed` as `torch._cslt_compress` gives it."""
    tokens, columns = x.shape
    y = torch.empty(tokens, rows, dtype=x.dtype, device=x.device)
    key = (rows, columns, tokens, x.device.index, 0 if bias is None else bias.data_ptr())
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= 512:
            _PLANS.clear()
        plan = Plan(rows, columns, tokens, bias, x.device.index or 0)
        if not torch.cuda.is_current_stream_capturing():
            plan.search(x, packed, y)
            _PLANS[key] = plan
    plan.run(x, packed, y)
    return y
