"""Schedules: numbers that are functions of the step. Any budget may be one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real

_SHAPES: dict[str, Callable[[float, float, float], float]] = {
    # (initial, final, x in [0, 1]) -> value
    "linear": lambda a, b, x: a + (b - a) * x,
    "cubic": lambda a, b, x: b + (a - b) * (1 - x) ** 3,  # Zhu & Gupta, 2017
    "cosine": lambda a, b, x: b + (a - b) * (1 + math.cos(math.pi * x)) / 2,
    "exponential": lambda a, b, x: 1 - (1 - a) * ((1 - b) / (1 - a)) ** x,  # the same share of what is left, each time
}


@dataclass(frozen=True)
class Schedule:
    """Goes from `initial` to `final` between the steps `start` and `end`, changing every `every` steps.

    `schedule(step)` is its value, `schedule.due(step)` whether the value is to be taken up at that step.
    """

    shape: str
    final: float
    initial: float
    start: int
    end: int
    every: int

    def __post_init__(self) -> None:
        for name in ("start", "end", "every"):
            if not isinstance(getattr(self, name), int) or isinstance(getattr(self, name), bool):
                raise TypeError(f"{self}: {name} is a whole number of steps")
        if self.end < self.start or self.start < 0 or self.every < 1:
            raise ValueError(f"{self}: needs 0 <= start <= end and every >= 1")
        for name in ("initial", "final"):
            value = getattr(self, name)
            if not isinstance(value, Real) or isinstance(value, bool) or not 0 <= float(value) <= 1:
                raise ValueError(f"{self}: {name} is a fraction from 0 to 1")
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
        """Whether the value ever goes down."""
        return self.final < self.initial

    def due(self, step: int) -> bool:
        return step == self.end or (self.start <= step < self.end and (step - self.start) % self.every == 0)

    def __str__(self) -> str:
        if self.start == self.end:
            return f"one_shot({self.final}, at={self.end}, initial={self.initial})"
        span = f"start={self.start}, end={self.end}, every={self.every}, initial={self.initial}"
        return f"{self.shape}({self.final}, {span})"

    __repr__ = __str__


@dataclass(frozen=True)
class Joined:
    """Several schedules, each from its own step on."""

    parts: tuple[tuple[int, Schedule], ...]

    def _part(self, step: int) -> Schedule:
        return [part for begin, part in self.parts if begin <= max(step, self.parts[0][0])][-1]

    def __call__(self, step: int) -> float:
        return self._part(step)(step)

    @property
    def falls(self) -> bool:
        """Whether the value ever goes down."""
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


def cubic(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """Fast at first, slow at the end (Zhu & Gupta, 2017): the usual choice for gradual pruning."""
    return Schedule("cubic", final, initial, start, end, every)


def linear(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """The same change at each update."""
    return Schedule("linear", final, initial, start, end, every)


def exponential(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """The same share of what is left at each update, as in iterative magnitude pruning."""
    return Schedule("exponential", final, initial, start, end, every)


def cosine(final: float, *, start: int = 0, end: int, every: int = 1, initial: float = 0.0) -> Schedule:
    """Half a cosine wave: slow at both ends."""
    return Schedule("cosine", final, initial, start, end, every)


def one_shot(final: float, *, at: int = 0, initial: float = 0.0) -> Schedule:
    """`initial` before the step `at`, `final` from it on."""
    return Schedule("linear", final, initial, at, at, 1)


def join(*parts: tuple[int, Schedule]) -> Joined:
    """`join((0, a), (1000, b))` is `a` until step 1000 and `b` from there on. Steps are those of the whole run."""
    if not all(isinstance(part, Schedule | Joined) for _, part in parts):
        raise TypeError(f"join takes (step, schedule) pairs; got {parts}. A constant is sc.one_shot(number)")
    begins = [begin for begin, _ in parts]
    if not parts or begins != sorted(set(begins)):
        raise ValueError(f"join needs at least one (step, schedule), with rising steps; got steps {begins}")
    return Joined(parts)


Number = float | Schedule | Joined
