"""The base class of data sparsifiers: masks for tensors, parameters and embeddings, held in a container module."""

from __future__ import annotations

import abc
import copy
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ....._tree import nearest
from ...sparsifier import base_sparsifier, utils

__all__ = ["BaseDataSparsifier"]

EMBEDDING_TYPES = {nn.Embedding, nn.EmbeddingBag}
SUPPORTED_TYPES = {Tensor, nn.Parameter, *EMBEDDING_TYPES}

_DOT = "\u2024"  # replaces "." in the container, where attribute names cannot contain it; not visible outside


class _Container(nn.Module):
    """Holds the data by name, so that `parametrize` can mask them."""


_TAKEN = {"parametrizations", *dir(nn.ModuleDict())}


class BaseDataSparsifier(base_sparsifier.BaseSparsifier):
    """Keeps masks for named data. A subclass implements `update_mask(name, data, **config)`, which computes a mask.

    The sparsifier holds the caller's tensors, not copies: it sees changes made outside, and `squash_mask` writes the zeros into
    them.

    Args:
        data_list: (name, data) pairs to add with the defaults. Data are tensors, parameters, `nn.Embedding`, `nn.EmbeddingBag`.
        defaults: the config of all data, which `add_data` can override.
    """

    def __init__(self, data_list: list[tuple[str, Any]] | None = None, **defaults: Any) -> None:
        super().__init__(defaults=defaults)
        self._container: nn.Module = _Container()
        self.data_groups: dict[str, dict[str, Any]] = defaultdict(dict)
        for name, data in data_list or []:
            self.add_data(name, data, **self.defaults)

    def prepare(self, model: Any, config: Any) -> None:
        raise NotImplementedError("a data sparsifier has no model to prepare; add data with add_data(name, data)")

    def _extract_weight(self, data: Any) -> Tensor:
        return data.weight if type(data) in EMBEDDING_TYPES else data

    def add_data(self, name: str, data: Any, reuse_mask: bool = True, **config: Any) -> Tensor:
        """Adds `data` under `name` and returns its masked value.

        Data of the same name are replaced, with a warning. Their config is updated with `config`, and their mask is kept unless
        `reuse_mask=False`; to keep it, the shape must be the same.
        """
        if type(data) not in SUPPORTED_TYPES:
            raise AssertionError(
                f"{name!r} is a {type(data).__name__}; give a torch.Tensor, nn.Parameter, nn.Embedding or nn.EmbeddingBag"
            )
        _check_name(name)
        weight = self._extract_weight(data)
        known = name in self.state
        mask = {**self.defaults, **config}.get("mask")
        if known and reuse_mask:
            mask = self.get_mask(name)
            if mask.shape != weight.shape:
                raise AssertionError(
                    f"{name!r} had shape {tuple(mask.shape)} and now has {tuple(weight.shape)}, so its mask does not fit; "
                    "give data of the old shape, or reuse_mask=False"
                )
        mask = torch.ones_like(weight, requires_grad=False) if mask is None else mask
        local_args = copy.deepcopy(self.data_groups[name] if known else self.defaults) | config
        parametrization = local_args.get("parametrization", utils.FakeSparsity)(mask)
        with torch.no_grad():  # raises for a mask that does not fit, before the old data are replaced
            parametrization(weight)
        if known:
            warnings.warn(f"Replacing the data named {name!r}. Did you mean another name?", stacklevel=2)
            self._delete_data(name)
        _attach(self._container, name, weight, parametrization)
        self.state[name]["mask"] = mask
        self.data_groups[name] = local_args
        return getattr(self._container, _key(name))

    def get_data(self, name: str, return_original: bool = True) -> Tensor:
        """Returns the data under `name` as they were given, or masked with `return_original=False`."""
        self._check_known(name, self.data_groups)
        if not return_original:
            return getattr(self._container, _key(name))
        if not self._is_masked(name):
            raise ValueError(f"the mask of {name!r} was squashed, so there is no original; use return_original=False")
        return self._container.parametrizations[_key(name)].original  # type: ignore[index]

    def get_mask(self, name: str) -> Tensor:
        """Returns the mask under `name`: the tensor that masks the data, not a copy."""
        self._check_known(name, self.state)
        return self.state[name]["mask"]

    def _check_known(self, name: str, names: Iterable[str]) -> None:
        if name not in names:
            raise ValueError(f"there are no data named {name!r}.{nearest(name, names)}")

    def _is_masked(self, name: str) -> bool:
        return parametrize.is_parametrized(self._container, _key(name))

    # --- masks ------------------------------------------------------------------------------------------------------

    @abc.abstractmethod
    def update_mask(self, name: str, data: Tensor, **kwargs: Any) -> None:  # type: ignore[override]
        """Writes the new mask into `self.get_mask(name)`. `kwargs` is the config of that name."""

    def step(self) -> None:  # type: ignore[override]
        """Updates all masks from the unmasked data, unless `enable_mask_update` is False."""
        if not self.enable_mask_update:
            return
        everything = [(name, self.get_data(name), config) for name, config in self.data_groups.items()]
        with torch.no_grad():
            for name, data, config in everything:
                self.update_mask(name, data, **config)

    def squash_mask(  # type: ignore[override]
        self, *args: Any, leave_parametrized: bool = True, names: Iterable[str] | None = None, **kwargs: Any
    ) -> None:
        """Writes the zeros into the data and removes the masks, of `names` or of all.

        With `leave_parametrized=False` the masks are removed and the data do not change.
        """
        names = list(self.data_groups if names is None else names)
        for name in names:
            self._check_known(name, self.data_groups)
            if not self._is_masked(name):
                raise ValueError(f"the mask of {name!r} was squashed already; name only data that are still masked")
        for name in dict.fromkeys(names):
            if leave_parametrized:
                utils.squash(self._container, _key(name))
            else:
                parametrize.remove_parametrizations(self._container, _key(name), leave_parametrized=False)

    def _delete_data(self, name: str) -> None:
        """Removes the data under `name` without masking them."""
        if self._is_masked(name):
            self.squash_mask(names=[name], leave_parametrized=False)
        delattr(self._container, _key(name))
        self.state.pop(name)
        self.data_groups.pop(name)

    # --- state ------------------------------------------------------------------------------------------------------

    def _convert_mask(self, states: Mapping[str, dict[str, Any]], sparse_coo: bool = True) -> dict[str, dict[str, Any]]:
        """A copy of `states` with masks as sparse COO tensors, or as dense ones."""

        def converted(mask: Tensor) -> Tensor:
            other = mask.detach().to_sparse_coo() if sparse_coo else mask.detach().to_dense()
            return other.clone() if other.layout == mask.layout else other  # what has the layout already is given back as it is

        copies = {name: {key: copy.deepcopy(v) for key, v in state.items() if key != "mask"} for name, state in states.items()}
        for name, state in states.items():
            if "mask" in state:
                copies[name]["mask"] = converted(state["mask"])
        return copies

    def _tensors(self) -> dict[str, Tensor]:
        """Returns what the container holds, by the names that users gave. Parameters stay parameters."""
        held = self._container.state_dict(keep_vars=True).items()
        return {key.replace(_DOT, "."): value if isinstance(value, nn.Parameter) else value.detach() for key, value in held}

    def state_dict(self) -> dict[str, Any]:
        """Returns `state` (masks as sparse COO tensors), `data_groups` (configs) and `_container` (the data, not copied)."""
        return {
            "state": self._convert_mask(self.state),
            "data_groups": {name: dict(config) for name, config in self.data_groups.items()},
            "_container": {key: value.detach() for key, value in self._tensors().items()},
        }

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Loads a `state_dict`, with copies of its tensors.

        With `strict=False` data that are present stay as they are, and only data of other names are added.
        """
        here = {} if strict else self.data_groups
        states = {name: state for name, state in state_dict["state"].items() if name not in here}
        states = self._convert_mask(states, sparse_coo=False)
        groups = copy.deepcopy({name: config for name, config in state_dict["data_groups"].items() if name not in here})
        container = _Container() if strict else self._container
        _fill(container, states, groups, {key: value.detach().clone() for key, value in state_dict["_container"].items()})
        self._container = container
        self.__setstate__({"state": states | ({} if strict else self.state), "data_groups": groups | here})

    def __getstate__(self) -> dict[str, Any]:
        """Returns all attributes for copies and pickles: masks as in `state_dict`, the container as its tensors."""
        return super().__getstate__() | {
            "state": self._convert_mask(self.state),
            "data_groups": dict(self.data_groups),
            "_container": self._tensors(),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        state = dict(state)
        if "_container" in state:
            states, container = self._convert_mask(state["state"], sparse_coo=False), _Container()
            _fill(container, states, state["data_groups"], state["_container"])
            state |= {"state": states, "_container": container}
        if "state" in state:
            entries = {name: base_sparsifier.Entry(entry) for name, entry in state["state"].items()}
            state["state"] = defaultdict(base_sparsifier.Entry, entries)
        if "data_groups" in state:
            state["data_groups"] = defaultdict(dict, state["data_groups"])
        super().__setstate__(state)

    def __repr__(self) -> str:
        text = f"{type(self).__name__} ("
        for name, config in self.data_groups.items():
            text += f"\n\tData Group\n\t    name: {name}\n"
            text += "".join(f"\t    {key}: {config[key]}\n" for key in sorted(config) if key != "data")
        return text + ")"


def flat_names(names: Iterable[str]) -> dict[str, str]:
    """Replaces "." in names by "_", as torch does, except where two names would become equal."""
    names = list(names)
    taken = {name for name in names if "." not in name}
    flat: dict[str, str] = {}
    for name in names:
        short = name.replace(".", "_")
        flat[name] = name if short in taken else short
        taken.add(short)
    return flat


def _key(name: str) -> str:
    return name.replace(".", _DOT)


def _check_name(name: str) -> None:
    if not isinstance(name, str):
        raise TypeError(f"the name of data must be a string, not {name!r}")
    if not name or _DOT in name or _key(name) in _TAKEN:
        raise KeyError(f"data cannot be named {name!r}: the name is empty or an attribute of nn.Module; choose another")


def _attach(container: nn.Module, name: str, data: Tensor, parametrization: nn.Module | None) -> None:
    """Registers the tensor itself, not a copy, in the container."""
    if isinstance(data, nn.Parameter):
        container.register_parameter(_key(name), data)
    else:
        container.register_buffer(_key(name), data)
    if parametrization is not None:
        utils.register(container, _key(name), parametrization)


def _fill(
    container: nn.Module,
    states: Mapping[str, dict[str, Any]],
    groups: Mapping[str, dict[str, Any]],
    tensors: Mapping[str, Tensor],
) -> None:
    """Registers the data of `tensors` in the container, masked unless they were squashed. On an error none is registered."""
    found: list[tuple[str, Tensor, nn.Module | None]] = []
    for name, state in states.items():
        if name not in groups:
            raise RuntimeError(f"cannot load {name!r}: it has a mask, but no entry in data_groups")
        masked = f"parametrizations.{name}.original"
        if name not in tensors and masked not in tensors:
            raise RuntimeError(f"cannot load {name!r}: neither {name!r} nor {masked!r} is in _container")
        _check_name(name)
        data = tensors[name] if name in tensors else tensors[masked]
        state["mask"] = _fitting(name, state.get("mask"), data)
        make = groups[name].get("parametrization", utils.FakeSparsity)
        found.append((name, data, None if name in tensors else make(state["mask"])))
    for name, data, parametrization in found:
        _attach(container, name, data, parametrization)


def _fitting(name: str, mask: Tensor | None, data: Tensor) -> Tensor:
    """Returns the mask in the shape of the data. torch saves the masks of (n,) and (n, 1) data as (1, n)."""
    if mask is None:
        return torch.ones_like(data, requires_grad=False)
    if mask.squeeze().shape != data.squeeze().shape:
        raise RuntimeError(f"cannot load {name!r}: its mask has shape {tuple(mask.shape)}, its data {tuple(data.shape)}")
    return mask if mask.shape == data.shape else mask.reshape(data.shape)
