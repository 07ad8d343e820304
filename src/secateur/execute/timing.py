"""Time measurement: functions run warm, in alternation, over many rounds; and `bench`, which times whole models."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

CACHE_BYTES = 48 << 20  # more than the last-level cache of most machines


@dataclass(frozen=True)
class RunTimes:
    """The seconds that one function took in each round."""

    seconds: tuple[float, ...]

    @property
    def best(self) -> float:
        return min(self.seconds)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The 10th and 90th percentiles."""
        ordered = sorted(self.seconds)
        return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]

    def __str__(self) -> str:
        low, high = self.spread
        return f"{spell(self.median)} (best {spell(self.best)}, {spell(low)} to {spell(high)}, {len(self.seconds)} rounds)"


def spell(seconds: float) -> str:
    """Formats seconds with three digits in s, ms or µs."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size or unit == "µs":
            break
    number = seconds / size
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def interleaved(
    runs: Sequence[Callable[[], Any]], *, seconds: float = 0.3, rounds: tuple[int, int] = (5, 200), cold: Tensor | None = None
) -> list[RunTimes]:
    """Times each function once per round, in an order that rotates from round to round.

    Rounds continue until `seconds` times the number of functions have passed, within the limits `rounds`. If `cold` is given,
    it is read before each run to push the weights out of the cache. With one thread, the thread's processor time is measured
    instead of wall-clock time, so that other programs disturb less.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    clock = time.thread_time if alone else time.perf_counter
    for run in runs:
        run()
        run()
    times: list[list[float]] = [[] for _ in runs]
    for done in _rounds(rounds, seconds * len(runs)):
        for i in range(len(runs)):
            who = (i + done) % len(runs)
            if cold is not None:
                cold.sum()
            start = clock()
            runs[who]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            times[who].append(clock() - start)
    return [RunTimes(tuple(each)) for each in times]


def _rounds(limits: tuple[int, int], seconds: float) -> Iterator[int]:
    """Yields the round numbers: at least `limits[0]`, then until `seconds` have passed or there are `limits[1]`."""
    begin, done = time.perf_counter(), 0
    while done < limits[0] or (done < limits[1] and time.perf_counter() - begin < seconds):
        yield done
        done += 1


def in_graphs(
    runs: Sequence[Callable[[], Any]], *, seconds: float = 0.3, rounds: tuple[int, int] = (5, 200), cold: Tensor | None = None
) -> list[RunTimes]:
    """Does the same as `interleaved` on a GPU, with CUDA events and without the time that the host takes.

    Each function is captured in a CUDA graph, eight times in a row (once if `cold` is given). A function that cannot be
    captured is called directly.
    """
    times: list[list[float]] = [[] for _ in runs]
    graphs = [_recorded(run, 1 if cold is not None else 8) for run in runs]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for done in _rounds(rounds, seconds * len(runs)):
        for i in range(len(runs)):
            who = (i + done) % len(runs)
            replay, count = graphs[who]
            if cold is not None:
                cold.sum()
            start.record()
            replay()
            end.record()
            end.synchronize()
            times[who].append(start.elapsed_time(end) / 1e3 / count)
    return [RunTimes(tuple(each)) for each in times]


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
    modes, before = {module: module.training for module in model.modules()}, torch.get_num_threads()
    try:
        model.eval()
        if threads is not None:
            torch.set_num_threads(threads)
        with torch.no_grad():
            yield
    finally:
        torch.set_num_threads(before)
        for module, mode in modes.items():
            module.training = mode


def call(model: nn.Module, example_inputs: Any) -> Any:
    """Calls the model with a tensor, a tuple or list of arguments, or a mapping of keyword arguments."""
    if isinstance(example_inputs, Tensor):
        return model(example_inputs)
    if isinstance(example_inputs, Mapping):
        return model(**example_inputs)
    if isinstance(example_inputs, tuple | list):
        return model(*example_inputs)
    raise TypeError(
        "example_inputs must be a tensor, a tuple of arguments or a mapping of keyword arguments, "
        f"not {type(example_inputs).__name__}"
    )


@dataclass(frozen=True)
class Bench:
    """The times of one or more models, by name. `print` shows them, `ratio` compares the best rounds of two."""

    timings: dict[str, RunTimes]

    def __getitem__(self, name: str) -> RunTimes:
        return self.timings[name]

    def ratio(self, slow: str, fast: str) -> float:
        """Returns how many times longer the best round of `slow` took than that of `fast`."""
        return self.timings[slow].best / self.timings[fast].best

    def __str__(self) -> str:
        width = max(len(name) for name in self.timings)
        first = next(iter(self.timings.values()))
        lines = (
            f"{name:<{width}}  {timing}" + (f"  {first.best / timing.best:.2f}x" if timing is not first else "")
            for name, timing in self.timings.items()
        )
        return "\n".join(lines)


def bench(
    model: nn.Module | Mapping[str, nn.Module], example_inputs: Any, *, threads: int | None = None, seconds: float = 2.0
) -> Bench:
    """Times a model on these inputs, or several models (a mapping of names) in alternation.

    The models run warm, in eval mode and without gradients. `seconds` is the measuring time for each model.
    """
    models = {"model": model} if isinstance(model, nn.Module) else dict(model)
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise TypeError("bench takes a torch.nn.Module, or a mapping of names to modules")
    group = nn.ModuleList(models.values())
    inputs = copy.copy(example_inputs)
    with for_inference(group, threads):
        runs = [lambda each=each: call(each, inputs) for each in models.values()]
        timings = interleaved(runs, seconds=seconds, rounds=(5, 500))
    return Bench(dict(zip(models, timings)))
