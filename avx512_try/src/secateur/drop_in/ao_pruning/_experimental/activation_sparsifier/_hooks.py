"""The two forward-pre-hooks of `ActivationSparsifier`, and how inputs of several sizes are aggregated.

The hooks are objects rather than closures: they can be pickled, and the copy of a model has hooks of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from .activation_sparsifier import ActivationSparsifier

Aggregation = Callable[[Any, Tensor], Any]


class Aggregate:
    """Adds the input of a layer to what its sparsifier has seen of it."""

    def __init__(self, sparsifier: ActivationSparsifier, name: str) -> None:
        self.sparsifier, self.name = sparsifier, name

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if torch.compiler.is_exporting():  # an exported program has no sparsifier to feed
            return
        config, x = self.sparsifier.data_groups[self.name], _first(args, self.name)
        features = config["features"]
        # normal tensors even under inference_mode: one made there could not be replaced by the mask later
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
                masks = [part.new_ones(()).expand(part.shape) for part in parts]  # `get_mask` gives it memory
                self.sparsifier.state[self.name]["mask"] = masks[0] if features is None else masks
        config["data"] = data[0] if features is None else data


class Sparsify:
    """Multiplies the input of a layer by its mask: the whole of it, or the masked features."""

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
        raise IndexError(f"layer {name!r} was called without positional inputs; the first one is what is sparsified")
    if not isinstance(args[0], Tensor):
        raise TypeError(f"the first input of layer {name!r} is a {type(args[0]).__name__}; only a tensor can be sparsified")
    return args[0]


def _index(feature: Any, x: Tensor) -> Tensor:
    return torch.as_tensor(feature, dtype=torch.long, device=x.device).reshape(-1)


def aggregate(fn: Aggregation, data: Any, x: Tensor) -> Any:
    """`fn(data, x)`, also where their sizes differ, by one rule: what is at position i of an input goes to position i.

    Positions not seen before start from zero, as all do at the first input; positions that `x` does not have stay as they are.
    So a sum stays the exact sum over all samples, and `mean(dim=0)` of it divides by the largest batch. A function that takes
    sizes that differ (`torch.cat`, `data + x.sum(0)`) is simply called; it is tried on small zeros first.
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
    """Whether `fn` works where sizes differ. Tried on 2 and 3: size 1 is broadcast, and one sample would count many times."""
    differ = [a != b for a, b in zip(data.shape, x.shape, strict=True)]
    two, three = ([n if differs else size for differs, size in zip(differ, x.shape, strict=True)] for n in (2, 3))
    return _works(fn, two, three, data.dtype, x.dtype, x.device)


def _works(fn: Aggregation, a: list[int], b: list[int], a_type: torch.dtype, b_type: torch.dtype, device: torch.device) -> bool:
    try:
        fn = copy.deepcopy(fn)  # an object that counts its calls does not count this one
        fn(torch.zeros(a, dtype=a_type, device=device), torch.zeros(b, dtype=b_type, device=device))
    except Exception:  # whatever the user's function raises: the sizes do not fit
        return False
    return True


# A compiled model tries it while it is traced. This mark is all that torch.compiler.assume_constant_result makes, and calling
# that would import the compiler, which takes seconds.
_works._dynamo_marked_constant = True  # type: ignore[attr-defined]
