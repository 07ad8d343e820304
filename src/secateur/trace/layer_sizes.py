"""Links the size attributes of torch's own layers to the axes of their weights.

`Linear.in_features` is the size of dim 1 of its weight. A formula or comparison in the model that reads `in_features` therefore
depends on that axis, even if no call used the attribute as a size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .._layers import right_sizes
from ..axes import Arithmetic, Attr, AttrId, AxisSize, Expr, SizeUse, Source, attr_place, bindings
from .provenance import Journal, Tagged


def replace_size_attributes_(
    names: Mapping[int, str], dims: Mapping[str, list[Expr]], uses: list[SizeUse], journal: Journal
) -> None:
    """Replaces size attributes of torch's layers in the journal by sizes of weights, unless a call binds them to an axis.

    `names`: the names of the model's tensors, by id.
    """
    bound = bindings(uses, journal.guards)
    known: dict[AttrId, Source] = {}

    def size_of(attr: Attr) -> Source:
        owner, (name, index) = attr.owner, attr.key
        read = None
        if isinstance(owner, nn.Module) and index is None and attr_place(attr, "") not in bound:
            read = dict(right_sizes(owner)).get(name)
        found = None if read is None else read(_LayerWithTaggedSizes(owner, names, dims, journal))
        return found.source if isinstance(found, Tagged) else attr

    def replaced(source: Source) -> Source:
        if isinstance(source, Arithmetic):
            return Arithmetic(source.function, replaced(source.left), replaced(source.right))
        if isinstance(source, Attr):
            return known.setdefault(source.id, size_of(source))
        return source

    journal.formula_uses[:] = [replace(use, source=replaced(use.source)) for use in journal.formula_uses]
    journal.guards[:] = [replace(g, left=replaced(g.left), right=replaced(g.right)) for g in journal.guards]


class _LayerWithTaggedSizes:
    """A layer whose tensors have tagged shapes and whose integer attributes are tagged."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], dims: Mapping[str, list[Expr]], journal: Journal) -> None:
        self._given = module, names, dims, journal

    def __getattr__(self, name: str) -> Any:
        module, names, dims, journal = self._given
        value = getattr(module, name)
        if isinstance(value, Tensor) and id(value) in names:
            return SimpleNamespace(shape=tuple(Tagged(e.size, AxisSize(e), journal) for e in dims[names[id(value)]]))
        return Tagged(value, Attr(module, (name, None), value), journal) if type(value) is int and value > 1 else value
