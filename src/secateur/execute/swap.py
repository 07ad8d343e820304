"""Puts compressed layers in the place of dense ones, and takes out those that the model reads without calling them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from .layers import Compressed
from .restore import places
from .timing import call


def swap_(model: nn.Module, new: dict[int, Compressed], example_inputs: Any) -> set[int]:
    """Puts the compressed layers in place of the dense ones (`new` is keyed by their ids) and runs the model once.

    Some containers read the weights of their layers instead of calling them. Layers that the model does not call become
    dense again; the ids of their compressed layers are returned. If the run raises, every layer becomes dense again.
    """
    spots = [(parent, name, child) for parent, name, child in places(model) if id(child) in new]
    try:
        for parent, name, child in spots:
            parent._modules[name] = new[id(child)]
        with _watched(list(new.values())) as called:
            call(model, example_inputs)
    except BaseException:
        for parent, name, child in spots:
            parent._modules[name] = child
        raise
    ignored = {id(each) for each in new.values()} - called
    for parent, name, child in spots:
        if id(new[id(child)]) in ignored:
            parent._modules[name] = child
    return ignored


@contextmanager
def _watched(layers: list[Compressed]) -> Iterator[set[int]]:
    """Collects the ids of the layers that are called inside the context.

    It replaces `forward` instead of adding hooks, because some containers behave differently when their layers have hooks.
    """
    called: set[int] = set()
    try:
        for layer in layers:

            def forward(input: Tensor, layer: Compressed = layer) -> Tensor:
                called.add(id(layer))
                return Compressed.forward(layer, input)

            layer.__dict__["forward"] = forward
        yield called
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)
