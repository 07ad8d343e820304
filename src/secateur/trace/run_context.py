"""Context managers around a traced run: module names, TorchScript functions, and fewer log messages."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..axes import atoms
from ..edit import tensors_inside
from .provenance import Journal
from .tracer import Tracer


@contextlib.contextmanager
def without_fake_tensor_log() -> Iterator[None]:
    """Turns off the error log of fake tensors. Where they fail, the run is repeated on real tensors, so it is no error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def module_names(journal: Journal, names: dict[int, str]) -> Iterator[None]:
    """Keeps the name of the running module at the end of `journal.modules`. Uses global hooks, so the model is not changed."""

    def enter(module: nn.Module, _: Any) -> None:
        journal.modules.append(names.get(id(module), ""))

    def leave(module: nn.Module, _: Any, __: Any) -> None:
        if journal.modules:
            journal.modules.pop()

    handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave, always_call=True)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def script_functions(tracer: Tracer) -> Iterator[None]:
    """Treats every size that a TorchScript function reads as part of a formula: tagged integers do not reach its inside."""
    kind: Any = torch.jit.ScriptFunction
    call = kind.__call__

    def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
        if "size(" in self.code or ".shape" in self.code:
            for tensor in tensors_inside((args, kwargs)):
                for e in tracer.axes_of(tensor):
                    if any(not a.frozen for a in atoms(e)):
                        tracer.uses_size(e, f"TorchScript function {self.name}")
        return call(self, *args, **kwargs)

    kind.__call__ = watched
    try:
        yield
    finally:
        kind.__call__ = call
