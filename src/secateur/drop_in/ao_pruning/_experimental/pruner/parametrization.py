"""Masks over the rows of a layer: the parametrization of its weight, and the hook that masks its bias."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...sparsifier.utils import module_contains_param, parts, register, squash, tensors_parametrized

__all__ = ["FakeStructuredSparsity", "BiasHook", "module_contains_param"]

# Layers with one row of the weight and one entry of the bias for every output unit.
ROWS: tuple[type[nn.Module], ...] = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class FakeStructuredSparsity(nn.Module):
    """A parametrization that sets the rows of the tensor to zero where the mask is False.

    The mask is a non-persistent buffer, because the pruner saves it: a prepared model can load its own `state_dict`.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not isinstance(self.mask, Tensor):
            raise AssertionError(f"the mask must be a tensor, not {self.mask!r}")
        if self.mask.shape[0] != x.shape[0]:
            raise AssertionError(f"the mask has {self.mask.shape[0]} entries and its tensor {x.shape[0]} rows")
        return self.mask.to(x.dtype).reshape(-1, *[1] * (x.dim() - 1)) * x


class BiasHook:
    """Adds the bias of a prepared layer to its output, without the entries of pruned rows if `prune_bias` is set.

    The parameter `_bias` keeps all its values and receives a gradient.
    """

    def __init__(self, parametrization: FakeStructuredSparsity, prune_bias: bool) -> None:
        self.param = parametrization
        self.prune_bias = prune_bias

    def __call__(self, module: nn.Module, input: Any, output: Tensor) -> Tensor:
        bias = getattr(module, "_bias", None)
        if bias is None:
            return output
        if self.prune_bias:
            bias = torch.where(self.param.mask.bool(), bias, torch.zeros_like(bias))
        spatial = 0 if isinstance(module, nn.Linear) else len(getattr(module, "kernel_size", ()))
        return output + bias.reshape(-1, *[1] * spatial).to(output.dtype)  # from the end: there may be no batch


def masked_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Returns the masks of a module's tensors by name."""
    return {
        name: one.mask
        for name in tensors_parametrized(module)
        for one in parts(module, name)
        if isinstance(one, FakeStructuredSparsity)
    }


def masked_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Returns the modules that have masks, by name."""
    return {path: module for path, module in model.named_modules() if masked_tensors(module)}


def hide_bias(module: nn.Module, holder: FakeStructuredSparsity, prune_bias: bool) -> None:
    """Renames the bias of a layer to `_bias`, the same parameter, and registers a hook that adds it to the output."""
    bias = module._parameters.get("bias")
    if bias is not None:
        module._parameters["bias"] = None
        module.register_parameter("_bias", bias)
        vars(module)["prune_bias"] = prune_bias
    module.register_forward_hook(BiasHook(holder, prune_bias))


def bias_hooks(module: nn.Module) -> dict[int, BiasHook]:
    return {key: hook for key, hook in module._forward_hooks.items() if isinstance(hook, BiasHook)}


def restore_bias(module: nn.Module, write: bool = True) -> None:
    """Undoes `hide_bias`. With `write`, sets the pruned entries of the bias to zero."""
    hooks = bias_hooks(module)
    bias = module._parameters.pop("_bias", None)
    for key, hook in hooks.items():
        if write and bias is not None and hook.prune_bias:
            bias.data = torch.where(hook.param.mask.bool(), bias.data, torch.zeros_like(bias.data))
        del module._forward_hooks[key]
    if bias is not None:
        module._parameters["bias"] = bias
    vars(module).pop("prune_bias", None)
    if {"weight", "bias"} <= module._parameters.keys():  # optimizers and checkpoints depend on the order of parameters
        module._parameters["bias"] = module._parameters.pop("bias")


def remove_masks(module: nn.Module, write: bool, shared: Iterable[int] = ()) -> None:
    """Removes all masks of a module. With `write`, keeps the zeros in its tensors. `shared` are the ids of tied parameters."""
    for name in masked_tensors(module):
        there = parts(module, name)
        if write and id(there.original) in shared:  # a copy, so that only this layer gets the zeros
            there._parameters["original"] = nn.Parameter(there.original.detach().clone(), there.original.requires_grad)
        if write:
            squash(module, name)
        else:
            parametrize.remove_parametrizations(module, name, leave_parametrized=False)
    restore_bias(module, write)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


class SavedMasks:
    """The masks and bias hooks of a module, to be restored after the module was changed without them."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.lists = {name: list(parts(module, name)) for name in masked_tensors(module)}
        self.hooks = list(bias_hooks(module).values())

    def restore(self) -> None:
        for name, several in self.lists.items():
            for one in several:
                register(self.module, name, one)
        for hook in self.hooks:
            hide_bias(self.module, hook.param, hook.prune_bias)
