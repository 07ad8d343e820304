"""Cuts the state of an optimizer like its parameters, and points its groups at the parameters of the small model."""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..edit import Cuts, owned_tensors, select_indices, without


def sliced_state(optimizer: torch.optim.Optimizer, model: nn.Module, cuts: Cuts) -> dict[str, dict[str, Any]]:
    """The state after the cut, by parameter name. Raises ValueError where it cannot be cut, before anything has changed."""
    names = _names(model, cuts)
    known = [p for group in optimizer.param_groups for p in group["params"] if id(p) in names]
    if not known:
        raise ValueError(
            "optimizer= holds no parameter of this model; pass the optimizer that was made with model.parameters()"
        )
    found: dict[str, dict[str, Any]] = {}
    for parameter in known:
        name = names[id(parameter)]
        found[name] = {
            key: _sliced(name, key, value, parameter, cuts) for key, value in optimizer.state.get(parameter, {}).items()
        }
    return found


def _sliced(name: str, key: str, value: Any, parameter: Tensor, cuts: Cuts) -> Any:
    kept = cuts.tensors.get(name)
    if kept is None or not isinstance(value, Tensor) or value.numel() == 1:
        return value
    if value.shape != parameter.shape:
        raise ValueError(
            f"the optimizer's {key!r} of {name!r} is {tuple(value.shape)} and the parameter {tuple(parameter.shape)}, so it "
            "cannot be cut. Make a new optimizer for the small model instead of passing optimizer=. Nothing has changed."
        )
    return select_indices(value, kept)


def follow_(
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    small: nn.Module,
    state: Mapping[str, dict[str, Any]],
    cuts: Cuts,
    gone: Container[int] = (),
) -> None:
    """Point the groups of the optimizer at the parameters of `small`. Added biases join the group of their layer's weight.

    `model` still has its blocks, unless it is `small` itself. `gone`: the ids of the parameters of removed blocks.
    """
    names, new = _names(model, cuts if model is not small else Cuts()), dict(small.named_parameters(remove_duplicate=False))
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if id(parameter) in gone:
                optimizer.state.pop(parameter, None)
        group["params"] = [p for p in group["params"] if id(p) not in gone]
        own = [names.get(id(p)) for p in group["params"]]
        for old, name in zip(group["params"], own):
            if name in state:
                optimizer.state.pop(old, None)
        group["params"] = [new[name] if name is not None else p for p, name in zip(group["params"], own)]
        group["params"] += [new[b] for b in cuts.added if any(_same_layer(b, name) for name in own if name)]
        for name in own:
            if name is not None and state.get(name):
                optimizer.state[new[name]] = dict(state[name])


def _same_layer(bias: str, name: str) -> bool:
    return bias.rpartition(".")[0] == name.rpartition(".")[0] and name.rpartition(".")[2] == "weight"


def dropped(model: nn.Module, cuts: Cuts) -> set[int]:
    """The ids of the parameters of removed blocks."""
    return _names(model, Cuts()).keys() - _names(model, cuts).keys()


def _names(model: nn.Module, cuts: Cuts) -> dict[int, str]:
    """The names of parameters by id, as they are after the blocks are removed."""
    with without(model, cuts.drop):
        return {key: name for key, (name, tensor) in owned_tensors(model).items() if isinstance(tensor, nn.Parameter)}
