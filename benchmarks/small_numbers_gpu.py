"""2:4 weights with int8, int4 or float8 values on a GPU, against dense bfloat16, int4 and fp8, and 2:4 in bfloat16.

First every format is checked against float64. Times are microseconds in a CUDA graph, with weights read from memory: the calls
take several copies in turn. `reading` is a kernel that only reads the bytes of the packed weight, the practical floor.
Then float8 weights and inputs (`inputs="float8_e4m3fn"`) for many tokens: the product of given float8 numbers, and the whole
call, which rounds bfloat16 inputs, with a scale for each token, by the same kernel for 2:4 and dense. `rounding` and `scaling`
are the kernels of the 2:4 call before and after its product.
Last the host's time of an eager call, next to `F.linear`.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
import triton.testing
from _bench import show, verdict
from torch import Tensor

from secateur.execute.formats import FORMATS
from secateur.execute.gpu.cusparselt_api import product
from secateur.execute.gpu.float8_kernels import rounded, scaled_

HALF, FLOAT8 = torch.bfloat16, torch.float8_e4m3fn
SCALED = ("int8", "int8/128", "int8/64", "int4/128", "int4/64")
TOKENS = (1, 4, 8, 16)
GOALS = {"int8": (2.5, 2.2), "int4": (3.3, 2.9), "": (1.0, 1.5)}  # over dense: up to 8 tokens, and 16
COPIES = 8
MANY, FLOAT8_GOAL = (1024, 2048, 4096, 8192), 1.25  # the product over the faster dense one in fp8


def two_of_four(rows: int, columns: int) -> Tensor:
    keep = (torch.rand(rows, columns // 4, 4, device="cuda").argsort(-1) < 2).view(rows, columns)
    return torch.randn(rows, columns, device="cuda", dtype=HALF).masked_fill_(~keep, 0)


def packed(text: str, options: tuple[int, ...], matrix: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
    form = FORMATS[f"sparse24_mma {text}" if text else "sparse24_mma"]
    return form, form.pack(matrix, options)


def options_of(text: str) -> tuple[int, ...]:
    return (4,) if text.startswith("int4") else (8,) if text else (16,)


def check() -> None:
    """Every column by unit vectors, exactly; random inputs against float64."""
    for text in ("", *SCALED):
        worst = 0.0
        for rows, columns in ((64, 256), (96, 1280), (192, 2048)):
            options, matrix = options_of(text), two_of_four(rows, columns)
            form, held = packed(text, options, matrix)
            weight, ones = form.unpack(held, rows, columns, options), torch.eye(columns, device="cuda", dtype=HALF)
            for first in range(0, columns, 16):
                y = form.linear(ones[first : first + 16], held, None, rows, options)
                assert torch.equal(y, weight[:, first : first + 16].t().to(HALF)), (text, rows, columns, first)
            for tokens in (1, 3, 8, 9, 16, 40):
                x = torch.randn(tokens, columns, device="cuda", dtype=HALF)
                exact = x.double() @ weight.double().t()
                error = (form.linear(x, held, None, rows, options).double() - exact).norm() / exact.norm()
                worst = max(worst, float(error))
        print(f"sparse24_mma {text or 'bfloat16, staged'}: columns exact; largest relative error {worst:.2e}", flush=True)
        assert worst < 2.5e-3


@triton.jit
def _read(x, y, SIZE: tl.constexpr):
    at = tl.program_id(0)
    tl.store(y + at, tl.sum(tl.load(x + at.to(tl.int64) * SIZE + tl.arange(0, SIZE))))


def in_graph(run: Callable[[], Any]) -> float:
    """Microseconds of one of the COPIES calls that `run` makes."""
    run()
    torch.cuda.synchronize()
    return triton.testing.do_bench_cudagraph(run, rep=30) * 1e3 / COPIES


def reading(size: int) -> float:
    blocks = [torch.ones(size // 16384 * 4096, device="cuda", dtype=torch.int32) for _ in range(COPIES)]
    sink = torch.empty(len(blocks[0]) // 4096, device="cuda", dtype=torch.int32)
    return in_graph(lambda: [_read[(len(sink),)](block, sink, 4096) for block in blocks])


def peers(rows: int, columns: int, inputs: list[Tensor]) -> dict[str, list[float | None]]:
    """Dense products in bfloat16, int4 (torch's tinygemm, groups of 128) and fp8 (row scales, 16 tokens)."""
    table: dict[str, list[float | None]] = {}
    weights = [torch.randn(rows, columns, device="cuda", dtype=HALF) for _ in range(COPIES)]
    table["dense bfloat16"] = [in_graph(lambda x=x: [F.linear(x, w) for w in weights]) for x in inputs]
    eights, ones = [w.to(torch.float8_e4m3fn) for w in weights], torch.ones(16, 1, device="cuda")
    x8, scale = inputs[-1].to(torch.float8_e4m3fn), torch.ones(1, rows, device="cuda")
    kind = {"scale_a": ones, "scale_b": scale, "out_dtype": HALF}
    table["dense fp8"] = [None, None, None, in_graph(lambda: [torch._scaled_mm(x8, w.t(), **kind) for w in eights])]
    weights.clear()  # frees the memory for the next weights
    eights.clear()
    fours = []
    for _ in range(COPIES):
        bits = torch.randint(0, 255, (rows, columns // 2), device="cuda", dtype=torch.uint8)
        scales = torch.rand(columns // 128, rows, 2, device="cuda", dtype=HALF)
        fours.append((torch.ops.aten._convert_weight_to_int4pack(bits, 8), scales))
    multiply = torch.ops.aten._weight_int4pack_mm
    table["dense int4/128"] = [in_graph(lambda x=x: [multiply(x, w, 128, s) for w, s in fours]) for x in inputs]
    return table


def layer(rows: int, columns: int) -> None:
    inputs = [torch.randn(tokens, columns, device="cuda", dtype=HALF) for tokens in TOKENS]
    table = peers(rows, columns, inputs)
    dense = table["dense bfloat16"]
    floors: dict[str, float] = {}
    tried = {"2:4 bfloat16, first kernel": ("", ()), "2:4 bfloat16, staged": ("", (16,))}
    tried |= {f"2:4 {text}": (text, options_of(text)) for text in SCALED}
    for name, (text, options) in tried.items():
        form, held = packed(text, options, two_of_four(rows, columns))
        sets = [tuple(each.clone() for each in held) for _ in range(COPIES)]
        floors[name] = reading(sum(each.nbytes for each in held))

        def calls(x: Tensor, form: Any = form, sets: Any = sets, options: Any = options) -> list[Any]:
            return [form.linear(x, each, None, rows, options) for each in sets]

        table[name] = [in_graph(lambda x=x, calls=calls: calls(x)) for x in inputs]
        del sets, held
    lines = []
    for name, times in table.items():
        cells = ["" if t is None else f"{t:.2f} ({d / t:.2f}x)" for t, d in zip(times, dense)]
        goals = GOALS.get(name.removeprefix("2:4 ").partition("/")[0] if "int" in name and name.startswith("2:4") else "-")
        if name == "2:4 bfloat16, staged":
            goals = GOALS[""]
        if goals is not None:
            few, many = min(d / t for t, d in zip(times[:3], dense[:3])), dense[3] / times[3]
            cells += [f"{floors[name]:.2f}", f"{goals[0]}x / {goals[1]}x", verdict(few >= goals[0] and many >= goals[1])]
        else:
            cells += [f"{floors[name]:.2f}" if name in floors else "", "", ""]
        lines.append([name, *cells])
    header = ("us (over dense bfloat16)", *(f"{tokens} tokens" for tokens in TOKENS), "reading", "goal", "")
    show(f"{rows}x{columns}, in a CUDA graph, weights from memory", header, lines)


def dense_fp8(x: Tensor, weight: Tensor, own: Tensor, scales: Tensor) -> Tensor:
    return torch._scaled_mm(x, weight.t(), scale_a=own, scale_b=scales, out_dtype=HALF, use_fast_accum=True)


def dense_call(x: Tensor, weight: Tensor, scales: Tensor) -> Tensor:
    small, own = rounded(x, len(x))
    return dense_fp8(small, weight, own.unsqueeze(1), scales)


def many(rows: int, columns: int) -> None:
    """Float8 weights and inputs for many tokens."""
    form, plain = FORMATS["cusparselt8 float8_e4m3fn"], FORMATS["cusparselt"]
    matrix = two_of_four(rows, columns)
    weights, half = [form.pack(matrix, ()) for _ in range(COPIES)], [plain.pack(matrix, ()) for _ in range(COPIES)]
    dense, eights = [matrix.clone() for _ in range(COPIES)], [(60 * matrix).to(FLOAT8) for _ in range(COPIES)]
    one, ones, scales = torch.ones((), device="cuda"), torch.ones(1, rows, device="cuda"), weights[0][-1]
    lines = []
    for tokens in MANY:
        x = torch.randn(tokens, columns, device="cuda", dtype=HALF)
        small, own = rounded(x, tokens)
        sums = small.double() @ form.unpack(weights[0], rows, columns, ()).double().t() * own.double().unsqueeze(1)
        error = float((form.linear(x, weights[0], None, rows, ()).double() - sums).norm() / sums.norm())
        del sums
        y, by_token = product(small, weights[0][2], None, rows), own.unsqueeze(1)
        times = {
            "bfloat16": in_graph(lambda x=x: [F.linear(x, w) for w in dense]),
            "2:4 bfloat16": in_graph(lambda x=x: [plain.linear(x, w, None, rows, ()) for w in half]),
            "one": in_graph(lambda x=small: [dense_fp8(x, w, one, one) for w in eights]),
            "rows": in_graph(lambda x=small, own=by_token: [dense_fp8(x, w, own, ones) for w in eights]),
            "ours": in_graph(lambda x=small: [product(x, w[2], None, rows) for w in weights]),
            "rounding": in_graph(lambda x=x: [rounded(x, len(x)) for _ in weights]),
            "scaling": in_graph(lambda y=y, own=own: [scaled_(y, own, scales, None) for _ in weights]),
            "call rows": in_graph(lambda x=x: [dense_call(x, w, ones) for w in eights]),
            "call ours": in_graph(lambda x=x: [form.linear(x, w, None, rows, ()) for w in weights]),
        }
        over = min(times["one"], times["rows"]) / times["ours"]
        cells = [f"{times[name]:.1f}" for name in times]
        ratios = [f"{over:.2f}x", f"{FLOAT8_GOAL}x", verdict(over >= FLOAT8_GOAL)]
        ratios += [f"{times[name] / times['call ours']:.2f}x" for name in ("call rows", "bfloat16")]
        lines.append([str(tokens), *cells, *ratios, f"{error:.1e}"])
    names = ("dense bf16", "2:4 bf16", "fp8, one scale", "fp8, row scales", "2:4 fp8", "rounding", "scaling")
    calls = ("call: fp8, row scales", "2:4 fp8")
    header = ("tokens", *names, *calls, "product over fp8", "goal", "", "call over fp8", "over bf16", "error")
    show(f"{rows}x{columns}, us in a CUDA graph, weights from memory", header, lines)


def host(calls: int = 300) -> None:
    """The host's microseconds for an eager call, the best of seven rounds."""
    x, weight = torch.randn(1, 1024, device="cuda", dtype=HALF), two_of_four(1024, 1024)
    runs: dict[str, Callable[[], Any]] = {"F.linear": lambda: F.linear(x, weight)}
    for text in ("", "int8", "int4/128"):
        form, held = packed(text, options_of(text), weight)
        runs[f"2:4 {text or 'bfloat16, staged'}"] = lambda form=form, held=held, text=text: form.linear(
            x, held, None, 1024, options_of(text)
        )
    rows = []
    for name, run in runs.items():
        best = float("inf")
        for _ in range(7):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                run()
            best = min(best, (time.perf_counter() - begin) / calls)
        rows.append([name, f"{best * 1e6:.1f}"])
    show("Host time of an eager call, 1024x1024, 1 token", ("", "us"), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--shapes", nargs="*", default=["14336x4096", "28672x8192"])
    parser.add_argument("--many", nargs="*", default=["4096x4096", "14336x4096"], help="shapes for many tokens in float8")
    args = parser.parse_args()
    torch.manual_seed(0)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}")
    with torch.no_grad():
        check()
        for shape in args.shapes:
            layer(*map(int, shape.split("x")))
        for shape in args.many:
            many(*map(int, shape.split("x")))
        host()


if __name__ == "__main__":
    main()
