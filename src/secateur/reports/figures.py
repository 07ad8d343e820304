"""Numbers and names as a report writes them: with units, rounded, shortened."""

from __future__ import annotations

import math
from collections.abc import Sequence
from decimal import ROUND_HALF_UP, Decimal
from typing import NamedTuple

from ..display import format_seconds
from .document import Metric, Time

NONE = "–"  # what was not measured
GAIN = 1.05  # a smaller ratio is not called a gain
_LARGE = 1e9  # such numbers are written with a power of ten


class Figure(NamedTuple):
    """A number and its unit, which the page sets apart."""

    text: str
    unit: str = ""

    def __str__(self) -> str:
        return f"{self.text} {self.unit}" if self.unit else self.text


def _scaled(value: float, units: Sequence[tuple[float, str]]) -> Figure:
    """Three digits and the unit that fits."""
    size, unit = next((each for each in units if value >= 0.9995 * each[0]), units[-1])
    number = value / size
    digits = 0 if number >= 99.95 or (size == 1 and float(value).is_integer()) else 1 if number >= 9.995 else 2
    return Figure(f"{number:.{digits}f}", unit)


def count(value: float) -> Figure:
    return _scaled(value, ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, "")))


def size(value: float) -> Figure:
    return _scaled(value, ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes")))


def duration(seconds: float) -> Figure:
    text, unit = format_seconds(seconds).split(" ")
    return Figure(text, unit)


def span(time: Time) -> str:
    """The 10th to the 90th percentile of a time, as numbers in the unit of its median."""
    exact = duration(time.median)
    unit = {"s": 1.0, "ms": 1e-3, "µs": 1e-6}[exact.unit]
    digits = len(exact.text.partition(".")[2])
    return "\u2060–\u2060".join(f"{end / unit:.{digits}f}" for end in (time.low, time.high))


def whole(value: float | None) -> str:
    return NONE if value is None else f"{value:,.0f}"


def percent(share: float, digits: int = 0) -> str:
    return f"{100 * share:.{digits}f} %"


def times(ratio: float) -> str:
    if ratio >= 99.95:
        return f"{ratio:.0f}×"
    return f"{ratio:.2f}×" if 0.95 < ratio < GAIN else f"{ratio:.1f}×"


def microseconds(value: float | None) -> str:
    return NONE if value is None else f"{value:.1f}" if value < 99.95 else f"{value:,.0f}"


def metric_value(metric: Metric, digits: int = 2) -> Figure:
    """The value with its unit: so many decimals for percent, four significant digits otherwise."""
    if metric.unit == "%" and abs(metric.value) < _LARGE:
        value = Decimal(f"{metric.value:.6f}").quantize(Decimal(10) ** -digits, ROUND_HALF_UP)  # 90.55, a bit less, is 90.6
        return Figure(_minus(str(value)), "%")
    return Figure(_minus(number(metric.value, decimals(metric.value))), metric.unit)


def number(value: float, digits: int) -> str:
    """A number with so many decimals, or with a power of ten if it is very large or small."""
    return f"{value + 0.0:,.{digits}f}" if not value or 1e-6 <= abs(value) < _LARGE else f"{value:.3e}"


def decimals(value: float) -> int:
    """The decimals of a number with four significant digits, of 9.9999 as of 10.00."""
    if not math.isfinite(value) or value == 0:
        return 0
    return max(3 - int(f"{value:.3e}".partition("e")[2]), 0)


def _minus(text: str) -> str:
    return text.replace("-", "−", 1) if text.startswith("-") else text


def several(number: int, noun: str) -> str:
    """A number and its noun: "1 layer", "2 layers"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def shorter(name: str, most: int = 60) -> str:
    """A name with "…" in the middle if it is longer than `most` characters."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[-(most - most // 2 - 1) :]}"


def capital(text: str) -> str:
    """A sentence with a capital letter, unless it begins with a name such as native_layer_norm."""
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]
