"""What is around a traced run: plain kernels, the names of the modules that run, functions that are looked into."""

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
def quiet() -> Iterator[None]:
    """Where fake tensors cannot go, the run is repeated on real ones: no reason to log it as an error."""
    log = logging.getLogger("torch._subclasses.fake_tensor")
    before = log.disabled
    log.disabled = True
    try:
        yield
    finally:
        log.disabled = before


@contextlib.contextmanager
def module_names(journal: Journal, names: dict[int, str]) -> Iterator[None]:
    """Keep the name of the module that runs on top of `journal.modules`. Global hooks: none is put on the model itself."""

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
    """Sizes that a TorchScript function reads are invisible: those of its arguments may enter formulas there."""
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
