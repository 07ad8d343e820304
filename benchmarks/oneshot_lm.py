"""Perplexity of a real language model after one-shot pruning of the linear layers of its blocks, next to what pruning costs.

    python benchmarks/oneshot_lm.py --models DIR [--model stories15m|smollm2] [--rows NAME ...] [--patterns NAME ...] [--seed 0]
        [--results FILE] [--device cuda] [--blocks N] [--steps 32]

DIR holds `stories15m/` or `smollm2/` (config.json, model.safetensors: Llamas of 15 M and 135 M parameters) and `text/`.
stories15m is calibrated on 128 stories and evaluated on the last 150 of `text/tinystories_tokens.npz` (`ids`: all stories, one
after the other, each with BOS first; `offsets`: where each begins, and the end). smollm2 is calibrated on sequences of 256
tokens from the first half of `text/wikitext2_raw_test.txt` and evaluated on 16 from the second half; it needs `tokenizers`.
Embedding and output stay dense. Times are processor seconds of this process (seconds with --device cuda), with the first call's
imports made before. "SparseGPT, plain" is plain_sparsegpt.py: float32, and each block runs twice, as in the published code. The
dense model of `distill_` is the model before pruning, and its batches have 8 sequences.

With --results, each row is appended to FILE as a line of JSON when it is done. Rows that FILE has are not computed again, so a
run that was interrupted goes on where it was, several commands can share the rows, and the table shows all of them.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gate_stories
import numpy
import plain_sparsegpt
import torch
import torch.nn.functional as F
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
PLAIN = "SparseGPT, plain"
STEPS = 32  # of `distill_`
ROWS: dict[str, dict[str, Any]] = {
    "magnitude": {"criterion": sc.magnitude},
    "Wanda": {"criterion": sc.wanda, "scope": "row"},
    "SparseGPT": {"method": "sparsegpt"},
    PLAIN: {},
    "Wanda + refit": {"criterion": sc.wanda, "scope": "row", "method": sc.methods.topk()},
    "ADMM": {"method": "admm"},
    "flow": {"method": "flow"},
    "flow, old order": {"method": "flow(reorder=False)"},
    "loss": {"method": "loss"},
    "loss + distill_": {"method": "loss", "distill": True},
}


class Cache:
    """The keys and values of one layer for all tokens so far, in tensors with room for `length` of them."""

    def __init__(self, length: int) -> None:
        self.length, self.held = length, dict[str, Tensor]()

    def put(self, name: str, at: int, new: Tensor) -> Tensor:
        """Writes the values of tokens from `at` on, and returns those of all."""
        end = at + new.shape[2]
        held = self.held.setdefault(name, new.new_empty(*new.shape[:2], self.length, new.shape[3]))
        held[:, :, at:end] = new
        return held[:, :, :end]


def attend(layer: gate_stories.Attention, x: Tensor, cos: Tensor, sin: Tensor, cache: Cache, at: int) -> Tensor:
    """The output of an attention layer for the tokens from `at` on."""
    q, k, v = (y.unflatten(-1, (-1, layer.each)).transpose(1, 2) for y in (layer.q_proj(x), layer.k_proj(x), layer.v_proj(x)))
    q, k = (y * cos + torch.cat((-y.chunk(2, -1)[1], y.chunk(2, -1)[0]), -1) * sin for y in (q, k))
    q = q.to(v.dtype)
    k, v = cache.put("k", at, k.to(v.dtype)), cache.put("v", at, v)
    if at == 0:
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=k.shape[1] != q.shape[1])
    else:  # one token, for which torch's attention takes seven times as long on a CPU; query heads that share keys are rows
        rows = q.reshape(len(q), k.shape[1], -1, layer.each)
        mixed = ((rows @ k.mT * layer.each**-0.5).softmax(-1).to(v.dtype) @ v).reshape(q.shape)
    return layer.o_proj(mixed.transpose(1, 2).flatten(2))


PART = 200  # classes whose probabilities are added up first


def draw(p: Tensor) -> Tensor:
    """One class for each row of probabilities, drawn in two steps, which takes less time than one sum over all classes."""
    p = F.pad(p, (0, -p.shape[1] % PART)).unflatten(1, (-1, PART))
    sums = p.sum(2).cumsum(1)
    at = torch.searchsorted(sums, torch.rand_like(sums[:, :1]) * sums[:, -1:], right=True).clamp_max(sums.shape[1] - 1)
    inside = p[torch.arange(len(p), device=p.device)[:, None], at].squeeze(1).cumsum(1)
    place = torch.searchsorted(inside, torch.rand_like(sums[:, :1]) * inside[:, -1:], right=True).clamp_max(PART - 1)
    return at * PART + place


class Decoder(gate_stories.Llama):
    """The model with the arguments of Hugging Face. Right padding does not change what causal attention computes before it."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        return super().forward(input_ids)

    @torch.no_grad()
    def generate(self, input_ids: Tensor, max_new_tokens: int, **_: Any) -> Tensor:
        """Draws tokens from the model's distribution, with keys and values of earlier tokens kept."""
        text, at, length = input_ids, 0, input_ids.shape[1] + max_new_tokens
        speeds = self.theta ** (-torch.arange(0, self.each, 2, device=text.device) / self.each)
        angles = torch.outer(torch.arange(length, device=text.device), speeds).repeat(1, 2)
        caches = [Cache(length) for _ in self.layers]
        while True:
            x = self.embed_tokens(text[:, at:])
            turned = angles[at : text.shape[1]].cos(), angles[at : text.shape[1]].sin()
            for block, cache in zip(self.layers, caches, strict=True):
                x = x + attend(block.self_attn, block.input_layernorm(x), *turned, cache, at)
                x = x + block.mlp(block.post_attention_layernorm(x))
            at = text.shape[1]
            logits = F.linear(self.norm(x[:, -1]), self.embed_tokens.weight)
            text = torch.cat([text, draw(logits.softmax(-1, dtype=torch.float32))], 1)
            if text.shape[1] == length:
                return text


def batches(sequences: list[Tensor], size: int = 16) -> list[dict[str, Tensor]]:
    """Batches of sequences of similar length, padded on the right."""
    ordered, made = sorted(sequences, key=len), []
    for first in range(0, len(ordered), size):
        part = ordered[first : first + size]
        ids = nn.utils.rnn.pad_sequence(part, batch_first=True)
        there = torch.arange(ids.shape[1]) < torch.tensor([len(each) for each in part])[:, None]
        there = there.to(ids.device)
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


def seconds(device: torch.device) -> float:
    if device.type != "cuda":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


class Bench:
    """Prunes copies of a dense model and evaluates them. `small`: the same sequences as `data`, in batches for `distill_`."""

    def __init__(self, dense: nn.Module, data: list[Any], small: list[Any], judged: list[Tensor], steps: int = STEPS) -> None:
        self.dense, self.data, self.small, self.judged, self.steps = dense, data, small, judged, steps
        self._last: tuple[Any, ...] = ()

    def prune(self, row: str, name: str) -> tuple[nn.Module, float]:
        """A pruned copy, and the seconds that took. `distill_` goes on from the copy of the row before, where that fits."""
        options = {**ROWS[row], **PATTERNS[name]}
        distill, device = options.pop("distill", False), next(self.dense.parameters()).device
        if "pattern" in PATTERNS[name]:
            options.pop("scope", None)
        if not distill or self._last[:1] != (options,):
            model, begin = copy.deepcopy(self.dense), seconds(device)
            if row == PLAIN:
                plain_sparsegpt.prune_(model, self.data, **PATTERNS[name])
            else:
                sc.prune_(model, **options, include=LAYERS, data=self.data)
            self._last = options, model, seconds(device) - begin
        _, model, took = self._last
        if distill:
            begin, self._last = seconds(device), ()
            sc.distill_(model, self.dense, self.small, steps=self.steps)
            took += seconds(device) - begin
        return model, took

    def measure(self, row: str, name: str) -> dict[str, float]:
        model, took = self.prune(row, name)
        weights = [layer.weight for layer in model.get_submodule("layers").modules() if isinstance(layer, nn.Linear)]
        zeros = sum(int((weight == 0).sum()) for weight in weights) / sum(weight.numel() for weight in weights)
        return {"perplexity": perplexity(model, self.judged), "zeros": zeros, "seconds": took}


class Results:
    """The rows that were measured, by their settings, and the file that they are appended to."""

    def __init__(self, file: Path | None) -> None:
        self.file, self.rows = file, dict[str, dict[str, float]]()
        for line in file.read_text().splitlines() if file is not None and file.exists() else ():
            settings, found = json.loads(line)
            self.rows[json.dumps(settings)] = found

    def get(self, settings: dict[str, Any], compute: Callable[[], dict[str, float]]) -> dict[str, float]:
        """The row with these settings, computed if it is not known."""
        key = json.dumps(settings)
        if key not in self.rows:
            self.rows[key] = compute()
            if self.file is not None:
                with self.file.open("a") as file:
                    print(json.dumps([settings, self.rows[key]]), file=file)
        return self.rows[key]


def main(
    models: Path,
    model: str,
    rows: list[str],
    patterns: list[str],
    seed: int,
    calibration: int,
    evaluate: int,
    size: int,
    results: Path | None,
    device: str,
    blocks: int | None,
    steps: int,
) -> None:
    folder = models / model
    if missing := [str(p) for p in (folder / "config.json", folder / "model.safetensors", models / "text") if not p.exists()]:
        sys.exit(f"not there: {', '.join(missing)}\n{__doc__}")
    print(machine())
    gate_stories.Llama = Decoder
    dense = gate_stories.load(folder)
    dense.layers = dense.layers[:blocks]
    dense = dense.to(device)
    calibrated, judged = READERS[model](models, seed, calibration, evaluate)
    calibrated, judged = [one.to(device) for one in calibrated], [one.to(device) for one in judged]
    data, small = batches(calibrated, size), batches(calibrated, 8)
    first = [{key: value[:1, :16] for key, value in data[-1].items()}]
    Bench(dense, first, first, judged).prune("SparseGPT", "2:4")  # imports, compiled loops
    bench = Bench(dense, data, small, judged, steps)
    known = Results(results)
    common = {
        "model": model,
        "blocks": len(dense.layers),
        "seed": seed,
        "calibration": calibration,
        "size": size,
        "evaluate": len(judged),
        "device": device,
    }
    base = known.get({**common, "row": "dense"}, lambda: {"perplexity": perplexity(dense, judged)})["perplexity"]
    table = [("dense", "", f"{base:.3f}", *[""] * 5)]
    for name in patterns:
        times: dict[str, float] = {}
        for row in rows:
            more = {"steps": steps} if "distill" in ROWS[row] and steps != STEPS else {}
            settings = {**common, "row": row, "pattern": name, **more}
            found = known.get(settings, lambda row=row, name=name: bench.measure(row, name))
            value, took = found["perplexity"], found["seconds"]
            times[row] = took
            ratios = [f"{took / times[other]:.2f}x" if other in times else "" for other in ("SparseGPT", PLAIN)]
            table.append((row, name, f"{value:.3f}", f"{value / base:.3f}x", f"{found['zeros']:.2%}", f"{took:.1f} s", *ratios))
            print(f"{row}, {name}: {value:.3f}, {took:.1f} s", file=sys.stderr, flush=True)
    tokens = sum(map(len, calibrated))
    title = f"{model}, {calibration} calibration sequences (seed {seed}, {tokens:,} tokens), perplexity on {len(judged)} others"
    title += f", {steps} steps of distill_" if any("distill" in ROWS[row] for row in rows) else ""
    show(title, ("method", "pruned", "perplexity", "to dense", "zeros", "time", "over SparseGPT", "over plain"), table)


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
    parser.add_argument("--steps", type=int, default=STEPS, help="steps of distill_")
    parser.add_argument("--results", type=Path, help="file of measured rows, one line of JSON each; it is read and appended to")
    parser.add_argument("--device", default="cpu", help="where the model runs, such as cuda")
    parser.add_argument("--blocks", type=int, help="use so many blocks of the model only, to try a command out")
    main(**vars(parser.parse_args()))
