"""One gate: which elements of a layer's input are zeroed. It is calibrated on inputs that the layer receives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..select import keep_largest

METHODS = ("threshold", "topk", "static")
_SHIFT = 14  # a bin holds the float32 magnitudes that agree in all but their last 14 bits: 1/512 wide, exact for bfloat16
_INFINITE = 0x7F800000 >> _SHIFT


@dataclass(eq=False)
class Gate:
    """The gate before one layer. `sparsity` is what was asked for, `calibrated` what it reaches on the calibration data."""

    name: str
    method: str
    sparsity: float
    axis: int = -1
    features: int | None = None
    weights: int = 1
    threshold: float = 0.0
    mask: Tensor | None = None
    calibrated: float | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Works as a pre-hook with keyword arguments, and without, in case another tool has registered it again."""
        gated = self.close(first_input(self.name, args, kwargs or {}))
        if kwargs is None:
            return (gated, *args[1:])
        return ((gated, *args[1:]), kwargs) if args else (args, {**kwargs, next(iter(kwargs)): gated})

    def close(self, x: Tensor) -> Tensor:
        """The input with its gated elements set to zero. NaN stays, because it compares below nothing."""
        if self.method == "threshold":
            return x.masked_fill(x.abs() < self.threshold, 0) if self.threshold > 0 else x
        if self.method == "topk":
            drop = _dropped(self.sparsity, x.shape[self.axis])
            return x.masked_fill(_lowest(x.abs(), drop, self.axis), 0) if drop else x
        assert self.mask is not None
        if self.mask.device != x.device:  # the model has moved
            self.mask = self.mask.to(x.device)
        return x.masked_fill(~self.mask.view(-1, *(1,) * (-1 - self.axis)), 0)

    @property
    def rule(self) -> str:
        """A text that says which inputs stay."""
        if self.method == "threshold":
            return f"|x| >= {self.threshold:.4g}"
        kept = "?" if self.features is None else str(self.features - _dropped(self.sparsity, self.features))
        return f"the largest {kept}" if self.method == "topk" else f"the same {kept}"


def _dropped(sparsity: float, features: int) -> int:
    """How many features of a token are zeroed; one always stays."""
    return features - max(round((1 - sparsity) * features), 1)


def _lowest(scores: Tensor, drop: int, axis: int) -> Tensor:
    """True at the `drop` lowest scores along an axis; among equal ones the lowest index comes first, as in `select`.

    It runs in the forward pass of the user's model, so it uses plain torch operations and does not branch on values.
    """
    cut = scores.kthvalue(drop, axis, keepdim=True).values
    below, equal = scores < cut, scores == cut
    ties = drop - below.sum(axis, keepdim=True, dtype=torch.int32)
    return below | (equal & (equal.cumsum(axis, dtype=torch.int32) <= ties))


def first_input(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    x = args[0] if args else next(iter(kwargs.values()), None)
    if not isinstance(x, Tensor) or not x.is_floating_point():
        kind = x.dtype if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"the first input of {name!r} is {kind}; a gate needs a float tensor, so leave this layer out of at=")
    return x


@dataclass
class Seen:
    """Statistics of the inputs of one layer: a histogram of their magnitudes, or the mean magnitude of each feature."""

    name: str
    axis: int
    wants: str
    features: int | None = None
    elements: int = 0
    counts: Tensor | None = None
    sums: Tensor | None = None

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = first_input(self.name, args, kwargs).detach()
        self.features = x.shape[self.axis]
        self.elements += x.numel()
        magnitude = x.abs().float()
        if self.wants == "threshold":
            counts = torch.bincount(magnitude.reshape(-1).view(torch.int32) >> _SHIFT, minlength=_INFINITE + 1)
            if int(counts[_INFINITE:].sum()):
                raise self._not_finite()
            self.counts = counts if self.counts is None else self.counts + counts
        else:
            sums = magnitude.movedim(self.axis, 0).reshape(self.features, -1).sum(1, dtype=torch.float64)
            if not bool(sums.isfinite().all()):
                raise self._not_finite()
            self.sums = sums if self.sums is None else self.sums + sums

    def _not_finite(self) -> ValueError:
        return ValueError(f"an input of {self.name!r} is NaN or infinite, so it has no quantile; look at the calibration data")

    def gate(self, gate: Gate, sparsity: float) -> Gate:
        """The gate of this layer at a sparsity."""
        if not self.elements:
            raise ValueError(f"{self.name!r} saw no input while the data ran through; leave it out of at=, or pass other data")
        assert self.features is not None
        gate = replace(gate, features=self.features, sparsity=sparsity)
        if self.wants == "threshold":
            gate.threshold, gate.calibrated = self._cut(sparsity)
            return gate
        gate.calibrated = _dropped(sparsity, self.features) / self.features
        if self.wants == "static":
            assert self.sums is not None
            gate.mask = keep_largest(self.sums, _dropped(sparsity, self.features))
        return gate

    def _cut(self, sparsity: float) -> tuple[float, float]:
        """The threshold whose share of smaller magnitudes is nearest to the sparsity, and that share.

        The threshold is the lower end of the first bin that stays. That is within 1/512 of the exact quantile, and equal to it
        for bfloat16, whose values each have a bin of their own. The largest magnitude always stays.
        """
        edges, below, zeros = self._curve
        at = int((below - sparsity).abs().argmin())
        return (float(edges[at]), float(below[at])) if at and sparsity else (0.0, zeros)

    @cached_property
    def _curve(self) -> tuple[Tensor, Tensor, float]:
        """The lower ends of the filled bins, the share of magnitudes below each, and the share of zeros."""
        assert self.counts is not None
        counts = self.counts.cpu()
        filled = counts.nonzero().view(-1)
        below = (counts[filled].cumsum(0) - counts[filled]).double() / self.elements
        return (filled << _SHIFT).to(torch.int32).view(torch.float32), below, float(counts[0]) / self.elements
