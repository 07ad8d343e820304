"""The results of a model: which outputs must keep their shape."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from typing import Any

from torch import Tensor

from ..edit import tensors_inside

Outputs = Callable[[Any], Any]


def main_outputs(result: Any) -> Any:
    """Returns the part of a result that must keep its shape.

    For a mapping or dataclass with a tensor "logits" this is that tensor. For other mappings and dataclasses, except plain
    dicts, it is the tensors that they hold directly, without caches and lists of hidden states. Else it is the whole result.
    """
    fields = fields_of(result)
    if isinstance(fields.get("logits"), Tensor):
        return fields["logits"]
    if not fields or type(result) in (dict, OrderedDict):
        return result
    direct = [v for v in fields.values() if isinstance(v, Tensor)]
    return direct or list(fields.values())


def fields_of(result: Any) -> Mapping[Any, Any]:
    """Returns the items of a mapping or the fields of a dataclass; an empty mapping for other results."""
    if is_dataclass(result) and not isinstance(result, type | Mapping):
        return vars(result)
    return result if isinstance(result, Mapping) else {}


def output_shapes(result: Any, outputs: Outputs = main_outputs) -> list[tuple[int, ...]]:
    """Returns the shapes of the outputs that must keep their shape."""
    return [tuple(t.shape) for t in tensors_inside(outputs(result))]
