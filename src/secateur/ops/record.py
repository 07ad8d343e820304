"""What an operator does to axes: the registry of rules, and the rule for everything element-wise.

A rule reads the axes of the inputs, says which are the same (`unify`), which may lose no unit (`freeze`), and returns those of
the output. The tracer compares the sizes with the real output, so a wrong rule is reported and not used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._ops import OpOverload

from ..axes import Expr, Role, freeze, fresh, norm, unify

Axes = list[Expr]
Rule = Callable[["Call"], "Axes | list[Axes] | None"]

RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register a rule for operators: `"mylib::op"`; a bare name means aten, and one string may hold several names.

    The rule gets a `Call` and returns the axes of the output (a list of them for several outputs), or None: freeze everything.
    """

    def register(function: Rule) -> Rule:
        for name in " ".join(names).split():
            RULES[name if "::" in name else f"aten::{name}"] = function
        return function

    return register


def elementwise(*names: str) -> None:
    """Say that these operators work element by element, with broadcasting: `elementwise("mylib::gate")`."""
    rule(*names)(pointwise)


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
    def name(self) -> str:
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


def pointwise(c: Call) -> Axes | list[Axes]:
    """Element by element over all tensor arguments."""
    tensors = c.tensors()
    if not tensors:
        return c.each([fresh(s) for s in c.outputs()[0].shape])
    return c.each(broadcast(*[c.axes(t) for t in tensors]))


elementwise(
    "clone detach alias lift lift_fresh lift_fresh_copy _to_copy contiguous copy fill zero_ resolve_conj",
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like _conj _conj_physical real imag complex polar",
    "bernoulli normal_ uniform_ exponential_ random_ geometric_ cauchy_ log_normal_ native_dropout dropout",
    "rrelu rrelu_with_noise",
    "masked_fill where floor_divide isnan nan_to_num lerp addcmul addcdiv expand_as view_as",
    "gelu silu hardswish hardsigmoid hardtanh leaky_relu elu mish relu6 celu selu softplus relu _prelu_kernel resolve_neg",
)


@functools.cache
def name_of(func: Any) -> str:
    return f"{func.namespace}::{func.overloadpacket.__name__}" if isinstance(func, OpOverload) else str(func)


def lookup(func: Any) -> Rule | None:
    """The rule for an operator: its own, or the element-wise one if torch says so of it or of its twin not in place."""
    name = name_of(func)
    found = RULES.get(name)
    if found is not None:
        return found
    return pointwise if torch.Tag.pointwise in func.tags or RULES.get(name.removesuffix("_")) is pointwise else None
