"""What the removal of blocks changes: the outputs of the model, or its loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from ...edit import Inputs
from ...logits import divergence, logits_of
from ...padding import included
from ..compare import tensors_of

_PART = 1 << 20  # outputs are compared so many elements at a time


class Effect(NamedTuple):
    """A measure of change: `read` finds the tensors in an output that `change(batch, now, before)` compares."""

    name: str
    read: Callable[[Any], list[Tensor]]
    change: Callable[[Inputs, list[Tensor], list[Tensor]], float]


def _relative(_: Inputs, now: list[Tensor], before: list[Tensor]) -> float:
    """The norm of the difference over the norm, where the whole model's output is finite."""
    moved, size = (sum(each) for each in zip(*(_squares(a, b) for a, b in zip(now, before, strict=True)), strict=True))
    return (moved / max(size, 1e-30)) ** 0.5


def _squares(now: Tensor, before: Tensor) -> tuple[float, float]:
    """The squared distance of two tensors and the squared size of the second, where that is finite."""
    moved = size = 0.0
    for a, b in zip(*(t.reshape(-1).split(_PART) for t in (now, before)), strict=True):
        if not (b.is_floating_point() or b.is_complex()):  # torch does not subtract bools, and uint8 wraps around
            a, b = a.double(), b.double()
        away, whole, finite = (a - b).abs().double(), b.abs().double(), b.isfinite()
        if not bool(finite.all()):
            away, whole = away[finite], whole[finite]
        moved, size = moved + float(away.square().sum()), size + float(whole.square().sum())
    return moved, size


def _loss(batch: Inputs, now: list[Tensor], before: list[Tensor]) -> float:
    """The increase of the cross-entropy for labels drawn from the whole model: the Kullback-Leibler divergence of the two."""
    total, count, _ = divergence(now[0], before[0], included(batch[1]), gradient=False)
    return total / max(count, 1)


OUTPUT = Effect("the change of the output", tensors_of, _relative)
LOSS = Effect("the increase of the loss", lambda output: [logits_of(output)], _loss)
