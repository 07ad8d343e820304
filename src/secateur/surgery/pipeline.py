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
from ..trace import Trace, trace
from .assemble import add_blocks_, block_plan, expert_plan, nothing_left, unit_plan
from .budget import Baseline, Budget
from .caches import CacheSlot, counters, empty_caches_, without_caches
from .calibrate import UNIT_CRITERIA, UnitCriterion, reestimate_, refit_, unit_scores
from .depth import RemovedBlocks, remove_blocks
from .experts import remove_experts
from .leftovers import drop_leftovers_
from .masked import CutModel, make
from .names import check_globs, check_ratios, excluded, renamed
from .optimizers import cut_pruners, dropped, follow_, move_pruners_, sliced_state
from .request import AnyCriterion, ShrinkOptions, ShrinkRequest, check_model, check_request
from .result import Shrunk
from .runs import DoesNotRun, check_runs, depends_on_batch, in_formulas
from .search import keep_of
from .sizes import SizeModel, flops_of, params_of


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
    `flops`, `latency` is the fraction that remains, met within 2 %. If whole units cannot meet it, the model becomes
    slightly smaller than requested, and the plan reports the fraction that was reached.

    Args:
        model: any module that runs on the example inputs.
        example_inputs: a tensor, a tuple of positional arguments, or a mapping of keyword arguments.
        criterion: element scores, summed over the tensors that produce a unit; or a criterion of whole units (`sc.fpgm`,
            `sc.bn_scale`, `sc.activation_variance`, `sc.reconstruction`, `sc.obs`); or the name of one ("wanda").
        channels: the fraction of units. A mapping gives ratios by name, `{"layer1.*": 0.5}`: globs over names of groups,
            tensors and modules; the last glob that matches counts, and other groups stay whole.
        params: the fraction of parameters, including the biases that the cut adds.
        flops: the fraction of FLOPs on the example inputs.
        latency: the fraction of the time on the example inputs, in eval mode without gradients, measured in turn with the
            original. Met within 5 %, or within the spread of the measurement if that is larger, at most 10 %.
        depth: the fraction of blocks (transformer layers, residual blocks) that remains, alone or before one of the targets
            above. Blocks whose removal changes the output least on `data`, or else on the example inputs, are removed first;
            with "obs" those whose removal costs the loss least, if the model returns logits and `loss` is left out.
        experts: the fraction of the experts of each mixture that remains, alone. Those with the least effect on `data` are
            removed first (`sc.reap`), with their rows of the router. This is never exact.
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
    plan.note = "; ".join(filter(None, (plan.note, request.unread)))
    plan.cuts.recipe, plan.arguments = plan.recipe, _arguments(request)
    state = {} if request.optimizer is None else sliced_state(request.optimizer, model, plan.cuts)
    return _Done(small, plan, state, caches)


def _cut_blocks_and_units(
    model: nn.Module, inputs: Inputs, request: ShrinkRequest, rng: RngGuard, progress: Progress
) -> tuple[nn.Module, Shrunk]:
    progress("tracing the model")
    traced = trace(model, *inputs)
    check_globs(model, "exclude", request.exclude, traced.dims)
    progress("removing blocks")
    blocks = _without_blocks(model, inputs, request)
    if request.what:
        return _cut_units(model, traced, inputs, blocks, request, rng, progress)
    return _only_blocks(model, inputs, blocks, request)


def _only_experts(model: nn.Module, inputs: Inputs, request: ShrinkRequest) -> tuple[nn.Module, Shrunk]:
    check_globs(model, "exclude", request.exclude, (name for name, _ in owned_tensors(model).values()))
    removed = remove_experts(model, inputs, request.experts or 1.0, request.data, request.exclude)
    return removed.model, expert_plan(request, model, removed, inputs)


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
    return remove_blocks(
        model,
        inputs,
        request.depth,
        exclude=request.exclude,
        batches=batches,
        exact_only=request.exact_only,
        by_loss=request.priced and request.loss is None,
    )


def _only_blocks(
    model: nn.Module, inputs: Inputs, blocks: RemovedBlocks | None, request: ShrinkRequest
) -> tuple[nn.Module, Shrunk]:
    assert blocks is not None
    small = blocks.model
    if request.reestimate:
        reestimate_(small, request.data)
    return small, block_plan(request, model, blocks, inputs)


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
            raise ValueError(nothing_left(traced, left))
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
        try:
            counted = check_runs(traced, made.small, inputs, budget.flops(choice), keep)
        except DoesNotRun as error:
            blamed = in_formulas(traced, keep)
            if not blamed:
                raise
            left |= {g: f"{why}, and without some of its units {error.what}" for g, why in blamed.items()}
            scores = {g: s for g, s in scores.items() if g not in left}
            continue
        progress("repairing and measuring")
        unfitted = _repair_(made, model, request, entire=blocks is None)
        reached = budget.judge(choice, made.small, made.cuts.added, counted)
        if reached is not None:
            break
    plan = unit_plan(request, whole, traced, choice, made, left, reached, inputs)
    plan.skipped |= unfitted
    if blocks is not None:
        add_blocks_(plan, blocks, request)
    return made.small, plan


def _budget(
    sizes: SizeModel, inputs: Inputs, baseline: Baseline, drop: Mapping[str, list[int]], request: ShrinkRequest
) -> Budget:
    names = {new: ratio for glob, ratio in request.ratios.items() for new in renamed(baseline.model, drop, [glob])}
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
        priced=request.priced,
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


# --- what the models carry on -----------------------------------------------------------------------------------------


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
