"""Attributes that the traced run did not read, as the constructor made them: from numbers of the model's config.

A model with a `config` is built once more, on the meta device, from a copy whose integers are tagged. Every size of a parameter
and every integer attribute is then an expression over config numbers. The sizes of a cut model are equations in those numbers;
an attribute gets a new value where all solutions give the same one, and is left as it is where they do not.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..axes import Expr, Prod, factors, norm
from ..edit import OWN
from .provenance import Attr, Guard, Journal, Key, Op, Source, Tagged, Tagging, evaluate, is_config, leaves
from .tracer import Site

_FACTORIES = frozenset(["empty", "zeros", "ones", "full", "rand", "randn"])
_TRIES = 2000  # values tried before a number counts as undetermined

Equation = tuple[Source, int]  # what the source has to be


@dataclass
class Blueprint:
    """What a constructor made of config numbers: integer attributes by (module, key), sizes by (parameter, dim)."""

    attributes: dict[tuple[str, Key], Source] = field(default_factory=dict)
    sizes: dict[tuple[str, int], Source] = field(default_factory=dict)


class Sizes(TorchFunctionMode):
    """Remembers the tagged sizes of the tensors that a constructor makes."""

    def __init__(self) -> None:
        super().__init__()
        self.made: dict[int, list[Any]] = {}
        self.held: list[Tensor] = []  # keeps the keys valid

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") in _FACTORIES and isinstance(out, Tensor):
            sizes = kwargs.get("size", args[0] if args and isinstance(args[0], tuple | list) else args)
            self.made[out.untyped_storage()._cdata] = list(sizes)[: out.dim()]
            self.held.append(out)
        return out


def blueprint(model: nn.Module) -> Blueprint | None:
    """The blueprint of a model that its class builds from its config alone, or None."""
    config = getattr(model, "config", None)
    if not is_config(config):
        return None
    journal = Journal(lasting=True)
    try:
        with Tagging(nn.Module(), journal) as tags:  # only until it is copied: the owners are those of the model
            tags.tag(config)
            tagged = copy.deepcopy(config)
        with torch.random.fork_rng(devices=[]), torch.device("meta"), Sizes() as sizes:
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
        for key, value in _integers(module):
            found.attributes[path, key] = value.source
    return found


def compared_only(
    model: nn.Module, dims: Mapping[str, Sequence[Expr]], sites: Iterable[Site], guards: Iterable[Guard], plan: Blueprint
) -> list[Site]:
    """Where attributes that the run compares (`if self.groups > 1`), and does nothing else with, are the size of an axis.

    As sites, so that the comparison holds after a cut as it did before.
    """
    names = {id(module): path for path, module in model.named_modules()}
    known = {leaf.id for site in sites for leaf in leaves(site.source) if isinstance(leaf, Attr)}
    found: dict[Any, Site] = {}
    for guard in guards:
        for attr in (*leaves(guard.left), *leaves(guard.right)):
            if not isinstance(attr, Attr) or attr.id in known or attr.id in found or id(attr.owner) not in names:
                continue
            path = names[id(attr.owner)]
            source = plan.attributes.get((path, attr.key))
            inside = [(s, dims[name][d]) for (name, d), s in plan.sizes.items() if name.startswith(f"{path}.") and name in dims]
            axis = _axis(source, inside) if source is not None else None
            if axis is not None and axis.size == attr.old:
                found[attr.id] = Site(guard.module, "the constructor", attr, axis, attr.old)
    return list(found.values())


def _axis(source: Source, sizes: Sequence[tuple[Source, Expr]]) -> Expr | None:
    """The axis whose size the source is: sizes that are products of config numbers say which factor is which number."""
    parts: dict[Any, list[Expr]] = {}
    for made, e in sizes:
        left = factors(e)
        matched: dict[Any, list[Expr]] = {}
        for leaf in _product(made):
            taken = _front(left, int(evaluate(leaf, {}, {})))  # a factor may be computed: heads * (width // heads)
            if taken is None:
                break
            if isinstance(leaf, Attr):
                matched[leaf.id] = taken
        else:
            parts = matched | parts
    found = _factors_of(source, parts)
    return None if found is None else norm(Prod(found))


def _product(source: Source) -> list[Source]:
    if isinstance(source, Op) and source.function is operator.mul:
        return [*_product(source.left), *_product(source.right)]
    return [source]


def _front(parts: list[Expr], size: int) -> list[Expr] | None:
    """The leading factors with a product of `size`, taken off the list."""
    taken: list[Expr] = []
    while size > 1 and parts and size % parts[0].size == 0:
        size //= parts[0].size
        taken.append(parts.pop(0))
    return taken if size == 1 else None


def _factors_of(source: Source, parts: Mapping[Any, list[Expr]]) -> list[Expr] | None:
    if isinstance(source, Attr):
        return parts.get(source.id)
    if not isinstance(source, Op) or source.function not in (operator.mul, operator.floordiv):
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


def _integers(module: nn.Module) -> Iterator[tuple[Key, Tagged]]:
    for name, value in vars(module).items():
        if name in OWN:
            continue
        items: Iterable[tuple[Any, Any]] = (
            enumerate(value) if type(value) in (list, tuple) else value.items() if type(value) is dict else [(None, value)]
        )
        yield from (((name, index), item) for index, item in items if isinstance(item, Tagged))


def determined(target: Source, equations: Sequence[Equation]) -> int | None:
    """The value of the target where all solutions of the equations agree on it; None where they do not, or there is none."""
    found: set[int] = set()
    budget = [_TRIES]
    olds = {leaf.id: leaf.old for source, _ in equations for leaf in leaves(source) if isinstance(leaf, Attr)}
    wanted = {leaf.id for leaf in leaves(target) if isinstance(leaf, Attr)}
    if not wanted <= olds.keys():
        return None
    domains = {v: np.arange(1, 2 * old + 1) for v, old in olds.items()}
    _enumerate(target, wanted, _connected(wanted, equations), domains, found, budget)
    return found.pop() if len(found) == 1 and budget[0] > 0 else None


def _connected(wanted: set[Any], equations: Sequence[Equation]) -> list[Equation]:
    """The equations that the wanted numbers take part in, directly or through others."""
    reach, left, taken = set(wanted), list(equations), []
    grown = True
    while grown:
        grown = False
        for equation in list(left):
            inside = {leaf.id for leaf in leaves(equation[0]) if isinstance(leaf, Attr)}
            if inside & reach:
                left.remove(equation)
                taken.append(equation)
                reach |= inside
                grown = True
    return taken


def _enumerate(
    target: Source,
    wanted: set[Any],
    equations: Sequence[Equation],
    domains: Mapping[Any, np.ndarray],
    found: set[int],
    budget: list[int],
) -> None:
    narrowed = _narrow(equations, dict(domains))
    if narrowed is None or len(found) > 1 or budget[0] <= 0:
        return
    domains = narrowed
    values = {v: int(d[0]) for v, d in domains.items() if len(d) == 1}
    open_ = [v for v in domains if v not in values and any(v in _ids(s) for s, _ in equations)]
    if wanted <= values.keys() and not open_:
        found.add(int(evaluate(target, {}, values)))
        return
    hub = min(open_ or [v for v in wanted if v not in values], key=lambda v: len(domains[v]))
    for value in domains[hub]:
        budget[0] -= 1
        _enumerate(target, wanted, equations, {**domains, hub: np.array([value])}, found, budget)


def _ids(source: Source) -> set[Any]:
    return {leaf.id for leaf in leaves(source) if isinstance(leaf, Attr)}


def _narrow(equations: Sequence[Equation], domains: dict[Any, np.ndarray]) -> dict[Any, np.ndarray] | None:
    """Drop values that an equation with one open number forbids, until nothing changes; None when none is left."""
    changed = True
    while changed:
        changed = False
        for source, value in equations:
            inside = _ids(source)
            open_ = [v for v in inside if len(domains[v]) > 1]
            if len(open_) > 1:
                continue
            trial = {v: domains[v] if v in open_ else int(domains[v][0]) for v in inside}
            with np.errstate(divide="ignore", invalid="ignore"):
                try:
                    fine = np.asarray(evaluate(source, {}, trial) == value)
                except ZeroDivisionError:
                    return None
            if not fine.any():
                return None
            if open_ and not fine.all():
                domains[open_[0]] = domains[open_[0]][fine]
                changed = True
    return domains
