"""`secateur.drop_in.prune` against `torch.nn.utils.prune` on a CPU: one process, taking turns, both from a fresh module.

    python benchmarks/drop_in_cpu.py

The floor is the time the machine needs merely to read and write, once, the bytes that the contract has read and written: the
weights read, mask and masked weight written. Memory is the peak of a fresh process, in copies of the weights. Calls rank with
NumPy until a process has looked at 268 M weights, and with compiled loops from then on; the last rows are those calls.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.utils.prune as theirs
from _bench import PeakMemory, copy_bandwidth, duration, in_fresh_process, interleaved, machine, median, show, touch, trim
from torch import nn

from secateur.drop_in import prune as ours
from secateur.kernels import arrays

Call = Callable[[Any, list[nn.Linear]], object]
Case = tuple[str, Call, int, int, torch.dtype, int]


def layers(count: int, side: int, dtype: torch.dtype) -> list[nn.Linear]:
    generator = torch.Generator().manual_seed(0)
    made = [nn.Linear(side, side, bias=False, dtype=dtype) for _ in range(count)]
    with torch.no_grad():
        for layer in made:
            layer.weight.copy_(torch.empty(side, side).normal_(0, 0.02, generator=generator))
    return made


def l1(prune: Any, modules: list[nn.Linear]) -> None:
    prune.l1_unstructured(modules[0], "weight", 0.5)


def ln(prune: Any, modules: list[nn.Linear]) -> None:
    prune.ln_structured(modules[0], "weight", 0.5, 2, 0)


def random(prune: Any, modules: list[nn.Linear]) -> None:
    prune.random_unstructured(modules[0], "weight", 0.5)


def everywhere(prune: Any, modules: list[nn.Linear]) -> None:
    prune.global_unstructured([(module, "weight") for module in modules], prune.L1Unstructured, amount=0.5)


CASES: list[Case] = [
    ("l1_unstructured 4096x4096 float32", l1, 1, 4096, torch.float32, 5),
    ("l1_unstructured 4096x4096 bfloat16", l1, 1, 4096, torch.bfloat16, 5),
    ("ln_structured 4096x4096 float32", ln, 1, 4096, torch.float32, 5),
    ("random_unstructured 4096x4096 float32", random, 1, 4096, torch.float32, 3),
    ("global_unstructured L1 24x(2048x2048) float32", everywhere, 24, 2048, torch.float32, 3),
]


def clean(modules: list[nn.Linear], dense: list[nn.Parameter]) -> None:
    """Every call finds modules that were never pruned, the same weights, and memory for what it makes."""
    for module, weight in zip(modules, dense, strict=True):
        for name in ("_forward_pre_hooks", "_parameters", "_buffers", "_load_state_dict_post_hooks"):
            getattr(module, name).clear()
        for name in ("weight", "_apply", "__deepcopy__", "__reduce_ex__"):
            vars(module).pop(name, None)
        module._parameters["weight"] = weight
    touch(3 * sum(weight.nbytes for weight in dense))  # last, so that the call gets these pages


def peak(library: str) -> None:
    """Peak memory of one global call, in copies of the weights."""
    modules = layers(8, 2048, torch.float32)
    trim()
    with PeakMemory() as memory:
        everywhere(ours if library == "ours" else theirs, modules)
    print(json.dumps({"copies": memory.extra / sum(module.weight_orig.nbytes for module in modules)}))


def times(case: Case, *, compiled: bool) -> tuple[str, float, float, int]:
    """Returns title, seconds of ours and of torch's, and the bytes of the floor."""
    title, call, count, side, dtype, rounds = case
    modules = layers(count, side, dtype)
    dense = [module.weight for module in modules]

    def before() -> None:
        arrays._work.elements = arrays.ENOUGH if compiled else 0  # whatever earlier calls have read
        clean(modules, dense)

    before()
    call(ours, modules)  # the first one loads the compiled loops
    mine, other = interleaved(lambda: call(ours, modules), lambda: call(theirs, modules), rounds=rounds, before=before)
    moved = 3 * sum(weight.nbytes for weight in dense)
    return f"{title}, compiled" if compiled else title, median(mine), median(other), moved


def main() -> None:
    bandwidth = copy_bandwidth()
    print(machine())
    found = [times(case, compiled=False) for case in CASES]
    found += [times(case, compiled=True) for case in (CASES[0], CASES[-1])]
    bandwidth = max(bandwidth, copy_bandwidth())  # the better of before and after, in case the machine was busy
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s (read and written bytes added up)")
    rows = [
        (title, duration(a), duration(b), f"{b / a:.1f}x", duration(moved / bandwidth), f"{a * bandwidth / moved:.1f}x")
        for title, a, b, moved in found
    ]
    show("time, median of rounds", ("call", "ours", "torch", "torch/ours", "floor", "ours/floor"), rows)
    copies = [in_fresh_process(__file__, name)["copies"] for name in ("ours", "torch")]
    show(
        "peak extra memory of global_unstructured 8x(2048x2048), in copies of the weights (2 are mask and masked weight)",
        ("call", "ours", "torch"),
        [("global_unstructured L1", *(f"{value:.2f}" for value in copies))],
    )


if __name__ == "__main__":
    peak(sys.argv[1]) if len(sys.argv) > 1 else main()
