"""Records where the integers of a forward pass come from: attributes, tensor sizes, and arithmetic on both.

During a trace, integer attributes of modules and configs and the sizes of tensors are `Tagged`: they behave as ints and
remember their source. If `self.heads` is `Tagged`, then `c // self.heads` is too, and its source is that division. Comparisons
and uses in formulas are written to the `Journal`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..axes import Arithmetic, Attr, Const, FormulaUse, Guard, Source
from ..edit import OWN


@dataclass
class Journal:
    """The comparisons and formulas that the tagged integers of one run took part in."""

    guards: list[Guard] = field(default_factory=list)
    formula_uses: list[FormulaUse] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)  # names of the modules that are running, the innermost last
    open: bool = True  # False after the run: tagged integers that survive it record nothing
    tag_copies: bool = False  # True: deep copies of tagged integers are tagged too

    @property
    def module(self) -> str:
        return self.modules[-1] if self.modules else ""

    def compared(self, compare: Callable[[Any, Any], Any], a: Tagged, b: int, outcome: bool) -> None:
        if self.open:
            self.guards.append(Guard(compare, a.source, source_of(b), outcome, self.module))

    def used(self, source: Source, how: str) -> None:
        if self.open:
            self.formula_uses.append(FormulaUse(source, how, self.module))


class Tagged(int):
    """An int that remembers its source."""

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
        return self if self.journal.tag_copies else int(self)

    def __float__(self) -> float:
        self.journal.used(self.source, "float")
        return float(int(self))

    def __neg__(self) -> Tagged:
        return Tagged(-int(self), Arithmetic(operator.sub, Const(0), self.source), self.journal)


def source_of(number: int) -> Source:
    return number.source if isinstance(number, Tagged) else Const(int(number))


def _add_comparison(name: str, function: Callable[[Any, Any], bool]) -> None:
    """Adds a comparison method to `Tagged` that records a guard when the other operand is an int."""

    def method(self: Tagged, other: Any) -> Any:
        if not isinstance(other, int) or isinstance(other, bool):
            return getattr(int, name)(self, other)
        outcome = function(int(self), int(other))
        self.journal.compared(function, self, other, outcome)
        return outcome

    setattr(Tagged, name, method)


def _add_arithmetic(name: str, function: Callable[[Any, Any], int]) -> None:
    """Adds an operation to `Tagged`: with an int it gives a tagged integer, with a float a plain value in a formula."""

    def forward(self: Tagged, other: Any) -> Any:
        if isinstance(other, float):
            self.journal.used(self.source, function.__name__)
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else function(int(self), other)
        return Tagged(function(int(self), int(other)), Arithmetic(function, self.source, source_of(other)), self.journal)

    def reflected(self: Tagged, other: Any) -> Any:
        if isinstance(other, float):
            self.journal.used(self.source, function.__name__)
        if not isinstance(other, int):
            return NotImplemented if not isinstance(other, float) else function(other, int(self))
        return Tagged(function(int(other), int(self)), Arithmetic(function, source_of(other), self.source), self.journal)

    setattr(Tagged, name, forward)
    setattr(Tagged, f"__r{name[2:]}", reflected)


def _add_formula(name: str, function: Callable[[Any, Any], Any]) -> None:
    """Adds a power or true division to `Tagged`: the result is a plain value, and its use in a formula is recorded."""

    def forward(self: Tagged, other: Any, *modulo: Any) -> Any:
        self.journal.used(self.source, function.__name__)
        if isinstance(other, Tagged):
            other.journal.used(other.source, function.__name__)
        return function(int(self), int(other) if isinstance(other, Tagged) else other)

    def reflected(self: Tagged, other: Any, *modulo: Any) -> Any:
        self.journal.used(self.source, function.__name__)
        return function(other, int(self))

    setattr(Tagged, name, forward)
    setattr(Tagged, f"__r{name[2:]}", reflected)


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    _add_comparison(f"__{_name}__", getattr(operator, _name))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    _add_arithmetic(f"__{_name}__", getattr(operator, _name))
for _name in ("pow", "truediv"):
    _add_formula(f"__{_name}__", getattr(operator, _name))

_LONG = 64  # longer lists and dicts of integers are taken for data, not for sizes


class Tagging:
    """Tags the integer attributes of all modules, and of the config objects that they hold, until the context is left."""

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
        for attributes, name, value in reversed(self.undo):
            attributes[name] = value

    def tag(self, owner: Any, depth: int = 0) -> None:
        """Tags the integers in the attributes of a module or config, and in configs inside it."""
        if id(owner) in self.seen:
            return
        self.seen.add(id(owner))
        attributes, module = owner.__dict__, isinstance(owner, nn.Module)
        for name, value in list(attributes.items()):
            if module and name in OWN:
                continue
            made = self.tagged(owner, name, value)
            if made is not None:
                self.undo.append((attributes, name, value))
                attributes[name] = made
            elif depth < 3 and is_config(value):
                self.tag(value, depth + 1)

    def tagged(self, owner: Any, name: str, value: Any) -> Any:
        """Returns the tagged value of an integer, or of a short list, tuple or dict of integers; None for other values."""

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
    """True for an object that holds settings: it has attributes and is no module, tensor, class or function."""
    if not hasattr(value, "__dict__") or isinstance(value, nn.Module | torch.Tensor | type) or callable(value):
        return False
    return type(value).__module__.partition(".")[0] not in ("builtins", "torch", "collections")
