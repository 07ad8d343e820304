"""`decompress_`: puts dense layers back in place of compressed ones. Also tied weights, and where modules are held."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from .._tree import slots
from ..edit import forget_all_
from .layers import Compressed


def decompress_(model: nn.Module) -> nn.Module:
    """Replaces every compressed layer by its dense layer, in place, and returns the model.

    The weights come back bit for bit (rounded, where `compress_` was given `store=` or `values=`). Weights that were tied are
    tied again.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"decompress_ takes a torch.nn.Module, not {type(model).__name__}")
    if isinstance(model, Compressed):
        raise ValueError("this is a compressed layer by itself; decompress_ takes the model that holds it")
    return restore_(model, None)


def restore_(model: nn.Module, only: Collection[str] | None) -> nn.Module:
    """Puts back the dense layers of the compressed layers with these names, or of all of them if `only` is None."""
    dense = dict(model.named_parameters(remove_duplicate=False))
    shared: dict[tuple[str, ...], list[nn.Parameter]] = {}
    restored: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        if isinstance(module, Compressed) and (only is None or name in only):
            others = [dense[other] for other in module.tied if other in dense] + shared.setdefault(module.tied, [])
            same = next((each for each in others if same_bits(each, module.weight.to(module.dtype))), None)
            restored[id(module)] = layer = module.restored(same)
            if module.tied:
                shared[module.tied].append(layer.weight)  # type: ignore[arg-type]
    for parent, attribute, child in places(model):
        if id(child) in restored:
            parent._modules[attribute] = restored[id(child)]
    if not any(isinstance(module, Compressed) for module in model.modules()):
        forget_all_(model, "compress")
    return model


def same_bits(parameter: Tensor, weight: Tensor) -> bool:
    """Returns True if the tensors are equal bit for bit: -0.0 differs from 0.0, and NaN equals the same NaN."""
    if parameter.shape != weight.shape or parameter.dtype != weight.dtype:
        return False
    kind = torch.int32 if weight.dtype == torch.float32 else torch.int16
    return torch.equal(parameter.detach().contiguous().view(kind), weight.to(parameter.device).contiguous().view(kind))


def ties(model: nn.Module) -> dict[int, tuple[str, ...]]:
    """Returns all names of each weight that several modules share, by the id of the weight.

    Modules that shared it before they were compressed count too.
    """
    weights = dict(model.named_parameters(remove_duplicate=False))
    before = {layer.tied for layer in model.modules() if isinstance(layer, Compressed)}
    found = {id(weights[name]): names for names in before for name in names if name in weights}
    return {id(slot.tensor): (slot.name, *slot.also) for slot in slots(model) if len(slot.owners) > 1} | found


def places(model: nn.Module) -> list[tuple[nn.Module, str, nn.Module]]:
    """Returns (parent, attribute name, child) for every place in the model that holds a module."""
    parents = {id(module): module for module in model.modules()}.values()
    return [(parent, name, child) for parent in parents for name, child in parent._modules.items() if child is not None]
