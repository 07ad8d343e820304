"""What a cut leaves: parameters and FLOPs predicted from the traced axes without running anything, times measured."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..axes import Atom, Expr, new_size
from ..display import interleaved
from ..edit import eval_mode, owned_tensors, plain_kernels, run
from ..trace import Dim, Outlined, Ref, Trace, ValueRead, answers, signature

Counts = Mapping[Atom, int]
_STRETCHES = 8  # of a measurement, each with a median of its own


_ATTENTION = (
    "efficient_attention",
    "flash_attention",
    "cudnn_attention",
    "flash_attention_for_cpu",
    "fused_attention_overrideable",
)


def _formulas() -> dict[Any, Callable[..., int]]:
    """Torch's own FLOP formulas; for attention ours, since torch has none on a CPU, and before 2.13 none for shared keys."""
    from torch.utils.flop_counter import flop_registry

    return {**flop_registry, **{getattr(torch.ops.aten, f"_scaled_dot_product_{name}"): _attention for name in _ATTENTION}}


def _attention(query: Sequence[int], key: Sequence[int], value: Sequence[int], *_: Any, **__: Any) -> int:
    """Every query with every key, and what comes of it with every value; heads may share keys and values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor in the run, as places in the list of axes."""

    places: tuple[int, ...]


class _Bias(NamedTuple):
    """A bias that a cut adds: its axis (None: its length is fixed), and the other axes of the weight beside it."""

    output: int | None
    fixed: int
    inputs: tuple[int, ...]

    def length(self, sizes: Sequence[int]) -> int:
        return self.fixed if self.output is None else sizes[self.output]


class SizeModel:
    """Parameters and FLOPs of the traced model as functions of how many units its atoms keep."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.axes: list[Expr] = []  # every axis once, however many tensors have it
        self.at: dict[Any, int] = {}
        self.biases: dict[str, _Bias] = {}  # those that a cut is known to add
        self.tried: list[frozenset[str]] = [frozenset()]
        owned = owned_tensors(trace.model).values()
        self.weights = [self.shape(trace.dims[name]) for name, tensor in owned if isinstance(tensor, nn.Parameter)]
        formulas = _formulas()
        steps = [(formulas[f], s) for s in trace.steps if (f := getattr(s.func, "overloadpacket", None)) in formulas]
        steps = [(getattr(f, "__wrapped__", f), s) for f, s in steps]  # the formula itself, of shapes instead of tensors
        self.steps = [(f, self.refs(s.args), self.refs(s.kwargs), self.refs(Ref(s.outs[0]))) for f, s in steps]

    def shape(self, axes: list[Expr]) -> _Shape:
        places = []
        for e in axes:
            key = signature(Dim(e))
            if key not in self.at:
                self.at[key] = len(self.axes)
                self.axes.append(e)
            places.append(self.at[key])
        return _Shape(tuple(places))

    def refs(self, value: Any) -> Any:
        if isinstance(value, Ref):
            return self.shape(self.trace.axes[value.number])
        if isinstance(value, dict):
            return {key: self.refs(item) for key, item in value.items()}
        return tuple(map(self.refs, value)) if isinstance(value, tuple) else value

    def params(self, counts: Counts) -> int:
        sizes = [new_size(e, counts) for e in self.axes]
        added = sum(b.length(sizes) for b in self.biases.values() if any(sizes[i] < self.axes[i].size for i in b.inputs))
        return added + sum(math.prod(sizes[i] for i in shape.places) for shape in self.weights)

    def learn(self, added: Mapping[str, tuple[int, ...]], counts: Counts) -> bool:
        """Count from now on the biases that a cut to `counts` was seen to add, where a cut takes inputs from their layers.

        With those that are known, else (when they are no news, and some of them did not come) alone; False: both were tried.
        """
        for names in (frozenset(self.biases) | added.keys(), frozenset(added)):
            if names not in self.tried:
                self.tried.append(names)
                known = self.biases
                self.biases = {n: known[n] if n in known else self.bias(n, math.prod(added[n]), counts) for n in names}
                return True
        return False

    def bias(self, name: str, length: int, counts: Counts) -> _Bias:
        """The bias beside a weight: as long as the axis of the weight that makes the outputs, if one is as long as it is."""
        path, _, local = name.rpartition(".")
        axes = self.trace.dims.get(f"{path}.{local.replace('bias', 'weight')}".removeprefix("."), [])
        first = 1 if getattr(self.trace.model.get_submodule(path), "transposed", False) else 0
        places = self.shape(axes).places
        made = next((d for d in (first, 1 - first) if d < len(axes) and new_size(axes[d], counts) == length), None)
        output = None if made is None else places[made]
        return _Bias(output, length, tuple(i for d, i in enumerate(places) if d != made))

    def flops(self, counts: Counts) -> int:
        sizes = [new_size(e, counts) for e in self.axes]

        def real(value: Any) -> Any:
            if isinstance(value, _Shape):
                return tuple(sizes[i] for i in value.places)
            return tuple(map(real, value)) if isinstance(value, tuple) else value

        return sum(
            formula(*map(real, args), **{key: real(value) for key, value in kwargs.items()}, out_shape=real(out))
            for formula, args, kwargs, out in self.steps
        )


class Counting(TorchDispatchMode):
    """Counts the FLOPs of what runs inside, by torch's formulas (its own counter also follows modules, which not all bear)."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would load all of torch._dynamo: seconds

    def __init__(self, outlined: Outlined | None = None) -> None:
        super().__init__()
        self.formulas, self.total, self.outlined = _formulas(), 0, outlined

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {})) if self.outlined is None else self.outlined(func, args, kwargs or {})
        formula = self.formulas.get(getattr(func, "overloadpacket", None))
        if formula is not None:
            plain = getattr(formula, "__wrapped__", formula)  # of shapes instead of tensors: torch's wrapper takes a while
            sizes = {key: _sizes(value) for key, value in (kwargs or {}).items()}
            self.total += plain(*map(_sizes, args), **sizes, out_shape=_sizes(out))
        return out


def _sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_sizes, value)) if isinstance(value, list | tuple) else value


def outline(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[tuple[int, ...]], int]:
    """The shapes that the model answers with, and its FLOPs; nothing heavy is computed unless its way depends on values."""
    for outlined in (Outlined(), None):
        counter = Counting(outlined)
        with contextlib.suppress(ValueRead), plain_kernels():
            return answers(run(model, args, kwargs, under=counter)), counter.total
    raise AssertionError("a run without outlines reads values as it likes")


class Timing(NamedTuple):
    """Seconds for a run of each of two models, and the spread of their ratio: twice its standard error."""

    dense: float
    small: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.small / self.dense


def times(
    model: nn.Module,
    small: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    enough: Callable[[Timing], bool] = lambda timing: timing.spread <= 0.02 * timing.ratio,
    seconds: tuple[float, float] = (0.5, 5.0),
) -> Timing:
    """How long each takes in eval mode without gradients; the modes are put back. `seconds`: at least, and at most, unless
    eight rounds take longer; in between, until it is `enough`."""
    with eval_mode(model, small), torch.no_grad():
        return _in_turn(lambda: model(*inputs[0], **inputs[1]), lambda: small(*inputs[0], **inputs[1]), enough, seconds)


def _in_turn(
    dense: Callable[[], Any], small: Callable[[], Any], enough: Callable[[Timing], bool], seconds: tuple[float, float]
) -> Timing:
    """Time both in turn until it is `enough`, in an even number of rounds: each comes first as often as the other."""
    due = seconds[0]

    def done(found: Sequence[Sequence[float]], spent: float) -> bool:
        nonlocal due
        if len(found[0]) % 2 or len(found[0]) < _STRETCHES or spent < due:
            return False
        due = min(1.5 * spent, seconds[1])
        return spent >= seconds[1] or enough(_judged(list(zip(*found))))

    first, second = interleaved((dense, small), done)
    return _judged(list(zip(first.seconds, second.seconds)))


def _judged(pairs: Sequence[tuple[float, ...]]) -> Timing:
    """Medians of the times and of their ratios. Noise comes in bursts: the spread is that between stretches of the rounds."""
    ratios, whole = [s / d for d, s in pairs], statistics.median(d for d, _ in pairs)
    ratio = statistics.median(ratios)
    ends = [i * len(ratios) // _STRETCHES for i in range(_STRETCHES + 1)]
    parts = [statistics.median(ratios[a:b]) for a, b in itertools.pairwise(ends)]
    deviation = 1.48 * statistics.median(abs(part - ratio) for part in parts)  # the standard one, of normal noise
    return Timing(whole, whole * ratio, 2 * 1.25 * deviation / _STRETCHES**0.5)  # medians err a quarter more than means
