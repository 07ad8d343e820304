"""Keeps the masked attribute of a pruned module up to date: `module.weight` equals `weight_mask * weight_orig`.

In torch that attribute is a plain tensor, written by a forward-pre-hook, so it is out of date between two calls of the module.
Here it is also written after an optimizer's step, `load_state_dict`, `.to()` and similar methods, copying and unpickling. The
same writes serve a module whose parent reads the weight without calling the module (`MultiheadAttention.out_proj`): each write
gives the attribute an autograd graph of its own, and a new one after a backward pass has used it.

Two changes are not seen until the next call: an update by hand through `.data`, and the result of a torch.func transform.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.hooks import unserializable_hook

from ..kernels import new_tensor

_LARGE = 1 << 21  # bytes of a tensor from which new memory takes longer than its values
_pruned: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def hooks(module: nn.Module) -> Iterator[BasePruningMethod]:
    """Yields the pruning hooks of a module, one for each pruned tensor, ours and torch's."""
    return (hook for hook in list(module._forward_pre_hooks.values()) if isinstance(hook, BasePruningMethod))


def _active(module: nn.Module) -> list[BasePruningMethod]:
    """Returns the hooks whose tensor is still pruned: the `remove` method of a hook leaves the hook in place."""
    return [hook for hook in hooks(module) if hook._tensor_name + "_orig" in module._parameters]


def refresh(module: nn.Module, *_: Any) -> None:
    """Writes every masked attribute of a module. (Also a load_state_dict post-hook, hence the extra arguments.)"""
    for hook in _active(module):
        write(module, hook)


def write(module: nn.Module, hook: BasePruningMethod) -> None:
    """Writes one masked attribute outside of a call: with a graph in any grad mode, renewed after a backward pass."""
    with torch.enable_grad():
        if not _write_large(module, hook):
            hook(module, ())
    product = vars(module).get(hook._tensor_name)
    if isinstance(product, Tensor) and product.requires_grad:
        alive = weakref.ref(module)

        @unserializable_hook
        def renew(grad: Tensor) -> None:
            if (owner := alive()) is not None:
                refresh(owner)

        product.register_hook(renew)


def _write_large(module: nn.Module, hook: BasePruningMethod) -> bool:
    """Writes the attribute as torch's hook does, with memory that is faster to write. False if that is not worth it."""
    name, kind = hook._tensor_name, type(hook)
    original, mask = module._parameters[name + "_orig"], module._buffers.get(name + "_mask")
    if kind.__call__ is not BasePruningMethod.__call__ or kind.apply_mask is not BasePruningMethod.apply_mask:
        return False
    if not (type(original) is nn.Parameter and type(mask) is Tensor and original.device.type == mask.device.type == "cpu"):
        return False
    if original.nbytes < _LARGE or original.dtype != mask.dtype or not original.is_contiguous():
        return False
    product = new_tensor(original.shape, original.dtype)
    setattr(module, name, product.copy_(original).mul_(mask))
    return True


def keep_fresh(module: nn.Module) -> None:
    """Writes the masked attributes of a module from now on whenever a mask or an original may have changed.

    torch has no hook for `.to()`, copying and pickling, but looks up all three on the instance first. The class of the module
    does not change, because code asks `type(module) is nn.Linear`.
    """
    _watch_optimizers()
    _pruned.add(module)
    if refresh not in module._load_state_dict_post_hooks.values():
        module.register_load_state_dict_post_hook(refresh)
    owner = functools.partial(_alive, weakref.ref(module))  # weak: a reference cycle would delay freeing the model

    def apply(fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        module = owner()
        result = type(module)._apply(module, fn, *args, **kwargs)
        refresh(module)
        return result

    def reduce(protocol: Any) -> tuple[Any, ...]:
        make, arguments, state = _reduced(owner(), protocol)
        return _make, (make, arguments), state

    vars(module).update(_apply=apply, __deepcopy__=lambda memo: _deepcopy(owner(), memo), __reduce_ex__=reduce)


_ON_INSTANCE = ("_apply", "__deepcopy__", "__reduce_ex__")


def let_go(module: nn.Module) -> None:
    """Undoes `keep_fresh` if no tensor of the module is pruned any more."""
    if _active(module):
        return
    _pruned.discard(module)
    for key in [key for key, hook in module._load_state_dict_post_hooks.items() if hook is refresh]:
        del module._load_state_dict_post_hooks[key]
    for name in _ON_INSTANCE:
        vars(module).pop(name, None)


def _alive(reference: weakref.ref[nn.Module]) -> nn.Module:
    module = reference()
    if module is None:
        raise ReferenceError("this is a shallow copy of a pruned module that no longer exists; make it with copy.deepcopy")
    return module


def _reduced(module: nn.Module, protocol: Any) -> tuple[Any, Any, Any]:
    """Returns what `__reduce_ex__` of the class returns, without the attributes that are written again after copying."""
    parts: Any = type(module).__reduce_ex__(module, protocol)
    make, arguments, state = parts[:3]
    rewritten = {hook._tensor_name for hook in hooks(module)} | set(_ON_INSTANCE)
    return make, arguments, {key: value for key, value in state.items() if key not in rewritten}


def _make(make: Callable[..., nn.Module], arguments: tuple[Any, ...]) -> nn.Module:
    """Creates the module for copy or pickle, which then set its state with `_restore`."""
    module = make(*arguments)
    vars(module)["__setstate__"] = functools.partial(_restore, module)
    return module


def _restore(module: nn.Module, state: dict[str, Any]) -> None:
    vars(module).pop("__setstate__", None)
    module.__setstate__(state)
    keep_fresh(module)
    refresh(module)


def _deepcopy(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    for hook in hooks(module):  # a tensor with a graph cannot be copied; refresh writes the copy's own
        product = vars(module).get(hook._tensor_name)
        if isinstance(product, Tensor):
            memo[id(product)] = product.detach()
    if hasattr(type(module), "__deepcopy__"):
        new = type(module).__deepcopy__(module, memo)  # pyright: ignore[reportAttributeAccessIssue]
        keep_fresh(new)
        refresh(new)
    else:
        make, arguments, state = _reduced(module, 4)
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
        if any(id(module._parameters[hook._tensor_name + "_orig"]) in stepped for hook in _active(module)):
            refresh(module)
