"""Where the integers of a forward pass come from: attributes of modules and configs, tensor sizes, arithmetic on both.

During a trace, integer attributes and sizes are `Tagged`: they act as ints and remember their source. What is asked of them
(a size, a comparison, a value in a formula) is written to the journal.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..axes import Atom, Expr, new_size
from ..edit import OWN

Key = tuple[str, Any]  # attribute name, and the index inside it when it holds several numbers


@dataclass(frozen=True, eq=False)
class Attr:
    """An integer that lies in an attribute of a module or of a config."""

    owner: Any
    key: Key
    old: int

    @property
    def id(self) -> tuple[int, Key]:
        return id(self.owner), self.key

    def __str__(self) -> str:
        name, index = self.key
        return f"{type(self.owner).__name__}.{name}{'' if index is None else f'[{index!r}]'}"


@dataclass(frozen=True, eq=False)
class Dim:
    """The size of an axis."""

    expr: Expr

    def __str__(self) -> str:
        return str(self.expr.size)


@dataclass(frozen=True, eq=False)
class Op:
    """Arithmetic on two sources."""

    function: Callable[[Any, Any], Any]
    left: Source
    right: Source

    def __str__(self) -> str:
        sign = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}.get(
            self.function.__name__, self.function.__name__
        )
        return f"({self.left} {sign} {self.right})"


@dataclass(frozen=True, eq=False)
class Const:
    """A number that stands in the code."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


Source = Attr | Dim | Op | Const
Values = Mapping[Any, Any]  # of `Attr.id`


def leaves(source: Source) -> Iterator[Attr | Dim | Const]:
    """The attributes, sizes and constants that a source is made of."""
    stack: list[Source] = [source]
    while stack:
        top = stack.pop()
        if isinstance(top, Op):
            stack += [top.right, top.left]
        else:
            yield top


def evaluate(source: Source, counts: Mapping[Atom, Any], attributes: Values) -> Any:
    """The value of a source when atoms keep `counts` units; counts may be arrays, to try many at once."""
    if isinstance(source, Const):
        return source.value
    if isinstance(source, Dim):
        return new_size(source.expr, counts)
    if isinstance(source, Attr):
        return attributes.get(source.id, source.old)
    return source.function(evaluate(source.left, counts, attributes), evaluate(source.right, counts, attributes))


def is_literal(source: Source) -> bool:
    return all(isinstance(leaf, Const) for leaf in leaves(source))


@dataclass(frozen=True, eq=False)
class Guard:
    """A comparison that the run made, and what it said: after a cut it has to say the same."""

    compare: Callable[[Any, Any], Any]
    left: Source
    right: Source
    outcome: bool
    module: str

    def holds(self, counts: Mapping[Atom, int], attributes: Values) -> bool:
        left, right = (evaluate(source, counts, attributes) for source in (self.left, self.right))
        return bool(self.compare(left, right)) == self.outcome


@dataclass(frozen=True, eq=False)
class SizeUse:
    """A size that enters a formula (1/sqrt(head_dim)): the value changes with the axis. `how` names the operation."""

    source: Source
    how: str
    module: str


@dataclass
class Journal:
    """What the integers of one run were asked."""

    guards: list[Guard] = field(default_factory=list)
    uses: list[SizeUse] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)
    open: bool = True
    lasting: bool = False  # copies of its numbers are tagged too

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def compared(self, compare: Callable[[Any, Any], Any], a: Tagged, b: int, outcome: bool) -> None:
        if self.open:
            self.guards.append(Guard(compare, a.source, source_of(b), outcome, self.module))

    def used(self, source: Source, how: str) -> None:
        if self.open:
            self.uses.append(SizeUse(source, how, self.module))


class Tagged(int):
    """An int that knows where it came from."""

    source: Source
    journal: Journal

    def __new__(cls, value: int, source: Source, journal: Journal) -> Tagged:
        made = int.__new__(cls, value)
        made.source, made.journal = source, journal
        return made

    __hash__ = int.__hash__

    def __reduce__(self) -> tuple[type[int], tuple[int]]:
        return int, (int(self),)

    def __copy__(self) -> Tagged:
        return self

    def __deepcopy__(self, memo: Any) -> int:
        return self if self.journal.lasting else int(self)

    def __float__(self) -> float:
        self.journal.used(self.source, "float")
        return float(int(self))

    def __neg__(self) -> Tagged:
        return Tagged(-int(self), Op(operator.sub, Const(0), self.source), self.journal)


def source_of(number: int) -> Source:
    return number.source if isinstance(number, Tagged) else Const(int(number))


def _compared(name: str, function: Callable[[Any, Any], bool]) -> None:
    def method(self: Tagged, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return getattr(int, name)(self, other)
        outcome = function(int(self), int(other))
        self.journal.compared(function, self, other, outcome)
        return outcome

    setattr(Tagged, name, method)


def _arithmetic(name: str, function: Callable[[Any, Any], int]) -> None:
    def forward(self: Tagged, other: Any) -> Any:
        if isinstance(other, float):
            self.journal.used(self.source, function.__name__)
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else function(int(self), other)
        return Tagged(function(int(self), int(other)), Op(function, self.source, source_of(other)), self.journal)

    def backward(self: Tagged, other: Any) -> Any:
        if isinstance(other, float):
            self.journal.used(self.source, function.__name__)
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else function(other, int(self))
        return Tagged(function(int(other), int(self)), Op(function, source_of(other), self.source), self.journal)

    setattr(Tagged, name, forward)
    setattr(Tagged, f"__r{name[2:]}", backward)


def _valued(name: str, function: Callable[[Any, Any], Any]) -> None:
    """Powers and true division: the result is a value, no size."""

    def forward(self: Tagged, other: Any, *modulo: Any) -> Any:
        self.journal.used(self.source, function.__name__)
        if isinstance(other, Tagged):
            other.journal.used(other.source, function.__name__)
        return function(int(self), int(other) if isinstance(other, Tagged) else other)

    def backward(self: Tagged, other: Any, *modulo: Any) -> Any:
        self.journal.used(self.source, function.__name__)
        return function(other, int(self))

    setattr(Tagged, name, forward)
    setattr(Tagged, f"__r{name[2:]}", backward)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _compared(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _arithmetic(f"__{_name}__", getattr(operator, _name))
for _name in ("pow", "truediv"):
    _valued(f"__{_name}__", getattr(operator, _name))

_LONG = 64


class Tagging:
    """Tags the integer attributes of all modules and of the config objects they hold; undone on exit."""

    def __init__(self, model: nn.Module, journal: Journal) -> None:
        self.model, self.journal = model, journal
        self.undo: list[tuple[dict[str, Any], str, Any]] = []
        self.seen: set[int] = set()

    def __enter__(self) -> Tagging:
        for module in self.model.modules():
            if not isinstance(module, torch.jit.ScriptModule):
                self.tag(module)
        return self

    def __exit__(self, *_: object) -> None:
        for space, name, value in reversed(self.undo):
            space[name] = value

    def tag(self, owner: Any, depth: int = 0) -> None:
        if id(owner) in self.seen:
            return
        self.seen.add(id(owner))
        space, module = owner.__dict__, isinstance(owner, nn.Module)
        for name, value in list(space.items()):
            if module and name in OWN:
                continue
            made = self.tagged(owner, name, value)
            if made is not None:
                self.undo.append((space, name, value))
                space[name] = made
            elif depth < 3 and is_config(value):
                self.tag(value, depth + 1)

    def tagged(self, owner: Any, name: str, value: Any) -> Any:
        def one(number: int, index: Any) -> int:
            return Tagged(number, Attr(owner, (name, index), number), self.journal) if number > 1 else number

        if type(value) is int:
            return one(value, None) if value > 1 else None
        if type(value) in (tuple, list) and 0 < len(value) <= _LONG and all(type(v) is int for v in value):
            return type(value)(one(v, i) for i, v in enumerate(value))
        if type(value) is dict and 0 < len(value) <= _LONG and all(type(v) is int for v in value.values()):
            return {k: one(v, k) for k, v in value.items()}
        return None


def is_config(value: Any) -> bool:
    """An object that holds settings: with attributes, and neither a module, a tensor, a class nor a function."""
    if not hasattr(value, "__dict__") or isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return False
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "collections")
