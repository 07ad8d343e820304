"""One-shot pruning on a GPU: the solver on layers of Llama-3-8B shapes, the walk through a folder, and `generate` afterwards.

    python benchmarks/oneshot_gpu.py [solver] [walk] [generate] [--profile]

Weights are random. `solver`: Gram matrices are made before the clock starts, one for each distinct input of a block, as the
walk passes them. `walk`: 128 x 2,048 tokens, from a folder of safetensors files to another one; a few blocks of 32, and the
time of one block says what 32 would take; the first two, which compile kernels and allocate pinned memory, count once.
`generate`: that of Hugging Face, static cache, dense against 2:4 by "flow" in compressed layers, bfloat16 and in fewer bits,
in turns; `same tokens` compares 16 tokens with the decompressed model.
"""

from __future__ import annotations

import argparse
import copy
import gc
import logging
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _bench import show, verdict
from torch import Tensor

import secateur as sc
from secateur.methods import Amount, LayerProblem, Method, Solution
from secateur.patterns import Pattern
from secateur.scores import Scores

BUDGETS = {"2:4": (Pattern.parse("2:4"), Amount()), "50 %": (Pattern(), Amount(sparsity=0.5))}
STAGES = (  # the number of inputs, and the outputs of the layers that read them
    (4096, (4096, 1024, 1024)),  # q, k, v
    (4096, (4096,)),  # o
    (4096, (14336, 14336)),  # gate, up
    (14336, (4096,)),  # down
)


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = run()
    torch.cuda.synchronize()
    return result, time.perf_counter() - begin


# ---------------------------------------------------------------- the solver


def moments(columns: int, tokens: int, seed: int) -> tuple[Tensor, Tensor]:
    """H and C of correlated inputs with outlier channels."""
    draw = torch.Generator("cuda").manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, device="cuda")

    scale, mix = torch.exp(0.7 * normal(columns)), normal(columns, columns // 4) / columns**0.5
    H, C = (torch.zeros(columns, columns, dtype=torch.float64, device="cuda") for _ in range(2))
    for _ in range(tokens // 4096):
        x = ((normal(4096, columns // 4) @ mix.T + normal(4096, columns)) * scale).bfloat16().float()
        H += x.T @ x
        C += (x + 0.1 * scale * normal(4096, columns)).T @ x
    return H.float(), C.float()


def problem(rows: int, H: Tensor, C: Tensor, residual: bool) -> LayerProblem:
    columns = H.shape[0]
    W = (torch.randn(rows, columns, device="cuda") / columns**0.5).bfloat16()
    D = 0.01 * torch.randn(rows, columns, device="cuda") * H.diagonal().sqrt() if residual else None
    return LayerProblem("layer", W, H=H, C=C, D=D, scores=Scores.magnitude(W))


def error(one: LayerProblem, V: Tensor | None) -> float:
    """The squared error of the outputs over the squared outputs."""
    assert one.H is not None
    assert V is not None
    away, W = (V - one.W).float(), one.W.float()
    top, whole = (sum(float(((a @ one.H) * a).sum()) for a in matrix.split(1024)) for matrix in (away, W))
    return top / whole


def solved(method: Method, problems: list[LayerProblem], budget: tuple[Pattern, Amount]) -> tuple[list[Solution], float]:
    """Solutions of layers that read the same input, and the seconds they took. Nothing is known of that input before."""
    assert problems[0].H is not None
    H = problems[0].H.clone()
    fresh = [replace(one, H=H) for one in problems]
    return timed(lambda: [method.solve(one, *budget, None) for one in fresh])


def solver(tokens: int, blocks: int) -> None:
    H, C = moments(14336, tokens, 0)
    one = problem(4096, H, C, True)
    methods: dict[str, Method] = {
        "admm": sc.methods.admm(),
        "flow": sc.methods.admm(target=sc.methods.flow()),
        "topk": sc.methods.topk(),
        "sparsegpt": sc.methods.sparsegpt(),
    }
    rows = []
    for label, budget in BUDGETS.items():
        for name, method in methods.items():
            solved(method, [one], budget)  # the first call builds kernels and workspaces
            torch.cuda.reset_peak_memory_stats()
            base = torch.cuda.memory_allocated()
            (found,), took = solved(method, [one], budget)
            peak = (torch.cuda.max_memory_allocated() - base) / 1e9
            goal = ("0.4 s", verdict(took <= 0.4)) if name in ("admm", "flow") else ("", "")
            rows.append([label, name, f"{took:.3f} s", *goal, f"{error(one, found.weight):.5f}", f"{peak:.1f} GB"])
    show("one layer of 4096 x 14336", ("", "method", "time", "goal", "", "error", "memory"), rows)
    del H, C, one
    torch.cuda.empty_cache()
    rows, flow = [], methods["flow"]
    for label, budget in BUDGETS.items():
        times = []
        for block in range(blocks):
            parts = []
            for columns, outputs in STAGES:
                H, C = moments(columns, min(tokens, 16384), block)
                ones = [problem(out, H, C, len(outputs) == 1) for out in outputs]
                parts.append(solved(flow, ones, budget)[1])
            times.append(parts)
        mean = [statistics.mean(column) for column in zip(*times[1:], strict=True)]
        rows.append([label, f"{sum(mean):.3f} s", "1.2 s", verdict(sum(mean) <= 1.2), ", ".join(f"{t:.3f}" for t in mean)])
    show("flow, the seven layers of a block (the first block left out)", ("", "time", "goal", "", "stages"), rows)


# ---------------------------------------------------------------- the walk


def llama(depth: int) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=depth,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )


def built(config: Any) -> Any:
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(torch.float32)


class Seconds(logging.Handler):
    """Collects the time of each block from the log of the walk."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[float] = []
        self._last = time.perf_counter()

    def emit(self, record: logging.LogRecord) -> None:
        if record.msg.startswith("solved"):
            now = time.perf_counter()
            self.blocks.append(now - self._last)
            self._last = now


def walk(depth: int, folder: Path, profile: bool) -> None:
    from transformers import LlamaForCausalLM

    config = llama(depth)
    built(config).save_pretrained(folder / "dense", max_shard_size="2GB")
    gc.collect()
    torch.cuda.empty_cache()
    data = [{"input_ids": torch.randint(0, 32000, (8, 2048))} for _ in range(16)]
    rows = []
    for name, how in {"2:4": {"pattern": "2:4"}, "50 %": {"sparsity": 0.5}}.items():
        torch.cuda.reset_peak_memory_stats()
        times = Seconds()
        logger = logging.getLogger("secateur")
        logger.setLevel(logging.INFO)
        logger.addHandler(times)
        recorder: Any = torch.profiler.profile() if profile else nullcontext()
        with recorder:
            sc.prune_folder(
                folder / "dense",
                folder / name[:2],
                **how,
                method="flow",
                data=data,
                into=lambda: LlamaForCausalLM(config),
                exclude="lm_head",
                device="cuda",
            )
        logger.removeHandler(times)
        if profile:
            print(recorder.key_averages().table(sort_by="cuda_time_total", row_limit=25, max_name_column_width=60))
            print(recorder.key_averages().table(sort_by="cpu_time_total", row_limit=25, max_name_column_width=60))
        block = statistics.mean(times.blocks[2:])
        peak, host = torch.cuda.max_memory_allocated() / 1e9, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        each = ", ".join(f"{t:.2f}" for t in times.blocks)
        good = verdict(block <= 4), verdict(peak <= 10)
        whole = f"{sum(times.blocks[:2]) + 30 * block:.0f} s"
        rows.append([name, f"{block:.2f} s", "4 s", good[0], f"{peak:.2f} GB", "10 GB", good[1], f"{host:.1f} GB", whole, each])
    header = ("", "a block", "goal", "", "on the device", "goal", "", "host (peak)", "32 blocks, extrapolated", "each block")
    show(f"flow from a folder, {depth} blocks, 128 x 2,048 tokens", header, rows)


# ---------------------------------------------------------------- generate


KINDS: dict[str, tuple[dict[str, Any], float]] = {  # arguments of compress_, and the goal over dense
    "2:4": ({}, 1.3),
    "2:4 int8": ({"values": "int8"}, 1.6),
    "2:4 int4/64": ({"values": "int4", "group": 64}, 1.8),
}


def generate(depth: int, tokens: int) -> None:
    model = built(llama(depth))
    data = [{"input_ids": torch.randint(0, 32000, (4, 512), device="cuda")} for _ in range(4)]
    plan, took = timed(lambda: sc.prune_(model, method="flow", pattern="2:4", data=data, exclude="lm_head"))
    print(f"pruned in {took:.0f} s: {plan.metrics()['sparsity']:.1%} zeros", flush=True)
    models, token = {"dense": model}, {"input_ids": torch.ones(1, 1, dtype=torch.long, device="cuda")}
    prompt, rows = torch.randint(0, 32000, (1, 16), device="cuda"), {"dense": ["", "", ""]}
    for name, (how, _) in KINDS.items():
        models[name] = copy.deepcopy(model)
        result, took = timed(lambda name=name, how=how: sc.compress_(models[name], token, **how))
        alone = sc.decompress_(copy.deepcopy(models[name]))
        few = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False}
        first, second = (each.generate(prompt, **few) for each in (models[name], alone))
        same = float((first == second)[:, prompt.shape[1] :].float().mean())
        rows[name] = [f"{took:.0f} s", f"{sum(row.after for row in result.rows) / 1e9:.2f} GB", f"{same:.0%}"]
        del alone

    def run(each: Any, **more: Any) -> Callable[[], Tensor]:
        how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, **more}
        return lambda: each.generate(prompt, **how)

    speeds = []
    for more in ({"cache_implementation": "static"}, {}):  # compiled into graphs; eager
        runs = {name: run(each, **more) for name, each in models.items()}
        for one in runs.values():  # the first calls compile
            one()
            one()
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(5 if more else 2):
            for name, one in runs.items():
                times[name].append(timed(one)[1])
        speeds.append({name: tokens / min(each) for name, each in times.items()})
    table = []
    for name in models:
        graph, eager = (each[name] / each["dense"] for each in speeds)
        goal = KINDS[name][1] if name in KINDS else 0.0
        judged = [f"{goal:.2f}x", verdict(graph >= goal)] if goal else ["", ""]
        each = [f"{speeds[0][name]:.0f}", f"{graph:.2f}x", *judged, f"{speeds[1][name]:.1f}", f"{eager:.2f}x"]
        table.append([name, *each, *rows[name]])
    header = (
        "",
        "static cache",
        "over dense",
        "goal",
        "",
        "eager",
        "over dense",
        "compress_",
        "weights",
        "tokens as decompressed",
    )
    show(f"generate, {depth} layers, tokens a second", header, table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("parts", nargs="*", default=["solver", "walk", "generate"], help="solver, walk, generate")
    parser.add_argument("--tokens", type=int, default=32768, help="for the Gram matrices of the solver")
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--layers", type=int, default=16, help="of the model that generates")
    parser.add_argument("--profile", action="store_true", help="print what the walk spends its time on")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    if "solver" in args.parts:
        solver(args.tokens, args.blocks)
    if "walk" in args.parts:
        with tempfile.TemporaryDirectory() as folder:
            walk(args.blocks, Path(folder), args.profile)
    if "generate" in args.parts:
        generate(args.layers, 128)


if __name__ == "__main__":
    main()
