"""Which requirements of the GPU formats this machine meets."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..formats import Use

HALVES = (torch.bfloat16, torch.float16)


@cache
def missing(kind: str = "cuda") -> str | None:
    """Returns why the kernels cannot run on this kind of device, or None if they can."""
    if kind != "cuda":
        return f"there are no kernels for {kind}"
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    if torch.version.hip is not None:
        return "the kernels are for NVIDIA GPUs"
    major, minor = torch.cuda.get_device_capability()
    if major < 8:
        return f"the kernels need compute capability 8.0, and this GPU has {major}.{minor}"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    return None


def why_none(dtype: torch.dtype) -> str:
    """Returns the reason why no format fits a layer on a GPU, after a colon, or an empty string."""
    reason = missing() or (f"the GPU formats are for bfloat16 and float16, not {dtype}" if dtype not in HALVES else "")
    return f": {reason}" if reason else ""


def suits(matrix: Tensor, use: Use) -> bool:
    """Returns True for a linear layer in half precision on a GPU that the kernels support."""
    return use.kind == "linear" and use.device == "cuda" and missing() is None and matrix.dtype in HALVES


@cache
def kernels() -> Any:
    from . import triton_kernels

    return triton_kernels


@cache
def staged_kernels() -> Any:
    from . import staged_kernels as found

    return found


@cache
def float8_kernels() -> Any:
    from . import float8_kernels as found

    return found


@cache
def row_kernels() -> Any:
    from . import row_kernels as found

    return found


def runs(x: Tensor, values: Tensor) -> bool:
    """Returns True if the kernels can compute with these tensors: both on one GPU and in the same half precision."""
    return x.device.type == "cuda" and x.device == values.device and x.dtype == values.dtype in HALVES and missing() is None
