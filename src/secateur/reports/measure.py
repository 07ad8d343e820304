"""Measures a model: parameters, FLOPs by layer, bytes on disk, the caller's metric, times."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from .._tree import bare_name, slots
from .._version import __version__
from ..display import Timing
from ..edit import Inputs, eval_mode, plain_kernels, run, split_inputs
from ..execute import bench
from ..io import save
from ..progress import track
from ..summaries import unreadable
from ..surgery import FlopCount
from .document import Machine, Metric, Time, wilson

Evaluate = Callable[[nn.Module], Any]
_LOWER = ("perplexity", "loss", "error", "ppl", "bits per byte")
_SHARES = ("accuracy", "top-1", "top-5")  # these are shown in percent


@dataclass
class Flops(FlopCount):
    """The FLOPs of one run, in all and by module, and the modules in the order in which they were called."""

    by_module: Counter[str] = field(default_factory=Counter)
    owned: Counter[str] = field(default_factory=Counter)  # how many weights (not vectors) each module has
    calls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self._inside: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.total
        out = super().__torch_dispatch__(func, types, args, kwargs)
        if self._inside and self.total > before:
            self.by_module[self._inside[-1]] += self.total - before
        return out

    def watch(self, name: str, module: nn.Module) -> list[Any]:
        """Registers the hooks that say when a module runs, and returns their handles."""

        def begin(*_: Any) -> None:
            self._inside.append(name)
            self.calls.append(name)

        def end(*_: Any) -> None:
            self._inside.pop()

        return [module.register_forward_pre_hook(begin), module.register_forward_hook(end)]

    def of_weight(self, name: str) -> int | None:
        """The FLOPs of the layer, or of the module that owns a weight of this name; None where several weights share them."""
        parent = name.rpartition(".")[0]
        module = parent if name not in self.owned and parent in self.owned else name
        found = self.by_module.get(module, 0)
        return found if not found or self.owned[module] < 2 else None


def flops_of(model: nn.Module, inputs: Inputs) -> Flops:
    """Runs a model with plain layers once. A module that owns parameters counts what is computed inside it."""
    count = Flops()
    with ExitStack() as stack:
        for name, module in model.named_modules():
            if any(True for _ in module.parameters(recurse=False)) and not isinstance(module, torch.jit.ScriptModule):
                for handle in count.watch(bare_name(name), module):
                    stack.callback(handle.remove)
        stack.enter_context(eval_mode(model))
        stack.enter_context(plain_kernels())
        run(model, *inputs, under=count)
    for slot in slots(model):  # a tied weight is listed once, under its first name
        first, *others = (bare_name(name).rpartition(".")[0] for name in (slot.name, *slot.also))
        if slot.tensor.ndim > 1:
            count.owned[first] += 1
            count.by_module[first] += sum(count.by_module.pop(other, 0) for other in others)
    return count


def bytes_on_disk(model: nn.Module) -> int:
    """The size of the folder that `save(packed=True)` writes."""
    with tempfile.TemporaryDirectory(prefix="secateur-") as folder:
        save(model, folder, packed=True)
        return sum(file.stat().st_size for file in Path(folder).iterdir())


def counts_of(model: nn.Module) -> tuple[int, int | None]:
    """The number of parameters, and how many are not zero, if all can be read. A tied parameter counts once."""
    parameters = [p.detach() for p in model.parameters() if not is_lazy(p) and p.numel()]
    total = sum(p.numel() for p in parameters)
    if any(map(unreadable, parameters)):
        return total, None
    return total, sum(int(torch.count_nonzero(p)) for p in parameters)


def times_of(models: Mapping[str, nn.Module], inputs: Mapping[str, Any], seconds: float) -> dict[str, list[Time]]:
    """Times all models in turn on each of the inputs, which are given with the words that name them."""
    found: dict[str, list[Time]] = {name: [] for name in models}
    for words, given in track(inputs.items(), "report", lambda item: f"times for {item[0]}"):
        for name, timing in bench(models, given, seconds=seconds).timings.items():
            found[name].append(as_time(words, timing))
    return found


def as_time(words: str, timing: Timing) -> Time:
    low, high = timing.spread
    return Time(words, timing.median, timing.best, low, high, len(timing.seconds))


def words_for(inputs: Any) -> str:
    """Names the inputs: "one image", "16 images", "512 tokens", "a batch of 8"."""
    shape, integers = first_shape(inputs)
    if not shape:
        return "one call"
    if integers and len(shape) <= 2:
        return _several(math.prod(shape), "token")
    if len(shape) == 4 and shape[1] in (1, 3, 4):
        return _several(shape[0], "image")
    return _several(shape[0], "sample")


def first_shape(inputs: Any) -> tuple[list[int] | None, bool]:
    """The shape of the first tensor among the inputs, and whether it holds integers."""
    args, kwargs = split_inputs(inputs)
    for value in (*args, *kwargs.values()):
        if isinstance(value, Tensor):
            return list(value.shape), not (value.is_floating_point() or value.is_complex())
    return None, False


def _several(count: int, noun: str) -> str:
    return f"one {noun}" if count == 1 else f"{count:,} {noun}s"


# --- the caller's metric ----------------------------------------------------------------------------------------------------


def metrics_of(
    models: Mapping[str, nn.Module | None], evaluate: Evaluate, name: str, samples: int | None, better: str | None
) -> list[Metric | None]:
    """Calls `evaluate` with each model in evaluation mode. It returns a number, or a number with the ends of its interval."""
    named = track(models.items(), "report", lambda item: f"{name} of {item[0]}")
    values = [None if model is None else _evaluated(model, evaluate) for _, model in named]
    numbers = [value for triple in values if triple is not None for value in triple if value is not None]
    share = name.lower() in _SHARES
    scale = 100.0 if share and all(0 <= value <= 1 for value in numbers) else 1.0
    better = better or ("lower" if name.lower() in _LOWER else "higher")
    if better not in ("higher", "lower"):
        raise ValueError(f"better={better!r} must be 'higher' or 'lower'")

    def metric(triple: tuple[float, float | None, float | None] | None) -> Metric | None:
        if triple is None:
            return None
        value, low, high = (None if part is None else scale * part for part in triple)
        assert value is not None
        if low is None and share and samples:
            low, high = wilson(value, samples)
        return Metric(name, value, "%" if share else "", low, high, samples, better)

    return [metric(triple) for triple in values]


def _evaluated(model: nn.Module, evaluate: Evaluate) -> tuple[float, float | None, float | None]:
    with eval_mode(model), torch.no_grad():
        found = evaluate(model)
    try:
        numbers = [float(each) for each in (found if isinstance(found, tuple | list) else (found,))]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) not in (1, 3) or not all(map(math.isfinite, numbers)):
        raise ValueError(f"evaluate returned {repr(found)[:80]}; it must return a finite number, or (value, low, high)")
    return (numbers[0], numbers[1], numbers[2]) if len(numbers) == 3 else (numbers[0], None, None)


# --- the machine ------------------------------------------------------------------------------------------------------------


def machine() -> Machine:
    """The processor, the accelerator, the load and the versions."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    cpu = next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())
    return Machine(
        cpu=cpu or platform.machine(),
        cores=os.cpu_count() or 1,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=str(torch.__version__),
        secateur=__version__,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_initialized() else "",
        load=round(os.getloadavg()[0], 1) if hasattr(os, "getloadavg") else None,
    )
