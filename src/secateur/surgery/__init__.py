"""Structured pruning: whole units out of every tensor that carries them, so that the model is smaller everywhere.

`shrink` makes a small copy, `shrink_` cuts in place. Rooms: `request` (what is asked), `blocks` and `depth` (whole blocks go
first), `configs` (models built from a config), `work` (the way through), `importance` (scores of units), `budget` (how many
stay), `masked`, `ghosts` and `constants` (what removed units still say), `cut` (slicing), `copies`, `optimizers`, `sizes` (what
remains), `verify`, `refit` and `norms` (repairs from data), `shrunk` (the plan).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

import torch
from torch import nn

from ..criteria import magnitude
from ..edit import (
    Attribute,
    Cuts,
    all_or_nothing,
    apply_cuts_,
    history,
    owned_tensors,
    preserve_rng,
    remember_,
    select_indices,
    without,
)
from ..stats import Loss
from .calibrate import UnitCriterion, activation_variance, bn_scale, fpgm, reconstruction, unit_criterion
from .depth import shrunk_in_depth
from .leftovers import drop_leftovers_
from .optimizers import dropped, follow_
from .pipeline import AnyCriterion
from .request import Options
from .result import Row, Shrunk
from .verify import Verified

__all__ = [
    "shrink",
    "shrink_",
    "Shrunk",
    "Row",
    "Verified",
    "Cuts",
    "Attribute",
    "apply_cuts_",
    "UnitCriterion",
    "unit_criterion",
    "fpgm",
    "bn_scale",
    "activation_variance",
    "reconstruction",
]


def shrink(
    model: nn.Module,
    example_inputs: Any,
    criterion: AnyCriterion = magnitude,
    *,
    channels: float | None = None,
    params: float | None = None,
    flops: float | None = None,
    latency: float | None = None,
    depth: float | None = None,
    multiple_of: int = 1,
    scope: str = "global",
    exclude: str | Iterable[str] = (),
    floor: float | None = None,
    data: Iterable[Any] | None = None,
    loss: Loss | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    exact_only: bool = False,
    reestimate: bool = False,
    refit: bool = False,
) -> tuple[nn.Module, Shrunk]:
    """A smaller copy of the model, and the plan of the cut. The model is not touched.

    `example_inputs`: a tensor, a tuple of positional arguments, or a mapping of keyword arguments; the model is run on them.
    One of `channels`, `params`, `flops`, `latency` says what remains, as a fraction of the original; it is met within 2 % of
    that, or the error says what is in the way. Parameters count with the biases that the cut adds; FLOPs are those of the
    example inputs. Latency is measured on them, in eval mode without gradients, in turn with the original, and the finished
    model is judged: it is met within 5 %, or within the spread of the measurement where that is larger, 10 % at most.

    `depth`, alone or before one of those, says how many of the model's blocks remain (transformer layers, residual blocks):
    those go whose removal changes the output on `data` (else on the example inputs) the least, one after the other.

    `scope`: "global" (all groups compete, scores over the mean of their group), "tensor" (every group keeps the same fraction)
    or "isomorphic" (groups that are wired alike compete). `floor`: the fraction of its units that every group keeps (0.1, or
    less where less is asked). `multiple_of`: sizes that are a multiple of it stay one. `exclude`: globs over names of tensors
    and modules that keep their shape. `exact_only`: leave groups alone that cannot be cut exactly.

    `criterion`: element scores, summed over the tensors that produce a unit, or one of units (`fpgm`, `bn_scale`,
    `activation_variance`, `reconstruction`); `data` and `loss` as for `prune_`. `optimizer` goes on with the small model: its
    state is cut along.
    `reestimate` and `refit` use `data`: new BatchNorm statistics, and a least-squares fit of what reads the cut groups.
    """
    given = Options(
        channels=channels,
        params=params,
        flops=flops,
        latency=latency,
        depth=depth,
        multiple_of=multiple_of,
        scope=scope,
        exclude=exclude,
        floor=floor,
        data=data,
        loss=loss,
        optimizer=optimizer,
        exact_only=exact_only,
        reestimate=reestimate,
        refit=refit,
    )
    with preserve_rng() as rng:
        small, plan, state = shrunk_in_depth(model, example_inputs, criterion, given, rng)
    plan.cuts.recipe = plan.recipe
    remember_(small, (*history(model), plan.cuts))
    _carry_gradients(model, small, plan.cuts)
    if optimizer is not None:
        follow_(optimizer, model, small, state, plan.cuts, dropped(model, plan.cuts))
    return small, plan


def shrink_(
    model: nn.Module, example_inputs: Any, criterion: AnyCriterion = magnitude, **options: Unpack[Options]
) -> tuple[nn.Module, Shrunk]:
    """`shrink` in place, with the same arguments: the model itself gets smaller, its parameters stay the same objects.

    When anything fails, the model and the optimizer are exactly as they were.
    """
    with preserve_rng() as rng:
        small, plan, state = shrunk_in_depth(model, example_inputs, criterion, options, rng)
    optimizer, gone = options.get("optimizer"), dropped(model, plan.cuts)
    with all_or_nothing(model):
        past, plan.cuts.recipe = history(model), plan.recipe
        apply_cuts_(model, plan.cuts, dict(owned_tensors(small).values()))
        drop_leftovers_(model, small)
        remember_(model, (*past, plan.cuts))
    if optimizer is not None:
        follow_(optimizer, model, model, state, plan.cuts, gone)
    plan.small, plan.original = model, None
    return model, plan


def _carry_gradients(model: nn.Module, small: nn.Module, cuts: Cuts) -> None:
    """Deepcopy leaves gradients behind; the small model gets what its parameters keep of them."""
    if all(p.grad is None for p in model.parameters()):
        return
    new = dict(owned_tensors(small).values())
    with without(model, cuts.drop):
        for name, tensor in owned_tensors(model).values():
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                new[name].grad = select_indices(tensor.grad.detach().clone(), cuts.tensors.get(name, {}))
