"""Sizes: parameters and FLOPs of a cut model, predicted from the traced axes, and its latency, measured."""

from __future__ import annotations

import contextlib
import itertools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..axes import Atom, Expr, axis_signature, new_size
from ..display import interleaved
from ..edit import eval_mode, owned_tensors, plain_kernels, run
from ..ops import flop_formula
from ..trace import Outlined, Ref, Trace, ValueRead, output_shapes

Counts = Mapping[Atom, int]
_PARTS = 8  # of a measurement: each has a median of its own


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor of the run, as positions in the list of axes."""

    places: tuple[int, ...]


class _Bias(NamedTuple):
    """A bias that a cut adds: its axis (None: its length is fixed), and the other axes of its layer's weight."""

    output: int | None
    fixed: int
    inputs: tuple[int, ...]

    def length(self, sizes: Sequence[int]) -> int:
        return self.fixed if self.output is None else sizes[self.output]


class SizeModel:
    """Parameters and FLOPs of the traced model as functions of the number of units that each atom keeps."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.axes: list[Expr] = []  # every axis once, also where several tensors have it
        self.at: dict[Any, int] = {}
        self.biases: dict[str, _Bias] = {}  # the biases that earlier cuts added
        self.tried: list[frozenset[str]] = [frozenset()]
        owned = owned_tensors(trace.model).values()
        self.weights = [self.shape(trace.dims[name]) for name, tensor in owned if isinstance(tensor, nn.Parameter)]
        steps = [(formula, s) for s in trace.steps if (formula := flop_formula(s.func)) is not None]
        self.steps = [(f, self.refs(s.args), self.refs(s.kwargs), self.refs(Ref(s.outs[0]))) for f, s in steps]

    def shape(self, axes: list[Expr]) -> _Shape:
        places = []
        for e in axes:
            key = axis_signature(e)
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
        """Count the biases that a cut to `counts` added, from now on, wherever a cut takes inputs from their layers.

        They are counted with the known ones, or alone where that combination was tried before. False: both were tried.
        """
        for names in (frozenset(self.biases) | added.keys(), frozenset(added)):
            if names not in self.tried:
                self.tried.append(names)
                known = self.biases
                self.biases = {n: known[n] if n in known else self.bias(n, math.prod(added[n]), counts) for n in names}
                return True
        return False

    def bias(self, name: str, length: int, counts: Counts) -> _Bias:
        """A new bias. Its axis is the output axis of its layer's weight, if that has the length of the bias."""
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


class FlopCount(TorchDispatchMode):
    """Counts the FLOPs of the operators that run inside. (Torch's counter adds hooks to modules, which some models reject.)"""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and loading torch._dynamo takes seconds

    def __init__(self, outlined: Outlined | None = None, *, count: bool = True) -> None:
        super().__init__()
        self.total, self.outlined, self.count = 0, outlined, count

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {})) if self.outlined is None else self.outlined(func, args, kwargs or {})
        formula = flop_formula(func) if self.count else None
        if formula is not None:
            sizes = {key: _sizes(value) for key, value in (kwargs or {}).items()}
            self.total += formula(*map(_sizes, args), **sizes, out_shape=_sizes(out))
        return out


def _sizes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    return tuple(map(_sizes, value)) if isinstance(value, list | tuple) else value


def outline(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, training: bool = False, count: bool = False
) -> tuple[list[tuple[int, ...]], int]:
    """The shapes that the model returns, in eval mode or in `training` mode, and its FLOPs if `count`, else 0.

    The model is unchanged. Expensive operators are not computed, unless the run depends on their values.
    """

    @contextlib.contextmanager
    def counting(counter: FlopCount) -> Iterator[None]:
        if training:
            model.train()
        with counter:
            yield

    for outlined in (Outlined(), None):
        counter = FlopCount(outlined, count=count)
        with contextlib.suppress(ValueRead), plain_kernels():
            return output_shapes(run(model, args, kwargs, under=counting(counter))), counter.total
    raise AssertionError("a run that computes every operator raises no ValueRead")


def params_of(model: nn.Module) -> int:
    """The number of parameters; a tied parameter counts once."""
    return sum(p.numel() for p in model.parameters())


def flops_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The FLOPs of one run."""
    with plain_kernels(), FlopCount() as counter:
        run(model, args, kwargs)
    return counter.total


class LatencyRatio(NamedTuple):
    """The seconds that each of two models takes for a run, and the spread of their ratio: twice its standard error."""

    dense: float
    small: float
    spread: float

    @property
    def ratio(self) -> float:
        return self.small / self.dense


def measure_latency(
    model: nn.Module,
    small: nn.Module,
    inputs: tuple[tuple[Any, ...], Mapping[str, Any]],
    enough: Callable[[LatencyRatio], bool] = lambda timing: timing.spread <= 0.02 * timing.ratio,
    seconds: tuple[float, float] = (0.5, 5.0),
) -> LatencyRatio:
    """Time both models in turn, in eval mode without gradients.

    `seconds`: how long to measure at least and at most, unless eight rounds take longer. In between, the measurement ends
    when it is precise `enough`.
    """
    with eval_mode(model, small), torch.no_grad():
        return _in_turn(lambda: model(*inputs[0], **inputs[1]), lambda: small(*inputs[0], **inputs[1]), enough, seconds)


def _in_turn(
    dense: Callable[[], Any], small: Callable[[], Any], enough: Callable[[LatencyRatio], bool], seconds: tuple[float, float]
) -> LatencyRatio:
    """Time both in an even number of rounds, so that each comes first equally often."""
    due = seconds[0]

    def done(found: Sequence[Sequence[float]], spent: float) -> bool:
        nonlocal due
        if len(found[0]) % 2 or len(found[0]) < _PARTS or spent < due:
            return False
        due = min(1.5 * spent, seconds[1])
        return spent >= seconds[1] or enough(_judged(list(zip(*found))))

    first, second = interleaved((dense, small), done)
    return _judged(list(zip(first.seconds, second.seconds)))


def _judged(pairs: Sequence[tuple[float, ...]]) -> LatencyRatio:
    """Medians of the times and of their ratios. Noise comes in bursts, so the spread is that between parts of the rounds."""
    ratios, whole = [s / d for d, s in pairs], statistics.median(d for d, _ in pairs)
    ratio = statistics.median(ratios)
    ends = [i * len(ratios) // _PARTS for i in range(_PARTS + 1)]
    parts = [statistics.median(ratios[a:b]) for a, b in itertools.pairwise(ends)]
    deviation = 1.48 * statistics.median(abs(part - ratio) for part in parts)  # the standard deviation, for normal noise
    return LatencyRatio(whole, whole * ratio, 2 * 1.25 * deviation / _PARTS**0.5)  # a median varies a quarter more than a mean
