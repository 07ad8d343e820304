"""One record per operator: everything the package knows about it.

`Operator` says how axes pass through, what zero, constant and varying inputs become, what happens to a common factor, how many
FLOPs there are and which shapes come out. `register` adds or extends records; `lookup` finds one by its exact name. A
question that a record does not answer is answered conservatively: the axis stays whole, or the plan says "not exact".

An axis rule reads the axes of the inputs, says which are the same (`unify`) and which must keep all units (`freeze`), and
returns the axes of the outputs. The tracer compares their sizes with the real outputs: a wrong rule is reported and not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..axes import Expr, Role, freeze, fresh, norm, unify

Axes = list[Expr]
AxisRule = Callable[["Call"], "Axes | list[Axes] | None"]


@dataclass(frozen=True)
class Contraction:
    """A sum of products over one dim of each of two tensors, plus a bias: the names of the arguments, and these two dims."""

    left: str
    right: str
    bias: str | None = None
    inner: tuple[int, int] = (-1, -2)


@dataclass(frozen=True)
class Convolution:
    """A convolution: the names of its arguments."""

    left: str = "input"
    right: str = "weight"
    bias: str = "bias"


@dataclass(frozen=True)
class Attention:
    """Attention: softmax(query key' * scale + mask) value, the key positions of the value averaged."""

    left: str = "query"
    right: str = "key"
    value: str = "value"


Product = Contraction | Convolution | Attention
_VALUES = ("elementwise", "moves", "computes", "max pooling", "batch normalisation", None)
Values = Literal["elementwise", "moves", "computes", "max pooling", "batch normalisation"] | Product | None


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What is known about one operator. Every default is the answer for an operator about which nothing is known.

    `axes`: the axis rule; None: all axes keep all units.
    `values`: what an output entry is made of. "elementwise": the inputs at the same index, with broadcasting. "moves": one
        input entry; entries are moved, copied or left out. "computes": several entries; the operator itself is run on
        constants. "max pooling", "batch normalisation": the same, with a shortcut. `Contraction`, `Convolution`,
        `Attention`: a sum of products. None: unknown, so what comes out varies.
    `zero`: where the first tensor argument is zero, and the others that carry its units are, so is the output; always, or for
        the arguments for which the function says so.
    `over`: the name under which a reduction or normalisation marks the axes that it runs over.
    `per_channel`: a normalisation that treats every channel (dim 1) on its own.
    `grows`: over more entries of the same value the result is larger, so it depends on the size of the inputs.
    `positions`: the outputs that hold indices instead of values.
    `factor`: what a common factor of the inputs does. "same": it passes; "equal": it passes if all inputs have it; "product",
        "quotient": powers add up, or the second is subtracted. None: it cannot be followed.
    `identity`: the first input comes out unchanged, except for a cast.
    `undefined`: the output is uninitialised memory.
    `noise`: the argument that only a call in training mode reads.
    `contiguous`: its kernels misread expanded tensors.
    `spatial`: how many spatial dims it works on; a batch dim before the channels may be sampled.
    `flops`: the FLOPs, as a function of shapes, as `torch.utils.flop_counter` has them.
    `shapes`: outputs of the right shape without computing them.
    `integers`: which integers in the arguments of a Python function are sizes (`ops/integers.py`).
    """

    axes: AxisRule | None = None
    values: Values = None
    zero: bool | Callable[[Mapping[str, Any]], bool] = False
    over: str = ""
    per_channel: bool = False
    grows: bool = False
    positions: tuple[int, ...] = ()
    factor: Literal["same", "equal", "product", "quotient"] | None = None
    identity: bool = False
    undefined: bool = False
    noise: str | None = None
    contiguous: bool = False
    spatial: int = 0
    flops: Callable[..., int] | None = None
    shapes: Callable[..., Any] | None = None
    integers: Callable[..., None] | None = None


UNKNOWN = Operator()
MOVES: dict[str, Any] = {"values": "moves", "zero": True, "factor": "same"}  # the facts of most views
OPERATORS: dict[str, Operator] = {}
_found: dict[Any, Operator] = {}


def register(names: str, **facts: Any) -> None:
    """State facts about operators: `register("mylib::gate", values="elementwise")`.

    Args:
        names: One or several operator names, separated by spaces; a bare name means `aten`.
        facts: Fields of `Operator`. Facts about an operator that is already known are added to its record. Element-wise
            operators and contractions with a matrix need no axis rule of their own.

    Raises:
        TypeError: For a fact that is not a field of `Operator`.
        ValueError: For `values` that are not known.
    """
    unknown = facts.keys() - {field.name for field in fields(Operator)}
    if unknown:
        raise TypeError(f"{sorted(unknown)} are no facts of an operator; known are {[f.name for f in fields(Operator)]}")
    values = facts.get("values")
    if not isinstance(values, Product) and values not in _VALUES:
        raise ValueError(f"values={values!r} is not known; use one of {_VALUES}, or a Contraction, Convolution or Attention")
    _found.clear()
    default = elementwise if values == "elementwise" else contraction if isinstance(values, Contraction) else None
    for name in names.split():
        full = name if "::" in name else f"aten::{name}"
        known = OPERATORS.get(full, UNKNOWN)
        OPERATORS[full] = replace(known, **{"axes": known.axes or default, **facts})


def operator(names: str, **facts: Any) -> Callable[[AxisRule], AxisRule]:
    """Decorator for axis rules: registers the rule and further facts for these operators."""

    def decorate(rule: AxisRule) -> AxisRule:
        register(names, axes=rule, **facts)
        return rule

    return decorate


def lookup(func: Any) -> Operator:
    """The record of an operator.

    An in-place element-wise operator has the record of its out-of-place form. An operator that torch tags as pointwise is
    element-wise without being registered. Any other operator without a record is `UNKNOWN`.
    """
    found = _found.get(func)
    if found is None:
        found = _found[func] = _lookup(func)
    return found


def lookup_function(name: str) -> Operator:
    """The record of a Python function, by its `__name__`."""
    return OPERATORS.get(f"python::{name}", UNKNOWN)


def _lookup(func: Any) -> Operator:
    if not isinstance(func, OpOverload):
        return UNKNOWN
    name = name_of(func)
    found = OPERATORS.get(name)
    if found is None and name.endswith("_"):
        plain = OPERATORS.get(name.removesuffix("_"), UNKNOWN)
        found = plain if plain.values == "elementwise" else None
    if found is None and torch.Tag.pointwise in func.tags:
        found = ELEMENTWISE
    return UNKNOWN if found is None else found


@functools.cache
def name_of(func: Any) -> str:
    """The exact name of an operator, without its overload: `"aten::mm"`."""
    return f"{func.namespace}::{func.overloadpacket.__name__}" if isinstance(func, OpOverload) else str(func)


class Ledger(Protocol):
    """What a rule may tell the trace beyond axes."""

    literal_sizes: frozenset[int]  # positions of small sizes that stand as plain numbers in the code
    literal_index: tuple[int, ...]  # a list of plain numbers that the code indexes with

    def axes_of(self, tensor: Tensor) -> Axes: ...
    def play(self, tensor: Tensor, dim: int, role: Role) -> None: ...
    def is_weight(self, tensor: Tensor) -> bool: ...
    def equal_counts(self, parts: Sequence[Expr]) -> None: ...
    def uses_size(self, e: Expr, how: str) -> None: ...
    def multiple(self, e: Expr, of: int) -> None: ...
    def freeze_when_read(self, e: Expr, why: str) -> None: ...


@functools.cache
def arguments_of(func: Any) -> dict[str, Any]:
    """The names of an operator's arguments, and what they are unless given."""
    return {s.name: s.default_value if s.has_default_value() else None for s in func._schema.arguments}


class Call:
    """One operator call: arguments by schema name as attributes, `axes(t)` of a tensor, `out` as returned."""

    def __init__(self, ledger: Ledger, func: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Any) -> None:
        self.ledger, self.func, self.out = ledger, func, out
        defaults = arguments_of(func)
        self.args: dict[str, Any] = {**defaults, **dict(zip(defaults, args)), **kwargs}

    def __getattr__(self, name: str) -> Any:
        try:
            return self.__dict__["args"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def operator(self) -> Operator:
        """The record of the operator that is called."""
        return lookup(self.func)

    @property
    def name(self) -> str:
        """The name of the operator, for messages."""
        return self.func.overloadpacket.__name__

    def get(self, *names: str) -> Any:
        """The first of these arguments that the operator has and that is not None."""
        for name in names:
            if self.args.get(name) is not None:
                return self.args[name]
        return None

    def axes(self, tensor: Tensor | None) -> Axes:
        """The axes of a tensor, as a list of your own."""
        return [] if tensor is None else list(self.ledger.axes_of(tensor))

    def tensors(self) -> list[Tensor]:
        """Every tensor among the arguments, also inside lists."""
        found: list[Tensor] = []
        for value in self.args.values():
            for item in value if isinstance(value, list | tuple) else (value,):
                if isinstance(item, Tensor):
                    found.append(item)
        return found

    def each(self, axes: Sequence[Expr]) -> Axes | list[Axes]:
        """The same axes for every output."""
        return [list(axes) for _ in self.out] if isinstance(self.out, list | tuple) else list(axes)

    def outputs(self) -> list[Any]:
        return list(self.out) if isinstance(self.out, list | tuple) else [self.out]

    def contract(self, left: Tensor, i: int, right: Tensor, j: int) -> None:
        """Sum over dim i of `left` times dim j of `right`; a weight there consumes units, its other dims produce them."""
        unify(self.axes(left)[i], self.axes(right)[j])
        weights = [(t, d) for t, d in ((left, i), (right, j)) if self.ledger.is_weight(t)]
        if len(weights) == 2:  # two weights multiplied: the second is applied first
            weights = weights[:1]
            self.ledger.play(right, j % right.dim(), "produce")
        for tensor, dim in weights:
            self.ledger.play(tensor, dim % tensor.dim(), "consume")

    def produce(self, tensor: Tensor, dim: int) -> None:
        if self.ledger.is_weight(tensor):
            self.ledger.play(tensor, dim % tensor.dim(), "produce")


def freeze_all(axes: Iterable[Expr], why: str) -> None:
    for e in axes:
        freeze(e, why)


def frozen_like(out: Tensor, why: str) -> Axes:
    return [fresh(s, why) for s in out.shape]


def broadcast(*operands: Sequence[Expr]) -> Axes:
    """The axes of operands that meet element by element."""
    rank = max((len(axes) for axes in operands), default=0)
    out: Axes = []
    for i in range(rank):
        found: Expr | None = None
        for axes in operands:
            at = i - (rank - len(axes))
            if at < 0:
                continue
            e = norm(axes[at])
            if found is None or found.size == 1:
                found = e
            elif e.size != 1:
                unify(found, e)
                found = norm(found)
        assert found is not None
        out.append(found)
    return out


def elementwise(c: Call) -> Axes | list[Axes]:
    """Element by element over all tensor arguments."""
    tensors = c.tensors()
    if not tensors:
        return c.each([fresh(s) for s in c.outputs()[0].shape])
    return c.each(broadcast(*[c.axes(t) for t in tensors]))


def contraction(c: Call) -> Axes:
    """A tensor times a matrix, with a bias along the outputs of the matrix."""
    values = c.operator.values
    assert isinstance(values, Contraction)
    left, matrix = c.args[values.left], c.args[values.right]
    i, j = values.inner[0] % left.dim(), values.inner[1] % matrix.dim()
    c.contract(left, i, matrix, j)
    c.produce(matrix, 1 - j)
    out = [*(e for d, e in enumerate(c.axes(left)) if d != i), norm(c.axes(matrix)[1 - j])]
    bias = c.get(values.bias) if values.bias else None
    return out if bias is None else broadcast(out, c.axes(bias))


ELEMENTWISE = Operator(axes=elementwise, values="elementwise")


register(
    "clone detach alias lift lift_fresh lift_fresh_copy _to_copy contiguous dropout native_dropout",
    values="elementwise",
    identity=True,
    factor="same",
)
register("neg resolve_conj resolve_neg _conj _conj_physical", values="elementwise", factor="same")
register("add sub rsub where maximum minimum", values="elementwise", factor="equal")
register("mul", values="elementwise", factor="product")
register("div", values="elementwise", factor="quotient")
register("empty_like", values="elementwise", undefined=True)
register(
    "zeros_like ones_like full_like rand_like randn_like randint_like copy fill zero_ real imag complex polar",
    values="elementwise",
)
register("bernoulli normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ rrelu", values="elementwise")
register("rrelu_with_noise", values="elementwise", noise="noise")
register("masked_fill floor_divide isnan nan_to_num lerp addcmul addcdiv expand_as view_as", values="elementwise")
register(
    "gelu silu hardswish hardsigmoid hardtanh leaky_relu elu mish relu6 celu selu softplus relu _prelu_kernel",
    values="elementwise",
)
