"""Budgets: how one sparsity is spread over tensors. Every spread keeps the total at what was asked for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any, Protocol

import torch

from ._text import read_call
from ._tree import nearest
from .scores import Scores


class Spread(Protocol):
    """Returns a sparsity for each tensor, from the scores of all tensors and the total sparsity."""

    def __call__(self, scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]: ...


def uniform(scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
    """The same sparsity for every tensor."""
    return dict.fromkeys(scores, sparsity)


def erk(scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
    """Makes large tensors sparser: density goes with the sum of a tensor's dimensions over their product.

    This is the Erdős-Rényi-Kernel rule (Evci et al., 2020).
    """
    sizes = {name: one.numel for name, one in scores.items()}
    raw = {name: sum(one.layout.shape) / math.prod(one.layout.shape) for name, one in scores.items()}
    return _at_least_dense(sizes, sparsity, lambda name, scale: scale * raw[name])


def owl(strength: float = 0.08, outlier: float = 5.0) -> Spread:
    """Makes tensors with more outliers denser (Yin et al., 2024). Sparsities differ by at most twice `strength`.

    An outlier is an element whose score is above `outlier` times the mean of its tensor.
    """
    for name, value, most in (("strength", strength, 1.0), ("outlier", outlier, math.inf)):
        if not isinstance(value, Real) or not 0 <= float(value) <= most:
            raise ValueError(
                f"{name}={value!r} must be a number from 0 to {most}; a spread is made by calling: spread=sc.owl()"
            )

    def spread(scores: Mapping[str, Scores], sparsity: float, measured: Mapping[str, float] | None = None) -> dict[str, float]:
        share = measured or {name: _outliers(one, outlier) for name, one in scores.items()}
        low, high = min(share.values()), max(share.values())
        if high == low:
            return uniform(scores, sparsity)
        sizes = {name: one.numel for name, one in scores.items()}
        extra = {name: 2 * strength * (s - low) / (high - low) for name, s in share.items()}
        return _at_least_dense(sizes, sparsity, lambda name, shift: shift + extra[name], additive=True)

    spread.measure = lambda scores: _outliers(scores, outlier)  # type: ignore[attr-defined]  # of one whole tensor
    spread.__qualname__ = f"owl({strength}, {outlier})"  # a pruner's state names its spread
    return spread


_NAMED: dict[str, Spread] = {"uniform": uniform, "erk": erk}
_MADE: dict[str, Callable[..., Spread]] = {"owl": owl}  # functions that make a spread


def as_spread(given: Any) -> Any:
    """The spread that a text means: "erk", "owl" or "owl(0.1, outlier=4)". Other values are returned unchanged."""
    if not isinstance(given, str):
        return given
    if given in _NAMED or given in _MADE:
        return _NAMED[given] if given in _NAMED else _MADE[given]()
    if given.partition("(")[0].strip() in _MADE:
        return read_call(given, _MADE)
    known = [*_NAMED, *_MADE]
    raise ValueError(f"spread={given!r} is not one of {', '.join(map(repr, known))}.{nearest(given, known)}")


def hold(
    shares: Mapping[str, float], pruned: Mapping[str, float], sizes: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """Sparsities that keep what is pruned already and still reach the total: other tensors lose less instead."""
    asked = sparsity * sum(sizes.values())

    def held(shift: float) -> dict[str, float]:
        return {name: max(pruned[name], share - shift) for name, share in shares.items()}

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        gone = sum(share * sizes[name] for name, share in held(middle).items())
        low, high = (middle, high) if gone > asked else (low, middle)
    return held(low)


def cap(shares: Mapping[str, float], sizes: Mapping[str, int], most: float) -> dict[str, float]:
    """Sparsities of at most `most` with the same total: tensors that would lose more lose `most`, and the others more."""
    asked = sum(share * sizes[name] for name, share in shares.items())

    def capped(shift: float) -> dict[str, float]:
        return {name: min(most, share + shift) for name, share in shares.items()}

    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        gone = sum(share * sizes[name] for name, share in capped(middle).items())
        low, high = (middle, high) if gone < asked else (low, middle)
    return capped(high)


def _outliers(scores: Scores, times: float) -> float:
    total = sum(scores.each(lambda slab, *_: float(slab.sum(dtype=torch.float64))))
    bar = times * total / max(scores.numel, 1)
    return sum(scores.each(lambda slab, *_: int((slab > bar).sum()))) / max(scores.numel, 1)


def _at_least_dense(
    sizes: Mapping[str, int], sparsity: float, density: Callable[[str, float], float], *, additive: bool = False
) -> dict[str, float]:
    """Finds the scale (or shift) at which the densities, clamped to [0, 1], keep the asked share of all elements."""
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
