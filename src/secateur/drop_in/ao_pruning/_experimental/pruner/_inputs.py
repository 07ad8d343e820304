"""Example inputs for a prepared model: similar to those of its first call, or guessed from its first layer."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from .....edit import run

Inputs = tuple[tuple[Any, ...], dict[str, Any]]
_KEPT = {Tensor, nn.Parameter, type(None), bool, int, float, str, torch.dtype, torch.device}
_SIZES = (8, 16, 28, 32, 64, 224)  # spatial sizes to try, in this order


@dataclass(frozen=True)
class Like:
    """The kind of a tensor. Its values are not stored: they are the user's data and would be part of a pickle."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    low: float
    high: float

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        values = tensor.detach().double()
        values = values[values.isfinite()]
        values = values if len(values) else torch.zeros(1)
        if tensor.dtype == torch.bool:  # a mask: the value of most of its elements
            values = values.mean().round()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.device, float(values.min()), float(values.max()))

    def make(self, draw: torch.Generator, least: int = 1) -> Tensor:
        """Creates such a tensor, with every dimension at least `least`."""
        shape = tuple(max(size, least) for size in self.shape)
        if self.dtype.is_floating_point:
            spread = torch.rand(shape, generator=draw, dtype=torch.float64) * (self.high - self.low) + self.low
            return spread.to(self.dtype).to(self.device)
        return torch.randint(int(self.low), int(self.high) + 1, shape, generator=draw).to(self.dtype).to(self.device)


class InputRecord:
    """A forward hook that records the kind of the inputs of the first successful call."""

    def __init__(self) -> None:
        self.seen: Any = None

    def __call__(self, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if torch.compiler.is_compiling() or torch.jit.is_tracing() or self.seen is not None:
            return
        if all(type(leaf) in _KEPT for leaf in tree_leaves((args, kwargs))):
            with contextlib.suppress(RuntimeError):  # tensors under torch.func.vmap have no values
                self.seen = tree_map(lambda leaf: Like.of(leaf) if isinstance(leaf, Tensor) else leaf, (args, kwargs))


def find_inputs(model: nn.Module, record: InputRecord | None) -> Inputs | None:
    """Returns inputs on which the model runs without an error, or None."""
    seen = None if record is None else record.seen
    for args, kwargs in _guessed(model) if seen is None else _alike(model, seen):
        try:
            run(model, args, kwargs)
        except Exception:  # these inputs do not fit; try the next
            continue
        return args, kwargs
    return None


def _alike(model: nn.Module, seen: Any) -> Iterator[Inputs]:
    """Yields inputs like those of the first call; for recurrent layers first a sequence of at least two steps."""
    recurrent = any(isinstance(module, nn.RNNBase) for module in model.modules())
    for least in (2, 1) if recurrent else (1,):
        draw = torch.Generator().manual_seed(0)
        yield tree_map(lambda leaf: leaf.make(draw, least) if isinstance(leaf, Like) else leaf, seen)  # noqa: B023


def _guessed(model: nn.Module) -> Iterator[Inputs]:
    """Yields one tensor of a shape that the first layer accepts."""
    layers = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.RNNBase, nn.Embedding)
    first = next((module for module in model.modules() if isinstance(module, layers)), None)
    if first is None:
        return
    like, draw = next(iter(first.parameters())), torch.Generator().manual_seed(0)

    def of(*shape: int) -> Inputs:
        return (torch.randn(shape, generator=draw, dtype=torch.float64).to(like),), {}

    if isinstance(first, nn.Embedding):
        yield (torch.randint(0, first.num_embeddings, (2, 5), generator=draw).to(like.device),), {}
    elif isinstance(first, nn.RNNBase):
        yield of(5, 2, first.input_size)
    elif isinstance(first, nn.Linear):
        yield of(2, first.in_features)
        yield of(2, 3, first.in_features)
    else:
        for size in _SIZES:
            yield of(2, first.in_channels, *[size] * len(first.kernel_size))
