"""The report as text: the headline, a table of steps, a table of layers, the notes."""

from __future__ import annotations

from ..display import Table
from .document import Document, LayerRow, StageFigures
from .figures import NONE, count, duration, metric_value, microseconds, shorter, size, whole
from .words import headline, lede, notes


def as_text(document: Document) -> str:
    """The headline, a table of stages, a table of layers and the notes."""
    gains, metric = headline(document)
    parts = [f"{document.model.name}: {gains} {metric}".strip(), lede(document)]
    if document.stages:
        parts.append(str(_stage_table(document)))
    if document.layers:
        parts.append(str(_layer_table(document)))
    parts += [f"{note.title} {note.text}" for note in notes(document)]
    left = [f"{reason.call} left alone, {len(reason.names)}: {reason.reason}" for reason in document.reasons]
    return "\n\n".join([*parts, *(["\n".join(left)] if left else [])])


def _stage_table(document: Document) -> Table:
    inputs = list(dict.fromkeys(time.input for stage in document.stages for time in stage.times))
    metric = next((stage.metric.name for stage in document.stages if stage.metric), "")

    def row(stage: StageFigures) -> list[str]:
        timed = {time.input: time for time in stage.times}
        return [
            stage.name,
            *([str(metric_value(stage.metric)) if stage.metric else NONE] if metric else ()),
            whole(stage.nonzero),
            NONE if stage.flops is None else str(count(stage.flops)),
            NONE if stage.bytes is None else str(size(stage.bytes)),
            *(str(duration(timed[words].median)) if words in timed else NONE for words in inputs),
        ]

    header = ["step", *([metric] if metric else ()), "non-zero", "FLOPs", "on disk, packed", *inputs]
    return Table(header, [row(stage) for stage in document.stages], right=range(1, len(header)))


def _layer_table(document: Document) -> Table:
    timed = any(layer.dense_us is not None for layer in document.layers)
    gated = any(layer.gate is not None for layer in document.layers)

    def row(layer: LayerRow) -> list[str]:
        shape = "x".join(map(str, layer.before))
        now = "removed" if layer.after is None else "x".join(map(str, layer.after))
        cells = [shorter(layer.name), shape, now, f"{layer.kept:,}", f"{layer.zeros:.1%}", layer.pattern]
        cells += [NONE if layer.gate is None else f"{layer.gate:.1%}"] if gated else []
        return cells + ([layer.format or "dense", microseconds(layer.dense_us), microseconds(layer.now_us)] if timed else [])

    header = ["layer", "shape", "now", "kept", "zeros", "pattern", *(["gated"] if gated else ())]
    header += ["format", "dense, µs", "now, µs"] if timed else []
    numbers = {header.index(title) for title in ("kept", "zeros", "gated", "dense, µs", "now, µs") if title in header}
    return Table(header, [row(layer) for layer in document.layers], right=numbers)
