"""The sizes that torch's own layers keep as attributes, read off their weights, so that a cut layer prints as what it is.

What has to be the size of an axis is mended from the trace; this is for the rest: `in_features` is read by people, and by
formulas and comparisons of the model, for which it is the size of the weight (`sizes_for_attributes_`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn

from .._layers import right_sizes
from ..axes import Expr
from ..edit import owned_tensors
from .equations import bindings, place
from .provenance import Attr, Dim, Journal, Op, Source, Tagged
from .tracer import Site


def sizes_for_attributes_(model: nn.Module, dims: Mapping[str, list[Expr]], sites: list[Site], journal: Journal) -> None:
    """In formulas and comparisons, sizes of weights for attributes that follow them and that nothing else sets."""
    names = {key: name for key, (name, _) in owned_tensors(model).items()}
    bound = bindings(sites, journal.guards)
    known: dict[Any, Source] = {}

    def size_of(attr: Attr) -> Source:
        owner, (name, index) = attr.owner, attr.key
        read = None
        if isinstance(owner, nn.Module) and index is None and place(attr, "") not in bound:
            read = dict(right_sizes(owner)).get(name)
        found = None if read is None else read(_Tagged(owner, names, dims, journal))
        return found.source if isinstance(found, Tagged) else attr

    def replaced(source: Source) -> Source:
        if isinstance(source, Op):
            return Op(source.function, replaced(source.left), replaced(source.right))
        if isinstance(source, Attr):
            return known.setdefault(source.id, size_of(source))
        return source

    journal.uses[:] = [replace(use, source=replaced(use.source)) for use in journal.uses]
    journal.guards[:] = [replace(g, left=replaced(g.left), right=replaced(g.right)) for g in journal.guards]


class _Tagged:
    """A layer whose tensors have tagged sizes."""

    def __init__(self, module: nn.Module, names: Mapping[int, str], dims: Mapping[str, list[Expr]], journal: Journal) -> None:
        self._given = module, names, dims, journal

    def __getattr__(self, name: str) -> Any:
        module, names, dims, journal = self._given
        value = getattr(module, name)
        if isinstance(value, Tensor) and id(value) in names:
            return SimpleNamespace(shape=tuple(Tagged(e.size, Dim(e), journal) for e in dims[names[id(value)]]))
        return Tagged(value, Attr(module, (name, None), value), journal) if type(value) is int and value > 1 else value
