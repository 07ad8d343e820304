"""Builds the plan of a cut from what the steps of `shrink` found: the rows of its table, what is left whole, the totals."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from ..axes import Group
from ..edit import Inputs
from ..trace import Trace, undetermined
from .budget import Reached
from .depth import RemovedBlocks
from .exact import units_along
from .experts import INEXACT, RemovedExperts
from .masked import CutModel
from .names import first_member, names_of
from .notes import outside_config, sizes_in_formulas
from .request import ShrinkRequest
from .result import GroupCut, Shrunk
from .search import ChosenCounts
from .sizes import flops_of, params_of
from .verify import tied


def unit_plan(
    request: ShrinkRequest,
    whole: nn.Module,
    traced: Trace,
    choice: ChosenCounts,
    made: CutModel,
    left: Mapping[Group, str],
    reached: Reached,
    inputs: Inputs,
) -> Shrunk:
    """The plan of a cut of units."""
    names, fewer = names_of(traced), {g.atom: g for g, n in choice.counts.items() if n < g.size}
    reasons = dict(made.reasons)
    for together in tied(traced, fewer):  # groups that can only be cut together are exact together
        worst = next((g for g in together if g in made.reasons), None)
        if worst is not None:
            reasons |= {g: f"is cut together with {names[worst]}, which is not" for g in together if g not in made.reasons}
    groups = [
        GroupCut(names[g], g.size, n, reasons.get(g), tuple(dict.fromkeys(m.tensor for m in g.members)), _entries(traced, g))
        for g, n in choice.counts.items()
    ]
    unknown = undetermined(traced, {atom: choice.counts[g] for atom, g in fewer.items()})
    skipped = {**{names[g]: why for g, why in left.items()}, **traced.skipped}
    skipped |= dict.fromkeys(unknown, "a number that the traced run did not read; its new value is not known")
    skipped |= outside_config(whole, made.cuts)
    moved = {names[g]: why for g, why in choice.moved.items()}
    note = "; ".join(part for part in (reached.note, sizes_in_formulas(traced) if made.folded else "") if part)
    recipe = request.recipe(reached.measured)
    return Shrunk(recipe, groups, skipped, moved, made.cuts, reached.totals, made.small, whole, inputs, note)


def _entries(traced: Trace, group: Group) -> int:
    """How many entries of the axis after which a group is named belong to one unit: the rows of a head, for instance."""
    first = first_member(group)
    found = units_along(traced.dims[first.tensor][first.dim], group.atom)
    return sum(int((along >= 0).sum()) for along in found) // group.size


def block_plan(request: ShrinkRequest, model: nn.Module, blocks: RemovedBlocks, inputs: Inputs) -> Shrunk:
    """The plan where only blocks are removed."""
    totals, recipe = _totals(model, blocks.model, inputs), _depth_recipe(blocks, request)
    return Shrunk(recipe, _block_rows(blocks), blocks.kept, {}, blocks.cuts, totals, blocks.model, model, inputs)


def expert_plan(request: ShrinkRequest, model: nn.Module, removed: RemovedExperts, inputs: Inputs) -> Shrunk:
    """The plan where experts are removed."""
    rows = [GroupCut(m.experts, m.count, len(stay), INEXACT, (m.experts, m.router), unit="expert") for m, stay in removed.kept]
    totals, recipe = _totals(model, removed.model, inputs), f"reap, experts={request.experts:g}"
    return Shrunk(recipe, rows, removed.skipped, {}, removed.cuts, totals, removed.model, model, inputs, removed.note)


def _totals(model: nn.Module, small: nn.Module, inputs: Inputs) -> dict[str, tuple[float, float]]:
    return {
        "params": (params_of(model), params_of(small)),
        "flops": (flops_of(model, *inputs), flops_of(small, *inputs)),
    }


def add_blocks_(plan: Shrunk, blocks: RemovedBlocks, request: ShrinkRequest) -> None:
    """Put the removed blocks before the cut units."""
    plan.recipe = f"{_depth_recipe(blocks, request)}, then {plan.recipe} (fractions of the whole model)"
    plan.cuts.attributes[:0] = blocks.cuts.attributes
    plan.cuts.drop, plan.cuts.lengths = blocks.cuts.drop, blocks.cuts.lengths
    plan.groups[:0] = _block_rows(blocks)
    plan.skipped |= blocks.kept


def _depth_recipe(blocks: RemovedBlocks, request: ShrinkRequest) -> str:
    return f"depth={request.depth:g} by {blocks.effect}"


def _block_rows(blocks: RemovedBlocks) -> list[GroupCut]:
    return [GroupCut(b.path, b.before, b.after, b.why, b.removed) for b in blocks.lists]


def nothing_left(traced: Trace, left: Mapping[Group, str]) -> str:
    """The error where no group may be cut."""
    reasons = list(dict.fromkeys((*left.values(), *traced.skipped.values())))
    shown = "; ".join(reasons[:6]) or "no tensor has units"
    return f"no group of {type(traced.model).__name__} is left to cut ({shown}). The model is unchanged."
