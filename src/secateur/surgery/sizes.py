"""What a cut leaves: parameters and FLOPs predicted from the traced axes without running anything, latency measured."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..graph import Atom, Expr, Trace, new_size
from ..graph.equations import signature
from ..graph.outline import Outlined, ValueRead
from ..graph.provenance import Dim
from ..graph.slots import owned_tensors
from ..graph.trace import answers, plain_kernels
from ..graph.tracer import Ref
from .masked import run

Counts = Mapping[Atom, int]


def _formulas() -> dict[Any, Callable[..., int]]:
    """Torch's own FLOP formulas, and the one it has for attention under the name that attention has on a CPU."""
    from torch.utils.flop_counter import flop_registry

    aten: Any = torch.ops.aten
    on_cpu = aten._scaled_dot_product_flash_attention_for_cpu
    return {**flop_registry, on_cpu: flop_registry[aten._scaled_dot_product_flash_attention]}


@dataclass(frozen=True)
class _Shape:
    """The shape of a tensor in the run, as places in the list of axes."""

    places: tuple[int, ...]


class Model:
    """Parameters and FLOPs of the traced model as functions of how many units its atoms keep."""

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        self.axes: list[Expr] = []  # every axis once, however many tensors have it
        self.at: dict[Any, int] = {}
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
        return sum(math.prod(sizes[i] for i in shape.places) for shape in self.weights)

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
        with contextlib.suppress(ValueRead), plain_kernels(), Counting(outlined) as counter:
            return answers(run(model, args, kwargs)), counter.total
    raise AssertionError("a run without outlines reads values as it likes")


def latency(dense: Callable[[], Any], small: Callable[[], Any], seconds: float = 0.5) -> tuple[float, float]:
    """The time of each in seconds: warmed up, then run in turn, so that both see the same machine; the median of the ratios."""
    wait = torch.accelerator.synchronize if torch.accelerator.is_available() else lambda: None

    def once(call: Callable[[], Any]) -> float:
        wait()
        start = time.perf_counter()
        call()
        wait()
        return time.perf_counter() - start

    for call in (dense, small, dense, small):
        call()
    begin, pairs = time.perf_counter(), []
    while time.perf_counter() - begin < seconds or len(pairs) < 7:
        pairs.append((once(dense), once(small)))
    whole = statistics.median(d for d, _ in pairs)
    return whole, whole * statistics.median(s / d for d, s in pairs)
