"""Configs: the numbers in them, copies with other numbers, and the model that a class builds from such a copy."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

Place = tuple[str | int, ...]  # attributes from the config down to a number


def numbers_of(config: Any, above: Place = ()) -> list[Place]:
    """Numbers, numbers in lists, what is None (a size that follows from another), and those of configs inside."""
    found: list[Place] = []
    for name, value in vars(config).items():
        if name.startswith("_"):
            continue
        if value is None or type(value) in (int, float):
            found.append((*above, name))
        elif type(value) in (list, tuple):
            found += [(*above, name, i) for i, item in enumerate(value) if type(item) is int]
        elif hasattr(value, "to_dict") and len(above) < 2:
            found += numbers_of(value, (*above, name))
    return found


def number_at(config: Any, place: Place) -> Any:
    for part in place:
        config = config[part] if isinstance(part, int) else vars(config)[part]
    return config


def with_numbers(config: Any, changes: Mapping[Place, Any]) -> Any:
    """A copy of the config with these numbers."""
    made = copy.deepcopy(config)
    for place, value in changes.items():
        *path, last = place if not isinstance(place[-1], int) else place[:-1]
        owner = number_at(made, tuple(path))
        if isinstance(place[-1], int):
            held = vars(owner)[last]
            value = type(held)(value if i == place[-1] else item for i, item in enumerate(held))
        vars(owner)[last] = value
    return made


def built_from(kind: type[nn.Module], config: Any) -> nn.Module:
    """What a class builds from a config; its weights take no memory. Raises whatever the class raises."""
    log = logging.getLogger("transformers")
    level = log.level
    log.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]), _EmptyIsMeta():
            warnings.simplefilter("ignore")
            return kind(copy.deepcopy(config))
    finally:
        log.setLevel(level)


class _EmptyIsMeta(TorchFunctionMode):
    """Layers allocate their weights with torch.empty; everything else, such as a table of frequencies, is computed."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)
