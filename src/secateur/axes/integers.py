"""Integer expressions: where an integer in the model's code comes from.

An integer is a constant, an attribute of a module or config, the size of an axis, or arithmetic on these. The last argument of
`x.view(b, n, self.heads, c // self.heads)` is Arithmetic(floordiv, AxisSize(c), Attr(heads)). After a cut, `evaluate` gives the
value that the same code computes then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .expressions import Atom, Expr, axis_signature, new_size

AttrKey = tuple[str, Any]  # the attribute's name, and the index inside it if it holds several numbers
AttrId = tuple[int, AttrKey]  # id() of the owner, and the key
_SIGNS = {"add": "+", "sub": "-", "mul": "*", "floordiv": "//", "mod": "%"}


@dataclass(frozen=True, eq=False)
class Attr:
    """An integer in an attribute of a module or config. `old` is its value before the cut."""

    owner: Any
    key: AttrKey
    old: int

    @property
    def id(self) -> AttrId:
        return id(self.owner), self.key

    def __str__(self) -> str:
        name, index = self.key
        return f"{type(self.owner).__name__}.{name}{'' if index is None else f'[{index!r}]'}"


@dataclass(frozen=True, eq=False)
class AxisSize:
    """The size of an axis."""

    expr: Expr

    def __str__(self) -> str:
        return str(self.expr.size)


@dataclass(frozen=True, eq=False)
class Arithmetic:
    """A function of two integers."""

    function: Callable[[Any, Any], Any]
    left: Source
    right: Source

    def __str__(self) -> str:
        return f"({self.left} {_SIGNS.get(self.function.__name__, self.function.__name__)} {self.right})"


@dataclass(frozen=True, eq=False)
class Const:
    """A plain number in the code."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


Source = Attr | AxisSize | Arithmetic | Const
Values = Mapping[AttrId, Any]


def leaves(source: Source) -> Iterator[Attr | AxisSize | Const]:
    """Yields the attributes, sizes and constants in a source."""
    stack: list[Source] = [source]
    while stack:
        top = stack.pop()
        if isinstance(top, Arithmetic):
            stack += [top.right, top.left]
        else:
            yield top


def attributes_in(*sources: Source) -> list[Attr]:
    """Returns the attributes in the sources, in order, with repetition."""
    return [leaf for source in sources for leaf in leaves(source) if isinstance(leaf, Attr)]


def evaluate(source: Source, counts: Mapping[Atom, Any], attributes: Values) -> Any:
    """Returns the value of a source when atoms keep `counts` units and attributes have new values.

    Atoms and attributes that are not named keep their size or value. Counts may be arrays, to try many values at once.
    """
    if isinstance(source, Const):
        return source.value
    if isinstance(source, AxisSize):
        return new_size(source.expr, counts)
    if isinstance(source, Attr):
        return attributes.get(source.id, source.old)
    return source.function(evaluate(source.left, counts, attributes), evaluate(source.right, counts, attributes))


def is_literal(source: Source) -> bool:
    """True if the integer is made of plain numbers only."""
    return all(isinstance(leaf, Const) for leaf in leaves(source))


def signature(source: Source) -> Any:
    """Returns a hashable value that is equal for equal sources."""
    if isinstance(source, AxisSize):
        return axis_signature(source.expr)
    if isinstance(source, Attr):
        return source.id
    if isinstance(source, Arithmetic):
        return source.function.__name__, signature(source.left), signature(source.right)
    return source.value
