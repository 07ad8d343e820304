"""Runs a traced model again, operator by operator along its trace, with a visitor that computes or replaces each result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..edit import StandIns, plain_kernels, preserve_rng, split_inputs
from .result import Trace
from .tracer import Ref, Step

Visit = Callable[[int, Step, Any, tuple[Any, ...], dict[str, Any]], Any]  # index, step, operator, arguments -> result


class LeftTrace(RuntimeError):
    """The model ran other operators than in its trace."""


class _AlongTrace(TorchDispatchMode):
    """Checks that each operator is the next one of the trace, and passes it to the visitor."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; with True, torch would import torch._dynamo, which takes seconds

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
    """A model with its trace and example inputs. The model is only read.

    `origin` maps the number of each tensor that is computed from weights only to the names of these weights.
    """

    def __init__(self, model: nn.Module, trace: Trace, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        self.model, self.trace = model, trace
        self.args, self.kwargs = split_inputs(args, kwargs)
        self.origin = self._origins()

    def run(self, visit: Visit, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        """Runs the model once on the example inputs, each passed through `change`."""

        def stand_in(_: str, tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()  # the run may write to buffers

        args, kwargs = tree_map(lambda v: change(v.detach()) if isinstance(v, Tensor) else v, (self.args, self.kwargs))
        stand_ins, along = StandIns(self.model, stand_in), _AlongTrace(self.trace, visit)
        with torch.no_grad(), preserve_rng(), plain_kernels(), stand_ins, along:
            return self.model(*args, **kwargs)

    def _origins(self) -> dict[int, frozenset[str]]:
        found = {number: frozenset({name}) for number, name in self.trace.names.items()}
        for step in self.trace.steps:
            if step.weights:
                made_of = frozenset().union(*(found.get(n, frozenset()) for n in step.inputs))
                found |= {n: made_of for n in step.outs if n not in self.trace.names}
        return found


def paired(step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], change: Callable[[Tensor, int], Tensor]) -> Any:
    """Returns the arguments of a step with each tensor replaced by `change(tensor, number)`."""

    def walk(recorded: Any, value: Any) -> Any:
        if isinstance(recorded, Ref):
            return change(value, recorded.number)
        if isinstance(recorded, tuple) and isinstance(value, list | tuple):
            return type(value)(walk(r, v) for r, v in zip(recorded, value))
        return value

    return [walk(r, v) for r, v in zip(step.args, args)], {k: walk(step.kwargs[k], v) for k, v in kwargs.items()}
