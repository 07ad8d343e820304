"""Changes to a module: which of its tensors can be pruned, and how original, mask and hook are put in place.

Every change is made completely or not at all.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.nn.utils import parametrize
from torch.nn.utils.prune import BasePruningMethod

from .._tree import Packed
from ._upkeep import hooks, keep_fresh, write


def kind(module: nn.Module) -> str:
    """Returns the name of a module in error messages."""
    return type(module).__name__


def hook_of(module: nn.Module, name: str) -> BasePruningMethod | None:
    """Returns the hook that prunes this tensor, ours or torch's, or None."""
    found = [hook for hook in hooks(module) if hook._tensor_name == name]
    if len(found) > 1:
        raise AssertionError(f"{name!r} of {kind(module)} has {len(found)} pruning hooks; put them in one PruningContainer")
    return found[0] if found else None


def parameter_to_prune(module: nn.Module, name: str, old: BasePruningMethod | None) -> nn.Parameter:
    """Returns the parameter that the mask belongs to. Raises an error that names what `name` is if it cannot be pruned."""
    if old is not None:
        return getattr(module, name + "_orig")
    found = module._parameters.get(name)
    where = f"{name!r} of {kind(module)}"
    if found is None:
        raise _not_a_parameter(module, name, where)
    if isinstance(found, UninitializedParameter):
        raise ValueError(f"{where} has no values yet; run the lazy module once, then prune")
    if hasattr(found, "to_local"):
        raise RuntimeError(f"{where} is sharded (a DTensor); prune it before fully_shard, or use secateur.prune_")
    for taken in (name + "_orig", name + "_mask"):
        if hasattr(module, taken):
            raise KeyError(f"{kind(module)} already has {taken!r}, and pruning {name!r} needs that name")
    return found


def _not_a_parameter(module: nn.Module, name: str, where: str) -> Exception:
    if not hasattr(module, name):
        near = difflib.get_close_matches(str(name), list(module._parameters), n=1)
        hint = f". Did you mean {near[0]!r}?" if near else ""
        return AttributeError(
            f"{kind(module)} has no {name!r}; its own parameters are {', '.join(module._parameters) or 'none'}{hint}"
        )
    if name in module._parameters:
        return TypeError(f"{where} is None, so there is nothing to prune")
    if parametrize.is_parametrized(module, name):
        return TypeError(
            f"{where} is parametrized; call torch.nn.utils.parametrize.remove_parametrizations first, "
            f"or prune 'original' of its parametrizations.{name}"
        )
    if {name + "_g", name + "_v"} <= module._parameters.keys():
        return TypeError(f"{where} is computed by weight_norm; prune {name + '_v'!r}, or call remove_weight_norm first")
    if name + "_orig" in module._parameters:
        return TypeError(f"{where} is computed from {name + '_orig'!r}, by spectral_norm for example; remove that first")
    if isinstance(module, Packed):
        return TypeError(f"{where} is packed because the layer is compressed; call secateur.decompress_ on the model first")
    what = "a buffer" if name in module._buffers else f"a {type(getattr(module, name)).__name__}"
    return TypeError(f"{where} is {what}, not a parameter; only parameters can be pruned")


def commit(module: nn.Module, name: str, old: BasePruningMethod | None, hook: BasePruningMethod, mask: Tensor) -> None:
    """Puts original, mask, hook and masked attribute in place."""
    if old is None:
        rename(module._parameters, name, name + "_orig")
        module.register_forward_pre_hook(hook)
    else:
        key = next(key for key, there in module._forward_pre_hooks.items() if there is old)
        module._forward_pre_hooks[key] = hook
    module.register_buffer(name + "_mask", mask)
    keep_fresh(module)
    write(module, hook)


def rename(entries: dict[str, Any], old: str, new: str) -> None:
    """Renames a key without moving it: optimizers and checkpoints depend on the order of parameters."""
    renamed = [(new if key == old else key, value) for key, value in entries.items()]
    entries.clear()
    entries.update(renamed)


@contextmanager
def all_or_nothing(modules: Sequence[nn.Module]) -> Iterator[None]:
    """Restores every module and its pruning hooks if the body raises."""
    things = [thing for module in modules for thing in (module, *hooks(module))]
    before = [(thing, dict(vars(thing)), _contents(thing)) for thing in things]
    try:
        yield
    except BaseException:
        for thing, attributes, contents in before:
            vars(thing).clear()
            vars(thing).update(attributes)
            for key, content in contents.items():
                held = attributes[key]  # the same object as before: handles and optimizers may hold it
                held.clear()
                held.extend(content) if isinstance(held, list) else held.update(content)
        raise


def _contents(thing: object) -> dict[str, Any]:
    return {key: value.copy() for key, value in vars(thing).items() if isinstance(value, dict | list | set)}
