"""Keeps the masked attribute of a pruned module true: `module.weight` equals `weight_mask * weight_orig`.

The contract of nn.utils.prune makes that attribute a plain tensor, written by a forward-pre-hook. Between two calls of the
module it would go stale, so it is also written after an optimizer's step, `load_state_dict`, `.to()` and its kin, a copy and
an unpickling. A module whose parent reads the weight without calling the module (`MultiheadAttention.out_proj`) is served
by the same writes: each of them gives the attribute a graph of its own, and a new one when a backward pass used it up.

Not seen until the next call: an update by hand through `.data`, and what a torch.func transform left behind.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import unserializable_hook

_pruned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


class MaskHook:
    """The forward-pre-hook that writes mask × original to the attribute of the module it was put on."""

    _tensor_name: str

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        """Write the masked tensor to the module."""
        setattr(module, self._tensor_name, self.apply_mask(module))

    def apply_mask(self, module: nn.Module) -> Tensor:
        """The masked tensor, with a graph that leads to the original."""
        if self._tensor_name is None:
            raise AssertionError(f"{type(self).__name__} was not applied to {module} yet: it does not know its tensor")
        original = getattr(module, self._tensor_name + "_orig")
        return getattr(module, self._tensor_name + "_mask").to(dtype=original.dtype) * original


def hooks(module: nn.Module) -> Iterator[MaskHook]:
    """The pruning hooks of a module, one for each pruned tensor."""
    return (hook for hook in list(module._forward_pre_hooks.values()) if isinstance(hook, MaskHook))


def refresh(module: nn.Module, *_: Any) -> None:
    """Write every masked attribute of a module anew. (Also a load_state_dict post-hook, hence the arguments.)"""
    for hook in hooks(module):
        if hook._tensor_name + "_orig" in module._parameters:  # not so when the method's own `remove` was called
            write(module, hook)


def write(module: nn.Module, hook: MaskHook) -> None:
    """Write one masked attribute, outside of a call: with a graph whatever the grad mode, renewed once it is used up."""
    with torch.enable_grad():
        hook(module, ())
    product = vars(module).get(hook._tensor_name)
    if isinstance(product, Tensor) and product.requires_grad:
        alive = weakref.ref(module)

        @unserializable_hook
        def renew(grad: Tensor) -> None:
            if (owner := alive()) is not None:
                refresh(owner)

        product.register_hook(renew)


def keep_fresh(module: nn.Module) -> None:
    """Have the masked attributes of a module written whenever what they are made of changes.

    torch has no hook for `.to()`, for copying and for pickling, but all three look on the instance first. The class of the
    module stays what it is, because code asks `type(module) is nn.Linear`.
    """
    _watch_optimizers()
    _pruned.add(module)
    if refresh not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(refresh)
    owner = functools.partial(_alive, weakref.ref(module))  # weak: a cycle would keep the memory of a dead model

    def apply(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = owner()
        result = type(module)._apply(module, fn, *args, **kwargs)
        refresh(module)
        return result

    def reduce(protocol: Any) -> tuple[Any, ...]:
        make, arguments, state = _parts(owner(), protocol)
        return _make, (make, arguments), state

    vars(module).update(_apply=apply, __deepcopy__=lambda memo: _deepcopy(owner(), memo), __reduce_ex__=reduce)


_ON_INSTANCE = ("_apply", "__deepcopy__", "__reduce_ex__")


def let_go(module: nn.Module) -> None:
    """Undo `keep_fresh`, if nothing of the module is pruned any more."""
    if any(hooks(module)):
        return
    _pruned.discard(module)
    for key in [key for key, hook in module._load_state_dict_post_hooks.items() if hook is refresh]:
        del module._load_state_dict_post_hooks[key]
    for name in _ON_INSTANCE:
        vars(module).pop(name, None)


def _alive(reference: weakref.ref[nn.Module]) -> nn.Module:
    module = reference()
    if module is None:
        raise ReferenceError("the pruned module this shallow copy was made of is gone; use copy.deepcopy instead of copy.copy")
    return module


def _parts(module: nn.Module, protocol: Any) -> tuple[Any, Any, Any]:
    """What a copy of the module is made from, without what can be made again."""
    parts: Any = type(module).__reduce_ex__(module, protocol)
    make, arguments, state = parts[:3]
    again = {hook._tensor_name for hook in hooks(module)} | set(_ON_INSTANCE)
    return make, arguments, {key: value for key, value in state.items() if key not in again}


def _make(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """A module that is about to be given its state, by copy or pickle, and then keeps itself fresh."""
    module = make(*arguments)
    vars(module)["__setstate__"] = functools.partial(_restore, module)
    return module


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).pop("__setstate__", None)
    module.__setstate__(state)
    keep_fresh(module)
    refresh(module)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for hook in hooks(module):  # a tensor with a graph cannot be copied; wherever it is held, refresh puts the copy's own
        product = vars(module).get(hook._tensor_name)
        if isinstance(product, Tensor):
            memo[id(product)] = product.detach()
    if hasattr(type(module), "__deepcopy__"):
        new = type(module).__deepcopy__(module, memo)  # pyright: ignore[reportAttributeAccessIssue]
        keep_fresh(new)
        refresh(new)
    else:
        make, arguments, state = _parts(module, 4)
        new = memo[id(module)] = make(*copy.deepcopy(arguments, memo))
        _restore(new, copy.deepcopy(state, memo))
    return new


@functools.cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_after_step)


def _after_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    if torch.compiler.is_compiling() or not _pruned:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module in list(_pruned):
        if any(id(module._parameters.get(hook._tensor_name + "_orig")) in stepped for hook in hooks(module)):
            refresh(module)
