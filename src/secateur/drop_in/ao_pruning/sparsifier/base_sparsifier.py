"""The base class of sparsifiers: it adds masks to a model, updates, saves and loads them, and makes them permanent."""

from __future__ import annotations

import abc
import copy
import functools
import re
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized, type_before_parametrizations

from ...._tree import nearest
from .utils import (
    FakeSparsity,
    clone,
    get_arg_info_from_tensor_fqn,
    module_contains_param,
    module_to_fqn,
    parts,
    refuse_lambdas,
    register,
    squash,
    swap_module,
    unregister,
)

__all__ = ["BaseSparsifier"]

SUPPORTED_MODULES: set[type[nn.Module]] = {nn.Linear}

KEYS_NOT_IN_STATE_DICT = ["module", "module_fqn", "tensor_name"]


class Entry(dict[str, Any]):
    """The state of one tensor: a dict that compares the values of tensors, which `==` of a plain dict cannot do."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, dict) and self.keys() == other.keys() and all(_equal(self[key], other[key]) for key in self)

    def __ne__(self, other: object) -> bool:
        return not self == other

    __hash__ = None  # type: ignore[assignment]  # mutable, as any dict


def _equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return bool(one == other)
    alike = (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
    return one is other or (alike and torch.equal(one, other))


class BaseSparsifier(abc.ABC):
    """Keeps masks on tensors of a model. A subclass implements `update_mask`, which computes the mask of one tensor.

    `defaults` are the settings of every tensor; the config that `prepare` receives for a tensor overrides them. `update_mask`
    receives the settings as keyword arguments. `groups` holds one dict of settings per tensor, and `state` the masks.
    """

    def __init__(self, defaults: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.defaults: dict[str, Any] = defaults or {}
        self.state: dict[str, dict[str, Any]] = defaultdict(Entry)
        self.groups: list[dict[str, Any]] = []
        self.enable_mask_update = True
        self._registered: dict[nn.Module, tuple[nn.Module, str]] = {}  # our parametrizations: the module and the tensor of each

    # --- copies ---------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self._everything()

    def _everything(self) -> dict[str, Any]:
        """Returns all attributes for copies and pickles, except the counting `step`, which refers to this object."""
        return {name: value for name, value in vars(self).items() if not getattr(value, "_with_counter", False)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).setdefault("_registered", {})  # a subclass may define its own state
        vars(self).setdefault("enable_mask_update", True)
        vars(self).update(state)
        if "_step_count" in state and "step" not in state:
            count_steps(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        functions = {name: value for name, value in vars(self).items() if isinstance(value, FunctionType)}
        refuse_lambdas(self, {name: value for name, value in functions.items() if not hasattr(value, "_with_counter")})
        return super().__reduce_ex__(protocol)

    def __copy__(self) -> Any:
        return clone(self, self.__getstate__(), None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return clone(self, self.__getstate__(), memo)

    def __repr__(self) -> str:
        text = type(self).__name__ + " ("
        for at, group in enumerate(self.groups):
            text += f"\n\tGroup {at}\n\t    module: {group['module']}\n"
            text += "".join(f"\t    {key}: {group[key]}\n" for key in sorted(group) if key != "module")
        return text + ")"

    # --- saving and loading ---------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Returns masks by tensor name and the settings of every tensor. Tensors are not copied, as in `nn.Module`."""
        for group in self.groups:  # `.to()` and similar methods replace the mask of a module
            if (holder := self._holder_or_none(group["module"], group["tensor_name"])) is not None:
                self.state[group["tensor_fqn"]]["mask"] = holder.mask
        groups = [{key: value for key, value in group.items() if key not in KEYS_NOT_IN_STATE_DICT} for group in self.groups]
        return {"state": {name: dict(entry) for name, entry in self.state.items()}, "groups": groups}

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads settings and masks, which are copied. A tensor that has no mask yet gets one.

        With `strict` every tensor must be in the model; otherwise those that are missing are skipped.
        """
        if not hasattr(self, "model"):
            raise AttributeError(
                f"this {type(self).__name__} has no model yet to load masks into; call prepare(model, config) first"
            )
        if absent := {"state", "groups"} - state_dict.keys():
            raise KeyError(f"the state_dict of a sparsifier needs the keys 'state' and 'groups'; missing: {sorted(absent)}")
        states, groups = state_dict["state"], state_dict["groups"]
        names = dict.fromkeys([*states, *(group["tensor_fqn"] for group in groups)])
        found = {name: _resolved(self.model, name) for name in names}
        for name, info in found.items():
            if strict and info is None:
                raise RuntimeError(f"the model has no tensor {name!r} to load a mask into.{_nearest(self.model, name)}")
            mask = states.get(name, {}).get("mask")
            if info is not None and mask is not None and mask.shape != (shape := self._mask_shape(info)):
                raise RuntimeError(f"the mask of {name!r} has shape {tuple(mask.shape)}, and the model needs {tuple(shape)}")
        there = {name: info for name, info in found.items() if info is not None}
        places = {(id(info["module"]), info["tensor_name"]) for info in there.values()}
        for own, (module, tensor_name) in list(self._registered.items()):
            if (id(module), tensor_name) not in places:  # the state has no such mask
                unregister(module, tensor_name, own)
                del self._registered[own]
        new_groups = [copy.deepcopy(group) | there[group["tensor_fqn"]] for group in groups if group["tensor_fqn"] in there]
        new_state = defaultdict(Entry, {name: self._load_mask(info, states.get(name, {})) for name, info in there.items()})
        self.__setstate__({"state": new_state, "groups": new_groups})

    def _mask_shape(self, info: Mapping[str, Any]) -> torch.Size:
        holder = self._holder_or_none(info["module"], info["tensor_name"])
        return (getattr(info["module"], info["tensor_name"]) if holder is None else holder.mask).shape

    def _load_mask(self, info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        module, tensor_name = info["module"], info["tensor_name"]
        holder = self._holder_or_none(module, tensor_name)
        if holder is None:
            holder = self._register(module, tensor_name, FakeSparsity(torch.ones_like(getattr(module, tensor_name))))
        if state.get("mask") is not None:
            holder.mask.data = state["mask"].detach().to(holder.mask.device, copy=True)
        return Entry({key: copy.deepcopy(value) for key, value in state.items() if key != "mask"}, mask=holder.mask)

    # --- putting masks on a model ---------------------------------------------------------------------------------------

    def make_config_from_model(
        self, model: nn.Module, SUPPORTED_MODULES: Iterable[type[nn.Module]] = SUPPORTED_MODULES
    ) -> None:
        """Sets `config` to the weights of all descendants whose type is exactly one of these."""
        self.config: Any = []
        stack, seen = [model], {model}
        while stack:
            for child in stack.pop().children():
                if child in seen:  # the same layer, registered in two places
                    continue
                seen.add(child)
                if type(child) in SUPPORTED_MODULES:
                    self.config.append({"tensor_fqn": f"{module_to_fqn(model, child)}.weight"})
                else:
                    stack.append(child)

    def prepare(self, model: nn.Module, config: Any) -> None:
        """Adds a mask of ones to every tensor that `config` names, in place.

        `config` is a list of dicts, each with a `tensor_fqn` and optional settings; None means the weights of all `nn.Linear`.
        A tensor that already has a mask of this sparsifier keeps it and gets the new settings.
        """
        before = dict(vars(self))
        try:
            self.model, self.config = model, config
            self.state = defaultdict(Entry, {name: Entry(entry) for name, entry in self.state.items()})
            self._registered = dict(self._registered)
            if config is None:
                self.make_config_from_model(model)
            asked = _checked(model, self.config, self.defaults)
            self.groups = _merged([group for group in self.groups if _is_masked(group)], asked)
            names = {group["tensor_fqn"] for group in self.groups}
            self.state = defaultdict(Entry, {name: entry for name, entry in self.state.items() if name in names})
            remembered = vars(self).get("_scheduled", {})  # written by schedulers, for the previous settings
            self._scheduled = {n: level for n, level in remembered.items() if n not in {g["tensor_fqn"] for g in asked}}
            self._prepare()
        except BaseException:
            for own, (module, tensor_name) in reversed(self._registered.items()):
                if own not in before["_registered"]:
                    unregister(module, tensor_name, own)
            vars(self).clear()
            vars(self).update(before)
            raise
        if config is None and not self.groups:
            warnings.warn(
                f"{type(self).__name__}.prepare found nothing in {type(model).__name__}: config=None selects children of "
                "exactly the type nn.Linear; name other tensors as [{'tensor_fqn': ...}, ...]",
                stacklevel=2,
            )

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        """Registers the parametrizations that are not on the model yet."""
        for group in self.groups:
            module, tensor_name = group["module"], group["tensor_name"]
            if self._mine(module, tensor_name):
                continue
            mask = group["mask"] if "mask" in group else torch.ones_like(getattr(module, tensor_name))
            self._register(module, tensor_name, group.get("parametrization", FakeSparsity)(mask))
            self.state[group["tensor_fqn"]]["mask"] = mask

    def _register(self, module: nn.Module, tensor_name: str, parametrization: nn.Module) -> Any:
        register(module, tensor_name, parametrization)
        self._registered[parametrization] = module, tensor_name
        return parametrization

    def _mine(self, module: nn.Module, tensor_name: str) -> list[nn.Module]:
        """Returns the parametrizations of a tensor that this sparsifier registered."""
        there = parts(module, tensor_name) if is_parametrized(module, tensor_name) else ()
        return [one for one in there if one in self._registered]

    def _holder_or_none(self, module: nn.Module, tensor_name: str) -> Any:
        there = parts(module, tensor_name) if is_parametrized(module, tensor_name) else ()
        return next((one for one in (*self._mine(module, tensor_name), *there) if hasattr(one, "mask")), None)

    def _holder(self, module: nn.Module, tensor_name: str) -> Any:
        """Returns the parametrization that holds this sparsifier's mask of a tensor, which may have other ones too."""
        if (holder := self._holder_or_none(module, tensor_name)) is None:
            raise AttributeError(
                f"{tensor_name!r} of {type_before_parametrizations(module).__name__} has no mask: "
                "it was not prepared, or squash_mask has removed its mask"
            )
        return holder

    # --- updating masks -------------------------------------------------------------------------------------------------

    def step(self, use_path: bool = True) -> None:
        """Updates every mask, unless `enable_mask_update` is False."""
        if not self.enable_mask_update:
            return
        with torch.no_grad():
            for group in self.groups:
                self.update_mask(**group)

    @abc.abstractmethod
    def update_mask(self, module: nn.Module, tensor_name: str, **kwargs: Any) -> None:
        """Writes the new mask of one tensor. `kwargs` are the settings of its group."""

    def squash_mask(
        self,
        params_to_keep: Iterable[str] | None = None,
        params_to_keep_per_layer: Mapping[str, Iterable[str]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Writes the zeros into the tensors and removes the parametrizations.

        The settings named in `params_to_keep`, or for one layer in `params_to_keep_per_layer`, are kept in the attribute
        `sparse_params` of the module, a dict.
        """
        kept = []
        params_to_keep = (params_to_keep,) if isinstance(params_to_keep, str) else params_to_keep
        for group in self.groups:
            if not _is_masked(group):
                raise ValueError(f"{group['tensor_fqn']!r} has no mask any more: squash_mask has already removed it")
            names = [*(params_to_keep or ()), *((params_to_keep_per_layer or {}).get(group["module_fqn"]) or ())]
            for name in names:
                if name not in group:
                    raise KeyError(f"{group['tensor_fqn']!r} has no setting {name!r} to keep.{nearest(name, group)}")
            kept.append({name: group[name] for name in names})
        for group, sparse_params in zip(self.groups, kept, strict=True):
            for own in self._mine(group["module"], group["tensor_name"]):
                del self._registered[own]
            squash(group["module"], group["tensor_name"])
            if sparse_params:
                group["module"].sparse_params = sparse_params

    def convert(
        self,
        module: nn.Module,
        mapping: Mapping[type[nn.Module], type[nn.Module]] | None = None,
        inplace: bool = False,
        parameterization: type[nn.Module] = FakeSparsity,
    ) -> nn.Module:
        """Replaces the descendants that have this parametrization with `mapping[their type].from_dense(descendant)`."""
        if mapping is None:
            raise NotImplementedError(
                "convert needs a mapping from types to sparse types; get_static_sparse_quantized_mapping() is one"
            )
        if not inplace:
            module = copy.deepcopy(module)
        for owner, name, new in list(_swaps(module, mapping, parameterization)):  # create all before changing
            owner._modules[name] = new
        return module


def count_steps(sparsifier: BaseSparsifier) -> None:
    """Counts calls of `sparsifier.step` in `_step_count`, which schedulers read."""
    if getattr(sparsifier.step, "_with_counter", False):
        return
    alive = weakref.ref(sparsifier)  # weak, because a reference cycle would delay freeing the sparsifier
    replaced = vars(sparsifier).get("step")

    @functools.wraps(type(sparsifier).step)
    def step(*args: Any, **kwargs: Any) -> Any:
        one: Any = alive()
        one._step_count += 1
        return replaced(*args, **kwargs) if replaced else type(one).step(one, *args, **kwargs)

    vars(step)["_with_counter"] = True
    vars(sparsifier)["step"] = step


def _is_masked(group: Mapping[str, Any]) -> bool:
    return is_parametrized(group["module"], group["tensor_name"])


def _checked(model: nn.Module, config: Any, defaults: Any) -> list[dict[str, Any]]:
    """Returns a group for every element of the config, after checking all of them. Changes nothing."""
    groups = []
    for asked in config:
        if not isinstance(asked, dict):
            raise AssertionError(f"config must be a list of dicts, each with a 'tensor_fqn'; it contains {asked!r}")
        if not isinstance(defaults, dict):
            raise AssertionError(f"defaults must be a dict of settings, not {defaults!r}")
        group = copy.deepcopy(defaults) | asked
        if group.get("tensor_fqn") is None:
            raise AssertionError(f"the config {asked!r} has no 'tensor_fqn'; add the name of a tensor, such as 'layer.weight'")
        name = group["tensor_fqn"]
        info = get_arg_info_from_tensor_fqn(model, name)
        for key, value in info.items():
            if key in group and group[key] != value:
                raise AssertionError(f"the config of {name!r} has {key}={group[key]!r}, but the model has {value!r}")
        if _resolved(model, name) is None:
            raise AttributeError(f"the model has no tensor {name!r}.{_nearest(model, name)}")
        if not isinstance(tensor := getattr(info["module"], info["tensor_name"]), Tensor):
            raise TypeError(f"{name!r} is {tensor!r}, and only a tensor can have a mask; remove it from the config")
        groups.append(group | info)
    for name, times in Counter(group["tensor_fqn"] for group in groups).items():
        if times > 1:
            raise AssertionError(f"the config contains {name!r} {times} times; name each tensor once")
    return groups


def _merged(groups: Iterable[dict[str, Any]], asked: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Returns existing and new groups in order. A new group replaces an existing one of the same tensor."""
    return list({(id(group["module"]), group["tensor_name"]): group for group in (*groups, *asked)}.values())


def _resolved(model: nn.Module, name: str) -> dict[str, Any] | None:
    """Returns the owner of the tensor of this name, or None if there is no such tensor."""
    info = get_arg_info_from_tensor_fqn(model, name)
    there = isinstance(info["module"], nn.Module) and hasattr(info["module"], info["tensor_name"])
    return info if there else None


def _nearest(model: nn.Module, name: str) -> str:
    tensors = chain(model.named_parameters(), model.named_buffers())
    return nearest(name, {re.sub(r"parametrizations\.([^.]+)\..*", r"\1", full) for full, _ in tensors})


def _swaps(
    module: nn.Module, mapping: Mapping[type[nn.Module], Any], parametrization: type[nn.Module]
) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    for name, child in module.named_children():
        if module_contains_param(child, parametrization) and type_before_parametrizations(child) in mapping:
            yield module, name, swap_module(child, mapping)
        else:
            yield from _swaps(child, mapping, parametrization)
