"""Runs a traced model again beside its record, and lets a visitor look at each operator or answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..edit import StandIns, plain_kernels, preserve_rng, split_inputs
from .run import Trace
from .tracer import Ref, Step

Visit = Callable[[int, Step, Any, tuple[Any, ...], dict[str, Any]], Any]


class LeftTrace(RuntimeError):
    """The model ran other operators than in its trace."""


class _Beside(TorchDispatchMode):
    """Counts the operators along the trace and hands each to the visitor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and torch would load all of torch._dynamo: seconds

    def __init__(self, trace: Trace, visit: Visit) -> None:
        super().__init__()
        self.steps, self.visit, self.at = trace.steps, visit, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "namespace", "") == "prim":
            return func(*args, **kwargs)
        if self.at >= len(self.steps) or self.steps[self.at].func is not func:
            raise LeftTrace(f"operator {self.at} of the run is {func}, not the one that was traced")
        self.at += 1
        return self.visit(self.at - 1, self.steps[self.at - 1], func, args, kwargs)


class Replay:
    """A model with its trace; `run` walks through it. The model is only read."""

    def __init__(self, model: nn.Module, trace: Trace, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        self.model, self.trace = model, trace
        self.args, self.kwargs = split_inputs(args, kwargs)
        self.origin = self._origins()

    def run(self, visit: Visit, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        """One run, on the example inputs as `change` makes them."""

        def stand_in(_: str, tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()  # buffers may be written to

        given = tree_map(lambda v: change(v.detach()) if isinstance(v, Tensor) else v, (self.args, self.kwargs))
        quiet = (torch.no_grad(), preserve_rng(), plain_kernels(), StandIns(self.model, stand_in))
        with quiet[0], quiet[1], quiet[2], quiet[3], _Beside(self.trace, visit):
            return self.model(*given[0], **given[1])

    def _origins(self) -> dict[int, frozenset[str]]:
        """Tensor number -> the model's tensors it is made of; numbers that depend on the inputs are not in it."""
        found = {number: frozenset({name}) for number, name in self.trace.names.items()}
        for step in self.trace.steps:
            if step.weights:
                made_of = frozenset().union(*(found.get(n, frozenset()) for n in numbers(step)))
                found |= {n: made_of for n in step.outs if n not in self.trace.names}
        return found


def numbers(step: Step) -> list[int]:
    """The numbers of the tensors that an operator reads."""
    return [r.number for r in refs((*step.args, *step.kwargs.values()))]


def refs(values: Any) -> list[Ref]:
    if isinstance(values, Ref):
        return [values]
    return [r for v in values for r in refs(v)] if isinstance(values, list | tuple) else []


def paired(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor, int], Tensor]) -> Any:
    """The arguments with each tensor replaced by `change(tensor, number)`."""

    def walk(recorded: Any, value: Any) -> Any:
        if isinstance(recorded, Ref):
            return change(value, recorded.number)
        if isinstance(recorded, tuple) and isinstance(value, list | tuple):
            return type(value)(walk(r, v) for r, v in zip(recorded, value))
        return value

    return [walk(r, v) for r, v in zip(step.args, args)], {k: walk(step.kwargs[k], v) for k, v in kwargs.items()}
