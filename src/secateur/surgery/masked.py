"""The masked model (removed units made silent, everything in its old size) and the small one made from it.

A removed unit is silent when every weight that makes it is zero; its bias and what comes after (a normalisation's shift, an
activation of zero) make it a constant, which is folded into its consumers. Units that feed themselves (recurrent layers, a
layer applied twice) would carry a constant on from use to use, so their biases go to zero too. Units that still speak then (a
query head whose values are those of other heads too) are silenced where they are read.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..graph import Expr, Group, Prod, Trace, keep_mask, norm, reshape
from ..graph.slots import owned_tensors
from .cut import Attribute, Cuts, Keep, apply_cuts_, cuts_of
from .wiring import Wiring


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
    """Zero what makes the units that `keep` removes, in place; biases stay, except of units that feed themselves."""
    tensors = dict(owned_tensors(model).values())
    wiring, directions = Wiring(trace), _directions(trace)
    with torch.no_grad():
        for group in trace.groups:
            if group.atom not in keep:
                continue
            alone = {group.atom: keep[group.atom]}
            loops, speaks = wiring.feeds_itself(group), wiring.speaks(group)
            for member in group.members:
                tensor = tensors[member.tensor]
                zero = member.role in ("produce", "elementwise") or (speaks and member.role == "consume")
                if not zero or not isinstance(tensor, nn.Parameter) or member.tensor in directions:
                    continue
                if tensor.dim() > 1 or loops:
                    gone = (~keep_mask(trace.dims[member.tensor][member.dim], alone)).nonzero()[:, 0]
                    tensor.index_fill_(member.dim, gone.to(tensor.device), 0)
    return model


def make(model: nn.Module, trace: Trace, keep: Keep, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Made:
    """A copy of the traced model that holds the kept units only. The model itself is not touched."""
    cuts = cuts_of(trace, keep)
    numbers, parameters = _numbers(model), {name for name, _ in model.named_parameters()}
    small, reasons = _folded(model, trace, keep, args, kwargs)
    changed = [
        Attribute(path, name, None, old, new)
        for (path, name), old in numbers.items()
        if (new := _numbers(small)[path, name]) != old
    ]
    apply_cuts_(small, cuts)
    cuts.attributes += changed
    for name, parameter in small.named_parameters():
        if name not in parameters:
            mask = keep_mask(_bias_axis(trace, name, len(parameter)), keep)
            parameter.data = parameter.detach()[mask.to(parameter.device)]
            cuts.added[name] = tuple(parameter.shape)
    return Made(small, cuts, reasons)


def bare(model: nn.Module, trace: Trace, keep: Keep) -> nn.Module:
    """A copy in the sizes of the cut, whatever it computes: enough to time it."""
    return apply_cuts_(_copy(model), cuts_of(trace, keep))


def _folded(
    model: nn.Module, trace: Trace, keep: Keep, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[nn.Module, dict[Group, str]]:
    """The masked model in its old size, with the constants of removed units in their consumers, and where that cannot be."""
    from .constants import fold_

    cut = [g for g in trace.groups if g.atom in keep]
    small = silence_(_copy(model), trace, keep)
    modes = {module: module.training for module in small.modules()}
    small.eval()
    try:
        told: dict[Any, str] = {**fold_(small, trace, keep, args, kwargs)}
    except Exception as error:  # a run that cannot be looked into can still be cut; that it may not be exact is said
        why = f"its constants cannot be looked for ({type(error).__name__}: {error})"
        return silence_(_copy(model), trace, keep), dict.fromkeys(cut, why)
    for module, mode in modes.items():
        module.training = mode
    return small, {g: why for g in cut if (why := told.get(g) or told.get(label(g)))}


def _copy(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as error:
        raise RuntimeError(
            f"{type(model).__name__} cannot be copied ({type(error).__name__}: {error}), and a cut is made on a copy. "
            "The model is as it was."
        ) from error


def _numbers(model: nn.Module) -> dict[tuple[str, str], float]:
    """The float attributes of all modules: folding may rescale the eps of a normalisation."""
    return {
        (path, name): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if type(value) is float
    }


def _bias_axis(trace: Trace, bias: str, length: int) -> Expr:
    """The axis of a bias that folding added: the one along which the weight beside it makes units."""
    weight = f"{bias.rpartition('.')[0]}.weight".removeprefix(".")
    axes = trace.dims[weight]
    for d, e in enumerate(axes):
        if "produce" in trace.record.roles.get((weight, d), ()) and e.size == length:
            return e
    groups = length // axes[1].size  # a transposed convolution in groups
    return norm(Prod((reshape([axes[0]], [groups, axes[0].size // groups])[0], axes[1])))


def _directions(trace: Trace) -> set[str]:
    """Weights that are divided by their own norm: zeroed rows would be 0/0, and the gain that multiplies them is enough."""
    return {
        trace.names[step.args[0].number]
        for step in trace.steps
        if "_weight_norm" in step.name and step.args[0].number in trace.names
    }


def run(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], under: Any = None) -> Any:
    """The model's answer in evaluation mode, `under` a mode; whatever the run changes in the model is undone."""
    from ..graph.slots import Standing

    def stand_in(_: str, tensor: Tensor) -> Tensor:
        return tensor if isinstance(tensor, nn.Parameter) else tensor.detach().clone()

    with torch.no_grad(), torch.random.fork_rng(devices=[]), Standing(model, stand_in), under or nullcontext():
        return model(*args, **kwargs)
