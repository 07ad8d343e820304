"""Compressed layers in files: a file holds the packed weight and the name of the format; buffers are made again on loading.

Kernels use the numbers in their buffers as addresses without checks, and a later version may lay buffers out differently. So a
file holds the weight itself, which any reader understands, and a damaged file cannot cause a wrong address.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from .._tree import nearest
from ..execute import FORMATS, Compressed, find_format, places, same_bits, ties, why_not
from .files import CODES, BadFile
from .manifest import Layer

State = dict[str, Tensor | Compressed]


def layers_of(model: nn.Module) -> dict[str, Compressed]:
    """The compressed layers of a model, by path; a shared layer is listed under each of its paths."""
    found = {path: m for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Compressed)}
    if "" in found:
        raise ValueError("this is a compressed layer by itself; save the model that holds it, or decompress it first")
    return found


def listed(model: nn.Module) -> dict[str, Layer]:
    """The entries of the manifest for the compressed layers."""
    return {path: Layer(each.form, tuple(each.options), CODES[each.dtype]) for path, each in layers_of(model).items()}


def dense_view(model: nn.Module) -> tuple[State, dict[str, str]]:
    """The state dict with one entry `weight` for each compressed layer instead of its buffers, and the tied names of those.

    A compressed layer that was tied to another tensor, and still equals it bit for bit, is stored as its other name.
    """
    packed = layers_of(model)
    state: State = {}
    for name, value in model.state_dict().items():
        path, _, own = name.rpartition(".")
        layer = packed.get(path)
        if layer is None or own in layer._parameters:
            state[name] = value
        else:
            state[f"{path}.weight"] = layer
    order = {name: at for at, name in enumerate(state)}
    called: dict[int, set[str]] = {}
    for name, held in state.items():
        called.setdefault(id(held), set()).add(name)
    tied: dict[str, str] = {}
    for name, layer in reversed(list(state.items())):
        if isinstance(layer, Compressed):
            near = sorted((called[id(layer)] | {*layer.tied}) & state.keys() - {name}, key=order.__getitem__)
            if (twin := next((n for n in near if _is_one(layer, state[n])), None)) is not None:
                tied[name] = twin
                del state[name]
    return state, tied


def _is_one(layer: Compressed, other: Tensor | Compressed) -> bool:
    return other is layer or same_bits(layer.weight, other.weight if isinstance(other, Compressed) else other)


def made_again(model: nn.Module, layers: Mapping[str, Layer], weight: Callable[[str], Tensor]) -> dict[int, Compressed]:
    """Makes the compressed layers and returns them by the id of the dense layer that each will replace.

    The model is not changed. `weight(path)` reads the weight of a layer. Raises BadFile if a layer cannot hold its weight
    exactly in the format that was saved.
    """
    found: dict[int, Compressed] = {}
    tied = ties(model)
    for path, said in layers.items():
        layer = model.get_submodule(path)
        if reason := why_not(layer):
            raise BadFile(f"{path!r} is compressed in the file and cannot be here: {reason}")
        form = find_format(said.format)
        if form is None or said.options not in form.allowed:
            raise BadFile(
                f"{path!r} is in the format {said.format[:40]!r} with options {list(said.options)}, which is not known here; "
                f"load it with as_='dense', and compress it again.{nearest(said.format[:40], FORMATS)}"
            )
        if id(layer) not in found:
            value, own = weight(path), layer._parameters["weight"]
            assert own is not None
            stand_in = copy.copy(layer)
            dtype = value.dtype if form.values is not None else own.dtype  # what is rounded again must not be rounded before
            dense = value.to(dtype) if own.is_meta else value.to(own.device, dtype)
            stand_in._parameters = {**layer._parameters, "weight": nn.Parameter(dense, own.requires_grad)}
            found[id(layer)] = _exact(path, said, stand_in, tied.get(id(own), ()), value)
            found[id(layer)].dtype = own.dtype
    return found


def _exact(path: str, said: Layer, layer: nn.Module, tied: tuple[str, ...], value: Tensor) -> Compressed:
    store = None if value.dtype == layer.weight.dtype else value.dtype
    try:
        made = Compressed(layer, FORMATS[said.format], said.options, tied, store)
        right = same_bits(value, made.weight)
    except (ValueError, RuntimeError, IndexError, TypeError, ArithmeticError) as error:
        raise BadFile(f"{path!r} cannot be held in the format {said.format!r}: {' '.join(str(error).split())[:200]}") from None
    if not right:
        raise BadFile(f"{path!r} cannot be held exactly in the format {said.format!r}")
    return made


def put_(model: nn.Module, made: Mapping[int, Compressed]) -> None:
    """Puts each compressed layer in its place, with the bias of the dense layer, which is filled by now."""
    for parent, name, child in places(model):
        if id(child) in made:
            new = made[id(child)]
            new._parameters["bias"] = child._parameters.get("bias")
            parent._modules[name] = new.train(child.training)
