"""Runs a traced model again beside its record, and lets a visitor look at each operator or answer in its place."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from ..graph import Atom, Expr, Trace, atoms, keep_mask
from ..graph.axes import Fam
from ..graph.slots import Standing
from ..graph.trace import plain_kernels
from ..graph.tracer import Ref, Step

Keep = Mapping[Atom, Tensor]
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
    """A model with its trace and the units to keep; `run` walks through it. The model is only read."""

    def __init__(self, model: nn.Module, trace: Trace, keep: Keep, args: Any, kwargs: Mapping[str, Any] | None) -> None:
        self.model, self.trace = model, trace
        self.keep = {a: m for a, m in keep.items() if not bool(m.all())}
        self.args = () if isinstance(args, Mapping) else tuple(args) if isinstance(args, tuple | list) else (args,)
        self.kwargs = {**(args if isinstance(args, Mapping) else {}), **(kwargs or {})}
        self.origin = self._origins()
        self._cut: dict[int, list[Atom]] = {}
        self.slots: dict[int, Any] = {}  # what was found out about steps, for whoever asks again

    def run(self, visit: Visit, change: Callable[[Tensor], Tensor] = torch.clone) -> Any:
        """One run, on the example inputs as `change` makes them."""

        def stand_in(_: str, tensor: Tensor) -> Tensor:
            return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()  # buffers may be written to

        given = tree_map(lambda v: change(v.detach()) if isinstance(v, Tensor) else v, (self.args, self.kwargs))
        quiet = (torch.no_grad(), torch.random.fork_rng(devices=[]), plain_kernels(), Standing(self.model, stand_in))
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

    @cached_property
    def readers(self) -> dict[int, list[int]]:
        """Tensor number -> the steps that read it."""
        found: dict[int, list[int]] = {}
        for i, step in enumerate(self.trace.steps):
            for n in numbers(step):
                found.setdefault(n, []).append(i)
        return found

    @cached_property
    def makers(self) -> dict[int, int]:
        """Tensor number -> the step that made it."""
        return {n: i for i, step in enumerate(self.trace.steps) for n in step.outs}

    @cached_property
    def parameters(self) -> dict[str, nn.Parameter]:
        return dict(self.model.named_parameters())

    def cut_atoms(self, number: int) -> list[Atom]:
        """The atoms of a tensor that lose units."""
        if number not in self._cut:
            self._cut[number] = list(dict.fromkeys(a for e in self.trace.axes[number] for a in atoms(e) if a in self.keep))
        return self._cut[number]

    def says(self, tensor: Tensor, number: int) -> bool:
        """Whether any removed unit of the tensor is not zero."""
        masks = ((d, _mask(e, self.keep)) for d, e in enumerate(self.trace.axes[number]))
        return any(bool(tensor.index_select(d, _gone(m, tensor)).any()) for d, m in masks if m is not None)

    def made_of_weights(self, number: int) -> Tensor:
        """The value of a tensor that depends on weights alone, without a run."""
        if number in self.trace.names:
            return self.model.get_parameter(self.trace.names[number]).detach()
        step = self.trace.steps[self.makers[number]]

        def value(v: Any) -> Any:
            if isinstance(v, Ref):
                return self.made_of_weights(v.number)
            return type(v)(value(x) for x in v) if isinstance(v, tuple) else v

        with torch.no_grad():
            out = step.func(*map(value, step.args), **{k: value(v) for k, v in step.kwargs.items()})
        return out[step.outs.index(number)] if isinstance(out, list | tuple) else out

    def zeroed(self, tensor: Tensor, number: int, only: Iterable[Atom]) -> Tensor:
        """The tensor with the removed units of these atoms at zero."""
        keep = {a: self.keep[a] for a in only}
        for d, e in enumerate(self.trace.axes[number]):
            mask = _mask(e, keep)
            if mask is not None:
                tensor = tensor.index_fill(d, _gone(mask, tensor), 0)
        return tensor

    def removed(self, tensor: Tensor, number: int, atom: Atom) -> Tensor | None:
        """The removed units of one atom, as (units, everything else); None where the tensor does not carry it in one dim."""
        for d, e in enumerate(self.trace.axes[number]):
            mask = _mask(e, {atom: self.keep[atom]})
            if mask is not None:
                return tensor.index_select(d, _gone(mask, tensor)).movedim(d, 0).flatten(1)
        return None


def _gone(mask: Tensor, like: Tensor) -> Tensor:
    return (~mask).nonzero()[:, 0].to(like.device)


def _mask(e: Expr, keep: Keep) -> Tensor | None:
    found = atoms(e)
    if not any(a in keep for a in found) or isinstance(e, Fam) or any(isinstance(p, Fam) for p in getattr(e, "parts", ())):
        return None
    mask = keep_mask(e, keep)
    return None if bool(mask.all()) else mask


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
