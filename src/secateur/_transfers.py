"""Copies between a CUDA device and the host that run beside the computation, each direction in a stream of its own.

A copy to the host begins when the work before it is done, and the work after it does not wait for it. A copy to the device
begins at once, or when its source has been filled by a copy to the host; work after it waits for it. On other devices the same
functions copy as torch does.
"""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import torch
from torch import Tensor

_AHEAD = 2  # pieces of work that may wait on a device: each holds memory there
_FILLED: dict[int, Any] = {}  # address of memory on the host -> the event after which a copy has filled it
_UNFINISHED: dict[int, deque[Any]] = {}  # device -> events at the end of pieces of work


@cache
def _streams(device: int) -> tuple[Any, Any]:
    """The streams of copies to the device, and to the host."""
    return torch.cuda.Stream(device), torch.cuda.Stream(device)


def to_host(tensor: Tensor) -> Tensor:
    """A copy on the host: pinned, and complete after `finish`, if the tensor is on a CUDA device.

    Nothing may write to the tensor until then.
    """
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True)
    host = torch.empty_like(tensor, device="cpu", pin_memory=True)
    device = tensor.get_device()
    out = _streams(device)[1]
    out.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(out):
        host.copy_(tensor, non_blocking=True)
        tensor.record_stream(out)  # its memory is not given away before the copy has read it
        _FILLED[host.untyped_storage().data_ptr()] = out.record_event()
    return host


def to_device(tensor: Tensor, device: torch.device, copy: bool = False) -> Tensor:
    """The tensor on a device; a copy in any case if asked for."""
    here = device.type == "cuda" and tensor.device.type == "cpu"
    plain = tensor.layout == torch.strided and not tensor.is_nested  # others have no memory of their own
    filled = _FILLED.get(tensor.untyped_storage().data_ptr()) if here and plain else None
    if filled is None:
        return tensor.to(device, non_blocking=True, copy=copy)
    current = torch.cuda.current_stream(device)
    into = _streams(current.device_index)[0]
    into.wait_event(filled)
    with torch.cuda.stream(into):
        there = tensor.to(device, non_blocking=True, copy=True)
    current.wait_stream(into)
    there.record_stream(current)
    return there


def finish(device: torch.device | None) -> None:
    """Waits for all copies from this device to the host."""
    if device is not None and device.type == "cuda":
        _streams(torch.cuda.current_stream(device).device_index)[1].synchronize()


def keep_pace(device: torch.device | None) -> None:
    """Marks the end of a piece of work on a device, and waits until few such pieces are unfinished there."""
    if device is None or device.type != "cuda":
        return
    current = torch.cuda.current_stream(device)
    unfinished = _UNFINISHED.setdefault(current.device_index, deque())
    unfinished.append(current.record_event())
    if len(unfinished) > _AHEAD:
        unfinished.popleft().synchronize()
