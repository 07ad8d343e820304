"""Gates in a manifest: each as plain values, and a mask of features as the ranges that stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .._layers import input_size
from ..activations import Gates
from .files import BadFile
from .manifest import indices, ranges

_MOST = 1 << 24  # features of a layer with a gate
_LARGEST = torch.finfo(torch.float64).max


def gates_of(model: nn.Module) -> dict[str, dict[str, Any]]:
    """The gates of a model, by the name of their layer. A cut may have changed the sizes of layers since they were made."""
    data = gates.state_dict() if (gates := _own(model)) else {}
    for name, entry in data.items():
        entry["features"] = input_size(model.get_submodule(name)) or entry["features"]
        if isinstance(entry["mask"], Tensor):
            entry["mask"] = ranges(entry["mask"].nonzero().view(-1).tolist())
    return data


def read_gates(data: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The gates of a manifest, as `Gates.load` takes them. Raises BadFile for values that `gates_of` never writes."""
    found = {}
    for name, entry in data.items():
        if not isinstance(entry, dict):
            raise BadFile(f"the gate of {name!r} is not described as one")
        found[name] = dict(entry)
        axis, features, mask = entry.get("axis"), entry.get("features"), entry.get("mask")
        size = features if type(features) is int else 0
        calibrated = 0.0 if entry.get("calibrated") is None else entry["calibrated"]
        numbers = [entry.get("sparsity"), entry.get("threshold"), calibrated, entry.get("weights")]
        if not all(type(n) in (int, float) and -_LARGEST <= n <= _LARGEST for n in numbers):  # NaN is not
            raise BadFile(f"the gate of {name!r} holds something else than finite numbers")
        if not 0 <= calibrated <= 1 or type(entry["weights"]) is not int or entry["weights"] < 0:
            raise BadFile(f"the gate of {name!r} has a number of weights, or a share of zeros, that no layer has")
        found[name]["threshold"] = float(entry["threshold"])
        if not 0 <= entry["sparsity"] < 1:
            raise BadFile(f"the gate of {name!r} has a sparsity of {entry['sparsity']:g}; it must be from 0 to below 1")
        if type(axis) is not int or not -8 < axis < 0 or not 0 <= size <= _MOST or not isinstance(features, int | None):
            raise BadFile(f"the gate of {name!r} has an axis or a number of features that no layer has")
        if mask is not None:
            found[name]["mask"] = torch.zeros(size, dtype=torch.bool)
            found[name]["mask"][indices(mask, size, name, [size]) if mask != "" else []] = True
    return found


@contextmanager
def attached(model: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Gives the model these gates instead of those it has, and checks that they fit, before the block.

    If they do not fit, or the block raises, all hooks of the model are as before.
    """
    kinds = "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"
    tables: list[dict[int, Any]] = [vars(module)[kind] for module in model.modules() for kind in kinds]
    before = [dict(table) for table in tables]
    if own := _own(model):
        own.undo_()
    try:
        try:
            Gates.load(model, state)
        except ValueError as error:
            raise BadFile(f"the gates of the file do not fit: {error}") from None
        yield
    except BaseException:
        for table, hooks in zip(tables, before, strict=True):
            table.clear()
            table.update(hooks)
        raise


def _own(model: nn.Module) -> Gates | None:
    try:
        return Gates.of(model)
    except ValueError:  # it has none
        return None
