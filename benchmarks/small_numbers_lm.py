"""Perplexity and bytes of stories15M with 2:4 zeros, weights in fewer bits, and both, from one solver or one after the other.

    python benchmarks/small_numbers_lm.py --models DIR [--seed 0] [--results FILE]

The models, texts and the file of results are those of `oneshot_lm.py`. "rounded" is rounding to the nearest number after
everything else, "solved" is `method="flow(values=..., group=...)"`. Bytes are those of the linear layers in the blocks: a
weight that is kept takes the bits of its value, and with 2:4 two more for its position; scales take 2 bytes. Every solved
weight is checked to be the same, bit by bit, after rounding as `compress_(values=..., group=...)` does.
"""

from __future__ import annotations

import argparse
import copy
from pathlib import Path
from typing import Any

import gate_stories
import torch
from _bench import machine, show, verdict
from gate_stories import EVALUATED, LAYERS, perplexity
from oneshot_lm import Decoder, Results, batches, read_stories
from torch import nn

import secateur as sc
from secateur.values import Values

SPARSE, WHOLE = {"pattern": "2:4"}, {"sparsity": 0.0}
INT8, INT4 = Values("int8"), Values("int4", 64)
# name, what prune_ gets (None: not pruned), the values, whether the solver knows them, and the goal over 2:4
ROWS: list[tuple[str, dict[str, Any] | None, Values | None, bool, float | None]] = [
    ("dense", None, None, False, None),
    ("dense, rounded", None, INT8, False, None),
    ("dense, rounded", None, INT4, False, None),
    ("dense, solved", WHOLE, INT4, True, None),
    ("2:4", SPARSE, None, False, None),
    ("2:4, rounded", SPARSE, INT8, False, None),
    ("2:4, solved", SPARSE, INT8, True, 1.01),
    ("2:4, rounded", SPARSE, INT4, False, None),
    ("2:4, solved", SPARSE, INT4, True, 1.12),
]


def linears(model: nn.Module) -> list[nn.Linear]:
    return [module for name, module in model.named_modules() if isinstance(module, nn.Linear) and name.startswith("layers.")]


def round_(model: nn.Module, values: Values) -> None:
    for layer in linears(model):
        layer.weight.data = values.dequantize(*values.quantize(layer.weight.data))


def size(model: nn.Module, sparse: bool, values: Values | None) -> int:
    weights = [layer.weight for layer in linears(model)]
    if not sparse and values is None:
        return sum(weight.nbytes for weight in weights)
    bits = 32 if values is None else values.bits
    numbers = sum(weight.numel() for weight in weights)
    scales = 0 if values is None else sum(values.quantize(weight.detach())[1].nbytes for weight in weights)
    return (numbers // 2 * (bits + 2) if sparse else numbers * bits) // 8 + scales


def made(dense: nn.Module, how: dict[str, Any] | None, values: Values | None, solved: bool, data: list[Any]) -> nn.Module:
    model = copy.deepcopy(dense)
    if how is not None:
        method = f"flow(values={values.kind!r}, group={values.group or None})" if solved and values else "flow"
        sc.prune_(model, **how, method=method, include=LAYERS, data=data)
    if values is not None:
        before = [layer.weight.clone() for layer in linears(model)]
        round_(model, values)
        same = all(torch.equal(one, layer.weight) for one, layer in zip(before, linears(model)))
        assert same or not solved, "solved weights changed when they were stored"
    return model


def main(models: Path, seed: int, calibration: int, evaluate: int, results: Path | None) -> None:
    print(machine())
    gate_stories.Llama = Decoder
    dense = gate_stories.load(models / "stories15m")
    calibrated, judged = read_stories(models, seed, calibration, evaluate)
    data, known = batches(calibrated), Results(results)
    table, found = [], dict[str, float]()
    common = {"seed": seed, "calibration": calibration, "evaluate": evaluate}
    for name, how, values, solved, goal in ROWS:

        def compute(how: Any = how, values: Any = values, solved: bool = solved) -> dict[str, float]:
            model = made(dense, how, values, solved, data)
            return {"perplexity": perplexity(model, judged), "bytes": size(model, how is SPARSE, values)}

        row = known.get({"small_numbers": name, "values": str(values), **common}, compute)
        found[f"{name} {values}"] = row["perplexity"]
        ratios = [row["perplexity"] / found[base] if base in found else None for base in ("dense None", "2:4 None")]
        met = verdict(ratios[1] <= goal) if goal and ratios[1] else ""
        shown = [f"{ratio:.3f}x" if ratio else "" for ratio in ratios]
        sizes = f"{row['bytes'] / 1e6:.2f} MB", f"{row['perplexity']:.3f}"
        table.append((name, str(values or "float32"), *sizes, *shown, f"{goal}x" if goal else "", met))
    title = f"stories15m, {calibration} calibration stories (seed {seed}), perplexity on {evaluate} others"
    show(title, ("weights", "values", "bytes", "perplexity", "to dense", "to 2:4", "goal", ""), table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=int, default=128, help="calibration stories")
    parser.add_argument("--evaluate", type=int, default=EVALUATED, help="stories to evaluate")
    parser.add_argument("--results", type=Path, help="file of measured rows, one line of JSON each; it is read and appended to")
    main(**vars(parser.parse_args()))
