"""Choosing what to prune on a CPU: ours, torch's and the bandwidth floor, in one process, taking turns.

    python benchmarks/select_cpu.py [--millions 100]

The floor is the time that the machine needs merely to read and write, once, the bytes that have to be read and written.
"""

from __future__ import annotations

import functools
import json
import sys
import time

import torch
from _bench import (
    PeakMemory,
    copy_bandwidth,
    duration,
    in_fresh_process,
    interleaved,
    machine,
    median,
    seconds,
    show,
    touch,
    verdict,
)
from torch import nn  # secateur and torch's pruners are imported where they are used: the first import is measured

TENSORS = 24
SPARSITY = 0.8


def build(weights: int) -> nn.Sequential:
    """24 linear layers that hold about as many weights."""
    side = round((weights / TENSORS) ** 0.5)
    model = nn.Sequential(*(nn.Linear(side, side, bias=False) for _ in range(TENSORS)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.02, generator=generator)
    return model


def size(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def ours(model: nn.Sequential) -> None:
    import secateur as sc

    sc.prune_(model, sc.magnitude, sparsity=SPARSITY, scope="global")


def torchs(model: nn.Sequential) -> None:
    from torch.nn.utils import prune

    layers = [(layer, "weight") for layer in model]
    prune.global_unstructured(layers, pruning_method=prune.L1Unstructured, amount=SPARSITY)


RUNS = {"ours": ours, "torch": torchs}


def global_magnitude(weights: int, bandwidth: float) -> None:
    """`prune_` of everything against `global_unstructured`, which is run once: it takes long enough for noise not to matter."""
    model = build(weights)
    fresh = [parameter.detach().clone() for parameter in model.parameters()]

    @torch.no_grad()
    def restore() -> None:
        for parameter, value in zip(model.parameters(), fresh, strict=True):
            parameter.copy_(value)

    mine = []
    for _ in range(5):
        restore()
        mine.append(seconds(lambda: ours(model)))
    zeros = sum(int((p == 0).sum()) for p in model.parameters())
    restore()
    theirs = seconds(lambda: torchs(model))
    assert zeros == sum(int((layer.weight == 0).sum()) for layer in model) == round(SPARSITY * size(model))
    from torch.nn.utils import prune

    for layer in model:
        prune.remove(layer, "weight")
    for _ in range(4):
        restore()
        mine.append(seconds(lambda: ours(model)))
    memory = {who: in_fresh_process(__file__, "memory", who, str(weights))["bytes_per_weight"] for who in RUNS}
    bandwidth = max(bandwidth, copy_bandwidth())  # the better of before and after, in case the machine was busy
    floor = 9 * size(model) / bandwidth  # weights read, weights and mask written: 4 + 4 + 1 bytes
    took = median(mine)
    show(
        f"Global magnitude, {size(model):,} weights in {TENSORS} tensors, sparsity {SPARSITY}, float32",
        ("", "time", "of ours", "extra memory"),
        [
            ("ours: sc.prune_", duration(took), "1.0x", f"{memory['ours']:.2f} bytes per weight"),
            (
                "torch: global_unstructured",
                duration(theirs),
                f"{theirs / took:.1f}x",
                f"{memory['torch']:.2f} bytes per weight",
            ),
            ("floor: 9 bytes per weight", duration(floor), f"{floor / took:.2f}x", "1.00 (the mask)"),
        ],
    )
    print(f"goal: at least 30x faster than torch: {verdict(theirs / took >= 30)} (fastest {duration(min(mine))})")
    print(f"goal: at most 1.3 bytes per weight: {verdict(memory['ours'] <= 1.3)}")


def two_of_four(bandwidth: float, side: int = 4096) -> None:
    """The 2:4 magnitude mask of one matrix, nothing applied on either side."""
    from torch.ao.pruning import WeightNormSparsifier

    import secateur as sc
    from secateur.kernels import compile_now

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(side, side, bias=False))
    other = nn.Sequential(nn.Linear(side, side, bias=False))
    other.load_state_dict(model.state_dict())
    sparsifier = WeightNormSparsifier(1.0, (1, 4), 2)
    sparsifier.prepare(other, [{"tensor_fqn": "0.weight"}])
    mask = sc.plan(model, sc.magnitude, pattern="2:4").masks["0.weight"]  # both warm up, and both masks are compared
    sparsifier.step()
    differ = (mask != other[0].parametrizations.weight[0].mask.bool()).reshape(-1, 4).any(1)
    plan = functools.partial(sc.plan, model, sc.magnitude, pattern="2:4")
    room = functools.partial(touch, 5 * side * side)
    mine, theirs = map(median, interleaved(plan, sparsifier.step, rounds=7, before=room))
    compile_now()  # as in a process that has looked at 268 M weights
    plan()
    compiled = median(interleaved(plan, rounds=7, before=room)[0])
    bandwidth = max(bandwidth, copy_bandwidth())
    floor = 5 * side * side / bandwidth
    show(
        f"2:4 magnitude mask of {side}x{side}, float32 (the masks differ in {int(differ.sum())} of {differ.numel():,} groups)",
        ("", "time", "of ours"),
        [
            ("ours: sc.plan(pattern='2:4')", duration(mine), "1.0x"),
            ("the same with compiled loops", duration(compiled), f"{compiled / mine:.1f}x"),
            ("torch: WeightNormSparsifier.step", duration(theirs), f"{theirs / mine:.1f}x"),
            ("floor: 5 bytes per weight", duration(floor), f"{floor / mine:.2f}x"),
        ],
    )
    print(f"goal: at least 40x faster than torch: {verdict(theirs / mine >= 40)}")


def growth(weights: int) -> None:
    """Time per weight as the model grows hundredfold; constant means linear."""
    rows, per_weight = [], []
    for number in (weights // 100, weights // 10, weights):
        model = build(number)
        fresh = [parameter.detach().clone() for parameter in model.parameters()]
        took = []
        for _ in range(5):
            with torch.no_grad():
                for parameter, value in zip(model.parameters(), fresh, strict=True):
                    parameter.copy_(value)
            took.append(seconds(lambda model=model: ours(model)))
        per_weight.append(median(took) / size(model))
        rows.append((f"{size(model):,} weights", duration(median(took)), f"{per_weight[-1] * 1e9:.2f} ns"))
    show("Growth of sc.prune_, global magnitude", ("", "time", "per weight"), rows)
    print(f"per weight, largest over smallest: {per_weight[-1] / per_weight[0]:.2f}x (1.00x or less is linear or better)")


def first_call(weights: int = 1_500_000, processes: int = 5) -> None:
    """What a script pays for its first call, torch being imported already: the import, the call, and a second call."""
    runs: dict[str, list[dict[str, float]]] = {who: [] for who in RUNS}
    for _ in range(processes):
        for who in RUNS:
            runs[who].append(in_fresh_process(__file__, "first", who, str(weights)))
    both = {who: {key: median([run[key] for run in found]) for key in found[0]} for who, found in runs.items()}
    show(
        f"First call in a fresh process, {weights:,} weights ({processes} processes each)",
        ("", "import", "first call", "second call", "import + first"),
        [
            (who, *(duration(t[key]) for key in ("import", "first", "second")), duration(t["import"] + t["first"]))
            for who, t in both.items()
        ],
    )
    ratio = (both["torch"]["import"] + both["torch"]["first"]) / (both["ours"]["import"] + both["ours"]["first"])
    print(f"ours is {ratio:.1f}x as fast as torch at its first call, import included")


def measure_memory(who: str, weights: int) -> None:
    RUNS[who](build(TENSORS * 64 * 64))  # imports and small allocations are not what is asked
    model = build(weights)
    with PeakMemory() as peak:
        RUNS[who](model)
    print(json.dumps({"bytes_per_weight": peak.extra / size(model)}))


def measure_first(who: str, weights: int) -> None:
    model, again = build(weights), build(weights)
    times = {}
    times["import"] = seconds(lambda: __import__("secateur" if who == "ours" else "torch.nn.utils.prune"))
    times["first"] = seconds(lambda: RUNS[who](model))
    times["second"] = seconds(lambda: RUNS[who](again))
    print(json.dumps(times))


def main(weights: int) -> None:
    begin = time.perf_counter()
    print(machine())
    bandwidth = copy_bandwidth()
    print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s (read and written bytes added up)")
    two_of_four(bandwidth)
    first_call()
    growth(weights)
    global_magnitude(weights, bandwidth)
    print(f"\n{time.perf_counter() - begin:.0f} s in all")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["memory", who, number]:
            measure_memory(who, int(number))
        case ["first", who, number]:
            measure_first(who, int(number))
        case ["--millions", number]:
            main(int(number) * 1_000_000)
        case _:
            main(100_000_000)
