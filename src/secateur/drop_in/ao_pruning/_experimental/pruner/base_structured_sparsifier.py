"""The base class of structured pruners: masks over rows of weights, and the smaller model without the masked units."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, product
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node, Tracer

from ...sparsifier.base_sparsifier import BaseSparsifier
from ...sparsifier.utils import register, unregister
from . import prune_functions as functions
from ._inputs import InputRecord, find_inputs
from ._shrink import shrink_
from .match_utils import apply_match
from .parametrization import (
    ROWS,
    FakeStructuredSparsity,
    hide_bias,
    masked_modules,
    module_contains_param,
    remove_masks,
    restore_bias,
)

__all__ = ["BaseStructuredSparsifier"]

Patterns = Mapping[Any, Callable[..., None]]


def _get_supported_structured_pruning_modules() -> set[type[nn.Module]]:
    """Returns the types of layers that `config=None` selects."""
    return {nn.Linear, nn.Conv2d, nn.LSTM}


_FUNCTIONS = (
    "relu rrelu hardtanh relu6 sigmoid hardsigmoid tanh silu mish hardswish elu celu selu hardshrink leaky_relu logsigmoid "
    "softplus prelu softsign tanhshrink gelu"
)
_MODULES = (
    "ReLU RReLU Hardtanh ReLU6 Sigmoid Hardsigmoid Tanh SiLU Mish Hardswish ELU CELU SELU Hardshrink LeakyReLU LogSigmoid "
    "Softplus PReLU Softsign Tanhshrink GELU"
)


def _get_supported_activation_functions() -> set[Callable[..., Tensor]]:
    return {getattr(F, name) for name in _FUNCTIONS.split()}


def _get_supported_activation_modules() -> set[type[nn.Module]]:
    return {getattr(nn, name) for name in _MODULES.split()}


def _get_default_structured_pruning_patterns() -> dict[Any, Callable[..., None]]:
    """Returns patterns of layers, each with the function that removes the masked units of the first layer."""
    patterns: dict[Any, Callable[..., None]] = {
        (nn.Linear, "output"): functions.prune_linear,
        (nn.Linear, nn.Linear): functions.prune_linear_linear,
        (nn.Conv2d, "output"): functions.prune_conv2d,
        (nn.Conv2d, nn.Conv2d): functions.prune_conv2d_conv2d,
        (nn.LSTM, getitem, nn.Linear): functions.prune_lstm_output_linear,
        (nn.LSTM, getitem, nn.LayerNorm, nn.Linear): functions.prune_lstm_output_layernorm_linear,
    }
    pools = (nn.AvgPool2d, F.avg_pool2d, nn.MaxPool2d, F.max_pool2d)
    for activation in chain(_get_supported_activation_functions(), _get_supported_activation_modules()):
        patterns[nn.Linear, activation, nn.Linear] = functions.prune_linear_activation_linear
        patterns[nn.Conv2d, activation, nn.Conv2d] = functions.prune_conv2d_activation_conv2d
        for pool in pools:
            patterns[nn.Conv2d, activation, pool, nn.Conv2d] = functions.prune_conv2d_activation_pool_conv2d
            patterns[nn.Conv2d, pool, activation, nn.Conv2d] = functions.prune_conv2d_pool_activation_conv2d
    for pool, flatten in product((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), (nn.Flatten, torch.flatten)):
        patterns[nn.Conv2d, pool, flatten, nn.Linear] = functions.prune_conv2d_pool_flatten_linear
    return patterns


class BaseStructuredSparsifier(BaseSparsifier):
    """Keeps masks over the rows of weights, and finally removes the masked units from the model.

    A subclass implements `update_mask`, which masks rows of a tensor. With the setting `prune_bias` (True by default) the bias
    of a masked row is pruned too; otherwise it is kept, and `prune` folds it into the layers that follow.
    `patterns` maps patterns of layers to functions that `prune` calls with the modules and functions of each match. The default
    patterns are not called: whatever your own functions have not handled is cut by tracing the axes of the model.
    """

    def __init__(self, defaults: dict[str, Any] | None, patterns: Patterns | None = None) -> None:
        super().__init__(defaults)
        self.patterns: Patterns = _get_default_structured_pruning_patterns() if patterns is None else patterns
        self.skipped: dict[str, str] = {}

    def __getstate__(self) -> dict[str, Any]:
        state = super().__getstate__()
        if (
            self.patterns == _get_default_structured_pruning_patterns()
        ):  # they contain functions of torch that cannot be pickled
            state.pop("patterns", None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if "patterns" not in vars(self):
            self.patterns = _get_default_structured_pruning_patterns()

    # --- adding masks to a model  -----------------------------------------------------------------------------------------

    def make_config_from_model(  # type: ignore[override]
        self, model: nn.Module, SUPPORTED_MODULES: Iterable[type[nn.Module]] | None = None
    ) -> None:
        """Sets `config` to the weights of all descendants whose type is exactly one of these."""
        kinds = _get_supported_structured_pruning_modules() if SUPPORTED_MODULES is None else SUPPORTED_MODULES
        super().make_config_from_model(model, kinds)
        found, self.config = self.config, []
        for entry in found:
            module = model.get_submodule(entry["tensor_fqn"].removesuffix(".weight"))
            names = [name for name in _parameter_names(module) if name.startswith(("weight_ih_", "weight_hh_"))]
            recurrent = isinstance(module, nn.RNNBase)
            stem = entry["tensor_fqn"].removesuffix("weight")
            self.config += [{"tensor_fqn": stem + name} for name in names] if recurrent else [entry]

    def _prepare(self, *args: Any, **kwargs: Any) -> None:
        """Adds masks where there are none yet, and the hooks that add masked biases."""
        done: list[Callable[[], None]] = []
        try:
            for group in self.groups:
                module, name = group["module"], group["tensor_name"]
                if self._mine(module, name):
                    continue
                tensor = getattr(module, name)
                mask = group.get("mask")
                mask = torch.ones(tensor.shape[0], dtype=torch.bool, device=tensor.device) if mask is None else mask
                holder = self._register(module, name, group.get("parametrization", FakeStructuredSparsity)(mask))
                self.state[group["tensor_fqn"]]["mask"] = mask
                done.append(_with_bias(module, name, holder, group.get("prune_bias", True)))
            if not any(isinstance(hook, InputRecord) for hook in self.model._forward_hooks.values()):
                self.model.register_forward_hook(InputRecord(), with_kwargs=True)
        except BaseException:
            for undo in reversed(done):
                undo()
            raise

    def _mask_shape(self, info: Mapping[str, Any]) -> torch.Size:
        shape = super()._mask_shape(info)
        return shape[:1] if self._holder_or_none(info["module"], info["tensor_name"]) is None else shape

    def _load_mask(self, info: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        module, name = info["module"], info["tensor_name"]
        if self._holder_or_none(module, name) is None:
            tensor = getattr(module, name)
            holder = FakeStructuredSparsity(torch.ones(tensor.shape[0], dtype=torch.bool, device=tensor.device))
            _with_bias(module, name, self._register(module, name, holder), True)
        return super()._load_mask(info, state)

    # --- removing masks -----------------------------------------------------------------------------------------------------

    def squash_mask(
        self,
        params_to_keep: Iterable[str] | None = None,
        params_to_keep_per_layer: Mapping[str, Iterable[str]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        """Writes the zeros into weights and biases, which keep their sizes, and removes masks and hooks."""
        super().squash_mask(params_to_keep, params_to_keep_per_layer, *args, **kwargs)
        for module in {id(group["module"]): group["module"] for group in self.groups}.values():
            remove_masks(module, write=True)
        _remove_record(self.model)

    def prune(self) -> GraphModule | nn.Module:
        """Removes the masked units from the model, in place, and returns it as a `GraphModule` (also as `self.traced`).

        In evaluation mode the output equals that of the masked model, except that removed units which the model returns are
        missing from it. The constant values of removed units (a bias, an activation of zero, the shift of a normalisation) are
        folded into the biases of the layers that read them. Units that the model still needs stay as zeros; a warning names
        them, and `self.skipped` gives the reasons. If torch.fx cannot trace the model, the model itself is returned.

        This runs the model, on inputs like those of its first call since `prepare`. If there was none and no input can be
        guessed, call the model once before. On any error the model is unchanged.
        """
        own = [(p, f) for p, f in self.patterns.items() if getattr(f, "__module__", None) != functions.__name__]
        if own and next(_matches(self.model, own), None) is not None:
            rehearsal = copy.deepcopy(self.model)  # try the functions on a copy first
            _apply(rehearsal, own)
            if masked_modules(rehearsal):
                self._cut(copy.deepcopy(rehearsal))
            _apply(self.model, own)
        self.skipped = self._cut(self.model) if masked_modules(self.model) else {}
        self._registered.clear()
        for module in self.model.modules():
            if module_contains_param(module, FakeStructuredSparsity):
                raise Exception(f"{module} still contains FakeStructuredSparsity parametrizations")
        _remove_record(self.model)
        if self.skipped:
            several = "".join(f"\n  {name}: {why}" for name, why in self.skipped.items())
            warnings.warn(
                f"prune() could not remove all masked units exactly; those that stay are zero:{several}", stacklevel=2
            )
        self.traced = _graph(self.model)
        return self.traced

    def _cut(self, model: nn.Module) -> dict[str, str]:
        record = next((hook for hook in model._forward_hooks.values() if isinstance(hook, InputRecord)), None)
        found = find_inputs(model, record)
        if found is not None:
            return shrink_(model, *found)
        rehearsal = copy.deepcopy(model)
        for one in (rehearsal, model):
            _apply(one, list(self.patterns.items()))
            if left := masked_modules(one):
                raise Exception(
                    f"the model still contains FakeStructuredSparsity parametrizations, in {', '.join(left)}: it was not "
                    "called since prepare(), and no input for it could be guessed. Call it once, then prune(). It is unchanged."
                )
        return {}


def _parameter_names(module: nn.Module) -> list[str]:
    return [name for name, _ in module.named_parameters()]


def _with_bias(module: nn.Module, name: str, holder: Any, prune_bias: bool) -> Callable[[], None]:
    """Applies the mask of a weight to its bias, and returns a function that undoes that."""
    if isinstance(module, ROWS) and name == "weight":
        hide_bias(module, holder, prune_bias)
        return lambda: restore_bias(module, write=False)
    bias = name.replace("weight", "bias")
    if isinstance(module, nn.RNNBase) and prune_bias and module._parameters.get(bias) is not None and bias != name:
        register(module, bias, holder)  # both share one mask
        return lambda: unregister(module, bias, holder)
    return lambda: None


def _remove_record(model: nn.Module) -> None:
    for key, hook in list(model._forward_hooks.items()):
        if isinstance(hook, InputRecord):
            del model._forward_hooks[key]
            model._forward_hooks_with_kwargs.pop(key, None)


def _matches(
    model: nn.Module, patterns: Iterable[tuple[Any, Callable[..., None]]]
) -> Iterator[tuple[Callable[..., None], list[Any]]]:
    """Yields each function with the modules and functions of a match that begins with a masked layer."""
    try:
        nodes_in_order = list(Tracer().trace(model).nodes)
    except Exception:  # a model that torch.fx cannot trace has no matches
        return
    modules = dict(model.named_modules(remove_duplicate=False))
    for node in nodes_in_order:
        for pattern, function in patterns:
            nodes = apply_match(modules, pattern, node, [])
            first = nodes and nodes[0].op == "call_module" and modules[str(nodes[0].target)]
            if nodes and isinstance(first, nn.Module) and module_contains_param(first, FakeStructuredSparsity):
                yield function, [_target(modules, one) for one in nodes if one.op in ("call_module", "call_function")]


def _target(modules: Mapping[str, nn.Module], node: Node) -> Any:
    return modules[str(node.target)] if node.op == "call_module" else node.target


def _apply(model: nn.Module, patterns: list[tuple[Any, Callable[..., None]]]) -> None:
    for function, chained in _matches(model, patterns):
        function(*chained)


def _graph(model: nn.Module) -> Any:
    """Returns the model as a GraphModule, or itself if torch.fx cannot trace it."""
    try:
        made = GraphModule(model, Tracer().trace(model), type(model).__name__)
    except Exception:
        return model
    made.graph.lint()
    made.recompile()
    return made
