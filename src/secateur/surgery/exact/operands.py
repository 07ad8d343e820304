"""Single operators of the run on stand-ins for their tensors, and the values that go into them."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...axes import Atom
from ...ops import arguments_of
from ...trace import Ref, Step

PASSING = ("clone", "_to_copy", "contiguous", "detach", "alias", "lift_fresh", "dropout", "native_dropout")


@dataclass
class RemovedValue:
    """The removed units of a tensor: the atoms that say zero, those that vary (with why), and the values of all others."""

    zero: frozenset[Atom] = frozenset()
    bad: dict[Atom, str] = field(default_factory=dict)
    value: Tensor | None = None  # in the shape of the tensor, dims along which it is constant of stride 0; None: all zero
    since: str = ""  # the operator from which on it differs from place to place


@dataclass(frozen=True)
class Contribution:
    """What the kept outputs of a step lose with an atom's removed units: a number for each channel, or why there is none."""

    step: int
    atom: Atom
    value: Tensor | str


def where(step: Step) -> str:
    return f"{step.kind} in {step.module or 'the model'}"


def first(out: Any) -> Tensor:
    return out[0] if isinstance(out, list | tuple) else out


@functools.cache
def aliases(func: Any) -> tuple[bool, bool]:
    """Whether the operator writes to what it is given (views in place do not), and whether its result shares its memory."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    shares = any(r.alias_info is not None for r in returns)
    writes = any(r.alias_info is not None and r.alias_info.is_write for r in returns)
    return writes and torch.Tag.inplace_view not in func.tags, shares


def is_random(step: Step) -> bool:
    """Whether an operator draws numbers. Dropout does not when it counts; nor does what is told that nothing is trained."""
    if torch.Tag.nondeterministic_seeded not in step.func.tags or step.kind in PASSING:
        return False
    names = arguments_of(step.func)
    given = {**names, **dict(zip(names, step.args)), **step.kwargs}
    return given.get("training", given.get("train")) is not False


def is_scaled(step: Step) -> bool:
    """Whether a sum of a product and a bias takes either of them some other number of times than once."""
    return any(step.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def call(step: Step, stand: Mapping[int, Tensor], func: Any = None) -> Any:
    """The operator on stand-ins for its tensors; `func` instead of it, on its first two arguments."""

    def value(v: Any) -> Any:
        if isinstance(v, Ref):
            return stand[v.number].clone() if aliases(step.func)[0] else stand[v.number]
        if isinstance(v, tuple) and any(isinstance(x, Ref | tuple) for x in v):
            return [value(x) for x in v]
        return list(v) if isinstance(v, tuple) else v

    kwargs = {k: value(v) for k, v in step.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")}
    kind = step.kind
    if func is None and kind in PASSING:
        return _cast(value(step.args[0]), step.kwargs.get("dtype"))
    args = [value(v) for v in (step.args if func is None else step.args[:2])]
    if aliases(step.func)[0] and isinstance(args[0], Tensor):
        tensors = [a for a in args if isinstance(a, Tensor)]
        args[0] = args[0].expand(torch.broadcast_shapes(*(t.shape for t in tensors))).clone()
    return (func or step.func)(*args, **kwargs)


def _cast(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """As a cast would leave it, but for rounding: fractions are in double precision here."""
    if dtype is None or dtype.is_complex or (dtype.is_floating_point and t.is_floating_point()):
        return t
    return t.double() if dtype.is_floating_point else t.to(dtype)


def once(t: Tensor) -> Tensor:
    """Dims of stride 0 as one entry."""
    strides = t.stride()
    if 0 not in strides:
        return t
    return t.as_strided([size if stride else min(size, 1) for size, stride in zip(t.shape, strides)], strides)


def once_along(t: Tensor, dim: int) -> Tensor | None:
    if t.stride(dim) and t.shape[dim] > 1 and not same(t, dim):
        return None
    return t.narrow(dim, 0, 1)


def extent(t: Tensor, d: int, rank: int) -> int:
    at = d - (rank - t.dim())
    return 1 if at < 0 or t.stride(at) == 0 else t.shape[at]


def same(t: Tensor, dim: int) -> bool:
    """Whether all entries along the dim are equal, as far as double precision can tell."""
    if t.shape[dim] <= 1 or not t.numel():
        return True
    t = once(t)
    if t.shape[dim] == 1:
        return True
    if not t.is_floating_point():
        return bool((t == t.narrow(dim, 0, 1)).all())
    spread = (t - t.narrow(dim, 0, 1)).abs().max()
    return bool(spread <= 64 * torch.finfo(torch.float64).eps * t.abs().max())


def wide(t: Tensor) -> Tensor:
    return t.detach().cpu().double() if t.is_floating_point() else t.detach().cpu()


def pads_with_more(step: Step, kind: str) -> bool:
    return "pad" in kind and len(step.args) > 2 and isinstance(step.args[2], int | float) and step.args[2] != 0
