"""What the GPU formats need, and what of it is there."""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

HALVES = (torch.bfloat16, torch.float16)


@cache
def missing(kind: str = "cuda") -> str | None:
    """Why the kernels cannot run on this kind of device; None if they can."""
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
    """The end of the sentence that no format fits a layer on a GPU."""
    reason = missing() or (f"the GPU formats are for bfloat16 and float16, not {dtype}" if dtype not in HALVES else "")
    return f": {reason}" if reason else ""


@cache
def kernels() -> Any:
    from . import triton_kernels

    return triton_kernels


def runs(x: Tensor, values: Tensor) -> bool:
    """Whether kernels can compute with these: the same half precision, both on the GPU."""
    return x.device.type == "cuda" and x.device == values.device and x.dtype == values.dtype in HALVES and missing() is None
