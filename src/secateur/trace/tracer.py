"""The tracer: a dispatch mode that gives every tensor of a run its axes, and records every operator.

For `y = linear(x, weight)` the rule of `linear` unites the last axis of `x` with dim 1 of the weight, and returns dim 0 of the
weight as the last axis of `y`. The tracer keeps these axes with `y`, for the operators that read it next.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..axes import (
    Arithmetic,
    Atom,
    Attr,
    AttrPlace,
    AxisSize,
    Const,
    Expr,
    Fam,
    Guard,
    Role,
    SizeUse,
    atoms,
    closed,
    factors,
    families,
    flag,
    freeze,
    fresh,
    norm,
)
from ..ops import Axes, AxisRule, Call, Operator, arguments_of, lookup, name_of
from .outline import Outlined, tensors_of
from .provenance import Journal

Origin = frozenset[tuple[str, int]]  # (tensor, dim) pairs of the model
_INFO = "_secateur_info"
_MANY = (list, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # types of most arguments; isinstance(..., Tensor) is slow for them


@dataclass(frozen=True)
class Ref:
    """A tensor in the record of the run, by number."""

    number: int


@dataclass(eq=False)
class TensorInfo:
    """The axes of one tensor of the run.

    `origin` lists, for each dim of a tensor that is computed from weights only, the dims of the weights that it came from. It
    is None if the tensor depends on the inputs. `pending`: axes to freeze, with the reason, when an operator reads the tensor.
    """

    axes: Axes
    number: int
    record: RunRecord  # of the run that saw the tensor; several runs can see a constant of the code
    origin: tuple[Origin, ...] | None = None
    pending: list[tuple[Expr, str]] = field(default_factory=list)

    def read(self) -> None:
        """Freezes the pending axes: the values of the tensor are used."""
        while self.pending:
            freeze(*self.pending.pop())


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of the run. Tensors in `args` and `kwargs` are `Ref`s.

    `weights`: True if no input depends on the example inputs.
    """

    func: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    module: str
    weights: bool

    @cached_property
    def name(self) -> str:
        return name_of(self.func)

    @cached_property
    def operator(self) -> Operator:
        """The record of the operator."""
        return lookup(self.func)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """The arguments by name, with defaults."""
        defaults = arguments_of(self.func)
        return {**defaults, **dict(zip(defaults, self.args)), **self.kwargs}

    @cached_property
    def kind(self) -> str:
        """The name without its namespace."""
        return self.name.partition("::")[2]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the tensors among the arguments."""
        values = (*self.args, *self.kwargs.values())
        flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        return tuple(item.number for item in flat if isinstance(item, Ref))


@dataclass(eq=False)
class RunRecord:
    """Everything that is recorded during a run. Tensors of the run are numbered."""

    steps: list[Step] = field(default_factory=list)
    axes: list[Axes] = field(default_factory=list)  # by tensor number
    names: dict[int, str] = field(default_factory=dict)  # tensor number -> name, for the tensors that the model owns
    constants: dict[int, Tensor] = field(default_factory=dict)  # tensors that no module owns: constants of the code
    changed: set[int] = field(default_factory=set)  # the model's tensors that the run wrote to or replaced
    dropped: set[int] = field(default_factory=set)  # those of them that the model no longer holds after the run
    counters: list[str] = field(default_factory=list)  # numbers in attributes that the run changed
    non_floating: dict[int, torch.dtype] = field(default_factory=dict)  # dtypes of the tensors that are not floating point
    roles: dict[tuple[str, int], set[Role]] = field(default_factory=dict)  # (tensor, dim) -> roles
    size_uses: list[SizeUse] = field(default_factory=list)
    passed: dict[AttrPlace, Attr] = field(default_factory=dict)  # attributes that were passed to a call
    equal: dict[tuple[int, ...], tuple[Expr, ...]] = field(default_factory=dict)  # axes that must keep equal counts
    output_shapes: list[tuple[int, ...]] = field(default_factory=list)  # of the outputs that must keep their shape
    returned: set[int] = field(default_factory=set)  # numbers of the tensors that the model returns
    replaced: dict[tuple[str, str], Axes | None] = field(default_factory=dict)  # (module, attribute) written before any read
    unknown: Counter[str] = field(default_factory=Counter)  # operators without a rule
    errors: list[str] = field(default_factory=list)


class _OriginLedger:
    """A ledger with tagged stand-in axes: shows which dims of which weights arrive in which dims of a result."""

    def __init__(self, tracer: Tracer) -> None:
        self.literal_sizes, self.literal_index = tracer.literal_sizes, tracer.literal_index
        self.made: dict[int, Axes] = {}
        for key, info in tracer.now.items():
            origin = info.origin or (frozenset(),) * len(info.axes)
            self.made[key] = [Atom(e.size, tags=o) if e.size > 1 else fresh(e.size) for e, o in zip(info.axes, origin)]

    def axes_of(self, tensor: Tensor) -> Axes:
        return self.made[id(tensor)]

    def play(self, tensor: Tensor, dim: int, role: Role) -> None: ...
    def is_weight(self, tensor: Tensor) -> bool:
        return False

    def equal_counts(self, parts: Sequence[Expr]) -> None: ...
    def uses_size(self, e: Expr, how: str) -> None: ...
    def multiple(self, e: Expr, of: int) -> None: ...
    def freeze_when_read(self, e: Expr, why: str) -> None: ...


class Tracer(TorchDispatchMode):
    """Follows axes through every operator. It is also the ledger that the rules write to."""

    supports_higher_order_operators = True  # no rule looks inside them, so their axes are frozen

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; with True, torch would import torch._dynamo, which takes seconds

    def __init__(self, journal: Journal, outlined: Outlined | None = None) -> None:
        super().__init__()
        self.journal, self.record = journal, RunRecord()
        self.outlined = outlined
        self.literal_sizes: frozenset[int] = frozenset()
        self.literal_index: tuple[int, ...] = ()
        self.owned: dict[int, TensorInfo] = {}  # the model's tensors by id()
        self.held: list[Tensor] = []  # keeps these tensors alive, so that their ids stay valid
        self.memory: dict[int, TensorInfo] = {}  # the model's tensors by storage
        self.weights: set[int] = set()  # storages of real parameters
        self.deferred: list[tuple[Expr, str]] = []
        self.now: dict[int, TensorInfo] = {}  # inputs of the current operator, as they were before it ran

    def own(self, name: str, tensor: Tensor) -> None:
        """Registers a tensor of the model: all its axes are new."""
        info = self.new_info([fresh(s) for s in tensor.shape])
        info.origin = tuple(frozenset({(name, d)}) for d in range(tensor.dim()))
        self.owned[id(tensor)] = info
        self.held.append(tensor)
        self.memory[tensor.untyped_storage()._cdata] = info
        if isinstance(tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
            self.weights.add(tensor.untyped_storage()._cdata)
        self.record.names[info.number] = name

    def fix(self, tensor: Tensor, why: str) -> None:
        """Registers an example input: its axes are frozen, and tensors computed from it depend on the inputs."""
        info = self.new_info([fresh(s, why) for s in tensor.shape])
        setattr(tensor, _INFO, info)
        if not tensor.is_floating_point():
            self.record.non_floating[info.number] = tensor.dtype

    def new_info(self, axes: Axes) -> TensorInfo:
        self.record.axes.append(axes)
        return TensorInfo(axes, len(self.record.axes) - 1, self.record)

    def info(self, tensor: Tensor) -> TensorInfo:
        found = self.owned.get(id(tensor)) or getattr(tensor, _INFO, None)
        if not isinstance(found, TensorInfo) or found.record is not self.record or len(found.axes) != tensor.dim():
            found = self.new_info([fresh(s, "belongs to a tensor that no module owns") for s in tensor.shape])
            found.origin = (frozenset(),) * tensor.dim()
            setattr(tensor, _INFO, found)
            if not isinstance(tensor, FakeTensor):
                self.record.constants[found.number] = tensor.detach()
        return found

    # ------------------------------------------------------------ the ledger

    def axes_of(self, tensor: Tensor) -> Axes:
        return (self.now.get(id(tensor)) or self.info(tensor)).axes

    def play(self, tensor: Tensor, dim: int, role: Role) -> None:
        for place in (self.now.get(id(tensor)) or self.info(tensor)).origin[dim]:  # type: ignore[index]
            self.record.roles.setdefault(place, set()).add(role)

    def is_weight(self, tensor: Tensor) -> bool:
        origin = (self.now.get(id(tensor)) or self.info(tensor)).origin
        return origin is not None and any(origin)

    def equal_counts(self, parts: Sequence[Expr]) -> None:
        parts = tuple(norm(p) for p in parts)
        self.record.equal.setdefault(tuple(map(id, parts)), parts)

    def uses_size(self, e: Expr, how: str) -> None:
        flag(e, "scale")
        self.journal.used(AxisSize(e), how)

    def multiple(self, e: Expr, of: int) -> None:
        if self.journal.open and of > 1 and e.size % of == 0:
            rest = Arithmetic(operator.mod, AxisSize(e), Const(of))
            self.journal.guards.append(Guard(operator.eq, rest, Const(0), True, self.journal.module))

    def freeze_when_read(self, e: Expr, why: str) -> None:
        self.deferred.append((e, why))

    # ------------------------------------------------------------ the mode

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self.now = before = {id(t): self.info(t) for t in tensors_of((*args, *kwargs.values()))}
            for info in before.values():
                info.read()
            if isinstance(func, OpOverload) and func._schema.is_mutable:
                self.refuse_writes_to_weights(func, args)
        out = func(*args, **kwargs) if self.outlined is None else self.outlined(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            self.now = before
            self.follow(func, args, kwargs, out)
            self.now = {}
        return out

    def refuse_writes_to_weights(self, func: Any, args: Sequence[Any]) -> None:
        """Raises before an operator writes to a real weight, which would change the model."""
        for value in _written(func, args):
            if value.untyped_storage()._cdata in self.weights:
                raise RuntimeError(f"{func} writes to a weight of the model")

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        """Works out the axes of the results of an operator, and records the operator as a step."""
        rule = lookup(func).axes
        outs = list(out) if isinstance(out, _MANY) else [out]
        self.deferred = []
        axes = self.apply(rule, func, args, kwargs, out, outs)
        if axes is None and (rule is None or any(isinstance(o, Tensor) for o in outs)):
            axes = self.give_up(func, rule, outs)
        weights = all(info.origin is not None for info in self.now.values())
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self.forget_origins(func, args)
        numbers: list[int] = []
        if axes is not None:
            origins = self.origins(rule, func, args, kwargs, out, outs) if weights else [None] * len(outs)
            numbers = [self.settle(o, axes[i], origins[i]) for i, o in enumerate(outs) if isinstance(o, Tensor)]
        named = {k: self.refs(v) for k, v in kwargs.items()}
        self.record.steps.append(Step(func, self.refs(tuple(args)), named, tuple(numbers), self.journal.module, weights))

    def forget_origins(self, func: Any, args: Sequence[Any]) -> None:
        """Forgets where written tensors come from, including the tensors that they are views of.

        A tensor of zeros that code fills depends on the inputs afterwards, and so does a buffer that is used as a cache.
        """
        for value in _written(func, args):
            found = self.memory.get(value.untyped_storage()._cdata)
            if found is None and value._base is not None:
                found = self.info(value._base)
            if found is None and self.info(value).number in self.record.constants:
                found = self.info(value)
            if found is not None:
                self.record.constants.pop(found.number, None)
                found.origin = None
                if found.number in self.record.names:
                    self.record.changed.add(found.number)

    def refs(self, value: Any) -> Any:
        """Returns an argument as it is recorded, with a `Ref` for each tensor."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return Ref(self.now[id(value)].number)
        return tuple([v if type(v) in _PLAIN else self.refs(v) for v in value]) if isinstance(value, _MANY) else value

    def settle(self, out: Tensor, axes: Axes, origin: tuple[Origin, ...] | None) -> int:
        """Stores the axes of a result and returns its number.

        A family needs its key in another dim of the same tensor. Families without it are collapsed.
        """
        axes = [norm(e) for e in axes]
        for d, e in enumerate(axes):
            for fam in () if isinstance(e, Atom) else families(e):
                if not any(norm(fam.key) is f for other in axes for f in factors(other)) or len(factors(e)) > 1:
                    axes[d] = closed(axes[d])
                else:
                    self.equal_counts(fam.parts)
        if id(out) in self.owned:  # a tensor of the model, written in place, keeps its number; others are a new value
            return self.owned[id(out)].number
        info = self.new_info(axes)
        info.origin, info.pending = origin, list(self.deferred)
        setattr(out, _INFO, info)
        if not out.is_floating_point():
            self.record.non_floating[info.number] = out.dtype
        return info.number

    def apply(
        self, rule: AxisRule | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, outs: list[Any]
    ) -> list[Axes] | None:
        """Returns the axes that the rule gives, one list for each output, or None if they do not fit the real sizes."""
        if rule is None:
            return None
        try:
            return _checked(rule(Call(self, func, args, kwargs, out)), out, outs)
        except Exception as error:
            self.record.errors.append(f"{func}: {type(error).__name__}: {error}")
            return None

    def give_up(self, func: Any, rule: AxisRule | None, outs: list[Any]) -> list[Axes]:
        """Freezes the axes of all inputs, and returns new frozen axes for the results."""
        name = name_of(func)
        if rule is None:
            self.record.unknown[name] += 1
            why = f"{name} has no record; if it is element-wise, call secateur.ops.register({name!r}, values='elementwise')"
        else:
            why = f"{name}: its axis rule does not cover this call"
        for info in self.now.values():
            for e in info.axes:
                freeze(e, why)
        return [[fresh(s, why) for s in o.shape] if isinstance(o, Tensor) else [] for o in outs]

    def origins(
        self, rule: AxisRule | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, outs: list[Any]
    ) -> Sequence[tuple[Origin, ...]]:
        """Returns where the dims of results come from, for an operator that reads weights only; empty sets if it is unknown."""
        axes = None
        if rule is not None and any(any(info.origin or ()) for info in self.now.values()):
            try:  # noqa: SIM105  (contextlib.suppress is slow, and this runs for every operator on weights)
                axes = _checked(rule(Call(_OriginLedger(self), func, args, kwargs, out)), out, outs)
            except Exception:
                pass
        if axes is None:
            return [(frozenset(),) * o.dim() if isinstance(o, Tensor) else () for o in outs]
        return [tuple(_tags(e) for e in one) for one in axes]


def _written(func: Any, args: Sequence[Any]) -> list[Tensor]:
    """Returns the tensors among the arguments that an operator writes to."""
    return [
        value
        for argument, value in zip(func._schema.arguments, args)
        if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor)
    ]


def _checked(result: Axes | list[Axes] | None, out: Any, outs: list[Any]) -> list[Axes] | None:
    """Returns the axes of each output. Raises ValueError if their sizes are not those of the real outputs."""
    if result is None:
        return None
    several: list[Any] = list(result) if isinstance(out, list | tuple) else [result]
    for o, axes in zip(outs, several):
        if isinstance(o, Tensor) and [e.size for e in axes] != list(o.shape):
            raise ValueError(f"the rule gives sizes {[e.size for e in axes]}, the operator {list(o.shape)}")
    if len(several) < len(outs):
        raise ValueError(f"the rule gives {len(several)} outputs, the operator {len(outs)}")
    return several


def _tags(e: Expr) -> Origin:
    e = norm(e)
    if isinstance(e, Fam):
        return frozenset().union(*(a.tags for p in e.parts for a in atoms(p)))
    return frozenset().union(*(a.tags for a in atoms(e)))
