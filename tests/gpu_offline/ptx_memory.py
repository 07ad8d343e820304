"""The memory of an emulated launch: tensors, and shared memory that knows who wrote and read it."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

Array = np.ndarray


class Fault(Exception):
    """An access that is wrong whatever the results are."""


class Tensors:
    """The memory of the tensors that a kernel was given, and the local memory of all threads."""

    def __init__(self, tensors: Iterable[Any], local: int = 0) -> None:
        self.local = np.full(local, 0xDB, np.uint8)
        found = {(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors if t.numel()}
        found |= {(self.local.ctypes.data, local)} if local else set()
        self.starts = np.array(sorted(start for start, _ in found), np.uint64)
        sizes = [size for _, size in sorted(found)]
        self.bytes = [np.frombuffer((ctypes.c_uint8 * n).from_address(int(a)), np.uint8) for a, n in zip(self.starts, sizes)]

    def first_local(self, threads: int) -> Array:
        """The address of the local memory of each thread."""
        return (self.local.ctypes.data + np.arange(threads) * (len(self.local) // threads)).astype(np.uint64)

    def find(self, address: Array, width: int, text: str) -> Iterable[tuple[Array, int, Array]]:
        """Yields which accesses are in which tensor, and where. Raises Fault if one is in none."""
        if bool((address % np.uint64(width)).any()):
            raise Fault(f"misaligned address: {text}")
        which = np.searchsorted(self.starts, address, side="right") - 1
        for k in np.unique(which).tolist():
            mine = which == k
            at = (address[mine] - self.starts[k]).astype(np.int64) if k >= 0 else np.zeros(1, np.int64)
            if k < 0 or int(at.max()) + width > len(self.bytes[k]):
                raise Fault(f"address outside of all tensors: {text}")
            yield mine, k, at

    def load(self, address: Array, width: int, text: str) -> Array:
        out = np.empty((len(address), width), np.uint8)
        for mine, k, at in self.find(address, width, text):
            out[mine] = self.bytes[k][at[:, None] + np.arange(width)]
        return out

    def store(self, address: Array, values: Array, text: str) -> None:
        width = values.shape[1]
        for mine, k, at in self.find(address, width, text):
            self.bytes[k][at[:, None] + np.arange(width)] = values[mine]


class Shared:
    """The shared memory of all blocks, with a record of who wrote and read each byte, and after how many barriers."""

    NOBODY, SEVERAL = -1, -2

    def __init__(self, blocks: int, size: int, threads: int) -> None:
        self.data = np.full((blocks, size), 0xFF, np.uint8)
        self.size, self.threads = size, threads
        self.coming = np.zeros((blocks, size), bool)  # copies that have not been waited for
        self.barriers = np.zeros(blocks, np.int32)
        self.syncs = np.zeros((blocks, threads // 32), np.int32)  # of each warp
        self.wrote, self.read = (self._record(blocks, size) for _ in range(2))

    def _record(self, blocks: int, size: int) -> dict[str, Array]:
        names = ("thread", "warp", "barrier", "sync")
        return {name: np.full((blocks, size), self.NOBODY, np.int32) for name in names}

    def _clash(self, record: dict[str, Array], block: Array, at: Array, thread: Array) -> bool:
        """Returns True if another thread has done this since the last barrier that both have passed."""
        other, warp, mine = record["thread"][block, at], record["warp"][block, at], thread // 32
        synced = (warp == mine) & (self.syncs[block, mine] > record["sync"][block, at])
        passed = (self.barriers[block] > record["barrier"][block, at]) | synced
        return bool(((other != self.NOBODY) & (other != thread) & ~passed).any())

    def _note(self, record: dict[str, Array], block: Array, at: Array, thread: Array, *, join: bool) -> None:
        warp = thread // 32
        now = {"thread": thread, "warp": warp, "barrier": self.barriers[block], "sync": self.syncs[block, warp]}
        block, at = np.broadcast_arrays(block, at)
        if join:  # several may read the same byte
            before = record["barrier"][block, at] == now["barrier"]
            for name, own in (("thread", thread), ("warp", warp)):
                old = record[name][block, at]
                now[name] = np.where(before & (old != self.NOBODY) & (old != own), self.SEVERAL, own)
            for name in ("thread", "warp"):
                record[name][block, at] = now.pop(name)
            for name in ("thread", "warp"):  # readers of this same instruction
                own = np.broadcast_to(thread if name == "thread" else warp, at.shape)
                clash = (record[name][block, at] != own) & (record[name][block, at] >= 0)
                record[name][block[clash], at[clash]] = self.SEVERAL
        for name, value in now.items():
            record[name][block, at] = value

    def places(self, block: Array, address: Array, width: int, text: str) -> tuple[Array, Array]:
        if bool((address % width).any()):
            raise Fault(f"misaligned address in shared memory: {text}")
        if len(address) and (int(address.min()) < 0 or int(address.max()) + width > self.size):
            raise Fault(f"address outside of shared memory: {text}")
        return block[:, None], address.astype(np.int64)[:, None] + np.arange(width)

    def arrive(self, block: Array, address: Array, values: Array, thread: Array, text: str) -> None:
        """Stores what a copy has brought."""
        self.coming[block[:, None], address[:, None] + np.arange(values.shape[1])] = False
        self.store(block, address, values, thread, text)

    def load(
        self, block: Array, address: Array, width: int, thread: Array, text: str, *, written: bool = True, noted: bool = True
    ) -> Array:
        block, at = self.places(block, address, width, text)
        if bool(self.coming[block, at].any()):
            raise Fault(f"read of shared memory before its copy has arrived: {text}")
        if written and bool((self.wrote["thread"][block, at] == self.NOBODY).any()):
            raise Fault(f"read of shared memory that was never written: {text}")
        if self._clash(self.wrote, block, at, thread[:, None]):
            raise Fault(f"read of what another thread wrote, without a barrier: {text}")
        if noted:
            self._note(self.read, block, at, thread[:, None], join=True)
        return self.data[block, at]

    def store(self, block: Array, address: Array, values: Array, thread: Array, text: str, *, later: bool = False) -> None:
        block, at = self.places(block, address, values.shape[1], text)
        if bool(self.coming[block, at].any()):
            raise Fault(f"write to shared memory where a copy is under way: {text}")
        for record, what in ((self.wrote, "wrote"), (self.read, "reads")):
            if self._clash(record, block, at, thread[:, None]):
                raise Fault(f"write over what another thread {what}, without a barrier: {text}")
        self.data[block, at] = 0xFF if later else values
        self.coming[block, at] = later
        self._note(self.wrote, block, at, thread[:, None], join=False)
