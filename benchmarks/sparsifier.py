"""`WeightNormSparsifier`: ours and torch's in turns, in one process. `python benchmarks/sparsifier.py [cpu | cuda]`.

On the CPU in float32, on a GPU in bfloat16. For each case: seconds of a `step`, the extra memory it takes, how many elements of
the two masks differ (they may where two blocks have the same score to the last digits: torch ranks in the precision of the
weights), and the floor: what has to be read and written once, over the bandwidth of a copy. Then the forward pass of a
prepared and of a squashed layer. On the CPU with the compiled loops, which a process loads once it has looked at 268 M weights.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from _bench import PeakMemory, copy_bandwidth, duration, in_fresh_process, interleaved, machine, median, show, verdict
from torch import nn

from secateur.kernels import compile_now

SHAPES = [(4096, 4096), (11008, 4096)]
CASES = {  # name: level, block, zeros per block, how many times torch's time at least on the CPU, on a GPU
    "(1,4)": (0.5, (1, 4), 4, 20, 30),
    "(1,4), two zeros": (0.5, (1, 4), 2, 20, 30),
    "2:4": (1.0, (1, 4), 2, 20, 300),
    "(16,16)": (0.5, (16, 16), 256, 20, 30),
    "(1,1)": (0.5, (1, 1), 1, 20, 30),
}


def sparsifier(ours: bool) -> Any:
    if ours:
        from secateur.drop_in.ao_pruning import WeightNormSparsifier
    else:
        from torch.ao.pruning import WeightNormSparsifier
    return WeightNormSparsifier


def prepared(ours: bool, shape: tuple[int, int], case: str, device: str, dtype: torch.dtype | None = None) -> tuple[Any, Any]:
    """A layer of this shape, the same for both sides, and the sparsifier that it is prepared with."""
    level, block, zeros, *_ = CASES[case]
    torch.manual_seed(0)
    dtype = dtype or (torch.bfloat16 if device == "cuda" else torch.float32)
    layer = nn.Linear(shape[1], shape[0], bias=False, device=device, dtype=dtype)
    model = nn.Sequential(layer).eval()
    one = sparsifier(ours)(sparsity_level=level, sparse_block_shape=block, zeros_per_block=zeros)
    one.prepare(model, [{"tensor_fqn": "0.weight"}])
    return model, one


def synchronised(run: Any, device: str) -> Any:
    def wait() -> None:
        run()
        if device == "cuda":
            torch.cuda.synchronize()

    return wait


def extra_memory(ours: bool, shape: tuple[int, int], case: str, device: str) -> float:
    """Bytes per weight that a step takes on top of the prepared model, at its peak."""
    _, one = prepared(ours, shape, case, device)
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for _ in range(3):  # what a call keeps for later ones is counted
            one.step()
        torch.cuda.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / (shape[0] * shape[1])
    compile_now()
    for width in (64, 1024):  # imports, thread pools, and the compiler of the loops over large tensors
        small = sparsifier(ours)(**one.defaults)
        small.prepare(nn.Sequential(nn.Linear(width, width)), None)
        small.step()
    with PeakMemory() as peak:
        one.step()
    return peak.extra / (shape[0] * shape[1])


def on_device(run: Any) -> float:
    """Seconds that the kernels of a run take on the GPU, without the time in which it waits for the host."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
    return sum(event.self_device_time_total for event in profiler.key_averages()) / 1e6


def renewed(models: Sequence[Any]) -> Callable[[], None]:
    """Makes every weight a little different and every mask one again, as at the start of a run."""
    factors = itertools.cycle((1.03, 0.98))

    def renew() -> None:
        factor = next(factors)
        for model in models:
            there = model[0].parametrizations.weight
            there.original.data.mul_(factor)
            there[0].mask.data.fill_(1)
        torch.cuda.synchronize()

    return renew


def steps(device: str) -> None:
    bandwidth = copy_bandwidth() if device == "cpu" else 4.8e12
    rows = []
    for shape in SHAPES:
        for case, (_, _, _, *goals) in CASES.items():
            goal = goals[device == "cuda"]
            (model, ours), (theirs_model, theirs) = (prepared(own, shape, case, device) for own in (True, False))
            runs = [ours.step, synchronised(theirs.step, device)]  # on a GPU, ours waits until the masks are there
            for run in runs:  # the first call is everyone's slowest
                run()
            times = interleaved(*runs, rounds=(5 if shape == SHAPES[0] else 3) if device == "cpu" else 25)
            own, torchs = map(median, times)
            alone = [on_device(run) for run in runs] if device == "cuda" else [0.0, 0.0]
            fresh = [0.0, 1.0]
            if device == "cuda":
                fresh = [median(t) for t in interleaved(*runs, rounds=15, before=renewed([model, theirs_model]))]
                for run in runs:
                    run()
            masks = [m[0].parametrizations.weight[0].mask for m in (model, theirs_model)]
            differ = int((masks[0].bool() != masks[1].bool()).sum())
            del model, theirs_model, ours, theirs, runs, masks
            item = 2 if device == "cuda" else 4
            floor = shape[0] * shape[1] * item * 3 / bandwidth  # weight and mask read, mask written
            memory = [
                extra_memory(side, shape, case, device)
                if device == "cuda"
                else in_fresh_process(__file__, "memory", str(int(side)), json.dumps(shape), case)["bytes"]
                for side in (True, False)
            ]
            rows.append(
                (
                    f"{shape[0]}x{shape[1]} {case}", duration(own), duration(torchs), f"{torchs / own:.1f}x", f"{goal}x",
                    verdict(torchs / own >= goal), f"{own / floor:.1f}x", f"{memory[0]:.2f} B", f"{memory[1]:.1f} B",
                    verdict(memory[0] <= 1.5), f"{differ:,}",
                    *([duration(alone[0]), f"{alone[1] / alone[0]:.1f}x"] if device == "cuda" else []),
                    *([duration(fresh[0]), f"{fresh[1] / fresh[0]:.1f}x"] if device == "cuda" else []),
                )
            )  # fmt: skip
    header = (
        "step", "ours", "torch", "ratio", "goal", "", "over floor", "extra, ours", "extra, torch", "goal 1.5 B", "differ",
        *(["on the device", "ratio", "masks of ones, new weights", "ratio"] if device == "cuda" else []),
    )  # fmt: skip
    show("WeightNormSparsifier.step (extra memory per weight)", header, rows)


@torch.no_grad()
def forwards(device: str) -> None:
    rows = []
    for batch in (1, 64):
        both = (prepared(own, SHAPES[0], "(1,4)", device, torch.float32) for own in (True, False))  # torch's runs in no other
        (model, ours), (theirs_model, theirs) = both
        ours.step(), theirs.step()
        dense = nn.Sequential(nn.Linear(4096, 4096, bias=False, device=device)).eval()
        x = torch.randn(batch, 4096, device=device)

        def runs(*models: nn.Module, x: torch.Tensor = x) -> list[Any]:
            return [synchronised(lambda m=m: m(x), device) for m in models]

        for run in (pair := runs(model, theirs_model)):
            run()
        own, torchs = map(median, interleaved(*pair, rounds=31))
        rows.append((f"prepared, {batch} rows", duration(own), duration(torchs), f"{own / torchs:.2f}x torch's"))
        ours.squash_mask()
        for run in (pair := runs(model, dense)):
            run()
        own, plain = map(median, interleaved(*pair, rounds=31))
        rows.append((f"squashed, {batch} rows", duration(own), duration(plain), f"{own / plain:.2f}x dense"))
    show("forward, 4096x4096", ("layer", "ours", "other", "ratio"), rows)


def main() -> None:
    if sys.argv[1:2] == ["memory"]:
        side, shape, case = sys.argv[2:5]
        print(json.dumps({"bytes": extra_memory(bool(int(side)), tuple(json.loads(shape)), case, "cpu")}))
        return
    compile_now()
    device = sys.argv[1] if len(sys.argv) > 1 else "cpu"
    print(machine() if device == "cpu" else f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    steps(device)
    forwards(device)


if __name__ == "__main__":
    main()
