"""Copies of a model, including what `copy.deepcopy` drops or refuses: hooks of parameters, and tensors that have a graph."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import nn

from .tensors import owned_tensors

_EMPTY = frozenset({OrderedDict, dict, set})  # a module holds a dozen of these for hooks, and deepcopy is slow on each
_PLAIN = frozenset({bool, int, float, str, type(None)})


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """Returns a deep copy with the hooks of parameters. Tensors that have an autograd graph are copied without it."""
    memo = {} if memo is None else memo
    tensors = [tensor for _, tensor in owned_tensors(model).values()]
    for tensor in tensors:
        if not tensor.is_leaf:
            memo.setdefault(id(tensor), tensor.detach().clone())
    for held in (value for module in model.modules() for value in vars(module).values()):
        if type(held) in _EMPTY and not held:
            memo[id(held)] = type(held)()
        elif type(held) is tuple and _PLAIN.issuperset(map(type, held)):
            memo[id(held)] = held
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and cuts are made on a copy. "
            "The model is as it was."
        ) from error
    for tensor in tensors:
        if tensor.requires_grad and tensor.is_leaf and id(tensor) in memo:
            _same_hooks(tensor, memo[id(tensor)])
    return made


def _same_hooks(tensor: Any, twin: Any) -> None:
    for hook in (tensor._backward_hooks or {}).values():
        twin.register_hook(hook)
    for hook in (tensor._post_accumulate_grad_hooks or {}).values():
        twin.register_post_accumulate_grad_hook(hook)
