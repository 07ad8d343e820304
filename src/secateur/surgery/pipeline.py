"""From a request to a small model and its plan: trace, score, choose, cut, check by running. Nothing given is touched."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..axes import Group
from ..criteria import Criterion
from ..edit import RngGuard, copied, split_inputs
from ..trace import Trace, trace, undetermined
from .budget import Choice, Knob, busy, choose, figure, keep_of, met, tells, within
from .calibrate import Scores, UnitCriterion, unit_scores
from .cut import Keep
from .masked import Made, make, names_of, silence_
from .optimizers import sliced_state
from .request import Options, check, excluded, target_of
from .result import Row, Shrunk
from .sizes import SizeModel, Timing, outline, times
from .verify import tied

_TRIES = 4  # to meet a time: the machine may not be the same from one minute to the next
Shapes = list[tuple[int, ...]]
AnyCriterion = Criterion | UnitCriterion | Callable[..., Tensor]


class Done(NamedTuple):
    small: nn.Module
    plan: Shrunk
    state: dict[str, dict[str, Any]]


def shrunk(
    model: nn.Module,
    example_inputs: Any,
    criterion: AnyCriterion,
    options: Options,
    rng: RngGuard,
    whole: nn.Module | None = None,
) -> Done:
    """`rng`: the guard around this call, which keeps the draws of a random criterion.

    `whole`: the model before its blocks went, if some did: times are compared with its time.
    """
    check(options)
    whole = model if whole is None else whole
    what, target = target_of(options)
    data = options.get("data")
    if data is not None and iter(data) is data:  # it may be needed twice
        data = list(data)
    args, kwargs = split_inputs(example_inputs)
    traced = trace(model, args, kwargs)
    left = excluded(traced, options.get("exclude", ()))
    groups = [g for g in traced.prunable if g not in left]
    repair = "refit" if options.get("refit") else "reestimate" if options.get("reestimate") else "none"
    scores, unscored = unit_scores(traced, groups, criterion, data, options.get("loss"), repair) if groups else ({}, {})
    rng.keep_draws()  # a random criterion draws anew in the next cut
    left |= unscored
    sizes, seen = SizeModel(traced), []  # seen: the times of cuts that were not what was asked
    priced = isinstance(criterion, UnitCriterion) and criterion.priced
    costs = _costs(sizes, scores, what) if priced else None
    while True:
        if not scores:
            raise ValueError(_nothing_left(traced, left))
        choice = _choice(traced, scores, sizes, what, target, options, costs, (args, kwargs), whole)
        if choice.stopped and what != "params":  # parameters are known when it is cut: biases may be added
            seen.append(figure(choice.remains, choice.spread))
            if what == "latency" and choice.remains <= target and len(seen) < _TRIES:  # less can be had: the times vary
                continue
            raise ValueError(_with_tries(choice.stopped, seen))
        keep = keep_of(scores, choice.counts)
        made = make(model, traced, keep, args, kwargs)
        inexact = [g for g in scores if g in made.reasons] if options.get("exact_only") else []
        if inexact:
            left |= {g: f"exact_only: {made.reasons[g]}" for g in inexact}
            scores = {g: s for g, s in scores.items() if g not in left}
            continue
        counts = {g.atom: n for g, n in choice.counts.items()}
        counted = _check_runs(traced, made.small, args, kwargs, sizes.flops(counts), keep)
        unfitted = _repair(made, model, data, options, whole is model)
        timing = times(whole, made.small, (args, kwargs)) if what == "latency" else None
        totals = _totals(model, made.small, sizes, counted, timing)
        miss = _miss(what, target, totals, timing, made.cuts.added)
        if miss is None:
            break
        seen += [] if timing is None else [figure(timing.ratio, timing.spread)]
        # what was cut says more than what was foreseen: which biases are added, how fast it is now
        if not (sizes.learn(made.cuts.added, counts) if what == "params" else what == "latency" and len(seen) < _TRIES):
            raise ValueError(_with_tries(choice.stopped or miss, seen))
    optimizer = options.get("optimizer")
    state = {} if optimizer is None else sliced_state(optimizer, model, made.cuts)
    measured = "" if timing is None else f" (measured {figure(timing.ratio, timing.spread)})"
    rest = f"scope={options.get('scope', 'global')}, multiple_of={options.get('multiple_of', 1)}"
    recipe = f"{criterion}, {what}={target:g}{measured}, {rest}"
    plan = _plan(recipe, model, traced, choice, made, left, totals, (args, kwargs))
    plan.skipped |= unfitted
    return Done(made.small, plan, state)


def _with_tries(text: str, seen: Sequence[str]) -> str:
    return f"{text} Measured, one try after the other: {', '.join(seen)}." if len(seen) > 1 else text


def _choice(
    traced: Trace,
    scores: Scores,
    sizes: SizeModel,
    what: str,
    target: float,
    options: Options,
    costs: Mapping[Group, float] | None,
    inputs: tuple[Any, Any],
    whole_model: nn.Module,
) -> Choice:
    given = options.get("floor")
    floor = min(0.1, target) if given is None else float(given)
    floors = {g: min(g.size, max(1, math.ceil(floor * g.size))) for g in scores}
    knob = Knob(traced, scores, floors, options.get("scope", "global"), options.get("multiple_of", 1), costs)
    whole = {"params": sizes.params({}), "flops": sizes.flops({}), "channels": sum(g.size for g in scores)}
    if not whole.get(what, 1):
        raise ValueError(f"{what}={target:g}: the model has no {what} to count on these inputs; ask for another target")

    def measure(counts: Mapping[Group, int]) -> float | Timing:
        if what == "channels":
            return sum(counts.values()) / whole["channels"]
        if what == "latency":
            small = make(traced.model, traced, keep_of(scores, counts), *inputs).small
            return times(whole_model, small, inputs, lambda t: tells(t, target), seconds=(0.1, 1.0))
        atoms = {g.atom: n for g, n in counts.items()}
        return (sizes.params(atoms) if what == "params" else sizes.flops(atoms)) / whole[what]

    return choose(knob, measure, target, what)


def _costs(sizes: SizeModel, scores: Scores, what: str) -> dict[Group, float]:
    """What one unit of each group adds to what the target counts (FLOPs stand for time)."""
    if what == "channels":
        return dict.fromkeys(scores, 1.0)
    count = sizes.params if what == "params" else sizes.flops
    whole = count({})
    return {g: float(max(1, whole - count({g.atom: g.size - 1}))) for g in scores}


def _repair(made: Made, model: nn.Module, data: Iterable[Any] | None, options: Options, entire: bool) -> dict[str, str]:
    """Repairs from data, as asked; the layers that could not be refitted, and why. `entire`: no block of the model went."""
    from .calibrate import reestimate_, refit_

    left: dict[str, str] = {}
    if options.get("refit"):
        assert data is not None
        left = {name: f"not refitted: {why}" for name, why in refit_(made.small, model, made.cuts, data).items()}
        before = {name for name, _ in model.named_parameters()}
        made.cuts.added.update({n: tuple(p.shape) for n, p in made.small.named_parameters() if n not in before})
    if options.get("reestimate"):
        assert data is not None
        # without its blocks, the statistics that the model learned are of another one
        reestimate_(made.small, data, *((model, made.cuts) if entire else (None, None)))
    return left


def _check_runs(
    traced: Trace, small: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], expected: int, keep: Keep
) -> int:
    """The small model runs, gives what the model gave in the same shapes, also for two batches in one; its FLOPs."""
    shapes, doubled = traced.record.answers, _doubled(args, kwargs)
    if doubled is not None:  # when this is fine, so is one batch
        with contextlib.suppress(Exception):
            if outline(small, *doubled)[0] == [(2 * s[0], *s[1:]) for s in shapes]:
                return expected
    try:
        found, flops = outline(small, args, kwargs)
    except Exception as error:
        raise RuntimeError(
            f"the cut model does not run: {type(error).__name__}: {error}. The model is as it was; exclude the layer that fails"
        ) from error
    if shapes != found and not _alike(found, shapes, outline(silence_(copied(traced.model), traced, keep), args, kwargs)[0]):
        raise ValueError(
            f"the cut model answers with shapes {found} instead of {shapes}; where values decide on shapes (predicted lengths, "
            "thresholds), exclude the layers that make them. The model is as it was."
        )
    if doubled is not None:
        try:
            outline(small, *doubled)
        except Exception as error:
            if _runs(traced.model, *doubled):
                raise RuntimeError(
                    f"the cut model does not run on twice the batch: {error}. The model is as it was."
                ) from error
    return flops


def _alike(found: Shapes, whole: Shapes, masked: Shapes) -> bool:
    """The same shapes, but for sizes that values decide on (predicted lengths): those that masking alone changes, too."""
    if [len(s) for s in found] != [len(s) for s in whole] or [len(s) for s in masked] != [len(s) for s in whole]:
        return False
    sizes = (zip(*triple) for triple in zip(found, whole, masked))
    return all(size == old or old != silent for three in sizes for size, old, silent in three)


def _runs(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    try:
        outline(model, args, kwargs)
    except Exception:
        return False
    return True


def _doubled(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    tensors = [v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)]
    if not tensors or any(t.dim() == 0 or t.shape[0] != tensors[0].shape[0] for t in tensors):
        return None
    twice = [torch.cat([v, v]) if isinstance(v, Tensor) else v for v in (*args, *kwargs.values())]
    return tuple(twice[: len(args)]), dict(zip(kwargs, twice[len(args) :]))


def _totals(
    model: nn.Module, small: nn.Module, sizes: SizeModel, counted: int, timing: Timing | None
) -> dict[str, tuple[float, float]]:
    params = tuple(sum(p.numel() for p in m.parameters()) for m in (model, small))
    totals: dict[str, tuple[float, float]] = {"params": (params[0], params[1]), "flops": (sizes.flops({}), counted)}
    return totals if timing is None else totals | {"latency": (timing.dense, timing.small)}


def _miss(
    what: str, target: float, totals: Mapping[str, tuple[float, float]], timing: Timing | None, added: Iterable[str]
) -> str | None:
    """What the cut leaves, when that is not what was asked."""
    if what == "channels":
        return None  # exactly what was chosen
    found, spread = totals[what][1] / totals[what][0], None if timing is None else timing.spread
    if met(found, target, spread):
        return None
    names = list(added) if what == "params" else []
    biases = f", with the {len(names)} biases that it adds ({', '.join(names[:3])})" if names else ""
    return (
        f"{what}={target:g} cannot be met within {within(target, spread)} of it: the cut that should leaves "
        f"{figure(found, spread)}{biases}. {busy(target, spread)}The model is as it was."
    )


def _plan(
    recipe: str,
    model: nn.Module,
    traced: Trace,
    choice: Choice,
    made: Made,
    left: Mapping[Group, str],
    totals: dict[str, tuple[float, float]],
    inputs: tuple[tuple[Any, ...], dict[str, Any]],
) -> Shrunk:
    names, fewer = names_of(traced), {g.atom: g for g, n in choice.counts.items() if n < g.size}
    reasons = dict(made.reasons)
    for together in tied(traced, fewer):  # what cannot be cut alone is as exact as the rest of it
        worst = next((g for g in together if g in made.reasons), None)
        if worst is not None:
            reasons |= {g: f"is cut together with {names[worst]}, which is not" for g in together if g not in made.reasons}
    rows = [
        Row(names[g], g.size, n, reasons.get(g), tuple(dict.fromkeys(m.tensor for m in g.members)))
        for g, n in choice.counts.items()
    ]
    stale = undetermined(traced, {atom: choice.counts[g] for atom, g in fewer.items()})
    skipped = {**{names[g]: why for g, why in left.items()}, **traced.skipped}
    skipped |= dict.fromkeys(stale, "a number that the traced run did not read; what it should be now is not known")
    moved = {names[g]: why for g, why in choice.moved.items()}
    return Shrunk(recipe, rows, skipped, moved, made.cuts, totals, made.small, model, inputs)


def _nothing_left(traced: Trace, left: Mapping[Group, str]) -> str:
    reasons = list(dict.fromkeys((*left.values(), *traced.skipped.values())))
    shown = "; ".join(reasons[:6]) or "no tensor has units"
    return f"no group of {type(traced.model).__name__} is left to cut ({shown}). The model is as it was."
