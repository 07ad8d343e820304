"""Runs a model one block at a time: the inputs of a block are computed once, the block is changed, its outputs feed the next.

A block is any module of the model. `record` runs the model and keeps the calls that one module receives. `stream` does so for
a row of blocks, and runs each block only a few times in all where one block reads what another returned.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .stats import on_batch, split_batch


@dataclass
class Replay:
    """A module and the calls it received, which can be repeated: `run` yields one output per call.

    Each repetition gets its own copy of the arguments, because a module may write to them (in place, or into a cache).
    """

    module: nn.Module
    calls: list[tuple[tuple[Any, ...], dict[str, Any]]]

    def run(self) -> Iterator[Any]:
        """Calls the module again, as it is now, with the recorded arguments."""
        for args, kwargs in self.calls:
            args, kwargs = copied(args, {}), copied(kwargs, {})
            with on_batch(self.module, args, kwargs):
                output = self.module(*args, **kwargs)
            yield output


def record(model: nn.Module, module: nn.Module, batches: Iterable[Any]) -> Replay:
    """Runs the model on every batch and records the calls that `module` receives (the model itself is a module too)."""
    found = Replay(module, [])
    if module is model:
        found.calls = [(args, kwargs) for args, kwargs, _ in map(split_batch, batches)]
        return found

    def see(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        memo: dict[Any, Any] = {}
        found.calls.append((copied(args, memo), copied(kwargs, memo)))

    with _hook(module.register_forward_pre_hook(see, with_kwargs=True, prepend=True)):
        for batch in batches:
            _call(model, batch)
    return found


def stream(model: nn.Module, modules: Sequence[nn.Module], batches: Sequence[Any]) -> Iterator[Replay]:
    """Yields a `Replay` of each module in turn, with the inputs that the modules before it, as they are by then, produce.

    Change a module before asking for the next one. Where every module runs once per batch and reads tensors that earlier
    modules returned, each is run once more to feed the next. The other arguments (attention masks, position embeddings, an
    empty cache) are those that the first run of the model passed. Otherwise the model is run from its beginning again.
    """
    links = _links(model, modules, batches) if len(modules) > 1 else None
    if links is None:
        for module in modules:
            yield record(model, module, batches)
        return
    last_use = {use.producer: i for i in range(len(modules)) for calls in links for use in calls[i].uses}
    outputs: list[dict[int, list[Tensor]]] = [{} for _ in batches]
    for i, module in enumerate(modules):
        replay = Replay(module, [calls[i].filled(made) for calls, made in zip(links, outputs, strict=True)])
        yield replay
        if i in last_use:
            for made, output in zip(outputs, replay.run(), strict=True):
                made[i] = _tensors(output)
        for made in outputs:
            for producer in [p for p in made if last_use[p] <= i]:
                del made[producer]


class _Use(NamedTuple):
    """A place in the arguments of a block that holds tensor `number` of what block `producer` returned."""

    place: int
    producer: int
    number: int


@dataclass
class _Call:
    """The arguments of one call of a block, and which of their tensors come from earlier blocks."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    uses: list[_Use] = field(default_factory=list)

    def filled(self, made: Mapping[int, Sequence[Tensor]]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with the tensors that earlier blocks now return."""
        fresh = {use.place: made[use.producer][use.number] for use in self.uses}
        args, kwargs = _replaced((self.args, self.kwargs), fresh, [0])
        return args, kwargs


_LATER = torch.empty(0)  # stands where a tensor of an earlier block will be put


class _Enough(BaseException):
    """Ends a run of the model: the last block has received its inputs."""


def _links(model: nn.Module, modules: Sequence[nn.Module], batches: Sequence[Any]) -> list[list[_Call]] | None:
    """The calls of all blocks, batch by batch; None where the blocks do not simply feed each other."""
    found = []
    for batch in batches:
        calls = _linked(model, modules, batch)
        if calls is None:
            return None
        found.append(calls)
    return found


def _linked(model: nn.Module, modules: Sequence[nn.Module], batch: Any) -> list[_Call] | None:
    """Runs the model on one batch and finds, for each block, which arguments are tensors that earlier blocks returned."""
    calls: list[_Call] = []
    returned: dict[int, tuple[int, int]] = {}  # tensor -> (block, number of the tensor in its output)
    alive: list[Any] = []  # holds what was seen, so that no id is used twice
    memo: dict[Any, Any] = {}
    in_order = True

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        nonlocal in_order
        if len(calls) >= len(modules) or module is not modules[len(calls)]:
            in_order = False
            raise _Enough
        uses = [_Use(i, *returned[id(t)]) for i, t in enumerate(_tensors((args, kwargs))) if id(t) in returned]
        if calls and not any(use.producer == len(calls) - 1 and use.number == 0 for use in uses):
            in_order = False  # the output of the block before arrives here changed, or not at all
            raise _Enough
        held = _replaced((args, kwargs), {use.place: _LATER for use in uses}, [0])
        alive.append((args, kwargs))
        own_args, own_kwargs = copied(held, memo)
        calls.append(_Call(own_args, own_kwargs, uses))
        if len(calls) == len(modules):
            raise _Enough

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        alive.append(output)
        returned.update({id(t): (len(calls) - 1, number) for number, t in enumerate(_tensors(output))})

    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(_hook(module.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)))
            stack.enter_context(_hook(module.register_forward_hook(leave)))
        with contextlib.suppress(_Enough):
            _call(model, batch)
    return calls if in_order and len(calls) == len(modules) else None


def _call(model: nn.Module, batch: Any) -> None:
    args, kwargs, _ = split_batch(batch)
    with on_batch(model, args, kwargs):
        model(*args, **kwargs)


@contextlib.contextmanager
def _hook(handle: Any) -> Iterator[None]:
    try:
        yield
    finally:
        handle.remove()


# --- arguments as trees ---------------------------------------------------------------------------------------------


def copied(value: Any, memo: dict[Any, Any]) -> Any:
    """A copy of arguments that a call can write to. Modules, functions and numbers stay what they are.

    What occurs twice is copied once: `memo` maps an object's id (and the version of a tensor) to its copy.
    """
    if isinstance(value, tuple | list | dict):
        return _rebuilt(value, [copied(item, memo) for item in _items(value)])
    if value is None or isinstance(value, nn.Module | str | bytes | int | float | complex | type) or callable(value):
        return value
    key = (id(value), value._version) if isinstance(value, Tensor) and not value.is_inference() else id(value)
    if key not in memo:
        memo[key] = value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)
    return memo[key]


def _tensors(value: Any) -> list[Tensor]:
    """The tensors of arguments or of an output, in order."""
    if isinstance(value, Tensor):
        return [value]
    return [tensor for part in _items(value) for tensor in _tensors(part)]


def _replaced(value: Any, fresh: Mapping[int, Any], at: list[int]) -> Any:
    """The same tree with some of its tensors replaced, by their number in `_tensors`; `at` counts the tensors seen."""
    if isinstance(value, Tensor):
        at[0] += 1
        return fresh.get(at[0] - 1, value)
    if not isinstance(value, tuple | list | dict):
        return value
    return _rebuilt(value, [_replaced(item, fresh, at) for item in _items(value)])


def _items(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, tuple | list) else ()


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A container of the same type with other items."""
    if isinstance(value, dict):
        new = copy.copy(value)
        for key, item in zip(value, items, strict=True):
            new[key] = item
        return new
    if isinstance(value, tuple):
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    return items
