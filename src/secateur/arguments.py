"""The arguments of a call as plain data, which a recipe file and the record of a model can hold."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache
from numbers import Integral, Real
from typing import Any

import torch
from torch import nn

from .budgets import ByLoss, as_spread
from .criteria import NAMED, Criterion
from .methods import Method, as_method
from .patterns import Pattern

Arguments = dict[str, Any]
# What a recipe does not hold: it is given when the recipe runs, or has no influence on the result.
GIVEN_AT_RUN = frozenset({"model", "example_inputs", "data", "teacher", "optimizer", "pruner", "keep_dense"})


def plain_arguments(function: Callable[..., Any], given: Mapping[str, Any], *, loss_at_run: bool = True) -> Arguments | str:
    """The arguments that differ from the defaults of the function, as plain data, or the reason why a file cannot hold one.

    A loss is held by its name in `torch.nn.functional`. Another function is left out if it is given when the recipe runs.
    """
    found: Arguments = {}
    for name, default in _defaults(function).items():
        value = given[name]
        if name == "loss" and (loss_at_run or _functional_name(value)):
            value = _functional_name(value)
        if value is not default and not (type(value) is type(default) and value == default):
            try:
                found[name] = _plain(value)
            except ValueError:
                shown = getattr(value, "__qualname__", None) or str(value)
                return f"{name}={' '.join(shown.split())[:80]} is a value that a file cannot hold"
    return found


@cache
def _defaults(function: Callable[..., Any]) -> dict[str, Any]:
    return {name: one.default for name, one in parameters_of(function).items() if name not in GIVEN_AT_RUN}


def parameters_of(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters of a function, without process groups: those are given when a recipe runs."""
    return {name: one for name, one in inspect.signature(function).parameters.items() if one.annotation != "Group | None"}


def _functional_name(loss: Any) -> str | None:
    """The name of a loss in `torch.nn.functional`, or None if it is another function."""
    name = getattr(loss, "__name__", "")
    return name if name and getattr(nn.functional, name, None) is loss else None


def _plain(value: Any) -> Any:
    """The value as plain data that reads back as an equal value. Raises ValueError if there is none."""
    match value:
        case None | bool() | str():
            return value
        case Integral():
            return int(value)
        case Real():
            return float(value)
        case Pattern():
            return str(value)
        case Criterion() if Criterion.parse(str(value)) == value:
            return next((name for name, known in NAMED.items() if known == value), str(value))
        case Method() if as_method(str(value)) == value:
            return str(value)
        case ByLoss():
            return str(value)
        case torch.dtype():
            return str(value).removeprefix("torch.")
        case type() if getattr(nn, value.__name__, None) is value:
            return value.__name__
        case Mapping():
            return {str(name): _plain(one) for name, one in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_plain(one) for one in value]
    text = getattr(value, "__qualname__", None) or str(value)
    same = as_spread(text)
    if same == value or getattr(same, "__qualname__", None) == text:
        return text
    raise ValueError
