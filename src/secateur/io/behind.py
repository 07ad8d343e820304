"""Writes a file in another thread and, where the system allows it, past the page cache.

A copy of every byte into the page cache takes the processor longer than the disk takes to write it.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, BinaryIO

import torch

from .. import kernels

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

BLOCK = 1 << 22  # bytes that are written at once


@contextlib.contextmanager
def writing_behind(file: BinaryIO) -> Iterator[Callable[[Any], None]]:
    """A function that appends bytes to a new file.

    It copies them to one of two blocks, and waits only if the other block is not written yet. The file is whole after the
    `with`, and on the disk after an fsync.
    """
    file.flush()
    handle, (filling, other), used = file.fileno(), _two_blocks(), 0
    with ThreadPoolExecutor(1) as writer:
        running: list[Future[None]] = []

        def wait() -> None:
            if running:
                running.pop().result()  # re-raises an error, such as a full disk

        def write(data: Any) -> None:
            nonlocal filling, other, used
            data = memoryview(data)
            while data:
                number = min(len(data), BLOCK - used)
                filling[used : used + number] = data[:number]
                data, used = data[number:], used + number
                if used == BLOCK:
                    wait()
                    running.append(writer.submit(_write_block, handle, filling))
                    filling, other, used = other, filling, 0

        yield write
        wait()
        _write(handle, filling[:used])


def _two_blocks() -> tuple[memoryview, memoryview]:
    """Memory that begins at a page. In huge pages, where there are any, the disk takes larger requests."""
    memory = kernels.new_tensor((2 * BLOCK + mmap.PAGESIZE,), torch.uint8)
    begin = -memory.data_ptr() % mmap.PAGESIZE
    array: Any = memory.numpy()
    whole = memoryview(array)[begin : begin + 2 * BLOCK]
    return whole[:BLOCK], whole[BLOCK:]


def _write_block(handle: int, block: memoryview) -> None:
    """Writes a whole block past the page cache, or through it where the system or the disk refuses that."""
    if _set_direct(handle, True):
        try:
            block = block[os.write(handle, block) :]
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        finally:
            _set_direct(handle, False)  # the rest of a file is no whole number of sectors
    _write(handle, block)


def _write(handle: int, data: memoryview) -> None:
    while data:
        data = data[os.write(handle, data) :]


def _set_direct(handle: int, direct: bool) -> bool:
    """Says whether writes pass the page cache. Returns False if the system cannot do that for this file."""
    if fcntl is None or not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(handle, fcntl.F_GETFL)
    try:
        fcntl.fcntl(handle, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True
