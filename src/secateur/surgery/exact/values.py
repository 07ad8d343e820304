"""The values of removed units, and single operators of the traced run on stand-ins for their tensors."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ...axes import Atom
from ...trace import Ref, Step


@dataclass
class RemovedValue:
    """What the removed units of a tensor hold.

    `zero`: atoms whose removed units are zero. `varies`: atoms whose removed units depend on the inputs, with the reason. All
    others are constant: `value` has their values, in the shape of the tensor, with stride 0 along dims where they are the
    same; None: all are zero. `since`: the first operator after which the value differs from position to position.
    """

    zero: frozenset[Atom] = frozenset()
    varies: dict[Atom, str] = field(default_factory=dict)
    value: Tensor | None = None
    since: str = ""


@dataclass(frozen=True)
class Contribution:
    """What the kept outputs of a step lose with an atom's removed units: a number per channel, or why there is none."""

    step: int
    atom: Atom
    value: Tensor | str


def where(step: Step) -> str:
    """Names a step in messages."""
    return f"{step.kind} in {step.module or 'the model'}"


def first(out: Any) -> Tensor:
    """The first output of an operator."""
    return out[0] if isinstance(out, list | tuple) else out


@functools.cache
def aliases(func: Any) -> tuple[bool, bool]:
    """Whether the operator writes to its inputs (in-place views do not), and whether its output shares their memory."""
    returns = getattr(getattr(func, "_schema", None), "returns", ())
    shares = any(r.alias_info is not None for r in returns)
    writes = any(r.alias_info is not None and r.alias_info.is_write for r in returns)
    return writes and torch.Tag.inplace_view not in func.tags, shares


def operands(step: Step, *names: str | None) -> list[int | None]:
    """The numbers of the tensors that a step is given as these arguments; None where an argument is no tensor."""
    given = step.arguments
    return [value.number if name and isinstance(value := given.get(name), Ref) else None for name in names]


def base_name(step: Step) -> str:
    """The name of a step's operator, without the underscore of in-place operators."""
    return step.name.removesuffix("_") if aliases(step.func)[0] else step.name


def is_random(step: Step) -> bool:
    """True if the output is drawn at random or uninitialised; False for random operators called with training=False."""
    if step.operator.undefined:
        return True
    if not _draws(step.func):
        return False
    given = step.arguments
    return given.get("training", given.get("train")) is not False and given.get("dropout_p", 1.0) != 0.0


@functools.cache
def _draws(func: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in func.tags


def read_inputs(step: Step) -> tuple[int, ...]:
    """The numbers of the tensors that a step reads: all but noise that it ignores."""
    noise = operands(step, step.operator.noise)[0]
    return step.inputs if noise is None or is_random(step) else tuple(n for n in step.inputs if n != noise)


def is_scaled(step: Step) -> bool:
    """True if alpha or beta is not 1."""
    return any(step.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))


def run_step(step: Step, stand: Mapping[int, Tensor]) -> Any:
    """Runs the operator of a step on stand-ins for its tensors, in double precision.

    Views run as `reshape`, since stand-ins have other strides, and operators that pass their input on do not run at all.
    """
    operator, writes = step.operator, aliases(step.func)[0]

    def value(v: Any) -> Any:
        if isinstance(v, Ref):
            return stand[v.number].clone() if writes else stand[v.number]
        if isinstance(v, tuple) and any(isinstance(x, Ref | tuple) for x in v):
            return [value(x) for x in v]
        return list(v) if isinstance(v, tuple) else v

    if operator.identity:
        return _cast(value(step.args[0]), step.kwargs.get("dtype"))
    if step.name in _RESHAPES:
        return torch.reshape(value(step.args[0]), list(step.args[1]))
    args = [value(v) for v in step.args]
    kwargs = {k: value(v) for k, v in step.kwargs.items() if k not in ("dtype", "device", "layout", "pin_memory")}
    if writes and isinstance(args[0], Tensor):
        if operator.values == "elementwise":
            args[0] = torch.broadcast_tensors(*(a for a in args if isinstance(a, Tensor)))[0]
        args[0] = args[0].clone()
    return step.func(*args, **kwargs)


_RESHAPES = frozenset({"aten::view", "aten::_unsafe_view"})


def _cast(t: Tensor, dtype: torch.dtype | None) -> Tensor:
    """The values after a cast to `dtype`, rounded as the cast rounds them; fractions are held in double precision."""
    if dtype is None or dtype.is_complex:
        return t
    return t.to(dtype).double() if dtype.is_floating_point else t.to(dtype)


def once(t: Tensor) -> Tensor:
    """The tensor with one entry along dims of stride 0."""
    strides = t.stride()
    if 0 not in strides:
        return t
    return t.as_strided([size if stride else min(size, 1) for size, stride in zip(t.shape, strides)], strides)


def once_along(t: Tensor, dim: int) -> Tensor | None:
    """The tensor with one entry along a dim, or None if its entries there differ."""
    if t.stride(dim) and t.shape[dim] > 1 and not same(t, dim):
        return None
    return t.narrow(dim, 0, 1)


def extent(t: Tensor, d: int, rank: int) -> int:
    """How many different entries a tensor has along dim `d` of a broadcast to `rank` dims."""
    at = d - (rank - t.dim())
    return 1 if at < 0 or t.stride(at) == 0 else t.shape[at]


def same(t: Tensor, dim: int) -> bool:
    """Whether all entries along the dim are equal, up to rounding in double precision."""
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
    """A copy on the CPU, fractions in double precision."""
    return t.detach().cpu().double() if t.is_floating_point() else t.detach().cpu()


def alternating(shape: Sequence[int], seed: int) -> Tensor:
    """Random numbers of at least 0.5 in size whose sign alternates along every dim, to stand for values that vary."""
    made = torch.rand(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64) + 0.5
    for d in range(len(shape)):
        made[(slice(None),) * d + (slice(1, None, 2),)].neg_()
    return made
