"""The masked model (removed units made silent, everything in its old size) and the small one that does the same."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..axes import Group, keep_mask
from ..edit import Attribute, Cuts, apply_cuts_, copied, owned_tensors
from ..trace import Trace
from .cut import Keep, cuts_of
from .exact import MaskedWeights, masked_places
from .leftovers import follow_leftovers_

if TYPE_CHECKING:
    from .exact import Folds


class Made(NamedTuple):
    """A model cut to size, what was cut, and for the groups for which that is not exact, why."""

    small: nn.Module
    cuts: Cuts
    reasons: dict[Group, str]


def label(group: Group) -> str:
    """What a group is called: the first tensor that makes its units (else the first that carries them), and the dim."""
    first = next((m for m in group.members if m.role == "produce"), group.members[0])
    return f"{first.tensor}[{first.dim}]"


def names_of(trace: Trace) -> dict[Group, str]:
    """A name of its own for every group: its label, numbered where one dim carries several (heads and what is in a head)."""
    seen: Counter[str] = Counter()
    names: dict[Group, str] = {}
    for group in trace.groups:
        base = label(group)
        seen[base] += 1
        names[group] = base if seen[base] == 1 else f"{base}#{seen[base]}"
    return names


def silence_(model: nn.Module, trace: Trace, keep: Keep) -> nn.Module:
    """Zero what makes the units that `keep` removes, in place: the masked model, in its old size."""
    tensors = dict(owned_tensors(model).values())
    with torch.no_grad():
        for name, places in masked_places(trace, keep).items():
            for dim, atom in places:
                gone = (~keep_mask(trace.dims[name][dim], {atom: keep[atom]})).nonzero()[:, 0]
                tensors[name].index_fill_(dim, gone.to(tensors[name].device), 0)
    return model


def make(
    model: nn.Module, trace: Trace, keep: Keep, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
) -> Made:
    """A copy of the traced model that holds the kept units only, their constants folded. The model itself is not touched.

    Tensors are copied in their new size, one after the other: there is no second model in full size at any moment.
    """
    cuts = cuts_of(trace, keep)
    folds = _folds(model, trace, keep)
    small = bare(model, trace, keep, cuts)
    numbers, parameters = _numbers(small), {name for name, _ in small.named_parameters()}
    folds.apply_(small, trace, keep)
    cuts.attributes += [
        Attribute(path, name, None, old, new)
        for (path, name), new in _numbers(small).items()
        if (old := numbers.get((path, name))) != new
    ]
    cuts.added |= {name: tuple(p.shape) for name, p in small.named_parameters() if name not in parameters}
    return Made(small, cuts, folds.reasons)


def bare(model: nn.Module, trace: Trace, keep: Keep, cuts: Cuts | None = None) -> nn.Module:
    """A copy in the sizes of the cut, without what is folded."""
    cuts = cuts_of(trace, keep) if cuts is None else cuts
    memo: dict[int, Any] = {}
    for name, tensor in owned_tensors(model).values():  # what is cut is sliced later, from the memory of the model
        if name in cuts.tensors and tensor.is_leaf:
            kept = tensor.detach()
            memo[id(tensor)] = type(tensor)(kept, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else kept
    small = copied(model, memo)
    apply_cuts_(small, cuts)
    follow_leftovers_(small, trace, keep)
    return small


def _folds(model: nn.Module, trace: Trace, keep: Keep) -> Folds:
    from .exact import Folds, find

    tensors = dict(owned_tensors(model).values())
    try:
        return find(trace, keep, MaskedWeights(trace, keep, tensors, masked_places(trace, keep)))
    except Exception as error:  # a run that cannot be looked into can still be cut; that it may not be exact is said
        why = f"its constants cannot be looked for ({type(error).__name__}: {error})"
        return Folds(reasons={g: why for g in trace.groups if g.atom in keep})


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """The float attributes of all modules: folding may rescale the eps of a normalisation."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }
