"""Tables of results as text or HTML, notes, the `report` method, and timing. (`progress` shows the progress of long runs.)

Results provide the text of the cells; this module formats them. `interleaved` times several callables in turn.
"""

from __future__ import annotations

import html
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from .progress import paused

Cells = Sequence[str]


# --- tables ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Table:
    """A table of strings. `print(table)` shows it as text, `table.html()` returns it for a notebook.

    `title` is printed above the header, and `notes` below the table, one on each line. `right` holds the numbers of the columns
    that are aligned to the right. Without `ruled` there are no lines of dashes below the header and above the totals.
    """

    header: Cells
    rows: Sequence[Cells]
    totals: Sequence[Cells] = ()
    right: Collection[int] = ()
    title: str = ""
    notes: Sequence[str] = ()
    ruled: bool = True

    def __str__(self) -> str:
        widths = [max(map(len, column)) for column in zip(self.header, *self.rows, *self.totals, strict=True)]

        def line(cells: Cells) -> str:
            padded = (c.rjust(w) if i in self.right else c.ljust(w) for i, (c, w) in enumerate(zip(cells, widths)))
            return "  ".join(padded).rstrip()

        rule = ["-" * (sum(widths) + 2 * (len(widths) - 1))] if self.ruled else []
        body = [line(self.header), *rule, *map(line, self.rows), *(rule if self.totals else ()), *map(line, self.totals)]
        return "\n".join([*([self.title] if self.title else ()), *body, *self.notes])

    def html(self, summary: str = "", notes: Iterable[str | tuple[str, str]] | None = None) -> str:
        """The same as HTML, every cell escaped. The notes are folded away behind `summary`.

        `notes` replaces the notes of the text; a pair (name, explanation) sets the name in code font.
        """
        body = "".join(_html_row(cells, "td") for cells in (*self.rows, *self.totals))
        caption = f"<caption>{html.escape(self.title)}</caption>" if self.title else ""
        table = f"<table>{caption}<thead>{_html_row(self.header, 'th')}</thead><tbody>{body}</tbody></table>"
        items = "".join(map(_html_note, self.notes if notes is None else notes))
        return table + (f"<details><summary>{html.escape(summary)}</summary><ul>{items}</ul></details>" if items else "")


def _html_row(cells: Cells, tag: str) -> str:
    return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"


def _html_note(note: str | tuple[str, str]) -> str:
    if isinstance(note, str):
        return f"<li>{html.escape(note)}</li>"
    return f"<li><code>{html.escape(note[0])}</code>: {html.escape(note[1])}</li>"


def notes_by_reason(title: str, reasons: Mapping[str, str | None]) -> list[str]:
    """One note for each different reason, with the number of names it holds for and the first four of them."""
    notes = []
    for reason, number in Counter(reasons.values()).items():
        names = [name for name, why in reasons.items() if why == reason]
        notes.append(f"{title}, {number}: {reason} ({', '.join(names[:4])}{', ...' if number > 4 else ''})")
    return notes


class Shown:
    """A result that prints as the table of `_table()`, in a notebook as HTML with its notes folded away."""

    _folded = "notes"  # the title of the folded notes

    def _table(self) -> Table:
        raise NotImplementedError

    def __str__(self) -> str:
        return str(self._table())

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        return self._table().html(self._folded)


# --- reports --------------------------------------------------------------------------------------------------------


class Reported:
    """A result with a method `report`. The reports are imported by name, because they import all results."""

    def report(self, path: str | os.PathLike[str] | None = None, **options: Any) -> Any:
        """Returns the report of this result, and writes it to `path` (.html or .json). The options are those of `sc.report`,
        which also takes several results."""
        return import_module("secateur.reports").report(self, path=path, **options)

    if not TYPE_CHECKING:  # a type checker reports attributes that are not there itself

        def __getattr__(self, name: str) -> Any:
            kind = type(self).__name__
            of_model = not name.startswith("_") and (hasattr(torch.nn.Module, name) or name in _OF_PRETRAINED)
            hint = ": it is a result and not the model. Functions whose names end in _ change the model itself"
            text = f"{kind!r} object has no attribute {name!r}{hint if of_model else ''}"
            raise AttributeError(text, name=name, obj=self)


_OF_PRETRAINED = frozenset({"config", "generate", "save_pretrained", "push_to_hub"})


# --- the clock ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Timing:
    """The seconds that one callable took, one number for each round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and the 90th percentile."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]

    def __str__(self) -> str:
        low, high, median, best = map(format_seconds, (*self.spread, self.median, self.best))
        return f"{median} (best {best}, {low} to {high}, {len(self.seconds)} rounds)"


def format_seconds(seconds: float) -> str:
    """Seconds with three significant digits and a unit: s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size or unit == "µs":
            break
    number = seconds / size
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def wall_time(run: Callable[[], Any]) -> float:
    """Seconds of one call, including the work that it leaves to an accelerator."""
    _synchronize()
    start = time.perf_counter()
    run()
    _synchronize()
    return time.perf_counter() - start


def thread_time(run: Callable[[], Any]) -> float:
    """Processor seconds of this thread in one call: on one CPU thread, other programs disturb this less than the wall clock."""
    start = time.thread_time()
    run()
    return time.thread_time() - start


def _synchronize() -> None:
    """Waits for the accelerator. CUDA that nothing has initialized has no work to wait for."""
    device = torch.accelerator.current_accelerator()
    if device is not None and (torch.cuda.is_initialized() if device.type == "cuda" else torch.accelerator.is_available()):
        torch.accelerator.synchronize()


Enough = Callable[[Sequence[Sequence[float]], float], bool]


def interleaved(
    runs: Sequence[Any], enough: Enough, *, once: Callable[[Any], float] = wall_time, warm_up: int = 2
) -> list[Timing]:
    """Times several runs in turn, so that all of them see the same machine, and returns a `Timing` for each.

    Every round measures each run once. The order rotates from round to round, so each run comes first equally often.
    `once(run)` calls a run and returns its seconds. `warm_up` rounds are not counted. After each round,
    `enough(seconds, spent)` is called with the seconds of each run so far and the time since the first counted round; the
    measurement ends when it returns True (see `after`).
    """
    for _ in range(warm_up):
        for run in runs:
            once(run)
    seconds: list[list[float]] = [[] for _ in runs]
    begin, rounds = time.perf_counter(), 0
    with paused() as draw:
        while runs and (not rounds or not enough(seconds, time.perf_counter() - begin)):
            for i in range(len(runs)):
                turn = (i + rounds) % len(runs)
                seconds[turn].append(once(runs[turn]))
            rounds += 1
            draw()
    return [Timing(tuple(each)) for each in seconds]


def time_left(found: Sequence[Sequence[float]], spent: float, seconds: float, rounds: tuple[int, int]) -> float:
    """The estimated time until `after(seconds, rounds)` is enough, with rounds as long as those before."""
    done = len(found[0])
    each = spent / done
    return min(max(seconds * len(found) - spent, (rounds[0] - done) * each), (rounds[1] - done) * each)


def after(seconds: float, rounds: tuple[int, int] = (5, 200)) -> Enough:
    """Enough once `seconds` have passed for each run, after at least and at most so many rounds."""

    def enough(found: Sequence[Sequence[float]], spent: float) -> bool:
        done = len(found[0])
        return done >= rounds[1] or (done >= rounds[0] and spent >= seconds * len(found))

    return enough
