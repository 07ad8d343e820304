"""Comparing answers: the tensors that a model returns, their largest relative difference, and runs in float64."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from ..edit import Inputs, copied, run, tensors_inside
from ..trace import main_outputs


def answer(model: nn.Module, inputs: Inputs, dtype: torch.dtype | None = None) -> Any:
    """The output of a copy of the model in eval mode, in this dtype (None: its own)."""
    args, kwargs = _as_dtype(dtype, inputs)
    made = copied(model)
    return run(made if dtype is None else widened(made, dtype), args, kwargs)


def widened(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The model itself, converted to another precision. Complex tensors stay complex."""
    return model._apply(lambda t: _cast(t, dtype))


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    return tensor.to(dtype.to_complex() if tensor.is_complex() else dtype if tensor.is_floating_point() else tensor.dtype)


def _as_dtype(dtype: torch.dtype | None, values: Any) -> Any:
    return tree_map(lambda v: _cast(v, dtype) if isinstance(v, Tensor) and dtype else v, values)


def tensors_of(result: Any) -> list[Tensor]:
    """The tensors of a model's answer that keep their shape in a cut."""
    return tensors_inside(main_outputs(result))


def difference(result: Any, expected: Any) -> float:
    """The largest absolute difference over the largest expected value; infinite where only one of them is finite."""
    return max(_differences(tensors_of(result), tensors_of(expected)), default=0.0)


def _differences(found: Iterable[Tensor], expected: Iterable[Tensor]) -> Iterable[float]:
    for a, b in zip(found, expected, strict=True):
        if a.shape != b.shape:  # the shape depends on values
            yield float("inf")
            continue
        a, b = (t.to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()):
            yield float("inf")
        elif bool(finite.any()):
            a, b = a[finite], b[finite]
            yield float((a - b).abs().max() / b.abs().max().clamp_min(1e-30))


def lost_finite(now: Sequence[Tensor], before: Sequence[Tensor]) -> bool:
    """True if a number that was finite is NaN or infinite now."""
    pairs = list(zip(now, before, strict=True))
    return any(not bool(a.isfinite().all()) and bool((b.isfinite() & ~a.isfinite()).any()) for a, b in pairs)
