"""Criteria: how important each element is, as an expression over evidence about that element.

A criterion declares the evidence it needs, combines with `* + - ** abs .map .after`, prints as an expression, and
`Criterion.parse` reads that text. A new criterion is one line at the end of this file, or a plain function.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from . import kernels
from ._layers import Layout
from ._tree import nearest
from .scores import Scores

EVIDENCE = {
    "weight": "the weights themselves",
    "grad": "the mean gradient over `data`",
    "grad_square": "the mean squared gradient over the batches of `data`",
    "input_norm": "the L2 norm of each input over `data`",
    "linear_grad": "the gradient of the linearised model, all weights made positive",
}


class Evidence(Protocol):
    """The evidence for one tensor: matrices of its layout, read a few rows at a time."""

    step: int

    @property
    def name(self) -> str: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def device(self) -> torch.device: ...
    def rows(self, leaf: str, first: int, last: int) -> Tensor: ...
    def random(self, seed: int, first: int, last: int) -> Tensor: ...


Op = Callable[..., Any]


def _wide(x: Tensor | float) -> Tensor | float:
    """Arithmetic happens in float32 at least: half precision would make ties that are not there."""
    return x.float() if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16) else x


def _magnitude(x: Tensor | float) -> Tensor | float:
    return kernels.magnitude(x) if isinstance(x, Tensor) else abs(x)


# name -> (how it prints, how strongly it binds, what it does)
_OPS: dict[str, tuple[str, int, Op]] = {
    "add": ("{} + {}", 1, lambda a, b: _wide(a) + _wide(b)),
    "sub": ("{} - {}", 1, lambda a, b: _wide(a) - _wide(b)),
    "mul": ("{} * {}", 2, lambda a, b: _wide(a) * _wide(b)),
    "div": ("{} / {}", 2, lambda a, b: _wide(a) / _wide(b)),
    "neg": ("-{}", 3, lambda a: -a),
    "pow": ("{} ** {}", 4, lambda a, b: _wide(a) ** b),
    "abs": ("abs({})", 9, _magnitude),
}


@dataclass(frozen=True, eq=False)
class Criterion:
    """An expression that scores every element of a tensor; the lowest scores are pruned first."""

    op: str
    args: tuple[Any, ...] = ()

    def __post_init__(self) -> None:
        if self.op not in (*_OPS, "leaf", "random", "function", "map", "after"):
            raise ValueError(f"{self.op!r} is no operation; to read a criterion from its text call sc.criterion({self.op!r})")

    # --- what it needs, what it prints -------------------------------------------------------------------------------
    @property
    def needs(self) -> frozenset[str]:
        """The evidence that has to be collected."""
        if self.op == "leaf":
            return frozenset(self.args) - {"weight"}
        if self.op == "function":
            return frozenset(_arguments(self.args[0])) - {"weight"}
        return frozenset().union(*(arg.needs for arg in self.args if isinstance(arg, Criterion)))

    @property
    def elementwise(self) -> bool:
        """Whether each element's score depends on that element's evidence only, so that rows can be scored separately."""
        if self.op in ("map", "function"):
            return False
        return all(arg.elementwise for arg in self.args if isinstance(arg, Criterion))

    def __str__(self) -> str:
        if self.op in _OPS:
            template, strength, _ = _OPS[self.op]
            parts = [_inside(arg, strength, right=i == 1 and self.op != "abs") for i, arg in enumerate(self.args)]
            return template.format(*(str(self.args[0]),) if self.op == "abs" else parts)
        if self.op == "leaf":
            return self.args[0]
        if self.op == "random":
            return f"random({self.args[0]})"
        if self.op == "function":
            return _name(self.args[0])
        inner, *rest = self.args
        if self.op == "map":
            return f"{_inside(inner, 6)}.map({_name(rest[0])})"
        return f"{_inside(inner, 6)}.after({rest[0]}, {rest[1]})"

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Criterion) and (self.op, self.args) == (other.op, other.args)

    def __hash__(self) -> int:
        return hash((self.op, self.args))

    @staticmethod
    def parse(text: str, functions: Mapping[str, Callable[..., Tensor]] | None = None) -> Criterion:
        """Reads a criterion from its text: "wanda", "abs(weight * grad)". Raises ValueError where it is not one.

        `functions` maps names that occur in the text to functions.
        """
        try:
            return _scores(_read(ast.parse(text, mode="eval").body, {**TRANSFORMS, **(functions or {})}))
        except (SyntaxError, KeyError, TypeError, ValueError, RecursionError, MemoryError) as error:
            raise ValueError(f"cannot read the criterion {text!r}: {error}") from None

    # --- composing ---------------------------------------------------------------------------------------------------
    def __mul__(self, other: Criterion | float) -> Criterion:
        return Criterion("mul", (self, _operand(other)))

    def __rmul__(self, other: float) -> Criterion:
        return Criterion("mul", (_operand(other), self))

    def __truediv__(self, other: Criterion | float) -> Criterion:
        return Criterion("div", (self, _operand(other)))

    def __add__(self, other: Criterion | float) -> Criterion:
        return Criterion("add", (self, _operand(other)))

    def __radd__(self, other: float) -> Criterion:
        return Criterion("add", (_operand(other), self))

    def __sub__(self, other: Criterion | float) -> Criterion:
        return Criterion("sub", (self, _operand(other)))

    def __rsub__(self, other: float) -> Criterion:
        return Criterion("sub", (_operand(other), self))

    def __neg__(self) -> Criterion:
        return Criterion("neg", (self,))

    def __pow__(self, power: float) -> Criterion:
        if isinstance(power, Criterion):
            raise TypeError("the power of a criterion is a number")
        return Criterion("pow", (self, _operand(power)))

    def __abs__(self) -> Criterion:
        return Criterion("abs", (self,))

    def map(self, transform: Callable[[Tensor], Tensor]) -> Criterion:
        """Applies a function to the whole score matrix (outputs, inputs x kernel) of a tensor."""
        if not callable(transform):
            raise TypeError(f"map takes a function of a score matrix, not {type(transform).__name__}")
        return Criterion("map", (self, transform))

    def after(self, step: int, first: Criterion) -> Criterion:
        """Uses `first` before this step of a `Pruner`, and this criterion from it on."""
        if not isinstance(first, Criterion) or not isinstance(step, int):
            raise TypeError("after takes a step and the criterion that holds before it: movement.after(1000, magnitude)")
        return Criterion("after", (self, step, first))

    # --- scoring -----------------------------------------------------------------------------------------------------
    def scores(self, evidence: Evidence) -> Scores:
        """The scores of one tensor."""
        if self.op == "after":
            then, step, first = self.args
            return (then if evidence.step >= step else first).scores(evidence)
        if (power := self.power_of_magnitude) > 0:
            return Scores.magnitude(evidence.rows("weight", 0, evidence.layout.rows), evidence.layout, power=power)
        if self.elementwise:
            return Scores(evidence.layout, evidence.device, lambda a, b: self._rows(evidence, a, b))
        whole = self._rows(evidence, 0, evidence.layout.rows)
        return Scores(evidence.layout, evidence.device, lambda a, b: whole[a:b])

    @property
    def power_of_magnitude(self) -> float:
        """p if this is magnitude ** p, and 0 if it is no power of the magnitude."""
        return self.args[1] if self.op == "pow" and self.args[0] == magnitude else float(self == magnitude)

    def slab(self, evidence: Evidence, first: int, last: int) -> Tensor:
        """The scores of some rows, computed from the evidence of these rows alone. The criterion must be elementwise."""
        return self._rows(evidence, first, last)

    def _rows(self, evidence: Evidence, first: int, last: int) -> Any:
        if self.op == "leaf":
            return evidence.rows(self.args[0], first, last)
        if self.op == "random":
            return evidence.random(self.args[0], first, last)
        if self.op == "function":
            return _call(self.args[0], evidence)[first:last]
        if self.op == "after":
            then, step, before = self.args
            return (then if evidence.step >= step else before)._rows(evidence, first, last)
        values = [arg._rows(evidence, first, last) if isinstance(arg, Criterion) else arg for arg in self.args]
        if self.op == "map":
            own = values[0].to(torch.promote_types(values[0].dtype, torch.float32), copy=True)  # it may be changed in place
            return _same_shape(values[1](own), evidence, values[1])
        return _OPS[self.op][2](*values)


def criterion(function: Criterion | Callable[..., Tensor] | str) -> Criterion:
    """A criterion from its text ("wanda", "abs(weight*grad)") or from a function.

    The names of the function's arguments are the evidence that it needs::

        def mine(weight, grad): return (weight * grad).abs()

    Each argument is a matrix (outputs, inputs x kernel), and so is the result.
    """
    if isinstance(function, Criterion):
        return function
    if isinstance(function, str):
        return Criterion.parse(function)
    if not callable(function):
        raise TypeError(f"a criterion is an expression (sc.magnitude), its text, or a function; not {type(function).__name__}")
    names = _arguments(function)
    if function is random:
        raise TypeError("random is a function that makes a criterion: write random() or random(7)")
    if not names or not set(names) <= set(EVIDENCE):
        known = ", ".join(EVIDENCE)
        raise TypeError(f"{_name(function)} asks for {names or 'nothing'}; the arguments of a criterion are among: {known}")
    return Criterion("function", (function,))


def random(seed: int = 0) -> Criterion:
    """Uniform random scores in [0, 1), the same for a seed and a tensor name on every device and in every process."""
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"the seed of random() is a whole number, not {seed!r}")
    return Criterion("random", (seed,))


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _arguments(function: Callable[..., Any]) -> list[str]:
    """The arguments that a function needs: those without a default, and those that are named like evidence."""
    try:
        parameters = inspect.signature(function).parameters.items()
    except ValueError:  # some builtins have no signature
        return []
    return [name for name, parameter in parameters if parameter.default is parameter.empty or name in EVIDENCE]


def _operand(value: Any) -> Any:
    if isinstance(value, Criterion):
        return value
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise TypeError(f"a criterion combines with criteria and numbers, not with {type(value).__name__}")
    if not math.isfinite(value):
        raise ValueError(f"a criterion combines with finite numbers, not with {value}")
    return value


def _inside(arg: Any, strength: int, *, right: bool = False) -> str:
    """`arg` as text inside an operator of precedence `strength`, in brackets where they are needed."""
    own = _OPS[arg.op][1] if isinstance(arg, Criterion) and arg.op in _OPS else 9
    if isinstance(arg, int | float) and arg < 0:
        own = 3
    text = str(arg)
    return f"({text})" if own < strength or (own == strength and (right or strength in (3, 4))) else text


def _call(function: Callable[..., Tensor], evidence: Evidence) -> Tensor:
    rows = evidence.layout.rows
    matrices = {name: evidence.rows(name, 0, rows).clone() for name in _arguments(function)}  # to be changed in place
    return _same_shape(function(**matrices), evidence, function)


def _same_shape(result: Any, evidence: Evidence, function: Callable[..., Any]) -> Tensor:
    shape = (evidence.layout.rows, evidence.layout.cols)
    if not isinstance(result, Tensor) or result.shape != shape or not result.is_floating_point():
        given = f"{tuple(result.shape)} of {result.dtype}" if isinstance(result, Tensor) else type(result).__name__
        wanted = f"must give float scores of shape {shape}, one for each element of {evidence.name!r}"
        raise ValueError(f"{_name(function)} {wanted}; it returned {given}")
    return result.detach()


def _scores(value: Any) -> Criterion:
    if not isinstance(value, Criterion):
        raise ValueError(f"{value!r} is not a criterion")
    return value


def _number(value: Any) -> float:
    if isinstance(value, Criterion):
        raise ValueError(f"{value} is not a number")
    return value


_BINARY = {ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.Pow: "pow"}


def _read(node: ast.expr, functions: Mapping[str, Callable[..., Tensor]]) -> Any:
    """Turns a Python expression tree into a criterion. Raises ValueError for anything that is not part of one."""
    match node:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in EVIDENCE:
            return Criterion("leaf", (name,))
        case ast.Name(id=name) if name in NAMED:
            return NAMED[name]
        case ast.Name(id=name) if name in functions:
            return criterion(functions[name])
        case ast.Name(id=name):
            hint = nearest(name, [*NAMED, *EVIDENCE, *functions]) or f" Criteria are {', '.join(NAMED)}."
            raise ValueError(f"{name!r} is neither evidence nor a criterion.{hint}")
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            value = _read(inner, functions)
            return -value
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            pair = _read(left, functions), _read(right, functions)
            if isinstance(op, ast.Pow):
                return _scores(pair[0]) ** _number(pair[1])
            if any(isinstance(side, Criterion) for side in pair):
                return Criterion(_BINARY[type(op)], pair)
        case ast.Call(func=ast.Name(id="abs"), args=[inner], keywords=[]):
            return abs(_scores(_read(inner, functions)))
        case ast.Call(func=ast.Name(id="random"), args=[seed], keywords=[]):
            return random(_read(seed, functions))
        case ast.Call(func=ast.Attribute(value=inner, attr="map"), args=[ast.Name(id=name)], keywords=[]):
            return _scores(_read(inner, functions)).map(functions[name])
        case ast.Call(
            func=ast.Attribute(value=inner, attr="after"), args=[ast.Constant(value=int() as step), first], keywords=[]
        ):
            return _scores(_read(inner, functions)).after(step, _scores(_read(first, functions)))
    raise ValueError(f"{ast.unparse(node)!r} is not part of a criterion")


# --- transforms of a whole score matrix -----------------------------------------------------------------------------


def share_of_larger(scores: Tensor) -> Tensor:
    """Each squared score over the sum of those not smaller, which makes tensors comparable (LAMP: Lee et al., 2021)."""
    ordered, index = scores.reshape(-1).double().square().sort(stable=True)
    share = torch.where(ordered == 0, 0.0, ordered / ordered.flip(0).cumsum(0).flip(0))
    return torch.empty_like(ordered).scatter_(0, index, share).view_as(scores)


def share_of_row_and_column(scores: Tensor) -> Tensor:
    """Each score divided by the sum of its row, plus the same by column (RIA: Zhang et al., 2024)."""
    row, column = scores.sum(1, keepdim=True), scores.sum(0, keepdim=True)
    tiny = torch.finfo(scores.dtype).tiny
    return scores / row.clamp(min=tiny) + scores / column.clamp(min=tiny)


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {f.__name__: f for f in (share_of_larger, share_of_row_and_column)}

# --- the criteria ---------------------------------------------------------------------------------------------------

weight = Criterion("leaf", ("weight",))
"""The weights themselves."""
grad = Criterion("leaf", ("grad",))
"""The mean gradient over the batches of `data=`. Needs `loss=`."""
grad_square = Criterion("leaf", ("grad_square",))
"""The mean over batches of the squared gradient. Needs `data=` and `loss=`."""
input_norm = Criterion("leaf", ("input_norm",))
"""The L2 norm of the inputs that each weight is multiplied with. Needs `data=`."""
linear_grad = Criterion("leaf", ("linear_grad",))
"""The gradient of the model made linear: positive weights and an input of ones. Needs `data=`, for its shape alone."""

magnitude = abs(weight)
"""The absolute value of a weight. The default."""
taylor = abs(weight * grad)
"""The first-order change of the loss (Molchanov et al., 2017)."""
snip = abs(weight * grad)
"""The same as `taylor`, meant for a model before training (Lee et al., 2019)."""
fisher = weight**2 * grad_square
"""The second-order change of the loss with the empirical Fisher matrix (Theis et al., 2018)."""
movement = -(weight * grad)
"""Low for weights that training moves towards zero; for fine-tuning with a `Pruner` (Sanh et al., 2020)."""
wanda = magnitude * input_norm
"""Magnitude times input norm; use it with `scope="row"` or an n:m pattern (Sun et al., 2024)."""
ria = magnitude.map(share_of_row_and_column) * input_norm**0.5
"""Magnitude relative to row and column, times the root of the input norm (Zhang et al., 2024)."""
lamp = magnitude.map(share_of_larger)
"""Squared magnitude over the sum of those not smaller; use it with `scope="global"` (Lee et al., 2021)."""
synflow = abs(weight * linear_grad)
"""For a model before training: uses the shape of one batch, not its values (Tanaka et al., 2020)."""

NAMED = {
    "magnitude": magnitude,
    "taylor": taylor,
    "snip": snip,
    "fisher": fisher,
    "movement": movement,
    "wanda": wanda,
    "ria": ria,
    "lamp": lamp,
    "synflow": synflow,
}
