"""The masked model (removed units set to zero, every tensor in its old size) and the small model that computes the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from ..axes import Group, keep_mask
from ..edit import (
    Attribute,
    Cuts,
    Place,
    apply_cuts_,
    built_from,
    copied,
    number_at,
    numbers_of,
    owned_tensors,
    with_numbers,
    write_attribute,
)
from ..trace import Trace
from .cut import Keep, cuts_of
from .exact import Folds, MaskedWeights, find, masked_places
from .leftovers import follow_leftovers_


class CutModel(NamedTuple):
    """A small model, the cuts that made it, the reason for each group whose cut is not exact, and `folded`: whether constants
    were added to biases."""

    small: nn.Module
    cuts: Cuts
    reasons: dict[Group, str]
    folded: bool = False


def mask_(model: nn.Module, trace: Trace, keep: Keep) -> nn.Module:
    """Set the weights that produce the removed units to zero, in place, and their biases where no constant can be folded."""
    tensors = dict(owned_tensors(model).values())
    with torch.no_grad():
        for name, places in masked_places(trace, keep).items():
            for dim, atom in places:
                gone = (~keep_mask(trace.dims[name][dim], {atom: keep[atom]})).nonzero()[:, 0]
                tensors[name].index_fill_(dim, gone.to(tensors[name].device), 0)
    return model


def make(model: nn.Module, trace: Trace, keep: Keep, *, bias: bool = True) -> CutModel:
    """A copy of the traced model with only the kept units, and with the constants of the removed ones folded into biases.

    The model is unchanged. Tensors are copied in their new size one by one, so there is never a second model in full size.
    Without `bias`, layers that have no bias get none, and the groups whose constants would need one are not exact.
    """
    cuts = cuts_of(trace, keep)
    tensors = dict(owned_tensors(model).values())
    folds = _folds(tensors, trace, keep)
    if not bias:
        _drop_new_biases(folds, trace, keep)
    small = _sliced_copy(model, tensors, trace, keep, cuts)
    changed = {(path, name): number for edit in folds.edits for path, name, number in edit.attributes}
    folded = [
        Attribute(path, name, None, old, new)
        for (path, name), new in changed.items()
        if (old := getattr(small.get_submodule(path), name)) != new
    ]
    folds.apply_(small, trace, keep)
    in_config = _in_config(trace, folded)
    for attribute in in_config:
        write_attribute(small, attribute)
    cuts.attributes += [*folded, *in_config]
    cuts.added |= {slot.name: tuple(small.get_parameter(slot.name).shape) for slot in folds.biases if slot.new}
    return CutModel(small, cuts, folds.reasons, any(bool(value.any()) for value in folds.biases.values()))


def _sliced_copy(model: nn.Module, tensors: Mapping[str, Tensor], trace: Trace, keep: Keep, cuts: Cuts) -> nn.Module:
    memo: dict[int, Any] = {}
    for name, tensor in tensors.items():  # cut tensors share the model's memory until they are sliced
        if name in cuts.tensors and tensor.is_leaf:
            kept = tensor.detach()
            memo[id(tensor)] = type(tensor)(kept, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept
    small = copied(model, memo)
    apply_cuts_(small, cuts)
    follow_leftovers_(small, trace, keep)
    return small


def _folds(tensors: Mapping[str, Tensor], trace: Trace, keep: Keep) -> Folds:
    try:
        return find(trace, keep, MaskedWeights(trace, keep, tensors, masked_places(trace, keep)))
    except Exception as error:  # the model can be cut all the same; the plan says that the cut may not be exact
        why = f"its constants cannot be computed ({type(error).__name__}: {error})"
        return Folds(reasons={g: why for g in trace.groups if g.atom in keep})


def _drop_new_biases(folds: Folds, trace: Trace, keep: Keep) -> None:
    """Leave out the biases that layers do not have yet. Every cut group that such a layer reads counts as not exact."""
    for slot in [slot for slot in folds.biases if slot.new]:
        del folds.biases[slot]
        layer = slot.name.rpartition(".")[0]
        cut = [g for g in trace.groups if g.atom in keep]
        read = [g for g in cut if any(m.role == "consume" and m.tensor.rpartition(".")[0] == layer for m in g.members)]
        why = f"bias=False: {layer or 'the model'} has no bias for the constant that its removed inputs leave"
        for group in read or cut:
            folds.reasons.setdefault(group, why)


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """The float attributes of all modules: folding may change the eps of a normalisation."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }


_SET_BY: WeakKeyDictionary[Trace, dict[Place, set[tuple[str, str]]]] = WeakKeyDictionary()


def _in_config(trace: Trace, folded: Sequence[Attribute]) -> list[Attribute]:
    """The numbers of a config that set exactly these floats, such as the eps of all norms."""
    config: Any = getattr(trace.model, "config", None)
    found: list[Attribute] = []
    for old, new in {(a.old, a.new): None for a in folded} if hasattr(config, "to_dict") else ():
        changed = {(a.path, a.name) for a in folded if (a.old, a.new) == (old, new)}
        for place in numbers_of(config):
            if type(number_at(config, place)) is float and number_at(config, place) == old and _set_by(trace, place) == changed:
                *path, name = place
                found.append(Attribute(".".join(("config", *map(str, path))), str(name), None, old, new))
    return found


def _set_by(trace: Trace, place: Place) -> set[tuple[str, str]]:
    """The float attributes of modules that a number of the config sets. A model built from another config shows it."""
    known = _SET_BY.setdefault(trace, {})
    if place not in known:
        config: Any = trace.model.config
        value = 2 * number_at(config, place)
        try:
            built = built_from(type(trace.model), with_numbers(config, {place: value}))
        except Exception:
            known[place] = set()
        else:
            known[place] = {key for key, found in _numbers(built).items() if found == value}
    return known[place]
