"""Perplexity of a real language model after one-shot pruning of the linear layers of its blocks, next to what pruning costs.

    python benchmarks/oneshot_lm.py --models DIR [--model stories15m|smollm2] [--rows NAME ...] [--patterns NAME ...] [--seed 0]

DIR holds `stories15m/` or `smollm2/` (config.json, model.safetensors: Llamas of 15 M and 135 M parameters) and `text/`.
stories15m is calibrated on 128 stories and evaluated on the last 150 of `text/tinystories_tokens.npz` (`ids`: all stories, one
after the other, each with BOS first; `offsets`: where each begins, and the end). smollm2 is calibrated on sequences of 256
tokens from the first half of `text/wikitext2_raw_test.txt` and evaluated on 16 from the second half; it needs `tokenizers`.
Embedding and output stay dense. Times are processor seconds of this process, with the first call's imports made before.
"""

from __future__ import annotations

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate_stories
import numpy
import torch
from _bench import machine, show
from gate_stories import EVALUATED, LAYERS, perplexity, stories
from torch import Tensor, nn

import secateur as sc

PATTERNS: dict[str, dict[str, Any]] = {
    "50%": {"sparsity": 0.5},
    "60%": {"sparsity": 0.6},
    "70%": {"sparsity": 0.7},
    "2:4": {"pattern": "2:4"},
    "4:8": {"pattern": "4:8"},
}
ROWS: dict[str, dict[str, Any]] = {
    "magnitude": {"criterion": sc.magnitude},
    "Wanda": {"criterion": sc.wanda, "scope": "row"},
    "SparseGPT": {"method": "sparsegpt"},
    "Wanda + refit": {"criterion": sc.wanda, "scope": "row", "method": sc.methods.topk()},
    "ADMM": {"method": "admm"},
    "flow": {"method": "flow"},
    "loss": {"method": "loss"},
    "loss + distill_": {"method": "loss", "distill": True},
}


class Decoder(gate_stories.Llama):
    """The model with the arguments of Hugging Face. Right padding does not change what causal attention computes before it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)


def batches(sequences: list[Tensor], size: int = 16) -> list[dict[str, Tensor]]:
    """Batches of sequences of similar length, padded on the right."""
    ordered, made = sorted(sequences, key=len), []
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
        there = torch.arange(ids.shape[1]) < torch.tensor([len(each) for each in part])[:, None]
        made.append({"input_ids": ids, "attention_mask": there.long()})
    return made


def read_stories(models: Path, seed: int, calibration: int, evaluate: int) -> tuple[list[Tensor], list[Tensor]]:
    texts = stories(models / "text" / "tinystories_tokens.npz")
    drawn = numpy.random.default_rng(seed).choice(len(texts) - EVALUATED, calibration, replace=False)
    return [texts[i] for i in drawn], texts[-EVALUATED:][:evaluate]


def read_wikitext(models: Path, seed: int, calibration: int, evaluate: int) -> tuple[list[Tensor], list[Tensor]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(models / "smollm2" / "tokenizer.json"))
    text = (models / "text" / "wikitext2_raw_test.txt").read_text(encoding="utf-8")
    ids = torch.tensor(tokenizer.encode(text).ids)
    first, second = (half[: len(half) // 256 * 256].view(-1, 256) for half in ids.chunk(2))
    drawn = numpy.random.default_rng(seed).choice(len(first), calibration, replace=False)
    return [first[i] for i in drawn], list(second[: min(evaluate, 16)])


READERS: dict[str, Callable[..., tuple[list[Tensor], list[Tensor]]]] = {"stories15m": read_stories, "smollm2": read_wikitext}


def prune(dense: nn.Module, how: dict[str, Any], amount: dict[str, Any], data: list[Any]) -> tuple[nn.Module, sc.Plan, float]:
    """A pruned copy, its plan, and the processor seconds that took."""
    model, options = copy.deepcopy(dense), {**how, **amount}
    distill = options.pop("distill", False)
    if "pattern" in amount:
        options.pop("scope", None)
    begin = time.process_time()
    plan = sc.prune_(model, **options, include=LAYERS, data=data)
    if distill:
        sc.distill_(model, dense, data)
    return model, plan, time.process_time() - begin


def main(
    models: Path, model: str, rows: list[str], patterns: list[str], seed: int, calibration: int, evaluate: int, size: int
) -> None:
    folder = models / model
    if missing := [str(p) for p in (folder / "config.json", folder / "model.safetensors", models / "text") if not p.exists()]:
        sys.exit(f"not there: {', '.join(missing)}\n{__doc__}")
    print(machine())
    gate_stories.Llama = Decoder
    dense = gate_stories.load(folder)
    calibrated, judged = READERS[model](models, seed, calibration, evaluate)
    data = batches(calibrated, size)
    prune(dense, ROWS["SparseGPT"], PATTERNS["2:4"], [{k: v[:1, :16] for k, v in data[-1].items()}])  # imports, compiled loops
    base = perplexity(dense, judged)
    table = [("dense", "", f"{base:.3f}", "", "", "", "")]
    for name in patterns:
        reference = None
        for row in rows:
            pruned, plan, took = prune(dense, ROWS[row], PATTERNS[name], data)
            reference = took if row == "SparseGPT" else reference
            found, zeros = perplexity(pruned, judged), plan.metrics()["sparsity"]
            ratio = f"{took / reference:.2f}x" if reference else ""
            table.append((row, name, f"{found:.3f}", f"{found / base:.3f}x", f"{zeros:.2%}", f"{took:.1f} s", ratio))
            print(f"{row}, {name}: {found:.3f}, {took:.1f} s", file=sys.stderr, flush=True)
    tokens = sum(map(len, calibrated))
    title = f"{model}, {calibration} calibration sequences (seed {seed}, {tokens:,} tokens), perplexity on {len(judged)} others"
    show(title, ("method", "pruned", "perplexity", "to dense", "zeros", "CPU time", "over SparseGPT"), table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--model", choices=READERS, default="stories15m")
    for option, known in (("--rows", ROWS), ("--patterns", PATTERNS)):
        names = ", ".join(known).replace("%", "%%")
        parser.add_argument(option, nargs="+", choices=known, default=list(known), metavar="NAME", help=f"of {names}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calibration", type=int, default=128, help="calibration sequences")
    parser.add_argument("--evaluate", type=int, default=EVALUATED, help="sequences to evaluate")
    parser.add_argument("--size", type=int, default=16, help="sequences in a batch")
    main(**vars(parser.parse_args()))
