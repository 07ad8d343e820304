"""Removes the masked units of a prepared model, in place and without changing what it computes.

A masked unit can be removed if its readers lose at most a constant, which a bias can absorb. A trace of the model shows which
units belong together and what each reader loses. Units that the model still needs (another layer adds to them, or a constant
meets zero padding) stay as zeros.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from .....axes import Atom, Expr, Group, atoms, keep_mask
from .....edit import Cuts, apply_cuts_, run
from .....surgery import cuts_of, fold_
from .....trace import Trace, plan_counts, trace
from ._observe import Observed, unit_of_index
from .parametrization import SavedMasks, masked_modules, masked_tensors, remove_masks

Keep = dict[Atom, Tensor]
_UNTOLD = "its masked rows are not whole units, or other weights that produce the same units keep them"
_GATES = " (a hidden unit has a row in every gate of both weights; SaliencyPruner masks all of them together)"
_WITH_BIAS = (nn.Linear, nn.modules.conv._ConvNd)


class Settled(NamedTuple):
    """The units to keep, the full-size model with the constants of the others folded in, and why masked units stay."""

    keep: Keep
    folded: nn.Module
    reasons: dict[Atom, str]
    inexact: set[Atom]


def shrink_(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], only: Iterable[nn.Module] | None = None
) -> dict[str, str]:
    """Removes the masked units of the modules in `only` (by default of all), and their masks.

    Returns the reason for each tensor that keeps masked units as zeros. On any error the model is unchanged.
    """
    masked = masked_modules(model)
    chosen = {path for path, module in masked.items() if only is None or any(module is one for one in only)}
    plain = _copy(model)
    shared = _shared(plain)
    masks = {}
    for path, module in masked_modules(plain).items():
        if path in chosen:
            masks |= {f"{path}.{name}".lstrip("."): mask.bool().cpu() for name, mask in masked_tensors(module).items()}
        remove_masks(module, True, shared)
    given = _give_biases(plain)
    traced = trace(plain, args, kwargs, outputs=lambda _: ())
    seen = Observed(plain, traced, args, kwargs)
    settled = _settle(plain, traced, _candidates(traced, masks, seen), seen, args, kwargs)
    cuts = cuts_of(traced, settled.keep)
    changed = _changes(plain, settled.folded)
    needless = given - changed.keys()
    for name in needless:
        cuts.tensors.pop(name, None)
        cuts.shapes.pop(name, None)
        _owner(settled.folded, name)._parameters["bias"] = None
    apply_cuts_(settled.folded, cuts)
    _verify(seen.kept(settled.keep), settled, args, kwargs)
    _commit(model, masked, chosen, cuts, changed, given - needless, _numbers(settled.folded))
    return _left(traced, masks, settled)


# --- the plain model ------------------------------------------------------------------------------------------------------


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and the cut needs a copy. "
            "The model is unchanged."
        ) from error


def _shared(model: nn.Module) -> set[int]:
    """Returns the ids of parameters that are registered in more than one place."""
    places = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    return {key for key, times in places.items() if times > 1}


def _owner(model: nn.Module, name: str) -> nn.Module:
    return model.get_submodule(name.rpartition(".")[0])


def _give_biases(model: nn.Module) -> set[str]:
    """Adds a bias of zeros, which can absorb constants, to every layer that can have one. Returns the names."""
    given = set()
    for path, module in model.named_modules():
        if isinstance(module, _WITH_BIAS) and "bias" in module._parameters and module._parameters["bias"] is None:
            _add_bias(module)
            given.add(f"{path}.bias".lstrip("."))
    return given


def _add_bias(module: Any) -> None:
    size = module.out_features if isinstance(module, nn.Linear) else module.out_channels
    zeros = torch.zeros(size, dtype=module.weight.dtype, device=module.weight.device)
    module._parameters["bias"] = nn.Parameter(zeros, requires_grad=module.weight.requires_grad)


# --- which units can be removed -------------------------------------------------------------------------------------------


def _gone(e: Expr, atom: Atom, mask: Tensor) -> Tensor:
    """Returns True for the units whose rows are all masked."""
    units = unit_of_index(e, atom)
    kept = torch.zeros(atom.size, dtype=torch.bool)
    kept[units[mask & (units >= 0)]] = True
    return ~kept


def _candidates(traced: Trace, masks: Mapping[str, Tensor], seen: Observed) -> dict[Atom, list[Tensor]]:
    """Returns for each atom the sets of units that could be removed, the largest first.

    A unit is masked if every weight that produces it masks it. A depthwise convolution produces no units but passes them on:
    a unit that it masks can be removed too, provided that nothing else reads it. The same holds for a unit that is zero for
    every input wherever it is read, such as one that is multiplied by a masked unit. Some masked units have the value zero, and
    can be removed where a constant cannot. Units that the model returns are removed only if their last layer masks them.
    """
    candidates: dict[Atom, list[Tensor]] = {}
    for group in traced.groups:
        atom = group.atom
        none = torch.zeros(atom.size, dtype=torch.bool)
        makers = {(m.tensor, m.dim): none for m in group.members if m.role == "produce" and traced.dims[m.tensor][1:]}
        reads = {m.tensor for m in group.members if m.role == "consume"}
        for name, dim in makers:
            if dim == 0 and name in masks:
                makers[name, dim] = _gone(traced.dims[name][0], atom, masks[name])
        passing = [gone for (name, _), gone in makers.items() if (name, atom) in seen.passing and name not in reads]
        making = [gone for (name, _), gone in makers.items() if (name, atom) not in seen.passing or name in reads]
        masked_out = torch.stack(making).all(0) if making else none
        blocked = torch.stack(passing).any(0) if passing else none
        some = torch.stack(list(makers.values())).any(0) if makers else none
        zero, zero_here = some & ~seen.possible.get(atom, ~none), masked_out & ~seen.nonzero.get(atom, none)
        tries = [masked_out | blocked | zero, blocked | zero, masked_out | zero, zero_here | zero]
        if atom in seen.returned:
            last = torch.stack(passing).all(0) if passing else ~none
            tries = [one & last & masked_out for one in tries]
        for one in sorted(tries, key=lambda units: -int(units.sum())):
            if bool(one.any()) and not any(torch.equal(one, other) for other in candidates.get(atom, ())):
                candidates.setdefault(atom, []).append(one)
    return candidates


def _settle(
    plain: nn.Module, traced: Trace, candidates: dict[Atom, list[Tensor]], seen: Observed, args: Any, kwargs: Any
) -> Settled:
    """Tries the candidates of each group until the constants of all removed units could be folded."""
    reasons: dict[Atom, str] = {}
    for group in traced.groups:
        if group.frozen and candidates.pop(group.atom, None):
            reasons[group.atom] = group.frozen
    while True:
        keep = _legal(traced, {atom: ~sets[0] for atom, sets in candidates.items() if sets}, reasons)
        folded = copy.deepcopy(plain)
        refused = fold_(folded, traced, keep, args, dict(kwargs))
        bad = {group.atom: why for group, why in refused.items()}
        inexact = {atom for atom in bad if _as_torch(traced.by_atom[atom], traced)}
        bad = {atom: why for atom, why in bad.items() if atom not in inexact} | seen.alive(keep)
        if not bad:
            return Settled(keep, folded, reasons, inexact)
        for atom in bad:
            candidates[atom].pop(0)
        reasons |= bad


def _as_torch(group: Group, traced: Trace) -> bool:
    """Returns whether a layer norm runs over the units of a recurrent layer. torch cuts those, and users expect it."""
    modules = dict(traced.model.named_modules())
    makers = [modules.get(m.tensor.rpartition(".")[0]) for m in group.members if m.role == "produce"]
    return group.flags == {"norm"} and all(isinstance(maker, nn.RNNBase) for maker in makers)


def _legal(traced: Trace, keep: Keep, reasons: dict[Atom, str]) -> Keep:
    """Returns the units to keep: more where the sizes of the model require it, and at least one of each group."""
    keep = {atom: mask if bool(mask.any()) else torch.arange(len(mask)) == 0 for atom, mask in keep.items()}
    while True:
        plan = plan_counts(traced, {traced.by_atom[atom]: int(mask.sum()) for atom, mask in keep.items()})
        short = [group for group, count in plan.counts.items() if count < int(keep[group.atom].sum())]
        if not short:
            break
        for group in short:
            reasons[group.atom] = plan.moved[group]
            del keep[group.atom]
    for group, count in plan.counts.items():
        mask = keep[group.atom]
        missing = count - int(mask.sum())
        if missing:
            reasons[group.atom] = plan.moved[group]
            mask = mask.clone()
            mask[(~mask).nonzero()[:missing, 0]] = True
            keep[group.atom] = mask
    return {atom: mask for atom, mask in keep.items() if not bool(mask.all())}


def _left(traced: Trace, masks: Mapping[str, Tensor], settled: Settled) -> dict[str, str]:
    """Returns why masked tensors keep more rows than their masks, or were not cut exactly."""
    found = {}
    for name, mask in masks.items():
        axes = traced.dims[name]
        own = atoms(axes[0])
        if len(axes) == 1:  # a bias, which is cut with its weight
            continue
        if int(keep_mask(axes[0], settled.keep).sum()) > max(int(mask.sum()), 1):
            untold = _UNTOLD + (_GATES if isinstance(_owner(traced.model, name), nn.RNNBase) else "")
            found[name] = next((settled.reasons[atom] for atom in own if atom in settled.reasons), untold)
        elif any(atom in settled.inexact for atom in own):
            found[name] = "cut, but not exactly: a layer norm normalises over its units, of which there are fewer now"
    return found


# --- checks -----------------------------------------------------------------------------------------------------------


def _verify(expected: list[Tensor], settled: Settled, args: Any, kwargs: Any) -> None:
    """Raises if the outputs of the small model and the masked model differ."""
    if settled.inexact:
        return
    got = [leaf for leaf in tree_leaves(run(settled.folded, args, kwargs)) if isinstance(leaf, Tensor)]
    for one, other in zip(expected, got, strict=True):
        fine = one.shape == other.shape
        if fine and one.is_floating_point() and one.numel():
            near = torch.finfo(one.dtype).eps ** 0.5 * (1 + float(one.abs().max()))
            fine = float((one - other).abs().max()) <= near or bool(one.isnan().any())
        if not fine:
            raise RuntimeError(
                "the outputs of the smaller model and the masked model differ, so the model was left unchanged. "
                "Please report this, with the model."
            )


# --- applying the change ------------------------------------------------------------------------------------------------------


def _changes(plain: nn.Module, folded: nn.Module) -> dict[str, tuple[Tensor, Tensor]]:
    """Returns the tensors that folding changed, before and after, by name."""
    before = dict(plain.named_parameters()) | dict(plain.named_buffers())
    after = dict(folded.named_parameters()) | dict(folded.named_buffers())
    pairs = {name: (before[name].detach(), after[name].detach()) for name in before}
    return {name: pair for name, pair in pairs.items() if not torch.equal(*pair) and not bool(pair[0].isnan().any())}


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """Returns the float attributes of modules, because folding may change the eps of a normalisation."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }


def _commit(
    model: nn.Module,
    masked: Mapping[str, nn.Module],
    chosen: set[str],
    cuts: Cuts,
    changed: Mapping[str, tuple[Tensor, Tensor]],
    new: set[str],
    numbers: Mapping[tuple[str, str], float],
) -> None:
    """Applies to the model what was tried on its copy. Modules that are not chosen get their masks back."""
    shared = _shared(model)
    saved = [SavedMasks(module) for path, module in masked.items() if path not in chosen]
    for path, module in masked.items():
        remove_masks(module, path in chosen, shared)
    for name in new:
        _add_bias(_owner(model, name))
    tensors = dict(model.named_parameters()) | dict(model.named_buffers())
    for name, (before, after) in changed.items():
        tensors[name].data += torch.where(before == after, torch.zeros_like(after), after - before)
    for (path, name), value in numbers.items():
        vars(model.get_submodule(path))[name] = value
    apply_cuts_(model, cuts)
    for masks in saved:
        masks.restore()
