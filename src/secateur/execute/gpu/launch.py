# pyright: reportMissingImports=false
"""Launches Triton kernels on the device and the current stream of their tensors, with little time on the host.

`kernel[grid](...)` takes several times as long as `F.linear`: it examines every argument and compares the globals that the
kernel names. Here the compiled kernel is kept for everything that Triton compiles for, and its launcher is called directly. The
launcher is not a public interface of Triton, so that other versions than those it was written for are called the ordinary way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor

DIRECT = (3, 5) <= tuple(map(int, triton.__version__.split(".")[:2])) <= (3, 9)
_READY: dict[Any, tuple[Any, Any, Any]] = {}  # launcher, function and metadata of each compiled kernel

_current_device = torch.cuda.current_device
_current_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


class Constants(tuple):
    """Constexprs that are made once and told apart by identity, so that a launch does not hash them."""

    __hash__ = object.__hash__  # type: ignore[assignment]
    __eq__ = object.__eq__


def launch(
    kernel: Any,
    grid: tuple[int, int],
    tensors: Sequence[Tensor],
    numbers: Sequence[int],
    constants: tuple[Any, ...],
    **options: Any,
) -> None:
    """Launches a kernel whose parameters are tensors, then integers, then constexprs. `options` are those of Triton."""
    device = tensors[0].get_device()
    if device != _current_device():  # Triton launches on the current device
        with torch.cuda.device(device):
            launch(kernel, grid, tensors, numbers, constants, **options)
        return
    pointers = [tensor.data_ptr() for tensor in tensors]
    # What Triton compiles for: dtypes, addresses and integers that 16 divides, integers that are one.
    key = (
        id(kernel), device, constants, *options.values(), *[tensor.dtype for tensor in tensors],
        *[pointer & 15 == 0 for pointer in pointers], *[(n == 1) + (n & 15 > 0) for n in numbers],
    )  # fmt: skip
    ready = _READY.get(key)
    if ready is None or _hooked(kernel):
        # The default of fusing products with sums depends on the version of Triton.
        compiled = kernel[grid](*tensors, *numbers, *constants, enable_fp_fusion=True, **options)
        if DIRECT:
            _READY[key] = compiled.run, compiled.function, compiled.packed_metadata
        return
    run, function, metadata = ready
    run(*grid, 1, _current_stream(device), function, metadata, None, None, None, *pointers, *numbers, *constants)


def _hooked(kernel: Any) -> bool:
    """Returns True if someone wants to be told of launches, such as a profiler."""
    told = triton.knobs.runtime
    first, last = told.launch_enter_hook, told.launch_exit_hook  # lists of functions, a function, or None
    return bool(kernel.pre_run_hooks or getattr(first, "calls", first) or getattr(last, "calls", last))
