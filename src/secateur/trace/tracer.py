"""The run itself: a dispatch mode that gives every tensor its axes and writes down every operator."""

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

from ..axes import Atom, Expr, Fam, Role, atoms, collapse, factors, families, flag, freeze, fresh, norm
from ..ops import Axes, Call, Rule, lookup, name_of
from .outline import Outlined, tensors_of
from .provenance import Const, Dim, Guard, Journal, Op, Source

Origin = frozenset[tuple[str, int]]  # (tensor, dim) pairs of the model
_INFO = "_secateur_info"
_MANY = (list, tuple)
_PLAIN = frozenset({bool, int, float, str, type(None)})  # most arguments; asking whether they are tensors takes time


@dataclass(frozen=True)
class Ref:
    """A tensor in the record of the run, by number."""

    number: int


@dataclass(eq=False)
class Info:
    """What is known of one tensor: its axes; and, if it is made of weights alone, which of their dims each dim came from."""

    axes: Axes
    number: int
    origin: tuple[Origin, ...] | None = None  # None: it depends on the inputs
    pending: list[tuple[Expr, str]] = field(default_factory=list)  # axes that freeze once the values are read

    def read(self) -> None:
        while self.pending:
            freeze(*self.pending.pop())


@dataclass(frozen=True, eq=False)
class Step:
    """One operator of the run. Tensors in `args` and `kwargs` are `Ref`s; `weights`: no input depends on the example inputs."""

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
    def kind(self) -> str:
        """The name without its namespace."""
        return self.name.partition("::")[2]

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The numbers of the tensors that it is given."""
        values = (*self.args, *self.kwargs.values())
        flat = [item for value in values for item in (value if isinstance(value, tuple) else (value,))]
        return tuple(item.number for item in flat if isinstance(item, Ref))


@dataclass(frozen=True, eq=False)
class Site:
    """An integer of the code that met an axis: `source` has to give the size of `axis`."""

    module: str
    call: str
    source: Source
    axis: Expr
    value: int


@dataclass(eq=False)
class Record:
    """What a run leaves behind."""

    steps: list[Step] = field(default_factory=list)
    axes: list[Axes] = field(default_factory=list)  # by tensor number
    names: dict[int, str] = field(default_factory=dict)  # of the tensors that the model owns
    whole: dict[int, torch.dtype] = field(default_factory=dict)  # of the tensors that hold no fractions
    roles: dict[tuple[str, int], set[Role]] = field(default_factory=dict)
    sites: list[Site] = field(default_factory=list)
    read: dict[Any, Any] = field(default_factory=dict)  # attributes that some call was given, by place: no site says what for
    equal: dict[tuple[int, ...], tuple[Expr, ...]] = field(default_factory=dict)
    answers: list[tuple[int, ...]] = field(default_factory=list)  # shapes of what the model returns
    returned: set[int] = field(default_factory=set)  # tensors in what the model returns, by number
    left: dict[tuple[str, str], Axes | None] = field(default_factory=dict)  # written to (module, attribute), unread
    unknown: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class Probe:
    """Runs a rule on marked stand-in axes, to see which dims of which weights arrive where."""

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
    """Follows axes through every operator; it is also the ledger that the rules write to."""

    supports_higher_order_operators = True  # they are opaque: their axes freeze

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would load all of torch._dynamo: seconds

    def __init__(self, journal: Journal, outlined: Outlined | None = None) -> None:
        super().__init__()
        self.journal, self.record = journal, Record()
        self.outlined = outlined
        self.literal_sizes: frozenset[int] = frozenset()
        self.literal_index: tuple[int, ...] = ()
        self.owned: dict[int, Info] = {}
        self.weights: set[int] = set()  # storages of real weights
        self.memory: dict[int, Info] = {}  # the model's tensors by storage
        self.held: list[Tensor] = []  # keeps the ids in `owned` valid
        self.deferred: list[tuple[Expr, str]] = []
        self.now: dict[int, Info] = {}  # the inputs of the operator at hand, as they were before it

    def own(self, name: str, tensor: Tensor) -> None:
        info = self.new_info([fresh(s) for s in tensor.shape])
        info.origin = tuple(frozenset({(name, d)}) for d in range(tensor.dim()))
        self.owned[id(tensor)] = info
        self.held.append(tensor)
        self.memory[tensor.untyped_storage()._cdata] = info
        if isinstance(tensor, nn.Parameter) and not isinstance(tensor, FakeTensor):
            self.weights.add(tensor.untyped_storage()._cdata)
        self.record.names[info.number] = name

    def fix(self, tensor: Tensor, why: str) -> None:
        """An input: its axes are given, and whatever is made with it depends on it."""
        info = self.new_info([fresh(s, why) for s in tensor.shape])
        setattr(tensor, _INFO, info)
        if not tensor.is_floating_point():
            self.record.whole[info.number] = tensor.dtype

    def new_info(self, axes: Axes) -> Info:
        self.record.axes.append(axes)
        return Info(axes, len(self.record.axes) - 1)

    def info(self, tensor: Tensor) -> Info:
        found = self.owned.get(id(tensor)) or getattr(tensor, _INFO, None)
        if not isinstance(found, Info) or len(found.axes) != tensor.dim():
            found = self.new_info([fresh(s, "belongs to a tensor that no module owns") for s in tensor.shape])
            found.origin = (frozenset(),) * tensor.dim()
            setattr(tensor, _INFO, found)
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
        self.journal.used(Dim(e), how)

    def multiple(self, e: Expr, of: int) -> None:
        if self.journal.open and of > 1 and e.size % of == 0:
            rest = Op(operator.mod, Dim(e), Const(of))
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
                self.guard_weights(func, args)
        out = func(*args, **kwargs) if self.outlined is None else self.outlined(func, args, kwargs)
        with torch._C.DisableTorchFunction():
            self.now = before
            self.follow(func, args, kwargs, out)
            self.now = {}
        return out

    def guard_weights(self, func: Any, args: Sequence[Any]) -> None:
        """A forward pass that writes to real weights would change the model."""
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if written and isinstance(value, Tensor) and value.untyped_storage()._cdata in self.weights:
                raise RuntimeError(f"{func} writes to a weight of the model")

    def follow(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        found = lookup(func) if isinstance(func, OpOverload) else None
        outs = list(out) if isinstance(out, _MANY) else [out]
        self.deferred = []
        axes = self.apply(found, func, args, kwargs, out, outs)
        if axes is None and (found is None or any(isinstance(o, Tensor) for o in outs)):
            axes = self.give_up(func, found, outs)
        inputs = self.now.values()
        weights = all(info.origin is not None for info in inputs)
        if isinstance(func, OpOverload) and func._schema.is_mutable:
            self.no_longer_weights(func, args)
        origins = self.origins(found, func, args, kwargs, out, outs) if weights and axes is not None else None
        numbers: list[int] = []
        for i, o in enumerate(outs):
            if isinstance(o, Tensor) and axes is not None:
                numbers.append(
                    self.settle(o, axes[i], origins[i] if origins else (frozenset(),) * o.dim() if weights else None)
                )
        plain = {k: self.refs(v) for k, v in kwargs.items()}
        self.record.steps.append(Step(func, self.refs(tuple(args)), plain, tuple(numbers), self.journal.module, weights))

    def no_longer_weights(self, func: Any, args: Sequence[Any]) -> None:
        """What is written through a view is in the tensor that it is a view of: zeros that are filled are no zeros any more,
        and a buffer that is written to (a cache) is read as what was written."""
        for argument, value in zip(func._schema.arguments, args):
            written = argument.alias_info is not None and argument.alias_info.is_write
            if not written or not isinstance(value, Tensor):
                continue
            found = self.memory.get(value.untyped_storage()._cdata)
            if found is None and value._base is not None:
                found = self.info(value._base)
            if found is not None:
                found.origin = None

    def refs(self, value: Any) -> Any:
        """The arguments as they are recorded: numbers for tensors."""
        if type(value) in _PLAIN:
            return value
        if isinstance(value, Tensor):
            return Ref(self.now[id(value)].number)
        return tuple([v if type(v) in _PLAIN else self.refs(v) for v in value]) if isinstance(value, _MANY) else value

    def settle(self, out: Tensor, axes: Axes, origin: tuple[Origin, ...] | None) -> int:
        """Remember the axes of a result. A family needs its key in the same tensor, before it where both are in one dim."""
        axes = [norm(e) for e in axes]
        for d, e in enumerate(axes):
            for fam in () if isinstance(e, Atom) else families(e):
                if not any(norm(fam.key) is f for other in axes for f in factors(other)) or len(factors(e)) > 1:
                    collapse(fam)
                    axes[d] = norm(axes[d])
                else:
                    self.equal_counts(fam.parts)
        if id(out) in self.owned:  # written in place; any other tensor gets a new number then, as a new value
            return self.owned[id(out)].number
        info = self.new_info(axes)
        info.origin, info.pending = origin, list(self.deferred)
        setattr(out, _INFO, info)
        if not out.is_floating_point():
            self.record.whole[info.number] = out.dtype
        return info.number

    def apply(
        self, found: Rule | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, outs: list[Any]
    ) -> list[Axes] | None:
        """The axes that the rule gives, one list for each output, if they fit the real sizes."""
        if found is None:
            return None
        try:
            return _checked(found(Call(self, func, args, kwargs, out)), out, outs)
        except Exception as error:
            self.record.errors.append(f"{func}: {type(error).__name__}: {error}")
            return None

    def give_up(self, func: Any, found: Rule | None, outs: list[Any]) -> list[Axes]:
        name = name_of(func)
        if found is None:
            self.record.unknown[name] += 1
            why = f"{name} has no axis rule; register a rule or mark it element-wise"
        else:
            why = f"{name}: the rule for it has no answer for this call"
        for info in self.now.values():
            for e in info.axes:
                freeze(e, why)
        return [[fresh(s, why) for s in o.shape] if isinstance(o, Tensor) else [] for o in outs]

    def origins(
        self, found: Rule | None, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any, outs: list[Any]
    ) -> list[tuple[Origin, ...]] | None:
        """Where the dims of a tensor made of weights alone come from."""
        if found is None or not any(any(info.origin or ()) for info in self.now.values()):
            return None
        try:
            axes = _checked(found(Call(Probe(self), func, args, kwargs, out)), out, outs)
        except Exception:
            return None
        return None if axes is None else [tuple(_tags(e) for e in one) for one in axes]


def _checked(result: Axes | list[Axes] | None, out: Any, outs: list[Any]) -> list[Axes] | None:
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
