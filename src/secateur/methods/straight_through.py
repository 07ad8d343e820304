"""Straight-through estimation: masks that act in the forward pass only, so that pruned weights keep receiving gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .._tree import refuse_save_pretrained
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

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        refuse_save_pretrained("is being pruned with ste=True", "Call pruner.finish() first, or use sc.save(model, path).")
        super()._save_to_state_dict(*args, **kwargs)


def without_soft_masks(model: nn.Module) -> nn.Module:
    """Returns the model as it would be after `Pruner.finish`: masked weights under their own names, no parametrization.

    The model itself is not changed. The result shares all other tensors with it; a model without soft masks is returned as is.
    """
    if not any(isinstance(module, _StraightThrough) for module in model.modules()):
        return model
    modules: dict[int, nn.Module] = {}
    weights: dict[int, nn.Parameter] = {}  # of tied weights, one

    def plain(module: Any) -> Any:
        if module is None or isinstance(module, torch.jit.ScriptModule):
            return module
        if id(module) not in modules:
            made = modules[id(module)] = _shallow_copy(module)
            vars(made)["_modules"] = {name: plain(child) for name, child in module._modules.items()}
            for attribute in _soft(module):
                chain = module.parametrizations[attribute]
                if id(chain.original) not in weights:
                    weights[id(chain.original)] = nn.Parameter(chain().detach(), requires_grad=chain.original.requires_grad)
                vars(made)["_parameters"][attribute] = weights[id(chain.original)]
                del made.parametrizations._modules[attribute]
            if _soft(module) and not made.parametrizations._modules:
                del made._modules["parametrizations"]
        return modules[id(module)]

    return plain(model)


def _soft(module: Any) -> list[str]:
    """The attributes whose only parametrization is a soft mask."""
    chains = module._modules.get("parametrizations") or {}
    return [name for name, chain in chains.items() if [type(part) for part in chain.children()] == [_StraightThrough]]


def _shallow_copy(module: Any) -> Any:
    """A module of the same class with the same tensors; where only soft masks were added, of the class without them."""
    soft = _soft(module)
    kind: Any = type(module).__bases__[0] if soft and len(soft) == len(module.parametrizations) else type(module)
    made = kind.__new__(kind)
    vars(made).update(vars(module), _parameters=dict(module._parameters), _buffers=dict(module._buffers))
    return made
