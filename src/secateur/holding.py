"""Existing zeros of a model: the masks that `Pruner.hold` keeps, and its settings."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from ._dist import counts, like
from .criteria import magnitude
from .masks import Masks
from .methods import as_method
from .patterns import Pattern
from .settings import Settings
from .targeting import Globs, Target, globs_of, targets


@dataclass(frozen=True)
class HeldZeros(Settings):
    """The settings of `Pruner.hold`, which keeps existing zeros. No new masks are ever due."""

    kind = "HeldZeros"

    @staticmethod
    def make() -> HeldZeros:
        return HeldZeros(magnitude, Pattern(), "tensor", 0.0, None, None, as_method(None))

    def due(self, step: int) -> bool:
        return False

    def describe(self, step: int = 0) -> str:
        return "zeros that were there before"


def zeros_there(
    model: nn.Module, include: Globs, exclude: Globs, types: Sequence[type[nn.Module]] | None
) -> tuple[list[Target], Masks, dict[str, str]]:
    """The tensors with zeros, the masks of these zeros, and why other tensors are skipped. Raises if there are no zeros."""
    found, skipped = targets(model, include=include, exclude=exclude, types=[nn.Module] if types is None else types)
    named = globs_of("include", include)
    masks = {target.name: like(target.weight != 0, target.tensor) for target in found}
    for (name, mask), kept in zip(list(masks.items()), counts(masks), strict=True):
        if kept == mask.numel():
            skipped[name] = "no zeros"
        elif not kept and name not in named:
            skipped[name] = "all zero, perhaps not trained yet; name it in include= to hold it"
        else:
            continue
        del masks[name]
    if not masks:
        raise ValueError("no tensor of the model has zeros to hold; prune it first, or load its pruned weights")
    return [target for target in found if target.name in masks], Masks(masks), skipped
