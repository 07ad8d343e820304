"""Compressed layers in files: the weight itself, with its zeros packed, and the name of the format; buffers are made again.

Buffers are laid out for kernels that believe every number in them, and may be laid out otherwise in a later version or for
another machine. So a file never holds them: it holds what any reader understands, and what a damaged one cannot turn into a
wild address.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from .._tree import nearest
from ..execute.formats import FORMATS, find_format
from ..execute.layers import Compressed, why_not
from ..execute.restore import places, same_bits, ties
from .files import CODES, BadFile
from .manifest import Layer

State = dict[str, Tensor | Compressed]


def layers_of(model: nn.Module) -> dict[str, Compressed]:
    """The compressed layers under all their paths."""
    found = {path: m for path, m in model.named_modules(remove_duplicate=False) if isinstance(m, Compressed)}
    if "" in found:
        raise ValueError("this is a compressed layer by itself; save the model that holds it, or decompress it first")
    return found


def listed(model: nn.Module) -> dict[str, Layer]:
    """What the manifest says of each compressed layer."""
    return {path: Layer(each.form, tuple(each.options), CODES[each.dtype]) for path, each in layers_of(model).items()}


def dense_view(model: nn.Module) -> tuple[State, dict[str, str]]:
    """The state dict with a `weight` in place of the buffers of each compressed layer, and other names of those weights.

    A compressed layer whose weight is that of another one, bit for bit, and was tied to it, is its other name.
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
    """By the id of the dense layer that it will stand for, each compressed layer; the model is not touched.

    `weight(path)` reads the weight of a layer. Raises BadFile unless the layer can be compressed so, and holds it exactly.
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
            dense = value.to(own.dtype) if own.is_meta else value.to(own)
            stand_in._parameters = {**layer._parameters, "weight": nn.Parameter(dense, own.requires_grad)}
            found[id(layer)] = _exact(path, said, stand_in, tied.get(id(own), ()), value)
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
    """Each in its place, with the bias that the dense layer has by now."""
    for parent, name, child in places(model):
        if id(child) in made:
            new = made[id(child)]
            new._parameters["bias"] = child._parameters.get("bias")
            parent._modules[name] = new.train(child.training)
