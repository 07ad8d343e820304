"""Copies of a model, with what torch forgets or refuses to copy: hooks of parameters, and tensors that earlier runs left.

Such tensors (recurrent states) are no part of the model, and a run writes them anew without a look at them. But another way
through the model may look at them, so they follow the sizes of what a run puts there.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

from torch import Tensor, nn

from ..graph import Trace, keep_mask
from ..graph.slots import owned_tensors, states
from .cut import Keep

_EMPTY = frozenset({OrderedDict, dict, set})  # a module holds a dozen of them, for hooks; deepcopy takes its time over each


def copied(model: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module:
    """A deep copy, with the hooks of parameters; results of earlier runs without the graph behind them."""
    memo = {} if memo is None else memo
    tensors = [tensor for _, tensor in owned_tensors(model).values()]
    for tensor in tensors:
        if not tensor.is_leaf:
            memo.setdefault(id(tensor), tensor.detach().clone())
    for held in (value for module in model.modules() for value in vars(module).values()):
        if type(held) in _EMPTY and not held:
            memo[id(held)] = type(held)()
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and a cut is made on a copy. "
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


def follow_leftovers_(small: nn.Module, trace: Trace, keep: Keep) -> None:
    """Cut, in a cut model, what earlier runs left as what a run leaves now; gone where a run leaves nothing."""
    held = states(small)
    for (path, name), axes in trace.record.left.items():
        if (path, name) in held:
            left = held[path, name].detach()
            for d, e in enumerate(axes or ()):
                left = left.index_select(d, keep_mask(e, keep).nonzero()[:, 0].to(left.device))
            _set(small, path, name, None if axes is None else left)


def drop_leftovers_(model: nn.Module, small: nn.Module) -> None:
    """The same for the model itself, once it has the sizes of its small copy."""
    for path, name in states(model).keys() - states(small).keys():
        _set(model, path, name, None)


def _set(model: nn.Module, path: str, name: str, value: Tensor | None) -> None:
    vars(model.get_submodule(path))[name] = value
