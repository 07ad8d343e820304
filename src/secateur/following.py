"""For `Pruner`: hooks on optimizers, warnings about conflicting optimizers and pruners, and updates after a cut."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from ._layers import layout_of
from ._tree import slots
from .edit import Indices, select_indices
from .masks import Masks
from .stats import Table
from .targeting import Target


class Followed:
    """The optimizers that call a hook after each step, in the order of `add`. An optimizer that is deleted is forgotten."""

    def __init__(self) -> None:
        self._handles: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()

    def __iter__(self) -> Iterator[Optimizer]:
        return iter(self._handles)

    def add(self, optimizer: Optimizer, hook: Callable[..., None]) -> None:
        self._handles[optimizer] = optimizer.register_step_post_hook(hook)

    def remove(self, optimizers: Sequence[Any]) -> None:
        """Removes the hooks. Raises ValueError, before any is removed, if one of the optimizers is not followed."""
        if strangers := [_kind(one) for one in optimizers if not any(one is other for other in self)]:
            held = ", ".join(map(_kind, self)) or "no optimizer"
            raise ValueError(f"detach: this {strangers[0]} is not attached; attached is {held}")
        for optimizer in optimizers:
            self._handles.pop(optimizer).remove()

    def leads(self, optimizer: Optimizer, tensors: Collection[int]) -> bool:
        """Whether it is the first that trains one of these tensors (ids): the schedule counts its steps."""
        return optimizer is next((other for other in self if other is optimizer or trains(other, tensors)), None)

    def check_new(self, optimizers: Sequence[Any], tensors: Collection[int]) -> None:
        """Raises where one of these cannot be followed, and warns if the schedule keeps counting the steps of another."""
        for optimizer in optimizers:
            if not isinstance(optimizer, Optimizer) or not hasattr(optimizer, "_optimizer_step_post_hooks"):
                given = _kind(optimizer)
                raise TypeError(f"attach takes torch optimizers, not {given}; for others call pruner.step() after each step")
            if any(optimizer is other for other in self) or optimizers.count(optimizer) > 1:
                raise ValueError(f"this {_kind(optimizer)} is attached already")
            if not trains(optimizer, tensors):
                raise ValueError(
                    f"{_kind(optimizer)} updates none of the pruned tensors; attach the one that trains them. An optimizer "
                    "that was made before sc.shrink or sc.decompress_ holds the old tensors: make a new one. Tensors that are "
                    "frozen, as under adapters of PEFT, keep their zeros without a pruner: prune them once with sc.prune_."
                )
        shared = {id(p) for optimizer in optimizers for p in _parameters(optimizer)} & set(tensors)
        if any(trains(other, shared) for other in self):
            gc.collect()  # a deleted optimizer with a learning rate scheduler is part of a reference cycle
        if names := [_kind(other) for other in self if trains(other, shared)]:
            warnings.warn(
                f"this {_kind(optimizers[0])} trains tensors that the attached {names[0]} trains too, and the schedule still "
                f"counts the steps of the {names[0]}. If the new optimizer replaces it, call pruner.detach(old) before "
                "pruner.attach(new).",
                stacklevel=3,
            )


def trains(optimizer: Optimizer, tensors: Collection[int]) -> bool:
    """Whether the optimizer holds one of these tensors, given by their ids."""
    return any(id(parameter) in tensors for parameter in _parameters(optimizer))


def hook_owners(optimizer: Optimizer, kind: type[Any]) -> list[Any]:
    """The objects of this type whose methods are called after each step of the optimizer."""
    owners = [getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_post_hooks.values()]
    return [owner for owner in owners if isinstance(owner, kind)]


def warn_of_others(pruner: Any, optimizers: Sequence[Optimizer], tensors: Mapping[int, str]) -> None:
    """Warns if another pruner follows one of these optimizers and prunes one of these tensors (id -> name)."""
    for other in (one for optimizer in optimizers for one in hook_owners(optimizer, type(pruner))):
        if other is not pruner and (shared := [name for key, name in tensors.items() if key in other.tensor_ids()]):
            warnings.warn(
                f"another pruner that is attached to the same optimizer prunes {shared[0]!r} too ({len(shared)} tensors in "
                f"all): {other!r}. Both put back their zeros, and neither counts those of the other. Call finish() or detach() "
                "on the one that you do not need.",
                stacklevel=3,
            )


def innermost(optimizer: Any) -> Any:
    """The torch optimizer inside a wrapper that is not an optimizer itself, such as Accelerate's."""
    while not hasattr(optimizer, "_optimizer_step_post_hooks") and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    return optimizer


def _parameters(optimizer: Optimizer) -> Iterator[Any]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _kind(optimizer: Any) -> str:
    return type(optimizer).__name__


def after_cut(
    model: nn.Module,
    targets: Sequence[Target],
    masks: Masks,
    gathered: Table,
    moved: Mapping[str, tuple[Tensor, Indices]],
) -> tuple[list[Target], Masks, Table]:
    """The targets of a pruner in a model that was cut, with masks and gathered gradients sliced like the weights.

    `moved` has, for each target that is left, its parameter in the cut model and the kept indices.
    """
    own = {id(slot.tensor): slot for slot in slots(model)}
    found, new_masks, new_gathered = [], {}, {}
    for old in targets:
        if old.name not in moved:  # its block was removed
            continue
        tensor, kept = moved[old.name]
        slot = own[id(tensor)]
        new = Target(slot, layout_of(slot.module, tuple(tensor.shape)))
        found.append(new)
        new_masks[new.name] = select_indices(masks[old.name], kept)
        sums = {kind: select_indices(old.layout.restore(value), kept) for kind, value in gathered[old.name].items()}
        new_gathered[new.name] = {kind: new.layout.matrix(value) for kind, value in sums.items()}
    return found, Masks(new_masks), new_gathered
