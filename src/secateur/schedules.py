"""Schedules: numbers that depend on the training step. Any budget may be one.

A schedule is any callable of the step. It may have a method `due(step) -> bool`, which is True at the steps at which its value
is applied; without it, the value is applied at every step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

from ._hints import hints
from ._text import percent_hint

_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    # (initial, final, x in [0, 1]) -> value
    "linear": lambda a, b, x: a + (b - a) * x,
    "cubic": lambda a, b, x: b + (a - b) * (1 - x) ** 3,  # Zhu & Gupta, 2017
    "cosine": lambda a, b, x: b + (a - b) * (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda a, b, x: 1 - (1 - a) * ((1 - b) / (1 - a)) ** x,  # removes a constant fraction of the rest
}


class Schedule:
    """A number that depends on the step. `sc.cubic`, `sc.linear`, `sc.cosine`, `sc.exponential`, `sc.one_shot` and `sc.join`
    return schedules.

    To write your own, pass a function of the step such as `lambda step: min(0.9, step / 1000)`, or subclass this class and
    define `__call__`. Override `due` to change masks less often than at every step.
    """

    def __call__(self, step: int) -> float:
        raise NotImplementedError(f"{type(self).__name__} must define __call__(step)")

    def due(self, step: int) -> bool:
        """Returns True if the value is to be applied at this step. By default, at every step."""
        return True


@dataclass(frozen=True, repr=False)
class Ramp(Schedule):
    """Goes from `initial` to `final` between the steps `start` and `end`, and is due every `every` steps and at `end`."""

    shape: str
    final: float
    initial: float
    start: int
    end: int
    every: int

    def __post_init__(self) -> None:
        for name in ("start", "end", "every"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise TypeError(f"{self}: {name} must be an integer number of steps")
        if self.end < self.start or self.start < 0 or self.every < 1:
            raise ValueError(f"{self}: needs 0 <= start <= end and every >= 1")
        for name in ("initial", "final"):
            if not _is_fraction(getattr(self, name)):
                raise ValueError(f"{self}: {name} must be a fraction from 0 to 1{percent_hint(getattr(self, name))}")
        if self.shape == "exponential" and max(self.initial, self.final) >= 1:
            raise ValueError(f"{self}: an exponential schedule never reaches 1; use cubic or linear")

    def __call__(self, step: int) -> float:
        if step >= self.end:
            return self.final
        if step < self.start:
            return self.initial
        return _SHAPES[self.shape](self.initial, self.final, (step - self.start) / (self.end - self.start))

    @property
    def falls(self) -> bool:
        """True if the value ever decreases."""
        return self.final < self.initial

    def due(self, step: int) -> bool:
        return step == self.end or (self.start <= step < self.end and (step - self.start) % self.every == 0)

    def __str__(self) -> str:
        if self.start == self.end:
            return f"one_shot({self.final}, at={self.end}, initial={self.initial})"
        span = f"start={self.start}, end={self.end}, every={self.every}, initial={self.initial}"
        return f"{self.shape}({self.final}, {span})"

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class FromFunction(Schedule):
    """A user's callable as a schedule: checks its values, and uses its `due`, `end` and `falls` if it has them."""

    function: Callable[[int], float]
    name: str = "schedule"  # the argument that it was given for

    def __call__(self, step: int) -> float:
        try:
            value = self.function(step)
        except TypeError as error:
            raise TypeError(f"{self.name}={self} was called with the step, {step}, and raised TypeError: {error}") from error
        if not _is_fraction(value):
            raise ValueError(f"{self.name}={self} returned {value!r} at step {step}; a schedule returns a fraction from 0 to 1")
        return float(value)

    def due(self, step: int) -> bool:
        due = getattr(self.function, "due", None)
        return True if due is None else bool(due(step))

    @property
    def end(self) -> int:
        """The step of the last change, or 0 if the callable has no attribute `end`."""
        return getattr(self.function, "end", 0)

    @property
    def falls(self) -> bool:
        """True if the callable has an attribute `falls` that is true."""
        return getattr(self.function, "falls", False)

    def __str__(self) -> str:
        return getattr(self.function, "__qualname__", None) or repr(self.function)

    __repr__ = __str__


@dataclass(frozen=True, repr=False)
class Joined(Schedule):
    """Several schedules, each from its own step on."""

    parts: tuple[tuple[int, AnySchedule], ...]

    def _part(self, step: int) -> AnySchedule:
        return [part for begin, part in self.parts if begin <= max(step, self.parts[0][0])][-1]

    def __call__(self, step: int) -> float:
        return self._part(step)(step)

    @property
    def falls(self) -> bool:
        """True if the value ever decreases."""
        joints = [self(begin) < self(begin - 1) for begin, _ in self.parts[1:]]
        return any(joints) or any(part.falls for _, part in self.parts)

    def due(self, step: int) -> bool:
        begins = [begin for begin, _ in self.parts]
        return step in begins or (step > begins[0] and self._part(step).due(step))

    @property
    def end(self) -> int:
        """The step at which the last part ends."""
        return max(self.parts[-1][0], self.parts[-1][1].end)

    def __str__(self) -> str:
        return f"join({', '.join(f'({begin}, {part})' for begin, part in self.parts)})"

    __repr__ = __str__


AnySchedule = Ramp | FromFunction | Joined
Number = float | Callable[[int], float]


def as_schedule(value: Callable[..., Any], name: str = "schedule") -> AnySchedule:
    """Returns the value itself if it is one of our schedules, and otherwise wraps a callable of the step.

    The callable is tried at step 0, so that a wrong one raises here and not in the middle of training. `name` is the argument
    to name in errors.
    """
    if isinstance(value, AnySchedule):
        return value
    if not callable(value):
        raise TypeError(f"{name}={value!r} is not a schedule; pass sc.cubic(0.9, end=1000) or a function of the step")
    schedule = FromFunction(value, name)
    schedule(0)
    return schedule


def _is_fraction(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1


@hints
def cubic(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """Fast at first and slow at the end (Zhu & Gupta, 2017), the usual choice for gradual pruning."""
    return Ramp("cubic", final, initial, start, end, every)


@hints
def linear(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """The same change at each update."""
    return Ramp("linear", final, initial, start, end, every)


@hints
def exponential(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """Prunes the same fraction of the remaining elements at each update, as iterative magnitude pruning does."""
    return Ramp("exponential", final, initial, start, end, every)


@hints
def cosine(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """Half a cosine wave: slow at both ends."""
    return Ramp("cosine", final, initial, start, end, every)


@hints
def one_shot(final: float, *, at: int = 0, initial: float = 0.0) -> Schedule:
    """`initial` before the step `at`, `final` from it on."""
    return Ramp("linear", final, initial, at, at, 1)


def join(*parts: tuple[int, Callable[[int], float]]) -> Schedule:
    """`join((0, a), (1000, b))` is `a` until step 1000 and `b` from there on. Steps are those of the whole run."""
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 and callable(pair[1]) for pair in parts):
        raise TypeError(f"join takes (step, schedule) pairs; got {parts}. For a constant, use sc.one_shot(number)")
    begins = [begin for begin, _ in parts]
    if not parts or begins != sorted(set(begins)):
        raise ValueError(f"join needs at least one (step, schedule), with increasing steps; got steps {begins}")
    return Joined(tuple((begin, as_schedule(part, "join")) for begin, part in parts))
