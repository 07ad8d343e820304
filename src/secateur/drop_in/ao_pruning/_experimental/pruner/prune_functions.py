"""Functions that remove the masked units of a layer and adapt the layers that follow it, in place.

`prune` does not need them; they are meant for patterns of your own. Activations, pools and other functions among the arguments
are not changed: they say what lies between the layers.
"""

from __future__ import annotations

import operator
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...sparsifier.utils import parts
from ._inputs import find_inputs
from ._shrink import shrink_
from .parametrization import bias_hooks, masked_tensors, remove_masks

# --- helpers for functions of your own --------------------------------------------------------------------------------------


def _remove_bias_handles(module: nn.Module) -> None:
    """Removes the hooks that add the bias of a prepared layer."""
    for key in bias_hooks(module):
        del module._forward_hooks[key]


def _get_adjusted_next_layer_bias(next_layer: Any, pruned_biases: Tensor, mask: Tensor) -> nn.Parameter:
    """Returns the bias of the next layer after the units that `mask` drops, with these constant values, are removed."""
    if not isinstance(next_layer, nn.Linear | nn.Conv2d):
        raise NotImplementedError(f"{type(next_layer).__name__} is not supported; nn.Linear and nn.Conv2d are")
    masked = "weight" in masked_tensors(next_layer)
    weight: Tensor = parts(next_layer, "weight").original if masked else next_layer.weight
    bias = getattr(next_layer, "_bias", None) if masked else next_layer.bias
    columns = weight[:, ~mask].flatten(1).reshape(len(weight), int((~mask).sum()), -1).sum(2)
    added = columns @ pruned_biases
    return nn.Parameter(added if bias is None else added + bias)


def _prune_module_bias(module: Any, mask: Tensor) -> None:
    """Keeps the entries of a prepared layer's bias that belong to kept rows."""
    bias = getattr(module, "_bias", None)
    bias = module.bias if bias is None else bias
    if bias is not None:
        module.bias = nn.Parameter(bias.detach()[mask], bias.requires_grad)
    if hasattr(module, "_bias"):
        del module._bias


def _propagate_module_bias(module: Any, mask: Tensor) -> Tensor | None:
    """Cuts the bias of a prepared layer and returns the removed entries, or None if it had no bias."""
    own = getattr(module, "_bias", None)
    gone = None if own is None else own.detach()[~mask]
    bias = own if module.bias is None else module.bias
    if bias is not None:
        module.bias = nn.Parameter(bias.detach()[mask], bias.requires_grad)
    if hasattr(module, "_bias"):
        del module._bias
    return gone


def _prune_rows(layer: Any) -> Tensor:
    mask = masked_tensors(layer)["weight"].bool()
    bias = layer._parameters.pop("_bias", None)
    remove_masks(layer, write=True)
    with torch.no_grad():
        layer.weight = nn.Parameter(layer.weight[mask], layer.weight.requires_grad)
    if bias is not None:
        layer.register_parameter("_bias", bias)
    return mask


def _prune_linear_helper(linear: nn.Linear) -> Tensor:
    """Cuts the rows of a masked linear layer, except its bias, and returns the mask."""
    mask = _prune_rows(linear)
    linear.out_features = linear.weight.shape[0]
    return mask


def _prune_conv2d_helper(conv2d: nn.Conv2d) -> Tensor:
    """Cuts the filters of a masked convolution, except its bias, and returns the mask."""
    mask = _prune_rows(conv2d)
    conv2d.out_channels = conv2d.weight.shape[0]
    return mask


# --- chains of layers --------------------------------------------------------------------------------------------------------


class _Function(nn.Module):
    """A function between layers as a module. Its other arguments are unknown, so a pool is assumed to have no padding."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        if self.function is operator.getitem:
            return x[0]
        if self.function is torch.flatten:
            return torch.flatten(x, 1)
        return x if self.function in (F.avg_pool2d, F.max_pool2d) else self.function(x)


def _cut(first: nn.Module, *rest: Any) -> None:
    """Removes the masked units of the first layer from a chain of modules and functions."""
    if not masked_tensors(first):
        return
    modules = [one if isinstance(one, nn.Module) else _Function(one) for one in (first, *rest) if one is not None]
    model = nn.Sequential(*modules)
    found = find_inputs(model, None)
    if found is None:
        names = " -> ".join(type(one).__name__ for one in modules)
        raise RuntimeError(f"{names} cannot be cut, because it does not run on any of the inputs tried for its first layer")
    for name, why in shrink_(model, *found, only=[first]).items():
        warnings.warn(f"{name.partition('.')[2]} of {first}: {why}", stacklevel=3)


def prune_linear(linear: nn.Linear) -> None:
    _cut(linear)


def prune_linear_linear(linear1: nn.Linear, linear2: nn.Linear) -> None:
    _cut(linear1, linear2)


def prune_linear_activation_linear(linear1: nn.Linear, activation: Any, linear2: nn.Linear) -> None:
    _cut(linear1, activation, linear2)


def prune_conv2d(conv2d: nn.Conv2d) -> None:
    _cut(conv2d)


def prune_conv2d_padded(conv2d_1: nn.Conv2d) -> None:
    """Writes the zeros into the weight, which keeps its size: zero padding turns a constant bias into a varying one."""
    remove_masks(conv2d_1, write=True)


def prune_conv2d_conv2d(conv2d_1: nn.Conv2d, conv2d_2: nn.Conv2d) -> None:
    _cut(conv2d_1, conv2d_2)


def prune_conv2d_activation_conv2d(conv2d_1: nn.Conv2d, activation: Any, conv2d_2: nn.Conv2d) -> None:
    _cut(conv2d_1, activation, conv2d_2)


def prune_conv2d_pool_activation_conv2d(c1: nn.Conv2d, pool: Any, activation: Any, c2: nn.Conv2d) -> None:
    _cut(c1, pool, activation, c2)


def prune_conv2d_activation_pool_conv2d(c1: nn.Conv2d, activation: Any, pool: Any, c2: nn.Conv2d) -> None:
    _cut(c1, activation, pool, c2)


def prune_conv2d_pool_flatten_linear(conv2d: nn.Conv2d, pool: nn.Module, flatten: Any, linear: nn.Linear) -> None:
    if linear.in_features % conv2d.out_channels:
        raise AssertionError(
            f"the linear layer has {linear.in_features} features, no multiple of the {conv2d.out_channels} channels before it"
        )
    _cut(conv2d, pool, flatten or torch.flatten, linear)


def prune_lstm_output_linear(lstm: nn.LSTM, getitem: Any, linear: nn.Linear) -> None:
    prune_lstm_output_layernorm_linear(lstm, getitem, None, linear)


def prune_lstm_output_layernorm_linear(lstm: nn.LSTM, getitem: Any, layernorm: nn.LayerNorm | None, linear: nn.Linear) -> None:
    """Cuts hidden units. With a layer norm the result is not exact, as in torch, and a warning says so."""
    _cut(lstm, operator.getitem, layernorm, linear)
