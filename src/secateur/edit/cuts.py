"""Cuts as plain data, applied to a model that was checked to fit them.

A cut model stores its cuts, so that it can be saved and built again (`history`, `remember_`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .._layers import right_sizes
from .._tree import nearest
from ..kernels import slab_elements
from .configs import own_objects_
from .tensors import owned_tensors, put_

Indices = dict[int, list[int]]  # dim -> the indices that stay


class Attribute(NamedTuple):
    """A changed number: attribute `name` (at `index`, if it holds several) of the object at the dotted `path`.

    `own`: the object is a config that other modules read too and this module needs its own value, so it gets a copy of it.
    `old` and `new` are numbers, or lists where a config has an entry for each block and blocks are removed.
    """

    path: str
    name: str
    index: Any
    old: Any
    new: Any
    own: bool = False


@dataclass
class Cuts:
    """A cut as plain data: kept indices by tensor and dim, old shapes, changed numbers, added parameters.

    `drop`: the positions of the blocks that are removed from a list of modules. `lengths`: how many blocks it had. Blocks are
    removed first; all other names are those of the model without them. `recipe`: the request, in words.
    """

    tensors: dict[str, Indices] = field(default_factory=dict)
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    attributes: list[Attribute] = field(default_factory=list)
    added: dict[str, tuple[int, ...]] = field(default_factory=dict)
    drop: dict[str, list[int]] = field(default_factory=dict)
    lengths: dict[str, int] = field(default_factory=dict)
    recipe: str = ""


def apply_cuts_(model: nn.Module, cuts: Cuts, values: Mapping[str, Tensor] | None = None) -> nn.Module:
    """Cuts a model of the architecture that the cuts were made for, in place: a fresh one, or a full-size copy.

    `values` are the new contents of the tensors; without it they keep slices of their own. Raises ValueError when the model
    does not fit, before anything has changed. Configs that change are copied first, so the caller's own stay as they were.
    """
    tensors = check_fits(model, cuts)
    drop_(model, cuts.drop)
    owners = (object_at(model, a.path.rpartition(".")[0] if a.own else a.path) for a in cuts.attributes)
    own_objects_(model, [owner for owner in owners if not isinstance(owner, nn.Module)])
    known: dict[Any, Tensor] = {}
    new = (
        {name: select_indices(tensors[name].detach(), kept, known) for name, kept in cuts.tensors.items()}
        if values is None
        else values
    )
    grads = {
        name: select_indices(grad, kept, known)
        for name, kept in cuts.tensors.items()
        if tensors[name].is_leaf and (grad := tensors[name].grad) is not None
    }
    layers = [(module, right_sizes(module)) for module in model.modules()]
    for name, data in new.items():
        tensor = tensors.get(name)
        if tensor is not None:
            grad = grads.get(name, tensor.grad if tensor.is_leaf else None)
            if tensor.is_leaf:
                tensor.grad = None
            put_(tensor, data.detach())
            if grad is not None:
                tensor.grad = grad
    for attribute in cuts.attributes:
        write_attribute(model, attribute)
    for module, sizes in layers:
        for name, read in sizes:
            vars(module)[name] = read(module)
        if isinstance(module, nn.RNNBase):
            module.flatten_parameters()
    for name, shape in cuts.added.items():
        _add(model, name, shape, None if values is None else values[name])
    torch.clear_autocast_cache()  # an autocast around this call keeps copies of the old weights
    return model


def select_indices(tensor: Tensor, kept: Indices, known: dict[Any, Tensor] | None = None) -> Tensor:
    """Selects indices of each of these dims. `known` caches the index tensors of lists that many dims share.

    Where several dims lose indices, a few rows are taken at a time: what lies between two selections stays in the caches.
    """
    known = {} if known is None else known
    index = {d: _index(indices, tensor.device, known) for d, indices in sorted(kept.items())}
    last = tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last) and not tensor.is_contiguous()
    if len(index) > 1 and not tensor.requires_grad:
        tensor = _selected_by_rows(tensor, index)
    else:
        for d, at in index.items():
            tensor = tensor.index_select(d, at)
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor


def _index(indices: list[int], device: torch.device, known: dict[Any, Tensor]) -> Tensor:
    key = (id(indices), device)
    if key not in known:
        known[key] = torch.tensor(indices, device=device)
    return known[key]


def _selected_by_rows(tensor: Tensor, index: Mapping[int, Tensor]) -> Tensor:
    made = tensor.new_empty([len(index[d]) if d in index else size for d, size in enumerate(tensor.shape)])
    step = max(slab_elements(tensor.device) * len(tensor) // max(tensor.numel(), 1), 1)
    pieces = (tensor.index_select(0, some) for some in index[0].split(step)) if 0 in index else tensor.split(step)
    *between, final = (d for d in index if d)
    for piece, part in zip(pieces, made.split(step)):
        for d in between:
            piece = piece.index_select(d, index[d])
        torch.index_select(piece, final, index[final], out=part)
    return made


def check_fits(model: nn.Module, cuts: Cuts) -> dict[str, Tensor]:
    """Raises ValueError unless the model has the names and sizes that the cuts were made for. Returns its tensors by name."""
    for path, length in cuts.lengths.items():
        try:
            found = len(object_at(model, path)._modules)
        except AttributeError:
            raise ValueError(f"the cuts remove modules from {path!r}, and this model has no such list of modules") from None
        if found != length:
            raise ValueError(f"{path!r} holds {found} modules in this model; the cuts are for {length}")
        if any(not 0 <= i < length for i in cuts.drop.get(path, ())):
            raise ValueError(f"the cuts remove modules {cuts.drop[path]} of {path!r}, which holds {length}")
    if missing := cuts.drop.keys() - cuts.lengths.keys():
        raise ValueError(f"the cuts remove modules of {sorted(missing)} and do not state how many there were")
    with without(model, cuts.drop):
        tensors = dict(owned_tensors(model).values())
        _check_rest(model, cuts, tensors)
    return tensors


def _check_rest(model: nn.Module, cuts: Cuts, tensors: Mapping[str, Tensor]) -> None:
    ends: dict[int, tuple[int, int]] = {}  # id of a list of indices -> its least and greatest; many dims share a list
    for name, shape in cuts.shapes.items():
        if name not in tensors:
            raise ValueError(f"the cuts are for a model with a tensor {name!r}, and this one has none.{nearest(name, tensors)}")
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"{name!r} is {tuple(tensors[name].shape)} in this model; the cuts are for {shape}. Build the model as it was "
                "before the cut."
            )
        for d, kept in cuts.tensors.get(name, {}).items():
            if kept and id(kept) not in ends:
                ends[id(kept)] = min(kept), max(kept)
            if kept and 0 <= d < len(shape) and ends[id(kept)][0] >= 0 and ends[id(kept)][1] < shape[d]:
                continue
            raise ValueError(f"the cuts keep indices of {name!r} that a tensor of shape {shape} does not have")
    for a in cuts.attributes:
        value = _value(model, a)
        if (list(value) if isinstance(value, list | tuple) else value) != a.old:
            now = "missing" if value is ... else repr(value)
            raise ValueError(f"{a.path or 'the model'}.{a.name} is {now} in this model; the cuts change it from {a.old}")


def is_cut(model: nn.Module, cuts: Cuts) -> bool:
    """True if the numbers that the cuts change already have their new values."""

    def now(a: Attribute) -> Any:
        value = _value(model, a)
        return list(value) if isinstance(value, list | tuple) else value

    return all(now(a) == a.new for a in cuts.attributes)


class Passing(nn.Module):
    """Replaces a removed block that is called by name: returns the first tensor it is given."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


def drop_(model: nn.Module, drop: Mapping[str, Sequence[int]]) -> None:
    """Removes modules from the lists that hold them, in place; where names are positions, later modules are renumbered.

    Modules that are held and called by name are replaced by `Passing`.
    """
    for holder, gone in [(object_at(model, path), set(places)) for path, places in drop.items()]:  # found before any name moves
        if not isinstance(holder, nn.ModuleList | nn.Sequential):
            named = enumerate(holder._modules.items())
            vars(holder)["_modules"] = {name: Passing() if place in gone else module for place, (name, module) in named}
            continue
        kept = [item for place, item in enumerate(holder._modules.items()) if place not in gone]
        numbered = all(name == str(place) for place, name in enumerate(holder._modules))
        vars(holder)["_modules"] = {str(n) if numbered else name: module for n, (name, module) in enumerate(kept)}


@contextmanager
def without(model: nn.Module, drop: Mapping[str, Sequence[int]]) -> Iterator[None]:
    """Removes these modules inside the block and puts them back on exit."""
    held = [(holder, holder._modules) for holder in (object_at(model, path) for path in drop)]
    drop_(model, drop)
    try:
        yield
    finally:
        for holder, modules in held:
            vars(holder)["_modules"] = modules


class History(tuple[Cuts, ...]):
    """The cuts that a model went through, the first one first. Immutable, so copies of a model share it."""

    def __deepcopy__(self, memo: Any) -> History:
        return self


_HISTORY = "_secateur_cuts"


def history(model: nn.Module) -> History:
    """The cuts that a model, and the models inside it, went through."""
    found = [(path, vars(module)[_HISTORY]) for path, module in model.named_modules() if _HISTORY in vars(module)]
    return History(_inside(path, cuts) for path, made in sorted(found, key=lambda item: item[0].count(".")) for cuts in made)


def remember_(model: nn.Module, cuts: Sequence[Cuts]) -> None:
    """Stores these cuts as all that the model went through."""
    for module in model.modules():
        vars(module).pop(_HISTORY, None)
    if cuts:
        vars(model)[_HISTORY] = History(cuts)


def _inside(path: str, cuts: Cuts) -> Cuts:
    """Cuts of a model, as cuts of the model that holds it at `path`."""
    if not path:
        return cuts

    def named(values: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{path}.{name}" if name else path: value for name, value in values.items()}

    moved = [a._replace(path=f"{path}.{a.path}" if a.path else path) for a in cuts.attributes]
    fields = {f: named(getattr(cuts, f)) for f in ("tensors", "shapes", "added", "drop", "lengths")}
    return replace(cuts, attributes=moved, **fields)


def object_at(model: nn.Module, path: str) -> Any:
    return functools.reduce(getattr, path.split("."), model) if path else model


def _value(model: nn.Module, a: Attribute) -> Any:
    try:
        held = vars(object_at(model, a.path))[a.name]  # not getattr: some configs answer differently for each layer
        return held if a.index is None else held[a.index]
    except (AttributeError, LookupError, TypeError):
        return ...  # missing; None may be a value


def write_attribute(model: nn.Module, a: Attribute) -> None:
    owner = object_at(model, a.path)
    if a.own:
        parent, _, name = a.path.rpartition(".")
        owner = vars(object_at(model, parent))[name] = copy.copy(owner)
    held = vars(owner)[a.name]
    if a.index is None:
        held = type(held)(a.new) if isinstance(a.new, list) else a.new
    elif isinstance(held, dict):
        held = {**held, a.index: a.new}
    else:
        held = type(held)(a.new if i == a.index else v for i, v in enumerate(held))
    vars(owner)[a.name] = held


def _add(model: nn.Module, name: str, shape: Sequence[int], value: Tensor | None) -> None:
    path, _, attribute = name.rpartition(".")
    module = object_at(model, path)
    like = next(module.parameters())
    data = torch.zeros(tuple(shape), dtype=like.dtype, device=like.device) if value is None else value.detach()
    module.register_parameter(attribute, nn.Parameter(data, requires_grad=like.requires_grad))
