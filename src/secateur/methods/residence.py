"""Where the tensors of a model are while its blocks are solved: where they were, or on a device one block at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._arguments import moved, replaced, tensors_of
from .._transfers import to_host
from ..stream import Feed, instead
from .seam import Solution


class Residence:
    """The tensors stay where they are. Subclasses bring those that are needed, and take them away again.

    `device` is where blocks run, or None if that is where the model is.
    """

    device: torch.device | None = None

    def outside(self, model: nn.Module, blocks: Sequence[nn.Module], needed: Sequence[nn.Module]) -> Any:
        """A context in which the model runs except for its blocks; of these only the `needed` ones run."""
        return contextlib.nullcontext()

    def inside(self, name: str, block: nn.Module) -> Any:
        """A context in which one block runs. On exit it is solved."""
        return contextlib.nullcontext()

    def solved(self, name: str, solution: Solution) -> Solution:
        """What is remembered of a solution."""
        return solution

    def resume(self, feeds: tuple[Feed, Feed]) -> int:
        """The number of blocks that were solved in an earlier run; what they returned is put into the feeds."""
        return 0

    def finished(self, number: int, feeds: tuple[Feed, Feed]) -> None:
        """Is called when so many blocks are solved and have fed the next."""


class OnDevice(Residence):
    """Brings one block at a time to a device. The model itself is not changed."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def fetch(self, module: nn.Module, attribute: str, tensor: Tensor) -> Tensor:
        """A copy of a tensor, on the device."""
        return tensor.detach().to(self.device, copy=True)

    @contextlib.contextmanager
    def brought(self, modules: Sequence[nn.Module]) -> Iterator[dict[tuple[nn.Module, str], Tensor]]:
        """Gives modules copies of their own tensors (not those of their children), inside the context."""
        before: list[tuple[dict[str, Any], str, Tensor]] = []
        copies: dict[int, Tensor] = {}
        found: dict[tuple[nn.Module, str], Tensor] = {}
        try:
            for module in modules:
                spaces: list[dict[str, Any]] = [module._parameters, module._buffers]
                for space in spaces:
                    for attribute, tensor in space.items():
                        if tensor is None:
                            continue
                        if id(tensor) not in copies:
                            copies[id(tensor)] = _like(tensor, self.fetch(module, attribute, tensor))
                        before.append((space, attribute, tensor))
                        found[module, attribute] = space[attribute] = copies[id(tensor)]
            yield found
        finally:
            for space, attribute, tensor in before:
                space[attribute] = tensor

    @contextlib.contextmanager
    def outside(self, model: nn.Module, blocks: Sequence[nn.Module], needed: Sequence[nn.Module]) -> Iterator[None]:
        inner = {id(module) for block in blocks for module in block.modules()}
        with contextlib.ExitStack() as stack:
            for block in needed:
                stack.enter_context(self.brought(list(block.modules())))
            there: set[int] = set()

            def bring(module: nn.Module, args: Any) -> None:
                if id(module) not in there:
                    there.add(id(module))
                    stack.enter_context(self.brought([module]))

            for module in model.modules():
                if id(module) not in inner:
                    stack.callback(module.register_forward_pre_hook(bring).remove)
            yield

    @contextlib.contextmanager
    def inside(self, name: str, block: nn.Module) -> Iterator[None]:
        with self.brought(list(block.modules())):
            yield

    def solved(self, name: str, solution: Solution) -> Solution:
        weight = None if solution.weight is None else solution.weight.to("cpu", copy=True)  # the walk exchanges its values
        return replace(solution, mask=solution.mask.cpu(), weight=weight)


def _like(tensor: Tensor, values: Tensor) -> Tensor:
    return nn.Parameter(values, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else values


@contextlib.contextmanager
def without_blocks(blocks: Sequence[nn.Module], last: Callable[[], Any], device: torch.device | None) -> Iterator[None]:
    """Lets the last block return `last()`, and the others the same with NaN for all values, inside the context.

    Whatever reads those is NaN as well, and is refused later.
    """

    def final(*args: Any, **kwargs: Any) -> Any:
        return moved(last(), device)

    def other(*args: Any, **kwargs: Any) -> Any:
        value = moved(last(), device)
        empty = {i: torch.full_like(t, torch.nan) if t.is_floating_point() else t for i, t in enumerate(tensors_of(value))}
        return replaced(value, empty, [0])

    with contextlib.ExitStack() as stack:
        for block in blocks[:-1]:
            stack.enter_context(instead(block, other))
        stack.enter_context(instead(blocks[-1], final))
        yield


def on_cpu(value: Any) -> Any:
    """A tree with its tensors on the host."""
    new = {i: to_host(tensor) for i, tensor in enumerate(tensors_of(value)) if tensor.device.type != "cpu"}
    return replaced(value, new, [0]) if new else value


def as_mapping(feed: Feed, name: str) -> Mapping[str, Tensor]:
    """What a feed holds, by names from which `from_mapping` restores it."""
    return {
        f"{name}.{batch}.{producer}.{i}": tensor
        for batch, made in enumerate(feed.made)
        for producer, tensors in made.items()
        for i, tensor in enumerate(tensors)
    }


def from_mapping(feed: Feed, name: str, tensors: Mapping[str, Tensor]) -> None:
    """Restores what a feed held."""
    for key in sorted((key.split(".") for key in tensors if key.startswith(f"{name}.")), key=lambda k: [int(n) for n in k[1:]]):
        feed.made[int(key[1])].setdefault(int(key[2]), []).append(tensors[".".join(key)])
