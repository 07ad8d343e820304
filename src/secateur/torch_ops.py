"""The operators of compressed layers, `torch.ops.secateur`. They are registered when secateur is imported, so that
`torch.export.load` finds them; the functions that compute them are imported with `secateur.execute` at the first call."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

_PACKED = "str format, int rows, int columns, int[] options"
_SIGNATURES = {
    "linear": f"(Tensor x, Tensor[] buffers, Tensor? bias, {_PACKED}) -> Tensor",
    "conv": f"(Tensor x, Tensor[] buffers, Tensor? bias, {_PACKED}, int[] window) -> Tensor",
    # Versions with gradients for x and bias are separate operators, because autograd's overhead is as long as a small layer.
    "linear_grad": f"(Tensor x, Tensor[] buffers, Tensor? bias, {_PACKED}) -> Tensor",
    "conv_grad": f"(Tensor x, Tensor[] buffers, Tensor? bias, {_PACKED}, int[] window) -> Tensor",
    "embedding": f"(Tensor x, Tensor[] buffers, {_PACKED}) -> Tensor",
    "unpack": f"(Tensor[] buffers, {_PACKED}) -> Tensor",
}


@lru_cache
def _function(name: str, part: str) -> Callable[..., Any]:
    from .execute import OPERATORS

    return getattr(OPERATORS[name], part)


def _later(name: str, part: str) -> Callable[..., Any]:
    """Returns a function that looks up one part of an operator (its kernel, its backward, ...) when it is called."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return _function(name, part)(*args, **kwargs)

    return call


_LIBRARY = torch.library.Library("secateur", "DEF")
for _name, _signature in _SIGNATURES.items():
    _LIBRARY.define(f"{_name}{_signature}", tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(_name, _later(_name, "run"), "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _later(_name, "fake"), "Meta")  # register_fake would read source files, a millisecond each
for _name in ("linear_grad", "conv_grad"):
    _parts = _later(_name, "backward"), _later(_name, "setup_context")
    torch.library.register_autograd(f"secateur::{_name}", _parts[0], setup_context=_parts[1], lib=_LIBRARY)
