"""The one registry of axis roles: how the weight of a layer is seen as a matrix (outputs, inputs x kernel).

Everything that ranks or folds works on that matrix, so no other file knows a layer type.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor, nn

# Layer types whose weight does not have its outputs on axis 0 and its inputs on axis 1.
_INPUT_FIRST: set[type[nn.Module]] = {nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d}


def input_first(*types: type[nn.Module]) -> None:
    """Say that these layer types store their weight as (in, out, ...), like `nn.ConvTranspose2d`."""
    _INPUT_FIRST.update(types)


@dataclass(frozen=True)
class Layout:
    """How one tensor maps to its matrix, and back.

    `span` columns belong to one input channel (the kernel size), and the rows come in `groups` equal parts that read
    different inputs (grouped convolution). A vector is one row, or, `tall`, one column.
    """

    shape: tuple[int, ...]
    flip: bool = False
    groups: int = 1
    tall: bool = False

    @property
    def span(self) -> int:
        return math.prod(self.shape[2:])

    @property
    def rows(self) -> int:
        if not self.flip:
            return self.shape[0] if len(self.shape) > 1 or (self.shape and self.tall) else 1
        return self.shape[1] * self.groups

    @property
    def cols(self) -> int:
        if not self.flip:
            return math.prod(self.shape[1:] if self.rows != 1 or self.tall else self.shape)  # also of a shard without rows
        return math.prod(self.shape) // self.rows if self.rows else 0

    def matrix(self, tensor: Tensor) -> Tensor:
        """The tensor as (rows, cols): a view where memory allows, a copy otherwise."""
        if not self.flip:
            return tensor.reshape(self.rows, self.cols)
        per_group = tensor.reshape(self.groups, self.shape[0] // self.groups, self.shape[1], self.span)
        return per_group.transpose(1, 2).reshape(self.rows, self.cols)

    def restore(self, matrix: Tensor) -> Tensor:
        """A matrix (rows, cols) back in the tensor's own shape."""
        if not self.flip:
            return matrix.reshape(self.shape)
        per_group = matrix.reshape(self.groups, self.shape[1], self.shape[0] // self.groups, self.span)
        return per_group.transpose(1, 2).reshape(self.shape)

    def probe(self, tensor: Tensor) -> Tensor:
        """The tensor cut down to one output per group: enough to see every input once."""
        return tensor[:, :1] if self.flip else tensor[: self.groups]


def layout_of(module: nn.Module, shape: tuple[int, ...], *, tall: bool = False) -> Layout:
    """The layout of a parameter of this shape in this module; `tall` for a vector that is sharded along it."""
    flip = len(shape) > 1 and any(isinstance(module, kind) for kind in _INPUT_FIRST)
    groups = vars(module).get("groups", 1)
    return Layout(tuple(shape), flip, groups if isinstance(groups, int) and len(shape) > 2 else 1, tall and len(shape) == 1)


def features_axis(module: nn.Module) -> int:
    """Where the features of a layer's input are: last, or before the axes that the kernel of a convolution covers."""
    weight = getattr(module, "weight", None)
    return 1 - max(weight.ndim, 2) if isinstance(weight, Tensor) else -1
