"""A fifth of the parameters of stories15M taken away without training: perplexity as cut, and with the re-fit.

    python benchmarks/shrink_stories.py MODEL TOKENS

MODEL and TOKENS are those of gate_stories.py. The embedding, which is also the output, is 61 % of the parameters: while it
keeps its shape, a fifth of all is half of the rest. Heads, what is in a head and MLP channels go, or MLP channels only, or the
width of everything and with it that of the embedding, or half of the layers. Perplexity is that of the last 150 stories and of
the 150 before them; calibration takes the first 64 stories that fill the context. The best comes first.
"""

from __future__ import annotations

import sys
import time
from itertools import product
from pathlib import Path
from typing import Any

import torch
from _bench import machine, show
from gate_stories import CALIBRATED, CONTEXT, EVALUATED, load, perplexity, stories

import secateur as sc
from secateur.surgery import Shrunk

REMAINS = 0.8
UNITS = {"params": REMAINS, "exclude": "embed_tokens"}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "reconstruction": (sc.reconstruction, UNITS),
    "reconstruction, MLP only": (sc.reconstruction, {"params": REMAINS, "exclude": ("embed_tokens", "layers.*.self_attn")}),
    "magnitude": (sc.magnitude, UNITS),
    "magnitude, width too": (sc.magnitude, {"params": REMAINS}),
    "depth=0.5": (sc.magnitude, {"depth": 0.5}),
}


def went(plan: Shrunk) -> str:
    """What was cut, by the layer that makes it."""
    counts: dict[str, list[int]] = {}
    for row in plan.groups:
        inner = row.name.rpartition(".")[0].rpartition(".")[2].removesuffix("_proj")
        kind = f"{inner or row.name}{'' if row.name.endswith(']') or not inner else row.name[-2:]}"
        total = counts.setdefault(kind, [0, 0])
        total[0] += row.before - row.after
        total[1] += row.before
    return ", ".join(f"{kind} {gone}/{whole}" for kind, (gone, whole) in counts.items() if gone)


def main(folder: Path, tokens: Path) -> None:
    print(machine())
    model, texts = load(folder), stories(tokens)
    evaluated, before = texts[-EVALUATED:], texts[-2 * EVALUATED : -EVALUATED]
    full = [text for text in texts[: -2 * EVALUATED] if len(text) == CONTEXT][:CALIBRATED]
    data = list(torch.stack(full).split(4))
    rows: list[tuple[float, tuple[str, ...]]] = []
    for (name, (criterion, options)), refit in product(WAYS.items(), (False, True)):
        deep = "depth" in options
        if refit and deep:
            continue  # no layer that stays has lost inputs
        begin = time.perf_counter()
        small, plan = sc.shrink(model, data[0][:1], criterion, data=data[:2] if deep else data, refit=refit, **options)
        took = time.perf_counter() - begin
        found, other = perplexity(small, evaluated), perplexity(small, before)
        how = f"{name}, {'re-fitted' if refit else 'as cut'}"
        cells = (f"{plan.metrics()['params']:.3f}", f"{found:.3f}", f"{other:.3f}", f"{took:.0f} s", went(plan))
        rows.append((found, (how, *cells)))
        print("  ", *rows[-1][1], file=sys.stderr, flush=True)
    dense = ("dense", "1.000", f"{perplexity(model, evaluated):.3f}", f"{perplexity(model, before):.3f}", "", "")
    show(
        f"stories15M, {1 - REMAINS:.0%} of the parameters removed, calibrated on {CALIBRATED} other stories",
        ("how", "parameters", f"last {EVALUATED}", f"{EVALUATED} before", "time", "cut (units of all layers)"),
        [dense, *(row for _, row in sorted(rows))],
    )


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    where, file = Path(sys.argv[1]), Path(sys.argv[2])
    missing = [str(path) for path in (where / "config.json", where / "model.safetensors", file) if not path.exists()]
    sys.exit(f"not there: {', '.join(missing)}\n{__doc__}") if missing else main(where, file)
