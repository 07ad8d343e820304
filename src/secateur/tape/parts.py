"""The calls of a module, each of which can be run up to a point and on from there."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from .._arguments import copied, moved
from .._transfers import keep_pace
from ..stats import on_batch
from .runs import Again, Call, Enough, Run, State, Tape


class Parts:
    """The calls of a module and the tape of each, or None. `run` is the run that is going on.

    With a `device`, calls are run there and lie on the host between runs. `rough` lets products be rounded.
    """

    def __init__(
        self,
        module: nn.Module,
        calls: Sequence[Call],
        tapes: Sequence[Tape | None],
        device: torch.device | None = None,
        rough: bool = False,
    ) -> None:
        self.module, self.device, self.rough = module, device, rough
        self.states = [State(*call, tape) for call, tape in zip(calls, tapes, strict=True)]
        self.run: Run | None = None

    def go(self, number: int, save_at: int | None, restart: Callable[[], None] = lambda: None) -> Any:
        """Runs one call until something raises `Enough` (and returns None) or to its end (and returns its output).

        `restart` is called when a run has to begin again.
        """
        state = self.states[number]
        for _ in range(3):  # it may have to begin again without what was saved, and then with copies of its arguments
            if state.tape is None:
                break
            self.run = run = Run(state, save_at, self.device, self.rough)
            args, kwargs = run.arguments()
            try:
                with on_batch(self.module, args, kwargs), run:
                    output = self.module(*args, **kwargs)
            except Again:
                restart()
                state.reset()
                continue
            except Enough:
                output = None
            finally:
                self.run = None
            run.commit()
            keep_pace(self.device)
            return output
        state.reset()
        state.tape = None  # this call cannot be followed, so it is run as a whole
        args, kwargs = copied(moved((state.args, state.kwargs), self.device), {})
        output = None
        with contextlib.suppress(Enough), on_batch(self.module, args, kwargs):
            output = self.module(*args, **kwargs)
        keep_pace(self.device)
        return output
