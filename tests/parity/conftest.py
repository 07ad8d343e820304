"""Twins: the same module twice, one for torch's own prune and one for ours."""

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
    """Values whose magnitudes all differ, in any float dtype: the two libraries differ only among equals."""
    g = torch.Generator().manual_seed(seed)
    n = torch.Size(shape).numel()
    values = (torch.randperm(n, generator=g) + 1) / 64
    signs = torch.randint(0, 2, (n,), generator=g) * 2 - 1
    return (values * signs).reshape(shape).to(dtype)


def fill(module: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    """The module with distinct magnitudes in every parameter."""
    module = module.to(dtype)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = distinct(parameter.shape, dtype, seed)
    return module


@pytest.fixture
def twins() -> Callable[..., tuple[Any, Any]]:
    """Two equal modules: (for ours, for torch's)."""

    def make(module: nn.Module, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
        module = fill(module, dtype)
        return module, copy.deepcopy(module)

    return make


def both(action: Callable[[ModuleType, nn.Module], object], mine: nn.Module, other: nn.Module) -> None:
    """The same call on both, with the same seed."""
    for library, module in ((ours, mine), (theirs, other)):
        torch.manual_seed(MASK_SEED)
        action(library, module)


def hook_names(module: nn.Module) -> list[Any]:
    """The pruning hooks of a module by class name, containers opened."""
    return [
        [type(m).__name__ for m in hook] if type(hook).__name__ == "PruningContainer" else type(hook).__name__
        for hook in module._forward_pre_hooks.values()
    ]


def assert_same_state(mine: nn.Module, other: nn.Module) -> None:
    """Names, hooks, tensors, dtypes: everything the contract says about a pruned module, except the order of parameters."""
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
    """All there is to a module, by identity where identity matters."""
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
