"""The document of a report: what was measured, as plain values. The page, the JSON file and the table are made from it alone.

Only `model`, `layers` and `machine` must be there. What was not measured is missing from the JSON, and None or empty here.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

SCHEMA = 1


@dataclass(frozen=True)
class Model:
    """What was pruned. `inputs`: the shape of the first example input; `integers`: whether it holds token ids; `device`: the
    type of the device that holds its parameters."""

    kind: str
    name: str
    data: str = ""
    inputs: list[int] | None = None
    integers: bool = False
    dtype: str = ""
    device: str = ""


@dataclass(frozen=True)
class Metric:
    """The result of `evaluate`. `low` and `high`: its 95 % interval; `better`: "higher" or "lower"."""

    name: str
    value: float
    unit: str = ""
    low: float | None = None
    high: float | None = None
    samples: int | None = None
    better: str = "higher"


@dataclass(frozen=True)
class Time:
    """Seconds of one call: the median and the best round, the 10th and 90th percentile. `input` says of what."""

    input: str
    median: float
    best: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class StageFigures:
    """The model before, and after each step. `missing` maps what could not be measured to the reason."""

    name: str
    how: str = ""
    parameters: int | None = None
    nonzero: int | None = None
    flops: int | None = None
    bytes: int | None = None
    metric: Metric | None = None
    times: list[Time] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Histogram:
    """Counts of nonzero weights in equal bins from -limit to limit."""

    limit: float
    before: list[int] | None = None
    after: list[int] | None = None


@dataclass(frozen=True)
class LayerRow:
    """One weight. `after` is None for a layer that was removed. `channels`: outputs before and now (with nonzero weights)."""

    name: str
    kind: str
    before: list[int]
    after: list[int] | None
    channels: list[int]
    kept: int
    pattern: str = ""
    flops_before: int | None = None
    flops_after: int | None = None
    format: str = ""
    dense_us: float | None = None
    sparse_us: float | None = None
    bytes_before: int | None = None
    bytes_after: int | None = None
    gate: float | None = None
    reason: str = ""
    why: str = ""
    hist: Histogram | None = None

    @property
    def params_before(self) -> int:
        return math.prod(self.before)

    @property
    def params_after(self) -> int:
        return 0 if self.after is None else math.prod(self.after)

    @property
    def zeros(self) -> float:
        """The share of zeros among the weights that the layer has now."""
        return 1 - self.kept / self.params_after if self.params_after else 0.0

    @property
    def now_us(self) -> float | None:
        return self.sparse_us if self.format and self.sparse_us is not None else self.dense_us


@dataclass(frozen=True)
class Mask:
    """The zeros of the upper left corner of a weight matrix, row by row: "1" stays, "0" is pruned."""

    label: str
    layer: str
    rows: int
    columns: int
    bits: str
    zeros: float
    cropped: bool = False
    note: str = ""


@dataclass(frozen=True)
class Reason:
    """One reason why something was left as it is, and the names that it holds for."""

    title: str
    call: str
    reason: str
    names: list[str]


@dataclass(frozen=True)
class Call:
    """One call that changed the model: its recipe, and the numbers that the text of the page uses."""

    kind: str
    recipe: str
    numbers: dict[str, float] = field(default_factory=dict)
    seconds: float | None = None


@dataclass(frozen=True)
class Point:
    sparsity: float
    value: float


@dataclass(frozen=True)
class Line:
    """The metric at several sparsities."""

    label: str
    points: list[Point]
    recipe: str = ""


@dataclass(frozen=True)
class Sweep:
    """What other choices would give. `dense`: the metric before; `chosen`: the sparsity of this model; `samples` per point."""

    lines: list[Line]
    dense: float | None = None
    chosen: float | None = None
    samples: int | None = None
    metric: str = "accuracy"
    unit: str = ""


@dataclass(frozen=True)
class Machine:
    """Where it ran."""

    cpu: str
    cores: int
    threads: int
    python: str
    torch: str
    secateur: str
    gpu: str = ""
    load: float | None = None


@dataclass(frozen=True)
class Document:
    """Everything a report says."""

    model: Model
    layers: list[LayerRow]
    machine: Machine
    made: str = ""
    note: str = ""
    stages: list[StageFigures] = field(default_factory=list)
    steps: list[Call] = field(default_factory=list)
    reasons: list[Reason] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
    sweep: Sweep | None = None
    recipe: str = ""
    schema: int = SCHEMA

    def to_dict(self) -> dict[str, Any]:
        """The document as plain values that JSON can hold, without what was not measured."""
        return {"schema": self.schema, **_plain(self)}

    def to_json(self, indent: int | None = None) -> str:
        """The document as JSON text."""
        return json.dumps(self.to_dict(), indent=indent, ensure_ascii=False, separators=None if indent else (",", ":"))


def read(text: str | bytes) -> Document:
    """Reads a document from JSON text. Raises ValueError that names the field which does not fit."""
    import msgspec

    try:
        schema = json.loads(text).get("schema")
    except (ValueError, AttributeError):
        raise ValueError("this is not the JSON of a report") from None
    if schema != SCHEMA:
        raise ValueError(f"this report has schema {schema!r}; this version of secateur reads schema {SCHEMA}")
    try:
        return msgspec.json.decode(text, type=Document)
    except msgspec.DecodeError as error:
        raise ValueError(f"this is not the JSON of a report: {error}") from None


def _plain(value: Any) -> Any:
    """Dataclasses as dictionaries, without the fields that have their default value."""
    if is_dataclass(value):
        return {f.name: _plain(given) for f in fields(value) if (given := getattr(value, f.name)) != _default(f)}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return value


def _default(spec: Any) -> Any:
    return spec.default_factory() if callable(spec.default_factory) else spec.default


def wilson(percent: float, samples: int) -> tuple[float, float]:
    """The 95 % score interval of a share in percent (Wilson, 1927)."""
    p, z = min(max(percent / 100, 0.0), 1.0), 1.96
    middle = (p + z * z / (2 * samples)) / (1 + z * z / samples)
    half = z * math.sqrt(p * (1 - p) / samples + z * z / (4 * samples**2)) / (1 + z * z / samples)
    return 100 * max(middle - half, 0.0), 100 * min(middle + half, 1.0)
