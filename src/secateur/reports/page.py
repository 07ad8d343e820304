"""The page: a pure function of the document. One HTML file that loads nothing and reads without script."""

from __future__ import annotations

import base64
import hashlib
import itertools
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from . import charts, curves, figures, words
from .document import Document, LayerRow, StageFigures
from .figures import NONE

_SHOWN = 12  # histograms that are not folded away
_NAMES = 200  # names of one reason that the page lists; the document has all


def render(document: Document) -> str:
    """The HTML of a document. The same document gives the same bytes."""
    script, style = _file("page.js"), _file("page.css")
    gains, metric = words.headline(document)
    return (
        _template()
        .render(
            d=document,
            title=f"{document.model.name}{' on ' + document.model.data if document.model.data else ''}: pruning report",
            policy=f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{_digest(script)}'; img-src data:",
            style=style,
            script=script,
            data=document.to_json().replace("<", "\\u003c"),
            gains=gains,
            metric=metric,
            lede=words.lede(document),
            tiles=words.tiles(document),
            net=charts.network(document) if document.layers else None,
            stages=_stages(document),
            notes=words.notes(document),
            how_measured=words.how_measured(document),
            curve=curves.curve(document.sweep) if document.sweep and document.sweep.lines else None,
            masks=[(mask, charts.mask_path(mask)) for mask in document.masks],
            histograms=_histograms(document),
            table=_table(document),
            reasons=_reasons(document),
            facts=_facts(document),
            recipe=document.recipe or _recipe(document),
            figures=figures,
        )
        .lstrip()
    )


@cache
def _file(name: str) -> str:
    return files("secateur.reports").joinpath(name).read_text(encoding="utf-8")


@cache
def _template() -> Any:
    import jinja2
    import markupsafe

    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["tight"] = lambda text: str(text).replace(" %", "\u00a0%").replace(" → ", "\u00a0→\u00a0")
    environment.filters["breakable"] = lambda name: markupsafe.Markup(".<wbr>").join(name.split("."))
    return environment.get_template("page.html.j2")


def _digest(script: str) -> str:
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


# --- tables -----------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cell:
    """What a cell shows, with smaller text before and after it, and the value that it is sorted by."""

    text: str
    before: str = ""
    after: str = ""
    value: float | str | None = None


@dataclass(frozen=True)
class Stages:
    header: list[str]
    rows: list[tuple[StageFigures, list[Cell]]]


def _stages(document: Document) -> Stages | None:
    """The table of steps: only the columns that some stage has."""
    if len(document.stages) < 2:
        return None
    inputs = list(dict.fromkeys(time.input for stage in document.stages for time in stage.times))
    metric = next((stage.metric.name for stage in document.stages if stage.metric), None)
    has = {key: any(getattr(stage, key) is not None for stage in document.stages) for key in ("nonzero", "flops", "bytes")}

    def cells(stage: StageFigures) -> list[Cell]:
        timed = {time.input: time for time in stage.times}
        found = [Cell(str(figures.metric_value(stage.metric)) if stage.metric else NONE)] if metric else []
        found += [Cell(figures.whole(stage.nonzero))] if has["nonzero"] else []
        found += [Cell(NONE if stage.flops is None else str(figures.count(stage.flops)))] if has["flops"] else []
        found += [Cell(NONE if stage.bytes is None else str(figures.size(stage.bytes)))] if has["bytes"] else []
        for name in inputs:
            time = timed.get(name)
            found.append(Cell(str(figures.duration(time.median)), after=figures.span(time)) if time else Cell(NONE))
        return found

    titles = {"nonzero": "Non-zero parameters", "flops": "FLOPs", "bytes": "On disk, packed"}
    header = [*([figures.capital(metric)] if metric else []), *(titles[key] for key in titles if has[key])]
    header += [figures.capital(name) for name in inputs]
    return Stages(header, [(stage, cells(stage)) for stage in document.stages])


@dataclass(frozen=True)
class LayerTable:
    """The table of all layers. `choice` names the column that can be filtered by, `options` are its values."""

    header: list[tuple[str, str]]  # title, and "n" for numbers or "s" for text
    rows: list[tuple[LayerRow, str, list[Cell]]]
    choice: str
    options: list[str]


def _table(document: Document) -> LayerTable | None:
    layers = document.layers
    if not layers:
        return None
    timed = any(layer.dense_us is not None or layer.format for layer in layers)
    counted = any(layer.flops_after is not None for layer in layers)
    gated = any(layer.gate is not None for layer in layers)
    mixed = not timed or len({row.pattern for row in layers} - {"", "dense"}) > 1
    header = [("Channels", "n"), ("Weights kept", "n"), ("Zeros", "n")]
    header += [("Pattern", "s")] if mixed else []
    header += [("FLOPs", "n")] if counted else []
    header += [("Gated", "n")] if gated else []
    header += [("Format", "s"), ("Dense, µs", "n"), ("Now, µs", "n"), ("Faster", "n"), ("Bytes", "n")] if timed else []
    rows = []
    for layer in layers:
        choice = (layer.format or "dense") if timed else (layer.pattern or NONE)
        cells = _size_cells(layer)
        cells += [Cell(layer.pattern or NONE, value=layer.pattern)] if mixed else []
        if counted:
            flops = layer.flops_after
            cells.append(Cell(NONE if flops is None else str(figures.count(flops)), value=flops))
        if gated:
            cells.append(Cell(NONE if layer.gate is None else figures.percent(layer.gate, 1), value=layer.gate))
        if timed:
            cells += _time_cells(layer)
        rows.append((layer, choice, cells))
    options = sorted({choice for _, choice, _ in rows})
    return LayerTable([("Layer", "s"), *header], rows, "Format" if timed else "Pattern", options)


def _size_cells(layer: LayerRow) -> list[Cell]:
    was, now = layer.channels
    if layer.after is None:
        gone = Cell("removed", before=f"{was:,} →", value=0.0)
        return [gone, Cell("0", after=f"of {layer.params_before:,}", value=0), Cell(NONE)]
    width = Cell(f"{now:,}", before=f"{was:,} →" if now != was else "", value=now / was if was else 0.0)
    of = f"of {layer.params_before:,}" if layer.kept != layer.params_before else ""
    kept = Cell(f"{layer.kept:,}", after=of, value=layer.kept)
    return [width, kept, Cell(figures.percent(layer.zeros, 1), value=layer.zeros)]


def _time_cells(layer: LayerRow) -> list[Cell]:
    now = layer.now_us
    faster = layer.dense_us / now if layer.format and layer.dense_us and now else None
    size = Cell(NONE, value=None)
    if layer.bytes_after is not None:
        was = f"{layer.bytes_before:,} →" if layer.bytes_before != layer.bytes_after else ""
        size = Cell(f"{layer.bytes_after:,}", before=was, value=layer.bytes_after)
    why = layer.reason.split(" (")[0]
    return [
        Cell(layer.format or "dense", after="" if layer.format else why, value=layer.format or "dense"),
        Cell(figures.microseconds(layer.dense_us), value=layer.dense_us),
        Cell(figures.microseconds(now), value=now),
        Cell(NONE if faster is None else f"{faster:.2f}×", value=faster),
        size,
    ]


# --- lists ------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Small:
    """One histogram."""

    name: str
    was: str
    now: str
    limit: str
    before: str
    after: str
    bins: int


def _histograms(document: Document) -> tuple[list[Small], list[Small]]:
    """Those that are shown, evenly spaced over the layers, and the others."""
    found = []
    if all(layer.hist is None or layer.hist.before == layer.hist.after for layer in document.layers):
        return [], []  # the weights are those of before
    for layer in document.layers:
        if layer.hist is not None:
            before, after, bins = charts.histogram(layer.hist)
            counts = f"{layer.params_before:,}", f"{layer.kept:,}"
            found.append(Small(layer.name, *counts, f"{layer.hist.limit:.2g}", before, after, bins))
    if len(found) <= _SHOWN:
        return found, []
    shown = {round(i * (len(found) - 1) / (_SHOWN - 1)) for i in range(_SHOWN)}
    return [each for i, each in enumerate(found) if i in shown], [each for i, each in enumerate(found) if i not in shown]


def _reasons(document: Document) -> list[tuple[str, str, list[tuple[int, str, list[str], int]]]]:
    """Titles with their reasons: how many names, the reason, the names that are listed, and how many are not."""
    groups = itertools.groupby(document.reasons, key=lambda reason: (reason.title, reason.call))
    return [
        (title, call, [(len(r.names), r.reason, r.names[:_NAMES], max(0, len(r.names) - _NAMES)) for r in found])
        for (title, call), found in groups
    ]


def _facts(document: Document) -> list[tuple[str, str]]:
    machine, model = document.machine, document.model
    cores = figures.several(machine.cores, "core")
    load = "" if machine.load is None else f", load {machine.load:g}"
    shape = "×".join(map(str, model.inputs)) if model.inputs else ""
    facts = [
        ("Processor", f"{machine.cpu}, {cores}"),
        ("GPU", machine.gpu),
        ("Threads", f"{machine.threads}{load}"),
        ("Model", model.kind),
        ("Input", shape),
        ("Weights", model.dtype),
        ("Secateur", machine.secateur),
        ("torch", machine.torch),
        ("Python", machine.python),
    ]
    return [(name, value) for name, value in facts if value]


def _recipe(document: Document) -> str:
    """The steps as text, where no code was given."""
    width = max((len(step.kind) for step in document.steps), default=0)
    return "\n".join(f"{step.kind:<{width}}  {step.recipe}" for step in document.steps)
