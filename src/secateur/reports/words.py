"""The text of a report, by rule: the five tiles, the headline, the first paragraph, the notes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .document import Call, Document, LayerRow, Metric, StageFigures, Time
from .figures import (
    GAIN,
    NONE,
    Figure,
    capital,
    count,
    decimals,
    duration,
    metric_value,
    number,
    percent,
    several,
    shorter,
    size,
    span,
    times,
    whole,
)

# --- before and after -------------------------------------------------------------------------------------------------------


def ends(document: Document) -> tuple[StageFigures, StageFigures] | None:
    """The first and the last stage, if there are two."""
    return (document.stages[0], document.stages[-1]) if len(document.stages) > 1 else None


def main_time(stage: StageFigures) -> Time | None:
    return stage.times[0] if stage.times else None


def _ratio(before: float | None, after: float | None) -> float | None:
    return before / after if before and after else None


@dataclass(frozen=True)
class Tile:
    """One figure: now, the change, before, a meter (shares of the value before) and a remark."""

    name: str
    now: Figure
    change: str = ""
    word: str = ""
    gain: bool = False
    before: str = ""
    share: float | None = None
    low: float | None = None
    high: float | None = None
    foot: str = "Not measured"


def tiles(document: Document) -> list[Tile]:
    """The five figures, always in the same places."""
    pair = ends(document)
    if pair is None:
        return []
    a, z = pair
    per = f" for {z.times[0].input}" if z.times else ""
    left = "Not measured" if z.nonzero is None else f"{whole(z.nonzero)} non-zero of {whole(z.parameters)} left"
    if z.nonzero is not None and z.nonzero == z.parameters:
        left = f"{whole(z.nonzero)}, none of them zero"
    now, was = main_time(z), main_time(a)
    return [
        _metric_tile(a.metric, z.metric),
        _tile("Parameters", a.parameters if a.nonzero is None else a.nonzero, z.nonzero, count, "fewer", "more", left),
        _tile(f"FLOPs{per}", a.flops, z.flops, count, "fewer", "more", _foot(z, "flops", "Products with zero are counted")),
        _tile("On disk, packed", a.bytes, z.bytes, size, "smaller", "larger", _foot(z, "bytes", "Saved with packed=True")),
        _time_tile(was, now, z.missing.get("times")),
    ]


def _foot(stage: StageFigures, key: str, usual: str) -> str:
    if key in stage.missing:
        return f"Not measured: {stage.missing[key]}"
    return usual if getattr(stage, key) is not None else "Not measured"


def _tile(
    name: str, before: float | None, after: float | None, form: Callable[[float], Figure], less: str, more: str, foot: str
) -> Tile:
    if after is None:
        return Tile(name, Figure(NONE), foot=foot)
    ratio = _ratio(before, after)
    if ratio is None:
        return Tile(name, form(after), foot=foot)
    change, word = (times(ratio), less) if ratio >= 1 else (times(1 / ratio), more)
    if abs(ratio - 1) < 0.005:
        change, word = "", "unchanged"
    return Tile(name, form(after), change, word, ratio >= GAIN, f"from {form(before or 0)}", 1 / ratio, foot=foot)


def _time_tile(was: Time | None, now: Time | None, failed: str | None) -> Tile:
    name = f"Time, {now.input}" if now else "Time"
    if now is None:
        return Tile(name, Figure(NONE), foot=f"Not measured: {failed}" if failed else "Not measured")
    foot = f"{span(now)} {duration(now.median).unit} in 80 % of {now.rounds:,} rounds"
    tile = _tile(name, was.median if was else None, now.median, duration, "faster", "slower", foot)
    if was is None:
        return tile
    return Tile(**{**vars(tile), "low": now.low / was.median, "high": now.high / was.median})


def _metric_tile(before: Metric | None, after: Metric | None) -> Tile:
    name = _named(after or before)
    if after is None:
        return Tile(name, Figure(NONE))
    foot = "" if after.low is None or after.high is None else f"95 % interval {after.low:.4g}–{after.high:.4g}"
    if after.samples:
        foot = f"{foot}\n{after.samples:,} test samples".strip()
    if before is None:
        return Tile(name, metric_value(after), foot=foot)
    difference = after.value - before.value
    sign = "+" if difference > 0 else "−" if difference < 0 else "±"
    if after.unit == "%" and abs(difference) < 1e9:
        change = f"{sign}{abs(difference):.2f}"
    else:  # as many decimals as both values have, and at least one digit that is not zero
        digits = min((decimals(value) for value in (before.value, after.value) if value), default=0)
        change = f"{sign}{number(abs(difference), max(digits, decimals(difference) - 3))}"
    metered = after.unit == "%" and before.value > 0
    shares = [v / before.value if metered and v is not None else None for v in (after.value, after.low, after.high)]
    word = "points" if after.unit == "%" else ""
    gain = (difference > 0) == (after.better == "higher") and difference != 0
    return Tile(name, metric_value(after), change, word, gain, f"from {metric_value(before)}", *shares, foot=foot)


def _named(metric: Metric | None) -> str:
    return capital("accuracy" if metric is None else metric.name)


# --- sentences --------------------------------------------------------------------------------------------------------------


def headline(document: Document) -> tuple[str, str]:
    """What was gained and what was lost, and the metric."""
    pair = ends(document)
    if pair is None:
        zeros = f"{percent(_zeros(document.layers), 1)} of the weights are set to zero."
        return (zeros if document.layers else "Nothing was compared.", "")
    a, z = pair
    was, now = main_time(a), main_time(z)
    on = f" on {now.input}" if now else ""
    found = (
        _Change(_ratio(a.flops, z.flops), "half the FLOPs", "fewer FLOPs", "more FLOPs"),
        _Change(_ratio(a.bytes, z.bytes), "half the size on disk when packed", *_ON_DISK),
        _Change(_ratio(was and was.median, now and now.median), f"half the time{on}", f"faster{on}", f"slower{on}"),
    )
    gains, losses = [text for one in found if (text := one.gain)], [text for one in found if (text := one.loss)]
    ending = _metric_sentence(a.metric, z.metric)
    if gains or losses:
        text = ", but ".join(", ".join(part) for part in (gains, losses) if part)
        return f"{capital(text)}.", f"{capital(ending)}."
    if found[1].ratio is None and found[2].ratio is None:  # what FLOPs alone say is no answer
        return f"{percent(_zeros(document.layers), 1)} of the weights are zero.", f"{capital(ending)}."
    return f"Nothing that was measured got smaller or faster; {ending}.", ""


_ON_DISK = ("smaller on disk when packed", "larger on disk when packed")


class _Change(NamedTuple):
    """A figure before over the figure after, if both were measured, and the words for a gain and a loss."""

    ratio: float | None
    half: str
    less: str
    more: str

    @property
    def gain(self) -> str:
        if self.ratio is None or self.ratio < GAIN:
            return ""
        return self.half if 1.95 <= self.ratio <= 2.05 else f"{times(self.ratio)} {self.less}"

    @property
    def loss(self) -> str:
        return "" if self.ratio is None or self.ratio > 1 / GAIN else f"{times(1 / self.ratio)} {self.more}"


def _metric_sentence(before: Metric | None, after: Metric | None) -> str:
    if after is None:
        return f"{before.name if before else 'accuracy'} not measured"
    if before is None:
        return f"{after.name} {metric_value(after, 1)}"
    return f"{after.name} {metric_value(before, 1).text} → {metric_value(after, 1)}"


def _zeros(layers: Sequence[LayerRow]) -> float:
    total = sum(layer.params_after for layer in layers)
    return 1 - sum(layer.kept for layer in layers) / total if total else 0.0


def lede(document: Document) -> str:
    """What was done, in order."""
    parts: list[str] = []
    for place, step in enumerate(document.steps):
        parts.append(_LEDES[step.kind](step, any(before.kind == "shrink" for before in document.steps[:place])))
    text = "; then ".join(parts) if len(parts) < 3 else f"{'; then '.join(parts[:-1])}; and {parts[-1]}"
    sentence = f"{capital(text)}." if text else "The model before and after, layer by layer."
    if text and not document.stages:
        sentence = "This is a plan: no model was passed, so nothing was measured."
    return f"{sentence} {document.note}".strip()


def _cut(step: Call, cut: bool) -> str:
    kinds = (("params", "parameters"), ("flops", "FLOPs"))
    left = " and ".join(f"{percent(step.numbers[key])} of the {what}" for key, what in kinds if key in step.numbers)
    blocks, lists = int(step.numbers.get("blocks", 0)), int(step.numbers.get("lists", 0))
    which = f", which leaves {left}" if left else ""
    if blocks and step.numbers["groups"] <= lists:
        return f"{several(blocks, 'block')} {'was' if blocks == 1 else 'were'} removed{which}"
    also = f" and {several(blocks, 'block')} removed" if blocks else ""
    return f"channels were cut{also}{which}"


def _pruned(step: Call, cut: bool) -> str:
    tensors = f" in {several(int(step.numbers['tensors']), 'tensor')}" if "tensors" in step.numbers else ""
    weights = f"of the {'remaining ' if cut else ''}weights{tensors}"
    text = f"{percent(step.numbers['sparsity'])} {weights} were set to zero"
    if "zeros" in step.numbers:  # some were zero before
        text = f"{percent(step.numbers['zeros'] / step.numbers['total'])} {weights} are zero, some of them from before"
    changed = int(step.numbers.get("rewritten", 0))
    return f"{text}, and those that stay were changed to make up for it" if changed else text


def _packed(step: Call, cut: bool) -> str:
    done, layers = int(step.numbers["compressed"]), int(step.numbers["layers"])
    verb = "was" if done == 1 else "were"
    packed = f"{done} of {several(layers, 'layer')} {verb} packed in sparse formats that {_choice(step)}"
    return packed if done else f"no layer was packed, because no sparse format {_choice(step, 'takes fewer bytes')}"


def _choice(step: Call, fewer: str = "take fewer bytes") -> str:
    """By what `compress_` chose the formats: its objective is in the recipe of the call."""
    return fewer if "objective=size" in step.recipe else "measured faster"


def _gated(step: Call, cut: bool) -> str:
    layers = several(int(step.numbers["gates"]), "layer")
    return f"{percent(step.numbers['sparsity'])} of the inputs of {layers} are zeroed in each call"


def _distilled(step: Call, cut: bool) -> str:
    steps = int(step.numbers["kept_step"])
    trained = f"the model was trained for {several(steps, 'step')} to match its teacher"
    return trained if steps else "training did not improve it"


def _reordered(step: Call, cut: bool) -> str:
    return f"the channels of {several(int(step.numbers['groups']), 'group')} were put in another order"


_LEDES: dict[str, Callable[[Call, bool], str]] = {
    "shrink": _cut,
    "prune_": _pruned,
    "compress_": _packed,
    "gate_": _gated,
    "distill_": _distilled,
    "reorder_": _reordered,
}


class Note(NamedTuple):
    title: str
    text: str


def notes(document: Document, most: int = 3) -> list[Note]:
    """What is worth knowing, the worst first."""
    rules = (_empty, _missing, _inexact, _gates_alone, _time_is_not_flops, _dense, _no_loss)
    return [note for rule in rules if (note := rule(document)) is not None][:most]


def _empty(document: Document) -> Note | None:
    names = [layer.name for layer in document.layers if layer.after is not None and layer.params_after and not layer.kept]
    if not names:
        return None
    shown = ", ".join(shorter(name, 40) for name in names[:3]) + (" …" if len(names) > 3 else "")
    return Note(f"{_are(len(names), 'layer')} all zeros.", f"What they compute no longer depends on the input: {shown}.")


def _missing(document: Document) -> Note | None:
    found = {key: (stage.name, why) for stage in document.stages for key, why in stage.missing.items()}
    if not found:
        return None
    what = {"flops": "FLOPs", "bytes": "the size on disk", "times": "the time"}
    verb = "were" if len(found) > 1 or "flops" in found else "was"
    reasons = [(stage, why) for stage, why in found.values() if not any(why in other != why for _, other in found.values())]
    return Note(
        f"{capital(' and '.join(what.get(key, key) for key in found))} {verb} not measured.",
        " ".join(f"Stage {stage}: {why.removesuffix('.')}." for stage, why in dict.fromkeys(reasons)),
    )


def _inexact(document: Document) -> Note | None:
    cut = [step for step in document.steps if step.kind == "shrink" and step.numbers["exact"] < step.numbers["groups"]]
    if not cut:
        return None
    inexact, groups = (sum(int(step.numbers[key]) for step in cut) for key in ("exact", "groups"))
    why = next((reason.reason for reason in document.reasons if reason.title.startswith("Groups that were cut")), "")
    text = f"{capital(why)}. " if why else ""
    return Note(
        f"The cut is not exact in {groups - inexact} of {several(groups, 'group')}.", f"{text}The figures above include this."
    )


def _gates_alone(document: Document) -> Note | None:
    kinds = [step.kind for step in document.steps]
    if "gate_" not in kinds or "compress_" in kinds:
        return None
    return Note(
        "Gates alone save no time.",
        "They set inputs to zero. compress_ packs layers so that weights that meet a zero are not read, where that is faster.",
    )


def _time_is_not_flops(document: Document) -> Note | None:
    """FLOPs and time differ by more than 20 points, for the inputs where they differ most."""
    pair = ends(document)
    if pair is None or not pair[0].flops or pair[1].flops is None:
        return None
    flops = _saved(pair[0].flops, pair[1].flops)
    before = {time.input: time.median for time in pair[0].times}
    saved = {time.input: _saved(before[time.input], time.median) for time in pair[1].times if time.input in before}
    worst = max(saved, key=lambda words: abs(flops - saved[words]), default=None)
    if worst is None or abs(flops - saved[worst]) <= 20:
        return None
    others = [f"{_less(points, 'time')} for {words}" for words, points in saved.items() if words != worst]
    also = f" It is {', and '.join(others)}." if others else ""
    return Note(
        f"{capital(_less(flops, 'FLOPs', 'fewer'))}, but {_less(saved[worst], 'time')} for {worst}.",
        f"Time also depends on memory, on kernels and on the size of the batch.{also}",
    )


def _saved(before: float, after: float) -> float:
    return 100 * (1 - after / before)


def _less(points: float, noun: str, less: str = "less") -> str:
    if abs(points) < 0.5:
        return f"the same {noun}"
    return f"{abs(points):.0f} % {less if points > 0 else 'more'} {noun}"


def _dense(document: Document) -> Note | None:
    packing = next((step for step in reversed(document.steps) if step.kind == "compress_"), None)
    if packing is None:
        return None
    dense = [layer for layer in document.layers if not layer.format and layer.after is not None]
    if not dense:
        return None
    names = {layer.name for layer in dense}  # a tied weight is one of them, and several layers of `compress_`
    reasons = [reason for reason in document.reasons if reason.call == "compress_"]
    counted = {reason.reason: len(names.intersection(reason.names)) for reason in reasons}
    text = " ".join(f"{capital(reason)}: {number}." for reason, number in list(counted.items())[:3] if number)
    verb = "stays" if len(dense) == 1 else "stay"
    return Note(
        f"{len(dense)} of {several(len(document.layers), 'layer')} {verb} dense.",
        f"{text} A layer is packed only in formats that {_choice(packing)}.",
    )


def _no_loss(document: Document) -> Note | None:
    pair = ends(document)
    a, z = (pair[0].metric, pair[1].metric) if pair else (None, None)
    if a is None or z is None or None in (a.low, a.high, z.low, z.high):
        return None
    if max(a.low or 0.0, z.low or 0.0) > min(a.high or 0.0, z.high or 0.0):
        return None
    return Note(
        f"No measurable change of {z.name}.",
        "The 95 % intervals before and after overlap; more test samples would make them narrower.",
    )


def _are(count: int, noun: str) -> str:
    return f"{several(count, noun)} {'is' if count == 1 else 'are'}"


def how_measured(document: Document) -> str:
    """How the figures of the steps were taken."""
    done = {
        "saved with packed=True": [stage.bytes for stage in document.stages],
        "tested on the same data": [stage.metric for stage in document.stages],
    }
    parts = [text for text, found in done.items() if any(one is not None for one in found)]
    every = all(one is not None for text in parts for one in done[text])
    text = f"{'Every model was' if every else 'The models were'} {' and '.join(parts)}. " if parts else ""
    if any(stage.times for stage in document.stages):
        threads = document.machine.threads
        on_gpu = document.machine.gpu if document.model.device in ("", "cuda") else ""
        on = on_gpu or several(threads, "thread")
        text += f"They were timed in turn on {on}: the median, and the range of 80 % of the rounds. "
    gone = any(stage.nonzero is None or stage.bytes is None for stage in document.stages[:-1])
    return (text + (f"{NONE} is what was not measured." if gone else "")).strip()
