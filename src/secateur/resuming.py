"""The state of a pruner as plain values: the recipe in words, names that do not depend on wrappers, and all checks."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from ._dist import check_everywhere, local, place_of
from ._tree import bare_name
from .masks import Masks
from .schedules import FromFunction, Joined, Number
from .settings import Settings
from .targeting import Target

VERSION = 1
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # in the repr of an object without one of its own; another in every run
KEYS = {"recipe", "step", "due", "masks", "gathered", "batches", "recorded", "dense"}


def described(recipe: Settings, step: int, **more: Any) -> dict[str, str]:
    """A recipe in words, one entry for each argument, to compare the recipes of two runs at the same step."""
    spread = recipe.spread
    if isinstance(spread, Mapping):
        shares = str({name: _number(share, step) for name, share in spread.items()})
    else:
        shares = str(getattr(spread, "__qualname__", type(spread).__name__ if spread is not None else None))
    found = {
        "kind": recipe.kind,
        "criterion": str(recipe.criterion),
        "pattern": str(recipe.pattern),
        "scope": recipe.scope,
        "sparsity": _number(recipe.sparsity, step),
        "count": str(recipe.count),
        "spread": shares,
        "method": str(recipe.method),
        **{name: str(value) for name, value in more.items()},
    }
    return {name: _ADDRESS.sub("", text) for name, text in found.items()}


def _number(number: Number | None, step: int) -> str:
    """A number or a schedule. Functions have no text that two runs could compare, so their values are given."""
    functions = isinstance(number, FromFunction) or (
        isinstance(number, Joined) and any(isinstance(part, FromFunction) for _, part in number.parts)
    )
    if functions and callable(number):
        return f"a function of the step, {number(0):g} at step 0 and {number(step):g} at step {step}"
    return str(number)


def check_state(state: Mapping[str, Any], recipe: Settings, more: Mapping[str, Any]) -> None:
    """Raises ValueError unless this is a whole state of a pruner with this recipe."""
    if state.get("version") != VERSION:
        raise ValueError(f"this is version {state.get('version')!r} of a pruner's state; this package reads version {VERSION}")
    if missing := KEYS - state.keys():
        raise ValueError(f"this is no whole state of a pruner: {sorted(missing)} missing")
    own, other = described(recipe, state["step"], **more), dict(state["recipe"])
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if odd := [f"{name} is {other.get(name)} in the state and {own.get(name)} here" for name in names]:
        raise ValueError(
            f"the state was saved by a pruner with another recipe: {'; '.join(odd)}. Make the pruner with the arguments of the "
            "saved one. Nothing has changed."
        )


def check_place(state: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Raises, on every process alike, unless the state is of the part of the model that this process holds."""
    saved, own = state.get("place", ""), place_of(tensors)
    wrong = (
        ""
        if saved == own
        else (
            f"the state was saved by {saved or 'a pruner of a model that was not sharded'}, and this process is "
            f"{own or 'alone'}. The state of a pruner of a sharded model is that of one process: save it with torch.save to "
            "one file for each process (torch.distributed.checkpoint keeps only one of them), and load it into the same "
            "sharding. Nothing has changed."
        )
    )
    check_everywhere(tensors, wrong)


def by_own_names(entries: Mapping[str, Any], own: Iterable[str], what: str) -> dict[str, Any]:
    """These entries under the names of this pruner's tensors, which may lie inside another wrapper, or inside none.

    Raises ValueError unless both name the same tensors.
    """
    names = _bare(own)
    found = {bare: entries[given] for bare, given in _bare(entries).items()}
    if odd := found.keys() ^ names.keys():
        raise ValueError(f"{what} and this pruner have different tensors: {sorted(odd)}")
    return {name: found[bare] for bare, name in names.items()}


def _bare(names: Iterable[str]) -> dict[str, str]:
    """Names without those of wrappers -> names. A leading `module.` of all names is that of DistributedDataParallel."""
    found = {bare_name(name): name for name in names}
    if found and all(bare.startswith("module.") for bare in found):
        return {bare.removeprefix("module."): name for bare, name in found.items()}
    return found


def check_shapes(masks: Mapping[str, Any], own: Masks) -> None:
    """Raises ValueError unless these masks have the shapes of a pruner's own."""
    for name, mask in masks.items():
        if mask.shape != local(own[name]).shape:
            raise ValueError(f"the mask of {name!r} is {tuple(mask.shape)}, the tensor {tuple(local(own[name]).shape)}")


def check_weights(targets: Iterable[Target], now: Masks, masks: Mapping[str, Tensor]) -> None:
    """Raises RuntimeError if weights that masks keep were set to zero by the masks of now, and not loaded since."""
    for target in targets:
        back = masks[target.name].to(target.weight.device) & ~local(now[target.name])
        if bool(back.any()) and not bool(target.weight[back].any()):
            raise RuntimeError(
                f"attach() has pruned this model already, and weights of {target.name!r} that the state keeps are zero; load "
                "the model's state before that of the pruner"
            )
