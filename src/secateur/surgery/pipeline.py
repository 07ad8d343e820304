"""`shrink` and `shrink_`, from the request to the small model: each step is one call.

check -> trace -> (blocks) -> group -> score -> budget -> cut and fold -> run -> repair -> judge -> plan

Everything happens on copies. Only the end of `shrink_` changes the given model, all or nothing.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Unpack

import torch
from torch import nn

from .._hints import hints, unknown_argument
from ..arguments import plain_arguments
from ..axes import Group
from ..criteria import magnitude
from ..edit import (
    Arguments,
    Cuts,
    Inputs,
    RngGuard,
    all_or_nothing,
    apply_cuts_,
    history,
    owned_tensors,
    preserve_rng,
    record_,
    remember_,
    select_indices,
    split_inputs,
    without,
)
from ..progress import Progress
from ..stats import Loss, split_batch, warn_of_unused_input
from ..trace import Trace, trace, undetermined
from .budget import Baseline, Budget, Reached
from .caches import CacheSlot, counters, empty_caches_, without_caches
from .calibrate import UNIT_CRITERIA, UnitCriterion, reestimate_, refit_, unit_scores
from .depth import RemovedBlocks, remove_blocks
from .exact import units_along
from .experts import INEXACT, remove_experts
from .leftovers import drop_leftovers_
from .masked import CutModel, make
from .names import check_globs, check_ratios, excluded, first_member, names_of, renamed
from .notes import outside_config, sizes_in_formulas
from .optimizers import cut_pruners, dropped, follow_, move_pruners_, sliced_state
from .request import AnyCriterion, ShrinkOptions, ShrinkRequest, check_model, check_request
from .result import GroupCut, Shrunk
from .runs import check_runs, depends_on_batch
from .search import ChosenCounts, keep_of
from .sizes import SizeModel, flops_of, params_of
from .verify import tied


@hints
def shrink(
    model: nn.Module,
    example_inputs: Any,
    criterion: AnyCriterion = magnitude,
    *,
    channels: float | Mapping[str, float] | None = None,
    params: float | None = None,
    flops: float | None = None,
    latency: float | None = None,
    depth: float | None = None,
    experts: float | None = None,
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
    bias: bool = True,
) -> tuple[nn.Module, Shrunk]:
    """Returns a smaller copy of the model, and the plan of the cut. The model is unchanged.

    Units (channels, attention heads, experts) are removed from all tensors that carry them. One of `channels`, `params`,
    `flops`, `latency` is the fraction that remains, met within 2 %. Where whole units cannot do that, the model gets smaller
    than asked, by as little as possible, and the plan says what was reached.

    Args:
        model: any module that runs on the example inputs.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        criterion: element scores, summed over the tensors that produce a unit; or a criterion of whole units (`sc.fpgm`,
            `sc.bn_scale`, `sc.activation_variance`, `sc.reconstruction`, "obs"); or the name of one ("wanda").
        channels: the fraction of units. A mapping gives ratios by name, `{"layer1.*": 0.5}`: globs over names of groups,
            tensors and modules; the last glob that matches counts, and other groups stay whole.
        params: the fraction of parameters, including the biases that the cut adds.
        flops: the fraction of FLOPs on the example inputs.
        latency: the fraction of the time on the example inputs, in eval mode without gradients, measured in turn with the
            original. Met within 5 %, or within the spread of the measurement if that is larger, at most 10 %.
        depth: the fraction of blocks (transformer layers, residual blocks) that remains, alone or before one of the targets
            above. Blocks whose removal changes the output least on `data`, or else on the example inputs, are removed first.
        experts: the fraction of the experts of each mixture that remains, alone. Those with the least effect on `data` are
            removed first (REAP), with their rows of the router. This is never exact.
        multiple_of: sizes that are multiples of this number stay multiples.
        scope: "global" (all groups compete; scores are divided by the mean of their group), "tensor" (every group keeps the
            same fraction) or "isomorphic" (groups of the same structure compete).
        exclude: globs over names of tensors and modules that keep their shape.
        floor: the fraction of its units that every group keeps (0.1, or the target if that is less).
        data, loss: as for `prune_`, for criteria that need them and for the repairs below.
        optimizer: its state is cut too, and it continues with the small model.
        exact_only: leaves groups and blocks whole whose cut is not exact.
        reestimate: measures the statistics of BatchNorm again on `data`.
        refit: fits the layers that read cut groups to their former outputs on `data`, by least squares.
        bias: False adds no biases to layers that have none, so that the parameters are those of the original architecture.

    Raises:
        ValueError: where floors or axes that cannot be cut put the target out of reach.

    `shrink_` returns the same pair, so that the two can be exchanged.
    """
    request = ShrinkRequest(
        criterion=criterion,
        channels=channels,
        params=params,
        flops=flops,
        latency=latency,
        depth=depth,
        experts=experts,
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
        bias=bias,
    )
    with preserve_rng() as rng:
        small, plan, state, _ = _shrunk(model, example_inputs, request, rng)
    pruners = cut_pruners(optimizer, model, plan.cuts, in_place=False)
    _remember_(small, history(model), plan)
    _carry_gradients(model, small, plan.cuts)
    if optimizer is not None:
        follow_(optimizer, model, small, state, plan.cuts, dropped(model, plan.cuts))
        move_pruners_(pruners, small)
    return small, plan


def shrink_(
    model: nn.Module,
    example_inputs: Any,
    criterion: AnyCriterion = magnitude,
    *,
    keep_dense: bool = False,
    **options: Unpack[ShrinkOptions],
) -> tuple[nn.Module, Shrunk]:
    """`shrink` in place, with the same keywords: the model itself gets smaller, and its parameters stay the same objects.

    Returns the model and the plan. When anything fails, the model and the optimizer are as they were. `keep_dense=True` keeps
    the original weights, so that `plan.undo_()` restores them bit for bit.
    """
    if unknown := sorted(options.keys() - _DEFAULTS.keys()):
        raise unknown_argument("shrink_", unknown[0], (*_DEFAULTS, "criterion", "keep_dense"))
    request = ShrinkRequest(criterion=criterion, **{**_DEFAULTS, **options})
    if keep_dense and request.optimizer is not None:
        raise ValueError("keep_dense=True cannot undo the changes to optimizer=; leave one of them out")
    with preserve_rng() as rng:
        small, plan, state, caches = _shrunk(model, example_inputs, request, rng)
    gone, past = dropped(model, plan.cuts), history(model)
    pruners = cut_pruners(request.optimizer, model, plan.cuts, in_place=True)
    with all_or_nothing(model) as before:
        apply_cuts_(model, plan.cuts, dict(owned_tensors(small).values()))
        drop_leftovers_(model, small)
        empty_caches_(model, caches)
        _remember_(model, past, plan)
    if request.optimizer is not None:
        follow_(request.optimizer, model, model, state, plan.cuts, gone)
        move_pruners_(pruners, None)
    plan.small, plan.original = model, None
    plan.restore_ = before.restore_ if keep_dense else None
    return model, plan


_DEFAULTS: dict[str, Any] = {
    name: p.default for name, p in inspect.signature(shrink).parameters.items() if p.kind is p.KEYWORD_ONLY
}
_OWN = [p for p in inspect.signature(shrink_).parameters.values() if p.kind is not p.VAR_KEYWORD]
_SHARED = [p for p in inspect.signature(shrink).parameters.values() if p.kind is p.KEYWORD_ONLY]
shrink_.__signature__ = inspect.signature(shrink).replace(parameters=[*_OWN, *_SHARED])  # type: ignore[attr-defined]  # for help()


# --- the steps ------------------------------------------------------------------------------------------------------


class _Done(NamedTuple):
    small: nn.Module
    plan: Shrunk
    state: dict[str, dict[str, Any]]  # of the optimizer, cut
    caches: list[CacheSlot]


def _shrunk(model: nn.Module, example_inputs: Any, request: ShrinkRequest, rng: RngGuard) -> _Done:
    check_model(model)
    request, inputs = check_request(request), split_inputs(example_inputs)
    if isinstance(request.data, list) and request.loss is None:
        warn_of_unused_input(model, request.data[0])
    with without_caches(model, inputs) as caches, Progress("shrink") as progress:
        if request.experts is None:
            small, plan = _cut_blocks_and_units(model, inputs, request, rng, progress)
        else:
            progress("removing experts")
            small, plan = _only_experts(model, inputs, request)
        empty_caches_(small, caches)
    plan.cuts.recipe, plan.arguments = plan.recipe, _arguments(request)
    state = {} if request.optimizer is None else sliced_state(request.optimizer, model, plan.cuts)
    return _Done(small, plan, state, caches)


def _cut_blocks_and_units(
    model: nn.Module, inputs: Inputs, request: ShrinkRequest, rng: RngGuard, progress: Progress
) -> tuple[nn.Module, Shrunk]:
    progress("tracing the model")
    traced = trace(model, *inputs)
    check_globs(traced, "exclude", request.exclude)
    progress("removing blocks")
    blocks = _without_blocks(model, inputs, request)
    if request.what:
        return _cut_units(model, traced, inputs, blocks, request, rng, progress)
    return _only_blocks(model, inputs, blocks, request)


def _only_experts(model: nn.Module, inputs: Inputs, request: ShrinkRequest) -> tuple[nn.Module, Shrunk]:
    removed = remove_experts(model, inputs, request.experts or 1.0, request.data, request.exclude)
    rows = [GroupCut(m.experts, m.count, len(stay), INEXACT, (m.experts, m.router), unit="expert") for m, stay in removed.kept]
    recipe = f"reap, experts={request.experts:g}"
    totals = _totals(model, removed.model, inputs)
    return removed.model, Shrunk(
        recipe, rows, removed.skipped, {}, removed.cuts, totals, removed.model, model, inputs, removed.note
    )


def _totals(model: nn.Module, small: nn.Module, inputs: Inputs) -> dict[str, tuple[float, float]]:
    return {
        "params": (params_of(model), params_of(small)),
        "flops": (flops_of(model, *inputs), flops_of(small, *inputs)),
    }


def _arguments(request: ShrinkRequest) -> Arguments:
    """The request as a recipe holds it. Blocks are chosen by the data, if there are any, so that "none" is said too."""
    given = vars(request)
    if isinstance(request.criterion, UnitCriterion) and UNIT_CRITERIA.get(request.criterion.name) is request.criterion:
        given = {**given, "criterion": request.criterion.name}
    found = plain_arguments(shrink, given)
    return {**found, "data": None} if isinstance(found, dict) and request.depth is not None and request.data is None else found


def _without_blocks(model: nn.Module, inputs: Inputs, request: ShrinkRequest) -> RemovedBlocks | None:
    if request.depth is None or (request.depth == 1 and request.what):
        return None
    batches = None if request.data is None else [split_batch(batch)[:2] for batch in request.data]
    return remove_blocks(model, inputs, request.depth, exclude=request.exclude, batches=batches, exact_only=request.exact_only)


def _only_blocks(
    model: nn.Module, inputs: Inputs, blocks: RemovedBlocks | None, request: ShrinkRequest
) -> tuple[nn.Module, Shrunk]:
    assert blocks is not None
    small = blocks.model
    if request.reestimate:
        reestimate_(small, request.data)
    totals = _totals(model, small, inputs)
    return small, Shrunk(
        _depth_recipe(blocks, request), _block_rows(blocks), blocks.kept, {}, blocks.cuts, totals, small, model, inputs
    )


def _cut_units(
    whole: nn.Module,
    traced: Trace,
    inputs: Inputs,
    blocks: RemovedBlocks | None,
    request: ShrinkRequest,
    rng: RngGuard,
    progress: Progress,
) -> tuple[nn.Module, Shrunk]:
    """Cut units out of the model, or out of what the removed blocks left of it."""
    model, drop = (whole, {}) if blocks is None else (blocks.model, blocks.cuts.drop)
    frozen = excluded(traced, request.exclude)
    check_ratios(traced, request.ratios, frozen)
    units = sum(g.size for g in traced.prunable if g not in frozen)
    traced = traced if blocks is None else trace(model, *inputs)
    left = excluded(traced, renamed(whole, drop, request.exclude))
    groups = [g for g in traced.prunable if g not in left]
    progress("scoring units")
    scores, unscored = unit_scores(traced, groups, request.criterion, request.data, request.loss, request.repair)
    rng.keep_draws()  # a random criterion draws other numbers in the next cut
    left |= unscored
    sizes = SizeModel(traced)
    flops = sizes.flops({}) if blocks is None else flops_of(whole, *inputs)
    baseline = Baseline(whole, params_of(whole), flops, units / max(1, sum(g.size for g in groups)))
    budget = _budget(sizes, inputs, baseline, drop, request)
    budget.check_baseline()
    counting = counters(model, inputs, traced.record.counters)
    while True:
        if not scores:
            raise ValueError(_nothing_left(traced, left))
        progress("choosing how many units to keep")
        choice = budget.choose(scores)
        progress("cutting")
        keep = keep_of(scores, choice.counts)
        made = make(model, traced, keep, bias=request.bias)
        if counting:
            why = f"every run changes {', '.join(counting)}, so later runs may compute something else than the traced one"
            made.reasons.update({g: why for g in scores if g.atom in keep and g not in made.reasons})
        one_size = depends_on_batch(traced, made, keep, inputs, bias=request.bias)
        made.reasons.update({g: why for g, why in one_size.items() if g not in made.reasons})
        inexact = [g for g in scores if g in made.reasons] if request.exact_only else []
        if inexact:
            left |= {g: f"exact_only: {made.reasons[g]}" for g in inexact}
            scores = {g: s for g, s in scores.items() if g not in left}
            continue
        counted = check_runs(traced, made.small, inputs, budget.flops(choice), keep)
        progress("repairing and measuring")
        unfitted = _repair_(made, model, request, entire=blocks is None)
        reached = budget.judge(choice, made.small, made.cuts.added, counted)
        if reached is not None:
            break
    plan = _plan(request, whole, traced, choice, made, left, reached, inputs)
    plan.skipped |= unfitted
    if blocks is not None:
        _add_blocks(plan, blocks, request)
    return made.small, plan


def _budget(
    sizes: SizeModel, inputs: Inputs, baseline: Baseline, drop: Mapping[str, list[int]], request: ShrinkRequest
) -> Budget:
    names = {new: ratio for glob, ratio in request.ratios.items() for new in renamed(baseline.model, drop, [glob])}
    priced = isinstance(request.criterion, UnitCriterion) and request.criterion.priced
    return Budget(
        sizes=sizes,
        inputs=inputs,
        baseline=baseline,
        what=request.what,
        target=request.target,
        ratios=names,
        scope=request.scope,
        multiple_of=request.multiple_of,
        floor=request.floor,
        priced=priced,
        bias=request.bias,
    )


def _repair_(made: CutModel, model: nn.Module, request: ShrinkRequest, *, entire: bool) -> dict[str, str]:
    """Repair the cut model from data, as asked. Returns the layers that could not be refitted, and why.

    Without all of its blocks (`entire=False`), the learned statistics of the model no longer apply.
    """
    left: dict[str, str] = {}
    if request.refit:
        skipped = refit_(made.small, model, made.cuts, request.data, bias=request.bias)
        left = {name: f"not refitted: {why}" for name, why in skipped.items()}
    if request.reestimate:
        reestimate_(made.small, request.data, *((model, made.cuts) if entire else (None, None)))
    return left


# --- the plan -------------------------------------------------------------------------------------------------------


def _plan(
    request: ShrinkRequest,
    whole: nn.Module,
    traced: Trace,
    choice: ChosenCounts,
    made: CutModel,
    left: Mapping[Group, str],
    reached: Reached,
    inputs: Inputs,
) -> Shrunk:
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


def _add_blocks(plan: Shrunk, blocks: RemovedBlocks, request: ShrinkRequest) -> None:
    """Put the removed blocks before the cut units."""
    plan.recipe = f"{_depth_recipe(blocks, request)}, then {plan.recipe} (fractions of the whole model)"
    plan.cuts.attributes[:0] = blocks.cuts.attributes
    plan.cuts.drop, plan.cuts.lengths = blocks.cuts.drop, blocks.cuts.lengths
    plan.groups[:0] = _block_rows(blocks)
    plan.skipped |= blocks.kept


def _depth_recipe(blocks: RemovedBlocks, request: ShrinkRequest) -> str:
    return f"depth={request.depth:g} by the change of the output ({blocks.effect:.3g})"


def _block_rows(blocks: RemovedBlocks) -> list[GroupCut]:
    return [GroupCut(b.path, b.before, b.after, b.why, b.removed) for b in blocks.lists]


def _nothing_left(traced: Trace, left: Mapping[Group, str]) -> str:
    reasons = list(dict.fromkeys((*left.values(), *traced.skipped.values())))
    shown = "; ".join(reasons[:6]) or "no tensor has units"
    return f"no group of {type(traced.model).__name__} is left to cut ({shown}). The model is unchanged."


def _remember_(small: nn.Module, past: Sequence[Cuts], plan: Shrunk) -> None:
    """Store the cuts in the small model, and add the cut to the record of what was done to it."""
    remember_(small, (*past, plan.cuts))
    record_(small, ("shrink", plan.recipe), plan.arguments)


def _carry_gradients(model: nn.Module, small: nn.Module, cuts: Cuts) -> None:
    """Copy the kept part of each gradient to the small model: copy.deepcopy leaves gradients behind."""
    if all(p.grad is None for p in model.parameters()):
        return
    new = dict(owned_tensors(small).values())
    with without(model, cuts.drop):
        for name, tensor in owned_tensors(model).values():
            if isinstance(tensor, nn.Parameter) and tensor.grad is not None:
                new[name].grad = select_indices(tensor.grad.detach().clone(), cuts.tensors.get(name, {}))
