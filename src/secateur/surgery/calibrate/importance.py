"""Scores of the units of coupled groups: element scores summed over the weights of a unit, or a score of the unit as a
whole.

The weights of a unit are those that produce it (a row of a layer, a column of an embedding), or, where none does, all
parameters that carry it. A criterion with input norms leaves out tables that no input is multiplied with (embeddings).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..._layers import layout_of
from ..._tree import slots
from ...axes import Group, Member
from ...criteria import Criterion, criterion
from ...edit import preserve_rng
from ...evidence import TensorEvidence
from ...stats import Loss, collect
from ...targeting import Target
from ...trace import Trace
from ..exact import units_along
from ..names import label
from .variance import variances


def carriers(group: Group, parameters: Iterable[str]) -> list[Member]:
    """The parameters that score the units: those that produce them, else all that carry them."""
    known = set(parameters)
    own = list(dict.fromkeys(m for m in group.members if m.tensor in known))
    return [m for m in own if m.role == "produce"] or own


@dataclass
class Units:
    """The units of one group, for a criterion that scores them as a whole. `evidence`: what it gathered from data."""

    trace: Trace
    group: Group
    parameters: Mapping[str, Tensor]
    evidence: Any = None

    def rows(self, members: Sequence[Member] | None = None) -> Tensor:
        """A matrix with one row for each unit: all weights that produce it."""
        blocks: list[Tensor] = []
        for m in carriers(self.group, self.parameters) if members is None else members:
            tensor = self.parameters[m.tensor].detach()
            for along in units_along(self.trace.dims[m.tensor][m.dim], self.group.atom):
                order = along.argsort(stable=True)[int((along < 0).sum()) :]
                picked = tensor.movedim(m.dim, 0)[order.to(tensor.device)]
                blocks.append(picked.reshape(self.group.size, -1).double())
        return torch.cat(blocks, 1)

    @cached_property
    def scales(self) -> list[Member]:
        """The weights of batch normalisations over the units."""
        normed = {m.tensor.rpartition(".")[0] for m in self.group.members if m.tensor.rpartition(".")[2] == "running_var"}
        named = {f"{path}.weight".removeprefix(".") for path in normed}
        return [m for m in self.group.members if m.tensor in named and m.tensor in self.parameters]


Repair = Literal["none", "reestimate", "refit"]
Gather = Callable[[Trace, Sequence[Group], Iterable[Any] | None, Repair, Loss | None], Mapping[Group, Any]]


@dataclass(frozen=True)
class UnitCriterion:
    """A criterion that scores units as a whole. `score` takes `Units` and returns a vector, or the reason why it cannot.

    `gather` collects evidence for all groups at once, from `data` and `loss`, for the repair that follows the cut.
    `priced`: the scores of all groups measure the same quantity (the error of the output, the loss), so groups compete by
    score per cost of a unit.
    """

    name: str
    score: Callable[[Units], Tensor | str]
    level: str = "unit"
    gather: Gather | None = None
    priced: bool = False

    def __str__(self) -> str:
        return self.name


def unit_criterion(function: Callable[[Units], Tensor | str]) -> UnitCriterion:
    """Makes a criterion of a function that scores the units of a group: `criterion=unit_criterion(mine)`."""
    return UnitCriterion(getattr(function, "__name__", type(function).__name__), function)


@unit_criterion
def fpgm(units: Units) -> Tensor:
    """The sum of distances to all other units: a unit near the geometric median is replaceable (He et al., 2019)."""
    rows = units.rows()
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist").sum(1)


@unit_criterion
def bn_scale(units: Units) -> Tensor | str:
    """The absolute weight of the batch normalisation that follows (network slimming: Liu et al., 2017)."""
    if not units.scales:
        return "bn_scale: no batch normalisation with a weight runs over these units"
    return units.rows(units.scales).abs().sum(1)


@unit_criterion
def reap(units: Units) -> str:
    """Gate times norm of the output of an expert (Lasby et al., 2025). It is for `shrink(experts=)`, and scores no channels."""
    return "reap scores whole experts, not channels or heads: ask for experts=, the fraction of them that remains"


def _variance(units: Units) -> Tensor | str:
    return "activation_variance: no weight reads these units" if units.evidence is None else units.evidence


activation_variance = UnitCriterion(
    "activation_variance", _variance, gather=lambda trace, groups, data, *_: variances(trace, groups, data)
)
"""The variance of a unit's activations over `data`: a bias can replace a unit that hardly varies (Polyak & Wolf, 2015)."""

UnitScores = dict[Group, Tensor]


def unit_scores(
    trace: Trace,
    groups: Sequence[Group],
    by: Criterion | UnitCriterion | Callable[..., Tensor],
    data: Iterable[Any] | None,
    loss: Loss | None,
    repair: Repair = "none",
) -> tuple[UnitScores, dict[Group, str]]:
    """A score for every unit of each group (float64, on the CPU), and the groups that have none, with the reason."""
    if not groups:
        return {}, {}
    model = trace.model
    owners = {slot.name: slot for slot in slots(model)}
    parameters = {name: slot.tensor for name, slot in owners.items() if slot.tensor.is_floating_point()}
    if isinstance(by, UnitCriterion):
        with preserve_rng():
            gathered = by.gather(trace, groups, data, repair, loss) if by.gather else {}
        return _whole_units(trace, groups, by, parameters, gathered)
    by = criterion(by)
    carrying = {group: carriers(group, parameters) for group in groups}
    names = list(dict.fromkeys(m.tensor for members in carrying.values() for m in members))
    targets = {
        name: Target(owner, layout_of(owner.module, tuple(parameters[name].shape), owner.attribute))
        for name, owner in ((name, owners[name]) for name in names)
    }
    with preserve_rng():
        table = collect(model, list(targets.values()), by.needs, data, loss, unread=True)
    read = {name for name, entry in table.items() if by.needs <= entry.keys()}
    carrying = {group: [m for m in members if m.tensor in read] for group, members in carrying.items()}
    wanted: dict[str, set[int]] = {}
    for m in (m for members in carrying.values() for m in members):
        wanted.setdefault(m.tensor, set()).add(m.dim)
    sums: dict[tuple[str, int], Tensor] = {}
    for name, dims in wanted.items():
        evidence = TensorEvidence(targets[name], table[name])
        sums |= {(name, d): total for d, total in _sums(by, evidence, dims).items()}
    scores: UnitScores = {}
    for group, members in carrying.items():
        total = torch.zeros(group.size, dtype=torch.float64)
        for m in members:
            for along in units_along(trace.dims[m.tensor][m.dim], group.atom):
                here = along >= 0
                total.index_add_(0, along[here], sums[m.tensor, m.dim][here])
        scores[group] = _ranked(group, total)
    left = {group: _why_unscored(by, group, parameters) for group, members in carrying.items() if not members}
    return {g: s for g, s in scores.items() if g not in left}, left


def _why_unscored(by: Criterion, group: Group, parameters: Mapping[str, Tensor]) -> str:
    if not carriers(group, parameters):
        return "no parameter carries these units"
    return f"{by}: no input is multiplied with the weights that make these units"


def _sums(by: Criterion, evidence: TensorEvidence, dims: set[int]) -> dict[int, Tensor]:
    """The scores of one tensor, summed over all dims but one, for each of these dims."""
    layout = evidence.layout
    scores = by.scores(evidence)
    if (
        dims == {0} and len(layout.shape) > 1 and not layout.flip and not layout.stacked
    ):  # by rows, so that the scores are never all in memory
        return {0: torch.cat(scores.each(lambda slab, *_: slab.sum(1))).double().cpu()}
    whole = layout.restore(scores.rows(0, layout.rows))
    others = {d: [i for i in range(whole.dim()) if i != d] for d in dims}
    return {d: (whole.sum(over) if over else whole).double().cpu() for d, over in others.items()}


def _whole_units(
    trace: Trace, groups: Sequence[Group], by: UnitCriterion, parameters: Mapping[str, Tensor], evidence: Mapping[Group, Any]
) -> tuple[UnitScores, dict[Group, str]]:
    scores: UnitScores = {}
    left: dict[Group, str] = {}
    for group in groups:
        answer = (
            by.score(Units(trace, group, parameters, evidence.get(group)))
            if carriers(group, parameters)
            else "no parameter carries these units"
        )
        if isinstance(answer, str):
            left[group] = answer
        else:
            if answer.shape != (group.size,):
                raise ValueError(
                    f"{by} gave scores of shape {tuple(answer.shape)} for the {group.size} units of {label(group)}; "
                    "expected one for each unit"
                )
            scores[group] = _ranked(group, answer.detach().double().cpu())
    return scores, left


def _ranked(group: Group, scores: Tensor) -> Tensor:
    if bool(scores.isnan().any()):
        raise ValueError(f"the scores of the units of {label(group)} contain NaN; check its weights and the criterion")
    return scores


def comparable(scores: Tensor) -> Tensor:
    """UnitScores over the mean of their size, so that groups with more weights to a unit do not win by that alone."""
    mean = scores.abs().mean()
    return scores / mean if bool(mean > 0) and bool(mean.isfinite()) else scores


def structure(trace: Trace, group: Group, modules: Mapping[str, nn.Module]) -> tuple[Any, ...]:
    """A key that is equal for groups of the same layers, tensors and shapes (isomorphic pruning: Fang et al., 2024)."""
    found: list[tuple[Any, ...]] = []
    for m in group.members:
        path, _, attribute = m.tensor.rpartition(".")
        shape = tuple(e.size for e in trace.dims[m.tensor])
        found.append((type(modules.get(path)).__name__, attribute, shape, m.dim, m.role))
    return group.size, tuple(sorted(found))
