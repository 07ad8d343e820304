"""Cuts the state of an optimizer like its parameters, and points its groups at the parameters of the small model.

A `Pruner` that is attached to the optimizer follows too.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..edit import Cuts, Indices, owned_tensors, select_indices, without
from ..following import hook_owners
from ..pruner import Pruner


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


class CutPruner(NamedTuple):
    """A pruner that follows the cut, and for each of its tensors that is left: the parameter, its name, the kept indices."""

    pruner: Pruner
    left: dict[str, tuple[Tensor, str | None, Indices]]


def cut_pruners(optimizer: torch.optim.Optimizer | None, model: nn.Module, cuts: Cuts, *, in_place: bool) -> list[CutPruner]:
    """The pruners that are attached to the optimizer. Raises ValueError, before anything has changed, if one cannot follow."""
    if optimizer is None:
        return []
    names, gone, found = _names(model, cuts), dropped(model, cuts), []
    for pruner in hook_owners(optimizer, Pruner):
        pruner.check_cut(blocks=bool(cuts.drop))
        if not in_place and getattr(pruner.model, "_orig_mod", pruner.model) is not model:
            raise ValueError(
                "a pruner that is attached to optimizer= was made for another module than the one to shrink, so it cannot "
                "move to the small copy. Use shrink_, or call the pruner's finish() first. Nothing has changed."
            )
        left = {}
        for name, tensor in pruner.tensors().items():
            new = names.get(id(tensor))
            if id(tensor) not in gone:
                left[name] = tensor, new, cuts.tensors.get(new, {}) if new is not None else {}
        if not left:
            raise ValueError(
                "the cut removes every tensor of a pruner that is attached to optimizer=; call its finish() first. Nothing "
                "has changed."
            )
        found.append(CutPruner(pruner, left))
    return found


def move_pruners_(pruners: list[CutPruner], small: nn.Module | None) -> None:
    """Lets the pruners continue: with their own model, which was cut in place, or with `small`, a copy."""
    new = {} if small is None else dict(small.named_parameters(remove_duplicate=False))
    for pruner, left in pruners:
        moved = {name: (new.get(own or "", tensor), kept) for name, (tensor, own, kept) in left.items()}
        pruner.follow_cut_(pruner.model if small is None else small, moved)


def dropped(model: nn.Module, cuts: Cuts) -> set[int]:
    """The ids of the parameters of removed blocks."""
    return _names(model, Cuts()).keys() - _names(model, cuts).keys()


def _names(model: nn.Module, cuts: Cuts) -> dict[int, str]:
    """The names of parameters by id, as they are after the blocks are removed."""
    with without(model, cuts.drop):
        return {key: name for key, (name, tensor) in owned_tensors(model).items() if isinstance(tensor, nn.Parameter)}
