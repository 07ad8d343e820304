"""Runs functions in processes of their own, each with a time limit."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from _zoo import quiet


def in_processes(
    calls: Mapping[str, tuple[Callable[..., Any], ...]], jobs: int, limit: float
) -> Iterator[tuple[str, Any, float]]:
    """(name, result, seconds) of each call (function, arguments), `jobs` at a time, as they end.

    The result is a sentence where there is none: "no answer after ..." or "the process died".
    """
    fork, waiting, running = multiprocessing.get_context("fork"), list(calls.items()), {}
    while waiting or running:
        while waiting and len(running) < jobs:
            name, call = waiting.pop(0)
            mine, theirs = fork.Pipe(duplex=False)
            process = fork.Process(target=_work, args=(theirs, *call))
            process.start()
            theirs.close()
            running[name] = (process, mine, time.monotonic())
        time.sleep(0.02)
        for name, (process, mine, begin) in list(running.items()):
            late = time.monotonic() - begin > limit
            if not (mine.poll() or late or not process.is_alive()):
                continue
            result: Any = f"no answer after {limit:g} s" if late else "the process died"
            if mine.poll():
                with contextlib.suppress(EOFError):
                    result = mine.recv()
            process.kill()
            process.join()
            del running[name]
            yield name, result, time.monotonic() - begin


def _work(pipe: Any, function: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    with quiet(), open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 2)
        pipe.send(function(*args))
