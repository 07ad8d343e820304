"""Runs without the arithmetic: heavy operators return a tensor of the right shape without computing its values.

`Outlined()(aten.mm.default, (a, b), {})` checks the shapes and returns zeros of shape (a.shape[0], b.shape[1]). Reading a value
that is computed from such a result raises `ValueRead`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..ops import Blank, Unfit, lookup

_OTHER_DTYPE = {
    f"aten::{n}"
    for n in ["_to_copy", "eq", "ne", "lt", "gt", "le", "ge", "isnan", "isinf", "isfinite", "logical_not", "signbit"]
}  # element-wise operators whose result can have another dtype
_MANY = (list, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # types of most arguments; isinstance(..., Tensor) is slow for them
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class ValueRead(RuntimeError):
    """The run reads a value that was not computed."""


class Outlined:
    """Calls operators, heavy ones by their shapes alone, and keeps track of tensors made from such results."""

    def __init__(self) -> None:
        self.empty: set[int] = set()  # storages whose values were not computed
        self.blank = Blank()

    def __call__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        plain, reads = _facts(func)
        blank = any(map(self.is_blank, tensors_of((*args, *kwargs.values()))))
        if blank and reads:
            raise ValueRead(f"{func} reads values that were not computed")
        short, made = lookup(func).shapes, None
        if short is not None or (blank and plain):
            with torch._C.DisableTorchFunction(), contextlib.suppress(Unfit):
                made = self.alike(args) if short is None else short(self.blank, *args, **kwargs)
        out = func(*args, **kwargs) if made is None else made
        if blank or made is not None:
            self.empty.update(t.untyped_storage()._cdata for t in tensors_of(out if isinstance(out, _MANY) else (out,)))
        return out

    def is_blank(self, tensor: Tensor) -> bool:
        """Returns whether the values of a tensor were not computed."""
        return tensor.untyped_storage()._cdata in self.empty

    def alike(self, args: Sequence[Any]) -> Tensor | None:
        """Returns a blank result for an element-wise operator on blank inputs of one shape and dtype, else None."""
        x = args[0]
        if not isinstance(x, Tensor) or not x.is_floating_point() or not x.is_contiguous():
            return None
        alike = all(a.dtype == x.dtype and a.shape == x.shape for a in args[1:] if isinstance(a, Tensor))
        return self.blank(x, *x.shape) if alike else None


@functools.cache
def _facts(func: Any) -> tuple[bool, bool]:
    """Returns whether the operator is element-wise and keeps the dtype, and whether it reads values."""
    tags, schema = getattr(func, "tags", ()), getattr(func, "_schema", None)
    if schema is None:
        return False, False
    single = torch.Tag.pointwise in tags and not schema.is_mutable and len(schema.returns) == 1
    return single and schema.name not in _OTHER_DTYPE, not _READS.isdisjoint(tags)


def tensors_of(values: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among these values and inside lists and tuples."""
    found: list[Tensor] = []
    for v in values:
        if type(v) in _PLAIN:
            continue
        if isinstance(v, Tensor):
            found.append(v)
        elif isinstance(v, _MANY) and not _PLAIN.issuperset(map(type, v)):
            found += tensors_of(v)
    return found
