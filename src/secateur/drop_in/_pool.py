"""Tensors of many modules that a global call ranks together, without copying them into one vector."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn

from ..patterns import Pattern
from ..scores import Scores
from ..select import select
from ._masks import as_numbers
from ._module import hook_of, kind, parameter_to_prune


class Member:
    """One tensor of the pool: its scores, and which of its elements can still be pruned (`in_play`; None means all)."""

    def __init__(self, at: int, module: nn.Module, name: str, scores: Tensor | None) -> None:
        old = hook_of(module, name)
        original = parameter_to_prune(module, name, old)
        if scores is not None and scores.shape != original.shape:
            error = AssertionError if scores.numel() == original.numel() else IndexError  # as torch where torch raises
            raise error(
                f"the importance_scores of parameters[{at}], {name!r} of {kind(module)}, have shape {tuple(scores.shape)} "
                f"and the tensor {tuple(original.shape)}; give one score for each element"
            )
        self.module, self.name = module, name
        self.title = f"parameters[{at}] ({kind(module)}.{name})"
        self.scores = (original if scores is None else scores).detach()
        self.mask: Tensor | None = getattr(module, name + "_mask").detach() if old else None
        self.in_play = self.mask == 1 if self.mask is not None else None
        self.left = self.scores.numel() if self.in_play is None else int(self.in_play.sum())
        self.dtype = original.dtype

    def allowed(self) -> Tensor:
        """Returns True for every element that may be kept."""
        return torch.ones_like(self.scores, dtype=torch.bool) if self.in_play is None else self.in_play

    def mask_with(self, part: Tensor) -> Tensor:
        """Returns the new mask from a decision on all elements, or on those in play in their order.

        As in torch the new mask is a product with the old one, so an entry that is neither 0 nor 1 is squared.
        """
        if self.in_play is None or self.mask is None:
            part = part.reshape(self.scores.shape)
            return as_numbers(part, self.dtype) if part.dtype == torch.bool else part.to(dtype=self.dtype, copy=True)
        mask = self.mask.to(dtype=self.dtype, copy=True)
        mask[self.in_play] = (part[self.in_play] if part.shape == mask.shape else part).to(mask)
        return mask.mul_(self.mask)


def keep_largest_of(pool: Sequence[Member], drop: int) -> list[Tensor]:
    """Returns bool masks without the `drop` smallest magnitudes that are in play."""
    held = any(one.in_play is not None for one in pool)
    kept = select(
        {one.title: Scores.magnitude(_matrix(one.scores)) for one in pool},
        Pattern(),
        scope="global",
        count=drop + sum(one.scores.numel() - one.left for one in pool),
        previous={one.title: _matrix(one.allowed()) for one in pool} if held else None,
    )
    return [kept.pop(one.title).view(one.scores.shape) for one in pool]


def _matrix(tensor: Tensor) -> Tensor:
    rows = tensor.shape[0] if tensor.dim() else 1
    return tensor.reshape(rows, tensor.numel() // rows if rows else 0)


def ranks_in_place(pool: Sequence[Member]) -> bool:
    """Returns whether one threshold compares exactly in all dtypes: not for integers, nor for float64 beside other floats."""
    kinds = {one.scores.dtype for one in pool}
    return all(kind.is_floating_point or kind.is_complex for kind in kinds) and not (len(kinds) > 1 and torch.float64 in kinds)


def one_vector(pool: Sequence[Member], *, values: bool) -> Tensor:
    """Concatenates the scores in play. Without `values` only the length, dtype and device of the result are meaningful."""
    devices = {str(one.scores.device) for one in pool}
    if len(devices) > 1:
        raise TypeError(
            f"the tensors are on {' and '.join(sorted(devices))}, and this method needs them in one vector; "
            "move them to one device (L1Unstructured accepts several)"
        )
    if values:
        return torch.cat([one.scores.reshape(-1) if one.in_play is None else one.scores[one.in_play] for one in pool])
    dtype = reduce(torch.promote_types, [one.scores.dtype for one in pool])
    return torch.zeros((), dtype=dtype, device=pool[0].scores.device).expand(sum(one.left for one in pool))


def warn_of_strays(given: Mapping[Any, Tensor], pairs: Sequence[tuple[nn.Module, str]]) -> None:
    """Warns of scores for a tensor that is not pruned, since the name may be misspelt. Raises on a malformed key."""
    known = {(id(module), name) for module, name in pairs}
    for key in given:
        if not (isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], nn.Module)):
            raise TypeError(f"importance_scores has the key {key!r}; keys must be (module, name) pairs")
        if (id(key[0]), key[1]) not in known:
            warnings.warn(
                f"importance_scores for {key[1]!r} of {kind(key[0])} are not used: it is not among the parameters to prune",
                stacklevel=3,
            )
