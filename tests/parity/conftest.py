"""Helpers that run torch's `prune` and ours on two equal modules and compare the results."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.utils.prune as theirs
from torch import Tensor, nn

from secateur.drop_in import prune as ours

MASK_SEED = 7


def distinct(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Returns values of distinct magnitudes in any float dtype, because the libraries break ties differently."""
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    values = (torch.randperm(n, generator=g) + 1) / 64
    signs = torch.randint(0, 2, (n,), generator=g) * 2 - 1
    return (values * signs).reshape(shape).to(dtype)


def fill(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Fills every parameter of the module with values of distinct magnitudes."""
    module = module.to(dtype)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = distinct(parameter.shape, dtype, seed)
    return module


@pytest.fixture
def twins() -> Callable[..., tuple[Any, Any]]:
    """Returns a function that makes two equal modules: one for ours, one for torch's."""

    def make(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        module = fill(module, dtype)
        return module, copy.deepcopy(module)

    return make


def both(action: Callable[[ModuleType, nn.Module], object], mine: nn.Module, other: nn.Module) -> None:
    """Calls `action` with each library and its module, with the same seed."""
    for library, module in ((ours, mine), (theirs, other)):
        torch.manual_seed(MASK_SEED)
        action(library, module)


def hook_names(module: nn.Module) -> list[Any]:
    """Returns the class names of a module's pruning hooks, with a list for each container."""
    return [
        [type(m).__name__ for m in hook] if type(hook).__name__ == "PruningContainer" else type(hook).__name__
        for hook in module._forward_pre_hooks.values()
    ]


def assert_same_state(mine: nn.Module, other: nn.Module) -> None:
    """Compares names, hooks, tensors and dtypes of two pruned modules, but not the order of their parameters."""
    assert dict(mine.named_parameters()).keys() == dict(other.named_parameters()).keys()
    assert dict(mine.named_buffers()).keys() == dict(other.named_buffers()).keys()
    for (name, a), b in zip(sorted(mine.state_dict().items()), (v for _, v in sorted(other.state_dict().items())), strict=True):
        assert a.dtype == b.dtype, name
        assert torch.equal(a, b), name
    for a, b in zip(mine.modules(), other.modules(), strict=True):
        assert hook_names(a) == hook_names(b)
        for hook in a._forward_pre_hooks.values():
            name = hook._tensor_name
            assert torch.equal(getattr(a, name), getattr(b, name)), name
            assert name in vars(a)


def snapshot(module: nn.Module) -> dict[str, Any]:
    """Returns the complete state of a module, with the ids of objects whose identity matters."""
    state: dict[str, Any] = {}
    for path, child in module.named_modules():
        for key, value in vars(child).items():
            state[f"{path}/{key}"] = id(value)
            if isinstance(value, dict):
                state[f"{path}/{key}/items"] = [(name, id(item)) for name, item in value.items()]
        for kind in (child._parameters, child._buffers):
            for name, tensor in kind.items():
                state[f"{path}/{name}/values"] = None if tensor is None else tensor.detach().tolist()
        for hook in child._forward_pre_hooks.values():
            if isinstance(hook, ours.PruningContainer):
                state[f"{path}/hook"] = list(map(id, hook))
    return state
