"""Time measurement: functions run warm, in alternation, over many rounds; and `bench`, which times whole models."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from .._dist import refuse_sharded
from .._hints import hints
from ..display import Reported, Timing, after, interleaved, thread_time, time_left, wall_time
from ..edit import eval_mode, inputs_error, split_inputs
from ..progress import Progress

CACHE_BYTES = 48 << 20  # more than the last-level cache of most machines


def time_runs(
    runs: Sequence[Callable[[], Any]],
    *,
    seconds: float = 0.3,
    rounds: tuple[int, int] = (5, 200),
    cold: Tensor | None = None,
    progress: Progress | None = None,
) -> list[Timing]:
    """Times functions in turn (see `interleaved`), for `seconds` each, within the limits `rounds`, and reports to `progress`.

    If `cold` is given, it is read before each run to push the weights out of the cache. With one thread, the thread's processor
    time is measured instead of wall-clock time, so that other programs disturb less.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    clock = thread_time if alone else wall_time

    def once(run: Callable[[], Any]) -> float:
        if cold is not None:
            cold.sum()
        return clock(run)

    stop = after(seconds, rounds)

    def enough(found: Sequence[Sequence[float]], spent: float) -> bool:
        if progress is not None:
            progress.remains(time_left(found, spent, seconds, rounds))
        return stop(found, spent)

    return interleaved(runs, enough, once=once)


def in_graphs(
    runs: Sequence[Callable[[], Any]], *, seconds: float = 0.3, rounds: tuple[int, int] = (5, 200), cold: Tensor | None = None
) -> list[Timing]:
    """Does the same as `time_runs` on a GPU, with CUDA events and without the time that the host takes.

    Each function is captured in a CUDA graph, eight times in a row (once if `cold` is given). A function that cannot be
    captured is called directly.
    """
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

    def once(graph: tuple[Callable[[], Any], int]) -> float:
        replay, count = graph
        if cold is not None:
            cold.sum()
        start.record()
        replay()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / count

    graphs = [_recorded(run, 1 if cold is not None else 8) for run in runs]
    return interleaved(graphs, after(seconds, rounds), once=once, warm_up=0)


def _recorded(run: Callable[[], Any], count: int) -> tuple[Callable[[], Any], int]:
    """Returns a CUDA graph of `count` calls and `count`, or the function itself and 1 if it cannot be captured."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        run()
        run()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                run()
    except RuntimeError:
        torch.cuda.synchronize()
        return run, 1
    return graph.replay, count


def cold_for(model: nn.Module) -> Tensor:
    """Returns a tensor about as large as the last-level cache of the model's device. Reading it evicts the weights."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return torch.ones(CACHE_BYTES // 4, device="cpu")
    return torch.ones(torch.cuda.get_device_properties(device).L2_cache_size * 3 // 4, device=device)


@contextmanager
def for_inference(model: nn.Module, threads: int | None = None) -> Iterator[None]:
    """Sets eval mode, no_grad and the number of threads, and restores all of them on exit."""
    before = torch.get_num_threads()
    try:
        if threads is not None:
            torch.set_num_threads(threads)
        with eval_mode(model), torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)


def call(model: nn.Module, example_inputs: Any) -> Any:
    """Calls the model with a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if not isinstance(example_inputs, Tensor | Mapping | tuple | list):
        raise TypeError(
            "example_inputs must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
            f"not {type(example_inputs).__name__}"
        )
    args, kwargs = split_inputs(example_inputs)
    try:
        return model(*args, **kwargs)
    except Exception as error:
        raise inputs_error(error, model, args, kwargs) from error


@dataclass(frozen=True)
class Bench(Reported):
    """The times of one or more models, by name. `print` shows them, `ratio` compares the best rounds of two."""

    timings: dict[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        if name not in self.timings:
            raise KeyError(f"no model {name!r} was timed, only {', '.join(map(repr, self.timings))}")
        return self.timings[name]

    def ratio(self, slow: str, fast: str) -> float:
        """Returns how many times longer the best round of `slow` took than that of `fast`."""
        return self[slow].best / self[fast].best

    def __str__(self) -> str:
        width = max(len(name) for name in self.timings)
        first = next(iter(self.timings.values()))
        lines = (
            f"{name:<{width}}  {timing}" + (f"  {first.best / timing.best:.2f}x" if timing is not first else "")
            for name, timing in self.timings.items()
        )
        return "\n".join(lines)

    __repr__ = __str__


@hints
def bench(
    model: nn.Module | Mapping[str, nn.Module], example_inputs: Any, *, threads: int | None = None, seconds: float = 2.0
) -> Bench:
    """Times a model on these inputs, or several models (a mapping of names) in alternation.

    The models run warm, in eval mode and without gradients. `seconds` is the measuring time for each model.
    """
    models = _models(model)
    check_threads(threads)
    if not isinstance(seconds, Real) or isinstance(seconds, bool) or not 0 <= seconds < math.inf:
        raise ValueError(f"seconds={seconds!r} must be a number of seconds, 0 or more: the measuring time for each model")
    group = nn.ModuleList(models.values())
    refuse_sharded(group, "bench times")
    inputs = copy.copy(example_inputs)
    with for_inference(group, threads), Progress("bench") as progress:
        progress(", ".join(models))
        progress.remains(float(seconds) * len(models))
        runs = [lambda each=each: call(each, inputs) for each in models.values()]
        timings = time_runs(runs, seconds=float(seconds), rounds=(5, 500), progress=progress)
    return Bench(dict(zip(models, timings)))


def _models(given: Any) -> dict[str, nn.Module]:
    """The models to time, by name. Raises TypeError where there are none."""
    found = {"model": given} if isinstance(given, nn.Module) else {**given} if isinstance(given, Mapping) else {}
    if found and all(isinstance(name, str) and isinstance(each, nn.Module) for name, each in found.items()):
        return found
    raise TypeError(
        "bench takes a torch.nn.Module, or a mapping of names to modules to compare several, such as "
        f'{{"dense": model, "pruned": other}}; not {type(given).__name__}'
    )


def check_threads(threads: Any) -> None:
    """Raises unless this is a number of CPU threads, or None."""
    if threads is not None and (not isinstance(threads, int) or isinstance(threads, bool) or threads < 1):
        raise ValueError(f"threads={threads!r} must be a whole number of CPU threads, 1 or more")
