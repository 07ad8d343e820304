"""The mask as a parametrization, and the way from names to modules and back."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

__all__ = [
    "module_contains_param",
    "swap_module",
    "module_to_fqn",
    "fqn_to_module",
    "get_arg_info_from_tensor_fqn",
    "FakeSparsity",
]


class FakeSparsity(nn.Module):
    """A parametrization: the tensor times its mask.

    The mask is not part of a model's `state_dict` (the sparsifier saves it), so it is no persistent buffer: a prepared model
    can load what it saved. Its contents change, the object stays the same. A mask of any dtype leaves the tensor's dtype alone.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask  # once: a module looks its buffers up slowly, and this runs in every forward pass
        if mask.shape != x.shape:
            raise AssertionError(
                f"the mask has shape {tuple(mask.shape)} and its tensor {tuple(x.shape)}; a mask has the tensor's shape"
            )
        return (mask if mask.dtype == x.dtype else mask.to(x.dtype)) * x


def module_contains_param(module: nn.Module, parametrization: type[nn.Module]) -> bool:
    """Whether any tensor of the module has a parametrization of this type."""
    return any(isinstance(one, parametrization) for tensor in tensors_parametrized(module) for one in parts(module, tensor))


def swap_module(mod: nn.Module, mapping: Mapping[type[nn.Module], Any]) -> nn.Module:
    """What `mapping` has for a module of this type, made by its `from_dense`, with the hooks and the device of `mod`."""
    target = mapping.get(type_before_parametrizations(mod))
    if target is None:
        return mod
    devices = {tensor.device for tensor in chain(mod.parameters(), mod.buffers())}
    if len(devices) > 1:
        raise AssertionError(f"the tensors of {mod} lie on {sorted(map(str, devices))}; a module is swapped on one device only")
    new = target.from_dense(mod)
    for key, before in mod._forward_pre_hooks.items():
        new.register_forward_pre_hook(before, with_kwargs=key in mod._forward_pre_hooks_with_kwargs)
    for key, after in mod._forward_hooks.items():
        new.register_forward_hook(after, with_kwargs=key in mod._forward_hooks_with_kwargs)
    for device in devices:
        new.to(device)
    return new


def module_to_fqn(model: nn.Module, module: nn.Module, prefix: str = "") -> str | None:
    """The dotted name of a module in the model, "" for the model itself, None if it is not there."""
    found = next((name for name, one in model.named_modules() if one is module), None)
    return prefix + found if found else found


def fqn_to_module(model: nn.Module | None, path: str) -> Any:
    """What lies at the dotted path, a module or a tensor; None if there is nothing."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found


def get_arg_info_from_tensor_fqn(model: nn.Module, tensor_fqn: str) -> dict[str, Any]:
    """The parts of a tensor's name, and the module that owns it (None if there is none)."""
    module_fqn, _, tensor_name = tensor_fqn.rpartition(".")
    return {
        "module_fqn": module_fqn,
        "module": fqn_to_module(model, module_fqn),
        "tensor_name": tensor_name,
        "tensor_fqn": tensor_fqn,
    }


def tensors_parametrized(module: nn.Module) -> list[str]:
    """The names of a module's parametrized tensors."""
    return list(cast(nn.ModuleDict, module.parametrizations)) if is_parametrized(module) else []


def parts(module: nn.Module, tensor_name: str) -> parametrize.ParametrizationList:
    """The parametrizations of a parametrized tensor, in the order in which they act."""
    return cast(parametrize.ParametrizationList, cast(nn.ModuleDict, module.parametrizations)[tensor_name])


def register(module: nn.Module, tensor_name: str, parametrization: nn.Module) -> None:
    """Puts a parametrization on a tensor, so that the module can still be pickled, copied, and trained as it was.

    torch gives a parametrized module a class made on the spot. It refuses to be pickled, because pickle could not find that
    class again, and a deep copy shares it with the original: removing the parametrization from one breaks the other. A
    reduction that names the class underneath, and makes a new class for every copy, mends both.
    """
    original = module._parameters.get(tensor_name)
    if original is None or hasattr(parametrization, "right_inverse"):
        parametrize.register_parametrization(module, tensor_name, parametrization)
    else:  # torch writes the parameter to itself, which cuts off what listens to its gradient, as a DDP wrapper does
        module._parameters[tensor_name] = nn.Parameter(original.detach(), original.requires_grad)
        try:
            parametrize.register_parametrization(module, tensor_name, parametrization)
        except BaseException:
            module._parameters[tensor_name] = original
            raise
        parts(module, tensor_name)._parameters["original"] = original
    _have_reduced(type(module))


def unregister(module: nn.Module, tensor_name: str, parametrization: nn.Module) -> None:
    """Takes one parametrization off again, and leaves those that were there before it."""
    there = parts(module, tensor_name)
    if len(there) == 1:
        parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=False)
    else:
        del there[next(at for at, one in enumerate(there) if one is parametrization)]


def squash(module: nn.Module, tensor_name: str) -> None:
    """Takes all parametrizations off and leaves the tensor with the value they gave it, in the memory it had."""
    there = parts(module, tensor_name)
    if there.is_tensor:
        with torch.no_grad():
            there.original.data.copy_(getattr(module, tensor_name))
    parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=not there.is_tensor)


def _have_reduced(made: Any) -> None:
    made.__reduce_ex__ = _reduce
    if "__deepcopy__" in vars(made):  # torch's, which shares the class; without it, copy asks for the reduction
        del made.__deepcopy__


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    plain: Any = type_before_parametrizations(module)
    with torch.no_grad():  # recurrent layers put their masked weights in a list here; with a graph they could not be copied
        state = plain.__getstate__(module)
    return _rebuild, (plain, tensors_parametrized(module)), state


def _rebuild(plain: type[nn.Module], tensors: Iterable[str]) -> nn.Module:
    """An empty module of the class `plain` with these tensors parametrized, about to be given its state."""
    module: nn.Module = object.__new__(plain)
    parametrize._inject_new_class(module)
    for name in tensors:
        parametrize._inject_property(module, name)
    _have_reduced(type(module))
    return module


def refuse_lambdas(owner: object, functions: Mapping[str, Any]) -> None:
    """A clear error for a function that pickle could not find again by its name."""
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:
            raise pickle.PicklingError(
                f"{type(owner).__name__} cannot be pickled: {name} is {function!r}; "
                "give a function that is defined at the top of a module"
            ) from error


def clone(one: Any, state: dict[str, Any], memo: dict[int, Any] | None) -> Any:
    """A copy of an object that is given this state; with a memo a deep one."""
    new: Any = object.__new__(type(one))
    if memo is not None:
        memo[id(one)] = new
        state = copy.deepcopy(state, memo)
    getattr(new, "__setstate__", vars(new).update)(state)
    return new
