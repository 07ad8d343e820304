"""The cut as plain data: which indices of each tensor stay, and which numbers of the model change with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..axes import Atom, Expr, atoms, keep_mask, norm
from ..edit import Attribute, Cuts, Indices, held_objects, object_at
from ..trace import Change, Trace, solve_attributes

Keep = Mapping[Atom, Tensor]  # a mask over the units of each group that loses some


def cuts_of(trace: Trace, keep: Keep) -> Cuts:
    """The cuts that keep only these units of the traced model."""
    cuts = Cuts(attributes=_located(trace.model, solve_attributes(trace, dict(keep))))
    lists: dict[bytes, list[int]] = {}  # dims that keep the same indices share one list
    stays: dict[Expr, list[int]] = {}  # the same by axis: most dims share their axis with others
    for name, axes in trace.dims.items():
        found: Indices = {}
        for d, e in enumerate(map(norm, axes)):
            if keep.keys().isdisjoint(atoms(e)):
                continue
            if e not in stays:
                mask = keep_mask(e, keep)
                stays[e] = lists.setdefault(mask.numpy().tobytes(), mask.nonzero()[:, 0].tolist())
            if len(stays[e]) < e.size:
                found[d] = stays[e]
        if found:
            cuts.tensors[name] = found
            cuts.shapes[name] = tuple(e.size for e in axes)
    return cuts


def _located(model: nn.Module, changes: Sequence[Change]) -> list[Attribute]:
    """The changed numbers with the path of the object that holds each: a module, or a config that modules hold."""
    modules = {id(module): name for name, module in model.named_modules()}
    configs: dict[int, str] | None = None
    found: list[Attribute] = []
    for change in changes:
        path, own = modules.get(id(change.owner)), False
        if path is None and change.module is None:
            configs = configs or {id(value): at for at, value in held_objects_of(model)}
            path = configs[id(change.owner)]
        elif path is None:
            assert change.module is not None
            inside = object_at(model, change.module)
            path = next(at for at, value in held_objects(inside, change.module) if value is change.owner)
            own = True
        found.append(Attribute(path, *change.key, change.old, change.new, own))
    return sorted(found, key=lambda a: a.own)  # a module copies its config after the common values are written


def held_objects_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Objects with attributes that modules hold. The shortest path comes last, so that a dict keeps that one."""
    everything = [item for path, module in model.named_modules() for item in held_objects(module, path)]
    return iter(sorted(everything, key=lambda item: -item[0].count(".")))
