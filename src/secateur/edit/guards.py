"""Context managers around running or editing a model: the model, the RNG state and torch's switches are restored on exit."""

from __future__ import annotations

import contextlib
import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from .cuts import put_
from .tensors import StandIns, owned_tensors


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


_DICE: list[list[Any]] = []  # of each `preserve_rng` around: the state to go back to


@contextlib.contextmanager
def preserve_rng() -> Iterator[None]:
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


def keep_rng_state() -> None:
    """What was drawn up to now is not drawn again, whatever is around: a criterion that draws, draws anew in the next cut."""
    now = _generators()
    for before in _DICE:
        before[0] = now


def _generators() -> tuple[Any, ...]:
    numpy: Any = sys.modules.get("numpy")
    arrays = None if numpy is None else numpy.random.get_state()
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else None
    return random.getstate(), arrays, torch.get_rng_state(), devices


@contextmanager
def all_or_nothing(model: nn.Module) -> Iterator[None]:
    """When the block raises, the modules have their attributes back and the tensors their values."""
    tensors = [(t, t.data, t.grad if t.is_leaf else None) for _, t in owned_tensors(model).values()]
    spaces = [
        (m, dict(vars(m)), {k: dict(vars(m)[k]) for k in ("_parameters", "_buffers", "_modules")}) for m in model.modules()
    ]
    try:
        yield
    except BaseException:
        for module, space, held in spaces:
            vars(module).clear()
            vars(module).update(space)
            for kind, content in held.items():
                vars(module)[kind].clear()
                vars(module)[kind].update(content)
        for tensor, data, grad in tensors:
            if tensor.is_leaf:
                tensor.grad = None
            put_(tensor, data)
            if grad is not None:
                tensor.grad = grad
        raise


def run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], under: Any = None) -> Any:
    """The model's answer in evaluation mode, `under` a mode; whatever the run changes in the model is undone."""

    def stand_in(_: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    with torch.no_grad(), preserve_rng(), fresh_casts(), StandIns(model, stand_in), under or nullcontext():
        return model(*args, **kwargs)
