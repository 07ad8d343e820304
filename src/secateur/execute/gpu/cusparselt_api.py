"""Calls cuSPARSELt directly through ctypes, with cached plans.

torch's own call creates a plan each time, which takes the host longer than the GPU needs for a thousand tokens. Functions and
constants are those of NVIDIA's header `cusparseLt.h`, version 0.6 and later.
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
_KINDS = {torch.bfloat16: 14, torch.float8_e4m3fn: 28}  # of the numbers in a matrix
_BIAS = 8  # the attribute of a product that holds the address of the bias
_PLANS: dict[tuple[Any, ...], MatmulPlan] = {}
_WORKSPACES: dict[tuple[int, int], Tensor] = {}


@cache
def library() -> Any:
    """Returns the library, which torch has loaded, or None if it is missing or too old."""
    if not torch.backends.cusparselt.is_available() or (torch.backends.cusparselt.version() or 0) < FIRST_VERSION:
        return None
    try:
        return ctypes.PyDLL("libcusparseLt.so.0")  # PyDLL keeps the GIL: two threads must not use a handle at once
    except OSError:
        return None


class Opaque(ctypes.Structure):
    """Memory for any of the library's structures, whose sizes differ between versions."""

    _fields_ = (("data", ctypes.c_uint64 * 2048),)


def _check(status: int, what: str) -> None:
    if status:
        raise RuntimeError(f"cuSPARSELt failed with status {status} while {what}")


@cache
def _handle(device: int) -> Opaque:
    handle = Opaque()
    with torch.cuda.device(device):  # the library initializes the current device
        _check(library().cusparseLtInit(byref(handle)), "initializing the library")
    return handle


class MatmulPlan:
    """The library's plan for one product of given sizes: y [tokens, rows] = x [tokens, columns] @ matrix.T + bias.

    `kind` is the dtype of x and of the matrix; y and the bias are bfloat16.
    """

    def __init__(self, rows: int, columns: int, tokens: int, bias: Tensor | None, device: int, kind: torch.dtype):
        lib, given, made = library(), _KINDS[kind], _KINDS[torch.bfloat16]
        self.handle, self.plan = _handle(device), Opaque()
        self.sparse, self.dense, self.out, self.product, self.choice = (Opaque() for _ in range(5))
        h, sizes = byref(self.handle), (c_int64, c_int64, c_int64)
        matrix = [of(size) for of, size in zip(sizes, (rows, columns, columns))]
        inputs = [of(size) for of, size in zip(sizes, (tokens, columns, columns))]
        result = [of(size) for of, size in zip(sizes, (rows, tokens, rows))]
        align = c_uint32(16)
        _check(
            lib.cusparseLtStructuredDescriptorInit(h, byref(self.sparse), *matrix, align, given, _ROW, 0),
            "describing the weight",
        )
        _check(lib.cusparseLtDenseDescriptorInit(h, byref(self.dense), *inputs, align, given, _ROW), "describing the inputs")
        _check(lib.cusparseLtDenseDescriptorInit(h, byref(self.out), *result, align, made, _COLUMN), "describing the result")
        parts = (byref(self.sparse), byref(self.dense), byref(self.out), byref(self.out))
        _check(
            lib.cusparseLtMatmulDescriptorInit(h, byref(self.product), _PLAIN, _TRANSPOSED, *parts, _SUMS_FLOAT32),
            "describing the product",
        )
        if bias is not None:
            address = c_void_p(bias.data_ptr())
            args = (h, byref(self.product), c_int(_BIAS), byref(address), c_size_t(8))
            _check(lib.cusparseLtMatmulDescSetAttribute(*args), "setting the bias")
        _check(lib.cusparseLtMatmulAlgSelectionInit(h, byref(self.choice), byref(self.product), 0), "selecting a kernel")
        _check(lib.cusparseLtMatmulPlanInit(h, byref(self.plan), byref(self.product), byref(self.choice)), "creating the plan")
        self.one, self.zero, self.size = c_float(1.0), c_float(0.0), c_size_t(0)
        self._query_workspace()
        # Addresses are computed once, to keep the host's work per call small.
        self.stream = c_void_p()
        self.before = ctypes.addressof(self.handle), ctypes.addressof(self.plan)
        self.alpha, self.after, self.where = map(ctypes.addressof, (self.one, self.zero, self.stream))
        self.matmul = lib.cusparseLtMatmul
        self.matmul.argtypes = lib.cusparseLtMatmulSearch.argtypes = [c_void_p] * 10 + [c_int]

    def _query_workspace(self) -> None:
        _check(
            library().cusparseLtMatmulGetWorkspace(byref(self.handle), byref(self.plan), byref(self.size)),
            "sizing the workspace",
        )

    def search(self, x: Tensor, packed: Tensor, y: Tensor) -> None:
        """Lets the library measure its kernels on these tensors and choose the fastest."""
        self._call(library().cusparseLtMatmulSearch, x, packed, y)
        self._query_workspace()

    def run(self, x: Tensor, packed: Tensor, y: Tensor) -> None:
        self._call(self.matmul, x, packed, y)

    def _call(self, function: Any, x: Tensor, packed: Tensor, y: Tensor) -> None:
        self.stream.value = stream = torch._C._cuda_getCurrentRawStream(x.device.index)
        memory, out = self._workspace(x, stream), y.data_ptr()
        workspace, given = None if memory is None else memory.data_ptr(), (packed.data_ptr(), x.data_ptr())
        status = function(*self.before, self.alpha, *given, self.after, out, out, workspace, self.where, 1)
        _check(status, "computing the product")

    def _workspace(self, x: Tensor, stream: int) -> Tensor | None:
        """Returns working memory. Calls on one stream run one after the other and share it; a CUDA graph gets its own."""
        size = self.size.value
        if not size or torch.cuda.is_current_stream_capturing():
            return x.new_empty(size, dtype=torch.uint8) if size else None
        held = _WORKSPACES.get((x.device.index, stream))
        if held is None or held.numel() < size:
            held = _WORKSPACES[x.device.index, stream] = x.new_empty(size, dtype=torch.uint8)
        return held


def needed(rows: int, columns: int, kind: torch.dtype) -> int:
    """Returns how many bytes the library needs for a packed matrix of this size and dtype."""
    lib, matrix, size, more = library(), Opaque(), c_size_t(0), c_size_t(0)
    h = byref(_handle(torch.cuda.current_device()))
    sizes = (c_int64(rows), c_int64(columns), c_int64(columns), c_uint32(16))
    _check(lib.cusparseLtStructuredDescriptorInit(h, byref(matrix), *sizes, _KINDS[kind], _ROW, 0), "describing the weight")
    _check(lib.cusparseLtSpMMACompressedSize2(h, byref(matrix), byref(size), byref(more)), "querying the packed size")
    return size.value


def product(x: Tensor, packed: Tensor, bias: Tensor | None, rows: int) -> Tensor:
    """Returns x @ matrix.T + bias in bfloat16, for a contiguous x [tokens, columns] in bfloat16 or float8.

    `packed` is the result of `torch._cslt_compress` for a matrix in the dtype of x.
    """
    if x.get_device() != torch.cuda.current_device():  # the library uses the current device
        with torch.cuda.device(x.device):
            return product(x, packed, bias, rows)
    tokens, columns = x.shape
    y = torch.empty(tokens, rows, dtype=torch.bfloat16, device=x.device)
    key = (rows, columns, tokens, x.device.index, 0 if bias is None else bias.data_ptr(), x.dtype)
    plan = _PLANS.get(key)
    if plan is None:
        if len(_PLANS) >= 512:
            _PLANS.clear()
        plan = MatmulPlan(rows, columns, tokens, bias, x.device.index or 0, x.dtype)
        if not torch.cuda.is_current_stream_capturing():
            plan.search(x, packed, y)
            _PLANS[key] = plan
    plan.run(x, packed, y)
    return y
