"""Compressed layers against torch's dense layers on a CPU, with row-major inputs and outputs, repacking included.

Each case alternates between the dense call and the format that `compress_` would choose, with nothing else in between, because
other calls would change what is in the caches. Then it alternates between the dense call and torch's sparse layouts. The best
round of each counts, in processor time, with one thread except for the encoder at the end. "of floor": for one row, relative to
the time to read what is stored; for many rows, relative to the time of the remaining products at the rate of the dense call.
`--only WORD` runs the cases whose name contains the word.
"""

from __future__ import annotations

import argparse
import copy
import importlib.util
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _bench import duration, machine, show, verdict
from torch import Tensor, nn

import secateur as sc
from secateur.execute import Compressed, bench, compress_
from secateur.execute.find import zeros_of
from secateur.execute.formats import FORMATS, Use, as_matrix
from secateur.execute.timing import time_runs

warnings.filterwarnings("ignore", message="Sparse CSR|Sparse BSR|.*semi.?structured.*|.*legacy TorchScript-based ONNX.*")


@dataclass(frozen=True)
class Case:
    name: str
    goal: float
    layer: nn.Module
    x: Tensor
    cold: bool = False
    store: torch.dtype | None = None
    block: int = 0  # block size of the BSR peer, which needs square blocks

    @property
    def linear(self) -> bool:
        return isinstance(self.layer, nn.Linear)


def pruned(weight: Tensor, sparsity: float, height: int = 1, width: int = 1) -> Tensor:
    rows, columns = weight.shape[0], weight[0].numel()
    keep = torch.rand(rows // height, columns // width) >= sparsity
    return weight * keep.repeat_interleave(height, 0).repeat_interleave(width, 1).view_as(weight)


def linear(rows: int, columns: int, change: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32) -> nn.Linear:
    layer = nn.Linear(columns, rows, bias=False)
    with torch.no_grad():
        layer.weight.copy_(change(layer.weight))
    return layer.to(dtype)


def two_of_four(weight: Tensor) -> Tensor:
    groups = weight.abs().view(len(weight), -1, 4)
    return weight * (groups.argsort(-1).argsort(-1) >= 2).view_as(weight)


def cases() -> Iterator[Case]:
    for size in (768, 4096):
        for sparsity, goal in ((0.8, 3.5), (0.9, 6.0), (0.95, 8.0)):
            layer = linear(size, size, lambda w, s=sparsity: pruned(w, s))
            yield Case(f"unstructured {sparsity:.0%}, 64 rows, {size}x{size}", goal, layer, torch.randn(64, size))
    for size in (768, 4096):
        for sparsity, goal in ((0.8, 3.4), (0.9, 5.2)):
            layer = linear(size, size, lambda w, s=sparsity: pruned(w, s))
            yield Case(f"unstructured {sparsity:.0%}, 256 rows, {size}x{size}", goal, layer, torch.randn(256, size))
    for height in (4, 16):
        for sparsity, goal in ((0.8, 5.0), (0.9, 9.0)):
            layer = linear(4096, 4096, lambda w, s=sparsity, h=height: pruned(w, s, h))
            yield Case(f"{height}x1 blocks {sparsity:.0%}, 64 rows, 4096x4096", goal, layer, torch.randn(64, 4096))
    half = torch.bfloat16
    layer = linear(4096, 4096, lambda w: pruned(w, 0.8, 16, 16), half)
    yield Case("bf16, 16x16 blocks 80%, 64 rows, over bf16", 2.6, layer, torch.randn(64, 4096).to(half), block=16)
    yield Case("bf16, 2:4, 64 rows, over bf16", 1.4, linear(4096, 4096, two_of_four, half), torch.randn(64, 4096).to(half))
    for sparsity, goal in ((0.5, 3.0), (0.8, 5.0), (0.95, 6.5)):
        layer = linear(4096, 4096, lambda w, s=sparsity: pruned(w, s))
        yield Case(f"one row, cold, {sparsity:.0%}, 4096x4096", goal, layer, torch.randn(1, 4096), cold=True, store=half)
    for sparsity, goal in ((0.8, 2.0), (0.9, 3.0)):
        for channels, size in ((64, 56), (128, 28), (256, 14)):
            conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
            with torch.no_grad():
                conv.weight.copy_(pruned(conv.weight, sparsity))
            yield Case(
                f"3x3 conv {sparsity:.0%}, {channels} ch, {size}x{size}", goal, conv, torch.randn(1, channels, size, size)
            )
    x = torch.randn(1, 4096) * (torch.rand(1, 4096) < 0.5)
    yield Case("one row, half of the inputs gated", 1.6, linear(4096, 4096, lambda w: w), x, cold=True)


def contenders(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns the layer in every format that fits."""
    layer: Any = case.layer
    weight = layer.weight.detach()
    rows = len(case.x) if case.linear else case.x.shape[2] * case.x.shape[3]
    use = Use("linear" if case.linear else "conv", "cpu", (rows,), float((case.x == 0).float().mean()))
    found: dict[str, Callable[[], Any]] = {}
    for form in FORMATS.values():
        for options in form.fits(as_matrix(weight), zeros_of(weight.flatten(1)), use):
            for store in {None, case.store}:
                packed = Compressed(layer, form, options, store=store).eval()
                label = " ".join([form.name, *map(str, options), *(["bf16"] if store else [])])
                if form.name != "csr":  # computed by torch, and listed with the peers
                    found[label] = lambda packed=packed: packed(case.x)
    return found


def peers(case: Case) -> dict[str, Callable[[], Any]]:
    """Returns torch's sparse layouts and, if installed, ONNX Runtime, without those that do not run here."""
    if not case.linear:
        return {}
    weight, x = case.layer.weight.detach(), case.x  # type: ignore[union-attr]
    tried: dict[str, Callable[[], Callable[[], Any]]] = {}

    def right(pack: Callable[[], Tensor], x: Tensor = x) -> Callable[[], Any]:
        packed = pack()
        return lambda: F.linear(x, packed)

    def left(packed: Tensor) -> Callable[[], Any]:
        return lambda: (packed @ x.t()).t().contiguous()

    if weight.dtype == torch.float32 and not bool((weight != 0).all()):
        if weight.numel() < 1 << 22 or len(x) == 1:  # larger ones take seconds, and `CSR left` is faster
            tried["CSR"] = lambda: right(weight.to_sparse_csr)
        tried["CSR left"] = lambda: left(weight.to_sparse_csr())
    if case.block:
        tried["BSR"] = lambda: right(lambda: weight.to_sparse_bsr((case.block, case.block)))
        tried["BSR in fp32"] = lambda: right(lambda: weight.float().to_sparse_bsr((case.block, case.block)), x.float())
    if zeros_of(weight).pattern == "2:4":
        tried["2:4"] = lambda: right(lambda: torch.sparse.to_sparse_semi_structured(weight))
    if weight.dtype != torch.float32:  # many CPUs multiply float32 faster
        tried["fp32 dense"] = lambda: right(weight.float, x.float())
    if importlib.util.find_spec("onnxruntime") and weight.dtype == torch.float32:
        tried["ORT dense"] = lambda: onnx_session(case)
    runs = {}
    for name, make in tried.items():
        try:
            run = make()
            run()
        except (RuntimeError, NotImplementedError, ValueError, AssertionError) as error:
            print(f"  ({case.name}: {name} does not run here: {str(error).splitlines()[0][:90]})")
            continue
        runs[name] = run
    return runs


def onnx_session(case: Case) -> Callable[[], Any]:
    import onnxruntime  # type: ignore[import-not-found]

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    with tempfile.NamedTemporaryFile(suffix=".onnx") as file:
        torch.onnx.export(case.layer, (case.x,), file.name, dynamo=False)
        session = onnxruntime.InferenceSession(file.name, options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: case.x.numpy()}
    return lambda: session.run(None, feed)


def read_bandwidth() -> float:
    block = torch.ones(64 << 20)
    block.sum()
    (timing,) = time_runs([block.sum], seconds=0.5, rounds=(7, 20))
    return block.nbytes / timing.best


def measure(case: Case, seconds: float, bandwidth: float, flush: Tensor) -> list[str]:
    ours, others, alone = contenders(case), peers(case), {"dense": lambda: case.layer(case.x)}
    small = case.layer.weight.numel() < 1 << 21 or case.cold  # type: ignore[operator,union-attr]
    rounds = (40, 300) if small else (5, 300)

    def in_turns(runs: dict[str, Callable[[], Any]], seconds: float) -> dict[str, float]:
        cold = flush if case.cold else None
        timings = time_runs(list((alone | runs).values()), seconds=seconds, rounds=rounds, cold=cold)
        return {name: timing.best for name, timing in zip(alone | runs, timings)}

    tried = in_turns(ours, seconds / 4)
    best = min(ours, key=lambda name: tried[name])
    times, theirs = in_turns({best: ours[best]}, seconds), in_turns(others, seconds)
    dense, mine = times["dense"], times[best]
    floor = ""
    if case.cold:
        weight: Tensor = case.layer.weight  # type: ignore[assignment]
        kept = float((weight != 0).float().mean()) * float((case.x != 0).float().mean())
        size = 2 if best.endswith("bf16") else 4
        bits = (
            weight.numel() / 8 if kept < 0.99 and best != "columns" else 0
        )  # one bit per weight is the least that encodes where they are
        fastest = max(bandwidth, weight.nbytes / dense)  # the dense product may read memory faster than a sum
        least = (weight.numel() * kept * size + bits) / fastest
        floor = f"{mine / least:.1f}x {duration(least)}"
    elif best.startswith("tiled"):  # the remaining products at the rate of the dense call
        least = dense * float((case.layer.weight != 0).float().mean())  # type: ignore[union-attr,arg-type]
        floor = f"{mine / least:.1f}x {duration(least)}"
    shown = ", ".join(f"{name} {theirs['dense'] / theirs[name]:.2f}x" for name in others)
    ratio = dense / mine
    return [
        case.name,
        duration(dense),
        duration(mine),
        best,
        f"{ratio:.2f}x",
        f"{case.goal:.1f}x",
        verdict(ratio >= case.goal),
        floor,
        shown,
    ]


class Block(nn.Module):
    """One layer of an encoder with the shape of BERT-base."""

    def __init__(self, width: int = 768, heads: int = 12, inner: int = 3072):
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = self.norm1(x + self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


def encoder(layers: int) -> None:
    model = nn.Sequential(*(Block() for _ in range(layers))).eval()
    sc.prune_(model, sparsity=0.9, scope="tensor")
    dense, x = copy.deepcopy(model), torch.randn(8, 128, 768)
    begin = time.perf_counter()
    result = compress_(model, x, threads=2)
    print(f"\n{str(result).splitlines()[-1]} (compress_ took {time.perf_counter() - begin:.1f} s)")
    rows = []
    for threads in (1, 2):  # one thread by processor time, which other programs disturb less; two by wall-clock time
        timed = bench({"dense": dense, "compressed": model}, x, threads=threads, seconds=5)
        ratio = timed.ratio("dense", "compressed")
        name = f"encoder of {layers} layers, 8 x 128 tokens, 90%, {threads} thread{'s'[: threads - 1]}"
        times = [duration(timed[each].best) for each in ("dense", "compressed")]
        rows.append([name, *times, f"{ratio:.2f}x", *(("3.0x", verdict(ratio >= 3)) if threads == 2 else ("", ""))])
    show("End to end", ("", "dense", "ours", "ratio", "goal", ""), rows)


def second_process() -> None:
    """Processor time to compile kernels in a first process and to load them in the next one, imports included."""
    code = (
        "import time, torch\nbegin = time.process_time()\n"
        "from secateur.execute.native import build\n"
        "build.kernel('tiled.multiply_rows', 1, 32, 'float32', 'float32')\n"
        "print(time.process_time() - begin)"
    )
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "SECATEUR_CACHE": folder}
        took = [
            min(
                float(subprocess.run([sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True).stdout)
                for _ in r
            )
            for r in (range(1), range(3))
        ]
    rows = [["kernels of one layer", duration(took[0]), duration(took[1]), "0.3 s", verdict(took[1] <= 0.3)]]
    show("Processes", ("", "first", "next", "goal", ""), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run the cases whose name has this word")
    parser.add_argument("--seconds", type=float, default=0.4, help="seconds for each contender of each case")
    parser.add_argument("--layers", type=int, default=12, help="layers of the encoder")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(machine())
    bandwidth, flush = read_bandwidth(), torch.ones(12 << 20)
    print(f"reading memory: {bandwidth / 1e9:.1f} GB/s with one thread")
    with torch.no_grad():
        rows = []
        for case in cases():
            if args.only in case.name:
                rows.append(measure(case, args.seconds, bandwidth, flush))
                print("  ".join(rows[-1]), file=sys.stderr, flush=True)
    header = ("case", "dense", "ours", "format", "ratio", "goal", "", "of floor", "peers")
    if rows:
        show("Layers, one thread", header, rows)
    if args.only in "encoder":
        encoder(args.layers)
    if args.only in "processes":
        second_process()


if __name__ == "__main__":
    main()
