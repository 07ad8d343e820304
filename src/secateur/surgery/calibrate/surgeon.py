"""`obs`: scores units by what their removal costs the loss (the optimal brain surgeon, Hassibi and Stork, 1993, for units).

A layer reads x and returns W x. With H = E[x x'] and G = E[g g'] for the gradients g of the loss with respect to W x (see
`curvature`), removing the inputs S costs the loss about tr(G W_S H_SS W_S') / 2 per token. If the other columns of W are
fitted again by least squares (`refit=True`), it is tr(G W_S ((H^-1)_SS)^-1 W_S') / 2. Both need W'GW only. Units are removed
one by one, the cheapest first, and the costs of all layers that read them are added. These are costs of the loss, so that
units of all kinds (channels of the stream, heads, channels of an MLP) compete by cost per parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..._layers import Layout, layout_of
from ..._tree import slots
from ...axes import Group, Member
from ...curvature import Curvature, curvature
from ...progress import track
from ...stats import Loss, check_evidence
from ...targeting import Target
from ...trace import Trace
from ..exact import units_along
from .elimination import Order, Plain, State, Surgeon, as_scores, eliminate
from .importance import Repair, UnitCriterion, Units

_WIDE = 16384  # columns of a weight
_ROUNDS = 1024  # of the elimination: with more units, several are removed at once

Readers = dict[str, Tensor]  # the name of a weight -> for each unit, its columns


def unit_costs(
    trace: Trace, groups: Sequence[Group], data: Iterable[Any] | None, repair: Repair, loss: Loss | None = None
) -> dict[Group, Tensor | str]:
    """The loss that the removal of each unit costs, per token; or why a group cannot be scored."""
    check_evidence(frozenset({"curvature"}), data, loss, of="obs")
    assert data is not None
    targets = {
        slot.name: Target(slot, layout_of(slot.module, tuple(slot.tensor.shape), slot.attribute))
        for slot in slots(trace.model)
        if slot.tensor.is_floating_point()
    }
    read = {group: _readers(trace, group, targets) for group in groups}
    names = dict.fromkeys(name for found in read.values() if not isinstance(found, str) for name in found)
    if not names:
        return {group: why for group, why in read.items() if isinstance(why, str)}
    measured = curvature(trace.model, [targets[name] for name in names], data, kind="inputs", loss=loss)
    return {
        group: found if isinstance(found, str) else _scores(found, group, measured, repair)
        for group, found in track(read.items(), "scores", lambda entry: entry[0].members[0].tensor)
    }


def _score(units: Units) -> Tensor | str:
    return units.evidence


obs = UnitCriterion("obs", _score, gather=unit_costs, priced=True)
"""What the removal of a unit costs the loss, from backward passes over `data`, with or without `refit=True`."""


def _readers(trace: Trace, group: Group, targets: dict[str, Target]) -> Readers | str:
    found: dict[str, Tensor] = {}
    for member in dict.fromkeys(m for m in group.members if m.role == "consume"):
        layout = targets[member.tensor].layout if member.tensor in targets else None
        if layout is None or len(layout.shape) < 2 or layout.groups > 1 or member.dim != (0 if layout.flip else 1):
            return f"obs: {member.tensor} reads these units and is no linear layer or convolution with groups=1"
        if layout.cols > _WIDE:
            return f"obs: {member.tensor} has {layout.cols:,} columns; up to {_WIDE:,} can be scored"
        found[member.tensor] = _columns(trace, group, member, layout)
    return found or "obs: no weight reads these units"


def _columns(trace: Trace, group: Group, member: Member, layout: Layout) -> Tensor:
    """For each unit, its columns of the weight matrix (outputs, inputs x kernel)."""
    places = units_along(trace.dims[member.tensor][member.dim], group.atom)
    units = torch.arange(group.size)[:, None]
    columns = torch.cat([(along[None] == units).nonzero()[:, 1].view(group.size, -1) for along in places], 1)
    return (columns[:, :, None] * layout.span + torch.arange(layout.span)).flatten(1)


def _scores(readers: Readers, group: Group, measured: Curvature, repair: Repair) -> Tensor | str:
    if unseen := [name for name in readers if name not in measured.G or name not in measured.H]:
        return f"obs: no token of data= reached {unseen[0]}"
    order = eliminate(_states(readers, measured, repair), group.size, _ROUNDS)
    return as_scores(Order(order.units, [error / 2 for error in order.errors]), group.size)


def _states(readers: Readers, measured: Curvature, repair: Repair) -> list[State]:
    """One state for all weights that read the same inputs: their costs have the same H, so W'GW is added."""
    together: dict[tuple[int, bytes], tuple[Tensor, Tensor, Tensor]] = {}
    whole = max(measured.tokens[name] for name in readers)
    for name, columns in readers.items():
        H, G = (_precise(found[name]) for found in (measured.H, measured.G))
        key = id(measured.H[name]), columns.numpy().tobytes()
        G = G * (measured.tokens[name] / whole)
        together[key] = (H, together[key][1] + G if key in together else G, columns)
    kind = Surgeon if repair == "refit" else Plain
    return [kind(H, _root(G), columns.to(H.device)) for H, G, columns in together.values()]


def _precise(value: Tensor) -> Tensor:
    return value.double() if value.is_cuda else value.cpu().double()


def _root(G: Tensor) -> Tensor:
    """A matrix R with R'R = G."""
    values, vectors = torch.linalg.eigh(G)
    return values.clamp(min=0).sqrt()[:, None] * vectors.T
