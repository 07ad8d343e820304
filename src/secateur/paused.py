"""Runs a model on several batches side by side and pauses all runs at one module after the other.

The modules may lie anywhere in the model, and other code may run between them. Each batch runs in a thread of its own, and only
one thread is active at a time. Together, the runs cost one forward pass; they hold the live activations of all batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
_here = threading.local()


def paused_calls(run: Callable[[Any], object], modules: Sequence[nn.Module], batches: Sequence[Any]) -> Iterator[list[Call]]:
    """Yields the arguments that each module receives, one call for each batch, while the runs pause in front of it.

    `run(batch)` runs the model. Ends at the first module that a batch does not call next. The caller may change a module before
    it asks for the next; the runs then continue with the changed module. The arguments are those of the runs, not copies.
    """
    runs: list[_Run] = []
    passed: list[nn.Module] = []

    def pause(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        own = getattr(_here, "run", None)
        if own not in runs:
            return  # the caller runs the module itself
        if any(module is other for other in passed):
            raise ValueError(f"the model calls a {type(module).__name__} once on the first batch and more often on another")
        own.pause((module, (args, kwargs)))

    with ExitStack() as stack:
        for module in modules:
            stack.callback(module.register_forward_pre_hook(pause, with_kwargs=True, prepend=True).remove)
        for batch in batches:
            runs.append(_Run(partial(run, batch)))
            stack.callback(runs[-1].end)
        for module in modules:
            found = [own.resume() for own in runs]
            if any(one is None or one[0] is not module for one in found):
                return
            passed.append(module)
            yield [one[1] for one in found]


class _Over(BaseException):
    """Ends a paused run that is no longer needed."""


class _Run:
    """A function that runs in its own thread, in the caller's gradient and autocast modes, and can be paused."""

    def __init__(self, work: Callable[[], object]) -> None:
        self.work, self.modes = work, _modes()
        self.go, self.came = threading.Semaphore(0), threading.Semaphore(0)
        self.value: Any = None
        self.failure: BaseException | None = None
        self.over = False
        self.thread = threading.Thread(target=self._work, name="secateur paused run", daemon=True)

    def _work(self) -> None:
        _here.run = self
        self.go.acquire()
        try:
            with ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode())
                if not self.over:
                    self.work()
        except _Over:
            pass
        except BaseException as failure:
            self.failure = failure
        self.value = None
        self.came.release()

    def pause(self, value: Any) -> None:
        """Passes `value` to the caller of `resume` and waits for the next call. Called in the run's own thread."""
        self.value = value
        self.came.release()
        self.go.acquire()
        if self.over:
            raise _Over

    def resume(self) -> Any:
        """Continues to the next pause and returns its value; None at the end."""
        if self.thread.ident is None:
            self.thread.start()
        self.go.release()
        self.came.acquire()
        if self.failure is not None:
            raise self.failure
        return self.value

    def end(self) -> None:
        if self.thread.ident is not None:
            self.over = True
            self.go.release()
            self.thread.join()


def _modes() -> list[Callable[[], Any]]:
    """The modes of torch that a thread does not take over from the thread that starts it."""
    kinds = [kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)]
    return [
        partial(torch.inference_mode, torch.is_inference_mode_enabled()),
        partial(torch.set_grad_enabled, torch.is_grad_enabled()),
        *(partial(torch.autocast, kind, torch.get_autocast_dtype(kind)) for kind in kinds),
    ]
