"""Pruned layers on a GPU against torch's dense product, in bfloat16, in CUDA graphs; then a decoder from end to end.

Weights are read from memory, as in a large model: the calls alternate between several copies, which are together several times
larger than the cache. `floor` is the ratio that the bytes (up to sixteen tokens) or the multiplications (many tokens) allow.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from _bench import show, verdict
from torch import Tensor, nn

import secateur as sc
from secateur.execute import Compressed, compress_
from secateur.execute.formats import FORMATS

warnings.filterwarnings("ignore", message="Sparse |.*semi.?structured.*|.*BSR.*")
HALF = torch.bfloat16
Run = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    name: str
    goal: float
    floor: float
    form: str
    options: tuple[int, ...]
    weight: Callable[[], Tensor]
    x: Callable[[], Tensor]
    eager: bool = False


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=HALF)


def two_of_four(rows: int, columns: int) -> Tensor:
    keep = (torch.rand(rows, columns // 4, 4, device="cuda").argsort(-1) < 2).view(rows, columns)
    return normal(rows, columns).masked_fill_(~keep, 0)


def per_row(rows: int, columns: int, sparsity: float) -> Tensor:
    """Prunes to the same number of nonzeros in every row, at random places."""
    keep = torch.rand(rows, columns, device="cuda").argsort(1) < round(columns * (1 - sparsity))
    return normal(rows, columns).masked_fill_(~keep, 0)


def blocks(rows: int, columns: int, size: int, sparsity: float) -> Tensor:
    """Prunes random blocks of the whole matrix, so that rows of blocks differ in length."""
    score = torch.rand(rows // size, columns // size, device="cuda")
    gone = score <= score.flatten().kthvalue(round(sparsity * score.numel())).values
    return normal(rows, columns).masked_fill_(gone.repeat_interleave(size, 0).repeat_interleave(size, 1), 0)


def cases() -> Iterator[Case]:
    large = ((14336, 4096), (28672, 8192))
    for o, i in large:
        for tokens in (1, 4, 8, 16):
            weight, x = lambda o=o, i=i: two_of_four(o, i), lambda t=tokens, i=i: normal(t, i)
            yield Case(f"2:4, {tokens} tokens, {o}x{i}", 1.3, 16 / 9, "sparse24_mma", (), weight, x)
    for o, i in ((4096, 4096), *large):
        for sparsity, goal in ((0.8, 2.0), (0.9, 3.2)):
            weight, x = lambda o=o, i=i, s=sparsity: per_row(o, i, s), lambda i=i: normal(1, i)
            yield Case(
                f"same count per row {sparsity:.0%}, 1 token, {o}x{i}", goal, 0.5 / (1 - sparsity), "padded_rows", (), weight, x
            )
            floor = 2 / 2.125 / (1 - sparsity)  # an entry takes a byte for its value, one for its column, and 2 for 16 columns
            name = f"same count per row {sparsity:.0%}, int8, 1 token, {o}x{i}"
            yield Case(name, 3.0 if sparsity == 0.8 else 4.5, floor, "padded_rows int8", (8,), weight, x)
    for o, i in ((4096, 4096), *large):
        for tokens in (1024, 2048, 4096, 8192):
            for eager in (False, True):
                name = f"2:4, {tokens} tokens, {o}x{i}" + (", eager" if eager else "")
                weight, x = lambda o=o, i=i: two_of_four(o, i), lambda t=tokens, i=i: normal(t, i)
                yield Case(name, 1.25, 2.0, "cusparselt", (), weight, x, eager)
    for o, i in ((4096, 4096), (14336, 4096)):
        for size in (64, 128):
            for sparsity, goal in ((0.8, 2.5), (0.9, 4.0)):
                weight, x = lambda o=o, i=i, n=size, s=sparsity: blocks(o, i, n, s), lambda i=i: normal(8192, i)
                name = f"{size}x{size} blocks {sparsity:.0%}, 8192 tokens, {o}x{i}"
                yield Case(name, goal, 1 / (1 - sparsity), "dense_blocks", (size,), weight, x)
    for o, i in ((4096, 14336), (14336, 4096), (8192, 28672)):
        weight, x = lambda o=o, i=i: normal(o, i), lambda i=i: normal(1, i) * (torch.rand(1, i, device="cuda") < 0.5)
        yield Case(f"half of the inputs gated, 1 token, {o}x{i}", 1.5, 2.0, "input_sparse", (), weight, x)


def recorded(runs: Sequence[Run]) -> Callable[[], None]:
    """Captures all these calls, one after the other, in one CUDA graph."""
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        for _ in range(2):
            runs[0]()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    return graph.replay


def in_turns(contenders: dict[str, Run], calls: int, rounds: int = 15) -> dict[str, float]:
    """Returns the median seconds of one call by CUDA events, with the contenders in alternation."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for turn in range(rounds + 2):
        for name, replay in contenders.items():
            start.record()
            replay()
            end.record()
            end.synchronize()
            if turn > 1:
                times[name].append(start.elapsed_time(end) / 1e3 / calls)
    return {name: statistics.median(each) for name, each in times.items()}


def bandwidth() -> float:
    """Bytes per second, read and written, of an elementwise kernel over a gigabyte."""
    block = torch.ones(1 << 28, device="cuda")
    out = torch.empty_like(block)
    return 2 * block.nbytes / in_turns({"copy": recorded([lambda: torch.neg(block, out=out)] * 4)}, 4)["copy"]


def duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def dense_calls(weight: Tensor, x: Tensor) -> dict[str, Run]:
    calls: dict[str, Run] = {"linear": lambda: F.linear(x, weight)}
    if len(x) == 1:
        calls["mv"] = lambda: torch.mv(weight, x[0])
    else:
        calls["mm"] = lambda: torch.mm(weight, x.t())
    return calls


def peer(case: Case, weight: Tensor, x: Tensor) -> tuple[str, Run] | None:
    """torch's own sparse layout for this pattern."""
    if case.form in ("sparse24_mma", "cusparselt"):
        packed = torch.sparse.to_sparse_semi_structured(weight)
        return "semi-structured", lambda: F.linear(x, packed)
    if case.form == "dense_blocks":
        bsr = weight.to_sparse_bsr((case.options[0], case.options[0]))
        return "BSR", lambda: F.linear(x, bsr)
    if case.form == "padded_rows":
        csr = weight.to_sparse_csr()
        return "CSR", lambda: csr @ x[0]
    return None


def repeated(run: Run, times: int) -> Run:
    def runs() -> None:
        for _ in range(times):
            run()

    return runs


def measure(case: Case) -> list[str]:
    torch.manual_seed(0)
    first, x = case.weight(), case.x()
    packed_bytes = sum(each.nbytes for each in FORMATS[case.form].pack(first, case.options)) / (
        2 if case.form == "input_sparse" else 1
    )
    copies = 1 if case.eager else max(1, math.ceil(2e8 / packed_bytes))
    weights = [first, *(case.weight() for _ in range(copies - 1))]
    layers = []
    for weight in weights:
        layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
        layer.weight = nn.Parameter(weight)
        layers.append(Compressed(layer, FORMATS[case.form], case.options).eval())
    stored = first if FORMATS[case.form].values is None else layers[0].weight  # rounded, or as it is
    exact, got = F.linear(x.double(), stored.double()), layers[0](x).double()
    error = float((got - exact).norm() / exact.norm())
    assert error < 5e-3, f"{case.name}: wrong by {error}"
    del exact, got, stored
    calls = (20 if len(x) <= 2048 else 4) if case.eager else len(weights) * (4 if len(x) <= 16 else 2)
    prepare = (lambda runs: repeated(runs[0], calls)) if case.eager else recorded
    runs = {}
    for name in dense_calls(first, x):
        runs[name] = prepare([dense_calls(weights[k % len(weights)], x)[name] for k in range(calls)])
    runs["ours"] = prepare([lambda k=k: layers[k % len(layers)](x) for k in range(calls)])
    if (other := peer(case, first, x)) is not None:
        try:
            runs[other[0]] = prepare([other[1]] * calls)
        except (RuntimeError, NotImplementedError) as trouble:
            torch.cuda.synchronize()
            print(f"  ({case.name}: torch's {other[0]} does not run: {str(trouble).splitlines()[0][:80]})")
            other = None
    took = in_turns(runs, calls)
    best = min(dense_calls(first, x), key=lambda name: took[name])
    ratio = took[best] / took["ours"]
    beside = f"{took[best] / took[other[0]]:.2f}x {other[0]}" if other else ""
    dense, ours, goal, floor = (
        f"{duration(took[best])} {best}",
        duration(took["ours"]),
        f"{case.goal:.2f}x",
        f"{case.floor:.2f}x",
    )
    return [case.name, dense, ours, case.form, f"{ratio:.2f}x", goal, verdict(ratio >= case.goal), floor, beside]


# ---------------------------------------------------------------- a decoder


class Block(nn.Module):
    """One layer with the shape of Llama 3 8B, for one token after `context` others."""

    def __init__(self, width: int, inner: int, heads: int, kv: int, context: int):
        super().__init__()
        self.size, self.context = width // heads, context
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.k, self.v = nn.Linear(width, kv * self.size, bias=False), nn.Linear(width, kv * self.size, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)
        self.norm1, self.norm2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)
        for name in ("keys", "values"):
            self.register_buffer(name, torch.randn(1, kv, context + 1, self.size))
        angle = context * 5e5 ** (-torch.arange(0, self.size, 2) / self.size)
        self.register_buffer("cos", angle.cos().repeat(2))
        self.register_buffer("sin", torch.cat([-angle.sin(), angle.sin()]))

    def turned(self, x: Tensor) -> Tensor:
        return x * self.cos + x.roll(self.size // 2, -1) * self.sin  # rotary positions

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (f(y).view(1, -1, 1, self.size) for f in (self.q, self.k, self.v))
        self.keys[:, :, self.context :] = self.turned(k)
        self.values[:, :, self.context :] = v
        y = F.scaled_dot_product_attention(self.turned(q), self.keys, self.values, enable_gqa=True)
        x = x + self.o(y.view(1, -1))
        y = self.norm2(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int = 4096, inner: int = 14336, vocabulary: int = 32000, context: int = 512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, inner, 32, 8, context) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, eps=1e-5), nn.Linear(width, vocabulary, bias=False)

    def forward(self, token: Tensor) -> Tensor:
        x = self.embed(token)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


KINDS: dict[str, tuple[dict[str, Any], float]] = {  # arguments of compress_, and the goal over dense
    "2:4": ({}, 1.4),
    "2:4 int8": ({"values": "int8"}, 1.9),
    "2:4 int4/128": ({"values": "int4", "group": 128}, 2.2),
}


def end_to_end(layers: int) -> None:
    with torch.device("meta"):
        model = Decoder(layers)
    model = model.to(HALF).to_empty(device="cuda").eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.fill_(1) if "norm" in name or name.endswith(("cos", "sin")) else tensor.normal_(0, 0.02)
    sc.prune_(model, pattern="2:4", exclude=["embed*", "head*"])
    models, token = {"dense": model}, torch.tensor([1], device="cuda")
    for name, (how, _) in KINDS.items():
        models[name] = copy.deepcopy(model)
        begin = time.perf_counter()
        lines = str(compress_(models[name], token, **how)).splitlines()
        print("\n" + "\n".join([*lines[:9], "...", *lines[-2:], f"(compress_ took {time.perf_counter() - begin:.1f} s)"]))
    with torch.no_grad():
        exact = copy.deepcopy(model).float()(token)
        gaps = {name: float((each(token) - exact).norm() / exact.norm()) for name, each in models.items()}

        def step(each: nn.Module, held: Tensor) -> Run:
            return lambda: held.copy_(each(held).argmax(-1))

        times = in_turns({name: recorded([step(each, token.clone())]) for name, each in models.items()}, 1, rounds=30)
        eager = in_turns({name: step(each, token.clone()) for name, each in models.items()}, 1, rounds=30)
    rows = []
    for name in models:
        ratio, goal = times["dense"] / times[name], KINDS[name][1] if name in KINDS else 0.0
        judged = [f"{goal:.2f}x", verdict(ratio >= goal)] if goal else ["", ""]
        more = [f"{1 / eager[name]:.0f}", f"{eager['dense'] / eager[name]:.2f}x", f"{gaps[name]:.1e}"]
        rows.append([name, f"{1 / times[name]:.0f}", f"{ratio:.2f}x", *judged, *more])
    header = ("", "in a graph", "over dense", "goal", "", "eager", "over dense", "error")
    show(f"decoder of {layers} layers, one token at a time, tokens per second", header, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="run the cases whose name or format has this word")
    parser.add_argument("--layers", type=int, default=24, help="of the decoder; 0 leaves it out")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, copy {bandwidth() / 1e9:,.0f} GB/s")
    rows = []
    with torch.no_grad():
        for case in cases():
            if args.only in case.name or args.only == case.form:
                rows.append(measure(case))
                torch.cuda.empty_cache()
    header = ("case", "dense", "ours", "format", "ratio", "goal", "", "floor", "torch's sparse")
    show("bfloat16, over the better of torch's dense calls", header, rows)
    if args.layers:
        end_to_end(args.layers)


if __name__ == "__main__":
    main()
