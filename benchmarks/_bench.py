"""Helpers shared by the benchmarks: a description of the machine, a clock, the bandwidth floor, a table."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch


def machine() -> str:
    """Returns processor, cores, threads, versions, and the current load of the machine."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    name = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    load = f"{os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else "unknown"
    return (
        f"{name}, {os.cpu_count()} cores, {torch.get_num_threads()} torch threads, torch {torch.__version__}, "
        f"Python {platform.python_version()}, load average {load}"
    )


def seconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def interleaved(*runs: Callable[[], Any], rounds: int, before: Callable[[], Any] = lambda: None) -> list[list[float]]:
    """Returns the seconds of each run in each round, in an order that rotates. `before` runs untimed before each."""
    times: list[list[float]] = [[] for _ in runs]
    for turn in range(rounds):
        for i in range(len(runs)):
            who = (i + turn) % len(runs)
            before()
            times[who].append(seconds(runs[who]))
    return times


def trim() -> None:
    """Makes malloc return to the system what it keeps from earlier calls, or the next call may have to do that."""
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "malloc_trim"):
        libc.malloc_trim(0)


def touch(size: int) -> None:
    """Takes and frees `size` bytes, because a virtual machine may have to ask its host for memory, which is not to be timed."""
    trim()
    private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}
    memory = mmap.mmap(-1, size, **private)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    torch.frombuffer(memory, dtype=torch.uint8).fill_(1)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def copy_bandwidth(megabytes: int = 256, rounds: int = 7) -> float:
    """Returns the bytes per second, read plus written, of a torch copy that is larger than the cache; the best of a few."""
    source = torch.ones(megabytes << 18)
    target = torch.empty_like(source)
    target.copy_(source)
    return 2 * source.nbytes / min(seconds(lambda: target.copy_(source)) for _ in range(rounds))


def in_fresh_process(script: str, *args: str) -> dict[str, Any]:
    """Runs `script part args` in a new interpreter and reads the JSON it prints last."""
    command = [sys.executable, script, *args]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return json.loads(out.splitlines()[-1])


class PeakMemory:
    """Peak extra resident memory of this process inside a `with`, in bytes."""

    def __enter__(self) -> PeakMemory:
        try:  # Linux lets a process reset its own high-water mark
            Path("/proc/self/clear_refs").write_text("5")
            self.exact = True
        except OSError:
            self.exact = False
        self.before = self._status("VmRSS")
        return self

    def __exit__(self, *_: object) -> None:
        peak = self._status("VmHWM") if self.exact else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        self.extra = peak - self.before

    @staticmethod
    def _status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))


def show(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A table: the first column to the left, the rest to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = (cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths, strict=True)))
        return "  ".join(cells).rstrip()

    print(f"\n{title}\n{line(header)}\n{'-' * len(line(header))}")
    print("\n".join(map(line, rows)), flush=True)


def duration(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{value * 1e3:.1f} ms" if value >= 1e-3 else f"{value * 1e6:.0f} us"


def verdict(holds: bool) -> str:
    return "met" if holds else "MISSED"
