"""Finds out how a model's constructor computes sizes and attributes from the numbers of its config.

A model with a `config` is built once more, on the meta device, from a copy of the config whose integers are tagged. Then
`self.times = config.heads // config.groups` has that division as its source, and the weight of `nn.Linear(config.width, 5)` has
a size with the source `config.width`. The sizes of a cut model are equations in the config numbers. They give new values to
attributes that the traced run did not read.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..axes import (
    Arithmetic,
    Attr,
    AttrId,
    AttrKey,
    Expr,
    Guard,
    Prod,
    SizeUse,
    Source,
    attributes_in,
    evaluate,
    factors,
    norm,
)
from ..edit import OWN
from .provenance import Journal, Tagged, Tagging, is_config

_FACTORIES = frozenset(["empty", "zeros", "ones", "full", "rand", "randn"])


@dataclass
class Blueprint:
    """What a constructor computes from config numbers: integer attributes by (module, key), sizes by (parameter, dim)."""

    attributes: dict[tuple[str, AttrKey], Source] = field(default_factory=dict)
    sizes: dict[tuple[str, int], Source] = field(default_factory=dict)


class _FactorySizes(TorchFunctionMode):
    """Records the sizes that tensors are made with, by storage, so that tagged sizes are not lost."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, list[Any]] = {}
        self.held: list[Tensor] = []  # keeps the storages alive, so that the keys stay valid

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _FACTORIES and isinstance(out, Tensor):
            sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
            self.made[out.untyped_storage()._cdata] = list(sizes)[: out.dim()]
            self.held.append(out)
        return out


def blueprint(model: nn.Module) -> Blueprint | None:
    """Returns the blueprint of a model, or None if its class does not build the same model from the config alone."""
    config = getattr(model, "config", None)
    if not is_config(config):
        return None
    journal = Journal(tag_copies=True)
    try:
        with Tagging(nn.Module(), journal) as tags:  # the originals are untagged again once the copy is made
            tags.tag(config)
            tagged = copy.deepcopy(config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"), _FactorySizes() as sizes:
            built = type(model)(tagged)
    except Exception:
        return None
    finally:
        journal.open = False
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    if {name: tuple(p.shape) for name, p in built.named_parameters()} != shapes:
        return None
    found = Blueprint()
    for name, parameter in built.named_parameters():
        for d, size in enumerate(sizes.made.get(parameter.untyped_storage()._cdata, ())):
            if isinstance(size, Tagged):
                found.sizes[name, d] = size.source
    for path, module in built.named_modules():
        for key, value in _tagged_attributes(module):
            found.attributes[path, key] = value.source
    return found


def _tagged_attributes(module: nn.Module) -> Iterator[tuple[AttrKey, Tagged]]:
    for name, value in vars(module).items():
        if name in OWN:
            continue
        items: Iterable[tuple[Any, Any]] = (
            enumerate(value) if type(value) in (list, tuple) else value.items() if type(value) is dict else [(None, value)]
        )
        yield from (((name, index), item) for index, item in items if isinstance(item, Tagged))


def uses_of_compared_attributes(
    model: nn.Module, dims: Mapping[str, Sequence[Expr]], uses: Iterable[SizeUse], guards: Iterable[Guard], plan: Blueprint
) -> list[SizeUse]:
    """Returns size uses for attributes that the run only compared, as in `if self.groups > 1`.

    The blueprint tells which axis such an attribute is the size of. As a size use, the attribute follows the axis, and the
    comparison has the same outcome after a cut.
    """
    names = {id(module): path for path, module in model.named_modules()}
    known = {attr.id for use in uses for attr in attributes_in(use.source)}
    found: dict[AttrId, SizeUse] = {}
    for guard in guards:
        for attr in attributes_in(guard.left, guard.right):
            if attr.id not in known and attr.id not in found and id(attr.owner) in names:
                axis = _axis_of(attr, names[id(attr.owner)], dims, plan)
                if axis is not None and axis.size == attr.old:
                    found[attr.id] = SizeUse(guard.module, "the constructor", attr, axis, attr.old)
    return list(found.values())


def _axis_of(attr: Attr, path: str, dims: Mapping[str, Sequence[Expr]], plan: Blueprint) -> Expr | None:
    """Returns the axis that an attribute of the module at `path` is the size of, judged by the tensors in that module."""
    source = plan.attributes.get((path, attr.key))
    if source is None:
        return None
    parts: dict[AttrId, list[Expr]] = {}
    for (name, d), made in plan.sizes.items():
        if name.startswith(f"{path}.") and name in dims:
            parts = _matched(made, dims[name][d]) | parts
    found = _factors_of(source, parts)
    return None if found is None else norm(Prod(found))


def _matched(made: Source, axis: Expr) -> dict[AttrId, list[Expr]]:
    """Matches a size that is a product of config numbers with the factors of an axis; empty if they do not line up."""
    left = factors(axis)
    matched: dict[AttrId, list[Expr]] = {}
    for leaf in _product(made):
        taken = _take_front(left, int(evaluate(leaf, {}, {})))  # a factor may be computed: heads * (width // heads)
        if taken is None:
            return {}
        if isinstance(leaf, Attr):
            matched[leaf.id] = taken
    return matched


def _product(source: Source) -> list[Source]:
    if isinstance(source, Arithmetic) and source.function is operator.mul:
        return [*_product(source.left), *_product(source.right)]
    return [source]


def _take_front(parts: list[Expr], size: int) -> list[Expr] | None:
    """Removes the leading factors with a product of `size` from the list and returns them; None if there are none."""
    taken: list[Expr] = []
    while size > 1 and parts and size % parts[0].size == 0:
        size //= parts[0].size
        taken.append(parts.pop(0))
    return taken if size == 1 else None


def _factors_of(source: Source, parts: Mapping[AttrId, list[Expr]]) -> list[Expr] | None:
    """Returns the factors whose sizes multiply to the source, for products and quotients of attributes in `parts`."""
    if isinstance(source, Attr):
        return parts.get(source.id)
    if not isinstance(source, Arithmetic) or source.function not in (operator.mul, operator.floordiv):
        return None
    left, right = _factors_of(source.left, parts), _factors_of(source.right, parts)
    if left is None or right is None:
        return None
    if source.function is operator.mul:
        return [*left, *right]
    rest = [norm(e) for e in left]
    for e in right:
        at = next((i for i, f in enumerate(rest) if f is norm(e)), None)
        if at is None:
            return None
        del rest[at]
    return rest
