"""Choosing what to prune on a GPU, ours against torch's, in one run: python benchmarks/select_gpu.py"""

from __future__ import annotations

import statistics
import time
import warnings

import torch
import torch.nn.utils.prune as torch_prune
from torch import nn
from torch.ao.pruning import WeightNormSparsifier

import secateur as sc
from secateur.drop_in import prune
from secateur.patterns import Pattern
from secateur.scores import Scores
from secateur.select import select

warnings.simplefilter("ignore")
TWO_OF_FOUR = Pattern.parse("2:4")


def milliseconds(run, setup=lambda: None, rounds: int = 7) -> tuple[float, float]:
    """Median wall-clock time with the device idle before and after, and the peak of extra memory in bytes."""
    times, peak = [], 0
    for i in range(rounds + 2):
        state = setup()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        begin = time.perf_counter()
        result = run(state) if state is not None else run()
        torch.cuda.synchronize()
        if i >= 2:
            times.append((time.perf_counter() - begin) * 1e3)
        peak = torch.cuda.max_memory_allocated() - before
        del result, state
    return statistics.median(times), peak


def device_milliseconds(run) -> float:
    """What the device itself spends on one call, by its profiler."""
    run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        for _ in range(20):
            run()
        torch.cuda.synchronize()
    return sum(event.self_device_time_total for event in seen.key_averages()) / 20 / 1e3


def bandwidth() -> float:
    x = torch.empty(1 << 30, dtype=torch.int16, device="cuda")
    y = torch.empty_like(x)
    ms, _ = milliseconds(lambda: y.copy_(x))
    return 2 * x.nbytes / ms / 1e6


def line(job: str, ours: tuple[float, float], theirs: tuple[float, float], floor: float, weights: int) -> None:
    print(
        f"{job:52s} {theirs[0]:9.3f} {ours[0]:9.3f} {theirs[0] / ours[0]:8.1f}x {floor:8.3f} {ours[0] / floor:7.1f}x "
        f"{theirs[1] / weights:7.2f} {ours[1] / weights:7.2f}",
        flush=True,
    )


def layer(size: tuple[int, int], dtype: torch.dtype) -> nn.Linear:
    made = nn.Linear(size[1], size[0], bias=False, device="cuda", dtype=dtype)
    made.weight.data.normal_()
    return made


def main() -> None:
    gbs = bandwidth()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {gbs:,.0f} GB/s")
    heads = f"{'torch ms':>9s} {'ours ms':>9s} {'ratio':>9s} {'floor':>8s} {'to floor':>8s} {'torch':>7s} {'ours':>7s}"
    print(f"{'job':52s} {heads} B/weight")

    for dtype in (torch.bfloat16, torch.float32):
        name, size = str(dtype)[6:], dtype.itemsize
        weights = 16384 * 16384
        runs = [
            milliseconds(lambda m, p=p: p.l1_unstructured(m, "weight", 0.5), lambda d=dtype: layer((16384, 16384), d))
            for p in (prune, torch_prune)
        ]
        # twice read for the mask, the mask and the product written, in the weight's dtype
        line(f"l1_unstructured 16384x16384 {name}", *runs, (weights * size * 5) / gbs / 1e6, weights)

    for dtype in (torch.bfloat16, torch.float32):
        name, size = str(dtype)[6:], dtype.itemsize
        model = nn.ModuleList(layer((8192, 8192), dtype) for _ in range(16))
        weights = 16 * 8192 * 8192

        def fresh(m: nn.ModuleList = model) -> nn.ModuleList:
            for one in m:
                if torch_prune.is_pruned(one):
                    torch_prune.remove(one, "weight")
                one.weight.data.normal_()
            return m

        theirs = milliseconds(
            lambda m: torch_prune.global_unstructured([(one, "weight") for one in m], torch_prune.L1Unstructured, amount=0.5),
            fresh,
            2,
        )
        fresh()
        ours = milliseconds(lambda m: sc.plan(m, sparsity=0.5, scope="global"), fresh, 5)
        line(f"global mask, 1.07 G weights {name}: sc.plan", ours, theirs, weights * (2 * size + 1) / gbs / 1e6, weights)
        ours = milliseconds(lambda m: sc.prune_(m, sparsity=0.5, scope="global"), fresh, 5)
        line(f"global, 1.07 G weights {name}: sc.prune_", ours, theirs, weights * (4 * size + 2) / gbs / 1e6, weights)
        del model
        torch.cuda.empty_cache()

    for shape in ((11008, 4096), (28672, 8192)):
        model = nn.Sequential(layer(shape, torch.bfloat16))
        weights = shape[0] * shape[1]
        sparsifier = WeightNormSparsifier(1.0, (1, 4), 2)
        sparsifier.prepare(model, [{"tensor_fqn": "0.weight"}])
        theirs = milliseconds(sparsifier.step, rounds=5)
        sparsifier.squash_mask()
        ours = milliseconds(
            lambda m: select({"w": Scores.magnitude(m[0].weight.detach())}, TWO_OF_FOUR), lambda m=model: m, 100
        )
        line(f"2:4 mask {shape[0]}x{shape[1]} bfloat16: select", ours, theirs, weights * 3 / gbs / 1e6, weights)
        kernel = device_milliseconds(lambda m=model: select({"w": Scores.magnitude(m[0].weight.detach())}, TWO_OF_FOUR))
        line(
            f"2:4 mask {shape[0]}x{shape[1]} bfloat16: kernel alone",
            (kernel, ours[1]),
            theirs,
            weights * 3 / gbs / 1e6,
            weights,
        )
        ours = milliseconds(lambda m: sc.plan(m, pattern="2:4"), lambda m=model: m, 100)
        line(f"2:4 mask {shape[0]}x{shape[1]} bfloat16: sc.plan", ours, theirs, weights * 3 / gbs / 1e6, weights)


if __name__ == "__main__":
    main()
