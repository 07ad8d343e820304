"""Budgets: how one number is spread over tensors. A spread keeps the whole at what was asked."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Protocol

import torch

from .scores import Scores


class Spread(Protocol):
    """Gives each tensor its own sparsity, from the scores of all and the sparsity of the whole."""

    def __call__(self, scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]: ...


def uniform(scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
    """The same for every tensor."""
    return dict.fromkeys(scores, sparsity)


def erk(scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
    """Larger tensors sparser, by the sum of their dimensions over their product (Erdős-Rényi-Kernel: Evci et al., 2020)."""
    sizes = {name: one.numel for name, one in scores.items()}
    raw = {name: sum(one.layout.shape) / math.prod(one.layout.shape) for name, one in scores.items()}
    return _at_least_dense(sizes, sparsity, lambda name, scale: scale * raw[name])


def owl(strength: float = 0.08, outlier: float = 5.0) -> Spread:
    """Tensors with more outliers denser (Yin et al., 2024): an outlier scores over `outlier` times its tensor's mean.

    Sparsities differ by at most twice `strength`.
    """
    for name, value, most in (("strength", strength, 1.0), ("outlier", outlier, math.inf)):
        if not isinstance(value, Real) or not 0 <= float(value) <= most:
            raise ValueError(
                f"{name}={value!r} must be a number from 0 to {most}; a spread is made by calling: spread=sc.owl()"
            )

    def spread(scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
        share = {name: _outliers(one, outlier) for name, one in scores.items()}
        low, high = min(share.values()), max(share.values())
        if high == low:
            return uniform(scores, sparsity)
        sizes = {name: one.numel for name, one in scores.items()}
        extra = {name: 2 * strength * (s - low) / (high - low) for name, s in share.items()}
        return _at_least_dense(sizes, sparsity, lambda name, shift: shift + extra[name], additive=True)

    return spread


def hold(
    shares: Mapping[str, float], pruned: Mapping[str, float], sizes: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """Shares that keep what is pruned already and still add up: where a tensor cannot give way, the others do."""
    asked = sparsity * sum(sizes.values())

    def held(shift: float) -> dict[str, float]:
        return {name: max(pruned[name], share - shift) for name, share in shares.items()}

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        gone = sum(share * sizes[name] for name, share in held(middle).items())
        low, high = (middle, high) if gone > asked else (low, middle)
    return held(low)


def _outliers(scores: Scores, times: float) -> float:
    total = sum(scores.each(lambda slab, *_: float(slab.sum(dtype=torch.float64))))
    bar = times * total / max(scores.numel, 1)
    return sum(scores.each(lambda slab, *_: int((slab > bar).sum()))) / max(scores.numel, 1)


def _at_least_dense(
    sizes: Mapping[str, int], sparsity: float, density: Callable[[str, float], float], *, additive: bool = False
) -> dict[str, float]:
    """Finds the scale (or shift) at which the densities, held within [0, 1], keep exactly the asked share of all elements."""
    asked = (1 - sparsity) * sum(sizes.values())

    def kept(x: float) -> float:
        return sum(size * min(max(density(name, x), 0.0), 1.0) for name, size in sizes.items())

    low, high = (-2.0, 2.0) if additive else (0.0, 1.0)
    while kept(high) < asked and high < 1e18:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) < asked else (low, middle)
    return {name: 1 - min(max(density(name, high), 0.0), 1.0) for name in sizes}
