"""Weights in fewer bits on a CPU: the formats of `compress_(values=...)` against dense float32 and torch's int8 layer.

One thread. All contenders of a case run in turn, and the best round of each counts, in processor time. One row is measured
cold, with the weights read from memory. "floor" is the time to read the packed bytes at the measured bandwidth, "error" the
relative error of the output. `SECATEUR_CPU=x86-64-v3` measures the AVX2 kernels on a newer CPU; the peers are held to AVX2 by
`FBGEMM_ENABLE_INSTRUCTIONS=AVX2`, `MKL_ENABLE_INSTRUCTIONS=AVX2`, `ONEDNN_MAX_CPU_ISA=AVX2` and `ATEN_CPU_CAPABILITY=avx2`.
`--only WORD` selects cases. `quads8` rounds its inputs to 8 bits (`inputs="int8"`), torch's int8 layer to 7 (`reduce_range`).
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from _bench import duration, machine, show, verdict
from torch import Tensor, nn

from secateur.execute import Compressed
from secateur.execute.find import zeros_of
from secateur.execute.formats import FORMATS, Use, with_values
from secateur.execute.timing import time_runs
from secateur.values import Values

SIZE = 4096
MANY, OVER_TORCH_MANY = 64, 2.0  # input rows, and the goal for blocks of 80 % zeros over torch's int8 layer
GOALS = {0.5: 3.0, 0.8: 5.0, 0.95: 9.0}  # int8, one row, over dense float32
OVER_TORCH = 1.5  # and over torch's dynamically quantized layer


def pruned(sparsity: float, height: int = 1, width: int = 1) -> Tensor:
    keep = torch.rand(SIZE // height, SIZE // width) >= sparsity
    return torch.randn(SIZE, SIZE) * keep.repeat_interleave(height, 0).repeat_interleave(width, 1)


def torch_int8(layer: nn.Linear) -> nn.Module:
    """Torch's own int8 layer, with the inputs rounded to int8 at each call."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(layer), {nn.Linear}, dtype=torch.qint8)


def contenders(layer: nn.Linear, x: Tensor, values: Values) -> dict[str, Compressed]:
    """The layer in every format that fits these values and this number of input rows."""
    weight = layer.weight.detach()
    use = Use("linear", "cpu", (len(x),), 0.0, values)
    forms = [with_values(form, values) for form in FORMATS.values() if str(values) in form.takes]
    found = [(form, options) for form in forms for options in form.fits(weight, zeros_of(weight), use)]
    return {" ".join([form.name, *map(str, options)]): Compressed(layer, form, options).eval() for form, options in found}


def read_bandwidth() -> float:
    block = torch.ones(64 << 20)
    (timing,) = time_runs([block.sum], seconds=0.5, rounds=(7, 20))
    return block.nbytes / timing.best


def measure(
    name: str, sparsity: float, weight: Tensor, values: Values, seconds: float, flush: Tensor | None, many: int = 1
) -> list[list[str]]:
    """The table of one case: every contender in turn. With `flush`, weights are read from memory."""
    layer, x = nn.Linear(SIZE, SIZE, bias=False), torch.randn(many, SIZE)
    layer.weight.data.copy_(weight)
    ours, theirs = contenders(layer, x, values), torch_int8(layer)
    runs: dict[str, Callable[[], Any]] = {"dense float32": lambda: layer(x), "torch int8": lambda: theirs(x)}
    runs |= {label: (lambda each=each: each(x)) for label, each in ours.items()}
    timings = time_runs(list(runs.values()), seconds=seconds, rounds=(15 if many == 1 else 5, 200), cold=flush)
    times = {label: timing.best for label, timing in zip(runs, timings)}
    bandwidth = max(read_bandwidth(), weight.nbytes / times["dense float32"])
    exact = layer(x)
    rows = []
    named = {FORMATS[each.form].inputs for each in ours.values()}  # the best with inputs as they are, and with those in 8 bits
    same = [[label for label, each in ours.items() if FORMATS[each.form].inputs == inputs] for inputs in named]
    best = {min(labels, key=lambda label: times[label]) for labels in same}
    for label, took in times.items():
        size = weight.nbytes if label == "dense float32" else weight.numel() if label == "torch int8" else ours[label].bytes()
        error = float((runs[label]() - exact).norm() / exact.norm())
        ratios = [times[peer] / took for peer in ("dense float32", "torch int8")]
        known = many == 1 and str(values) == "int8" and name == "unstructured"
        goal = GOALS.get(sparsity) if label in best and known else None
        over = OVER_TORCH if many == 1 else OVER_TORCH_MANY if label in best and "blocks" in name else None
        rows.append(
            [
                f"{name} {sparsity:.0%}, {label}",
                duration(took),
                *(f"{ratio:.2f}x" for ratio in ratios),
                f"{size / 1e6:.1f} MB",
                f"{duration(size / bandwidth)} ({took * bandwidth / size:.1f}x)",
                f"{error:.1e}",
                f"{goal:.0f}x, {over}x" if goal else f"{over}x over int8" if many > 1 and over else "",
                verdict(ratios[0] >= (goal or 0.0) and ratios[1] >= over) if over and (goal or many > 1) else "",
            ]
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run the cases whose name has this word")
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds for each contender of each case")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(machine())
    print(f"reading memory: {read_bandwidth() / 1e9:.1f} GB/s with one thread")
    flush, rows = torch.ones(12 << 20), []
    shapes = {"unstructured": (1, 1), "1x8 blocks": (1, 8), "16x1 blocks": (16, 1)}
    small = (Values("int8"), Values("int8", 64), Values("int4", 64), Values("float8_e4m3fn"))
    with torch.no_grad():
        for name, block in shapes.items():
            for sparsity in GOALS:
                for values in small if name == "unstructured" else small[:1]:
                    if args.only in f"{name} {sparsity:.0%} {values}":
                        rows += measure(name, sparsity, pruned(sparsity, *block), values, args.seconds, flush)
                        print(f"{name} {sparsity:.0%} {values} measured", file=sys.stderr, flush=True)
    shapes = {"unstructured": (1, 1), "1x4 blocks": (1, 4), "4x4 blocks": (4, 4), "16x16 blocks": (16, 16)}
    with torch.no_grad():
        for name, block in shapes.items():
            case = f"{MANY} rows, {name}"
            if args.only in case:
                rows += measure(case, 0.8, pruned(0.8, *block), Values("int8"), args.seconds, None, MANY)
    header = ("4096x4096; one row is cold", "time", "over fp32", "over int8", "bytes", "floor", "error", "goal", "")
    show("Weights in fewer bits", header, rows)


if __name__ == "__main__":
    main()
