"""Progress of long work: a bar in a terminal or a notebook, or else a plain line every few seconds.

Work that takes less than two seconds shows nothing. Functions report the current item (`Progress`, `track`), and a thread
draws. It ends two seconds after the last loop, because starting one for each loop would take longer than planning a small
model. Nothing here needs torch.
"""

from __future__ import annotations

import html
import logging
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from operator import length_hint
from typing import Any, Protocol, TypeVar

T = TypeVar("T")
AFTER = 2.0  # seconds of work before anything is shown
FRAME = 0.25  # seconds between two frames of a bar
_log = logging.getLogger("secateur")
_chosen: bool | None = None


def set_progress(enabled: bool | None) -> None:
    """Turns the progress of long calls on or off. None returns to the default.

    By default, calls that take longer than two seconds show a bar with the remaining time, in terminals and notebooks. Where
    stderr is not a terminal they write a line every few seconds: to the logger "secateur" if it has a handler for level INFO,
    else to stderr. The environment variable SECATEUR_PROGRESS=0 turns this off. Of several processes that torchrun started,
    only the first shows progress.
    """
    global _chosen  # noqa: PLW0603
    _chosen = None if enabled is None else bool(enabled)


def progress_enabled() -> bool:
    """Returns whether long calls show their progress."""
    if _chosen is not None:
        return _chosen
    return os.environ.get("SECATEUR_PROGRESS", "1") != "0" and os.environ.get("RANK", "0") == "0"


class Progress:
    """Reports the progress of a loop. Call it with a name whenever work on the next item begins::

        with Progress("refit", len(layers)) as progress:
            for layer in layers:
                progress(layer.name)

    With `total`, the display counts the calls and estimates the remaining time; `remains` sets it for work that ends by the
    clock. `every`: seconds between plain lines. `quiet` shows nothing at all. Without `with`, the display ends when the object
    is deleted.
    """

    def __init__(self, task: str, total: int | None = None, *, every: float = 5.0, quiet: bool = False) -> None:
        self._row = _Row(task, total, every)
        self.close: Callable[[], Any] = weakref.finalize(self, _board.remove, self._row)
        if not quiet and progress_enabled():
            _board.add(self._row)

    def __call__(self, what: str) -> None:
        """Reports that work on `what` begins."""
        self._row.what = what
        self._row.calls += 1
        self._row.since = time.monotonic()

    def remains(self, seconds: float) -> None:
        """Reports that the work takes about so many seconds from now."""
        self._row.end = time.monotonic() + seconds

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def track(items: Iterable[T], task: str, name: Callable[[T], str] | None = None) -> Iterator[T]:
    """Yields the items and reports each as one step of `task`. Default for `name`: "batch 1", "batch 2", ..."""
    with Progress(task, _length(items)) as progress:
        for number, item in enumerate(items, 1):
            progress(name(item) if name else f"batch {number}")
            yield item


def _length(items: Iterable[Any]) -> int | None:
    """The number of items, if it is known. Data loaders over streams have a `__len__` that raises."""
    try:
        return length_hint(items) or None
    except Exception:
        return None


@contextmanager
def paused() -> Iterator[Callable[[], None]]:
    """Draws nothing inside, so that drawing does not disturb a measurement, except where the yielded function is called."""
    _board.pauses += 1
    try:
        yield _board.draw
    finally:
        _board.pauses -= 1


# --- what is shown --------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Row:
    """One loop: its current item, and the time at which work on it began."""

    task: str
    total: int | None
    every: float
    what: str = ""
    calls: int = 0
    begin: float = field(default_factory=time.monotonic)
    since: float = 0.0  # when work on the current item began
    end: float | None = None  # when the work will be done, where that is known

    @property
    def done(self) -> int:
        """The number of finished items: the current one is not."""
        return max(self.calls - 1, 0)

    @property
    def name(self) -> str:
        return f"{self.task}: {self.what}" if self.what else self.task

    @property
    def count(self) -> str:
        return f"{self.calls} of {self.total}" if self.total is not None and self.calls else ""

    def reached(self, now: float) -> tuple[float, float | None]:
        """The work done and the total work; None if the total is not known."""
        if self.end is None:
            return self.done, self.total
        return min(now, self.end) - self.begin, self.end - self.begin

    def times(self, now: float) -> str:
        """The elapsed time, and the remaining time if the next items take as long as the finished ones did on average.

        While an item takes longer, the items after it are counted.
        """
        elapsed = now - self.begin
        if self.end is not None:
            return f"{_duration(elapsed)}, about {_duration(max(self.end - now, 0.0))} left"
        if self.total is None or not self.done or self.calls > self.total:
            return _duration(elapsed)
        each = (self.since - self.begin) / self.done
        left = max(each * (self.total - self.done) - (now - self.since), each * (self.total - self.calls))
        return f"{_duration(elapsed)}, about {_duration(left)} left"


def _duration(seconds: float) -> str:
    """Whole seconds below two minutes, else minutes, else hours and minutes."""
    whole = round(seconds)
    if whole < 120:
        return f"{whole} s"
    return f"{whole // 60} min" if whole < 7200 else f"{whole // 3600} h {whole % 3600 // 60} min"


class _View(Protocol):
    """A place where rows are drawn, outermost first."""

    def draw(self, rows: list[_Row], now: float) -> None: ...

    def close(self) -> None: ...


class _Lines:
    """A plain line about the innermost row, every few seconds."""

    def __init__(self) -> None:
        self._last: float | None = None

    def draw(self, rows: list[_Row], now: float) -> None:
        row = rows[-1]
        if now - (self._last if self._last is not None else rows[0].begin) < row.every:
            return
        self._last = now
        outer = "".join(f"{one.task}, " for one in rows[:-1])
        count = f", {row.count}" if row.count else ""
        _say(f"{outer}{row.name}{count} ({row.times(now)})")

    def close(self) -> None:
        pass


def _say(line: str) -> None:
    """Writes a line to the logger if it has a handler for level INFO, else to stderr."""
    if _log.isEnabledFor(logging.INFO) and _log.hasHandlers():
        _log.info(line)
    else:
        print(f"secateur: {line}", file=sys.stderr, flush=True)


class _Bars:
    """Bars in a terminal, which disappear at the end."""

    def __init__(self) -> None:
        from rich import progress
        from rich.console import Console
        from rich.table import Column

        columns = (
            progress.TextColumn("{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")),
            progress.BarColumn(bar_width=24),
            progress.TextColumn("{task.fields[count]}", markup=False),
            progress.TextColumn("{task.fields[times]}", markup=False, style="progress.remaining"),
        )
        self._bars = progress.Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True)
        self._tasks: dict[_Row, Any] = {}
        self._bars.start()

    def draw(self, rows: list[_Row], now: float) -> None:
        for row in [old for old in self._tasks if old not in rows]:
            self._bars.remove_task(self._tasks.pop(row))
        for row in rows:
            shown: dict[str, Any] = {"description": row.name, "count": row.count, "times": row.times(now)}
            done, total = row.reached(now)
            if row not in self._tasks:
                self._tasks[row] = self._bars.add_task(**shown)
            self._bars.update(self._tasks[row], completed=done, total=total, **shown)
        self._bars.refresh()

    def close(self) -> None:
        self._bars.stop()


class _Notebook:
    """Bars in the output of a notebook's cell, which disappear at the end."""

    def __init__(self) -> None:
        self._handle: Any = None

    def draw(self, rows: list[_Row], now: float) -> None:
        self._put("".join(_html(row, now) for row in rows))

    def close(self) -> None:
        self._put("")

    def _put(self, text: str) -> None:
        from IPython.display import HTML, display  # type: ignore[import-not-found]

        if self._handle is None:
            self._handle = display(HTML(text), display_id=True)
        else:
            self._handle.update(HTML(text))


def _html(row: _Row, now: float) -> str:
    done, total = row.reached(now)
    value = f' max="{total:g}" value="{done:g}"' if total else ""
    text = html.escape(" ".join(part for part in (row.count, f"({row.times(now)})") if part))
    return f"<div><code>{html.escape(row.name)}</code> <progress{value}></progress> {text}</div>"


def _view() -> _View:
    """The view that fits where this process writes to."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if getattr(shell, "kernel", None) is not None:
        return _Notebook()
    if sys.stderr is not None and sys.stderr.isatty() and os.environ.get("TERM") != "dumb":
        return _Bars()
    return _Lines()


class _Board:
    """The open rows of this process, and the thread that draws them."""

    def __init__(self) -> None:
        self.rows: list[_Row] = []
        self.pauses = 0
        self._lock = threading.RLock()  # the garbage collector may close a row while this thread draws
        self._view: _View | None = None
        self._drawing = False  # whether the thread runs
        self._next = 0.0

    def add(self, row: _Row) -> None:
        with self._lock:
            self.rows.append(row)
            if not self._drawing:
                self._drawing = True
                threading.Thread(target=self._run, name="secateur progress", daemon=True).start()

    def remove(self, row: _Row) -> None:
        """Removes a row and those inside it, which an error may have left open."""
        with self._lock:
            if row not in self.rows:
                return
            del self.rows[self.rows.index(row) :]
            if not self.rows and self._view is not None:
                self._view.close()
                self._view = None

    def _run(self) -> None:
        busy = time.monotonic()
        try:
            while True:
                time.sleep(FRAME)
                with self._lock:
                    if self.rows:
                        busy = time.monotonic()
                    elif time.monotonic() - busy > AFTER:
                        self._drawing = False
                        return
                if not self.pauses:
                    with suppress(OSError, ValueError):  # a stream that was closed meanwhile
                        self.draw()
        except BaseException:
            self._drawing = False  # the next loop starts another thread
            raise

    def draw(self) -> None:
        """Draws the rows that are old enough, unless that was done a moment ago."""
        now = time.monotonic()
        if now < self._next:
            return
        with self._lock:
            rows = [row for row in self.rows if now - row.begin >= AFTER]
            if rows:
                self._view = self._view or _view()
                self._view.draw(rows, now)
                self._next = now + FRAME / 2


_board = _Board()
if hasattr(os, "register_at_fork"):  # a child process has no thread that draws, and must not wait for a lock of its parent
    os.register_at_fork(after_in_child=_board.__init__)
