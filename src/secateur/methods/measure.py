"""Measures gates on data: the zeros they reach, and the error of each layer and of the model's output."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..display import Table
from .allocate import squares
from .gates import Gate, first_input


@dataclass(frozen=True)
class Reached:
    """One gated layer on measured data: the share of its input that is zero before and after the gate, and its error.

    `error` is that of the layer alone: its output with the gate compared with its output without, on the same inputs.
    """

    name: str
    weights: int
    before: float
    sparsity: float
    error: float


@dataclass(frozen=True)
class Measured:
    """What gates reached on data: `sparsity` over all layers, by weights, and the relative `error` of the model's output."""

    layers: list[Reached]
    error: float

    @property
    def sparsity(self) -> float:
        return mean((layer.sparsity, layer.weights) for layer in self.layers)

    def __str__(self) -> str:
        rows = [(one.name, "", f"{one.before:.2%}", f"{one.sparsity:.2%}", f"{one.error:.4f}") for one in self.layers]
        before = mean((layer.before, layer.weights) for layer in self.layers)
        total = ("in all, by weights", "", f"{before:.2%}", f"{self.sparsity:.2%}", f"{self.error:.4f}")
        return str(Table(("layer", "", "zero before", "zero", "error"), rows, [total], right=range(2, 5)))


@dataclass
class Probe:
    """Replaces a gate while it is measured: gates the input, counts zeros, and runs the layer with and without the gate."""

    gate: Gate
    elements: int = 0
    before: int = 0
    zeros: int = 0
    away: float = 0.0
    size: float = 0.0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        inputs = self.gate(module, args, kwargs)
        gated, named = (inputs, {}) if kwargs is None else inputs
        kwargs = kwargs or {}
        x, y = first_input(self.gate.name, args, kwargs), first_input(self.gate.name, gated, named)
        self.elements += x.numel()
        self.before += x.numel() - int(x.count_nonzero())
        self.zeros += y.numel() - int(y.count_nonzero())
        away, size = squares(module.forward(*gated, **named), module.forward(*args, **kwargs))
        self.away, self.size = self.away + away, self.size + size
        return inputs

    def reached(self) -> Reached:
        share = math.nan if not self.elements else 1 / self.elements
        error = ratio(self.away, self.size)
        return Reached(self.gate.name, self.gate.weights, self.before * share, self.zeros * share, error)


def ratio(away: float, size: float) -> float:
    return math.sqrt(away / size) if size else 0.0 if away == 0 else math.inf


def mean(pairs: Iterable[tuple[float, int]]) -> float:
    """The weighted mean of (value, weight). NaN, for layers that saw no input, does not count."""
    seen = [(value, weight) for value, weight in pairs if not math.isnan(value)]
    total = sum(weight for _, weight in seen)
    return sum(value * weight for value, weight in seen) / total if total else math.nan
