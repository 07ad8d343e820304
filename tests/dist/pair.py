"""Real processes that form a process group, kept between tests because starting them costs seconds."""

from __future__ import annotations

import os
import queue
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from where import BACKEND, DEVICE, moved

START = 200.0  # seconds in which the processes must have started, on a machine that is busy with other tests
PATIENCE = 240.0  # seconds; a busy machine is slow, and only a hang should end here


class Raised:
    """What a process answers when the function raised: the exception's type, and what it said."""

    def __init__(self, error: BaseException):
        self.type, self.text, self.trace = type(error).__name__, str(error), traceback.format_exc()

    def __repr__(self) -> str:
        return f"Raised({self.type}: {self.text})"


def _context() -> Any:
    """Starts processes from one that has imported torch already: importing it four times takes a busy machine a minute."""
    if "forkserver" not in mp.get_all_start_methods():
        return mp.get_context("spawn")
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed.fsdp", "torch.distributed.tensor.parallel", "secateur"])
    return context


class Pair:
    """`both(function, *args)` runs `function(rank, *args)` in all processes (two, or `world`) and gives their answers."""

    def __init__(self, folder: Path, world: int = 2):
        self._folder, self._started, self.world = folder, 0, world
        self._processes: list[Any] = []

    def _start(self) -> None:
        context = _context()
        self._started += 1
        meeting = (self._folder / f"meeting{self._started}").as_uri()
        self._questions = [context.Queue() for _ in range(self.world)]
        self._answers = [context.Queue() for _ in range(self.world)]
        self._processes = [
            context.Process(
                target=_serve, args=(rank, self.world, meeting, self._questions[rank], self._answers[rank]), daemon=True
            )
            for rank in range(self.world)
        ]
        for process in self._processes:
            process.start()
        for answers in self._answers:
            answers.get(timeout=START)  # they are there

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()
        self._processes = []

    def answers(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each process gave, or a Raised. A hang kills the processes and fails the test."""
        if not self._processes:
            self._start()
        args = moved(args, "cpu")
        for questions in self._questions:
            questions.put((function, args))
        deadline = time.monotonic() + PATIENCE
        found: list[Any] = []
        for rank, answers in enumerate(self._answers):
            try:
                found.append(self._answer(rank, answers, deadline))
            except queue.Empty:
                alive = self._processes[rank].is_alive()
                why = f"gave no answer in {PATIENCE:.0f} s" if alive else "has died"
                self.stop()
                raise AssertionError(f"rank {rank} {why}; before it: {found}") from None
        if not all(in_step for _, in_step in found):
            self.stop()  # what they say to each other no longer fits
        return [moved(answer, DEVICE) for answer, _ in found]

    def _answer(self, rank: int, answers: Any, deadline: float) -> Any:
        """The answer of a process. Raises queue.Empty when time is up, or when the process has died."""
        while True:
            alive = self._processes[rank].is_alive()
            try:
                return answers.get(timeout=1.0)
            except queue.Empty:
                if not alive or time.monotonic() > deadline:
                    raise

    def both(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """What each process gave; an exception in any fails the test."""
        found = self.answers(function, *args)
        for rank, answer in enumerate(found):
            assert not isinstance(answer, Raised), f"rank {rank} raised\n{answer.trace}"
        return found


def _serve(rank: int, world: int, meeting: str, questions: Any, answers: Any) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    how = {"init_method": meeting, "rank": rank, "world_size": world, "timeout": timedelta(seconds=100)}
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
        how["device_id"] = DEVICE
    dist.init_process_group(BACKEND, **how)
    answers.put("started")
    while True:
        function, args = questions.get()
        torch.manual_seed(0)
        try:
            answer = moved(function(rank, *moved(args, DEVICE)), "cpu")
        except BaseException as error:
            answer = Raised(error)
        try:
            dist.barrier()
            in_step = True
        except RuntimeError as error:  # the other process still waits for something this one did not do
            answer, in_step = answer if isinstance(answer, Raised) else Raised(error), False
        answers.put((answer, in_step))
