"""Perplexity of stories15M after one-shot pruning of the seven linear layers of each block: magnitude, Wanda and SparseGPT.

    python benchmarks/oneshot_lm.py --models DIR [--seed 0] [--calibration 128] [--evaluate 150]

DIR holds `stories15m/` (config.json, model.safetensors: a Llama of 15 M parameters trained on TinyStories) and
`text/tinystories_tokens.npz` (`ids`: all stories, one after the other, each with BOS first; `offsets`: where each begins, and
the end). The last 150 stories are evaluated; the calibration stories are drawn from the others. Embedding and output stay
dense.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from pathlib import Path

import numpy
from _bench import machine, show
from gate_stories import EVALUATED, LAYERS, load, perplexity, stories

import secateur as sc

METHODS = {
    "magnitude": {"criterion": sc.magnitude, "scope": "tensor"},
    "Wanda": {"criterion": sc.wanda, "scope": "row"},
    "SparseGPT": {"scope": "tensor", "method": sc.methods.sparsegpt()},
}
BUDGETS = {"50 %": {"sparsity": 0.5}, "2:4": {"pattern": "2:4"}}


def main(models: Path, seed: int, calibration: int, evaluate: int) -> None:
    folder, tokens = models / "stories15m", models / "text" / "tinystories_tokens.npz"
    if missing := [str(p) for p in (folder / "config.json", folder / "model.safetensors", tokens) if not p.exists()]:
        sys.exit(f"not there: {', '.join(missing)}\n{__doc__}")
    print(machine())
    dense, texts = load(folder), stories(tokens)
    drawn = numpy.random.default_rng(seed).choice(len(texts) - EVALUATED, calibration, replace=False)
    data, judged = [texts[i][None] for i in drawn], texts[-EVALUATED:][:evaluate]
    base = perplexity(dense, judged)
    rows = [("dense", "", f"{base:.3f}", "", "", "")]
    for name, how in METHODS.items():
        for budget, amount in BUDGETS.items():
            model, options = copy.deepcopy(dense), {**how, **amount}
            if "pattern" in amount:
                options.pop("scope")
            begin = time.perf_counter()
            plan = sc.prune_(model, **options, include=LAYERS, data=data)
            took, found = time.perf_counter() - begin, perplexity(model, judged)
            zeros = plan.metrics()["sparsity"]
            rows.append((name, budget, f"{found:.3f}", f"{found / base:.3f}x", f"{zeros:.2%}", f"{took:.1f} s"))
            print(".", end="", file=sys.stderr, flush=True)
    title = f"stories15M, {calibration} calibration stories (seed {seed}), perplexity on {len(judged)} others"
    show(title, ("method", "pruned", "perplexity", "to dense", "zeros", "to prune"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=int, default=128)
    parser.add_argument("--evaluate", type=int, default=EVALUATED)
    main(**vars(parser.parse_args()))
