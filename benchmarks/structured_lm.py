"""Perplexity of a real language model with a fifth of its parameters removed as whole units, with and without distillation.

    python benchmarks/structured_lm.py --models DIR [--model stories15m|smollm2] [--rows NAME ...] [--device cuda] [--seed 0]

DIR, the models and the texts are those of oneshot_lm.py. Both models have an output layer that is tied to the embedding. The
rows: whole layers, by the change of the output or by what they cost the loss ("obs"); the whole model narrower, by magnitude;
units of all kinds by what they cost the loss, in the given coordinates of the residual stream and in those that `rotate_`
finds; and each of them after `distill_` on the calibration sequences. Times are processor seconds of this process; on a GPU,
seconds.
"""

from __future__ import annotations

import argparse
import copy
import math
import sys
import time
from pathlib import Path
from typing import Any

import gate_stories
import torch
from _bench import machine, show
from gate_stories import EVALUATED, perplexity
from oneshot_lm import READERS, batches
from shrink_stories import went
from torch import Tensor, nn

import secateur as sc

ROWS: dict[str, dict[str, Any]] = {
    "layers": {"depth": True},
    "layers, obs": {"criterion": "obs", "depth": True},
    "magnitude": {"criterion": sc.magnitude},
    "magnitude, re-fitted": {"criterion": sc.magnitude, "refit": True},
    "obs": {"criterion": "obs"},
    "obs, re-fitted": {"criterion": "obs", "refit": True},
    "rotate_ + obs": {"criterion": "obs", "rotate": True},
    "rotate_ + obs, re-fitted": {"criterion": "obs", "rotate": True, "refit": True},
}


class Decoder(gate_stories.Llama):
    """The model with the arguments of Hugging Face, on any device."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        if input_ids.device.type == "cpu":
            return super().forward(input_ids)
        with input_ids.device:
            return super().forward(input_ids)


def clock(device: str) -> float:
    if device == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def layers_left(model: Decoder, remains: float) -> float:
    """The `depth=` that leaves this part of the parameters, as near as whole layers allow."""
    each = sum(p.numel() for p in model.layers[0].parameters())
    gone = round((1 - remains) * sum(p.numel() for p in model.parameters()) / each)
    return 1 - gone / len(model.layers)


def shrunk(
    dense: Decoder, how: dict[str, Any], remains: float, data: list[dict[str, Tensor]], tried: int | None
) -> tuple[nn.Module, Any]:
    options, model = dict(how), dense
    if options.pop("rotate", False):
        model = copy.deepcopy(dense)
        sc.rotate_(model, data=data)
    example = {key: value[:1, :64] for key, value in data[-1].items()}
    target: dict[str, Any] = {"params": remains, "bias": False}
    if options.pop("depth", False):
        target, data = {"depth": layers_left(dense, remains)}, data[-(tried or 0) :]
    return sc.shrink(model, example, options.pop("criterion", sc.magnitude), data=data, **target, **options)


def main(
    models: Path,
    model: str,
    rows: list[str],
    device: str,
    seed: int,
    remains: float,
    calibration: int,
    evaluate: int,
    size: int,
    steps: int,
    lr: float,
    tried: int | None,
) -> None:
    folder = models / model
    if missing := [str(p) for p in (folder / "config.json", folder / "model.safetensors", models / "text") if not p.exists()]:
        sys.exit(f"not there: {', '.join(missing)}\n{__doc__}")
    print(machine())
    gate_stories.Llama = Decoder
    dense: Any = gate_stories.load(folder).to(device)
    calibrated, judged = READERS[model](models, seed, calibration, evaluate)
    data = [{key: value.to(device) for key, value in batch.items()} for batch in batches(calibrated, size)]
    judged = [ids.to(device) for ids in judged]
    base = perplexity(dense, judged)
    table = [("dense", "1.000", f"{base:.3f}", "", "", "", "")]
    for row in rows:
        begin = clock(device)
        try:
            small, plan = shrunk(dense, ROWS[row], remains, data, tried)
        except ValueError as error:  # `rotate_` refuses models whose output layer is tied and whose last norm is uneven
            print(f"{row}: {error}", file=sys.stderr, flush=True)
            table.append((row, "", "refused", "", "", "", ""))
            continue
        cut = clock(device) - begin
        found, after, took = perplexity(small, judged), "", ""
        print(f"{row}: {found:.3f}, {cut:.0f} s", file=sys.stderr, flush=True)
        if steps:
            begin = clock(device)
            result = sc.distill_(small, dense, data, steps=steps, lr=lr)
            after, took = f"{perplexity(small, judged):.3f}", f"{clock(device) - begin:.0f} s"
            print(f"{row} + distill_: {after}, {took}, kept step {result.kept_step}", file=sys.stderr, flush=True)
        table.append((row, f"{plan.metrics()['params']:.3f}", f"{found:.3f}", f"{cut:.0f} s", after, took, went(plan)))
    tokens = sum(map(len, calibrated))
    rate = f"distill_ with {steps} steps at {lr:g}" if steps else "without distill_"
    title = (
        f"{model}, {1 - remains:.0%} of the parameters removed, {calibration} calibration sequences (seed {seed}, {tokens:,} "
        f"tokens), perplexity on {len(judged)} others, {rate}"
    )
    show(title, ("how", "parameters", "perplexity", "time", "distilled", "time", "cut (units of all layers)"), table)
    assert all(row[2] == "refused" or math.isfinite(float(row[2])) for row in table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True)
    parser.add_argument("--model", choices=READERS, default="stories15m")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=f"of {'; '.join(ROWS)}")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--remains", type=float, default=0.8, help="the part of the parameters that remains")
    parser.add_argument("--calibration", type=int, default=128, help="calibration sequences")
    parser.add_argument("--evaluate", type=int, default=EVALUATED, help="sequences to evaluate")
    parser.add_argument("--size", type=int, default=8, help="sequences in a batch")
    parser.add_argument("--steps", type=int, default=32, help="of distill_; 0: none")
    parser.add_argument("--lr", type=float, default=1e-3, help="of distill_")
    parser.add_argument("--tried", type=int, help="batches on which layers are left out in turn; by default all")
    main(**vars(parser.parse_args()))
