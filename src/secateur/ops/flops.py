"""FLOP formulas: the one in an operator's record, or torch's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .record import lookup


def flop_formula(func: Any) -> Callable[..., int] | None:
    """The FLOPs of an operator as a function of shapes instead of tensors, with `out_shape`; None if it has no formula."""
    from torch.utils.flop_counter import flop_registry

    found = lookup(func).flops or flop_registry.get(getattr(func, "overloadpacket", None))
    return getattr(found, "__wrapped__", found)  # torch wraps its formulas in a slow conversion of tensors to shapes
