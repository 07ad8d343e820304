"""Straight-through estimation: masks that act in the forward pass only, so that pruned weights keep receiving gradients."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..masks import Masks
from ..targeting import Target


class SoftMasks:
    """Puts a mask, as a parametrization, on every layer that uses a target, until `remove` is called."""

    def __init__(self, found: Sequence[Target], masks: Masks):
        self._uses = [(t.name, owner, attribute) for t in found for owner, attribute in t.slot.owners]
        self._order = {owner: list(owner._parameters) for _, owner, _ in self._uses}
        for name, owner, attribute in self._uses:
            parametrize.register_parametrization(owner, attribute, _StraightThrough(masks[name].clone()))

    def set(self, masks: Masks) -> None:
        for name, owner, attribute in self._uses:
            owner.parametrizations[attribute][0].mask.copy_(masks[name])  # type: ignore[index, union-attr]

    def remove(self) -> None:
        for _, owner, attribute in self._uses:
            parametrize.remove_parametrizations(owner, attribute, leave_parametrized=False)
        for owner, order in self._order.items():  # torch appends them; optimizer states and checkpoints rely on the order
            for name in order:
                owner._parameters[name] = owner._parameters.pop(name)


class _StraightThrough(nn.Module):
    """A parametrization: the masked weight in the forward pass, the dense weight's gradient in the backward pass."""

    mask: Tensor

    def __init__(self, mask: Tensor):
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, weight: Tensor) -> Tensor:
        return (weight * self.mask).detach() + (weight - weight.detach())
