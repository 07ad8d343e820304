"""Clocks: things run warm, in turns, many times, and reported with their spread."""

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
class Timing:
    """Seconds of one thing, over many rounds."""

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
        low, high = self.spread
        return f"{spell(self.median)} (best {spell(self.best)}, {spell(low)} to {spell(high)}, {len(self.seconds)} rounds)"


def spell(seconds: float) -> str:
    """Seconds in three digits and a fitting unit."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= 0.9995 * size or unit == "µs":
            break
    number = seconds / size
    return f"{number:.{2 if number < 9.995 else 1 if number < 99.95 else 0}f} {unit}"


def interleaved(
    runs: Sequence[Callable[[], Any]], *, seconds: float = 0.3, rounds: tuple[int, int] = (5, 200), cold: Tensor | None = None
) -> list[Timing]:
    """Each run once per round, the order turning; `cold` is read before each, so that weights come from memory.

    Rounds go on until `seconds` have passed for each run. With one thread, its own processor time counts, so that other
    programs on the machine disturb less.
    """
    alone = torch.get_num_threads() == 1 and not torch.cuda.is_initialized()
    clock = time.thread_time if alone else time.perf_counter
    for run in runs:
        run()
        run()
    times: list[list[float]] = [[] for _ in runs]
    begin, done = time.perf_counter(), 0
    while done < rounds[0] or (done < rounds[1] and time.perf_counter() - begin < seconds * len(runs)):
        for i in range(len(runs)):
            who = (i + done) % len(runs)
            if cold is not None:
                cold.sum()
            start = clock()
            runs[who]()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            times[who].append(clock() - start)
        done += 1
    return [Timing(tuple(each)) for each in times]


def in_graphs(
    runs: Sequence[Callable[[], Any]], *, seconds: float = 0.3, rounds: tuple[int, int] = (5, 200), cold: Tensor | None = None
) -> list[Timing]:
    """The same on a GPU, by its own clock and without the host: each run in a CUDA graph, several times unless cold.

    A run that cannot be recorded is timed as it is.
    """
    times: list[list[float]] = [[] for _ in runs]
    graphs = [_recorded(run, 1 if cold is not None else 8) for run in runs]
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin, done = time.perf_counter(), 0
    while done < rounds[0] or (done < rounds[1] and time.perf_counter() - begin < seconds * len(runs)):
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
        done += 1
    return [Timing(tuple(each)) for each in times]


def _recorded(run: Callable[[], Any], count: int) -> tuple[Callable[[], Any], int]:
    """The run as a graph of so many calls, and that number; the run itself and 1 where it waits for the host."""
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
    """What is read before each run, so that weights come from memory: more than the cache of the model's device."""
    device = next(model.parameters()).device
    if device.type != "cuda":
        return torch.ones(CACHE_BYTES // 4, device="cpu")
    return torch.ones(torch.cuda.get_device_properties(device).L2_cache_size * 3 // 4, device=device)


@contextmanager
def for_inference(model: nn.Module, threads: int | None = None) -> Iterator[None]:
    """Eval mode, no gradients, so many threads; and as it was afterwards."""
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
    """A tensor is the one argument, a tuple or list the arguments, a mapping the keyword arguments."""
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
    """Timings by name. `ratio` compares the best rounds of two of them."""

    timings: dict[str, Timing]

    def __getitem__(self, name: str) -> Timing:
        return self.timings[name]

    def ratio(self, slow: str, fast: str) -> float:
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
    """Time a model on these inputs, or several models in turns: warm, in eval mode, without gradients, with the spread."""
    models = {"model": model} if isinstance(model, nn.Module) else dict(model)
    if not models or not all(isinstance(each, nn.Module) for each in models.values()):
        raise TypeError("bench takes a torch.nn.Module, or a mapping of names to modules")
    group = nn.ModuleList(models.values())
    inputs = copy.copy(example_inputs)
    with for_inference(group, threads):
        runs = [lambda each=each: call(each, inputs) for each in models.values()]
        timings = interleaved(runs, seconds=seconds, rounds=(5, 500))
    return Bench(dict(zip(models, timings)))
