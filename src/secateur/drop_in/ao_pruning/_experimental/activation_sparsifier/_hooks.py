"""The two forward-pre-hooks of `ActivationSparsifier`, and the aggregation of inputs of different sizes.

The hooks are objects and not closures, so that they can be pickled and a copy of a model has hooks of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Aggregation = Callable[[Any, Tensor], Any]


class Aggregate:
    """Aggregates the inputs of a layer in its sparsifier."""

    def __init__(self, sparsifier: Any, name: str) -> None:
        self.sparsifier, self.name = sparsifier, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # An exported program has no sparsifier. In torch 2.11 is_exporting() is True under torch.compile too; the flag is not.
        if torch.compiler._is_exporting_flag:
            return
        config, x = self.sparsifier.data_groups[self.name], _first(args, self.name)
        features = config["features"]
        # normal tensors even under inference_mode, because the mask could not replace an inference tensor later
        with torch.inference_mode(False), torch.no_grad():
            x = x.detach()
            parts = [x] if features is None else [x.index_select(config["feature_dim"], _index(f, x)) for f in features]
            seen = config.get("data")
            fresh = seen is None
            if fresh:
                seen = [torch.zeros_like(part) for part in parts]
            elif features is None:
                seen = [seen]
            data = [aggregate(config["aggregate_fn"], old, part) for old, part in zip(seen, parts, strict=True)]
            if fresh:
                masks = [part.new_ones(()).expand(part.shape) for part in parts]  # expanded; `get_mask` allocates it
                self.sparsifier.state[self.name]["mask"] = masks[0] if features is None else masks
        config["data"] = data[0] if features is None else data


class Sparsify:
    """Multiplies the input of a layer by its mask, or only the masked features of the input."""

    def __init__(self, name: str, mask: Any, features: Any, feature_dim: Any) -> None:
        self.name, self.mask, self.features, self.feature_dim = name, mask, features, feature_dim

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        x = _first(args, self.name)
        if self.features is None:
            return (x * self.mask.to(device=x.device, dtype=x.dtype), *args[1:])
        out = x.clone()
        for feature, mask in zip(self.features, self.mask, strict=True):
            index = _index(feature, x)
            part = out.index_select(self.feature_dim, index)
            out.index_copy_(self.feature_dim, index, part * mask.to(device=x.device, dtype=x.dtype))
        return (out, *args[1:])


def _first(args: tuple[Any, ...], name: str) -> Tensor:
    if not args:
        raise IndexError(f"layer {name!r} was called without positional inputs; only the first positional input is sparsified")
    if not isinstance(args[0], Tensor):
        raise TypeError(f"the first input of layer {name!r} is a {type(args[0]).__name__}; only a tensor can be sparsified")
    return args[0]


def _index(feature: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(feature, dtype=torch.long, device=x.device).reshape(-1)


def aggregate(fn: Aggregation, data: Any, x: Tensor) -> Any:
    """Returns `fn(data, x)`, also if their sizes differ: position i of an input is aggregated into position i of the data.

    New positions start from zero, as all positions do at the first input, and positions that `x` does not have stay as they
    are. So a sum is the exact sum over all samples, and its `mean(dim=0)` divides by the largest batch. A function that accepts
    different sizes (`torch.cat`, `data + x.sum(0)`) is called directly; a call with small zeros finds that out.
    """
    if not isinstance(data, Tensor):
        return fn(data, x)
    data = data.to(x.device)
    if data.shape == x.shape or data.dim() != x.dim() or _takes_any_sizes(fn, data, x):
        return fn(data, x)
    grown = data.new_zeros([max(sizes) for sizes in zip(data.shape, x.shape, strict=True)])
    grown[tuple(map(slice, data.shape))] = data
    here = tuple(map(slice, x.shape))
    grown[here] = fn(grown[here], x)
    return grown


def _takes_any_sizes(fn: Aggregation, data: Tensor, x: Tensor) -> bool:
    """Returns whether `fn` accepts different sizes. Tries 2 and 3, because size 1 would be broadcast."""
    differ = [a != b for a, b in zip(data.shape, x.shape, strict=True)]
    two, three = ([n if differs else size for differs, size in zip(differ, x.shape, strict=True)] for n in (2, 3))
    return _works(fn, two, three, data.dtype, x.dtype, x.device)


def _works(fn: Aggregation, a: list[int], b: list[int], a_type: torch.dtype, b_type: torch.dtype, device: torch.device) -> bool:
    try:
        fn = copy.deepcopy(fn)  # so that an object which counts its calls does not count this one
        fn(torch.zeros(a, dtype=a_type, device=device), torch.zeros(b, dtype=b_type, device=device))
    except Exception:  # any error of the user's function: the sizes do not fit
        return False
    return True


# Lets torch.compile evaluate the function while tracing. torch.compiler.assume_constant_result sets the same attribute, but
# importing it imports the compiler, which takes seconds.
_works._dynamo_marked_constant = True  # type: ignore[attr-defined]
