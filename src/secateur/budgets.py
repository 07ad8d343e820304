"""Budgets: spreads divide one total sparsity among tensors. The total is always the requested one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
    """Makes large tensors sparser: the density is proportional to the sum of a tensor's dimensions over their product.

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


@dataclass(frozen=True)
class ByLoss:
    """The spread that `by_loss` makes. `curves` are the errors of each tensor at `levels(sparsity)`, once they are measured."""

    reach: float = 0.3
    curvature: str = "fisher"
    curves: Mapping[str, Sequence[float]] | None = field(default=None, repr=False, compare=False)

    def levels(self, sparsity: float) -> list[float]:
        """The sparsities at which the errors of each tensor are measured, in rising order."""
        low, high = max(sparsity - self.reach, sparsity / 4), min(sparsity + self.reach, max(0.95, (1 + sparsity) / 2))
        return [low + (high - low) * i / (_POINTS - 1) for i in range(_POINTS)] if 0 < sparsity < 1 and self.reach else []

    def measured(self, curves: Mapping[str, Sequence[float]]) -> ByLoss:
        return replace(self, curves=curves)

    def __call__(self, scores: Mapping[str, Scores], sparsity: float) -> dict[str, float]:
        if self.curves is None:
            raise TypeError(f"spread={self} is measured on data=, so it goes with sc.plan and sc.prune_, not with sc.Pruner")
        return least_error({name: one.numel for name, one in scores.items()}, self.levels(sparsity), self.curves, sparsity)

    def __str__(self) -> str:
        more = "" if self.curvature == "fisher" else f', curvature="{self.curvature}"'
        return f"by_loss({self.reach:g}{more})"


_POINTS = 5  # of an error curve
_FINE = 20  # steps between two of them that a budget can take


def by_loss(reach: float = 0.3, curvature: str = "fisher") -> ByLoss:
    """Makes layers sparser where that costs the loss least. Needs `data=`, and takes backward passes over it.

    The error that pruning leaves in a layer's outputs, weighed by their effect on the loss, is measured at several
    sparsities that differ from the one asked for by at most `reach`; the shares minimise the sum of these errors.
    `curvature="diag"` weighs each output alone. `curvature="none"` needs no gradients: it compares errors relative to the
    size of each layer's outputs.
    """
    if not isinstance(reach, Real) or not 0 <= float(reach) < 1:
        raise ValueError(
            f"reach={reach!r} must be a number from 0 to below 1: how far a layer's sparsity may be from the total"
        )
    if curvature not in ("none", "diag", "fisher"):
        raise ValueError(f"by_loss takes curvature= 'none', 'diag' or 'fisher', not {curvature!r}")
    return ByLoss(float(reach), curvature)


def least_error(
    sizes: Mapping[str, int], levels: Sequence[float], curves: Mapping[str, Sequence[float]], sparsity: float
) -> dict[str, float]:
    """The sparsity of each tensor that minimises the summed errors at the same total, to the last element.

    `curves` holds the errors of each tensor at `levels`; a tensor without one gets the sparsity asked for. One Lagrange
    multiplier: each tensor takes the sparsity that minimises its error minus the price of the pruned elements.
    """
    shares = dict.fromkeys(sizes, sparsity)
    known = [name for name in sizes if name in curves] if levels else []
    if len(known) < 2:
        return shares
    fine = {name: _finer(levels, curves[name]) for name in known}
    asked = sparsity * sum(sizes[name] for name in known)

    def best(price: float) -> dict[str, float]:
        return {name: min(fine[name], key=lambda point: point[1] - price * sizes[name] * point[0])[0] for name in known}

    low, high = _bracket(lambda price: _pruned(best(price), sizes) < asked)
    few, many = best(low), best(high)
    least, most = _pruned(few, sizes), _pruned(many, sizes)
    part = (asked - least) / max(most - least, 1e-300) if most > least else 0.0
    part = min(max(part, 0.0), 1.0)
    return shares | _whole({name: few[name] + part * (many[name] - few[name]) for name in known}, sizes, asked)


def _finer(levels: Sequence[float], errors: Sequence[float]) -> list[tuple[float, float]]:
    """Points (sparsity, error) between the measured ones, with the logarithm of the error interpolated linearly."""
    least = max(*errors, 1e-300) * 1e-12
    logs = [math.log(max(error, least)) for error in errors]
    found = []
    for i in range((len(levels) - 1) * _FINE + 1):
        at, rest = min(i // _FINE, len(levels) - 2), i / _FINE
        rest -= at
        found.append(
            (
                levels[at] + rest * (levels[at + 1] - levels[at]),
                math.exp(logs[at] + rest * (logs[at + 1] - logs[at])),
            )
        )
    return found


def _bracket(too_little: Callable[[float], bool]) -> tuple[float, float]:
    """Two prices next to each other: at the lower one too little is pruned, at the higher one enough."""
    low, high = bisected(-200.0, 200.0, lambda power: too_little(math.exp(power)), 100)  # errors have any scale
    return math.exp(low), math.exp(high)


def bisected(low: float, high: float, too_low: Callable[[float], bool], rounds: int = 60) -> tuple[float, float]:
    """Halves the interval so many times; `too_low` is true at its lower end and false at its upper end."""
    for _ in range(rounds):
        middle = (low + high) / 2
        low, high = (middle, high) if too_low(middle) else (low, middle)
    return low, high


def _whole(shares: Mapping[str, float], sizes: Mapping[str, int], asked: float) -> dict[str, float]:
    """The shares with whole numbers of elements, whose sum is `asked`: the largest remainders are rounded up."""
    counts = {name: math.floor(share * sizes[name]) for name, share in shares.items()}
    left = round(asked) - sum(counts.values())
    order = sorted(shares, key=lambda name: counts[name] - shares[name] * sizes[name])
    for name in order[: max(left, 0)]:
        counts[name] += 1
    return {name: count / sizes[name] for name, count in counts.items()}


_NAMED: dict[str, Spread] = {"uniform": uniform, "erk": erk}
_MADE: dict[str, Callable[..., Spread]] = {"owl": owl, "by_loss": by_loss}  # functions that make a spread


def as_spread(given: Any) -> Any:
    """The spread that a text means: "erk", "owl" or "owl(0.1, outlier=4)". Other values are returned unchanged."""
    if not isinstance(given, str):
        return given
    if given in _NAMED or given in _MADE:
        return _NAMED[given] if given in _NAMED else _MADE[given]()
    if names_spread(given):
        return read_call(given, _MADE)
    known = [*_NAMED, *_MADE]
    raise ValueError(f"spread={given!r} is not one of {', '.join(map(repr, known))}.{nearest(given, known)}")


def names_spread(text: str) -> bool:
    """Whether a text such as "erk" or "owl(0.1)" names a spread."""
    return text in _NAMED or text.partition("(")[0].strip() in _MADE


def hold(
    shares: Mapping[str, float], pruned: Mapping[str, float], sizes: Mapping[str, int], sparsity: float
) -> dict[str, float]:
    """Raises sparsities to those already reached (`pruned`), and lowers the others so that the total stays the same."""
    asked = sparsity * sum(sizes.values())

    def held(shift: float) -> dict[str, float]:
        return {name: max(pruned[name], share - shift) for name, share in shares.items()}

    return held(bisected(0.0, 1.0, lambda shift: _pruned(held(shift), sizes) > asked)[0])


def cap(shares: Mapping[str, float], sizes: Mapping[str, int], most: float) -> dict[str, float]:
    """Limits sparsities to `most`, and raises the others so that the total stays the same."""
    asked = _pruned(shares, sizes)

    def capped(shift: float) -> dict[str, float]:
        return {name: min(most, share + shift) for name, share in shares.items()}

    return capped(bisected(0.0, 1.0, lambda shift: _pruned(capped(shift), sizes) < asked)[1])


def _pruned(shares: Mapping[str, float], sizes: Mapping[str, int]) -> float:
    """The number of elements that these sparsities prune."""
    return sum(share * sizes[name] for name, share in shares.items())


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
    _, high = bisected(low, high, lambda x: kept(x) < asked, 200)
    return {name: 1 - min(max(density(name, high), 0.0), 1.0) for name in sizes}
