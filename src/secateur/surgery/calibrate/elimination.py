"""Backward elimination: removes the inputs of layers unit by unit, each time the unit that raises the error least.

There are three kinds of reader: one that is fitted to the remaining inputs, one that stays as it is, and one whose outputs are
normalised again. All need only the second moments of their inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

RIDGE = 1e-4  # of the mean variance of the inputs


class Order(NamedTuple):
    """The units in the order of their removal, and the error after each removal."""

    units: list[int]
    errors: list[float]


class State(Protocol):
    """A reader that loses units: `rise` is the rise of its error for each unit, `remove` removes one."""

    def rise(self) -> Tensor: ...
    def remove(self, unit: int) -> None: ...


def eliminate(states: Sequence[State], size: int, rounds: int | None = None) -> Order:
    """Remove units until one is left, each time the one with the smallest rise.

    With `rounds`, the units with the smallest rises are removed together, so many that there are about so many rounds.
    """
    alive, order, total = torch.ones(size, dtype=torch.bool), Order([], []), 0.0
    most = 1 if rounds is None else max(1, size // rounds)
    while (left := size - 1 - len(order.units)) > 0:
        rise = torch.stack([state.rise().cpu() for state in states]).sum(0).masked_fill(~alive, torch.inf)
        for unit in [int(rise.argmin())] if most == 1 else rise.argsort(stable=True)[: min(most, left)].tolist():
            alive[unit] = False
            total = max(total, total + float(rise[unit]))
            for state in states:
                state.remove(unit)
            order.units.append(unit)
            order.errors.append(total)
    return order


def as_scores(order: Order, size: int) -> Tensor:
    """What each unit adds to the error: slopes of the lower convex hull of the curve, so cheap units come first.

    The last unit is never removed. On one slope, later units score slightly more, which keeps the order.
    """
    curve = [0.0, *order.errors]
    corners = [0]
    for i in range(1, len(curve)):
        while len(corners) > 1 and _slope(curve, corners[-2], corners[-1]) >= _slope(curve, corners[-1], i):
            corners.pop()
        corners.append(i)
    scores = torch.full((size,), torch.inf, dtype=torch.float64)
    for a, b in pairwise(corners):
        for i in range(a, b):
            scores[order.units[i]] = max(0.0, _slope(curve, a, b)) * (1 + 1e-9 * i)
    finite = scores[scores.isfinite()]
    return scores.nan_to_num(posinf=float(finite.max()) * 10 + 1e-300 if len(finite) else 1.0)


def _slope(curve: Sequence[float], a: int, b: int) -> float:
    return (curve[b] - curve[a]) / (b - a)


class Surgeon:
    """A least-squares fit that loses units. The error rises by w_u (P_uu)^-1 w_u', with P the inverse of the moments."""

    def __init__(self, spread: Tensor, weight: Tensor, columns: Tensor, ridge: float = RIDGE) -> None:
        spread = spread.clone()
        level = float(spread.diagonal().mean())
        spread.diagonal().add_(ridge * level if level > 0 else 1.0)
        self.inverse, self.weight, self.columns = torch.linalg.inv(spread), weight.clone(), columns
        self.gone: list[int] = []

    def rise(self) -> Tensor:
        c = self.columns
        if c.shape[1] == 1:  # the same, without solving a system
            return (self.weight.square().sum(0) / self.inverse.diagonal().clamp(min=1e-300))[c[:, 0]]
        blocks, weights = self.inverse[c[:, :, None], c[:, None, :]], self.weight[:, c].permute(1, 2, 0)
        blocks[self.gone] = torch.eye(c.shape[1], dtype=blocks.dtype, device=blocks.device)
        return (weights * torch.linalg.solve(blocks, weights)).sum((1, 2))

    def remove(self, unit: int) -> None:
        c = self.columns[unit]
        rows = torch.linalg.solve(self.inverse[c][:, c], self.inverse[c])
        self.weight.addmm_(self.weight[:, c], rows, alpha=-1)
        self.inverse.addmm_(self.inverse[:, c], rows, alpha=-1)
        self.weight[:, c] = 0
        self.gone.append(unit)


class Plain:
    """A reader that stays as it is: the error is the square of the sum of the removed parts."""

    def __init__(self, moments: Tensor, weight: Tensor, columns: Tensor) -> None:
        (size, span), flat = columns.shape, columns.reshape(-1)
        joint = (weight.T @ weight) * moments
        self.joint = joint[flat][:, flat].reshape(size, span, size, span).sum((1, 3))
        self.missing = torch.zeros(size, dtype=joint.dtype, device=joint.device)

    def rise(self) -> Tensor:
        return self.joint.diagonal() + 2 * self.missing

    def remove(self, unit: int) -> None:
        self.missing += self.joint[unit]


class Normed:
    """A reader whose outputs get their mean and variance back: the error is 2 var (1 - correlation with the old output)."""

    def __init__(self, spread: Tensor, weight: Tensor, columns: Tensor) -> None:
        self.spread, self.weight, self.columns = spread, weight, columns
        whole = (weight @ spread) * weight
        self.share = self._by_unit(whole)  # covariance of each unit's part with the full output
        self.left = self.share.clone()  # and with the remaining output
        inner = [(weight[:, c] @ spread[c][:, c] * weight[:, c]).sum(1) for c in columns]
        self.own = torch.stack(inner, 1)
        self.full = whole.sum(1)  # over all columns, also those of no unit
        self.common, self.variance = self.full.clone(), self.full.clone()
        self.error = torch.zeros_like(self.full)

    def _by_unit(self, values: Tensor) -> Tensor:
        return values[:, self.columns].sum(2)

    def _lost(self, common: Tensor, variance: Tensor) -> Tensor:
        full = self.full.view(-1, *[1] * (common.dim() - 1))
        scale = (full * torch.maximum(variance, full * 1e-9)).sqrt()
        return 2 * full * (1 - (common / scale).nan_to_num(0, 0, 0).clamp(-1, 1))  # a constant output has no error

    def rise(self) -> Tensor:
        after = self._lost(self.common[:, None] - self.share, self.variance[:, None] - 2 * self.left + self.own)
        return (after - self.error[:, None]).sum(0)

    def remove(self, unit: int) -> None:
        c = self.columns[unit]
        self.variance = self.variance - 2 * self.left[:, unit] + self.own[:, unit]
        self.common = self.common - self.share[:, unit]
        self.error = self._lost(self.common, self.variance)
        self.left -= self._by_unit((self.weight[:, c] @ self.spread[c]) * self.weight)
