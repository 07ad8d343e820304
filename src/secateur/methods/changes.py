"""Weights that are written into a model for a while, and taken out again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .._dist import local
from ..targeting import Target
from .seam import Solution


class Changes:
    """Weights written into the model for a while. Each is exchanged with the dense values, and exchanged back at the end."""

    def __init__(self) -> None:
        self._pairs: list[tuple[Target, Tensor, Tensor]] = []
        self._differ: list[bool] = []

    def write(self, target: Target, solution: Solution) -> None:
        weight = local(target.tensor.data)  # its version does not count, so a graph that saved the weight stays valid
        new = solution.weight if solution.weight is not None else weight.masked_fill(~solution.mask, 0)
        self._pairs.append((target, weight, new))
        self._differ.append(not torch.equal(weight, new))
        self._exchange(weight, new)

    @staticmethod
    def _exchange(one: Tensor, other: Tensor) -> None:
        before = one.clone()
        write_(one, other)
        other.copy_(before)

    def __len__(self) -> int:
        return len(self._pairs)

    def forget(self, since: int) -> None:
        """Drops the last changes: the tensors they were made to were copies."""
        del self._pairs[since:], self._differ[since:]

    def differ(self, since: int) -> bool:
        """Whether any of the changes after the first `since` changed a value."""
        return any(self._differ[since:])

    @contextlib.contextmanager
    def out(self, since: int = 0) -> Iterator[None]:
        """Puts the dense weights in place, inside the context. Nothing is copied: the layers get other tensors.

        `since`: the number of changes that there were when the block began that is run inside.
        """
        places = [(owner, own, dense) for target, _, dense in self._pairs[since:] for owner, own in target.slot.owners]
        before = [owner._parameters[attribute] for owner, attribute, _ in places]
        for (owner, attribute, dense), own in zip(places, before, strict=True):
            assert own is not None
            owner._parameters[attribute] = nn.Parameter(dense, own.requires_grad)  # torch multiplies in another way without
        try:
            yield
        finally:
            for (owner, attribute, _), weight in zip(places, before, strict=True):
                owner._parameters[attribute] = weight

    def __enter__(self) -> Changes:
        return self

    def __exit__(self, *exception: object) -> None:
        for _, weight, new in self._pairs:
            self._exchange(weight, new)
        self._pairs, self._differ = [], []


def write_(tensor: Tensor, values: Tensor) -> None:
    """Writes values into a tensor, also into one that was made in inference mode."""
    with torch.inference_mode() if tensor.is_inference() else contextlib.nullcontext():
        tensor.copy_(values)
