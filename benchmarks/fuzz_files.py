"""Damaged files: how many of N mutated ones are refused in words, and whether any crashes, hangs or asks for much memory.

    python benchmarks/fuzz_files.py [N=10000] [seed=0]

Tiny models are saved (dense, packed, cut, without blocks, compressed), one or both of their files are mutated (bits, bytes,
pieces cut out, doubled or moved, numbers in the JSON replaced by absurd ones; half of the time with digests made right again),
loaded into a model, and run. With the old digests nothing may load; with new ones only the checks behind them are left.
"""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
import resource
import struct
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import secateur as sc
from secateur import io
from secateur.execute import Compressed
from secateur.execute.formats import FORMATS
from secateur.surgery import shrink

ABSURD = [
    "-1",
    "0",
    "1",
    "7",
    "4294967296",
    "9223372036854775807",
    "1e308",
    "null",
    '"x"',
    "[]",
    "{}",
    "true",
    "99999999999999999999",
]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def build() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Sequential(Block(), Block(), Block()), nn.Linear(4, 300)).eval()


def compressed(pruned: nn.Module) -> nn.Module:
    model = copy.deepcopy(pruned)
    model[0] = Compressed(model[0], FORMATS["tiled"], (1,))
    model[1][0].up = Compressed(model[1][0].up, FORMATS["panels"], (8,), store=torch.bfloat16)
    model[2] = Compressed(model[2], FORMATS["gather"], ())
    return model


def originals(folder: Path) -> list[tuple[nn.Module, dict[str, bytes]]]:
    x = torch.randn(2, 3)
    pruned = build()
    sc.prune_(pruned, sparsity=0.9)
    models = [build(), pruned, shrink(build(), x, channels=0.5)[0], shrink(build(), x, depth=0.67)[0], compressed(pruned)]
    found = []
    for i, model in enumerate(models):
        io.save(model, folder / str(i), packed=i == 1)
        found.append((model, {p.name: p.read_bytes() for p in (folder / str(i)).iterdir()}))
    return found


def mutate(data: bytes, rng: random.Random) -> bytes:
    kind = rng.randrange(7)
    a, b = sorted(rng.randrange(len(data) + 1) for _ in range(2))
    if kind == 0:
        at = rng.randrange(len(data))
        return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]
    if kind == 1:
        return data[:a] + rng.randbytes(min(b - a, 16)) + data[a + min(b - a, 16) :]
    if kind == 2:
        return data[:a]
    if kind == 3:
        return data[:a] + data[b:]
    if kind == 4:
        return data[:b] + data[a:b] + data[b:]
    if kind == 5:
        return data + rng.randbytes(rng.randrange(1, 64))
    numbers = list(re.finditer(rb"(?<=[\[:, \"-])\d+(?=[\],}\"-])", data))
    if not numbers:
        return data[:a]
    hit = rng.choice(numbers)
    return data[: hit.start()] + rng.choice(ABSURD).encode() + data[hit.end() :]


def resign(files: dict[str, bytes]) -> dict[str, bytes]:
    """Digests that fit what is there, so that only the checks behind them are left."""
    tensors, text = files["model.safetensors"], files["secateur.json"]
    try:
        data = json.loads(text)
        data.pop("sha256", None)
        (length,) = struct.unpack("<Q", tensors[:8])
        data["file"]["bytes"], data["file"]["header"] = len(tensors), hashlib.sha256(tensors[: 8 + length]).hexdigest()
        header = json.loads(tensors[8 : 8 + length])
        for name, entry in data["tensors"].items():
            parts = [name] if entry["format"] == "dense" else [name + p for p in ("#bitmask", "#values", "#shape")]
            spans = [header[part]["data_offsets"] for part in parts]
            entry["sha256"] = [hashlib.sha256(tensors[8 + length + s : 8 + length + e]).hexdigest() for s, e in spans]
    except Exception:
        return files
    body = json.dumps(data, indent=1).removesuffix("\n}").encode()
    signed = body + b',\n "sha256": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'
    return {**files, "secateur.json": signed}


def fuzz(count: int, seed: int = 0) -> tuple[Counter[str], float]:
    """What happened, by kind, and the longest load in seconds."""
    rng, seen, longest = random.Random(seed), Counter(), 0.0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        saved = originals(folder)
        while sum(seen.values()) < count:
            model, files = rng.choice(saved)
            signed = rng.random() < 0.5
            hit = rng.choice([["model.safetensors"], ["secateur.json"], ["model.safetensors", "secateur.json"]])
            new = {n: mutate(data, rng) if n in hit else data for n, data in files.items()}
            new = resign(new) if signed else new
            if new == files:
                continue
            for n, data in new.items():
                (folder / n).write_bytes(data)
            target = build()
            before = copy.deepcopy(target.state_dict())
            begin = time.perf_counter()
            try:
                back = io.load(folder, target, as_=rng.choice([None, None, "dense"]))
                back(torch.ones(2, 3))
                back = sc.decompress_(back).state_dict()
            except ValueError as error:
                after = target.state_dict()
                untouched = before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)
                words = len(str(error)) > 10
                seen["refused" if untouched and words else "WRONG: refused, but the model was touched"] += 1
            except Exception as error:
                seen[f"WRONG: {type(error).__name__}: {error}"[:150]] += 1
            else:
                whole = sc.decompress_(copy.deepcopy(model)).state_dict()
                equal = back.keys() == whole.keys() and all(torch.equal(back[k], whole[k]) for k in back)
                kind = "loaded, digests made right: what was saved" if equal else "loaded, digests made right: other values"
                seen[kind if signed else "WRONG: damage that was not noticed"] += 1
            longest = max(longest, time.perf_counter() - begin)
    return seen, longest


if __name__ == "__main__":
    count, seed = (int(v) for v in (sys.argv[1:] + ["10000", "0"][len(sys.argv) - 1 :])[:2])
    torch.set_num_threads(1)
    fuzz(20, seed)
    limit = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start = time.perf_counter()
    seen, longest = fuzz(count, seed)
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - limit) / 1024
    for kind, number in seen.most_common():
        print(f"{number:8,}  {kind}")
    took = time.perf_counter() - start
    print(f"{sum(seen.values()):8,}  in all, {took:.0f} s; the longest load {longest * 1e3:.0f} ms; memory +{grown:.0f} MiB")
    sys.exit(any(kind.startswith("WRONG") for kind in seen))
