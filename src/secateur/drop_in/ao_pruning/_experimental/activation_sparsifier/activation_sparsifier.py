"""`ActivationSparsifier`: a static mask for the input of each layer, computed from inputs that the layer received.

Names, signatures, state format, error types and numbers are torch's. Differences:

* The sizes of inputs may change between two steps (see `_hooks.aggregate`); a batch of one is not broadcast over the rows.
* Hooks do not change the caller's input, and pass on further arguments.
* Aggregated data have no autograd graph, and can be collected under `inference_mode`.
* Masks are applied in the dtype and on the device of the input; a feature may be a list of indices.
* A sparsifier, or a model with its hooks, can be copied and pickled (if the functions can); loading a state replaces hooks.
* `hook_state` is "None" after `squash_mask(attach_sparsify_hook=False)`; torch writes "sparsify", and cannot load "None".
* A call that fails leaves sparsifier and model as they were.

As in torch, the first forward pass after a `step` replaces the mask with ones, so call `squash_mask` right after `step`.
"""

from __future__ import annotations

import copy
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ....._tree import nearest
from ...sparsifier.utils import fqn_to_module, module_to_fqn
from ._hooks import Aggregate, Aggregation, Sparsify

__all__ = ["ActivationSparsifier"]


class ActivationSparsifier:
    """Masks the inputs of layers: `mask = mask_fn(reduce_fn(aggregated inputs), **sparse_config)`.

        sparsifier = ActivationSparsifier(model, torch.add, lambda x: x.mean(0), mask_fn, sparsity_level=0.5)
        sparsifier.register_layer(model.fc)
        for batch in data:
            model(batch)                # inputs of `fc` are aggregated
        sparsifier.step()               # the mask is computed
        sparsifier.squash_mask()        # from now on the inputs of `fc` are masked

    With `features`, only these indices of dimension `feature_dim` are masked, each with a mask of its own. The arguments are
    the defaults of `register_layer`.
    """

    def __init__(
        self,
        model: nn.Module,
        aggregate_fn: Aggregation | None = None,
        reduce_fn: Callable[[Any], Any] | None = None,
        mask_fn: Callable[..., Tensor] | None = None,
        features: Any = None,
        feature_dim: int | None = None,
        **sparse_config: Any,
    ) -> None:
        self.model = model
        self.defaults: dict[str, Any] = defaultdict(
            None,
            sparse_config=sparse_config,
            aggregate_fn=aggregate_fn,
            reduce_fn=reduce_fn,
            mask_fn=mask_fn,
            features=features,
            feature_dim=feature_dim,
        )
        self.data_groups: dict[str, dict[str, Any]] = defaultdict(dict)
        self.state: dict[str, dict[str, Any]] = defaultdict(dict)

    @staticmethod
    def _safe_rail_checks(args: dict[str, Any]) -> None:
        if args["features"] is not None and args["feature_dim"] is None:
            raise AssertionError(f"features={args['features']} need a feature_dim, the dimension of the input that they index")
        for key in ("aggregate_fn", "reduce_fn", "mask_fn"):
            if not callable(args[key]):
                raise AssertionError(f"{key}={args[key]!r} must be callable; give it here or to ActivationSparsifier")

    def _aggregate_hook(self, name: str) -> Aggregate:
        return Aggregate(self, name)

    def _sparsify_hook(self, name: str) -> Sparsify:
        config = self.data_groups[name]
        return Sparsify(name, self.get_mask(name), config["features"], config["feature_dim"])

    def _attach(self, name: str, hook_state: str) -> None:
        """Replaces the hook of a layer, or removes it if `hook_state` is "None"."""
        config = self.data_groups[name]
        if old := config.pop("hook", None):
            old.remove()
        if hook_state != "None":
            hook = self._aggregate_hook(name) if hook_state == "aggregate" else self._sparsify_hook(name)
            config["hook"] = config["layer"].register_forward_pre_hook(hook)
        config["hook_state"] = hook_state

    def register_layer(
        self,
        layer: nn.Module,
        aggregate_fn: Aggregation | None = None,
        reduce_fn: Callable[[Any], Any] | None = None,
        mask_fn: Callable[..., Tensor] | None = None,
        features: Any = None,
        feature_dim: int | None = None,
        **sparse_config: Any,
    ) -> None:
        """Aggregates the inputs of `layer`, a submodule of the model, from now on. Missing arguments are the defaults."""
        name = self._name(layer)
        config = copy.deepcopy(self.defaults)
        given = {
            "aggregate_fn": aggregate_fn,
            "reduce_fn": reduce_fn,
            "mask_fn": mask_fn,
            "features": features,
            "feature_dim": feature_dim,
            "layer": layer,
        }
        config.update((key, value) for key, value in given.items() if value is not None)
        config["sparse_config"].update(sparse_config)
        self._safe_rail_checks(config)
        if name in self.data_groups:
            warnings.warn(f"layer {name!r} was registered before; the new registration replaces it", stacklevel=2)
            self.unregister_layer(name)
        self.data_groups[name] = config
        self.state[name]["mask"] = None  # its shape is known after the first forward pass
        self._attach(name, "aggregate")

    def _name(self, layer: nn.Module) -> str:
        name = module_to_fqn(self.model, layer)
        if name is None:
            raise AssertionError(f"the layer {layer} is not in the model; give one of its submodules, not a copy")
        return name

    def get_mask(self, name: str | None = None, layer: nn.Module | None = None) -> Any:
        """Returns the mask of a layer, given by name or as a module: a tensor, or with features a list of tensors."""
        if name is None:
            if layer is None:
                raise AssertionError("give the name of a registered layer, or the layer")
            name = self._name(layer)
        mask = self._mask(name)
        for tensor in _tensors(mask):
            if 0 in tensor.stride():  # expanded ones from before the first step, which the caller could not write to
                tensor.data = tensor.contiguous()
        return mask

    def _mask(self, name: str) -> Any:
        if name not in self.state:
            raise ValueError(f"no layer {name!r} is registered.{nearest(name, self.state)}")
        mask = self.state[name].get("mask")
        if mask is None:
            raise ValueError(f"layer {name!r} has no mask yet; run the model first, which determines its shape")
        return mask

    def unregister_layer(self, name: str) -> None:
        """Removes the hook and the mask of a layer."""
        if name not in self.data_groups:
            raise KeyError(f"no layer {name!r} is registered.{nearest(name, self.data_groups)}")
        self._attach(name, "None")
        self.state.pop(name)
        self.data_groups.pop(name)

    def step(self) -> None:
        """Computes the mask of every layer from the inputs since the last step, and discards those inputs."""
        idle = [name for name, config in self.data_groups.items() if "data" not in config]
        if idle:
            aggregates = self.data_groups[idle[0]]["hook_state"] == "aggregate"
            what = "run the model first" if aggregates else "squash_mask has ended the aggregation"
            raise KeyError(f"nothing was aggregated since the last step for {', '.join(map(repr, idle))}; {what}")
        before = [(mask, mask.data) for name in self.data_groups for mask in _tensors(self._mask(name))]
        with torch.no_grad():
            for name, config in self.data_groups.items():
                try:
                    self.update_mask(name, config["data"], config)
                except BaseException as error:
                    for mask, values in before:
                        mask.data = values
                    error.add_note(f"while computing the mask of layer {name!r}; all masks are as they were")
                    raise
        for config in self.data_groups.values():
            config.pop("data")

    def update_mask(self, name: str, data: Any, configs: dict[str, Any]) -> None:
        """Sets the mask of one layer, or of each of its features, to `mask_fn(reduce_fn(data))`."""
        mask = self._mask(name)
        pairs = [(mask, data)] if configs["features"] is None else zip(mask, data, strict=True)
        for one, seen in pairs:
            one.data = configs["mask_fn"](configs["reduce_fn"](seen), **configs["sparse_config"])

    def squash_mask(self, attach_sparsify_hook: bool = True, **kwargs: Any) -> None:
        """Ends the aggregation. The masks are applied from now on, unless `attach_sparsify_hook` is False."""
        if attach_sparsify_hook:
            for name in self.data_groups:
                self._mask(name)
        for name in self.data_groups:
            self._attach(name, "sparsify" if attach_sparsify_hook else "None")

    # --- state

    def _get_serializable_data_groups(self) -> dict[str, Any]:
        groups = (
            (name, {k: v for k, v in config.items() if k not in ("hook", "layer")}) for name, config in self.data_groups.items()
        )
        return defaultdict(None, groups)

    def _convert_mask(self, states_dict: dict[str, Any], sparse_coo: bool = True) -> dict[str, Any]:
        """Returns a copy of the states with masks in COO format, or dense."""

        def convert(mask: Any) -> Any:
            if mask is None:
                return None
            if isinstance(mask, list):
                return [convert(one) for one in mask]
            return mask.detach().to_sparse_coo() if sparse_coo else mask.detach().to_dense().clone()

        states: dict[str, Any] = defaultdict(dict)
        for name, state in states_dict.items():
            rest = {key: value for key, value in state.items() if key != "mask"}
            states[name] = {**copy.deepcopy(rest), "mask": convert(state["mask"])}
        return states

    def state_dict(self) -> dict[str, Any]:
        """Returns `state` (masks in COO format by name), `data_groups` (configurations by name) and `defaults`."""
        groups = self._get_serializable_data_groups()
        return {"state": self._convert_mask(self.state), "data_groups": groups, "defaults": self.defaults}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Loads a `state_dict` for this sparsifier's own model. Replaces existing hooks."""
        self.__set_state__({key: state_dict[key] for key in ("state", "data_groups", "defaults")})

    def __get_state__(self) -> dict[str, Any]:
        return self.state_dict()

    def __set_state__(self, state: dict[str, Any]) -> None:
        groups, masks = state["data_groups"], self._convert_mask(state["state"], sparse_coo=False)
        layers = {name: self._layer(name) for name in groups}
        for name, config in groups.items():
            hook_state = config.get("hook_state", "None")
            if hook_state not in ("aggregate", "sparsify", "None"):
                raise ValueError(
                    f"hook_state of layer {name!r} is {hook_state!r}; it must be 'aggregate', 'sparsify' or 'None'"
                )
            if hook_state == "sparsify" and masks.get(name, {}).get("mask") is None:
                raise ValueError(f"hook_state of layer {name!r} is 'sparsify', but the state has no mask for it")
        for name in self.data_groups:
            self._attach(name, "None")
        self.defaults, self.state, self.data_groups = copy.copy(state["defaults"]), masks, defaultdict(dict)
        for name, config in groups.items():
            own = {"sparse_config": dict(config["sparse_config"]), "layer": layers[name]}
            self.data_groups[name] = {key: value for key, value in config.items() if key != "hook"} | own
            self._attach(name, config.get("hook_state", "None"))

    def _layer(self, name: str) -> nn.Module:
        layer = fqn_to_module(self.model, name)
        if not isinstance(layer, nn.Module):
            names = (known for known, _ in self.model.named_modules())
            raise AssertionError(f"layer {name!r} of the state is not in the model.{nearest(name, names)}")
        return layer

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "model" in state:  # a copy or a pickle: the model brings the hooks
            vars(self).update(state)
        else:
            self.__set_state__(state)

    def __repr__(self) -> str:
        hidden = ("data", "hook", "reduce_fn", "mask_fn", "aggregate_fn")
        text = f"{type(self).__name__} ("
        for name, config in self.data_groups.items():
            shown = {"name": name} | {key: config[key] for key in sorted(config) if key not in hidden}
            text += "\n\tData Group\n" + "".join(f"\t    {key}: {value}\n" for key, value in shown.items())
        return text + ")"


def _tensors(mask: Any) -> Iterable[Tensor]:
    return mask if isinstance(mask, list) else [mask]
