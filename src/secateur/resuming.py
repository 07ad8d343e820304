"""The state of a pruner as plain values: the recipe in words, names that do not depend on wrappers, and all checks."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._dist import Share, as_rows, by_rows, like, local, local_as, sharded, share_of
from ._layers import Layout
from ._tree import bare_name
from .masks import Masks, pack_bits, unpack_bits
from .schedules import FromFunction, Joined, Number
from .settings import Settings
from .shards import move
from .stats import Table
from .targeting import Target

VERSION = 2
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


def upgraded(state: Mapping[str, Any], targets: Iterable[Target]) -> Mapping[str, Any]:
    """A state of version 1 as one of this version. It held one process's parts, so a sharded model cannot take it."""
    if not isinstance(state, Mapping):
        raise TypeError(f"a pruner's state is the mapping that state_dict() returned, not {type(state).__name__}")
    if state.get("version") != 1 or not state.keys() >= KEYS:
        return state
    found = list(targets)
    if any(sharded(target.tensor) for target in found):
        raise ValueError(
            "this is version 1 of a pruner's state, which does not say which part of a sharded model it belongs to; load it "
            "into the model before sharding, and save it again. Nothing has changed."
        )
    layouts = {bare: target.layout for bare, target in zip(_bare(t.name for t in found), found, strict=True)}
    gathered = {
        name: {kind: layouts[bare].restore(value) for kind, value in state["gathered"][name].items()}
        for bare, name in _bare(state["gathered"]).items()
        if bare in layouts
    }
    masks = {name: packed_mask(name, mask) for name, mask in Masks.unpack(state["masks"]).items()}
    return {**state, "version": VERSION, "masks": masks, "gathered": gathered}


def check_state(state: Mapping[str, Any], recipe: Settings, more: Mapping[str, Any]) -> None:
    """Raises ValueError unless this is a whole state of a pruner with this recipe."""
    if state.get("version") != VERSION:
        raise ValueError(f"this is version {state.get('version')!r} of a pruner's state; this package reads version {VERSION}")
    if missing := KEYS - state.keys():
        raise ValueError(f"this state of a pruner is incomplete: {sorted(missing)} missing")
    own, other = described(recipe, state["step"], **more), dict(state["recipe"])
    names = [name for name in {**own, **other} if own.get(name) != other.get(name)]
    if odd := [f"{name} is {other.get(name)} in the state and {own.get(name)} here" for name in names]:
        raise ValueError(
            f"the state was saved by a pruner with another recipe: {'; '.join(odd)}. Make the pruner with the arguments of the "
            "saved one. Nothing has changed."
        )


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


# --- masks and evidence in a state ----------------------------------------------------------------------------------
#
# A state does not depend on how the model is sharded: its tensors have the shapes of whole tensors, and are DTensors where the
# weights are, so that torch.distributed.checkpoint can load them into another sharding.


def packed_mask(name: str, mask: Tensor) -> list[Any]:
    """A mask as [bits, shape]. A row of bytes holds one index of the first axis, or as many as fill whole bytes."""
    share = _share(name, mask)
    together, part = _together(share), local(mask).reshape(share.box.shape)
    if share.ranks:
        boxes, _ = by_rows(share, together)
        part = part if boxes == share.boxes else move(share, part, share.boxes, boxes)
    bits = pack_bits(part.reshape(part.shape[0] // together, -1 if part.numel() else together * share.layout.cols))
    return [as_rows(bits, share, share.layout.rows // together) if share.ranks else bits.cpu(), list(mask.shape)]


def unpacked_mask(name: str, packed: Any, own: Tensor) -> Tensor:
    """The part of a packed mask that this process holds. Raises ValueError unless it is a mask of the shape of `own`."""
    bits, shape = packed
    share = _share(name, own)
    together = _together(share)
    rows, cols = share.layout.rows // together, share.layout.cols * together
    if tuple(shape) != tuple(own.shape):
        raise ValueError(f"the mask of {name!r} is {tuple(shape)}, the tensor {tuple(own.shape)}")
    if bits.dtype != torch.uint8 or tuple(bits.shape) != (rows, -(-cols // 8)):
        raise ValueError(
            f"the packed mask of {name!r} must be bytes of shape {(rows, -(-cols // 8))}, not {bits.dtype} of shape "
            f"{tuple(bits.shape)}"
        )
    device = local(own).device
    if not share.ranks:
        return unpack_bits(_whole(name, bits).to(device), cols).reshape(own.shape)
    boxes, _ = by_rows(share, together)
    first, last = (row // together for row in boxes[share.me].rows)
    part = local(bits) if sharded(bits) else bits[first:last]
    if part.shape[0] != last - first:
        raise ValueError(
            f"the mask of {name!r} in the state is sharded over other processes than the model; save and load states with "
            "torch.distributed.checkpoint, which moves them"
        )
    mask = unpack_bits(part.to(device), cols).reshape(boxes[share.me].shape)
    return (mask if boxes == share.boxes else move(share, mask, boxes, share.boxes)).reshape(local(own).shape)


def _together(share: Share) -> int:
    """How many rows of a mask are packed together: as many as fill whole bytes, if they divide the rows."""
    rows = 8 // math.gcd(share.layout.cols, 8)
    return rows if share.layout.rows % rows == 0 else 1


def part_of(name: str, value: Tensor, own: Tensor) -> Tensor:
    """The part of a tensor of a state (gradients, dense values) that belongs to the part of `own` that this process holds."""
    if tuple(value.shape) != tuple(own.shape):
        raise ValueError(f"{name!r} is {tuple(value.shape)} in the state and {tuple(own.shape)} in the model")
    if not sharded(own):
        return _whole(name, value).to(own.device, copy=True)
    if sharded(value):
        return local_as(value, own).to(local(own).device, copy=True)
    box = _share(name, own).box
    matrix = value.reshape(_share(name, own).layout.rows, -1)
    return matrix[slice(*box.rows), slice(*box.cols)].reshape(local(own).shape).to(local(own).device, copy=True)


def tensors_of(
    targets: Sequence[Target], masks: Masks, gathered: Table, dense: Mapping[str, Tensor], kinds: Iterable[str]
) -> dict[str, Any]:
    """The entries of a state that hold tensors. `kinds`: the gradients that are gathered."""

    def sums(target: Target) -> dict[str, Tensor]:  # zeros where there are none yet, for a checkpoint to fill
        size = target.layout.rows, target.layout.cols
        empty = {kind: torch.zeros(size) for kind in sorted(kinds)} if target.tensor.requires_grad else {}
        found = {kind: value.to(target.weight.device, copy=True) for kind, value in {**empty, **gathered[target.name]}.items()}
        return {kind: like(target.layout.restore(value), target.tensor) for kind, value in found.items()}

    tensors = {target.name: target.tensor for target in targets}
    return {
        "masks": {bare_name(name): packed_mask(name, mask) for name, mask in masks.items()},
        "gathered": {bare_name(target.name): sums(target) for target in targets},
        "dense": {bare_name(name): like(value.clone(), tensors[name]) for name, value in dense.items()},
    }


def tensors_from(
    state: Mapping[str, Any], targets: Sequence[Target], masks: Masks, dense: Mapping[str, Tensor]
) -> tuple[Masks, Table, dict[str, Tensor]]:
    """Masks, gathered gradients and dense values of a state: the parts that this process holds."""
    packed = by_own_names(state["masks"], masks, "the state")
    found = {name: unpacked_mask(name, packed[name], own) for name, own in masks.items()}
    gathered = by_own_names(state["gathered"], masks, "the state")
    if dense and not state["dense"]:
        raise ValueError("the state holds no dense values; it is of a pruner without keep_dense=True")
    old = by_own_names(state["dense"], dense, "the dense values of the state") if dense else {}
    sums: Table = {}
    for t in targets:
        parts = {kind: part_of(t.name, value, t.tensor.detach()) for kind, value in gathered[t.name].items()}
        sums[t.name] = {kind: t.layout.matrix(value) for kind, value in parts.items()} if state["batches"] else {}
    kept = Masks({t.name: like(found[t.name], t.tensor) for t in targets})
    return kept, sums, {t.name: part_of(t.name, old[t.name], t.tensor.detach()) for t in targets if t.name in old}


def _share(name: str, tensor: Tensor) -> Share:
    """The share of a tensor read as (first axis, all others), or, for a vector, as one column."""
    return share_of(name, tensor, Layout(tuple(tensor.shape) if tensor.ndim > 1 else (tensor.numel(), 1)))


def _whole(name: str, value: Tensor) -> Tensor:
    if sharded(value):
        raise ValueError(
            f"{name!r} is sharded in the state and whole in the model; load the state with torch.distributed.checkpoint"
        )
    return value


def check_weights(targets: Iterable[Target], now: Masks, masks: Masks) -> None:
    """Raises RuntimeError if weights that masks keep were set to zero by the masks of now, and not loaded since."""
    for target in targets:
        back = local(masks[target.name]) & ~local(now[target.name])
        if bool(back.any()) and not bool(target.weight[back].any()):
            raise RuntimeError(
                f"attach() has pruned this model already, and weights of {target.name!r} that the state keeps are zero; load "
                "the model's state before that of the pruner"
            )
