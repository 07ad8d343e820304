"""What a recipe file may hold: one mapping for each stage, with the arguments of the function that the stage calls.

Names and types come from the signatures, so that a new argument of `prune_` is a new field of the stage `prune`.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, reduce
from operator import or_
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import torch
from torch import nn

from .._hints import unknown_argument
from .._tree import nearest
from ..activations import check_gate_values, gate_
from ..arguments import GIVEN_AT_RUN, parameters_of
from ..criteria import Criterion
from ..distill import check_training_values, distill_
from ..execute import compress_
from ..methods import Method
from ..patterns import Pattern
from ..pruning import prune_
from ..reorder import neighbour_pattern, reorder_
from ..settings import Settings
from ..surgery import ShrinkRequest, UnitCriterion, check_request, shrink, shrink_

VERSION = 1


class BadRecipe(ValueError):
    """Raised for a recipe with a field that does not exist, or a value that does not fit."""


@dataclass(frozen=True)
class StageKind:
    """A kind of stage: the function whose arguments it takes, the one that it calls on the model, which it changes, the
    arguments that are given when the recipe runs, and a line about the metrics of its result."""

    signature: Callable[..., Any]
    call: Callable[..., Any]
    gets: tuple[str, ...]
    line: str

    def describe(self, metrics: Mapping[str, Any]) -> str:
        return self.line.format_map(metrics)


KINDS = {
    "shrink": StageKind(
        shrink,
        shrink_,
        ("example_inputs", "data", "loss"),
        "{params_after:,.0f} of {params_before:,.0f} parameters remain ({params:.1%}), and {flops:.1%} of the FLOPs",
    ),
    "reorder": StageKind(
        reorder_,
        reorder_,
        ("data", "loss"),
        "{groups} groups of channels have another order; the pattern keeps {kept_after:.1%} of the score instead of "
        "{kept_before:.1%}",
    ),
    "prune": StageKind(
        prune_, prune_, ("data", "loss"), "{pruned:,} of {total:,} weights in {tensors} tensors are pruned ({sparsity:.1%})"
    ),
    "distill": StageKind(
        distill_,
        distill_,
        ("teacher", "data"),
        "the loss on held-out batches is {after:.4g}, and was {before:.4g} before; {kept_step} steps of training were kept",
    ),
    "gate": StageKind(gate_, gate_, ("data",), "{sparsity:.1%} of the inputs of {gates} layers are zeroed"),
    "compress": StageKind(
        compress_,
        compress_,
        ("example_inputs",),
        "{compressed} of {layers} layers have a sparse format; {bytes_before:,} bytes of weights are now {bytes_after:,}",
    ),
}

# --- from signatures to fields ------------------------------------------------------------------------------------------

_PLAIN = (bool, int, float, str, type(None))
_AS_TEXT = (Criterion, Pattern, Method, UnitCriterion, torch.dtype)


@cache
def fields_of(kind: str) -> dict[str, Any]:
    """The fields of a stage, with the types that a file can hold for them."""
    function = inspect.unwrap(KINDS[kind].signature)
    hints = get_type_hints(function)
    found = {name: _held(hints[name]) for name in parameters_of(function) if name not in GIVEN_AT_RUN - {"data"}}
    return {name: reduce(or_, dict.fromkeys(kinds)) for name, kinds in found.items() if kinds}


def _held(annotation: Any) -> list[Any]:
    """The types in a file for one annotation: plain ones as they are, text for criteria, patterns, methods and functions."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if annotation in _PLAIN or origin is Literal:
        return [annotation]
    if origin in (Union, types.UnionType):
        return [held for each in inner for held in _held(each)]
    if annotation in _AS_TEXT or origin in (Callable, type) or getattr(annotation, "_is_protocol", False):
        return [str]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return [dict[str, reduce(or_, _held(inner[1]))]]
    if isinstance(origin, type) and issubclass(origin, Iterable):
        held = _held(inner[0])
        return [list[reduce(or_, held)]] if held else []
    return []


# --- checks -------------------------------------------------------------------------------------------------------------


def checked(data: Any, where: str = "recipe") -> list[tuple[str, dict[str, Any]]]:
    """The stages of a recipe, as (kind, arguments). Raises BadRecipe with the path of the first thing that is wrong."""
    if not isinstance(data, dict):
        raise BadRecipe(f"{where}: a recipe is a mapping with version and stages, not {_kind(data)}")
    _check_names(where, data, ("version", "stages"))
    if data.get("version") != VERSION or isinstance(data.get("version"), bool):
        raise BadRecipe(f"{where}: version: expected {VERSION}, got {data.get('version')!r}")
    stages = data.get("stages")
    if not isinstance(stages, list) or not stages:
        raise BadRecipe(f"{where}: stages: expected a list of stages such as '- prune: {{sparsity: 0.5}}', got {_kind(stages)}")
    return [_checked_stage(stage, f"{where}: stages[{place}]") for place, stage in enumerate(stages)]


def _checked_stage(stage: Any, path: str) -> tuple[str, dict[str, Any]]:
    if not isinstance(stage, dict) or len(stage) != 1:
        raise BadRecipe(f"{path}: expected one of {', '.join(KINDS)} with its arguments, got {_kind(stage)}")
    ((kind, arguments),) = stage.items()
    _check_names(path, stage, KINDS)
    arguments = {} if arguments is None else arguments
    path = f"{path}.{kind}"
    if not isinstance(arguments, dict):
        raise BadRecipe(f"{path}: expected a mapping of arguments, got {_kind(arguments)}")
    fields = fields_of(kind)
    for name in arguments:
        if name in GIVEN_AT_RUN - {"data"}:
            raise BadRecipe(f"{path}.{name}: {name} is not part of a recipe; it is given when the recipe runs")
        if name not in fields:
            raise BadRecipe(f"{path}.{name}: unknown field; {unknown_argument(kind, str(name), fields)}")
    _check_types(arguments, fields, path)
    _check_values(kind, arguments, path)
    return kind, arguments


def _check_names(path: str, data: Mapping[Any, Any], known: Iterable[str]) -> None:
    for name in data:
        if name not in known:
            raise BadRecipe(f"{path}.{name}: unknown field; expected {' or '.join(known)}.{nearest(str(name), known)}")


def _check_types(arguments: Mapping[str, Any], fields: Mapping[str, Any], path: str) -> None:
    import msgspec

    for name, value in arguments.items():
        if get_origin(fields[name]) is Literal and value not in get_args(fields[name]):
            known = get_args(fields[name])
            raise BadRecipe(f"{path}.{name}: expected {' or '.join(known)}, got {value!r}.{nearest(str(value), known)}")
        try:
            msgspec.convert(value, fields[name])
        except msgspec.ValidationError as error:
            text, _, inside = str(error).partition(" - at ")
            raise BadRecipe(f"{path}.{name}{inside.strip('`').removeprefix('$')}: {_words(text)}") from None


def _check_values(kind: str, arguments: dict[str, Any], path: str) -> None:
    """Raises for values that no model could be pruned with. What depends on the model is checked when the recipe runs."""
    try:
        given = {**_defaults(kind), **resolved(arguments)}
        if kind == "prune":
            names = ("criterion", "pattern", "scope", "sparsity", "count", "spread", "method", "floor")
            Settings.of(*(given[name] for name in names))
        if kind == "shrink":  # repairs need data, which are not here yet
            check_request(ShrinkRequest(**{**given, "reestimate": False, "refit": False}))
        if kind == "gate":
            check_gate_values(given["sparsity"], given["method"], given["spread"])
        if kind == "distill":
            check_training_values(given["steps"], given["lr"], given["warmup"])
        if kind == "reorder":
            neighbour_pattern(given["pattern"])
    except (ValueError, TypeError) as error:
        raise BadRecipe(f"{path}: {error}") from None


def _defaults(kind: str) -> dict[str, Any]:
    parameters = inspect.signature(KINDS[kind].signature).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.default is not parameter.empty}


def _words(text: str) -> str:
    """An error of msgspec in plain words: "Expected `float | null`, got `str`" -> "expected float or null, got str"."""
    text = re.sub(r"`([^`]*)`", lambda match: match[1].replace(" | ", " or "), text)
    text = text.replace("object", "mapping").replace("array", "list")
    return text[:1].lower() + text[1:]


def _kind(value: Any) -> str:
    return "nothing" if value is None else f"{type(value).__name__} {str(value)[:40]!r}"


# --- from text to values ------------------------------------------------------------------------------------------------

_WHERE: dict[str, tuple[Any, type | None, str]] = {
    "loss": (nn.functional, None, "the name of a function in torch.nn.functional, such as cross_entropy"),
    "types": (nn, type, "names of classes in torch.nn, such as Linear"),
    "store": (torch, torch.dtype, "bfloat16 or float16"),
}


def resolved(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with the functions, classes and dtypes that their texts name. Other texts are read by the functions."""
    return {name: _resolved(name, value) if name in _WHERE else value for name, value in arguments.items()}


def _resolved(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_resolved(name, each) for each in value]
    space, kind, expected = _WHERE[name]
    found = getattr(space, value, None) if isinstance(value, str) and not value.startswith("_") else None
    if value is None or (callable(found) if kind is None else isinstance(found, kind)):
        return found
    raise ValueError(f"{name}: {value!r} is not {expected}.{nearest(str(value), dir(space))}")
