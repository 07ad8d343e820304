"""What is around a traced run: plain kernels, the names of the modules that run, functions that are looked into."""

from __future__ import annotations

import contextlib
import logging
import random
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from .axes import atoms
from .provenance import Journal
from .tracer import Tracer


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    """Fused kernels of whole layers (LSTM, encoder layers) hide their axes; without them torch decomposes."""
    fast, onednn, cudnn = (
        torch.backends.mha.get_fastpath_enabled(),
        torch._C._get_mkldnn_enabled(),
        torch._C._get_cudnn_enabled(),
    )
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)
    torch._C._set_cudnn_enabled(False)
    try:
        with fresh_casts():
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)
        torch._C._set_cudnn_enabled(cudnn)


@contextlib.contextmanager
def fresh_casts() -> Iterator[None]:
    """Under autocast, torch remembers weights in low precision: what was remembered is not seen, and does not follow a cut."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


_DICE: list[list[Any]] = []  # of each `same_dice` around: the state to go back to


@contextlib.contextmanager
def same_dice() -> Iterator[None]:
    """What is drawn inside is drawn again afterwards: generators of torch, of Python, and of numpy where it is loaded."""
    before = [_generators()]
    _DICE.append(before)
    try:
        yield
    finally:
        _DICE.pop()
        plain, arrays, cpu, devices = before[0]
        random.setstate(plain)
        if arrays is not None:
            sys.modules["numpy"].random.set_state(arrays)
        torch.set_rng_state(cpu)
        if devices is not None:
            torch.cuda.set_rng_state_all(devices)


def stays_drawn() -> None:
    """What was drawn up to now is not drawn again, whatever is around: a criterion that draws, draws anew in the next cut."""
    now = _generators()
    for before in _DICE:
        before[0] = now


def _generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), arrays, torch.get_rng_state(), devices


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


def tensors_inside(value: Any, depth: int = 0) -> list[Tensor]:
    """Tensors in nested containers and objects."""
    if isinstance(value, Tensor):
        return [value]
    if depth > 5:
        return []
    if isinstance(value, Mapping):
        items: Any = value.values()
    elif isinstance(value, list | tuple | set):
        items = value
    else:
        items = vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, type) else ()
    return [t for item in list(items) for t in tensors_inside(item, depth + 1)]
