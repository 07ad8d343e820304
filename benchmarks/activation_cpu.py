"""What aggregating activations costs: `ActivationSparsifier`, ours and torch's, on the MLP of a transformer layer, on a CPU.

    python benchmarks/activation_cpu.py                 # --threads 1 on a machine that has other work

Three equal models take turns on the same input: without hooks, with our hooks, with torch's. Both linear layers are registered:
their inputs, 512x1024 and 512x4096, are aggregated by `data + x`. A clock before and one after the hook of each layer measure
what it costs within the forward pass; the goal is at most 5 % of the rest of that pass. Masking some features costs us a
copy of the input, because torch writes into the caller's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
from _bench import copy_bandwidth, duration, interleaved, machine, median, show, verdict
from torch import Tensor, nn
from torch.ao.pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Theirs

from secateur.drop_in.ao_pruning._experimental.activation_sparsifier.activation_sparsifier import ActivationSparsifier as Ours

WIDTH, TOKENS, GOAL = 1024, 512, 0.05


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))


def lower_half(data: Tensor) -> Tensor:
    return (data.abs() > data.abs().median()).to(data.dtype)


def sparsified(library: Any, features: list[int] | None = None) -> tuple[nn.Sequential, Any]:
    model = mlp()
    functions = (lambda data, x: data + x, lambda data: data.mean(0), lower_half)
    sparsifier = library(model, *functions, features=features, feature_dim=None if features is None else 1)
    for layer in (model[0], model[2]):
        sparsifier.register_layer(layer)
    return model, sparsifier


class Clock:
    """A model's forward pass, and the seconds that the hooks of its layers took in each."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model, self.seconds, self.begin = model, [], 0.0
        self.handles = []
        for layer in (model[0], model[2]):
            self.handles.append(layer.register_forward_pre_hook(self.start, prepend=True))
            self.handles.append(layer.register_forward_pre_hook(self.stop))

    def start(self, module: nn.Module, args: Any) -> None:
        self.begin = time.perf_counter()

    def stop(self, module: nn.Module, args: Any) -> None:
        self.seconds[-1] += time.perf_counter() - self.begin

    def __call__(self, x: Tensor) -> None:
        self.seconds.append(0.0)
        self.model(x)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def row(title: str, models: list[nn.Sequential], x: Tensor, rounds: int, before: Any = lambda: None) -> tuple[str, ...]:
    """Medians of the passes, and of what the hooks took of each pass."""
    clocks = [Clock(model) for model in models]
    times = interleaved(*(lambda clock=clock: clock(x) for clock in clocks), rounds=rounds, before=before)
    costs = [
        median([hook / (whole - hook) for hook, whole in zip(clock.seconds, wholes, strict=True)])
        for clock, wholes in zip(clocks, times, strict=True)
    ]
    for clock in clocks:
        clock.remove()
    _, ours, theirs = (median(clock.seconds) for clock in clocks)
    goal = verdict(costs[1] <= GOAL) if title.startswith("aggregate") else ""
    passes = (duration(median(wholes)) for wholes in times)
    return (title, *passes, duration(ours), duration(theirs), f"{costs[1]:.1%}", f"{costs[2]:.1%}", goal)


def forget(*sparsifiers: Any) -> None:
    """As after a step: nothing aggregated yet."""
    for sparsifier in sparsifiers:
        for config in sparsifier.data_groups.values():
            config.pop("data", None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    bandwidth = copy_bandwidth()
    floor = 3 * 4 * TOKENS * 5 * WIDTH / bandwidth
    print(
        f"{machine()}\n{TOKENS} tokens, {WIDTH} to {4 * WIDTH} to {WIDTH}, float32; copy bandwidth {bandwidth / 1e9:.1f} GB/s"
    )
    print(f"floor of data + x for whole inputs, two read and one written: {duration(floor)}")
    x, dense = torch.randn(TOKENS, WIDTH), mlp()
    rows = []
    with torch.no_grad():
        for what, features in (("whole input", None), ("8 features", list(range(0, 64, 8)))):
            (mine, our), (other, their) = sparsified(Ours, features), sparsified(Theirs, features)
            models = [dense, mine, other]
            row("warm up", models, x, 3)
            rows.append(row(f"aggregate, {what}", models, x, options.rounds))
            rows.append(
                row(f"first after a step, {what}", models, x, options.rounds, before=lambda both=(our, their): forget(*both))
            )
            for model in models:
                model(x)
            for sparsifier in (our, their):
                sparsifier.step()
                sparsifier.squash_mask()
            rows.append(row(f"sparsify, {what}", models, x, options.rounds))
    header = (
        "forward pass",
        "no hooks",
        "with ours",
        "with torch's",
        "our hooks",
        "torch's hooks",
        "ours cost",
        "torch's cost",
        "goal",
    )
    show(f"median of {options.rounds} rounds; the goal is a cost of at most {GOAL:.0%}", header, rows)


if __name__ == "__main__":
    main()
