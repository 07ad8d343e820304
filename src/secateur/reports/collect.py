"""`report`: collects the document of a report from models and the results of calls."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .._hints import hints
from .._tree import nearest
from ..activations import Gates
from ..distill import Distilled
from ..edit import Inputs, split_inputs
from ..execute import Bench, Compression
from ..plans import Plan
from ..progress import track
from ..recipes import Recipe
from ..reorder import Reordering
from ..surgery import Shrunk
from . import history
from .document import Call, Document, LayerRow, Line, Model, Point, Reason, StageFigures, Sweep, Time
from .history import Action, Result, Version, dense_form
from .layers import masks_of, other_masks, plan_rows, rows, unread
from .measure import (
    Evaluate,
    Flops,
    as_time,
    bytes_on_disk,
    counts_of,
    first_shape,
    flops_of,
    machine,
    metrics_of,
    times_of,
    words_for,
)
from .output import Report


@hints
def report(
    *results: Result,
    path: str | os.PathLike[str] | None = None,
    before: nn.Module | None = None,
    after: nn.Module | None = None,
    stages: Mapping[str, nn.Module] | None = None,
    example_inputs: Any = None,
    other_inputs: Mapping[str, Any] | None = None,
    evaluate: Evaluate | None = None,
    metric: str = "accuracy",
    samples: int | None = None,
    better: str | None = None,
    sweep: Mapping[str, Any] | None = None,
    alternatives: Mapping[str, Plan] | None = None,
    name: str | None = None,
    data: str = "",
    note: str = "",
    recipe: str = "",
    seconds: float = 1.0,
    disk: bool = True,
) -> Report:
    """Compares a model before and after pruning, and returns the report, which is also written to `path` (.html or .json).

    `results`: what `shrink`, `prune_`, `compress_`, `gate_` and `bench` returned, in the order of the calls. `before` and
    `after`: the model as it was and as it is. Models that the results hold need not be passed: a `Shrunk` holds both, a plan
    alone is applied to a copy of `before`, and compressed layers and gates are undone on copies to measure the steps one by
    one. A step that cannot be undone has no measurements of its own; keep copies and pass them as `stages`, a mapping of names
    to models from first to last, to have all of them. No model that is passed is changed.

    `example_inputs`: as for `shrink`, for FLOPs and times; `other_inputs` maps words such as "16 images" to further inputs
    that are timed. `evaluate(model)` returns the `metric`: a number, or (value, low, high). An accuracy may be a share
    or in percent, and gets a 95 % interval if `samples`, the number of test samples, is given. `better`: "higher" or "lower";
    by default lower is better for perplexity, loss and error.

    `sweep`: {"lines": [{"label", "points": [{"sparsity", "value"}]}], "dense", "chosen", "samples"}, for the curve of the
    metric against sparsity. `alternatives`: other plans by label, to show what their masks look like. `name` and `data` name
    the model and the data, `note` is added to the first paragraph, `recipe` is the code that made the model. `seconds`: the
    time to measure each model; 0 measures none. `disk=False` does not save the models to learn their size.
    """
    _check(results, before, after, stages)
    _check_types(example_inputs, other_inputs, evaluate, sweep, data, seconds)
    actions = [result for result in results if not isinstance(result, Bench)]
    if stages is not None:
        found = history.named(stages, actions)
    else:
        found = history.versions(actions, before, after)
    given = _example(example_inputs, actions)
    timing = {words_for(given): given} if given is not None and seconds > 0 else {}
    timing |= dict(other_inputs or {}) if seconds > 0 else {}
    measured = _measured(found, None if given is None else split_inputs(given))
    listed = _stages(found, measured, timing, seconds, disk, [r for r in results if isinstance(r, Bench)])
    if evaluate is not None:
        values = metrics_of({version.name: version.model for version in found}, evaluate, metric, samples, better)
        listed = [replace(stage, metric=value) for stage, value in zip(listed, values)]
    layers = _layers(found, measured, actions)
    plan = next((action for action in reversed(actions) if isinstance(action, Plan)), None)
    masks = masks_of(found[-1].model if found else None, layers, plan)
    if alternatives and masks:
        shown = max(masks, key=lambda mask: mask.rows * mask.columns)
        masks = [replace(shown, note="Applied."), *other_masks(shown.layer, alternatives)]
    document = Document(
        model=_model(found, given, name, data),
        layers=layers,
        machine=machine(),
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        note=note,
        stages=[stage for stage in listed if stage != StageFigures(stage.name, stage.how)],
        steps=[_step(action) for action in actions],
        reasons=[*(reason for action in actions for reason in _reasons(action)), *_unread(found)],
        masks=masks,
        sweep=None if sweep is None else _sweep(sweep, metric, listed),
        recipe=recipe or _recipe_of(found, actions),
    )
    made = Report(document)
    if path is not None:
        made.save(path)
    return made


# --- arguments --------------------------------------------------------------------------------------------------------------


def _check(results: Sequence[Any], before: Any, after: Any, stages: Any) -> None:
    for result in results:
        if not isinstance(result, Result):
            raise TypeError(
                "report takes what plan, prune_, shrink, compress_, gate_, distill_ and bench return, not a "
                f"{type(result).__name__}; models are passed as before= and after="
            )
    if stages is not None and not isinstance(stages, Mapping):
        raise TypeError(f"stages= maps names to models, from first to last; it is a {type(stages).__name__}")
    for key, model in (("before", before), ("after", after), *(stages or {}).items()):
        if model is not None and not isinstance(model, nn.Module):
            raise TypeError(f"{key}= must be a torch.nn.Module, not {type(model).__name__}")
    if stages is not None and (before is not None or after is not None):
        raise ValueError("stages= names all models, the first and the last too; leave before= and after= out")
    if not results and not stages and (before is None or after is None):
        raise ValueError("pass results, or before= and after=, or stages=; there is nothing to report")
    last = next((result for result in reversed(results) if not isinstance(result, Bench)), None)
    if isinstance(last, Compression | Distilled | Reordering) and after is None and stages is None:
        how = history.NAMES[type(last)][0]
        raise ValueError(f"pass after= (the model that {how} changed); its result does not hold the model")


def _check_types(example_inputs: Any, other_inputs: Any, evaluate: Any, sweep: Any, data: Any, seconds: Any) -> None:
    if other_inputs is not None and not isinstance(other_inputs, Mapping):
        raise TypeError('other_inputs= maps words to further inputs, such as {"16 images": images}')
    if evaluate is not None and not callable(evaluate):
        raise TypeError(f"evaluate={evaluate!r} must be a function of a model that returns its metric")
    if sweep is not None and not isinstance(sweep, Mapping):
        hint = f"; pass sweep=result.sweep() of this {type(sweep).__name__}" if hasattr(sweep, "sweep") else ""
        raise TypeError(f"sweep= is a mapping with lines of points{hint}")
    if not isinstance(data, str):
        raise TypeError(f'data= is the name of the data, such as "CIFAR-10", not {type(data).__name__}; evaluate= measures')
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds >= 0:
        raise ValueError(f"seconds={seconds!r} must be a number of seconds, 0 or more: the measuring time for each model")
    if example_inputs is not None and not isinstance(example_inputs, Tensor | Mapping | tuple | list):
        raise TypeError(
            "example_inputs must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"not {type(example_inputs).__name__}"
        )


def _example(inputs: Any, actions: Sequence[Action]) -> Any:
    """The example inputs that were passed, or else those of a cut, which it stores as arguments."""
    if inputs is not None:
        return inputs
    cut = next((action for action in reversed(actions) if isinstance(action, Shrunk)), None)
    if cut is None:
        return None
    args, kwargs = cut.inputs
    return args if args and not kwargs else kwargs if kwargs and not args else None


def _model(found: Sequence[Version], given: Any, name: str | None, data: str) -> Model:
    model = next((version.model for version in reversed(found) if version.model is not None), None)
    if model is None:
        return Model("", name or "Model", data)
    model = getattr(model, "_orig_mod", model)
    shape, integers = (None, False) if given is None else first_shape(given)
    dtype = next((str(p.dtype).removeprefix("torch.") for p in model.parameters() if p.is_floating_point()), "")
    device = next((p.device.type for p in model.parameters()), "")
    return Model(type(model).__name__, name or type(model).__name__, data, shape, integers, dtype, device)


def _recipe_of(found: Sequence[Version], actions: Sequence[Action]) -> str:
    """The recipe that the model itself remembers, as the text of its file, or that of a plan; "" if there is none."""
    model = found[-1].model if found else None
    with suppress(ValueError):
        if model is not None:
            return str(Recipe.of(model))
        if len(actions) == 1 and isinstance(actions[0], Plan) and isinstance(actions[0].arguments, dict):
            return str(Recipe.of_stages([{"prune": actions[0].arguments}]))
    return ""


def _sweep(given: Mapping[str, Any], metric: str, stages: Sequence[StageFigures]) -> Sweep:
    """The sweep as it was passed, with the metric before and its unit filled in."""
    known = {"lines", "dense", "chosen", "samples", "images", "metric", "unit", "small"}
    if unknown := given.keys() - known:
        raise ValueError(f"sweep= has a field {min(unknown)!r}, which is not known.{nearest(min(unknown), known)}")
    first = next((stage.metric for stage in stages if stage.metric is not None), None)
    lines = []
    for line in given["lines"]:
        points = [Point(float(p["sparsity"]), float(p.get("value", p.get("top1")))) for p in line["points"]]
        lines.append(Line(str(line["label"]), sorted(points, key=lambda p: p.sparsity), str(line.get("recipe") or "")))
    dense = given.get("dense", None if first is None else first.value)
    dense = None if dense is None else float(dense)
    name = given.get("metric", metric)
    values = [point.value for line in lines for point in line.points]
    share = name.lower() in ("accuracy", "top-1", "top-5")
    if share and values and max(values) <= 1 and (dense is None or dense <= 1 or first is not None):
        lines = [replace(line, points=[replace(p, value=100 * p.value) for p in line.points]) for line in lines]
        dense = 100 * dense if dense is not None and dense <= 1 else dense
    samples = given.get("samples", given.get("images"))
    return Sweep(lines, dense, given.get("chosen"), samples, name, given.get("unit", "%" if share else ""))


# --- stages -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counted:
    """What one version holds and computes. `missing`: what could not be measured, and why."""

    parameters: int
    nonzero: int | None
    flops: Flops | None
    missing: dict[str, str]


def _measured(found: Sequence[Version], inputs: Inputs | None) -> list[Counted | None]:
    counted: list[Counted | None] = []
    for version in track(found, "report", lambda version: f"FLOPs of {version.name}"):
        if version.model is None:
            counted.append(None)
            continue
        model, missing = dense_form(version.model), {}
        flops = _tried("flops", missing, partial(flops_of, model, inputs)) if inputs is not None else None
        counted.append(Counted(*counts_of(model), flops, missing))
    return counted


def _tried(what: str, missing: dict[str, str], measure: Callable[[], Any]) -> Any:
    """The measurement, or None with the reason in `missing`: one figure that cannot be had must not cost the report."""
    try:
        return measure()
    except Exception as error:
        lines = str(error).strip().splitlines()
        missing[what] = f"{type(error).__name__}: {lines[0] if lines else ''}"[:400]
        return None


def _stages(
    found: Sequence[Version],
    measured: Sequence[Counted | None],
    timing: Mapping[str, Any],
    seconds: float,
    disk: bool,
    benches: Sequence[Bench],
) -> list[StageFigures]:
    failed: dict[str, str] = {}
    models = {version.name: version.model for version in found if version.model is not None}
    times: dict[str, list[Time]] = _tried("times", failed, lambda: times_of(models, timing, seconds)) or {}
    stages = []
    for version, counted in track(list(zip(found, measured)), "report", lambda pair: f"size of {pair[0].name}"):
        missing = {} if counted is None else {**counted.missing, **failed}
        size = _tried("bytes", missing, partial(bytes_on_disk, version.model)) if version.model is not None and disk else None
        stages.append(
            StageFigures(
                version.name,
                version.how,
                parameters=None if counted is None else counted.parameters,
                nonzero=None if counted is None else counted.nonzero,
                flops=counted.flops.total if counted is not None and counted.flops is not None else None,
                bytes=size,
                times=times.get(version.name, []),
                missing=missing,
            )
        )
    return _with_benches([_from_result(stages, i, found) for i in range(len(stages))], benches)


def _from_result(stages: Sequence[StageFigures], place: int, found: Sequence[Version]) -> StageFigures:
    """A stage whose model is gone, with the totals that the results before and after it state."""
    stage = stages[place]
    if found[place].model is not None:
        return stage
    result, following = found[place].result, found[place + 1].result if place + 1 < len(found) else None
    if isinstance(result, Shrunk) or isinstance(following, Shrunk):
        cut, when = (result, 1) if isinstance(result, Shrunk) else (following, 0)
        assert isinstance(cut, Shrunk)
        totals = {key: int(pair[when]) for key, pair in cut.totals.items() if key in ("params", "flops")}
        return replace(stage, parameters=totals.get("params"), flops=totals.get("flops"))
    if isinstance(following, Plan) and place + 1 < len(found) and found[place + 1].model is not None:
        after = stages[place + 1]  # masks change no shape
        return replace(stage, parameters=after.parameters, flops=after.flops)
    return stage


def _with_benches(stages: list[StageFigures], benches: Iterable[Bench]) -> list[StageFigures]:
    """Adds the times of `bench`, by the names of the stages. Other names become stages of their own."""
    for bench in benches:
        for name, timing in bench.timings.items():
            time = as_time("one call", timing)
            place = next((i for i, stage in enumerate(stages) if stage.name == name), None)
            if place is None:
                stages.append(StageFigures(name, times=[time]))
            else:
                stages[place] = replace(stages[place], times=[*stages[place].times, time])
    return stages


# --- layers -----------------------------------------------------------------------------------------------------------------


def _layers(found: Sequence[Version], measured: Sequence[Counted | None], actions: Sequence[Action]) -> list[LayerRow]:
    if not found or (found[0].model is None and found[-1].model is None):
        plan = next((action for action in reversed(actions) if isinstance(action, Plan)), None)
        return [] if plan is None else plan_rows(plan)
    counts = [None if one is None else one.flops for one in (measured[0], measured[-1])]
    order = next((list(dict.fromkeys(one.calls)) for one in counts if one is not None), [])
    with torch.no_grad():
        layers = rows(found[0].model, found[-1].model, (counts[0], counts[1]), order)
    for action in actions:
        layers = [_with_result(layer, action) for layer in layers]
    return layers


def _with_result(layer: LayerRow, action: Action) -> LayerRow:
    """Adds what a result says about a layer: times and format, the gate, why a cut is not exact."""
    if isinstance(action, Compression):
        row = next((row for row in action.rows if row.layer == layer.name), None)
        if row is None:
            return layer
        dense, sparse = (None if each is None else each * 1e6 for each in (row.dense_seconds, row.sparse_seconds))
        return replace(
            layer,
            format=row.format or "",
            dense_us=dense,
            sparse_us=sparse if row.format else None,
            bytes_before=row.before,
            bytes_after=row.after,
            reason="" if row.format else row.reason,
        )
    if isinstance(action, Gates) and layer.name in action.gates:
        gate = action.gates[layer.name]
        return replace(layer, gate=gate.sparsity if gate.calibrated is None else gate.calibrated)
    if isinstance(action, Shrunk):
        names = (layer.name, f"{layer.name}.weight")
        why = next((g.why for g in action.groups if g.why and g.after < g.before and g.name.partition("[")[0] in names), "")
        return replace(layer, why=why or layer.why)
    return layer


# --- steps and reasons ------------------------------------------------------------------------------------------------------


def _step(action: Action) -> Call:
    numbers, recipe = _numbers(action)
    return Call(history.NAMES[type(action)][0], recipe, {key: float(value) for key, value in numbers.items()})


def _numbers(action: Action) -> tuple[Mapping[str, float], str]:
    """The numbers that the text of a page uses, and the recipe."""
    if isinstance(action, Shrunk):
        totals = {key: after / before for key, (before, after) in action.totals.items() if before}
        cut = [group for group in action.groups if group.after < group.before]
        exact = sum(group.why is None for group in cut)
        blocks = sum(len(gone) for gone in action.cuts.drop.values())
        return {**totals, "groups": len(cut), "exact": exact, "blocks": blocks, "lists": len(action.cuts.drop)}, action.recipe
    counts = action.metrics()
    if isinstance(action, Plan):
        named = {key: counts[key] for key in ("sparsity", "kept", "total", "tensors", "rewritten", "zeros") if key in counts}
        return {**named, "empty": len(action.empty)}, action.recipe
    if isinstance(action, Compression):
        return counts, f"objective={action.objective}, {action.threads} thread{'s' if action.threads > 1 else ''}"
    if isinstance(action, Distilled | Reordering):
        return {key: counts[key] for key in counts.keys() & {"kept_step", "groups"}}, action.recipe
    method = next((gate.method for gate in action.gates.values()), "")
    return {key: counts[key] for key in ("gates", "sparsity")}, f"method={method}, sparsity={counts['sparsity']:.3g}"


def _reasons(action: Action) -> list[Reason]:
    """What an action left as it was, one entry for each reason."""
    how = history.NAMES[type(action)][0]
    if isinstance(action, Shrunk):
        inexact = {group.name: group.why for group in action.groups if group.why and group.after < group.before}
        return [
            *_grouped("Axes that kept their size", how, action.skipped),
            *_grouped("Groups that were cut, but not exactly", how, inexact),
            *_grouped("Groups that keep another number of units than their scores give them", how, action.moved),
        ]
    if isinstance(action, Plan):
        return _grouped("Tensors that were not pruned", how, action.skipped)
    if isinstance(action, Compression):
        return _grouped("Layers that stay dense", how, {row.layer: row.reason for row in action.rows if not row.format})
    if isinstance(action, Distilled):
        return []
    title = "Layers without a gate" if isinstance(action, Gates) else "Weights that were not reordered"
    return _grouped(title, how, action.skipped)


def _unread(found: Sequence[Version]) -> list[Reason]:
    model = found[-1].model if found else None
    return [] if model is None else _grouped("Weights that could not be read", "report", unread(model))


def _grouped(title: str, call: str, reasons: Mapping[str, str]) -> list[Reason]:
    """One entry for each reason, the most frequent first. A name inside a reason does not make it a reason of its own."""
    known = {part for name in reasons for part in (name, name.partition("[")[0], name.partition("[")[0].rpartition(".")[0])}
    found: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        found.setdefault(_general(reason, known), []).append(name)
    return [Reason(title, call, reason, names) for reason, names in sorted(found.items(), key=lambda item: -len(item[1]))]


def _general(reason: str, known: set[str]) -> str:
    """A reason without the name of the layer that it is about, and without the remark in brackets at its end."""
    words = [("another layer" if word.strip("'\",;:") in known - {""} else word) for word in reason.split(" ")]
    return re.sub(r" \((?:[^()]|\([^()]*\))*\)$", "", " ".join(words))
