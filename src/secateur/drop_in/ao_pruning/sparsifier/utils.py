"""The mask as a parametrization, and the conversion between names and modules."""

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
    """A parametrization that multiplies the tensor by a mask.

    The mask is a non-persistent buffer, because the sparsifier saves it: a prepared model can load its own `state_dict`. The
    contents of the mask change and the object stays the same. The result always has the dtype of the tensor.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        mask = self.mask  # read once: attribute lookup on a module is slow, and this runs in every forward pass
        if mask.shape != x.shape:
            raise AssertionError(f"the mask has shape {tuple(mask.shape)} and its tensor {tuple(x.shape)}; they must be equal")
        return (mask if mask.dtype == x.dtype else mask.to(x.dtype)) * x


def module_contains_param(module: nn.Module, parametrization: type[nn.Module]) -> bool:
    """Returns whether any tensor of the module has a parametrization of this type."""
    return any(isinstance(one, parametrization) for tensor in tensors_parametrized(module) for one in parts(module, tensor))


def swap_module(mod: nn.Module, mapping: Mapping[type[nn.Module], Any]) -> nn.Module:
    """Returns the replacement of a module: `mapping[type].from_dense(mod)`, with the hooks and on the device of `mod`."""
    target = mapping.get(type_before_parametrizations(mod))
    if target is None:
        return mod
    devices = {tensor.device for tensor in chain(mod.parameters(), mod.buffers())}
    if len(devices) > 1:
        raise AssertionError(f"the tensors of {mod} are on {sorted(map(str, devices))}; move them to one device first")
    new = target.from_dense(mod)
    for key, before in mod._forward_pre_hooks.items():
        new.register_forward_pre_hook(before, with_kwargs=key in mod._forward_pre_hooks_with_kwargs)
    for key, after in mod._forward_hooks.items():
        new.register_forward_hook(after, with_kwargs=key in mod._forward_hooks_with_kwargs)
    for device in devices:
        new.to(device)
    return new


def module_to_fqn(model: nn.Module, module: nn.Module, prefix: str = "") -> str | None:
    """Returns the dotted name of a module in the model: "" for the model itself, None if it is not in the model."""
    found = next((name for name, one in model.named_modules() if one is module), None)
    return prefix + found if found else found


def fqn_to_module(model: nn.Module | None, path: str) -> Any:
    """Returns the module or tensor at the dotted path, or None."""
    found: Any = model
    for name in path.split(".") if path else ():
        found = getattr(found, name, None)
    return found


def get_arg_info_from_tensor_fqn(model: nn.Module, tensor_fqn: str) -> dict[str, Any]:
    """Returns the parts of a tensor's name, and the module that owns it (None if there is none)."""
    module_fqn, _, tensor_name = tensor_fqn.rpartition(".")
    return {
        "module_fqn": module_fqn,
        "module": fqn_to_module(model, module_fqn),
        "tensor_name": tensor_name,
        "tensor_fqn": tensor_fqn,
    }


def tensors_parametrized(module: nn.Module) -> list[str]:
    """Returns the names of a module's parametrized tensors."""
    return list(cast(nn.ModuleDict, module.parametrizations)) if is_parametrized(module) else []


def parts(module: nn.Module, tensor_name: str) -> parametrize.ParametrizationList:
    """Returns the parametrizations of a tensor, in the order in which they are applied."""
    return cast(parametrize.ParametrizationList, cast(nn.ModuleDict, module.parametrizations)[tensor_name])


def register(module: nn.Module, tensor_name: str, parametrization: nn.Module) -> None:
    """Registers a parametrization on a tensor of a module, which can still be pickled, deep-copied and trained.

    torch creates a new class for a parametrized module. pickle cannot find that class, and a deep copy shares it with the
    original, so that removing the parametrization from one breaks the other. `_reduce` avoids both: it names the class from
    before, and every copy gets a new class of its own.
    """
    original = module._parameters.get(tensor_name)
    if original is None or hasattr(parametrization, "right_inverse"):
        parametrize.register_parametrization(module, tensor_name, parametrization)
    else:  # torch would call `set_` on the parameter, which detaches gradient hooks such as those of DDP
        module._parameters[tensor_name] = nn.Parameter(original.detach(), original.requires_grad)
        try:
            parametrize.register_parametrization(module, tensor_name, parametrization)
        except BaseException:
            module._parameters[tensor_name] = original
            raise
        parts(module, tensor_name)._parameters["original"] = original
    _make_reducible(type(module))


def unregister(module: nn.Module, tensor_name: str, parametrization: nn.Module) -> None:
    """Removes one parametrization and keeps the others."""
    there = parts(module, tensor_name)
    if len(there) == 1:
        parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=False)
    else:
        del there[next(at for at, one in enumerate(there) if one is parametrization)]


def squash(module: nn.Module, tensor_name: str) -> None:
    """Removes all parametrizations and writes their result to the original tensor, in its own memory."""
    there = parts(module, tensor_name)
    if there.is_tensor:
        with torch.no_grad():
            there.original.data.copy_(getattr(module, tensor_name))
    parametrize.remove_parametrizations(module, tensor_name, leave_parametrized=not there.is_tensor)


def _make_reducible(made: Any) -> None:
    made.__reduce_ex__ = _reduce
    if "__deepcopy__" in vars(made):  # torch's version shares the class; without it, copy uses `__reduce_ex__`
        del made.__deepcopy__


def _reduce(module: nn.Module, protocol: Any) -> tuple[Any, ...]:
    plain: Any = type_before_parametrizations(module)
    with torch.no_grad():  # recurrent layers list their masked weights here; with an autograd graph they could not be copied
        state = plain.__getstate__(module)
    return _rebuild, (plain, tensors_parametrized(module)), state


def _rebuild(plain: type[nn.Module], tensors: Iterable[str]) -> nn.Module:
    """Creates a module of the class `plain` with these tensors parametrized; its state is set afterwards."""
    module: nn.Module = object.__new__(plain)
    parametrize._inject_new_class(module)
    for name in tensors:
        parametrize._inject_property(module, name)
    _make_reducible(type(module))
    return module


def refuse_lambdas(owner: object, functions: Mapping[str, Any]) -> None:
    """Raises an error that names the function which pickle cannot find by its name."""
    for name, function in functions.items():
        try:
            pickle.dumps(function)
        except Exception as error:
            raise pickle.PicklingError(
                f"{type(owner).__name__} cannot be pickled: {name} is {function!r}; "
                "use a function that is defined at the top level of a module"
            ) from error


def clone(one: Any, state: dict[str, Any], memo: dict[int, Any] | None) -> Any:
    """Copies an object that has this state, deeply if a memo is given."""
    new: Any = object.__new__(type(one))
    if memo is not None:
        memo[id(one)] = new
        state = copy.deepcopy(state, memo)
    getattr(new, "__setstate__", vars(new).update)(state)
    return new
