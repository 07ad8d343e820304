"""What a model keeps from one run to the next outside parameters and buffers: caches and counters.

Caches are tensors that a model computes from its weights in one run and reads in the next.

An example is a table of attention biases that is kept in a dict after the first run in eval mode. Such a tensor must not be
cut: the weights it comes from would seem unused. It is removed before the model is traced, and the next run computes it
again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..edit import Inputs, StandIns, attributes, preserve_rng, run

CacheSlot = tuple[str, str]  # the path of a module, and the name of its attribute


@contextmanager
def without_caches(model: nn.Module, inputs: Inputs) -> Iterator[list[CacheSlot]]:
    """Empties the caches of a model, and puts them back on exit. Yields where they are."""
    found = find_caches(model, inputs)
    saved = [(vars(model.get_submodule(path)), name) for path, name in found]
    values = [space[name] for space, name in saved]
    empty_caches_(model, found)
    try:
        yield found
    finally:
        for (space, name), value in zip(saved, values):
            space[name] = value


def empty_caches_(model: nn.Module, caches: Sequence[CacheSlot]) -> None:
    """Empty these caches for good; the next run fills them. Paths that removed blocks leave without a module are skipped."""
    modules = dict(model.named_modules()) if caches else {}
    for path, name in caches:
        space = vars(modules[path]) if path in modules else {}
        if name in space:
            space[name] = _empty(space[name])


def find_caches(model: nn.Module, inputs: Inputs) -> list[CacheSlot]:
    """The attributes that a run reads but does not write, and computes again when they are empty.

    Costs nothing where no module holds a tensor outside its parameters and buffers; else two runs, rarely more.
    """
    slots = _candidates(model)
    watch = _Watch(model, slots, ())
    if slots and _runs(model, inputs, watch):
        slots = [slot for slot in slots if _same(watch.after[slot], watch.before[slot], lambda a, b: a is b)]
    kinds: dict[Any, list[CacheSlot]] = {}
    for path, name in slots:
        kinds.setdefault((type(model.get_submodule(path)), name), []).append((path, name))
    together = _refilled(model, inputs, slots)
    return together if together is not None else [s for kind in kinds.values() for s in _refilled(model, inputs, kind) or ()]


def _candidates(model: nn.Module) -> list[CacheSlot]:
    found: list[tuple[CacheSlot, list[Tensor]]] = []
    for path, module in model.named_modules():
        for name, value in attributes(module):
            tensors = [value] if isinstance(value, Tensor) else list(value.values()) if isinstance(value, dict) else []
            if tensors and all(isinstance(t, Tensor) for t in tensors):
                found.append(((path, name), tensors))
    registered = {id(t) for t in (*model.parameters(), *model.buffers())} if found else set()
    return [slot for slot, tensors in found if registered.isdisjoint(map(id, tensors))]


def _refilled(model: nn.Module, inputs: Inputs, slots: Sequence[CacheSlot]) -> list[CacheSlot] | None:
    """Those of the slots that a run fills with equal tensors when they are empty. None: the model does not run without them."""
    if not slots:
        return []
    watch = _Watch(model, slots, slots)
    if not _runs(model, inputs, watch):
        return None
    return [slot for slot in slots if _same(watch.after[slot], watch.before[slot], _equal)]


def _runs(model: nn.Module, inputs: Inputs, watch: _Watch) -> bool:
    try:
        run(model, *inputs, under=watch)
    except Exception:
        return False
    return True


class _Watch:
    """Looks at attributes before and after a run, and empties some of them before it. The caller restores the model."""

    def __init__(self, model: nn.Module, slots: Sequence[CacheSlot], empty: Sequence[CacheSlot]) -> None:
        self.spaces = {slot: vars(model.get_submodule(slot[0])) for slot in slots}
        self.empty = empty
        self.before: dict[CacheSlot, Any] = {}
        self.after: dict[CacheSlot, Any] = {}

    def __enter__(self) -> None:
        self.before = self._look()
        for slot in self.empty:
            self.spaces[slot][slot[1]] = _empty(self.spaces[slot][slot[1]])

    def __exit__(self, *_: object) -> None:
        self.after = self._look()

    def _look(self) -> dict[CacheSlot, Any]:
        held = {slot: space.get(slot[1]) for slot, space in self.spaces.items()}
        return {slot: dict(value) if isinstance(value, dict) else value for slot, value in held.items()}


def _empty(value: Any) -> Any:
    return type(value)() if isinstance(value, dict) else None


def _same(after: Any, before: Any, equal: Any) -> bool:
    if isinstance(before, Mapping):
        return isinstance(after, Mapping) and after.keys() == before.keys() and all(equal(after[k], before[k]) for k in before)
    return equal(after, before)


def _equal(a: Any, b: Any) -> bool:
    """Equal up to rounding: a cache may be older than a cast of the model."""
    if not isinstance(a, Tensor) or a.shape != b.shape or a.is_floating_point() != b.is_floating_point():
        return False
    if a.dtype == b.dtype or not a.is_floating_point():
        return torch.allclose(a, b.to(a.dtype), equal_nan=True)
    coarse = max(torch.finfo(a.dtype).eps, torch.finfo(b.dtype).eps)
    return torch.allclose(a.double(), b.double(), 4 * coarse, 4 * coarse, equal_nan=True)


def counters(model: nn.Module, inputs: Inputs, changed: Sequence[str]) -> list[str]:
    """Those of these numbers, which one run changed, that the run after it changes again, on the same inputs."""
    if not changed:
        return []

    def numbers() -> dict[str, Any]:
        spaces = {path: vars(module) for path, module in model.named_modules()}
        return {name: spaces[name.rpartition(".")[0]].get(name.rpartition(".")[2]) for name in changed}

    def stand_in(_: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    with torch.no_grad(), preserve_rng(), StandIns(model, stand_in):
        model(*inputs[0], **inputs[1])
        once = numbers()
        model(*inputs[0], **inputs[1])
        twice = numbers()
    return [name for name in changed if once[name] != twice[name]]
