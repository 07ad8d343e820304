"""Sums of the squared inputs that each weight is multiplied with, taken while a model runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from threading import Event
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from ._arguments import first_row
from ._layers import DEFAULT_TYPES, Layout, bare_layer, features_axis, is_product
from .targeting import Target

Table = dict[str, dict[str, Tensor]]


@dataclass
class InputSquares:
    """Adds up the squares of the inputs that each weight is multiplied with, in a table, while `listening` is set.

    `valid`, a matrix (batch, position) of bool, leaves positions out, such as padding, of layers that have an input for each.
    """

    table: Table
    listening: Event
    valid: Tensor | None = None

    def called(self, target: Target, attribute: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Adds the inputs of one call of a layer.

        For a layer that is linear in its weight, the sum is the derivative of its summed output by the weight, with squared
        inputs. One output per group is enough, so no layer type needs a special case. Matrices (in, out) are multiplied with
        the input itself.
        """
        layout = target.layout
        if not self.listening.is_set() or not any(is_float(value) for value in (*args, *kwargs.values())):
            return  # a look-up by index multiplies nothing
        if layout.product:
            self.passed(target, slice(None), _only_float(target, args, kwargs))
            return
        last = features_axis(module) == -1
        try:
            if not is_product(module, layout):
                check_linear(module, attribute, args, kwargs)
            inputs = tuple(self._squared(value, last) for value in args)
            named = {key: self._squared(value, last) for key, value in kwargs.items()}
            probe = layout.probe(torch.empty(layout.shape, device="meta"))
            ones = torch.ones(probe.shape, dtype=torch.float32, device=target.weight.device, requires_grad=True)
            with torch.enable_grad(), torch.autocast(target.weight.device.type, enabled=False), _own_graph():
                output = bare_layer(module, {attribute: ones}).forward(*inputs, **named)
                (squares,) = torch.autograd.grad(output.sum(), ones)
        except Exception as error:
            kind = type(module).__name__
            raise ValueError(f"the input norm of {target.name!r} cannot be measured: {kind} is not linear in it") from error
        self._add(target, slice(None), Layout(tuple(probe.shape), layout.flip, layout.groups).matrix(squares))

    def passed(self, target: Target, groups: slice, x: Tensor) -> None:
        """Adds one input of a product with groups of the rows of a weight."""
        if self.listening.is_set():
            self._add(target, groups, self._squared(x, True).reshape(-1, target.layout.cols).sum(0))

    def _squared(self, value: Any, last: bool) -> Any:
        """The squares of a float tensor, with zeros at positions that do not count if its features are the last axis."""
        if not is_float(value):
            return value
        keep = _places(value, self.valid) if last else None
        squares = value.detach().float() ** 2
        return squares if keep is None else squares.masked_fill_(~keep.to(squares.device)[..., None], 0)

    def _add(self, target: Target, groups: slice, squares: Tensor) -> None:
        entry = self.table[target.name]
        if "input_norm" not in entry:
            entry["input_norm"] = squares.new_zeros(target.layout.groups, target.layout.cols)
        entry["input_norm"][groups] += squares


_LINEAR = {kind.forward for kind in DEFAULT_TYPES if isinstance(kind, type) and issubclass(kind, _ConvNd)}
_TOLERANCE = 1e-2  # relative; layers may round their products


def check_linear(module: nn.Module, attribute: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raises ValueError unless a layer is linear in its weight on a sample: it adds up where two weights are added.

    Layers that standardise or round their weight are not. Types of torch are not checked.
    """
    if type(module).forward in _LINEAR:
        return
    weight = getattr(module, attribute).detach()
    other = weight.flatten().roll(1).view(weight.shape).mul(0.5)
    args, kwargs = first_row((args, dict(kwargs)))

    def output(values: Tensor) -> Tensor:
        return bare_layer(module, {attribute: values}).forward(*args, **kwargs)

    with torch.no_grad():
        one, two, both = output(weight), output(other), output(weight + other)
    if not bool((one + two - both).norm() <= _TOLERANCE * (one.norm() + two.norm())):
        raise ValueError(f"{type(module).__name__} changes its weight before it multiplies with it")


def _own_graph() -> torch.autograd.graph.saved_tensors_hooks:
    """Saves tensors for the backward pass also inside a checkpointed block, which would drop them."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _only_float(target: Target, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    found = [value for value in (*args, *kwargs.values()) if is_float(value)]
    if len(found) != 1 or found[0].shape[-1:] != (target.layout.cols,):
        shapes = [tuple(value.shape) for value in found]
        raise ValueError(f"{target.name!r} takes one input with {target.layout.cols} features, not tensors of shape {shapes}")
    return found[0]


def _places(value: Tensor, valid: Tensor | None) -> Tensor | None:
    """`valid` with the axes of a tensor (..., features) before its features; None if the tensor has no such axes."""
    if valid is None:
        return None
    shape = tuple(value.shape[:-1])
    return next((places for places in (valid, valid.mT, valid.flatten()) if tuple(places.shape) == shape), None)


def flat_places(value: Tensor, valid: Tensor) -> Tensor | None:
    """The numbers of the rows (..., features) of a tensor that `valid` keeps; None if its rows are not those positions."""
    keep = _places(value, valid)
    return None if keep is None else keep.flatten().nonzero()[:, 0]
