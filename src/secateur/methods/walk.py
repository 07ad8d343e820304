"""Solves the layers of a model block by block: a block is solved with the inputs that the solved blocks before it produce.

The model is changed on the way and comes out as it was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import local
from .._tree import Loose
from ..blocks import repeated_blocks
from ..moments import Moments
from ..progress import Progress, track
from ..stats import as_it_was
from ..stream import Replay, record, stream
from ..targeting import Target
from .seam import Solution

STREAMED = frozenset({"gram", "cross"})  # evidence that is taken block by block
Solve = Callable[[Target, Mapping[str, Tensor]], Solution]


def solve_all(
    model: nn.Module, found: Sequence[Target], needs: frozenset[str], data: Iterable[Any] | None, solve: Solve
) -> dict[str, Solution]:
    """A solution for each target. Without streamed evidence all targets see the model as it is."""
    if not needs & STREAMED:
        items = track(found, "solve", lambda target: target.name)
        return {target.name: checked(target, solve(target, {})) for target in items}
    assert data is not None
    if isinstance(model, Loose):
        raise TypeError("this method runs a model on data=, and these are tensors without one")
    if not (batches := list(data)):
        raise ValueError("data= gave no batch; an iterator that was used up before gives none (pass a list or a loader)")
    solutions: dict[str, Solution] = {}
    with torch.inference_mode(False), torch.no_grad(), as_it_was(model), _Changes() as changes:
        for part, table in _evidence(model, found, needs & STREAMED, batches, changes):
            for target in part:
                solutions[target.name] = checked(target, solve(target, table.pop(target.name)))
                changes.write(target, solutions[target.name])
    return {target.name: solutions[target.name] for target in found}


def _evidence(
    model: nn.Module, found: Sequence[Target], needs: frozenset[str], batches: Sequence[Any], changes: _Changes
) -> Iterator[tuple[list[Target], dict[str, dict[str, Tensor]]]]:
    """The targets of each block, and their evidence with the blocks before as they are by then."""
    by_name = {target.name: target for target in found}
    blocks = repeated_blocks(model, by_name, lists=(nn.ModuleList, nn.Sequential))
    inner = [block.module for block in blocks if block.module is not model]
    pruned, dense = stream(model, inner, batches), stream(model, inner, batches)
    progress = Progress("block by block", len(blocks))
    for block in blocks:
        own = [by_name[name] for name in block.names]
        progress(own[0].name)
        dense_run: Iterator[Any] = iter(())
        if block.module is model:
            replay = record(model, model, batches)
            dense_run = changes.undone(replay)
        else:
            replay = next(pruned)
            if "cross" in needs:
                with changes.out():
                    dense_run = next(dense).run()  # this block is still as it was
        yield own, _collect(own, needs, replay, dense_run)


def _collect(
    own: Sequence[Target], needs: frozenset[str], replay: Replay, dense_run: Iterator[Any]
) -> dict[str, dict[str, Tensor]]:
    moments = Moments(own, needs)
    with moments.listen():
        run = replay.run()
        for _ in replay.calls:
            moments.next_batch()
            if "cross" in needs:
                moments.dense = True
                next(dense_run)
                moments.dense = False
            next(run)
    return moments.table()


class _Changes:
    """Weights written into the model for a while. Each is exchanged with the dense values, and exchanged back at the end."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Tensor, Tensor]] = []

    def write(self, target: Target, solution: Solution) -> None:
        weight = local(target.tensor.data)  # its version does not count, so a graph that saved the weight stays valid
        new = solution.weight if solution.weight is not None else weight.masked_fill(~solution.mask, 0)
        self._pairs.append((weight, new))
        self._exchange(weight, new)

    @staticmethod
    def _exchange(one: Tensor, other: Tensor) -> None:
        before = one.clone()
        write_(one, other)
        other.copy_(before)

    def _exchange_all(self) -> None:
        for weight, new in self._pairs:
            self._exchange(weight, new)

    @contextlib.contextmanager
    def out(self) -> Iterator[None]:
        """Puts the dense weights in place, inside the context."""
        self._exchange_all()
        try:
            yield
        finally:
            self._exchange_all()

    def undone(self, replay: Replay) -> Iterator[Any]:
        """Runs a replay call by call, each time with the dense weights in place."""
        run = replay.run()
        for _ in replay.calls:
            with self.out():
                output = next(run)
            yield output

    def __enter__(self) -> _Changes:
        return self

    def __exit__(self, *_: object) -> None:
        self._exchange_all()
        self._pairs = []


def write_(tensor: Tensor, values: Tensor) -> None:
    """Writes values into a tensor, also into one that was made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        tensor.copy_(values)


def checked(target: Target, solution: Solution) -> Solution:
    """The solution in the shape and dtype of the target, zero where it is pruned. Raises where it is not a solution."""
    if not isinstance(solution, Solution):
        given = type(solution).__name__
        raise TypeError(f"solve returned a {given} for {target.name!r}; it must return Solution(mask, weight or None)")
    shape = (target.layout.rows, target.layout.cols)
    mask, weight = solution.mask, solution.weight
    if mask.dtype != torch.bool or mask.shape != shape:
        raise ValueError(f"the mask for {target.name!r} must be bool of shape {shape}, not {mask.dtype} of {tuple(mask.shape)}")
    if weight is None:
        return replace(solution, mask=target.layout.restore(mask))
    if weight.shape != shape or not weight.is_floating_point():
        given = f"{weight.dtype} of {tuple(weight.shape)}"
        raise ValueError(f"the weight for {target.name!r} must be float of shape {shape}, not {given}")
    new = target.layout.restore(weight.masked_fill(~mask, 0)).to(target.weight, copy=True)
    if not bool(new.isfinite().all()):
        raise ValueError(f"the new weight of {target.name!r} is NaN or infinite; look at its weights and at the data")
    return replace(solution, mask=target.layout.restore(mask), weight=new)
